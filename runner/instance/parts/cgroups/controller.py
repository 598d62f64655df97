"""The back end ``controller``: cgroups of the node's controller, entered by the descriptors that it sends.

The pod's own cgroup keeps the anchors. Nothing else of the node runs on the vCPUs' CPUs.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import partial

import attrs
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, PlacementError, explain
from runner.base.events import InstanceEvent
from runner.base.values import frozen
from runner.facts.roots import Roots
from runner.instance.gate import Kind
from runner.instance.parts.cgroups.entered import EnteredCgroups, InForce, adopted_fds
from runner.instance.parts.cgroups.float import entered_float, is_frozen
from runner.instance.parts.daemons import RestartedChild
from runner.instance.supervisor import Faults, Supervisor
from runner.instance.timeouts import InstanceTimeouts
from runner.kernel.cgroup import Cgroup
from runner.kernel.cgroup_events import emptied
from runner.kernel.cgroup_fds import CgroupFds
from runner.kernel.scheduler import read_mask
from runner.kubelet.pod_cgroups import float_group
from runner.placement.backends import ControllerPlacement, CpuTuning, Placement
from runner.placement.threads import CgroupPaths
from runner.protocol.controller_client import (
    CpusHeldError,
    MemoryNeed,
    Registration,
    deregister,
    register,
    seal,
    tune,
    unseal,
)
from runner.protocol.jsonrpc_client import CallRefusedError, ServerAbsentError, ServerBusyError

log = logging.getLogger(__name__)

REGISTERED_WITHIN = 30.0
"""Seconds for the controller to appear (a newer one may be replacing it) and to answer: it waits for the kubelet up to 12 s."""

DEREGISTERED_WITHIN = 5.0
"""Seconds; the controller waits 2 s for the last thread to end, and itself removes the cgroups of dead instances."""

SEALED_WITHIN = 45.0
"""Seconds for the controller to seal the CPUs; it gives the kernel 30 s."""

BUSY_FOR = 5.0
"""Seconds for which sealing is requested again from a busy controller, even where sealing is not required."""

BUSY_EVERY = 0.015
"""Seconds between two such requests: it answers others meanwhile, 1 ms each."""

UNSEALED_WITHIN = 2.0
"""Seconds; the controller unseals a deregistered or empty instance in any case."""

SEALED_AGAIN = 30.0
"""Seconds between two checks whether the CPUs are still sealed."""

SETTLED_AGAIN = 5.0
"""Seconds between two attempts to have the controller move the kernel's threads."""


