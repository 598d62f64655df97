"""Placements in force: one interface, three back ends, by what the host lets us do.

``controller``
    The node's controller has made float and the instance's group and hands out descriptors to enter them by. The pod's
    own group keeps the anchor. Nothing else of the node runs on the vCPUs' CPUs.
``delegated``
    The same two groups, made by us in the container's own: what is in the container is kept apart, and what is outside
    of it is the business of whoever made the container.
``affinity``
    CPU masks alone: no rights and no cgroup v2 needed. It cannot keep others off the vCPUs' CPUs, and says so.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import PurePosixPath
from typing import Protocol, assert_never

import attrs
import trio

from runner.errors import HostError, PlacementError, explain
from runner.facts.roots import Roots
from runner.instance.daemons import RestartedChild
from runner.instance.supervisor import Supervisor
from runner.kernel.cgroup import Cgroup, CgroupError, write_control
from runner.kernel.scheduler import pin, read_mask
from runner.placement.backends import AffinityPlacement, ControllerPlacement, DelegatedPlacement, Placement
from runner.protocol.controller_client import (
    CgroupFds,
    ControllerAbsentError,
    ControllerError,
    Registration,
    deregister,
    open_cgroup_fds,
    register,
)

log = logging.getLogger(__name__)

AWAITED_FOR = 30.0
"""Seconds for the controller to come (it may be being replaced by a newer one) and to answer: it gives the kubelet 12 s."""

ASKED_EVERY = 0.25
"""Seconds between two looks for a controller that is not there."""

DEREGISTERED_WITHIN = 5.0
"""Seconds; the controller gives the last thread 2 s to go, and removes by itself what is left of the dead."""

SETTLED_AGAIN = 5.0
"""Seconds between two attempts to have the controller move the kernel's threads."""

EMPTY_WITHIN = 1.0
"""Seconds for the kernel to see that a group whose last thread was reaped is empty; measured: a millisecond."""

SWEPT_EVERY = 0.75
"""Seconds between two looks for processes that others have started in the container; a look is 0.1 ms."""


@attrs.frozen
class CgroupPaths:
    """The cgroups of a placement, as ``/proc/PID/cgroup`` shows them to this process."""

    pod: str
    floating: str
    instance: str

    def of(self, role: str) -> str:
        """Return the group in which a thread of *role* belongs."""
        return {"anchor": self.pod, "vcpu": self.instance}.get(role, self.floating)


class ActivePlacement(Protocol):
    """A placement in force: this process and what it forks are in float."""

    @property
    def groups(self) -> CgroupPaths | None:
        """What its cgroups are called, if it has any."""

    @property
    def memory_cgroup_fd(self) -> int | None:
        """The descriptor by which QEMU enters the group that is charged for its memory; ``None``: it is born in it."""

    @property
    def pod_cgroup_fd(self) -> int | None:
        """The descriptor by which a short-lived process enters the pod's group, with all its CPUs; ``None``: it is there."""

    def admit(self, pid: int) -> None:
        """Take the process *pid* with all its threads into float."""

    def confine(self, tid: int) -> None:
        """Take the thread *tid* alone into the instance's group."""

    def give_back(self, tid: int) -> None:
        """Take the thread *tid* alone back to float, where it may run everywhere."""

    async def settle(self) -> None:
        """Have the threads that the kernel started with QEMU taken out of the pod's group, which this process cannot.

        May be cancelled at any moment, and takes as long as it takes: the guest need not wait for it.
        """


@attrs.frozen
class _Masked:
    """Without groups there is nowhere to go; the masks are the same everywhere."""

    groups: None = None
    memory_cgroup_fd: None = None
    pod_cgroup_fd: None = None

    def admit(self, pid: int) -> None:
        """See :class:`ActivePlacement`."""

    def confine(self, tid: int) -> None:
        """See :class:`ActivePlacement`."""

    def give_back(self, tid: int) -> None:
        """See :class:`ActivePlacement`."""
        pin(tid, read_mask())

    async def settle(self) -> None:
        """See :class:`ActivePlacement`."""


