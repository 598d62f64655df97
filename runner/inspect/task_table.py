"""The tasks on recorded CPUs: from /proc, and from recorded births and moves."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable

import attrs

from runner.base.values import frozen
from runner.inspect.cpu_time import IDLE
from runner.inspect.observe import ProcessTable
from runner.kernel.procfs import Procfs
from runner.kernel.ring_buffer import records
from runner.kernel.tracefs import TraceInstance

_KTHREADD = 2
"""The parent of every kernel thread (``kernel/kthread.c``)."""
_BOUND_NAME = re.compile(r"kworker/[0-9]+:.*|[^/]+/[0-9]+", re.ASCII)
"""The name of a kernel thread that is bound to a CPU; that of an unbound worker begins with ``kworker/u``."""
_STRING_AT = 0xFFFF
"""The bits of a ``__data_loc`` field with the offset of the string (``include/trace/stages/``)."""
_ANCESTORS = 100
"""Ended ancestors of an ended task that are followed to find its cgroup."""


@frozen
class KnownTask:
    """A thread as /proc showed it."""

    name: str
    pid: int
    """Its process."""
    cgroup: str
    kernel: bool
    bound: bool
    """Whether it may run on one CPU only."""


def known_tasks(processes: ProcessTable) -> dict[int, KnownTask]:
    """Return thread → its entry in *processes*."""
    return {
        thread.tid: KnownTask(thread.name, pid, thread.cgroup, process.status.kernel, len(thread.cpus) == 1)
        for pid, process in processes.processes.items()
        for thread in process.threads
    }


@attrs.define
class TaskTable:
    """The known tasks: from /proc before and during the window, and from their births and moves."""

    _procfs: Procfs
    _events: TraceInstance
    _known: dict[int, KnownTask]
    """Thread → its state before the window."""
    _looked_up: dict[int, KnownTask | None] = attrs.field(factory=dict, init=False)
    """Thread → its state when it was first seen; ``None`` if it had ended."""
    _parents: dict[int, tuple[int, int]] = attrs.field(factory=dict, init=False)
    """Thread born within the window → time of its birth, and its parent."""
    _moves: dict[int, list[tuple[int, str]]] = attrs.field(factory=dict, init=False)
    """Thread, or leader of a process moved as a whole → times of its moves, and the target cgroups."""
    _fork: tuple[int, struct.Struct] = attrs.field(init=False)
    _attach: struct.Struct = attrs.field(init=False)

    @_fork.default
    def _fork_layout(self) -> tuple[int, struct.Struct]:
        fork, _ = self._events.formats
        return fork.number, fork.record(parent_pid="i", child_pid="i")

    @_attach.default
    def _attach_layout(self) -> struct.Struct:
        _, attach = self._events.formats
        return attach.record(dst_root="i", pid="i", dst_path="I")

    def read(self) -> None:
        """Read the births and moves recorded since the last call."""
        number, fork = self._fork
        for cpu in self._events.cpus:
            for page in self._events.pages(cpu):
                for at, offset in records(page):
                    found, parent, child = fork.unpack_from(page, offset)
                    if found == number:
                        self._parents[child] = (at, parent)
                        self._known.pop(child, None)  # the number was another task's before
                    else:
                        self._read_move(page, at, offset)

    def _read_move(self, page: bytes, at: int, offset: int) -> None:
        _, hierarchy, tid, path = self._attach.unpack_from(page, offset)
        if hierarchy == 0:  # cgroup v2; those of version 1 are numbered from 1
            begin = offset + (path & _STRING_AT)
            text = page[begin : page.index(b"\0", begin)].decode(errors="backslashreplace")
            self._moves.setdefault(tid, []).append((at, text))

    def look_up(self, tids: Iterable[int]) -> None:
        """Look up each of *tids* that was not seen before."""
        for tid in tids:
            if tid != IDLE and tid not in self._known and tid not in self._looked_up:
                self._looked_up[tid] = self._read_task(tid)

    def _read_task(self, tid: int) -> KnownTask | None:
        pid = self._procfs.process_of(tid)
        process = None if pid is None else self._procfs.process(pid)
        thread = None if process is None else self._procfs.thread(process.pid, tid)
        if process is None or thread is None:
            return None
        return KnownTask(thread.name, process.pid, thread.cgroup, process.kernel, len(thread.cpus) == 1)

    def task(self, tid: int, name: str, ran_at: int) -> KnownTask:
        """Return thread *tid*, named *name*, as it was at the time *ran_at*, as far as known."""
        known = self._known.get(tid) or self._looked_up.get(tid)
        if known is None:
            kernel = self._parents.get(tid, (0, 0))[1] == _KTHREADD
            known = KnownTask(name, tid, "", kernel, kernel and _BOUND_NAME.fullmatch(name) is not None)
        return attrs.evolve(known, name=name or known.name, cgroup=self._cgroup(tid, ran_at))

    def _cgroup(self, tid: int, at: int) -> str:
        """Return the cgroup of *tid* at the time *at*: the target of its last move before, or its parent's at its birth.

        If that is unknown, it is the target of the first later move: the kernel records a move when it is complete, and the task may have
        run in the target before (``cgroup_attach_task`` of ``kernel/cgroup/cgroup.c``).
        """
        first = self._moves.get(tid, [])
        for _ in range(_ANCESTORS):
            known = self._known.get(tid) or self._looked_up.get(tid)
            moves = self._moves.get(tid) or self._moves.get(tid if known is None else known.pid, [])
            before = [cgroup for moved_at, cgroup in moves if moved_at <= at]
            if before:
                return before[-1]
            if known is not None and (tid in self._known or not moves):
                return known.cgroup
            if tid not in self._parents:
                break
            at, tid = self._parents[tid]
        return first[0][1] if first else ""