@frozen
class RegisteredCgroups(EnteredCgroups[ControllerPlacement]):
    """Cgroups that the node's controller made."""

    sealing: Callable[[], AbstractAsyncContextManager[str]] = attrs.field(kw_only=True)
    """Makes the instance an isolated partition while the context manager is entered, and gives the guarantee that is in force."""

    @contextmanager
    def in_pod_cgroup(self) -> Iterator[None]:
        self.return_to_pod(0)
        try:
            yield
        finally:
            try:
                self.admit(0)
            except HostError as error:
                log.error(InstanceEvent.RUNNER_MISPLACED, explain(error))  # noqa: TRY400  # raised below, too
                raise PlacementError("cannot return to float: this process stays on the vCPUs' CPUs") from error

    def container_cpus(self) -> CpuSet:
        try:
            return _read_cpus(self.cgroups.pod)
        except HostError as error:
            raise HostError(
                "cannot read which CPUs the container has", remedy="let it see its cgroup at /sys/fs/cgroup"
            ) from error

    async def change(self, placement: Placement) -> None:
        assert isinstance(placement, ControllerPlacement)  # noqa: S101 - a change of ours keeps the back end
        await trio.lowlevel.checkpoint()
        # The controller follows the kubelet: it has already taken the CPUs that the pod has lost.
        if placement.cpus - self.placement.cpus:
            with ExitStack() as stack:
                registration = await _register(placement, self.cgroups.pod, stack)
            if registration.cpus != placement.cpus:
                raise HostError(f"cannot have the CPUs '{placement.cpus}': the controller gives '{registration.cpus}'")
        self.adopt(placement)

    async def follow(self, placement: Placement) -> None:
        await trio.lowlevel.checkpoint()
        self.adopt(placement)

    def sealed(self) -> AbstractAsyncContextManager[str]:
        return self.sealing()

    async def settle(self) -> None:
        # The controller moves them at every registration; this one also reports that QEMU runs and its memory is charged.
        warned = False
        while True:
            with ExitStack() as stack:
                try:
                    cpus = _given(self.placement, self.cgroups.pod)
                    placement = attrs.evolve(self.placement, cpus=cpus)
                    await _register(placement, self.cgroups.pod, stack, charged=True)
                except HostError as error:
                    if not warned:
                        log.warning(InstanceEvent.KERNEL_THREADS_NOT_MOVED, explain(error))
                    warned = True
                else:
                    break
            await trio.sleep(SETTLED_AGAIN)
        await self._tune()

    async def _tune(self) -> None:
        """Request the tuning that the spec asks for besides CPUs; the instance also runs without it."""
        placement, tuning = self.placement, self.placement.tuning
        if tuning == CpuTuning():
            return
        asked = {key: value for key, value in attrs.asdict(tuning).items() if value}
        while True:
            try:
                missing = await tune(placement.socket, placement.pod_uid, asked)
            except ServerAbsentError:  # a newer one may be replacing it
                await trio.sleep(SETTLED_AGAIN)
            except HostError as error:
                log.warning(InstanceEvent.CPUS_NOT_TUNED, explain(error))
                return
            else:
                for reason in missing:
                    log.warning(InstanceEvent.CPUS_PARTLY_TUNED, reason)
                shown = {**asked, "devices": ",".join(tuning.devices)}
                log.info(InstanceEvent.CPUS_TUNED, " ".join(f"{key}={value}" for key, value in shown.items() if value))
                return


def _read_cpus(pod: str) -> CpuSet:
    """Return the CPUs of the container whose cgroup has the path *pod*.

    Not the effective CPUs: while the instance is sealed, the pod's cgroup has none of its own.
    """
    return Cgroup(Roots().cgroup / pod.lstrip("/")).cpus()


def _given(placement: ControllerPlacement, pod: str) -> CpuSet:
    """Return the container's CPUs, which may be more than *placement* has; if they are not visible, the CPUs of *placement*."""
    try:
        return _read_cpus(pod) or placement.cpus
    except HostError:
        return placement.cpus


@asynccontextmanager
async def _sealed(
    supervisor: Supervisor, in_force: InForce[ControllerPlacement], anchors: Sequence[RestartedChild], pod: str
) -> AsyncIterator[str]:
    placement = in_force.placement
    try:

        async def close() -> str:
            async with supervisor.changes.begin(Kind.START, "the CPUs are being sealed"):
                return await _seal(placement, supervisor.timeouts)

        reason = await supervisor.held.once("seal", close)
        async with supervisor.background_task(
            partial(_keep_sealed, in_force, anchors, pod, reason, supervisor.timeouts)
        ):
            yield reason
    finally:
        with supervisor.faults.recorded("unseal the CPUs"), trio.move_on_after(UNSEALED_WITHIN, shield=True):
            try:
                await unseal(placement.socket, placement.pod_uid)
            except (ServerAbsentError, CallRefusedError) as error:  # deregistering also unseals
                log.debug(InstanceEvent.CPUS_NOT_UNSEALED, explain(error))


async def _seal(placement: ControllerPlacement, timeouts: InstanceTimeouts) -> str:
    """Seal the CPUs and return the reason if they are not sealed, empty if they are.

    If sealing is required, wait for a controller that is being replaced. Otherwise :func:`_keep_sealed` tries again later, and only a busy
    controller is waited for, :data:`BUSY_FOR` seconds: any pod can keep it busy, and the guest would run unsealed for long.
    """
    reason = f"the controller does not answer within {SEALED_WITHIN:g} s"
    busy_until = trio.current_time() + BUSY_FOR
    with trio.move_on_after(SEALED_WITHIN):
        while True:
            try:
                return await seal(placement.socket, placement.pod_uid)
            except ServerAbsentError as error:
                reason = explain(error)
                if isinstance(error, ServerBusyError) and trio.current_time() < busy_until:
                    await trio.sleep(BUSY_EVERY)
                    continue
            if not placement.enforced:
                break
            await trio.sleep(timeouts.controller_asked)
    return reason


