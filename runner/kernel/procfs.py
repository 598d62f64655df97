"""Processes and threads in /proc (``Documentation/filesystems/proc.rst``)."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import attrs

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, doing
from runner.base.values import frozen
from runner.facts.threads import ProcessStatus, ThreadStatus
from runner.kernel.leases import open_at_once, read_at_once

_VANISHED = (FileNotFoundError, ProcessLookupError)
_PF_KTHREAD = 0x00200000
"""``include/linux/sched.h``: in the flags of proc_pid_stat(5), field 9."""
_FIRST_USER_NAMESPACE = 0xEFFFFFFD
"""Inode of the machine's first user namespace: ``PROC_USER_INIT_INO`` of ``include/linux/proc_ns.h``."""
FIRST_NETWORK_NAMESPACE = 0xEFFFFFF9
"""Inode of the machine's first network namespace, where the kernel fixes it: ``NET_NS_INIT_INO`` of ``include/uapi/linux/nsfs.h``."""
FIRST_NETWORK_SETTINGS = ("net/core/dev_weight", "net/core/message_cost", "net/core/netdev_budget")
"""Sysctls that only the first network namespace has (``net_core_table`` of ``net/core/sysctl_net_core.c``, 2.6 to 6.18).

Three, because a later kernel may have one of them in every namespace, as happened with ``rmem_max``.
"""
_NUMA_PAGES = re.compile(r" N([0-9]+)=([0-9]+)", re.ASCII)
_PAGE_SIZE = re.compile(r" kernelpagesize_kB=([0-9]+)", re.ASCII)
_BOUND = re.compile(r" bind(?:=[a-z|]+)?:([0-9,-]+)", re.ASCII)
_MAPPED_FILE = re.compile(r" file=(\S{1,1000})")
LONGEST_COMMAND_LINE = 128 << 10
"""Bytes of a command line that are read; one of QEMU's with hundreds of devices has half of it."""


@frozen
class ThreadTimes:
    """The CPU time of a thread."""

    ran: float | None
    """Seconds; ``None``, like *waited*, on a kernel without ``CONFIG_SCHED_INFO``."""
    waited: float | None
    """Seconds in which it was runnable and did not run: KVM reports them to its guest as stolen time."""
    involuntary: int
    """Number of involuntary context switches."""


@frozen
class LinkTraffic:
    """The traffic of a network link in one direction since it was made."""

    bytes: int
    packets: int
    dropped: int
    """Packets dropped for lack of room."""


@frozen
class MappedMemory:
    """A mapping of a file or of huge pages (``numa_maps``)."""

    file: str
    """The first 1000 characters of its path with octal escapes (``/memfd:name\\040(deleted)``); empty for anonymous huge pages."""
    huge: bool
    """Whether its pages are hugetlb pages."""
    resident: Mapping[int, int]
    """NUMA node → bytes that are present and mapped."""
    bound: CpuSet = attrs.field(factory=CpuSet)
    """The NUMA nodes that it is bound to (``MPOL_BIND``); empty without a binding."""


