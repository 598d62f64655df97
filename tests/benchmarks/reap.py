"""How fast orphans are reaped, compared with the small inits."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from tests.benchmarks.figures import Figure, Goal
from tests.benchmarks.instances import HERE, Argv, BenchmarkSetup
from tests.benchmarks.namespaced_init import BenchmarkError, cpu_of, namespaced_init

PEERS = ("tini", "dumb-init", "catatonit")
SPARE_PIDS = 5000


def reap(setup: BenchmarkSetup) -> Iterator[Figure]:
    orphans = setup.orphans
    if int(Path("/proc/sys/kernel/pid_max").read_text()) < orphans + SPARE_PIDS:
        raise BenchmarkError(f"kernel.pid_max leaves no room for {orphans} zombies")
    contestants: dict[str, Argv] = {name: (name, "--") for name in PEERS}
    contestants["runner"] = (sys.executable, HERE / "reaper.py")
    samples: dict[str, dict[str, list[float]]] = {what: {name: [] for name in contestants} for what in WHAT}
    names = list(contestants)
    for number in range(setup.rounds(5, 1)):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            for what, value in _once(setup, contestants[name], orphans, ours=name == "runner").items():
                samples[what][name].append(value)

    def figure(name: str, what: str) -> Figure:
        ours, theirs = samples[what]["runner"], {peer: samples[what][peer] for peer in PEERS}
        goal = None if what == "cpu" else Goal(statistics.median(theirs["tini"]), at_least=True, name="tini")
        return Figure(name, ours, theirs, goal)

    yield figure("reap: orphans dying one after the other, 1000/s", "live")
    yield figure("reap: zombies found at once, 1000/s", "burst")
    yield figure("reap: CPU of PID 1 for a zombie, µs", "cpu")


WHAT = ("live", "burst", "cpu")


def _once(setup: BenchmarkSetup, init_argv: Argv, orphans: int, *, ours: bool) -> dict[str, float]:
    with ExitStack() as held:
        orders_in, orders = os.pipe()
        answers, answers_out = os.pipe()
        held.callback(os.close, orders)
        listening = held.enter_context(os.fdopen(answers))
        passed = (orders_in, answers_out)
        storm: Argv = (setup.directory / "storm", str(orphans), *map(str, passed))
        between: Argv = (",".join(map(str, passed)),) if ours else ()
        try:
            init = held.enter_context(namespaced_init(*init_argv, *between, *storm, pass_fds=passed))
        finally:
            for fd in passed:
                os.close(fd)

        def answer() -> str:
            line = listening.readline()
            if not line:
                init.read_for(0.5)
                raise BenchmarkError(f"the storm ended early:\n{init.transcript()}")
            return line.split()[-1]

        def seconds(order: bytes) -> float:
            os.write(orders, order)
            return float(answer())

        answer()
        live = orphans / seconds(b"l")
        init.stop()
        os.write(orders, b"w")
        answer()
        before = cpu_of(init.pid)
        burst = orphans / seconds(b"r")
        spent = cpu_of(init.pid) - before
        os.write(orders, b"q")
        init.exited()
        return {"live": live / 1e3, "burst": burst / 1e3, "cpu": spent / orphans * 1e6}