@attrs.frozen
class _Grouped:
    """In cgroups, by *doors*."""

    groups: CgroupPaths
    memory_cgroup_fd: int | None
    doors: CgroupFds
    vcpus: set[int]
    """The threads that were confined."""

    @property
    def pod_cgroup_fd(self) -> int:
        """See :class:`ActivePlacement`."""
        return self.doors.pod.number

    def admit(self, pid: int) -> None:
        """See :class:`ActivePlacement`."""
        write_control(self.doors.floating.number, str(pid), f"{self.groups.floating}/cgroup.procs")

    def confine(self, tid: int) -> None:
        """See :class:`ActivePlacement`."""
        write_control(self.doors.instance.number, str(tid), f"{self.groups.instance}/cgroup.threads")
        self.vcpus.add(tid)

    def give_back(self, tid: int) -> None:
        """See :class:`ActivePlacement`."""
        write_control(self.doors.floating_threads.number, str(tid), f"{self.groups.floating}/cgroup.threads")
        pin(tid, read_mask())

    async def settle(self) -> None:
        """See :class:`ActivePlacement`; what QEMU started was born in float with it."""

    def strange(self, cgroup: str) -> bool:
        """Tell whether *cgroup* is none in which something of ours runs."""
        return cgroup not in {self.groups.floating, self.groups.instance}

    def release(self, pid: int) -> None:
        """Take the process *pid* back to the pod's group."""
        write_control(self.doors.pod.number, str(pid), f"{self.groups.pod}/cgroup.procs")


@attrs.frozen
class _Registered(_Grouped):
    """In cgroups of the node's controller."""

    placement: ControllerPlacement

    async def settle(self) -> None:
        """See :class:`ActivePlacement`: the controller does it at every registration."""
        told = False
        while True:
            with ExitStack() as held:
                try:
                    await register(
                        self.placement.socket, self.placement.uid, self.placement.cpus, _group(self.groups.pod), held
                    )
                except HostError as error:
                    if not told:
                        log.warning("kernel threads of QEMU may run on the vCPUs' CPUs: %s", explain(error))
                    told = True
                else:
                    return
            await trio.sleep(SETTLED_AGAIN)


@asynccontextmanager
async def entered_cgroups(
    supervisor: Supervisor, placement: Placement, anchors: Sequence[RestartedChild]
) -> AsyncIterator[ActivePlacement]:
    """Hold a placement: inside the block, this process and everything it starts run on float's CPUs.

    Raises :exc:`~runner.errors.RunnerError` when the controller or the kernel do not do as they are told.
    """
    match placement:
        case ControllerPlacement():
            async with _registered(supervisor, placement, anchors) as active:
                yield active
        case DelegatedPlacement():
            async with _delegated(supervisor, placement, anchors) as active:
                yield active
        case AffinityPlacement():
            with _masked(supervisor, placement, anchors) as active:
                yield active
        case _ as never:
            assert_never(never)


# -- affinity --------------------------------------------------------------------------------------------------------


@contextmanager
def _masked(
    supervisor: Supervisor, placement: AffinityPlacement, anchors: Sequence[RestartedChild]
) -> Iterator[ActivePlacement]:
    before = read_mask()
    try:
        pin(0, placement.float_cpus)
        for anchor in anchors:
            pin(anchor.process.pid, placement.float_cpus)
        yield _Masked()
    finally:
        with supervisor.faults.recorded("take back this process's CPU mask"):
            pin(0, before)


# -- controller ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _registered(
    supervisor: Supervisor, placement: ControllerPlacement, anchors: Sequence[RestartedChild]
) -> AsyncIterator[ActivePlacement]:
    pod = supervisor.procfs.cgroup()
    with ExitStack() as descriptors:
        async with AsyncExitStack() as held:
            # Before it is asked: if it dies, or we are told to stop, nobody knows whether it has heard us.
            held.push_async_callback(_deregister, supervisor, placement)
            try:
                registration = await _registration(supervisor, placement, pod, descriptors)
            except ControllerError:
                held.pop_all()  # it has said no, so there is nothing to take back
                raise
            doors = registration.doors
            if registration.cpus != placement.cpus:
                raise PlacementError(
                    f"cannot place the vCPUs: the controller gives CPUs '{registration.cpus}' instead of '{placement.cpus}'"
                )
            called = CgroupPaths(pod, registration.floating.name, registration.instance.name)
            async with _floating(supervisor, placement, anchors, doors, called) as seat:
                yield _Registered(seat.groups, doors.pod.number, doors, seat.vcpus, placement)