async def _keep_sealed(
    in_force: InForce[ControllerPlacement],
    anchors: Sequence[RestartedChild],
    pod: str,
    reason: str,
    timeouts: InstanceTimeouts,
) -> None:
    """Seal the CPUs again when they are not: the controller was away, was replaced, or another program has changed a cpuset.

    Register again after a change: without a kubelet, the controller learns only from that which CPUs the container has lost.
    """
    registered = in_force.placement.cpus
    while True:
        await trio.sleep(SEALED_AGAIN)
        if (given := _given(in_force.placement, pod)) != registered:
            with ExitStack() as stack, contextlib.suppress(HostError):  # tried again
                await _register(attrs.evolve(in_force.placement, cpus=given), pod, stack)
                registered = given
        placement = in_force.placement
        try:
            if all(read_mask(anchor.process.pid).isdisjoint(placement.cpus) for anchor in anchors):
                continue
            found = await _seal(placement, timeouts)
        except ProcessLookupError:  # an anchor that is being started again
            continue
        except HostError as error:
            found = explain(error)
        if found != reason or not found:
            log.warning(InstanceEvent.GUARANTEE_CHANGED, f"arranged ({found})" if found else "enforced again")
        reason = found


@asynccontextmanager
async def registered_cgroups(
    supervisor: Supervisor, placement: ControllerPlacement, anchors: Sequence[RestartedChild]
) -> AsyncIterator[RegisteredCgroups]:
    """Hold the instance registered with the controller, and this process in float.

    Raises :exc:`~runner.base.errors.RunnerError` when the controller does not answer, refuses, or gives other CPUs.
    """
    in_force = InForce(placement)
    supervisor.held.keep(in_force, placement="placement")
    named: CgroupPaths | None = None

    async def leave() -> None:
        if named is None or not is_frozen(named.pod, supervisor, anchors):
            await _deregister(supervisor.faults, placement)

    with ExitStack() as descriptors:
        async with AsyncExitStack() as stack:
            # Before the request: if the controller dies or this start is stopped, this instance may be registered or not.
            stack.push_async_callback(leave)

            async def enter() -> tuple[CgroupPaths, CgroupFds]:
                pod = supervisor.procfs.cgroup()
                try:
                    registration = await registration_of(supervisor, placement, pod, descriptors)
                except CallRefusedError:
                    stack.pop_all()  # it refused, so there is nothing to take back
                    raise
                if registration.cpus != placement.cpus:
                    raise HostError(
                        f"cannot place the vCPUs: the controller gives CPUs '{registration.cpus}' instead of '{placement.cpus}'"
                    )
                below = registration.below_tree
                found = CgroupPaths(pod, below(registration.float_cgroup), below(registration.instance))
                return found, registration.cgroup_fds

            def adopt(found: tuple[CgroupPaths, CgroupFds]) -> tuple[CgroupPaths, CgroupFds]:
                descriptors.enter_context(adopted_fds(found[1]))
                return found

            paths, fds = await supervisor.held.once("registration", enter, adopt)
            named = paths
            confined = supervisor.held.value("vCPU threads", set[int])
            cgroups = EnteredCgroups(paths, None, fds, in_force, confined)
            async with entered_float(supervisor, anchors, cgroups) as entered:
                stack.enter_context(entered.kills_explained(supervisor.processes))
                supervisor.guest_state.registered.set()
                yield RegisteredCgroups(
                    entered.cgroups,
                    entered.pod_cgroup_fd,
                    entered.cgroup_fds,
                    in_force,
                    entered.confined,
                    sealing=partial(_sealed, supervisor, in_force, anchors, entered.cgroups.pod),
                )


