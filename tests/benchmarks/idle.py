"""Memory, wake-ups and system calls of PID 1 while the guest runs and nothing happens."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

from tests.benchmarks.figures import Figure, Goal
from tests.benchmarks.instances import UP, BenchmarkSetup
from tests.benchmarks.namespaced_init import (
    NamespacedInit,
    below,
    memory_of,
    name_of,
    namespaced_init,
    switches_of,
    threads_of,
)

SETTLED = 1.0
"""Seconds from the guest's first output until the start of every process is over."""

ATTACHED = 0.5
"""Seconds at the beginning of a trace that do not count, because strace still attaches."""

NOT_OURS = ("qemu-system", "dnsmasq", "virtiofsd")


def memory(setup: BenchmarkSetup) -> Iterator[Figure]:
    samples: dict[str, list[float]] = {}
    bare = setup.bare(setup.spec("memory"))
    contestants = {
        "with": setup.runner(setup.spec("memory-with")),
        "without": setup.runner(setup.spec("memory-without", network=False)),
        "bash": bare,
        "tini": ("tini", "--", *bare),
    }
    for _ in range(setup.rounds(3, 1)):
        for name, argv in contestants.items():
            with namespaced_init(*argv) as init:
                init.until(UP)
                init.read_for(SETTLED)
                for what, amount in memory_of(init.pid).items():
                    samples.setdefault(f"{name} {what}", []).append(amount)
                samples.setdefault(f"{name} threads", []).append(threads_of(init.pid))
                ours = [pid for pid in below(init.pid) if not name_of(pid).startswith(NOT_OURS)]
                samples.setdefault(f"{name} all", []).append(sum(memory_of(pid)["Pss"] for pid in ours))

    def peers(what: str) -> dict[str, list[float]]:
        return {name: samples[f"{name} {what}"] for name in ("bash", "tini")}

    yield Figure("memory: RSS of PID 1 with a network, MB", samples["with Rss"], peers("Rss"), Goal(30))
    yield Figure("memory: RSS of PID 1 without, MB", samples["without Rss"], {}, Goal(27))
    yield Figure("memory: Pss of PID 1 with a network, MB", samples["with Pss"], peers("Pss"))
    yield Figure("memory: Pss of PID 1 without, MB", samples["without Pss"])
    yield Figure("memory: Pss of PID 1, anchor and helpers, MB", samples["with all"], peers("all"))
    yield Figure("memory: threads of PID 1", samples["with threads"], peers("threads"), Goal(1))


def idle(setup: BenchmarkSetup) -> Iterator[Figure]:
    window = setup.rounds(10, 3)
    scale = 10 / window
    contestants = {
        "runner": setup.runner(setup.spec("idle")),
        "tini": ("tini", "--", *setup.bare(setup.spec("idle-bare"))),
    }
    with ExitStack() as held:
        inits = {name: held.enter_context(namespaced_init(*argv)) for name, argv in contestants.items()}
        for init in inits.values():
            init.until(UP)
            init.read_for(SETTLED)
        before = {name: switches_of(init.pid) for name, init in inits.items()}
        inits["runner"].read_for(window)
        woken = {name: [(switches_of(init.pid) - before[name]) * scale] for name, init in inits.items()}
        calls = {name: [_calls(setup, init, window) * scale] for name, init in inits.items()}
    yield Figure("idle: wake-ups of PID 1 in 10 s", woken["runner"], {"tini": woken["tini"]}, Goal(0))
    yield Figure("idle: system calls of PID 1 in 10 s", calls["runner"], {"tini": calls["tini"]}, Goal(0))


def _calls(setup: BenchmarkSetup, init: NamespacedInit, window: int) -> int:
    """Count the system calls that end within *window* seconds; attaching interrupts one, which does not count."""
    trace = setup.directory / "trace"
    command = ("strace", "-f", "-ttt", "-o", trace, "-p", str(init.pid))
    subprocess.run(("timeout", "--signal=INT", str(window + ATTACHED), *command), check=False, capture_output=True)
    lines = [line.split(maxsplit=2) for line in trace.read_text().splitlines()]
    begun = min((float(line[1]) for line in lines), default=0.0)
    return sum(float(line[1]) > begun + ATTACHED and re.search(r"\) += ", line[2]) is not None for line in lines)
