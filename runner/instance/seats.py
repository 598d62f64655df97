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
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Protocol

import attrs
import trio

from runner.cpuset import CpuSet
from runner.errors import HostError, PlacementError, explain
from runner.host.cgroup import Cgroup, CgroupError, write_control
from runner.host.controller import (
    ControllerAbsentError,
    ControllerError,
    Doors,
    Registration,
    deregister,
    open_doors,
    register,
)
from runner.host.scheduler import pin, read_mask
from runner.instance.host import Host
from runner.instance.services import Keeper
from runner.instance.survey import CGROUP_ROOT
from runner.plan.instance import Placement, Register

log = logging.getLogger(__name__)

AWAITED_FOR = 30.0
"""Seconds for the controller to come (it may be being replaced by a newer one) and to answer: it gives the kubelet 12 s."""

ASKED_EVERY = 0.25
"""Seconds between two looks for a controller that is not there."""

DEREGISTERED_WITHIN = 5.0
"""Seconds; the controller gives the last thread 2 s to go, and removes by itself what is left of the dead."""

SETTLED_WITHIN = 3.0
"""Seconds; the controller is not needed for the guest to run."""

EMPTY_WITHIN = 1.0
"""Seconds for the kernel to see that a group whose last thread was reaped is empty; measured: a millisecond."""

SWEPT_EVERY = 0.75
"""Seconds between two looks for processes that others have started in the container; a look is 0.1 ms."""


@attrs.frozen
class Groups:
    """The cgroups of a placement, as ``/proc/PID/cgroup`` shows them to this process."""

    pod: str
    floating: str
    instance: str

    def of(self, role: str) -> str:
        """Return the group in which a thread of *role* belongs."""
        return {"anchor": self.pod, "vcpu": self.instance}.get(role, self.floating)


class Seat(Protocol):
    """A placement in force: this process and what it forks are in float."""

    @property
    def groups(self) -> Groups | None:
        """What its cgroups are called, if it has any."""

    @property
    def birthplace(self) -> int | None:
        """The descriptor by which QEMU enters the group that is charged for its memory; ``None``: it is born in it."""

    def admit(self, pid: int) -> None:
        """Take the process *pid* with all its threads into float."""

    def confine(self, tid: int) -> None:
        """Take the thread *tid* alone into the instance's group."""

    async def settle(self) -> None:
        """Have the threads that the kernel started with QEMU taken out of the pod's group, which this process cannot."""


@attrs.frozen
class _Masked:
    """Without groups there is nowhere to go; the masks are the same everywhere."""

    groups: None = None
    birthplace: None = None

    def admit(self, pid: int) -> None:
        """See :class:`Seat`."""

    def confine(self, tid: int) -> None:
        """See :class:`Seat`."""

    async def settle(self) -> None:
        """See :class:`Seat`."""


@attrs.frozen
class _Grouped:
    """In cgroups, by *doors*."""

    groups: Groups
    birthplace: int | None
    doors: Doors

    def admit(self, pid: int) -> None:
        """See :class:`Seat`."""
        write_control(self.doors.floating.number, str(pid), f"{self.groups.floating}/cgroup.procs")

    def confine(self, tid: int) -> None:
        """See :class:`Seat`."""
        write_control(self.doors.instance.number, str(tid), f"{self.groups.instance}/cgroup.threads")

    async def settle(self) -> None:
        """See :class:`Seat`; what QEMU started was born in float with it."""

    def release(self, pid: int) -> None:
        """Take the process *pid* back to the pod's group."""
        write_control(self.doors.pod.number, str(pid), f"{self.groups.pod}/cgroup.procs")