@frozen
class Procfs:
    """A procfs mounted at *root*.

    Processes and threads may end at any moment: then the result is ``None`` or empty. Methods raise
    :exc:`~runner.base.errors.HostError` when the kernel refuses to show an existing one.
    """

    root: Path = Path("/proc")

    def processes(self) -> list[int]:
        """Return the processes of this procfs's PID namespace, in the order of their numbers."""
        with doing(f"list the processes in {self.root}"):
            return sorted(int(entry.name) for entry in self.root.iterdir() if entry.name.isdecimal())

    def unreaped(self) -> Iterator[tuple[int, int]]:
        """Yield the processes and traced threads that have ended, each with its tracer or its parent, which has not waited for it."""
        for pid in self.processes():
            for tid in self.thread_ids(pid):
                with contextlib.suppress(OSError, HostError):  # waited for meanwhile
                    state, parent, *_ = _stat(_read(f"{self.root}/{pid}/task/{tid}/stat"))
                    if state == "Z":
                        yield tid, int(self.status(tid).get("TracerPid", 0)) or int(parent)

    def has_swap(self) -> bool:
        """Tell whether the kernel was built with swap (``procswaps_init`` of ``mm/swapfile.c``)."""
        return (self.root / "swaps").exists()

    def process(self, pid: int) -> ProcessStatus | None:
        """Return one process, or ``None`` when it is gone."""
        try:
            status = _fields(_read(self.root / str(pid) / "status"))
            stat = _stat(_read(self.root / str(pid) / "stat"))
        except _VANISHED:
            return None
        except OSError as error:
            raise HostError(f"cannot read process {pid}") from error
        return ProcessStatus(
            pid=pid,
            inner_pid=int(status["NSpid"].split()[-1]),
            parent=int(status["PPid"]),
            name=status["Name"],
            kernel=_is_kernels(stat),
        )

    def is_kernel_thread(self, pid: int) -> bool:
        """Tell whether process *pid* is a thread of the kernel; ``False`` when it is gone."""
        try:
            return _is_kernels(_stat(_read(f"{self.root}/{pid}/stat")))
        except OSError:
            return False

    def arguments(self, pid: int) -> tuple[str, ...]:
        """Return the command line of *pid*, the first :data:`LONGEST_COMMAND_LINE` bytes of it, empty when it is gone.

        The command line is in the memory of the process, so reading it may wait for the lock of that memory. A process may say that any
        part of its memory is its command line (``PR_SET_MM_MAP``, prctl(2)), gigabytes of zeroes as well.
        """
        try:
            text = _text(read_at_once(self.root / str(pid) / "cmdline", most=LONGEST_COMMAND_LINE))
        except OSError:
            return ()
        return tuple(text.removesuffix("\0").split("\0"))

    def age(self, pid: int) -> float | None:
        """Return the seconds since *pid* was started, ``None`` when it is gone."""
        try:
            started = start_time(_read(self.root / str(pid) / "stat"))
        except OSError:
            return None
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started

    def mappings(self, pid: int) -> list[MappedMemory] | None:
        """Return the mappings of files and huge pages of *pid*, or ``None`` when it is gone or the kernel has no NUMA.

        The kernel walks the page tables for it, some milliseconds for each GiB in small pages. The reader must be allowed to
        trace the process (ptrace(2), ``PTRACE_MODE_READ_FSCREDS``).
        """
        try:
            # Line by line: a process may have 65,530 mappings (vm.max_map_count) of a file with a path of 16 KB with its escapes.
            with os.fdopen(
                open_at_once(self.root / str(pid) / "numa_maps"), errors="backslashreplace", newline="\n"
            ) as lines:
                return list(_mappings(lines))
        except _VANISHED:
            return None
        except OSError as error:
            raise HostError(f"cannot read the memory of process {pid}") from error

    def name(self, pid: int) -> str:
        """Return the name of process *pid* (``comm``), empty when it is gone."""
        try:
            return _read(self.root / str(pid) / "comm").removesuffix("\n")
        except OSError:
            return ""

    def thread_ids(self, pid: int) -> list[int]:
        """Return the threads of *pid* in the order of their numbers; empty when it is gone."""
        try:
            return sorted(map(int, os.listdir(f"{self.root}/{pid}/task")))  # noqa: PTH208 - hundreds of names, no paths
        except _VANISHED:
            return []
        except OSError as error:
            raise HostError(f"cannot read the threads of process {pid}") from error

    def threads(self, pid: int) -> Iterator[ThreadStatus]:
        """Yield the threads of *pid*; one that ends meanwhile is left out."""
        for tid in self.thread_ids(pid):
            thread = self.thread(pid, tid)
            if thread is not None:
                yield thread

    def thread(self, pid: int, tid: int) -> ThreadStatus | None:
        """Return one thread, or ``None`` when it is gone or a zombie, which does not run any more."""
        task = self.root / str(pid) / "task" / str(tid)
        try:
            status = _fields(_read(task / "status"))
            stat = _stat(_read(task / "stat"))
            if stat[0] in "ZX":
                return None
            return ThreadStatus(
                pid=pid,
                tid=tid,
                name=status["Name"],
                cgroup=_unified(_read(task / "cgroup")),
                cpus=CpuSet.parse(status["Cpus_allowed_list"]),
                mems=CpuSet.parse(status["Mems_allowed_list"]),
                running_on=int(stat[36]),
            )
        except _VANISHED:
            return None
        except OSError as error:
            raise HostError(f"cannot read thread {tid} of process {pid}") from error

    def name_and_last_cpu(self, pid: int, tid: int) -> tuple[str, int] | None:
        """Return the name of one thread and the CPU it ran on last, or ``None`` like :meth:`thread`.

        This reads one file instead of three, and parses only a part of it.
        """
        try:
            text = _read(f"{self.root}/{pid}/task/{tid}/stat")
        except _VANISHED:
            return None
        except OSError as error:
            raise HostError(f"cannot read thread {tid} of process {pid}") from error
        stat = _stat(text)
        if stat[0] in "ZX":
            return None
        name = text[text.index("(") + 1 : text.rindex(")")]
        # Escaped as in `status` (fs/proc/array.c, proc_task_name).
        return name.replace("\\", "\\\\").replace("\n", "\\n"), int(stat[36])

    def times(self, pid: int, tid: int) -> ThreadTimes | None:
        """Return the CPU time of one thread, or ``None`` when it is gone."""
        try:
            switches = int(_fields(_read(f"{self.root}/{pid}/task/{tid}/status"))["nonvoluntary_ctxt_switches"])
            try:
                ran, waited = self._schedstat(pid, tid)
            except FileNotFoundError:
                return ThreadTimes(None, None, switches)
        except _VANISHED:
            return None
        except OSError as error:
            raise HostError(f"cannot read thread {tid} of process {pid}") from error
        return ThreadTimes(ran / 1e9, waited / 1e9, switches)

    def run_time(self, pid: int, tid: int) -> int | None:
        """Return the nanoseconds that one thread has run, or ``None`` when it is gone, or without ``CONFIG_SCHED_INFO``.

        For a running thread, the time since the last tick is missing.
        """
        try:
            return self._schedstat(pid, tid)[0]
        except _VANISHED:
            return None
        except OSError as error:
            raise HostError(f"cannot read thread {tid} of process {pid}") from error

    def _schedstat(self, pid: int, tid: int) -> tuple[int, int]:
        """Return the nanoseconds that a thread has run and waited (``Documentation/scheduler/sched-stats.rst``)."""
        ran, waited, *_ = map(int, _read(f"{self.root}/{pid}/task/{tid}/schedstat").split())
        return ran, waited

    def cpu_run_times(self) -> dict[int, int]:
        """Return CPU → the nanoseconds that tasks have run there since the boot; empty without ``CONFIG_SCHEDSTATS``.

        That is field 7 of ``Documentation/scheduler/sched-stats.rst``, the same in versions 15 to 17, and without
        ``kernel.sched_schedstats``. The kernel adds the time of a task when the task leaves the CPU, and never that of the
        idle task (``kernel/sched/stats.h``: ``sched_info_switch``).
        """
        try:
            lines = _lines(_read(self.root / "schedstat"))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise HostError(f"cannot read {self.root / 'schedstat'}") from error
        rows = (line.split() for line in lines if line.startswith("cpu"))
        return {int(row[0].removeprefix("cpu")): int(row[7]) for row in rows}

    def steal(self) -> dict[int, float]:
        """Return CPU → seconds of stolen time, which a hypervisor has taken from this kernel (proc_stat(5), field 8)."""
        return self._cpu_seconds(8)

    def idle(self) -> dict[int, float]:
        """Return CPU → seconds in the idle task, including waits for a disk (fields 4 and 5)."""
        return self._cpu_seconds(4, 5)

    def links(self) -> dict[str, tuple[LinkTraffic, LinkTraffic]]:
        """Return, by name, the traffic received and sent by each link of this process's network namespace (proc_pid_net(5), ``dev``)."""
        found = {}
        for line in _lines(self._read("self/net/dev"))[2:]:  # two lines of a head
            name, _, numbers = line.partition(":")
            fields = [int(number) for number in numbers.split()]
            received, sent = (LinkTraffic(fields[at], fields[at + 1], fields[at + 3]) for at in (0, 8))
            found[name.strip()] = received, sent
        return found

    def _cpu_seconds(self, *fields: int) -> dict[int, float]:
        ticks = os.sysconf("SC_CLK_TCK")
        rows = (line.split() for line in _lines(self._read("stat")))
        return {
            int(row[0][3:]): sum(int(row[field]) for field in fields) / ticks
            for row in rows
            if re.fullmatch(r"cpu[0-9]+", row[0])
        }

    def runnable(self, cpus: CpuSet) -> dict[int, list[tuple[int, int]]]:
        """Return, for each of *cpus*, the process and thread numbers of the threads that run or wait there."""
        tasks: dict[int, list[tuple[int, int]]] = {}
        for pid in self.processes():
            for tid in self.thread_ids(pid):
                with contextlib.suppress(OSError):  # it has ended
                    stat = _stat(_read(f"{self.root}/{pid}/task/{tid}/stat"))
                    if stat[0] == "R" and int(stat[36]) in cpus:
                        tasks.setdefault(int(stat[36]), []).append((pid, tid))
        return tasks

    def process_of(self, tid: int) -> int | None:
        """Return the process that thread *tid* belongs to, or ``None`` when it is gone."""
        try:
            return int(_fields(_read(self.root / str(tid) / "status"))["Tgid"])
        except _VANISHED:
            return None
        except OSError as error:
            raise HostError(f"cannot read thread {tid}") from error

    def cgroup(self, pid: int | str = "self") -> str:
        """Return the cgroup v2 path of *pid*, empty where there is no cgroup v2.

        Raises :exc:`~runner.base.errors.HostError` also when there is no such process, like :meth:`status`.
        """
        return _unified(self._read(f"{pid}/cgroup", f"the cgroup of process {pid}"))

    def waits_in(self, pid: int) -> str:
        """Return the kernel function in which process *pid* waits; empty if it has ended or the kernel does not show it."""
        try:
            return _read(self.root / str(pid) / "wchan").strip()
        except OSError:
            return ""

    def memory_nodes(self) -> CpuSet:
        """Return the NUMA nodes that this process may take memory from (its cpuset's)."""
        return CpuSet.parse(self.status()["Mems_allowed_list"])

    def cpu_vendor(self) -> str:
        """Return CPUID's vendor of the CPUs, such as ``GenuineIntel``; empty on other architectures than x86."""
        return self._first_cpu().get("vendor_id", "")

    def address_bits(self) -> int:
        """Return the width of a physical address in bits (``address sizes``), 0 where the kernel does not say."""
        bits = self._first_cpu().get("address sizes", "").partition(" ")[0]
        return int(bits) if bits.isdecimal() else 0

    def has_invariant_tsc(self) -> bool:
        """Tell whether the time stamp counter runs at the same rate in every state of the CPU (CPUID 0x80000007, EDX bit 8).

        The kernel shows it as ``nonstop_tsc`` (``early_init_intel``, ``early_init_amd``).
        """
        return "nonstop_tsc" in self._first_cpu().get("flags", "").split()

    def _first_cpu(self) -> Mapping[str, str]:
        path = self.root / "cpuinfo"
        with doing(f"read {str(path)!r}"), path.open(errors="replace") as cpus:
            return _fields("".join(itertools.takewhile(str.strip, cpus)))  # one is enough: each takes a while

    def may_make_root(self, pid: int | str = "self") -> bool:
        """Tell whether process *pid* may, as far as can be seen, make a user namespace whose root is the machine's root.

        Known obstacles are a seccomp profile, whose rules cannot be read (``Seccomp`` of proc_pid_status(5)), the sysctls
        ``user.max_user_namespaces`` (namespaces(7)) and Debian's ``kernel.unprivileged_userns_clone``, or a user namespace in which root is
        another user of the machine (user_namespaces(7)). ``False`` when the process is gone.
        """
        try:
            if self.status(pid).get("Seccomp", "0") != "0":
                return False
            first = _read(f"{self.root}/{pid}/uid_map").split()[:2]
        except (HostError, OSError):
            return False
        allowed = self.setting("user/max_user_namespaces") != "0"
        return allowed and self.setting("kernel/unprivileged_userns_clone") != "0" and first == ["0", "0"]

    def capabilities(self) -> frozenset[int]:
        """Return the numbers of this process's effective capabilities (``CapEff``), over its own user namespace."""
        held = int(self.status()["CapEff"], 16)
        return frozenset(number for number in range(held.bit_length()) if held >> number & 1)

    def machine_capabilities(self) -> frozenset[int]:
        """Return the capabilities that apply to the machine's own resources, such as limits: none in a user namespace.

        The kernel checks these with ``capable`` (``kernel/capability.c``), and the others with ``ns_capable``.
        """
        return frozenset() if self.in_user_namespace() else self.capabilities()

    def in_user_namespace(self) -> bool:
        """Tell whether this process is in another user namespace than the machine's first (user_namespaces(7))."""
        try:
            return (self.root / "self/ns/user").stat().st_ino != _FIRST_USER_NAMESPACE
        except OSError:
            return False

    def in_first_network_namespace(self) -> bool:
        """Tell whether this process is in the machine's first network namespace, whose interfaces are the machine's own.

        Older kernels give it no fixed number; there it is recognised by its sysctls. A procfs shows the sysctls of the reader's namespace.
        """
        with contextlib.suppress(OSError):
            if (self.root / "self/ns/net").stat().st_ino == FIRST_NETWORK_NAMESPACE:
                return True
        return all(self.setting(name) for name in FIRST_NETWORK_SETTINGS)

    def status(self, pid: int | str = "self") -> Mapping[str, str]:
        """Return the fields of ``/proc/PID/status``."""
        return _fields(self._read(f"{pid}/status", f"the status of process {pid}"))

    def setting(self, name: str) -> str:
        """Return the value of a sysctl, such as ``net/ipv6/conf/default/disable_ipv6``; empty where the kernel has none."""
        try:
            return _read(self.root / "sys" / name).strip()
        except OSError:
            return ""

    def aio_free(self) -> int | None:
        """Return the number of native AIO requests that programs may still reserve (io_setup(2)); ``None`` if it cannot be read."""
        most, reserved = self.setting("fs/aio-max-nr"), self.setting("fs/aio-nr")
        return int(most) - int(reserved) if most.isdecimal() and reserved.isdecimal() else None

    def oom_score_adj(self) -> int:
        """Return this process's ``oom_score_adj``, from -1000 to 1000."""
        return int(self._read("self/oom_score_adj"))

    def memory_total(self) -> int:
        """Return the machine's RAM in bytes (``MemTotal``)."""
        fields = _fields(self._read("meminfo", f"the machine's memory in {self.root}"))
        return int(fields["MemTotal"].split()[0]) << 10

    def _read(self, file: str, content: str = "") -> str:
        """Return a file that must be there; an error names its *content*, or else its path."""
        path = self.root / file
        with doing(f"read {content or repr(str(path))}"):
            return _read(path)


