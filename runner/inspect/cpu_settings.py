"""The settings of the machine that decide what else than threads takes time from an instance's CPUs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from runner.base.cpuset import CpuSet
from runner.base.table import some
from runner.base.values import frozen
from runner.kernel.host_settings import WORK_QUEUES, HostSettings, governor_path, latency_path

_NO_LIMIT = "0"
"""The value of ``pm_qos_resume_latency_us`` by which idle states may take any time to leave."""


@frozen
class CpuSettings:
    """The settings of an instance's CPUs."""

    interrupts: tuple[str, ...]
    """The interrupts that are delivered there: number and handlers."""
    work_queues: CpuSet
    """The CPUs that unbound work queues may use."""
    resume_latencies: tuple[str, ...]
    """Each ``pm_qos_resume_latency_us`` there is, in µs; ``0`` is no limit."""
    governors: tuple[str, ...]
    """Each frequency governor there is; none without a driver for frequencies."""

    def line(self) -> str:
        """Return them for people."""
        interrupts = some(self.interrupts, 6) or "none"
        limits = " or ".join("any" if each == _NO_LIMIT else f"up to {each} µs" for each in self.resume_latencies)
        queues = f"on '{self.work_queues}'" if self.work_queues else "none"
        return (
            f"interrupts: {interrupts}; unbound work queues: {queues}; "
            f"idle states: {limits or 'unknown'}; governor: {' or '.join(self.governors) or 'none'}"
        )


def read_cpu_settings(root: Path, cpus: CpuSet) -> CpuSettings:
    """Read the settings of *cpus* of the machine whose root directory is *root*; what the kernel does not have is left out."""
    host = HostSettings(root)
    return CpuSettings(
        tuple(str(line) for line in host.interrupts() if line.effective & cpus),
        (host.cpus(WORK_QUEUES) or CpuSet()) & cpus,
        _each(host, map(latency_path, cpus)),
        _each(host, map(governor_path, cpus)),
    )


def _each(host: HostSettings, paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({value for path in paths if (value := host.text(path)) is not None}))
