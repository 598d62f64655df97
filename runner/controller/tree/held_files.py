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
from collections.abc import Callable, Iterable
from functools import partial

import attrs
import trio

from runner.base.values import frozen
from runner.kernel.leases import open_at_once

FILES = (
    *("cgroup.controllers", "cgroup.events", "cgroup.max.descendants", "cgroup.procs", "cgroup.subtree_control"),
    *("cgroup.threads", "cgroup.type"),
    *("cpuset.cpus", "cpuset.cpus.effective", "cpuset.cpus.exclusive", "cpuset.cpus.partition", "cpuset.mems"),
    "cpu.weight",
)
"""The control files of floats and vCPUs' groups that the controller opens; of domains pods reach only ``memory.events``, of other groups
nothing."""
_MOST_AWAITED = 64
"""Files whose leases are waited for at a time, a thread each."""


@frozen
class _HeldFile:
    inode: int
    """The inode, which differs if the file was removed and created again, with its group or its controller."""
    fd: int


@attrs.define(eq=False)
class HeldFiles:
    """Open descriptors of control files."""

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

    async def outwait_leases(self, held: Callable[[], None]) -> None:
        """Wait for the end of each lease found, then hold its file, and call *held*; never return."""
        async with trio.open_nursery() as nursery:
            awaited: set[str] = set()
            while True:
                await self._found.wait()
                self._found = trio.Event()
                for path in self.leased - awaited:
                    awaited.add(path)
                    nursery.start_soon(self._outwait, path, awaited, held)

    async def _outwait(self, path: str, awaited: set[str], held: Callable[[], None]) -> None:
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
        held()

    def close(self) -> None:
        """Close all."""
        for path in [*self._held]:
            self._release(path)