@attrs.frozen
class _Registered(_Grouped):
    """In cgroups of the node's controller."""

    asked: Register
    cpus: CpuSet

    async def settle(self) -> None:
        """See :class:`Seat`: the controller does it at every registration."""
        with ExitStack() as held, trio.move_on_after(SETTLED_WITHIN) as patience:
            try:
                await register(self.asked.socket, self.asked.uid, self.cpus, Cgroup(Path(CGROUP_ROOT)), held)
            except HostError as error:
                log.warning("kernel threads of QEMU may run on the vCPUs' CPUs: %s", explain(error))
        if patience.cancelled_caught:
            log.warning("kernel threads of QEMU may run on the vCPUs' CPUs: the controller does not answer")


@asynccontextmanager
async def placed(host: Host, placement: Placement, anchor: Keeper) -> AsyncIterator[Seat]:
    """Hold a placement: inside the block, this process and everything it starts run on float's CPUs.

    Raises :exc:`~runner.errors.RunnerError` when the controller or the kernel do not do as they are told.
    """
    if placement.backend == "controller":
        assert placement.register is not None  # noqa: S101 - a plan of ours
        async with _registered(host, placement, placement.register, anchor) as seat:
            yield seat
    elif placement.backend == "delegated":
        async with _delegated(host, placement, anchor) as seat:
            yield seat
    else:
        with _masked(host, placement, anchor) as seat:
            yield seat


# -- affinity --------------------------------------------------------------------------------------------------------


@contextmanager
def _masked(host: Host, placement: Placement, anchor: Keeper) -> Iterator[Seat]:
    assert placement.float_cpus is not None  # noqa: S101 - a plan of ours
    before = read_mask()
    try:
        pin(0, placement.float_cpus)
        pin(anchor.process.pid, placement.float_cpus)
        yield _Masked()
    finally:
        with host.faults.recorded("take back this process's CPU mask"):
            pin(0, before)


# -- controller ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _registered(host: Host, placement: Placement, asked: Register, anchor: Keeper) -> AsyncIterator[Seat]:
    pod = host.procfs.cgroup()
    with ExitStack() as descriptors:
        async with AsyncExitStack() as held:
            # Before it is asked: if it dies, or we are told to stop, nobody knows whether it has heard us.
            held.push_async_callback(_deregister, host, asked)
            try:
                registration = await _registration(host, placement, asked, pod, descriptors)
            except ControllerError:
                held.pop_all()  # it has said no, so there is nothing to take back
                raise
            doors = registration.doors
            if registration.cpus != placement.cpus:
                raise PlacementError(
                    f"cannot place the vCPUs: the controller gives CPUs '{registration.cpus}' instead of '{placement.cpus}'"
                )
            name = registration.instance.name
            async with _floating(host, placement, anchor, doors, Groups(pod, "float", name)) as groups:
                yield _Registered(groups, doors.pod.number, doors, asked, placement.cpus)


async def _deregister(host: Host, asked: Register) -> None:
    """Deregister; a controller that is not there reconciles when it is back, so that is no fault."""
    with host.faults.recorded("deregister"), trio.move_on_after(DEREGISTERED_WITHIN, shield=True) as patience:
        try:
            await deregister(asked.socket, asked.uid)
        except ControllerAbsentError as error:
            log.warning("%s; it will remove the instance's cgroup when it is back", explain(error))
    if patience.cancelled_caught:
        log.warning("the controller does not answer; it will remove the instance's cgroup later")


async def _registration(host: Host, placement: Placement, asked: Register, pod: str, held: ExitStack) -> Registration:
    """Register, waiting for a controller that is not there yet."""
    own = Cgroup(Path(CGROUP_ROOT) / pod.lstrip("/"))
    waiting = False
    with trio.move_on_after(AWAITED_FOR):
        while True:
            try:
                return await host.unless_stopped(partial(register, asked.socket, asked.uid, placement.cpus, own, held))
            except ControllerAbsentError as error:
                if not waiting:
                    log.info("waiting for the controller: %s", explain(error))
                waiting = True
            await host.unless_stopped(partial(trio.sleep, ASKED_EVERY))
    what = "nobody answers" if waiting else "it does not answer"
    raise HostError(
        f"cannot register with the controller at {str(asked.socket)!r}: {what} within {AWAITED_FOR:g} s; is its "
        "DaemonSet running on this node?"
    )