def _read(path: Path | str) -> str:
    # Decoded with escapes, because a thread's name (comm) may hold any bytes; not opened as text, which would make "\r" a line end.
    return _text(read_at_once(path))


def _text(content: bytes) -> str:
    return content.decode(errors="backslashreplace")


def _lines(text: str) -> list[str]:
    # Not splitlines(): of all its line ends, the kernel escapes "\n" alone in a name.
    return text.removesuffix("\n").split("\n") if text else []


def _stat(text: str) -> list[str]:
    # proc_pid_stat(5) from its third field on, the state: the name in parentheses before it may hold anything.
    # "flags" (9) is at index 6, "starttime" (22) at 19, "processor" (39) at 36.
    return text.rpartition(")")[2].split()


def start_time(stat: str) -> float:
    """Return the time in seconds from the machine's boot to the start of a process, by its ``/proc/PID/stat``."""
    return int(_stat(stat)[19]) / os.sysconf("SC_CLK_TCK")


def _is_kernels(stat: list[str]) -> bool:
    return bool(int(stat[6]) & _PF_KTHREAD)


def _mappings(lines: Iterable[str]) -> Iterator[MappedMemory]:
    # "ADDRESS POLICY [file=PATH] [huge] [key=number …] [N0=pages …] kernelpagesize_kB=SIZE" a line.
    for line in lines:
        file = _MAPPED_FILE.search(line)
        size = _PAGE_SIZE.search(line)
        huge = " huge" in line
        if size is not None and (file is not None or huge):
            resident = {int(node): (int(pages) * int(size[1])) << 10 for node, pages in _NUMA_PAGES.findall(line)}
            bound = _BOUND.search(line)
            nodes = CpuSet() if bound is None else CpuSet.parse(bound[1])
            yield MappedMemory("" if file is None else file[1], huge, resident, nodes)


def _fields(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in _lines(text))
    return {name.rstrip(): value.strip() for name, _, value in pairs}


def _unified(text: str) -> str:
    return next((line.removeprefix("0::") for line in _lines(text) if line.startswith("0::")), "")
