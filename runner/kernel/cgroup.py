"""Cgroups, version 2: the only module that reads and writes them by path.

Every rule cites ``Documentation/admin-guide/cgroup-v2.rst`` of the Linux source by its heading. Words: a *process* is
**admitted** to a group (``cgroup.procs``), a *thread* is **confined** to one (``cgroup.threads``). A group is identified
by its directory, so the same code serves the host's hierarchy, a container's view of it, and a directory reached through
an open descriptor (``/proc/self/fd/N``).

The calls block for as long as the kernel takes: microseconds to read, about a millisecond to write a cpuset, and some
tens of milliseconds for the first move of a process into another domain (the kernel waits for an RCU grace
period). None of them waits for another process: a file that one has a lease on is refused (:mod:`runner.kernel.leases`).
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Self

import attrs

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError
from runner.base.values import frozen
from runner.facts.memory_limits import MemoryCharge
from runner.kernel.leases import open_at_once, read_at_once

MEMORY_EVENTS = "memory.events"
"""A file that can only be read."""
THREADED_CONTROLLERS = frozenset({"cpu", "cpuset", "perf_event", "pids"})
"""Controllers a threaded subtree may use; any other is a *domain* controller ("Threads": "threaded controllers")."""

_MEANING = {
    # "Threads": a thread moves only between groups of one threaded domain.
    ("cgroup.threads", errno.EOPNOTSUPP): "its process is in another domain; admit the process first",
    ("cgroup.threads", errno.ESRCH): "there is no such thread any more",
    ("cgroup.procs", errno.ESRCH): "there is no such process any more",
    # "Threads": a group of type "domain invalid" can hold nothing until its type is written.
    ("cgroup.procs", errno.EOPNOTSUPP): "the group is 'domain invalid', or its cgroup.procs cannot be read as it is "
    "threaded; write 'threaded' to its cgroup.type, or read cgroup.threads",
    # "Delegation Containment": the writer needs write access to cgroup.procs of the common ancestor.
    ("cgroup.procs", errno.EACCES): "the opener of the file may not write to cgroup.procs of the common ancestor; "
    "use a descriptor that a process with that right has opened",
    # "No Internal Process Constraint": a domain with domain controllers switched on for its children holds none itself.
    ("cgroup.procs", errno.EBUSY): "the group has domain controllers switched on for its children",
    ("cgroup.subtree_control", errno.EBUSY): "the group holds processes, or a child still uses the controller",
    ("cgroup.subtree_control", errno.ENOENT): "the controller is not in cgroup.controllers; switch it on in the parent",
    # "Threads": the parent must be a valid domain without domain controllers, the group itself empty.
    ("cgroup.type", errno.EOPNOTSUPP): "the group is populated, or its parent has a domain controller in "
    "cgroup.subtree_control; only cpu, cpuset, perf_event and pids may be there",
    ("cpuset.cpus", errno.ERANGE): "it names a CPU that this machine cannot have",
    ("cpuset.cpus", errno.EINVAL): "it names a CPU that this machine cannot have",
    ("cpuset.cpus", errno.ENOSPC): "the group is populated and would be left without CPUs",
    # update_exclusive_cpumask and validate_change of kernel/cgroup/cpuset.c.
    (
        "cpuset.cpus.exclusive",
        errno.EINVAL,
    ): "a cgroup beside it has some of these CPUs in its own cpuset.cpus.exclusive, or no others in its cpuset.cpus",
    ("cpuset.mems", errno.EINVAL): "it names a NUMA node without memory",
    ("cpuset.mems", errno.ENOSPC): "the group is populated and would be left without memory nodes",
}
"""(file, errno) → what the kernel means by it, where ``strerror`` does not say."""


class CgroupError(HostError):
    """A refusal of the kernel to read or change a group; *errno* is its error number."""

    def __init__(self, sentence: str, number: int, *, remedy: str = "") -> None:
        super().__init__(sentence, remedy=remedy)
        self.errno = number

    @property
    def gone(self) -> bool:
        """Return whether the group or the file does not exist, or does not exist any more."""
        return self.errno in {errno.ENOENT, errno.ENODEV}


class LeasedError(CgroupError):
    """A process holds a lease on a file of the group, so that opening it would wait for that process."""


def write_control(fd: int, value: str, name: str) -> None:
    """Write *value* to the control file open as *fd*; *name* is the path in an error.

    The kernel checks the rights of the process that **opened** the file (since Linux 5.16), so a descriptor of
    ``cgroup.procs`` is a capability that can be passed on: its receiver enters the group by writing ``0``. Each write
    is one request to the kernel, whatever the file offset. The line end is part of it, so that clearing a file (an
    empty *value*) writes one byte: a write of none may never reach the file's handler.

    Raises :class:`CgroupError`.
    """
    try:
        os.write(fd, f"{value}\n".encode())
    except OSError as error:
        raise _refused(f"write {value!r} to", name, error) from error


def read_members(fd: int, name: str) -> frozenset[int]:
    """Return the threads in the group whose ``cgroup.threads`` is open as *fd*; *name* is its path in an error.

    The kernel asks no more than that *fd* was opened for reading, wherever the group lies, and gives the numbers of the
    reader's PID namespace, 0 for a thread that it cannot name (``kernel/cgroup/cgroup.c``, ``cgroup_procs_show``). Reading
    from offset 0 begins anew.

    Raises :class:`CgroupError`; ``EBADF`` if the descriptor was opened only for writing.
    """
    content = b""
    try:
        while piece := os.pread(fd, 1 << 16, len(content)):
            content += piece
    except OSError as error:
        raise _refused("read", name, error) from error
    return frozenset(map(int, content.split()))


@frozen
class Cgroup:
    """One group, identified by the *path* of its directory; it holds no descriptor and no state.

    Where the kernel refuses, methods raise :class:`CgroupError`, but for :meth:`exists`, :meth:`attribute` and :meth:`below`: what
    cannot be read is not there for them.
    """

    path: Path = attrs.field(converter=Path)

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.name

    @property
    def parent(self) -> Self:
        """The parent group; meaningless for the mount point itself."""
        return attrs.evolve(self, path=self.path.parent)

    def child(self, name: str) -> Self:
        """Return the group *name* directly below this one, whether it exists or not.

        Raises ``ValueError`` unless *name* is a single plain component: names often come from outside.
        """
        if name in {"", ".", ".."} or "/" in name or "\0" in name:
            raise ValueError(f"{name!r} is not the name of a cgroup")
        return attrs.evolve(self, path=self.path / name)

    def at(self, path: str) -> Self:
        """Return the group at *path* as ``/proc/PID/cgroup`` writes it, this one being the hierarchy's mount point.

        Raises ``ValueError`` for a path that leads out of the reader's cgroup namespace (``/../…``).
        """
        if not path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"{path!r} is not a group of this cgroup namespace")
        return attrs.evolve(self, path=self.path / path.lstrip("/"))

    # -- the directory ("Organizing Processes and Threads") ----------------------------------------------------------

    def exists(self) -> bool:
        """Tell whether the group exists."""
        return self.path.is_dir()

    def create(self) -> None:
        """Create the group unless it exists. The parent must exist.

        Under a threaded domain the new group is ``domain invalid`` until :meth:`make_threaded` ("Threads").
        """
        try:
            self.path.mkdir()
        except FileExistsError:
            pass
        except OSError as error:
            raise _refused("create", str(self.path), error) from error

    def remove(self) -> bool:
        """Remove the group and return whether it is gone; ``False`` while it has live members or children (EBUSY).

        Zombies do not keep a group ("Processes": it "can be removed"). A group that did not exist counts as gone.
        """
        try:
            self.path.rmdir()
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno == errno.EBUSY:
                return False
            raise _refused("remove", str(self.path), error) from error
        return True

    def children(self) -> tuple[str, ...]:
        """Return the names of the groups directly below, sorted."""
        try:
            with os.scandir(self.path) as entries:
                return tuple(sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False)))
        except OSError as error:
            raise _refused("list", str(self.path), error) from error

    def below(self, most: int) -> list[Self]:
        """Return up to *most* descendants of this group, parents before their children."""
        return [attrs.evolve(self, path=Path(path)) for path, _, _ in islice(os.walk(self.path), 1, most + 1)]

    def attribute(self, name: str) -> str | None:
        """Return the extended attribute *name* of the group; ``None`` where it has none, or is gone.

        It ends with the group, whatever becomes of its writer (``KERNFS_ROOT_SUPPORT_USER_XATTR``, since Linux 5.7).
        """
        try:
            return os.getxattr(self.path, name).decode(errors="replace")
        except OSError:
            return None

    def set_attribute(self, name: str, value: str) -> None:
        """Set the extended attribute *name* of the group; *name* begins with ``user.``."""
        try:
            os.setxattr(self.path, name, value.encode())
        except OSError as error:
            raise _refused(f"set {name!r} of", str(self.path), error) from error

    # -- control files ("Interface Files") ---------------------------------------------------------------------------

    def read(self, file: str) -> str:
        """Return the content of control file *file* without its last line end."""
        path = f"{self.path}/{file}"  # no Path: a pass over the controller's tree reads thousands of files
        try:
            return read_at_once(path).decode().removesuffix("\n")
        except OSError as error:
            raise _refused("read", path, error) from error

    def read_if_there(self, file: str) -> str | None:
        """Return the content of *file* as :meth:`read` does, or ``None`` where its controller is off or the group is gone."""
        try:
            return self.read(file)
        except CgroupError as error:
            if error.gone:
                return None
            raise

    def write(self, file: str, value: str) -> None:
        """Write *value* to control file *file*; the empty string clears it.

        On newer kernels a lower ``memory.max`` or ``memory.high`` takes effect with the group's next charge: they heed
        ``O_NONBLOCK`` there ("memory.max"), so that the writer reclaims nothing.
        """
        fd = self.open(file)
        try:
            write_control(fd, value, str(self.path / file))
        finally:
            os.close(fd)

    def open(self, file: str) -> int:
        """Open control file *file* for writing and return the descriptor, which the caller closes or passes on.

        Without ``O_CREAT`` a misspelt name fails, and no file is ever created in an ordinary directory that is not a
        group. The descriptor of ``cgroup.threads`` can also be read (:func:`read_members`); those of ``cgroup.events`` and
        ``memory.events`` can only be read.
        """
        reading = dict.fromkeys(("cgroup.events", MEMORY_EVENTS), os.O_RDONLY)
        mode = {"cgroup.threads": os.O_RDWR, **reading}.get(file, os.O_WRONLY)
        try:
            return open_at_once(self.path / file, mode)
        except OSError as error:
            raise _refused("open", str(self.path / file), error) from error

    # -- type and controllers ----------------------------------------------------------------------------------------

    def kind(self) -> str:
        """Return ``domain``, ``domain threaded``, ``domain invalid`` or ``threaded`` ("cgroup.type").

        The root of the hierarchy has no such file; it is a domain.
        """
        try:
            return self.read("cgroup.type")
        except CgroupError as error:
            if error.errno == errno.ENOENT and self.exists():
                return "domain"
            raise

    def make_threaded(self) -> None:
        """Turn the group into a threaded one, whose parent becomes ``domain threaded``; this cannot be undone.

        One that is threaded already is left alone; a ``domain invalid`` one, as a crash between ``mkdir`` and this
        step leaves it, is finished. Needs an empty group and a parent without domain controllers ("Threads").
        """
        if self.kind() != "threaded":
            self.write("cgroup.type", "threaded")

    def controllers(self) -> frozenset[str]:
        """Return the controllers this group can switch on for its children ("Top-down Constraint")."""
        return frozenset(self.read("cgroup.controllers").split())

    def enabled(self) -> frozenset[str]:
        """Return the controllers switched on for its children ("Enabling and Disabling")."""
        return frozenset(self.read("cgroup.subtree_control").split())

    def enable(self, controllers: Iterable[str]) -> None:
        """Switch *controllers* on for the children; those that are on already are not written.

        Trap: this *succeeds* for threaded controllers while the group itself holds processes, and makes it a
        threaded domain then and there; children made afterwards as ordinary domains are ``domain invalid``.
        """
        missing = sorted(set(controllers) - self.enabled())
        if missing:
            self.write("cgroup.subtree_control", " ".join(f"+{name}" for name in missing))

    # -- cpuset ("Cpuset Interface Files") ---------------------------------------------------------------------------

    def cpus(self) -> CpuSet:
        """Return ``cpuset.cpus`` as it was written; the empty set stands for "what the parent has"."""
        return self._read_set("cpuset.cpus")

    def effective_cpus(self) -> CpuSet:
        """Return the CPUs that the members are allowed to run on in effect."""
        return self._read_set("cpuset.cpus.effective")

    def mems(self) -> CpuSet:
        """Return the NUMA nodes of ``cpuset.mems`` as written; the empty set stands for "what the parent has"."""
        return self._read_set("cpuset.mems")

    def effective_mems(self) -> CpuSet:
        """Return the NUMA nodes of ``cpuset.mems.effective``; the empty set where the cpuset controller is off."""
        return CpuSet.parse(self.read_if_there("cpuset.mems.effective") or "")

    def set_cpus(self, cpus: CpuSet) -> CpuSet:
        """Write ``cpuset.cpus`` and return ``cpuset.cpus.effective`` as read back, which the caller must compare.

        The kernel silently leaves out CPUs that are offline or that the parent does not have; when none remains, the group runs on all CPUs
        of its parent.
        """
        self.write("cpuset.cpus", str(cpus))
        return self.effective_cpus()

    # -- partitions ("cpuset.cpus.partition") ------------------------------------------------------------------------

    def exclusive_cpus(self) -> CpuSet | None:
        """Return ``cpuset.cpus.exclusive`` as written; ``None`` if the kernel has no such file: before 6.7, without cpuset."""
        if not (self.path / "cpuset.cpus.exclusive").exists():
            return None
        return self._read_set("cpuset.cpus.exclusive")

    def partition(self) -> str:
        """Return ``cpuset.cpus.partition``: ``member``, ``root``, ``isolated``, or one of the latter with `` invalid (reason)``."""
        return self.read_if_there("cpuset.cpus.partition") or "member"

    def end_partition(self) -> None:
        """Make the group a member of its parent's partition, without exclusive CPUs; it may have been one before."""
        if self.partition() != "member":
            self.write("cpuset.cpus.partition", "member")
        if self.exclusive_cpus():
            self.write("cpuset.cpus.exclusive", "")

    # -- members -----------------------------------------------------------------------------------------------------

    def admit(self, pid: int) -> None:
        """Move the process *pid* with all its threads here; 0 is the caller ("Processes").

        A threaded group takes a process from any domain this way, and the process changes its domain. A single thread
        moves only within its domain, by :meth:`confine`.
        """
        self.write("cgroup.procs", str(pid))

    def confine(self, tid: int) -> None:
        """Move the thread *tid* alone here; its process must be in this threaded domain ("Threads")."""
        self.write("cgroup.threads", str(tid))

    def processes(self) -> frozenset[int]:
        """Return the processes of a *domain*, its threaded descendants included; 0 is one this reader cannot name.

        In a threaded group ``cgroup.procs`` is not readable (EOPNOTSUPP): ask for :meth:`threads`.
        """
        return frozenset(map(int, self.read("cgroup.procs").split()))

    def each_process(self) -> Iterator[int]:
        """Yield the processes of :meth:`processes` in the kernel's order, reading some hundreds at a time."""
        return self._each("cgroup.procs")

    def each_thread(self) -> Iterator[int]:
        """Yield the threads of :meth:`threads`, as :meth:`each_process` does."""
        return self._each("cgroup.threads")

    def threads(self) -> frozenset[int]:
        """Return the threads in exactly this group; 0 is one that the reader's PID namespace cannot name."""
        return frozenset(map(int, self.read("cgroup.threads").split()))

    def populated(self) -> bool:
        """Tell whether a live process or thread is here or below ("[Un]populated Notification").

        A change of ``cgroup.events`` can be waited for with poll (``POLLPRI``) or inotify (``IN_MODIFY``).
        """
        return flat_keyed(self.read("cgroup.events")).get("populated") == 1

    def charge(self) -> MemoryCharge:
        """Return the memory charged to the group (``memory.current``, ``hugetlb.*.current``)."""
        files = self.path.glob("hugetlb.*B.current")
        return MemoryCharge(int(self.read("memory.current")), sum(int(self.read(file.name)) for file in files))

    def huge_page_limit_files(self) -> Iterator[str]:
        """Yield the names of the files that limit the group's huge pages: for each page size, pages in use and pages reserved."""
        return (file.name for file in self.path.glob("hugetlb.*B.*max"))

    def huge_page_limit(self) -> int:
        """Return the bytes of huge pages that the group may have in use; page sizes without a limit are not counted."""
        texts = (self.read_if_there(file.name) or "" for file in self.path.glob("hugetlb.*B.max"))
        return sum(int(text) for text in texts if text.isdecimal())

    def memory_in_use(self) -> int:
        """Return the bytes charged to the group and its descendants."""
        return int(self.read("memory.current"))

    def memory_kept(self) -> int:
        """Return the bytes of :meth:`memory_in_use` without the page cache of files, which the kernel can take back."""
        stat = flat_keyed(self.read("memory.stat"))
        return max(self.memory_in_use() - stat.get("active_file", 0) - stat.get("inactive_file", 0), 0)

    def reclaim(self, *, lower: bool = False) -> None:
        """Let the kernel reclaim the group's memory, such as page cache and cached file names ("memory.reclaim", since Linux 5.19).

        Memory held by pipes and sockets cannot be reclaimed: the kernel scans each such page 16 times before it gives up, which takes
        seconds for each GiB. With *lower*, ``memory.max`` becomes the memory still in use, in whole MiB. Before Linux 6.16 that write
        reclaims in the same way if the use has grown meanwhile.
        """
        with contextlib.suppress(CgroupError):  # EAGAIN: not all of it can be reclaimed; or the group is gone
            self.write("memory.reclaim", str(self.memory_in_use()))
        if lower:
            with contextlib.suppress(CgroupError):
                self.write("memory.max", str(-(-self.memory_in_use() >> 20) << 20))

    def memory_limit(self) -> int | None:
        """Return ``memory.max``; ``None`` if there is no limit, or no memory controller."""
        text = self.read_if_there("memory.max")
        return int(text) if text is not None and text.isdecimal() else None

    def oom_kills(self) -> int:
        """Return the number of processes that the kernel has killed because the group or a descendant was out of memory."""
        return flat_keyed(self.read_if_there(MEMORY_EVENTS) or "").get("oom_kill", 0)

    def tasks(self) -> tuple[int, float]:
        """Return how many processes and threads are in the group or below, and how many may be (``pids.current``, ``pids.max``)."""
        most = self.read_if_there("pids.max") or "max"
        return int(self.read_if_there("pids.current") or 0), int(most) if most.isdecimal() else math.inf

    def kill(self) -> None:
        """End every process of the group and its descendants, including those forked meanwhile ("cgroup.kill").

        It is refused for a threaded group (EOPNOTSUPP), because the group's processes belong to its domain.
        """
        self.write("cgroup.kill", "1")

    def _each(self, file: str) -> Iterator[int]:
        path = self.path / file
        try:
            with os.fdopen(open_at_once(path)) as lines:
                yield from map(int, lines)
        except OSError as error:
            raise _refused("read", str(path), error) from error

    def _read_set(self, file: str) -> CpuSet:
        text = self.read(file)
        try:
            return CpuSet.parse(text)
        except ValueError as error:
            raise CgroupError(f"cannot read {self.path / file}: {error}", errno.EBADMSG) from error


def flat_keyed(text: str) -> dict[str, int]:
    """Return the numbers of a control file by name ("Format": "Flat keyed"); ``memory.events`` includes descendants."""
    return {name: int(value) for name, value in map(str.split, text.splitlines())}


def _refused(verb: str, name: str, error: OSError) -> CgroupError:
    number = error.errno or 0
    meaning = _MEANING.get((name.rpartition("/")[2], number))
    with contextlib.suppress(OSError):
        if number == errno.ENOENT and meaning is None and not Path(name).parent.is_dir():
            meaning = "there is no such cgroup"
    kind = LeasedError if isinstance(error, BlockingIOError) else CgroupError
    return kind(f"cannot {verb} {name}" + (f": {meaning}" if meaning else ""), number)
