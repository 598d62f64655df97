"""The instances' cgroup files that pods can reach, held open so that no lease on them can block the controller.

A pod's root user, the same as the controller's, owns the cgroup files, and reaches some of them: by the descriptors that the controller
passes on, or by a mount. :mod:`runner.kernel.leases` has the kernel's rules.

They are opened for reading and writing, whatever their mode is, because a read lease is possible on a file that is open for reading only,
and a pod may change the mode of a file that it owns. cgroup v2 lets root open any of its files so (``CAP_DAC_OVERRIDE``; its root has no
``KERNFS_ROOT_EXTRA_OPEN_PERM_CHECK``), also those that have nothing to be read or written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import attrs
import trio

from runner.base.values import frozen
from runner.kernel.cgroup import Cgroup
from runner.kernel.files import Descriptor, owned
from runner.kernel.leases import open_at_once

FILES = (
    *("cgroup.controllers", "cgroup.events", "cgroup.max.descendants", "cgroup.procs", "cgroup.subtree_control"),
    *("cgroup.threads", "cgroup.type"),
    *("cpuset.cpus", "cpuset.cpus.effective", "cpuset.cpus.exclusive", "cpuset.cpus.partition", "cpuset.mems"),
    "cpu.weight",
)
"""The control files of floats and vCPUs' groups that the controller opens; of domains pods reach only ``memory.events``, of other groups
nothing."""
WRITTEN = frozenset({"cgroup.procs", "cgroup.threads"})
"""The files that pods get to write."""
_MOST_AWAITED = 64
"""Files whose leases are waited for at a time, a thread each."""


@frozen
class _HeldFile:
    inode: int
    """The inode, which differs if the file was removed and created again, with its group or its controller."""
    fd: int


@frozen
class SentFiles:
    """Control files that pods get; each writable one is opened once, and kept as long as the instance has cgroups.

    A write to ``cgroup.procs`` holds the lock of all cgroups of the machine while it moves the process, some 15 us for each of its threads.
    The kernel admits the writers of one open file one at a time (``of->mutex`` in ``kernfs_fop_write_iter``), so a thousand
    threads that write to it wait for the lock only once. A file that its receiver opens again, by ``/proc/self/fd``, moves nothing
    where the hierarchy is mounted with ``nsdelegate``: it has the receiver's cgroup namespace, which does not contain float.

    A file that can only be read is opened each time: for poll(2), an open file remembers which change its reader has seen.
    """

    _kept: dict[Path, tuple[Path, Descriptor]] = attrs.field(factory=dict)
    """Path of a file → the directory of the instance's float, and the descriptor."""

    def open(self, files: Sequence[tuple[Cgroup, str]], stack: ExitStack) -> list[int]:
        """Return a descriptor of each control file of *files*, the first of which is in float; *stack* closes them.

        Of a kept file it is a copy: an answer may wait for a client that does not read, and meanwhile the kept one may be closed and its
        number become another file's. Raises :exc:`~runner.kernel.cgroup.CgroupError`.
        """
        return [self._open(files[0][0].path, group, file, stack) for group, file in files]

    def _open(self, float_cgroup: Path, group: Cgroup, file: str, stack: ExitStack) -> int:
        opened = stack.enter_context(owned(group.open(file))).number
        if file not in WRITTEN:
            return opened
        path = group.path / file
        _, kept = self._kept.get(path, (None, None))
        if kept is None or not os.path.sameopenfile(kept.number, opened):  # the latter: the group was made again
            self._forget(path)
            kept = Descriptor(os.dup(opened))
            self._kept[path] = float_cgroup, kept
        return stack.enter_context(owned(os.dup(kept.number))).number

    def forget_removed(self) -> None:
        """Close the files that were removed, and those of instances whose float was."""
        for path, (float_cgroup, _) in [*self._kept.items()]:
            if not (float_cgroup.exists() and path.exists()):
                self._forget(path)

    def _forget(self, path: Path) -> None:
        if (kept := self._kept.pop(path, None)) is not None:
            kept[1].close()

    def close(self) -> None:
        """Close the kept descriptors."""
        for path in [*self._kept]:
            self._forget(path)


@attrs.define(eq=False)
class HeldFiles:
    """Open descriptors of control files."""

    sent: SentFiles = attrs.field(factory=SentFiles)
    """The files that pods got; they end with those that are held."""

    error: str = ""
    """The reason why a file without a lease could not be opened; empty if there was none."""
    leased: set[str] = attrs.field(factory=set)
    """The leased files, for which :meth:`outwait_leases` waits."""
    _held: dict[str, _HeldFile] = attrs.field(factory=dict)
    _found: trio.Event = attrs.field(factory=trio.Event)
    _threads: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(_MOST_AWAITED))

    def hold(self, files: Iterable[str]) -> None:
        """Hold the existing ones of *files*, and no others."""
        self.error = ""
        self.sent.forget_removed()
        wanted = [*files]
        for path in self._held.keys() - {*wanted}:
            self._release(path)
        for path in wanted:
            try:
                self._hold(path)
            except BlockingIOError:
                self.leased.add(path)
                self._found.set()
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENODEV):
                    self.error = f"cannot keep {path} open: {error.strerror}"

    def _hold(self, path: str) -> None:
        held = self._held.get(path)
        try:
            found = os.stat(path)  # noqa: PTH116 - some 20 for each instance
        except FileNotFoundError:
            self._release(path)
            raise
        if held is None or held.inode != found.st_ino:
            self._release(path)
            self._keep(path, open_at_once(path, os.O_RDWR))

    def _keep(self, path: str, fd: int) -> None:
        self._held[path] = _HeldFile(os.fstat(fd).st_ino, fd)

    def _release(self, path: str) -> None:
        if (held := self._held.pop(path, None)) is not None:
            os.close(held.fd)

    async def outwait_leases(self, done: Callable[[], None]) -> None:
        """Wait for the end of each lease found, then hold its file, and call *done*; never return."""
        async with trio.open_nursery() as nursery:
            awaited: set[str] = set()
            while True:
                await self._found.wait()
                self._found = trio.Event()
                for path in self.leased - awaited:
                    awaited.add(path)
                    nursery.start_soon(self._outwait, path, awaited, done)

    async def _outwait(self, path: str, awaited: set[str], done: Callable[[], None]) -> None:
        try:
            opened = partial(os.open, path, os.O_RDWR | os.O_CLOEXEC)
            fd = await trio.to_thread.run_sync(opened, abandon_on_cancel=True, limiter=self._threads)
        except OSError:  # it was removed meanwhile; if not, the next hold() tries again
            return
        finally:
            awaited.discard(path)
            self.leased.discard(path)
        self._release(path)
        self._keep(path, fd)
        done()

    def close(self) -> None:
        """Close all."""
        self.sent.close()
        for path in [*self._held]:
            self._release(path)
