"""The limit behind a failed call: its name, its value, and the processes or users that it counts.

An ``errno`` alone says none of that: EAGAIN of fork(2) is one of four limits, and ENOSPC of inotify_add_watch(2) is no full volume.
"""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import PurePosixPath
from typing import Literal

import attrs

from runner.base.errors import HostError
from runner.base.values import define, frozen
from runner.facts.file_errors import remedy_of
from runner.facts.hardware import hugetlb_name
from runner.facts.roots import Roots
from runner.kernel.cgroup import flat_keyed
from runner.kernel.small_files import read_text

Use = Literal["file", "process", "inotify", "epoll", "lock", "backing", "aio", "ring", "mapping", "namespace"]
"""The purpose of the call that failed. ``file`` is any descriptor, and memory; ``inotify`` and ``epoll`` are watches, ``lock`` is locked
memory, ``backing`` a file that is a guest's RAM, ``aio`` native AIO, ``ring`` an io_uring, ``mapping`` memory that a device reaches."""

_ALL_CONTAINERS = "in all containers without a user namespace of their own"
CAP_IPC_LOCK, _CAP_SYS_RESOURCE = 14, 24
"""``include/uapi/linux/capability.h``."""
_NEARLY = 0.98
"""The share of a machine-wide limit that counts as reached: the use may have fallen between the failure and this reading."""


def limited(sentence: str, error: OSError, use: Use = "file", user_id: int = 0) -> HostError:
    """Return the error that *sentence* begins, of a call of the user *user_id* that has failed, with the limit as its remedy.

    Example::

        raise limited(f"cannot start {role}", error, "process") from error
    """
    return HostError(sentence, remedy=limit_behind(error.errno or 0, use, user_id))


def limit_behind(number: int, use: Use, user_id: int = 0, roots: Roots | None = None) -> str:
    """Return the limit by which a call for *use* has failed with the ``errno`` *number*, and its remedy; empty if none is known."""
    found = _BEHIND.get((number, use)) or _BEHIND.get((number, None))
    return (found and found(_ShownLimits(roots or Roots(), user_id))) or remedy_of(number)


_WORDS = {
    os.strerror(number): number
    for number in (errno.EAGAIN, errno.EPERM, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EFBIG, errno.ENOSPC)
}
_USES: tuple[tuple[str, Use], ...] = (
    ("mlock", "lock"),
    ("dma_map", "mapping"),
    ("backing store", "backing"),
    ("AIO context", "aio"),
    ("io_uring", "ring"),
    ("namespace|CLONE_NEW", "namespace"),
    ("thread|fork|clone|child process", "process"),
    ("inotify", "inotify"),
    ("epoll", "epoll"),
)
_AMBIGUOUS = frozenset({errno.EAGAIN, errno.EPERM, errno.ENOSPC})
"""Error numbers that are taken for a limit only where the message names the kind of call."""


def limit_in_words(text: str, user_id: int = 0) -> str:
    """Return the limit that a child's last words *text* point to, and its remedy; empty if they point to none."""
    found = max((words for words in _WORDS if words in text), key=len, default=None)
    if found is None:
        return ""
    number = _WORDS[found]
    use: Use = next((use for words, use in _USES if re.search(words, text, re.IGNORECASE)), "file")
    return "" if number in _AMBIGUOUS and (number, use) not in _BEHIND else limit_behind(number, use, user_id)


def limit_of_signal(name: str) -> str:
    """Return the limit for which the kernel sends a process the signal *name*, and its remedy; empty if there is none."""
    if name == "SIGXFSZ":
        return limit_behind(errno.EFBIG, "file")
    if name == "SIGSYS":
        return "a seccomp profile, the container's or its own, forbids a system call; the kernel's log names it (`dmesg`, audit)"
    return ""


def own_groups(controller: str, roots: Roots | None = None) -> Iterator[PurePosixPath]:
    """Yield the directory of this process's cgroup that has *controller*, and its ancestors, as far as they are visible.

    They are of version 1 where ``/proc/self/cgroup`` lists the controller there. In a container without a cgroup namespace that file has a
    path that is not visible to it; then the top of the mount is used.
    """
    roots = roots or Roots()
    lines = [line.split(":", 2) for line in read_text(roots.proc / "self/cgroup").splitlines()]
    mounts, path = [roots.cgroup, roots.cgroup / "unified"], next((path for _, names, path in lines if not names), "/")
    for _, names, path_there in lines:
        if controller in names.split(","):
            mounts, path = [roots.cgroup / controller, roots.cgroup / names], path_there
    for mount in mounts:
        if os.path.isdir(mount):  # noqa: PTH112 - the kernel's files
            top, group = PurePosixPath(mount), PurePosixPath(mount) / path.lstrip("/")
            group = group if os.path.isdir(group) else top  # noqa: PTH112 - a pure path
            yield from (each for each in (group, *group.parents) if each.is_relative_to(top))
            return


