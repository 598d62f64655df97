"""The parts that not every instance has: for each part, the plans that have it and the import that it needs.

PID 1 lives as long as its guest: each module that it imports costs every start some time, and every instance some memory. So an optional
part is imported only for plans that have it, and before the guest runs: later, files and memory may be short. Each such part is a row of
the table at the end, and is held by one line, whether the plan has it or not::

    optional_parts.DISPLAY.of(plan)(supervisor, machine, directory),

Parts that do not depend on the plan have only a getter: those needed once QEMU has been started, at a client's first connection, for an
option of the command line, or when another program takes over. A module named here has all its imports at its head, as every other module,
and does not import this one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar, assert_never

from runner.placement.backends import AffinityPlacement, ControllerPlacement, DelegatedPlacement, Placement

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from pathlib import PurePosixPath

    from runner.base.errors import Problem
    from runner.instance.change.disk_hotplug import AttachedDisk, DiskHotplug
    from runner.instance.held import Held
    from runner.instance.parts.cgroups.active import ActivePlacement
    from runner.instance.parts.daemons import RestartedChild
    from runner.instance.parts.network import NicBackend
    from runner.instance.parts.qemu import GuestEnd, Qemu
    from runner.instance.parts.shares import HeldShare
    from runner.instance.supervisor import Faults, Renewal, Supervisor
    from runner.instance.watch.console_watch import Search
    from runner.instance.watch.figures import Figures
    from runner.instance.watch.receipts import Receipts
    from runner.kernel.inherited_fds import InheritedFd
    from runner.kernel.sockets import Socket
    from runner.placement.threads import Receipt
    from runner.plan.argv.endpoints import QemuFds
    from runner.plan.disks import DiskPlan
    from runner.plan.instance import InstancePlan
    from runner.plan.machine import MachinePlan
    from runner.plan.network_plan import NetworkPlan
    from runner.plan.passthrough_plan import PassthroughPlan
    from runner.plan.shares import SharePlan
    from runner.protocol.guest_agent import GuestAgent
    from runner.protocol.qmp import Monitor
    from runner.spec.refusals import ProblemDocument

    Opened = AbstractContextManager[Mapping[str, int]]
    """Descriptors for QEMU, by the names of :class:`~runner.plan.argv.endpoints.QemuFds`."""
    InPodCgroup = Callable[[], AbstractContextManager[None]]

P = ParamSpec("P")
R = TypeVar("R")


class OptionalPart(Generic[P, R]):
    """A part that a plan may leave out."""

    def __init__(self, wanted: Callable[[InstancePlan], bool], get: Callable[[], Callable[P, R]], nothing: R) -> None:
        self.wanted = wanted
        """Tells whether an instance with a given plan has the part."""
        self.get = get
        """Imports the part, and returns the context manager that holds it."""
        self.nothing = nothing
        """The value held in place of a part that is left out."""

    def of(self, plan: InstancePlan) -> Callable[P, R]:
        """Return the context manager that holds the part, or one for :attr:`nothing` if *plan* leaves it out."""
        return self.get() if self.wanted(plan) else lambda *_args, **_kwargs: self.nothing


# -- parts that depend on the plan -----------------------------------------------------------------------------------------------


def _seed() -> Callable[[MachinePlan], Opened]:
    from runner.instance.parts.seed import opened_seed

    return opened_seed


def _disks() -> Callable[[Sequence[DiskPlan], PurePosixPath], Opened]:
    from runner.instance.parts.disks import opened_disks

    return opened_disks


def _devices() -> Callable[[PassthroughPlan], Opened]:
    from runner.instance.parts.passthrough import opened_device_nodes

    return opened_device_nodes


def _lent_devices() -> Callable[[Faults, PassthroughPlan], AbstractContextManager[None]]:
    from runner.instance.parts.passthrough import group_nodes_owned_by_qemu

    return group_nodes_owned_by_qemu


def _returned_devices() -> Callable[[Supervisor, InstancePlan, InPodCgroup], AbstractAsyncContextManager[None]]:
    from runner.instance.parts.passthrough import devices_returned

    return devices_returned


def _has_macvtaps(plan: InstancePlan) -> bool:
    if not plan.networks:
        return False
    from runner.plan.network_plan import MacvtapPlan

    return any(isinstance(each, MacvtapPlan) for each in plan.networks)


def _has_bridges(plan: InstancePlan) -> bool:
    if not plan.networks:
        return False
    from runner.plan.network_plan import BridgedPlan

    return any(isinstance(each, BridgedPlan) for each in plan.networks)


def _macvtaps() -> Callable[[Supervisor, Sequence[NetworkPlan]], AbstractAsyncContextManager[Mapping[int, int]]]:
    from runner.instance.parts.links import macvtaps_added

    return macvtaps_added


def _networks() -> Callable[
    [Supervisor, Sequence[NetworkPlan], Mapping[int, int], InPodCgroup],
    AbstractAsyncContextManager[tuple[NicBackend, ...]],
]:
    from runner.instance.parts.network import networked

    return networked


def _bridges() -> Callable[[Supervisor, InstancePlan], AbstractAsyncContextManager[None]]:
    from runner.instance.parts.links import bridged

    return bridged


def _shares() -> Callable[[Supervisor, Sequence[SharePlan], int], AbstractAsyncContextManager[tuple[HeldShare, ...]]]:
    from runner.instance.parts.shares import shared

    return shared


def _kept_fds() -> Callable[[Held, Callable[[], QemuFds]], AbstractContextManager[QemuFds | None]]:
    from runner.instance.parts.kept_fds import kept_fds

    return kept_fds


def _display() -> Callable[[Supervisor, Qemu, int], AbstractAsyncContextManager[None]]:
    from runner.instance.parts.display import display_shown

    return display_shown


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


# -- parts that depend on something else -----------------------------------------------------------------------------------------


def problem_documents() -> Callable[[str, Iterable[Problem], Mapping[str, object]], list[ProblemDocument]]:
    """Import the module for an instance that is refused."""
    from runner.spec.refusals import problem_documents

    return problem_documents


def inherited_fds() -> Callable[
    [Mapping[str, str], PurePosixPath | None], AbstractAsyncContextManager[Mapping[str, InheritedFd]]
]:
    """Import the module for descriptors that another program has opened."""
    from runner.kernel.inherited_fds import inherited_fds

    return inherited_fds


def guest_agent() -> type[GuestAgent]:
    """Import the conversation with the guest agent: for a sign of it, else when the guest is to power down."""
    from runner.protocol.guest_agent import GuestAgent

    return GuestAgent


def console_search() -> Search:
    """Import the search for a pattern in the guest's output."""
    from runner.instance.watch.console_search import search_lines

    return search_lines


