"""From exec to the guest's first output."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tests.benchmarks.figures import Figure, Goal
from tests.benchmarks.instances import UP, Argv, BenchmarkSetup
from tests.benchmarks.namespaced_init import cpu_of, namespaced_init

PHASES = (
    ("interpreter", "interpreter", ""),
    ("imports", "imports", ""),
    ("command line, spec", "asked", r"start role=virtiofsd-version"),
    ("facts, plan", "planned", r"start role=anchor"),
    ("anchor, placement, network", "network", r"start role=dnsmasq"),
    ("dnsmasq, virtiofsd", "daemons", r"start role=qemu"),
    ("QEMU until it greets", "greeting", r"QEMU is up"),
    ("pin, receipt, cont", "cont", r"the guest runs"),
    ("the guest's first output", "output", ""),
)
"""The phases: name, the mark that ends it, and the log line that is the mark."""

BARE, TINI = "bare", "tini + bare"


def start(setup: BenchmarkSetup) -> Iterator[Figure]:
    spec = setup.spec("start")
    bare = setup.bare(spec)
    contestants: dict[str, Argv] = {
        "runner": setup.runner(spec),
        BARE: bare,
        TINI: ("tini", "--", *bare),
        "by phase": setup.runner_by_phase(spec),
    }
    totals: dict[str, list[float]] = {name: [] for name in contestants}
    phases: dict[str, dict[str, list[float]]] = {name: {} for name in contestants}
    spent: list[float] = []
    names = list(contestants)
    rounds = setup.rounds(15, 2)
    for number in range(-1, rounds):  # the first one warms the caches
        for name in names[number % len(names) :] + names[: number % len(names)]:
            moments, cpu = _once(contestants[name])
            if number < 0:
                continue
            totals[name].append((moments["output"] - moments["exec"]) * 1e3)
            if name == "runner":
                spent.append(cpu * 1e3)
            for phase, length in _lengths(moments):
                phases[name].setdefault(phase, []).append(length)
    peers = {name: totals[name] for name in (BARE, TINI)}
    yield Figure("start: exec → the guest's first output, ms", totals["runner"], peers)
    on_top = [ours - bare for ours, bare in zip(totals["runner"], totals[BARE], strict=True)]
    yield Figure("start: on top of the bare script, ms", on_top, goal=Goal(120))
    fastest = min(totals["runner"]) - min(totals[BARE])
    yield Figure("start: the same between the fastest rounds, ms", [fastest])
    yield Figure("start: CPU time of PID 1, ms", spent)
    for phase, _, _ in PHASES:
        if phase in phases["by phase"]:
            theirs = phases[BARE].get(phase)
            yield Figure(f"- {phase}, ms", phases["by phase"][phase], {} if theirs is None else {BARE: theirs})


def _once(argv: Argv) -> tuple[dict[str, float], float]:
    """Start *argv*; return the time of each mark, and the CPU seconds that PID 1 used."""
    with namespaced_init(*argv) as init:
        output = init.until(UP)
        init.until("mark cont" if "bash" in argv else "the guest runs")
        cpu = cpu_of(init.pid)
        known = [(mark, text) for _, mark, text in PHASES if text]
        return {**init.marks(known), "output": output.moment}, cpu


def _lengths(moments: dict[str, float]) -> Iterator[tuple[str, float]]:
    """Yield each phase and its length in ms; where a mark is missing, its time is part of the next phase."""
    reached = [("", "exec"), *((phase, mark) for phase, mark, _ in PHASES if mark in moments)]
    for (_, before), (phase, mark) in itertools.pairwise(reached):
        yield phase, (moments[mark] - moments[before]) * 1e3