async def _deregister(supervisor: Supervisor, placement: ControllerPlacement) -> None:
    """Deregister; a controller that is not there reconciles when it is back, so that is no fault."""
    with supervisor.faults.recorded("deregister"), trio.move_on_after(DEREGISTERED_WITHIN, shield=True) as patience:
        try:
            await deregister(placement.socket, placement.uid)
        except ControllerAbsentError as error:
            log.warning("%s; it will remove the instance's cgroup when it is back", explain(error))
    if patience.cancelled_caught:
        log.warning("the controller does not answer; it will remove the instance's cgroup later")


async def _registration(
    supervisor: Supervisor, placement: ControllerPlacement, pod: str, held: ExitStack
) -> Registration:
    """Register, waiting for a controller that is not there yet."""
    waiting = False
    with trio.move_on_after(AWAITED_FOR):
        while True:
            try:
                return await supervisor.unless_stopped(
                    partial(register, placement.socket, placement.uid, placement.cpus, _group(pod), held)
                )
            except ControllerAbsentError as error:
                if not waiting:
                    log.info("waiting for the controller: %s", explain(error))
                waiting = True
            await supervisor.unless_stopped(partial(trio.sleep, ASKED_EVERY))
    what = "nobody answers" if waiting else "it does not answer"
    raise HostError(
        f"cannot register with the controller at {str(placement.socket)!r}: {what} within {AWAITED_FOR:g} s; is its "
        "DaemonSet running on this node?"
    )


def _group(path: str) -> Cgroup:
    """Return the group at *path*, for a controller that sends no descriptors; of no use where it cannot be seen."""
    return Cgroup(Roots().cgroup / path.lstrip("/"))


# -- delegated -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _delegated(
    supervisor: Supervisor, placement: DelegatedPlacement, anchors: Sequence[RestartedChild]
) -> AsyncIterator[ActivePlacement]:
    """Make the container's own group the root of a threaded tree, and in the end what it was.

    The order matters: switching cpuset on while processes are in the group succeeds either way, but an ordinary child
    made after it could never hold anything ("Threads" of cgroup-v2.rst).
    """
    pod = supervisor.procfs.cgroup()
    scope = Cgroup(Roots().cgroup).at(pod)
    floating, instance = scope.child("float"), scope.child("instance")
    before = scope.enabled()
    try:
        for group in (floating, instance):
            group.create()
            group.make_threaded()
        scope.enable(["cpuset"])
        for group, cpus in ((floating, placement.float_cpus), (instance, placement.cpus)):
            effective = group.set_cpus(cpus)
            if effective != cpus:
                raise PlacementError(
                    f"cannot give {group.path} the CPUs '{cpus}': the kernel lets it have '{effective}'"
                )
        with ExitStack() as held:
            doors = open_cgroup_fds(floating, instance, scope, held)
            async with _floating(
                supervisor, placement, anchors, doors, CgroupPaths(pod, "float", instance.name)
            ) as seat:
                yield seat
    finally:
        with supervisor.faults.recorded("remove the cgroups"), trio.move_on_after(EMPTY_WITHIN + 1, shield=True):
            for group in (instance, floating):
                await _removed(group)
            if "cpuset" in scope.enabled() - before:
                scope.write("cgroup.subtree_control", "-cpuset")


async def _removed(group: Cgroup) -> None:
    with trio.move_on_after(EMPTY_WITHIN):
        while not group.remove():  # noqa: ASYNC110 - nothing tells in time: cgroup.events is 14 ms late
            await trio.sleep(0.005)
    if group.exists():
        threads = " ".join(map(str, sorted(group.threads())))
        raise HostError(f"cannot remove {group.path}: threads {threads} are still in it")