def figures() -> Callable[[Supervisor, InstancePlan], Figures]:
    """Import the figures of an instance, for those that show them."""
    from runner.instance.watch.figures import held_figures

    return held_figures


def probes() -> Callable[[Figures, tuple[str, int]], AbstractAsyncContextManager[None]]:
    """Import the server of probes and metrics, if the command line gives a port for it."""
    from runner.instance.watch.probes import probes_served

    return probes_served


def reports() -> Callable[[Figures, ControllerPlacement], Awaitable[None]]:
    """Import the reports to the controller, if one has placed the instance."""
    from runner.instance.watch.reports import report

    return report


def placed_threads() -> Callable[
    [Supervisor, InstancePlan, ActivePlacement, Qemu, Callable[[Receipt], None]], AbstractAsyncContextManager[Receipts]
]:
    """Import the modules needed once QEMU has greeted, while QEMU starts, which takes it 50 ms."""
    from runner.instance.watch.receipts import placed_threads

    return placed_threads


def control_server() -> Callable[
    [Receipts, Sequence[AttachedDisk]], tuple[DiskHotplug, Callable[[Socket], Awaitable[None]]]
]:
    """Import the server of the control socket, at the first connection."""
    from runner.instance.control.server import control_server

    return control_server


def qmp_server() -> Callable[[Socket, Callable[[], Monitor]], Awaitable[None]]:
    """Import the server of the operators' QMP socket, at the first connection."""
    from runner.instance.control.qmp import accept

    return accept


def keep_vcpus_on_container_cpus() -> Callable[[Receipts], Awaitable[GuestEnd]]:
    """Import the watch over the container's CPUs, if the placement can lose some."""
    from runner.instance.change.cpu_watch import keep_vcpus_on_container_cpus

    return keep_vcpus_on_container_cpus


def verify_guest() -> Callable[[Qemu, Receipts], Awaitable[None]]:
    """Import the verification of a guest that another program has started."""
    from runner.instance.renewal.guest_verification import verify_guest

    return verify_guest


def resume_after_fault(supervisor: Supervisor, error: Exception) -> Awaitable[None]:
    """Continue as a fresh image of this program after its own fault; the module for it is imported only then."""
    from runner.instance.renewal.upgrade import resume_after_fault

    return resume_after_fault(supervisor, error)


def resume_after_loop(supervisor: Supervisor, error: Exception) -> Renewal | tuple[str, ...]:
    """Continue as :func:`resume_after_fault` does, after the end of the event loop."""
    from runner.instance.renewal.after_loop import resume_after_loop

    return resume_after_loop(supervisor, error)


_NO_STEP: AbstractContextManager[None] = nullcontext()
_NO_FDS: Opened = nullcontext({})
_NO_PART: AbstractAsyncContextManager[None] = nullcontext()
_NO_COPIES: AbstractContextManager[QemuFds | None] = nullcontext()
_NO_LINKS: AbstractAsyncContextManager[Mapping[int, int]] = nullcontext({})
_NO_NICS: AbstractAsyncContextManager[tuple[NicBackend, ...]] = nullcontext(())
_NO_SHARES: AbstractAsyncContextManager[tuple[HeldShare, ...]] = nullcontext(())

SEED = OptionalPart(lambda plan: plan.machine.seed is not None, _seed, _NO_FDS)
DISKS = OptionalPart(lambda plan: bool(plan.machine.disks), _disks, _NO_FDS)
DEVICES = OptionalPart(lambda plan: bool(plan.machine.passthrough.devices), _devices, _NO_FDS)
LENT_DEVICES = OptionalPart(DEVICES.wanted, _lent_devices, _NO_STEP)
RETURNED_DEVICES = OptionalPart(DEVICES.wanted, _returned_devices, _NO_PART)
MACVTAPS = OptionalPart(_has_macvtaps, _macvtaps, _NO_LINKS)
NETWORKS = OptionalPart(lambda plan: bool(plan.networks), _networks, _NO_NICS)
BRIDGES = OptionalPart(_has_bridges, _bridges, _NO_PART)
SHARES = OptionalPart(lambda plan: bool(plan.shares), _shares, _NO_SHARES)
KEPT_FDS = OptionalPart(lambda plan: plan.machine.updatable, _kept_fds, _NO_COPIES)
DISPLAY = OptionalPart(lambda plan: plan.machine.vnc, _display, _NO_PART)
