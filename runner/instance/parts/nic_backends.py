"""The backends that carry a guest's packets, held by descriptor: taps of bridges, macvtaps, passt, and inherited descriptors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import partial

from runner.base.values import frozen
from runner.instance.parts.daemons import connected_daemon
from runner.instance.supervisor import Supervisor
from runner.kernel import character_devices, files
from runner.kernel.child_processes import Command, Process
from runner.kernel.sockets import Socket, connected_pair
from runner.plan.argv.networks import passt_argv
from runner.plan.argv.wires import WireNumbers
from runner.plan.network_plan import BridgedPlan, InheritedFdPlan, MacvtapPlan, NetworkPlan, PasstPlan


@frozen
class NicBackend:
    """The host's side of one guest interface; our copies are closed once QEMU has its own."""

    taps: tuple[files.Descriptor, ...] = ()
    vhosts: tuple[files.Descriptor, ...] = ()
    stream: Socket | files.Descriptor | None = None

    def numbers(self) -> WireNumbers:
        """Return the descriptors' numbers."""
        stream = self.stream
        return WireNumbers(
            tuple(tap.number for tap in self.taps),
            tuple(vhost.number for vhost in self.vhosts),
            stream.number if isinstance(stream, files.Descriptor) else None if stream is None else stream.fileno(),
        )

    def close_our_copies(self) -> None:
        """Close our copies."""
        for descriptor in (*self.taps, *self.vhosts):
            descriptor.close()
        if self.stream is not None:
            self.stream.close()


@asynccontextmanager
async def networked(
    supervisor: Supervisor,
    plans: Sequence[NetworkPlan],
    macvtaps: Mapping[int, int],
    in_pod_cgroup: Callable[[], AbstractContextManager[None]],
) -> AsyncIterator[tuple[NicBackend, ...]]:
    """Hold every network of the guest, by descriptor; *macvtaps* maps a position in *plans* to the index of its macvtap.

    Device nodes are made and, as far as the pod may use them, opened *in_pod_cgroup*.
    """
    async with AsyncExitStack() as stack:
        nic_backends: list[NicBackend] = []
        for number, plan in enumerate(plans):
            if isinstance(plan, PasstPlan):
                started = partial(_started_passt, supervisor, plan)
                passt = await stack.enter_async_context(connected_daemon(supervisor, f"passt:nic:{number}", started))
                nic_backends.append(NicBackend(stream=passt.connection))
            else:
                opened = partial(_opened, supervisor, plan, in_pod_cgroup, macvtaps.get(number, 0))
                nic_backends.append(stack.enter_context(supervisor.held.passed_on(opened, NicBackend())))
        yield tuple(nic_backends)


@contextmanager
def _opened(
    supervisor: Supervisor,
    plan: BridgedPlan | MacvtapPlan | InheritedFdPlan,
    in_pod_cgroup: Callable[[], AbstractContextManager[None]],
    index: int,
) -> Iterator[NicBackend]:
    """Hold the descriptors of a network; *index* is the interface index of its macvtap, if it has one."""
    with ExitStack() as stack:
        vhosts: tuple[files.Descriptor, ...] = ()
        if isinstance(plan, BridgedPlan):
            taps = stack.enter_context(character_devices.tap(plan.tap, plan.queues))
        elif isinstance(plan, MacvtapPlan):
            opening = character_devices.macvtap(plan.link, index, plan.queues, in_pod_cgroup=in_pod_cgroup)
            taps = stack.enter_context(opening)
        else:
            taps = tuple(supervisor.inherited_fds[name].descriptor for name in plan.fds)
            vhosts = tuple(supervisor.inherited_fds[name].descriptor for name in plan.vhost_fds)
            if plan.kind == "socket":
                yield NicBackend(stream=taps[0])
                return
        if plan.vhost:
            vhosts = tuple(stack.enter_context(character_devices.vhost_net()) for _ in taps)
        yield NicBackend(taps, vhosts)


@contextmanager
def _started_passt(supervisor: Supervisor, plan: PasstPlan) -> Iterator[tuple[Process, Socket]]:
    with connected_pair("passt") as (stream, theirs):
        command = Command("passt", tuple(passt_argv(plan, f"--fd={theirs.fileno()}")), (theirs.fileno(),))
        process = supervisor.processes.spawn(command)
        theirs.close()
        yield process, stream