# -- in float --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _floating(
    supervisor: Supervisor,
    placement: ControllerPlacement | DelegatedPlacement,
    anchors: Sequence[RestartedChild],
    doors: CgroupFds,
    called: CgroupPaths,
) -> AsyncIterator[_Grouped]:
    """Hold this process in float; only there does it see what the groups of which it knows the names are *called*.

    What it forks is born in float, but for the anchors: one that must be started again enters the pod's group.
    """
    seat, command = _Grouped(called, None, doors, set()), anchors[0].command
    try:
        seat.admit(0)
        for anchor in anchors:
            anchor.command = attrs.evolve(command, entering=doors.pod.number)
        own = supervisor.procfs.cgroup()
        taken = read_mask() & placement.cpus
        if PurePosixPath(own).name != called.floating or (taken and not placement.shared):
            raise PlacementError(
                f"cannot enter {called.floating!r}: this process is in {own!r} and may run on '{taken}' of the vCPUs' CPUs"
            )
        groups = CgroupPaths(called.pod, own, str(PurePosixPath(own).with_name(called.instance)))
        log.info("in float cgroup=%s cpus=%s", own, read_mask())
        seat = attrs.evolve(seat, groups=groups)
        async with AsyncExitStack() as held:
            if placement.sweep:
                await held.enter_async_context(supervisor.background_task(partial(_sweep, supervisor, seat)))
            yield seat
    finally:
        for anchor in anchors:
            anchor.command = command
        with supervisor.faults.recorded("return what else is in float to the pod's cgroup"):
            own = supervisor.procfs.cgroup()
            for pid in _others(supervisor):
                with contextlib.suppress(HostError):  # it has ended
                    if supervisor.procfs.cgroup(pid) == own != called.pod:
                        seat.release(pid)
        with supervisor.faults.recorded("return to the pod's cgroup"):
            seat.release(0)


def _others(supervisor: Supervisor) -> list[int]:
    """Return the processes of this container that this program has not started.

    None unless this is PID 1: any other process sees those of other containers too, and cannot tell them apart.
    """
    ours = {os.getpid(), *(process.pid for process in supervisor.processes)}
    return [pid for pid in supervisor.procfs.processes() if pid not in ours] if os.getpid() == 1 else []


async def _sweep(supervisor: Supervisor, seat: _Grouped) -> None:
    """Keep off the vCPUs' CPUs what comes later: look for it again and again; nobody tells.

    These are processes that others start in the container, and threads that QEMU's vCPU threads start: a thread is born
    where its parent is, and since Linux 6.14 the first vCPU that runs starts KVM's ``kvm-nx-lpage-recovery``.
    """
    told: set[str] = set()
    while True:
        try:
            for pid in _others(supervisor):
                with _survived(told, f"process {pid}"):
                    first = next(supervisor.procfs.threads(pid), None)  # a zombie has none
                    if first is not None and seat.strange(first.cgroup):
                        seat.admit(pid)
                        supervisor.counters.swept += 1
                        log.info(
                            "moved to float, as it was started in the pod's cgroup pid=%d name=%s", pid, first.name
                        )
            for process in supervisor.processes:
                later = set(supervisor.procfs.thread_ids(process.pid)) - seat.vcpus if process.role == "qemu" else ()
                for tid in later if seat.vcpus else ():
                    with _survived(told, f"thread {tid} of QEMU"):
                        if supervisor.procfs.cgroup(tid) == seat.groups.instance:
                            name = supervisor.procfs.name(tid)
                            seat.give_back(tid)
                            supervisor.counters.swept += 1
                            log.info("moved to float, as a vCPU had started it tid=%d name=%s", tid, name)
        except HostError as error:  # of /proc itself: descriptors or memory are short, and may be there again
            log.debug("nothing could be looked for: %s", explain(error))
        await trio.sleep(SWEPT_EVERY)


@contextmanager
def _survived(told: set[str], what: str) -> Iterator[None]:
    """Say once that *what* could not be moved; that it has ended meanwhile is nothing to say."""
    try:
        yield
    except (CgroupError, PlacementError) as error:
        cause = error.errno if isinstance(error, CgroupError) else getattr(error.__cause__, "errno", None)
        if cause not in {errno.ESRCH, errno.ENOENT} and what not in told:
            told.add(what)
            log.warning("%s is on the vCPUs' CPUs: %s", what, explain(error))
    except HostError:
        pass