@frozen
class _ShownLimits:
    """Limits as the kernel shows them; each method returns one with its remedy, or an empty string if that one was not reached."""

    roots: Roots
    user_id: int

    def files(self) -> str:
        most = _soft_limit(resource.RLIMIT_NOFILE)
        return f"this process may have {most} files open: raise its limit (RLIMIT_NOFILE, `ulimit -n`)"

    def all_files(self) -> str:
        return f"all processes of the machine may have {self._sysctl('fs/file-max')} files open: raise fs.file-max"

    def size(self) -> str:
        most = _soft_limit(resource.RLIMIT_FSIZE)
        return (
            "" if most is None else f"a file here may have {most} bytes: raise that limit (RLIMIT_FSIZE, `ulimit -f`)"
        )

    def queues(self) -> str:
        return self._of_user("fs/inotify/max_user_instances", "queues of file events (inotify)")

    def watches(self) -> str:
        return self._of_user("fs/inotify/max_user_watches", "watches of files (inotify)")

    def waits(self) -> str:
        return self._of_user("fs/epoll/max_user_watches", "watches of descriptors (epoll)")

    def gone(self) -> str:
        return "the process has ended, or is in another PID namespace"

    def filter(self) -> str:
        if "\nSeccomp:\t2\n" not in read_text(self.roots.proc / "self/status"):
            return ""
        return (
            "the container's seccomp profile refuses the call that makes a thread, and where it does not know clone3(2) it must say "
            "ENOSYS: use a newer container runtime (libseccomp from 2.5 on)"
        )

    def processes(self) -> str:
        return self._group_processes() or self._all_processes() or self._other_processes()

    def _group_processes(self) -> str:
        for group in own_groups("pids", self.roots):
            most, used = (read_text(group / name).strip() for name in ("pids.max", "pids.current"))
            # Processes that have ended since are not in pids.current, but a refused fork stays counted.
            refused = read_text(group / "pids.events").split()[1:2] not in ([], ["0"])
            if most.isdecimal() and used.isdecimal() and (refused or int(used) >= int(most)):
                return (
                    f"the container may have {most} processes and threads (pids.max of {str(group)!r}): raise it "
                    "(the kubelet's podPidsLimit, `--pids-limit`, TasksMax=)"
                )
        return ""

    def _other_processes(self) -> str:
        """Return the remaining possibility: the processes of the user in other containers, which no file counts."""
        most = None if self.user_id == 0 else _soft_limit(resource.RLIMIT_NPROC)
        of_user = (
            ""
            if most is None
            else f"the {most} processes and threads that user {self.user_id} may have in all containers (RLIMIT_NPROC), "
        )
        return (
            f"the kernel does not show by which limit it is; raise {of_user}pids.max of a cgroup above, or free memory"
        )

    def _all_processes(self) -> str:
        used = read_text(self.roots.proc / "loadavg").split()[3:4]  # 2/613: 613 threads on the machine
        running = used[0].partition("/")[2] if used else ""
        for name in ("kernel/threads-max", "kernel/pid_max"):
            most = self._sysctl(name)
            if most.isdecimal() and running.isdecimal() and int(running) >= _NEARLY * int(most):
                return f"the machine may have {most} threads, and has {running}: raise {name.replace('/', '.')}"
        return ""

    def memory(self) -> str:
        if (most := _soft_limit(resource.RLIMIT_AS)) is not None:
            return f"a process here may have {most} bytes of addresses: lift that limit (RLIMIT_AS, `ulimit -v`)"
        if self._sysctl("vm/overcommit_memory") == "2":
            info = dict(each.split(":", 1) for each in read_text(self.roots.proc / "meminfo").splitlines())
            used, total = (info.get(name, "some").strip() for name in ("Committed_AS", "CommitLimit"))
            return (
                f"the machine promises no more than {total} of memory and has promised {used}, as vm.overcommit_memory is 2: raise "
                "vm.overcommit_ratio"
            )
        limit = memory_limit(self.roots)
        return (
            "the machine is short of memory"
            if limit is None
            else f"{limit}: raise limits.memory, or give the guest less"
        )

    def locked(self) -> str:
        if (most := hard_limit(resource.RLIMIT_MEMLOCK)) is None:
            return self.memory()
        return (
            f"a process here may lock {most >> 10} KiB of memory (RLIMIT_MEMLOCK, `ulimit -l`): lift that limit "
            "(LimitMEMLOCK=infinity of the container runtime's service, `--ulimit memlock=-1`)"
        )

    def backing(self) -> str:
        """Return the reason why mmap(2) of a memory file failed; it is not a lack of RAM, of which none is used yet."""
        if _soft_limit(resource.RLIMIT_AS) is not None or self._sysctl("vm/overcommit_memory") == "2":
            return self.memory()
        info = read_text(self.roots.proc / "meminfo")
        free = re.search(r"^HugePages_Free: *([0-9]+)", info, re.MULTILINE)
        return (
            f"huge pages are short, if the guest has them (HugePages_Free is {'unknown' if free is None else free[1]}): raise "
            "vm.nr_hugepages on the node, or give the guest less"
        )

    def requests(self) -> str:
        used, most = (self._sysctl(f"fs/{name}") for name in ("aio-nr", "aio-max-nr"))
        return (
            f"all programs of the machine may have {most} requests of native AIO, and have {used}: raise fs.aio-max-nr, or set the "
            'disk\'s aio = "threads"'
        )

    def rings(self) -> str:
        switch = self._sysctl("kernel/io_uring_disabled")
        return (
            f"io_uring is not allowed here (kernel.io_uring_disabled is {switch}, and the container's seccomp profile has a say): set "
            'the disk\'s aio = "threads"'
        )

    def mappings(self) -> str:
        parameter = self.roots.sys / "module/vfio_iommu_type1/parameters/dma_entry_limit"
        most = read_text(parameter).strip() or "some"
        return f"VFIO takes {most} mappings of a guest's memory: raise dma_entry_limit of the module vfio_iommu_type1, or use iommufd"

    def namespaces(self) -> str:
        most = self._sysctl("user/max_user_namespaces")
        return f"a user may make {most} user namespaces here: raise user.max_user_namespaces on the node"

    def no_namespaces(self) -> str:
        return (
            "a user namespace is not allowed here, by the container's seccomp profile (a pod's RuntimeDefault allows none, "
            "`seccompProfile: {type: Unconfined}` does), by its AppArmor profile, or by the node "
            "(kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)"
        )

    def _sysctl(self, path: str) -> str:
        return read_text(self.roots.proc / "sys" / path).strip() or "some"

    def _of_user(self, path: str, what: str) -> str:
        return f"user {self.user_id} may have {self._sysctl(path)} {what} {_ALL_CONTAINERS}: raise {path.replace('/', '.')}"


