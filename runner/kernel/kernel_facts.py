"""Facts of a running kernel that are only read, below any root: swap, boot options, PCI devices.

The files are described in ``Documentation/filesystems/proc.rst``, ``Documentation/admin-guide/mm/transhuge.rst`` and
``Documentation/ABI/testing/sysfs-bus-pci``. A file that an older or smaller kernel does not have reads as empty.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.kernel.small_files import read_text

_ISOLATION_FLAG = re.compile("((?:nohz|domain|managed_irq),)")
"""The flags of ``isolcpus=``, which stand before its CPUs (``housekeeping_isolcpus_setup`` of ``kernel/sched/isolation.c``)."""


@frozen
class Swap:
    """A swap device or file; *size* in bytes."""

    name: str
    size: int


@frozen
class QuietCpus:
    """The CPUs that the kernel's own work is kept off from boot on (``Documentation/admin-guide/kernel-parameters.txt``)."""

    nohz_full: CpuSet = CpuSet()
    """The timer tick, while one thread runs there, and RCU callbacks."""
    rcu_nocbs: str = ""
    """RCU callbacks, as on the command line, such as ``all`` or ``2-N``."""
    managed_irq: str = ""
    """Interrupts whose CPUs the kernel chooses for their drivers, as on the command line."""


@frozen
class PciDevice:
    """A PCI device; *numa_node* is -1 where the firmware does not say."""

    address: str
    base_class: int
    numa_node: int


def read_line(path: Path) -> str:
    """Return the content of a small file without its line end, empty when it cannot be read."""
    return read_text(path).strip()


def read_cpus(path: Path) -> CpuSet:
    """Return the CPUs that a file lists; none when it cannot be read or is ``(null)``, as ``nohz_full`` may be."""
    try:
        return CpuSet.parse(read_line(path))
    except ValueError:
        return CpuSet()


def read_quiet_cpus(proc: Path, cpu: Path) -> QuietCpus:
    """Return the CPUs that ``nohz_full=``, ``rcu_nocbs=`` and ``isolcpus=managed_irq,`` name."""
    options = dict(word.partition("=")[::2] for word in read_line(proc / "cmdline").split())
    *flags, cpus = _ISOLATION_FLAG.split(options.get("isolcpus", ""))
    managed = cpus if "managed_irq," in flags else ""
    return QuietCpus(read_cpus(cpu / "nohz_full"), options.get("rcu_nocbs", ""), managed)


def read_swaps(proc: Path) -> tuple[Swap, ...]:
    """Return the swap areas in use (``/proc/swaps``)."""
    lines = [line.split() for line in read_line(proc / "swaps").splitlines()[1:]]
    return tuple(Swap(words[0], int(words[2]) << 10) for words in lines)


def read_choice(path: Path) -> str:
    """Return the word in brackets, which is the setting in force: ``always [madvise] never``."""
    match = re.search(r"\[(\w+)\]", read_line(path))
    return "" if match is None else match[1]


def read_pci_devices(sys: Path) -> Iterator[PciDevice]:
    """Yield the PCI devices by address."""
    for path in sorted((sys / "bus/pci/devices").glob("*")):
        pci_class, numa_node = read_line(path / "class"), read_line(path / "numa_node")
        if pci_class and numa_node:
            yield PciDevice(path.name, int(pci_class, 16) >> 16, int(numa_node))


def pid_namespace(proc: Path) -> int:
    """Return the inode of this process's PID namespace, 0 when it cannot be read."""
    try:
        name = os.readlink(proc / "self/ns/pid")  # noqa: PTH115 - it is no path: "pid:[4026531836]"
    except OSError:
        return 0
    match = re.search(r"\[(\d+)\]", name)
    return 0 if match is None else int(match[1])