async def _deregister(faults: Faults, placement: ControllerPlacement) -> None:
    """Deregister; an absent controller reconciles when it returns, so its absence is no fault."""
    with faults.recorded("deregister"), trio.move_on_after(DEREGISTERED_WITHIN, shield=True) as timeout:
        try:
            await deregister(placement.socket, placement.pod_uid)
        except ServerAbsentError as error:
            log.warning(InstanceEvent.CONTROLLER_GONE, explain(error))
    if timeout.cancelled_caught:
        log.warning(InstanceEvent.CONTROLLER_SILENT)


async def registration_of(
    supervisor: Supervisor, placement: ControllerPlacement, pod: str, stack: ExitStack
) -> Registration:
    """Register, waiting for the end of an instance whose CPUs the kubelet has given to this one."""
    deadline, waits_for = math.inf, ""
    while True:
        with ExitStack() as descriptors:
            try:
                registration = await _answer(supervisor, placement, pod, descriptors)
            except CpusHeldError as error:
                deadline = min(deadline, trio.current_time() + error.within)
                if trio.current_time() >= deadline:
                    sentence = f"waited {error.within:g} s: {error.message}"
                    raise CallRefusedError(sentence, error.code, remedy=error.remedy) from None
                if waits_for != str(error):
                    waits_for = str(error)
                    log.warning(InstanceEvent.OTHER_INSTANCE_AWAITED, deadline - trio.current_time(), waits_for)
                await _wait_for_end(supervisor, error, deadline)
            else:
                stack.push(descriptors.pop_all())
                return registration


async def _wait_for_end(supervisor: Supervisor, error: CpusHeldError, deadline: float) -> None:
    """Wait until the instance that holds the CPUs has ended, or until it is time to ask the controller again."""
    now = trio.current_time()
    async with supervisor.changes.begin(Kind.START, "the end of another instance is being waited for"):
        with trio.move_on_at(min(deadline, now + supervisor.timeouts.holder_asked)):
            await emptied(error.cgroup_events.number)
        await trio.sleep_until(now + supervisor.timeouts.controller_asked)


async def _answer(supervisor: Supervisor, placement: ControllerPlacement, pod: str, stack: ExitStack) -> Registration:
    """Register, waiting for a controller that has not started yet."""
    waiting = False
    with trio.move_on_after(REGISTERED_WITHIN):
        async with supervisor.changes.begin(Kind.START, "the controller is being asked for CPUs"):
            while True:
                try:
                    return await _register(placement, pod, stack)
                except ServerAbsentError as error:
                    if not waiting:
                        log.info(InstanceEvent.CONTROLLER_AWAITED, explain(error))
                    waiting = True
                await trio.sleep(supervisor.timeouts.controller_asked)
    what = "it did not appear" if waiting else "it did not answer"
    raise HostError(
        f"cannot register with the controller at {str(placement.socket)!r}: {what} within {REGISTERED_WITHIN:g} s",
        remedy="let its DaemonSet run on this node",
    )


async def _register(
    placement: ControllerPlacement, pod: str, stack: ExitStack, *, charged: bool = False
) -> Registration:
    """Register once; a controller that sends no descriptors needs the cgroup at the path *pod* to be visible here.

    With *charged* the guest's memory is charged to the pod already, and the controller sets limits from the remainder of the pod's.
    """
    cgroup = Cgroup(Roots().cgroup / pod.lstrip("/"))
    need = MemoryNeed(placement.overhead, charged)
    registration = await register(placement.socket, placement.pod_uid, placement.cpus, cgroup, stack, need)
    check_domain(registration, placement.pod_uid)
    return registration


def check_domain(registration: Registration, pod_uid: str) -> None:
    """Check that float is in the domain of pod *pod_uid*, unless the controller lays out its tree as the article does.

    Raises :exc:`~runner.base.errors.HostError`.
    """
    named, ours = registration.below_tree(registration.float_cgroup), float_group(pod_uid)
    if registration.protocol is not None and named != ours:
        raise HostError(f"cannot use the controller: it names the float {named!r}, which is not {ours!r}")
