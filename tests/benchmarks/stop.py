"""From SIGTERM to the end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tests.benchmarks.figures import Figure, Goal
from tests.benchmarks.instances import GRACE, UP, BenchmarkSetup
from tests.benchmarks.namespaced_init import BenchmarkError, namespaced_init

SETTLED = 0.5

MARKS = (
    ("pressed", r"qmp event name=POWERDOWN"),
    ("off", r"qmp event name=SHUTDOWN .*'guest': True"),
    ("quit", r"qmp event name=SHUTDOWN .*'host-qmp-quit'"),
    ("network", r"network: removing"),
    ("ended", r"ended outcome="),
)

STOPPED, FORCED_OFF = 0, 13


def stop(setup: BenchmarkSetup) -> Iterator[Figure]:
    samples: dict[str, list[float]] = {}
    obedient = setup.spec("obedient")
    disobedient = setup.spec("disobedient", guest="without-button")
    for _ in range(setup.rounds(7, 1)):
        with namespaced_init(*setup.runner(obedient, "--log-level", "debug")) as init:
            init.until(UP)
            init.read_for(SETTLED)
            asked = init.terminate()
            exited = init.exited()
            _expect(init.status, STOPPED, init.transcript())
            reached = {**init.marks(MARKS), "asked": asked, "exit": exited}
        guest = reached["off"] - reached["pressed"]
        spans = {"obedient": exited - asked - guest, "guest": guest, "pressed": reached["pressed"] - asked}
        stations = [name for name in ("off", "quit", "network", "ended", "exit") if name in reached]
        spans |= {there: reached[there] - reached[here] for here, there in itertools.pairwise(stations)}
        with namespaced_init(*setup.runner(disobedient)) as init:
            init.until(UP)
            init.read_for(SETTLED)
            asked = init.terminate()
            spans["disobedient"] = init.exited() - asked - GRACE
            _expect(init.status, FORCED_OFF, init.transcript())
        for name, span in spans.items():
            samples.setdefault(name, []).append(span * 1e3)
    limit = Goal(250)
    yield Figure("stop: a guest that powers down, beyond its own time, ms", samples["obedient"], goal=limit)
    for name, title in (
        ("pressed", "SIGTERM → power button"),
        ("guest", "the guest's own time"),
        ("quit", "guest off → quit obeyed"),
        ("network", "QEMU, virtiofsd, dnsmasq end"),
        ("ended", "network given back"),
        ("exit", "the process itself ends"),
    ):
        if name in samples:
            yield Figure(f"- {title}, ms", samples[name])
    yield Figure(
        "stop: a guest that ignores the power button, beyond the grace period, ms", samples["disobedient"], goal=limit
    )


def _expect(status: int | None, wanted: int, transcript: str) -> None:
    if status != wanted:
        raise BenchmarkError(f"ended with status {status} instead of {wanted}:\n{transcript}")
