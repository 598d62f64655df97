"""A runner that is renewed: for how long its duties rest, and the whole of ``ctl upgrade``."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator

from tests.benchmarks.figures import Figure, Goal
from tests.benchmarks.instances import BIN, UP, BenchmarkSetup
from tests.benchmarks.namespaced_init import cpu_of, memory_of, namespaced_init
from tests.support.renewals import make_program


def renewal(setup: BenchmarkSetup) -> Iterator[Figure]:
    program = make_program(setup.directory / "program")
    spec = setup.spec("renewed")
    pauses: list[float] = []
    whole: list[float] = []
    work: list[float] = []
    digest = program.digest
    with namespaced_init(*setup.runner(spec)) as init:
        init.until(UP)
        before = memory_of(init.pid)["Rss"]
        for generation in range(1, setup.rounds(20, 3) + 1):
            inside = ("nsenter", f"--target={init.pid}", "--pid", "--mount", BIN / "instance-runner", "ctl")
            words = ("--state-dir", setup.directory / "renewed.state", "upgrade")
            begun, ran = time.monotonic(), cpu_of(init.pid)
            argv = (*inside, *words, "--from", program.path, "--digest", digest)
            subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
            whole.append((time.monotonic() - begun) * 1e3)
            found = init.until(f"the runner is renewed generation={generation} ")
            [pause] = re.findall(r"pause=([0-9.]+)s", found.text)
            pauses.append(float(pause) * 1e3)
            work.append((cpu_of(init.pid) - ran) * 1e3)
        after = memory_of(init.pid)["Rss"]
    yield Figure("renewal: the runner's duties rest, ms (the guest's pause: none)", pauses)
    yield Figure("- CPU time of PID 1 for one renewal, ms: no pause is longer on a quiet machine", work, goal=Goal(300))
    yield Figure("- the whole of `ctl upgrade`, with both rehearsals, ms", whole)
    yield Figure("- RSS of PID 1 before the first and after the last, MB", [before, after])