_BEHIND: dict[tuple[int, Use | None], Callable[[_ShownLimits], str]] = {
    (errno.EMFILE, None): _ShownLimits.files,
    (errno.EMFILE, "inotify"): _ShownLimits.queues,
    (errno.ENFILE, None): _ShownLimits.all_files,
    (errno.ENOSPC, "inotify"): _ShownLimits.watches,
    (errno.ENOSPC, "epoll"): _ShownLimits.waits,
    (errno.EFBIG, None): _ShownLimits.size,
    (errno.EAGAIN, "process"): _ShownLimits.processes,
    (errno.EPERM, "process"): _ShownLimits.filter,
    (errno.ENOMEM, None): _ShownLimits.memory,
    (errno.ENOMEM, "lock"): _ShownLimits.locked,
    (errno.ENOMEM, "mapping"): _ShownLimits.locked,
    (errno.ENOMEM, "ring"): _ShownLimits.locked,
    (errno.ENOMEM, "backing"): _ShownLimits.backing,
    (errno.EAGAIN, "aio"): _ShownLimits.requests,
    (errno.EPERM, "ring"): _ShownLimits.rings,
    (errno.ENOSPC, "mapping"): _ShownLimits.mappings,
    (errno.ENOSPC, "namespace"): _ShownLimits.namespaces,
    (errno.EPERM, "namespace"): _ShownLimits.no_namespaces,
    (errno.ESRCH, None): _ShownLimits.gone,
}
"""(``errno``, use) → the method that returns the limit behind it; the use is ``None`` where it does not matter."""


@frozen
class MemoryLimit:
    """The limit of the memory of a cgroup that this process is in."""

    group: PurePosixPath
    file: str
    size: int
    """Bytes."""

    def __str__(self) -> str:
        return f"the container may have {self.size >> 20} MiB of memory ({self.file} of {str(self.group)!r})"


