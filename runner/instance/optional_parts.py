"""The parts that not every instance has, and the modules that are imported late: one function for each.

PID 1 lives as long as its guest: each module that it imports costs every start some time, and every instance some memory. So each function
here imports a module at its call, and returns the part: a context manager, a result, or a function that is to be called later. It is called
before the guest runs if the module may be needed then: later, files and memory may be short. Where an instance may not have the part, the
function takes the plan or handle that decides, and returns an empty context manager, or what stands for none::

    optional_parts.display_shown(supervisor, plan, machine, directory),

A module named here has all its imports at its head, as every other module, and does not import this one.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, assert_never

import trio

from runner.placement.backends import AffinityPlacement, ControllerPlacement, DelegatedPlacement, Placement

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from pathlib import PurePosixPath

    from runner.base.errors import Problem
    from runner.instance.change.running_instance import RunningInstance
    from runner.instance.held import Held
    from runner.instance.parts.cgroups.active import ActivePlacement
    from runner.instance.parts.daemons import RestartedChild
    from runner.instance.parts.nic_backends import NicBackend
    from runner.instance.parts.qemu import GuestEnd, Qemu
    from runner.instance.parts.shares import HeldShare
    from runner.instance.supervisor import Faults, Renewal, Supervisor
    from runner.instance.watch.console_watch import Search
    from runner.instance.watch.figures import Figures
    from runner.kernel.inherited_fds import InheritedFd
    from runner.kernel.sockets import Socket
    from runner.placement.threads import Receipt
    from runner.plan.argv.qemu_endpoints import QemuFds
    from runner.plan.instance import InstancePlan
    from runner.protocol.guest_agent import GuestAgent
    from runner.spec.refusals import ProblemDocument

    Opened = AbstractContextManager[Mapping[str, int]]
    """Descriptors for QEMU, by the names of :class:`~runner.plan.argv.qemu_endpoints.QemuFds`."""
    InPodCgroup = Callable[[], AbstractContextManager[None]]
    Released = AbstractAsyncContextManager[None]
    """A part that is held without a value, and released at the end."""
    Serve = Callable[[Socket], Awaitable[None]]
    """Serves the clients of a listening socket until cancelled."""


def opened_seed(plan: InstancePlan) -> Opened:
    """Hold the seed of cloud-init."""
    if plan.machine.seed is None:
        return nullcontext({})
    from runner.instance.parts.seed import opened_seed

    return opened_seed(plan.machine.seed)


def opened_disks(plan: InstancePlan) -> Opened:
    """Hold the files of the disks."""
    if not plan.machine.disks:
        return nullcontext({})
    from runner.instance.parts.disks import opened_disks

    return opened_disks(plan.machine.disks, plan.state_directory)


def opened_device_nodes(plan: InstancePlan) -> Opened:
    """Hold the nodes of the devices that are passed through."""
    if not plan.machine.passthrough.devices:
        return nullcontext({})
    from runner.instance.parts.passthrough import opened_device_nodes

    return opened_device_nodes(plan.machine.passthrough)


def group_nodes_owned_by_qemu(faults: Faults, plan: InstancePlan) -> AbstractContextManager[None]:
    """Let QEMU's user open the devices' group nodes in the block."""
    if not plan.machine.passthrough.devices:
        return nullcontext()
    from runner.instance.parts.passthrough import group_nodes_owned_by_qemu

    return group_nodes_owned_by_qemu(faults, plan.machine.passthrough)


def devices_returned(supervisor: Supervisor, plan: InstancePlan, in_pod_cgroup: InPodCgroup) -> Released:
    """Check at the end that the devices are as before."""
    if not plan.machine.passthrough.devices:
        return nullcontext()
    from runner.instance.parts.passthrough import devices_returned

    return devices_returned(supervisor, plan, in_pod_cgroup)


def macvtaps_added(supervisor: Supervisor, plan: InstancePlan) -> AbstractAsyncContextManager[Mapping[int, int]]:
    """Hold the macvtaps: the interface index of each by its place among the networks."""
    if plan.networks:
        from runner.plan.network_plan import MacvtapPlan

        if any(isinstance(each, MacvtapPlan) for each in plan.networks):
            from runner.instance.parts.links import macvtaps_added

            return macvtaps_added(supervisor, plan.networks)
    return nullcontext({})


def networked(
    supervisor: Supervisor, plan: InstancePlan, macvtaps: Mapping[int, int], in_pod_cgroup: InPodCgroup
) -> AbstractAsyncContextManager[tuple[NicBackend, ...]]:
    """Hold the networks by descriptor."""
    if not plan.networks:
        return nullcontext(())
    from runner.instance.parts.nic_backends import networked

    return networked(supervisor, plan.networks, macvtaps, in_pod_cgroup)


def bridged(supervisor: Supervisor, plan: InstancePlan) -> Released:
    """Hold the bridges, and a dnsmasq on each that has one."""
    if plan.networks:
        from runner.plan.network_plan import BridgedPlan

        if any(isinstance(each, BridgedPlan) for each in plan.networks):
            from runner.instance.parts.links import bridged

            return bridged(supervisor, plan)
    return nullcontext()


def shared(
    supervisor: Supervisor, plan: InstancePlan, directory: int
) -> AbstractAsyncContextManager[tuple[HeldShare, ...]]:
    """Hold a virtiofsd for each share."""
    if not plan.shares:
        return nullcontext(())
    from runner.instance.parts.shares import shared

    return shared(supervisor, plan.shares, directory)


def kept_fds(
    held: Held, plan: InstancePlan, descriptors: Callable[[], QemuFds]
) -> AbstractContextManager[QemuFds | None]:
    """Hold copies of QEMU's descriptors, for the next QEMU."""
    if not plan.machine.updatable:
        return nullcontext()
    from runner.instance.parts.kept_fds import kept_fds

    return kept_fds(held, descriptors)


