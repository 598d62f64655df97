"""The networks of a guest, held: taps on bridges, macvtaps, passt, and inherited descriptors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from ipaddress import IPv6Interface
from typing import TYPE_CHECKING

import trio

from runner.base.values import frozen
from runner.instance.parts.daemons import STOPPED_WITHIN, restarted_child
from runner.instance.supervisor import Supervisor
from runner.kernel import character_devices, files
from runner.kernel.processes import Command, Process, stop_bound
from runner.kernel.sockets import Socket, connected_pair
from runner.plan.argv.networks import DNSMASQ_UP, WireNumbers, dnsmasq_argv, passt_argv
from runner.plan.networks import BridgedPlan, DhcpPlan, MacvtapPlan, NetworkPlan, PasstPlan

if TYPE_CHECKING:
    from runner.kernel.network import Bridge, Macvtap


@frozen
class NicBackend:
    """The host's side of one guest interface; our copies are closed once QEMU has its own."""

    taps: tuple[files.Descriptor, ...] = ()
    vhosts: tuple[files.Descriptor, ...] = ()
    stream: Socket | files.Descriptor | None = None
    daemon: Process | None = None
    """The process that carries its packets, if one does."""

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
    supervisor: Supervisor, plans: Sequence[NetworkPlan], in_pod_cgroup: Callable[[], AbstractContextManager[None]]
) -> AsyncIterator[tuple[NicBackend, ...]]:
    """Hold every network of the guest, by descriptor; device nodes are made and, as far as the pod may use them, opened *in_pod_cgroup*."""
    bridged = [plan for plan in plans if isinstance(plan, BridgedPlan)]
    async with AsyncExitStack() as held:
        nic_backends = [
            await held.enter_async_context(_nic_backend(supervisor, plan, in_pod_cgroup, f"nic {number}"))
            for number, plan in enumerate(plans)
        ]
        held.enter_context(_built(supervisor, bridged))
        yield tuple(nic_backends)


@asynccontextmanager
async def _nic_backend(
    supervisor: Supervisor, plan: NetworkPlan, in_pod_cgroup: Callable[[], AbstractContextManager[None]], name: str
) -> AsyncIterator[NicBackend]:
    with ExitStack() as held:
        if isinstance(plan, PasstPlan):
            async with _passt(supervisor, plan, name) as nic_backend:
                yield nic_backend
            return
        vhosts: tuple[files.Descriptor, ...] = ()
        if supervisor.carry_over.resuming:  # QEMU has what is a descriptor
            if isinstance(plan, MacvtapPlan):
                held.enter_context(_macvtap_removed(supervisor, plan))
            yield NicBackend()
            return
        if isinstance(plan, BridgedPlan):
            taps = held.enter_context(character_devices.tap(plan.tap, plan.queues))
        elif isinstance(plan, MacvtapPlan):
            taps = held.enter_context(_macvtap(supervisor, plan, in_pod_cgroup))
        else:
            taps = tuple(supervisor.inherited_fds[name].descriptor for name in plan.fds)
            vhosts = tuple(supervisor.inherited_fds[name].descriptor for name in plan.vhost_fds)
            if plan.kind == "socket":
                yield NicBackend(stream=taps[0])
                return
        if plan.vhost:
            vhosts = tuple(held.enter_context(character_devices.vhost_net()) for _ in taps)
        yield NicBackend(taps, vhosts)


@contextmanager
def _macvtap(
    supervisor: Supervisor, plan: MacvtapPlan, in_pod_cgroup: Callable[[], AbstractContextManager[None]]
) -> Iterator[tuple[files.Descriptor, ...]]:
    from runner.kernel import network  # here, because not every instance pays for pyroute2

    index = network.add_macvtap(_link(plan))
    with (
        _macvtap_removed(supervisor, plan),
        character_devices.macvtap(plan.link, index, plan.queues, in_pod_cgroup=in_pod_cgroup) as taps,
    ):
        yield taps


@contextmanager
def _macvtap_removed(supervisor: Supervisor, plan: MacvtapPlan) -> Iterator[None]:
    """Remove the macvtap of *plan* at the end."""
    from runner.kernel import network

    try:
        yield
    finally:
        with supervisor.faults.recorded(f"remove the macvtap {plan.link!r}"):
            network.remove_macvtap(_link(plan))


def _link(plan: MacvtapPlan) -> Macvtap:
    from runner.kernel.network import Macvtap

    return Macvtap(plan.link, plan.over, plan.mac, plan.mtu)


@asynccontextmanager
async def _passt(supervisor: Supervisor, plan: PasstPlan, name: str) -> AsyncIterator[NicBackend]:
    with ExitStack() as held, supervisor.carry_over.taking(name) as carried:
        if carried is None:
            ours, theirs = held.enter_context(connected_pair("passt"))
            command = Command("passt", tuple(passt_argv(plan, f"--fd={theirs.fileno()}")), (theirs.fileno(),))
            backend = NicBackend(stream=ours, daemon=supervisor.processes.spawn(command))
            theirs.close()
        else:
            backend = NicBackend(daemon=supervisor.processes.adopt(carried))
        ends = held.pop_all()
    daemon = backend.daemon
    assert daemon is not None  # noqa: S101 - made above
    supervisor.carry_over.offer(name, daemon.carried)
    with ends:
        try:
            yield backend
        finally:
            backend.close_our_copies()  # it ends by itself when its client disconnects
            with supervisor.faults.recorded("stop passt"), trio.move_on_after(stop_bound(STOPPED_WITHIN), shield=True):
                await supervisor.processes.stop(daemon, STOPPED_WITHIN)


@contextmanager
def _built(supervisor: Supervisor, plans: Sequence[BridgedPlan]) -> Iterator[None]:
    """Hold the bridges of *plans*; their taps exist already."""
    if not plans:
        yield
        return
    from runner.kernel import network  # here, because not every instance pays for pyroute2

    bridges = [_bridge(plan) for plan in plans]
    before: Mapping[str, frozenset[str]] = {}  # a runner that is renewed does not know it any more
    if not supervisor.carry_over.resuming:
        network.recover(bridges)
    try:
        # Inside, because a build that fails may leave something behind; removing what is not there does no harm.
        if not supervisor.carry_over.resuming:
            before = network.build(bridges)
        yield
    finally:
        # Bounded without a timeout here: the kernel does it within the call, and kernel/netlink.py does not wait for an
        # answer that was lost. It acquires one descriptor, as `build` did.
        with supervisor.faults.recorded("give back the network"):
            network.remove(bridges, before)


def _bridge(plan: BridgedPlan) -> Bridge:
    from runner.kernel.network import Bridge

    address6: IPv6Interface | None = None if plan.ipv6 is None else plan.ipv6.host
    return Bridge(
        plan.bridge,
        plan.tap,
        plan.host,
        plan.mtu,
        plan.mac,
        plan.pod,
        address6,
        takes_ipv6=plan.ipv6 is not None,
        guest=None if plan.pod is None else plan.guest,
    )


@asynccontextmanager
async def dhcp_served(supervisor: Supervisor, plans: Sequence[DhcpPlan]) -> AsyncIterator[None]:
    """Hold a dnsmasq on every bridge that has one."""
    async with AsyncExitStack() as held:
        for number, plan in enumerate(plans):
            command = Command("dnsmasq", tuple(dnsmasq_argv(plan)), up=DNSMASQ_UP)
            await held.enter_async_context(restarted_child(supervisor, command, f"dnsmasq {number}"))
        yield
