"""Settings of the whole machine that decide what disturbs a CPU, read and written below any root directory.

======================================================  ============================================================
``proc/irq/N/smp_affinity_list``                        ``Documentation/core-api/irq/irq-affinity.rst``
``proc/irq/default_smp_affinity``                       the same: what an interrupt begins with
``sys/devices/virtual/workqueue/cpumask``               ``Documentation/core-api/workqueue.rst``
``sys/devices/system/cpu/cpuN/power/pm_qos_resume_…``   ``Documentation/ABI/testing/sysfs-devices-power``
``sys/devices/system/cpu/cpuN/cpufreq/scaling_…``       ``Documentation/admin-guide/pm/cpufreq.rst``
``sys/bus/pci/devices/ADDRESS/d3cold_allowed``          ``Documentation/ABI/testing/sysfs-bus-pci``
======================================================  ============================================================

A setting is named by its path below the root directory. Writing takes user 0 and no capability (``irq_affinity_proc_fops``,
``wq_sysfs_cpumask_attr``: mode 644), where the file systems are mounted for writing.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError
from runner.base.values import frozen
from runner.kernel.leases import open_at_once, read_at_once

INTERRUPTS = "proc/irq"
DEFAULT_AFFINITY = f"{INTERRUPTS}/default_smp_affinity"
WORK_QUEUES = "sys/devices/virtual/workqueue/cpumask"
_CPUS = "sys/devices/system/cpu"
_PCI_DEVICES = "sys/bus/pci/devices"
_MASKS = {DEFAULT_AFFINITY, WORK_QUEUES}
"""Files in the mask format; the others have lists of CPUs, or words."""


class SettingError(HostError):
    """A refusal of the kernel to change a setting; *errno* is its error number."""

    def __init__(self, sentence: str, number: int) -> None:
        super().__init__(sentence)
        self.errno = number


@frozen
class InterruptLine:
    """An interrupt that a driver handles."""

    number: int
    handlers: str
    """The names of its handlers."""
    cpus: CpuSet
    """``smp_affinity_list``: the CPUs to which it may be delivered."""
    effective: CpuSet
    """``effective_affinity_list``: the CPUs to which it is delivered; *cpus* where the kernel does not tell."""
    numa_node: int
    """-1 where the kernel does not know."""

    def __str__(self) -> str:
        return f"{self.number} ({self.handlers})"

    @property
    def path(self) -> str:
        """The setting with the CPUs to which it may be delivered."""
        return f"{INTERRUPTS}/{self.number}/smp_affinity_list"


def latency_path(cpu: int) -> str:
    """Return the setting that limits the exit latency of *cpu*'s idle states."""
    return f"{_CPUS}/cpu{cpu}/power/pm_qos_resume_latency_us"


def governor_path(cpu: int) -> str:
    """Return the file from which *cpu*'s frequency governor is read; :meth:`HostSettings.governor` returns the one to write."""
    return f"{_CPUS}/cpu{cpu}/cpufreq/scaling_governor"


def d3cold_path(address: str) -> str:
    """Return the setting by which the kernel may cut the power of the PCI device at *address* while nothing uses it."""
    return f"{_PCI_DEVICES}/{address}/d3cold_allowed"


@frozen
class HostSettings:
    """The settings of the machine whose root directory is *root*."""

    root: Path

    def error(self) -> str:
        """Return the reason why the settings cannot be read; empty if they can."""
        try:
            (self.root / "proc").stat()
        except OSError as error:
            return f"cannot read {self.root}: {os.strerror(error.errno or errno.EIO)}"
        return ""

    def interrupts(self) -> Iterator[InterruptLine]:
        """Yield the interrupts with a handler, by number; nothing where there is no ``/proc/irq``.

        The directory of an interrupt has one for each handler (``kernel/irq/proc.c``, ``register_handler_proc``).
        """
        directory = self.root / INTERRUPTS
        try:
            numbers = sorted(int(name) for name in os.listdir(directory) if name.isdecimal())  # noqa: PTH208 - names only
        except OSError:
            return
        for number in numbers:
            line = directory / str(number)
            # An interrupt that is freed meanwhile is left out.
            with suppress(OSError, ValueError), os.scandir(line) as entries:
                handlers = ", ".join(sorted(entry.name for entry in entries if entry.is_dir()))
                if handlers:
                    cpus = CpuSet.parse(read_at_once(line / "smp_affinity_list").decode())
                    effective = self.cpus(f"{INTERRUPTS}/{number}/effective_affinity_list") or cpus
                    yield InterruptLine(number, handlers, cpus, effective, _number(line / "node"))

    def governor(self, cpu: int) -> str:
        """Return the setting of the governor of *cpu*'s frequency policy: one for all CPUs of the policy.

        Each CPU has a link to it (``Documentation/admin-guide/pm/cpufreq.rst``, "Policy Interface in sysfs").
        """
        path = governor_path(cpu)
        try:
            policy = (self.root / path).parent.readlink()
        except OSError:  # no driver for frequencies
            return path
        return f"{_CPUS}/cpufreq/{policy.name}/{PurePosixPath(path).name}"

    def has_vfio_driver(self, address: str) -> bool:
        """Tell whether the PCI device at *address* is bound to a driver for passthrough."""
        device = self.root / _PCI_DEVICES / address
        # By the link itself: its target is a path of the machine, not below the root directory.
        return (device / "vfio-dev").is_dir() or PurePosixPath(os.path.realpath(device / "driver")).name == "vfio-pci"

    def cpus(self, path: str) -> CpuSet | None:
        """Return the CPUs in the setting *path*; ``None`` where the kernel does not have it."""
        text = self.text(path)
        with suppress(ValueError):
            return None if text is None else CpuSet.parse_mask(text) if path in _MASKS else CpuSet.parse(text)
        return None

    def work_queue_cpus(self) -> CpuSet | None:
        """Return the CPUs that were set for unbound work queues; ``None`` where the kernel does not have them.

        Since Linux 6.8 :data:`WORK_QUEUES` shows them without those of isolated partitions (``kernel/workqueue.c``,
        ``wq_requested_unbound_cpumask``), while another file has them as written.
        """
        text = self.text(f"{WORK_QUEUES}_requested")
        return self.cpus(WORK_QUEUES) if text is None else CpuSet.parse_mask(text)

    def isolated_work_queue_cpus(self) -> CpuSet:
        """Return the CPUs that unbound work queues leave out because partitions isolate them; none before Linux 6.8."""
        return CpuSet.parse_mask(self.text(f"{WORK_QUEUES}_isolated") or "0")

    def text(self, path: str) -> str | None:
        """Return the content of the setting *path*; ``None`` where the kernel does not have it."""
        try:
            return read_at_once(self.root / path).decode().strip()
        except OSError:
            return None

    def write(self, path: str, value: str) -> None:
        """Set *path* to *value*, a list of CPUs also where the file has a mask. Raises :class:`SettingError`."""
        written = CpuSet.parse(value).mask() if path in _MASKS else value
        try:
            fd = open_at_once(self.root / path, os.O_WRONLY)
            try:
                os.write(fd, f"{written}\n".encode())
            finally:
                os.close(fd)
        except OSError as error:
            number = error.errno or errno.EIO
            raise SettingError(f"cannot write {value!r} to /{path}: {error.strerror}", number) from error


def _number(path: Path) -> int:
    try:
        return int(read_at_once(path))
    except (OSError, ValueError):
        return -1