def display_shown(supervisor: Supervisor, plan: InstancePlan, machine: Qemu, directory: int) -> Released:
    """Hold the socket at which VNC viewers connect."""
    if not plan.machine.vnc:
        return nullcontext()
    from runner.instance.parts.display import display_shown

    return display_shown(supervisor, machine, directory)


def entered_cgroups(
    supervisor: Supervisor, placement: Placement, anchors: Sequence[RestartedChild]
) -> AbstractAsyncContextManager[ActivePlacement]:
    """Hold a placement: inside the block, this process and everything it starts run on float's CPUs.

    Raises :exc:`~runner.base.errors.RunnerError` when the controller or the kernel refuses.
    """
    match placement:
        case ControllerPlacement():
            from runner.instance.parts.cgroups.controller import registered_cgroups

            return registered_cgroups(supervisor, placement, anchors)
        case DelegatedPlacement():
            from runner.instance.parts.cgroups.delegated import delegated_cgroups

            return delegated_cgroups(supervisor, placement, anchors)
        case AffinityPlacement():
            from runner.instance.parts.cgroups.affinity import pinned_off_vcpus

            return pinned_off_vcpus(supervisor, placement, anchors)
        case _ as never:
            assert_never(never)


def problem_documents(
    source: str, problems: Iterable[Problem], document: Mapping[str, object]
) -> list[ProblemDocument]:
    """Return the problems of an instance that is refused, as JSON."""
    from runner.spec.refusals import problem_documents

    return problem_documents(source, problems, document)


def inherited_fds(
    environment: Mapping[str, str], socket: PurePosixPath | None
) -> AbstractAsyncContextManager[Mapping[str, InheritedFd]]:
    """Hold the descriptors that another program has opened for the instance."""
    from runner.kernel.inherited_fds import inherited_fds

    return inherited_fds(environment, socket)


def held_figures(supervisor: Supervisor, plan: InstancePlan) -> Figures:
    """Return the figures of an instance, for an HTTP port or a controller that shows them."""
    from runner.instance.watch.figures import held_figures

    return held_figures(supervisor, plan)


def probes_served(figures: Figures, address: tuple[str, int] | None) -> Released:
    """Serve probes and metrics at *address*."""
    if address is None:
        return nullcontext()
    from runner.instance.watch.probes import probes_served

    return probes_served(figures, address)


def reported(figures: Figures, placement: Placement) -> Released:
    """Report to the controller that has placed the instance."""
    if not isinstance(placement, ControllerPlacement):
        return nullcontext()
    from runner.instance.watch.reports import report

    return figures.supervisor.background_task(partial(report, figures, placement))


def control_server(running: RunningInstance) -> Serve:
    """Return the server of the control socket's clients, at the first connection."""
    from runner.instance.control.server import serve

    return partial(serve, running)


def qmp_server(machine: Qemu) -> Serve:
    """Return the server of the operators' QMP socket, at the first connection."""
    from runner.instance.control.operator_qmp import serve

    return partial(serve, machine)


def guest_verified(running: RunningInstance) -> Released:
    """Verify a guest that another program has started."""
    supervisor = running.supervisor
    if not supervisor.held.resuming:
        return nullcontext()
    from runner.instance.renewal.guest_verification import verify_guest

    return supervisor.background_task(partial(verify_guest, running.machine, running.receipts))


async def cpus_lost(running: RunningInstance) -> GuestEnd:
    """Follow the CPUs of the container; return when the guest cannot run on the remaining ones."""
    if not running.active.loses_cpus:
        await trio.sleep_forever()
    from runner.instance.change.cpu_watch import keep_vcpus_on_container_cpus

    return await keep_vcpus_on_container_cpus(running)


def resume_after_fault(supervisor: Supervisor, error: Exception) -> Awaitable[None]:
    """Continue as a fresh image of this program after its own fault."""
    from runner.instance.renewal.upgrade import resume_after_fault

    return resume_after_fault(supervisor, error)


def resume_after_loop(supervisor: Supervisor, error: Exception) -> Renewal | tuple[str, ...]:
    """Continue as :func:`resume_after_fault` does, after the end of the event loop."""
    from runner.instance.renewal.after_loop import resume_after_loop

    return resume_after_loop(supervisor, error)


def running_instance() -> Callable[
    [Supervisor, InstancePlan, ActivePlacement, Qemu, Callable[[Receipt], None]],
    AbstractAsyncContextManager[RunningInstance],
]:
    """Import the modules needed once QEMU has greeted, while QEMU starts, which takes it 50 ms."""
    from runner.instance.change.running_instance import running_instance

    return running_instance


def guest_agent() -> type[GuestAgent]:
    """Import the conversation with the guest agent: for a sign of it, else when the guest is to power down."""
    from runner.protocol.guest_agent import GuestAgent

    return GuestAgent


def console_search() -> Search:
    """Import the search for a pattern in the guest's output."""
    from runner.instance.watch.console_search import search_lines

    return search_lines
