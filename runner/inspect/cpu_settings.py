"""The machine's settings that allow work other than threads to take time from an instance's CPUs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from runner.base.cpuset import CpuSet
from runner.base.table import some
from runner.base.values import frozen
from runner.kernel.host_settings import WORK_QUEUES, HostSettings, governor_path, latency_path

_NO_LIMIT = "0"
"""The value of ``pm_qos_resume_latency_us`` that does not limit the exit latency of idle states."""


@frozen
class CpuSettings:
    """The settings of an instance's CPUs."""

    interrupts: tuple[str, ...]
    """The interrupts that are delivered there: number and handlers."""
    work_queues: CpuSet
    """The CPUs that unbound work queues may use."""
    resume_latencies: tuple[str, ...]
    """The distinct values of ``pm_qos_resume_latency_us`` on these CPUs, in µs; ``0`` is no limit."""
    governors: tuple[str, ...]
    """The distinct frequency governors of these CPUs; none without a driver for frequencies."""

    def line(self) -> str:
        """Return the settings as a line for people."""
        interrupts = some(self.interrupts, 6) or "none"
        limits = " or ".join("any" if each == _NO_LIMIT else f"up to {each} µs" for each in self.resume_latencies)
        queues = f"on '{self.work_queues}'" if self.work_queues else "none"
        return (
            f"interrupts: {interrupts}; unbound work queues: {queues}; "
            f"idle states: {limits or 'unknown'}; governor: {' or '.join(self.governors) or 'none'}"
        )


def read_cpu_settings(root: Path, cpus: CpuSet) -> CpuSettings:
    """Read the settings of *cpus* of the machine whose root directory is *root*; missing ones are left out."""
    host = HostSettings(root)
    return CpuSettings(
        tuple(str(line) for line in host.interrupts() if line.effective & cpus),
        (host.cpus(WORK_QUEUES) or CpuSet()) & cpus,
        _each(host, map(latency_path, cpus)),
        _each(host, map(governor_path, cpus)),
    )


def _each(host: HostSettings, paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({value for path in paths if (value := host.text(path)) is not None}))