def memory_limit(roots: Roots | None = None) -> MemoryLimit | None:
    """Return the least limit of memory of this process's cgroups, of either version, as far as they can be seen."""
    limits = (
        MemoryLimit(group, file, int(value))
        for group in own_groups("memory", roots)
        for file in ("memory.max", "memory.limit_in_bytes")
        if (value := read_text(group / file).strip()).isdecimal() and int(value) < _UNLIMITED
    )
    return min(limits, key=lambda limit: limit.size, default=None)


def cpu_limits(root: PurePosixPath, cgroup: str) -> Iterator[float]:
    """Yield the limits of CPU time (``cpu.max``) of *cgroup* and its ancestors, as numbers of CPUs."""
    for value in _of_each(root, cgroup, "cpu.max"):
        quota, _, period = value.partition(" ")
        if quota.isdecimal() and period.isdecimal():
            yield int(quota) / int(period)


def huge_limits(root: PurePosixPath, cgroup: str, page_size: int) -> Iterator[int]:
    """Yield the huge page limits of *cgroup* and its ancestors for *page_size*, in bytes: for pages in use, then for reservations."""
    for kind in ("max", "rsvd.max"):
        for value in _of_each(root, cgroup, f"hugetlb.{hugetlb_name(page_size)}.{kind}"):
            if value.isdecimal():
                yield int(value)


def _of_each(root: PurePosixPath, cgroup: str, name: str) -> Iterator[str]:
    group = root / cgroup.lstrip("/")
    for each in (group, *group.parents):
        yield read_text(each / name).strip()
        if each == root:
            return


def read_lockable(capabilities: Collection[int]) -> int | None:
    """Return the bytes that a child started within :func:`lockable` may lock, ``None`` without a limit."""
    return None if _CAP_SYS_RESOURCE in capabilities else hard_limit(resource.RLIMIT_MEMLOCK)


@contextmanager
def lockable(size: int) -> Iterator[None]:
    """Let children started in the block lock *size* bytes, as far as possible: above the hard limit this needs CAP_SYS_RESOURCE."""
    before = soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= size:
        yield
        return
    try:
        try:
            enough = hard == resource.RLIM_INFINITY or hard >= size
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard) if enough else (resource.RLIM_INFINITY,) * 2)
        except ValueError:  # not allowed, and root with CAP_IPC_LOCK does not need it
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


_UNLIMITED = 1 << 62
"""Bytes; version 1 shows no limit as the largest number of pages (``PAGE_COUNTER_MAX``)."""


def no_kills() -> str:
    """Return an empty string: the kernel has killed no process."""
    return ""


@define
class OutOfMemory:
    """The kernel's out-of-memory kills, in the cgroup of this process at the object's creation and in its cgroup now.

    ``oom_kill`` of ``memory.events`` (cgroup-v2.rst) counts those of the groups below as well, that of version 1
    (``memory.oom_control``) those of the group alone.
    """

    roots: Roots = attrs.field(factory=Roots)
    _known: dict[PurePosixPath, tuple[int, int]] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if (group := next(own_groups("memory", self.roots), None)) is not None:
            self._known[group] = self._kills(group)

    def kills(self) -> str:
        """Return which memory was short for the kernel's kills since the last call; empty if there were none."""
        found = ""
        for group in dict.fromkeys((*self._known, *islice(own_groups("memory", self.roots), 1))):
            kills, at_limit = self._kills(group)
            before, at_limit_before = self._known.get(group, (0, 0))
            self._known[group] = kills, at_limit
            if kills > before:
                found = self._reason(at_limit > at_limit_before)
        return found

    def _reason(self, at_limit: bool) -> str:  # noqa: FBT001 - of this class alone
        if at_limit and (limit := memory_limit(self.roots)) is not None:
            return f"out of memory, as {limit}; raise limits.memory, or give the guest less"
        return "out of memory, the machine's or that of a cgroup above the container's; free some of the node's"

    def _kills(self, group: PurePosixPath) -> tuple[int, int]:
        """Return the number of processes killed in *group*, and how often the group or a descendant was at its limit."""
        if text := read_text(group / "memory.events"):
            found = flat_keyed(text)
            return found.get("oom_kill", 0), found.get("oom", 0)
        kills = flat_keyed(read_text(group / "memory.oom_control")).get("oom_kill", 0)
        return kills, int(read_text(group / "memory.failcnt").strip() or 0)


def _soft_limit(which: int) -> int | None:
    """Return the soft limit of this process; ``None`` without a limit."""
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def hard_limit(which: int) -> int | None:
    """Return the most that this process and its children can be given (getrlimit(2)); ``None`` without a limit."""
    _, hard = resource.getrlimit(which)
    return None if hard == resource.RLIM_INFINITY else hard