# -- delegated -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _delegated(host: Host, placement: Placement, anchor: Keeper) -> AsyncIterator[Seat]:
    """Make the container's own group the root of a threaded tree, and in the end what it was.

    The order matters: switching cpuset on while processes are in the group succeeds either way, but an ordinary child
    made after it could never hold anything ("Threads" of cgroup-v2.rst).
    """
    assert placement.float_cpus is not None  # noqa: S101 - a plan of ours
    pod = host.procfs.cgroup()
    scope = Cgroup(Path(CGROUP_ROOT)).at(pod)
    floating, instance = scope.child("float"), scope.child("instance")
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
            doors = open_doors(floating, instance, scope, held)
            async with _floating(host, placement, anchor, doors, Groups(pod, "float", instance.name)) as groups:
                yield _Grouped(groups, None, doors)
    finally:
        with host.faults.recorded("remove the cgroups"), trio.move_on_after(EMPTY_WITHIN + 1, shield=True):
            for group in (instance, floating):
                await _removed(group)
            if "cpuset" in scope.enabled():
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
    host: Host, placement: Placement, anchor: Keeper, doors: Doors, called: Groups
) -> AsyncIterator[Groups]:
    """Hold this process in float, and yield what the groups are called as seen from here; before, only names are known.

    What it forks is born in float, but for the anchor: when that must be started again it enters the pod's group.
    """
    seat, command = _Grouped(called, None, doors), anchor.command
    try:
        seat.admit(0)
        anchor.command = attrs.evolve(command, entering=doors.pod.number)
        own = host.procfs.cgroup()
        taken = read_mask() & placement.cpus
        if PurePosixPath(own).name != called.floating or (taken and not placement.shared):
            raise PlacementError(
                f"cannot enter {called.floating!r}: this process is in {own!r} and may run on '{taken}' of the vCPUs' CPUs"
            )
        groups = Groups(called.pod, own, str(PurePosixPath(own).with_name(called.instance)))
        log.info("in float cgroup=%s cpus=%s", own, read_mask())
        async with AsyncExitStack() as held:
            if placement.sweep:
                await held.enter_async_context(host.observed(partial(_sweep, host, _Grouped(groups, None, doors))))
            yield groups
    finally:
        anchor.command = command
        with host.faults.recorded("return to the pod's cgroup"):
            own = host.procfs.cgroup()
            for pid in _others(host):
                with contextlib.suppress(HostError):  # it has ended
                    if host.procfs.cgroup(pid) == own != called.pod:
                        seat.release(pid)
            seat.release(0)


def _others(host: Host) -> list[int]:
    """Return the processes of this container that this program has not started.

    None unless this is PID 1: any other process sees those of other containers too, and cannot tell them apart.
    """
    ours = {os.getpid(), *(process.pid for process in host.processes)}
    return [pid for pid in host.procfs.processes() if pid not in ours] if os.getpid() == 1 else []


async def _sweep(host: Host, seat: _Grouped) -> None:
    """Keep what others start in the container off the vCPUs' CPUs: look for it again and again; nobody tells."""
    told: set[int] = set()
    while True:
        for pid in _others(host):
            name = host.procfs.name(pid)
            try:
                if host.procfs.cgroup(pid) not in {seat.groups.floating, seat.groups.instance}:
                    seat.admit(pid)
                    log.info("moved to float, as it was started in the pod's cgroup pid=%d name=%s", pid, name)
            except HostError as error:
                ended = not isinstance(error, CgroupError) or error.errno == errno.ESRCH
                if not ended and pid not in told:
                    told.add(pid)
                    log.warning("a process is on the vCPUs' CPUs pid=%d name=%s: %s", pid, name, explain(error))
        await trio.sleep(SWEPT_EVERY)
