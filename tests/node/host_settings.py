"""What the controller changes on the machine for an instance: interrupts, work queues and the latency of CPUs."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from runner.base.cpuset import CpuSet

IRQ = Path("/proc/irq")
DEFAULT = IRQ / "default_smp_affinity"
WORK_QUEUES = Path("/sys/devices/virtual/workqueue/cpumask")


def latency(cpu: int) -> Path:
    return Path(f"/sys/devices/system/cpu/cpu{cpu}/power/pm_qos_resume_latency_us")


def interrupts() -> dict[int, CpuSet]:
    """Return the interrupts with a handler, and where they may be delivered to."""
    found = {}
    for path in IRQ.glob("[0-9]*"):
        if any(each.is_dir() for each in path.iterdir()):
            found[int(path.name)] = CpuSet.parse((path / "smp_affinity_list").read_text())
    return found


def effective(number: int) -> CpuSet:
    return CpuSet.parse((IRQ / str(number) / "effective_affinity_list").read_text())


@functools.cache
def movable() -> list[int]:
    """Return the interrupts whose mask the kernel lets user space write; tried once, while no controller runs."""
    return [number for number, cpus in interrupts().items() if not refusal(number, cpus)]


def refusal(number: int, cpus: CpuSet) -> int:
    try:
        (IRQ / str(number) / "smp_affinity_list").write_text(str(cpus))
    except OSError as error:
        return error.errno or 0
    return 0


def mask(path: Path) -> CpuSet:
    return CpuSet.parse_mask(path.read_text())


def settings() -> dict[str, str]:
    """Return all that an instance may have changed."""
    files = [DEFAULT, WORK_QUEUES, *(latency(cpu) for cpu in range(os.cpu_count() or 1))]
    return {
        **{str(path): path.read_text() for path in files},
        **{str(number): str(cpus) for number, cpus in interrupts().items()},
    }


def reset() -> None:
    """Let interrupts and work queues be everywhere.

    A controller that a test has killed may have left some narrowed, and its records are gone with its directory.
    """
    everywhere = CpuSet(range(os.cpu_count() or 1))
    for path in (DEFAULT, WORK_QUEUES):
        path.write_text(everywhere.mask())
    for number in movable():
        assert refusal(number, everywhere) == 0


def changes(before: dict[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """Return the settings that are not as *before*, each as it was and as it is."""
    now = settings()
    return {name: (before.get(name), now.get(name)) for name in {*before, *now} if before.get(name) != now.get(name)}
