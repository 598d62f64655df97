"""The networks of a guest, held: taps on bridges, macvtaps, passt, and inherited descriptors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from ipaddress import IPv6Interface
from typing import TYPE_CHECKING

import trio

from runner.base.values import frozen
from runner.instance.parts.daemons import STOPPED_WITHIN, restarted_child
from runner.instance.supervisor import Supervisor
from runner.kernel import character_devices, files
from runner.kernel.processes import Command, Process, stop_bound
from runner.kernel.sockets import Socket, connected_pair
from runner.plan.argv.networks import DNSMASQ_UP, dnsmasq_argv, passt_argv
from runner.plan.argv.wires import WireNumbers
from runner.plan.network_plan import BridgedPlan, DhcpPlan, InheritedFdPlan, MacvtapPlan, NetworkPlan, PasstPlan

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
            await held.enter_async_context(_nic_backend(supervisor, plan, in_pod_cgroup, f"nic:{number}"))
            for number, plan in enumerate(plans)
        ]
        held.enter_context(_built(supervisor, bridged))
        yield tuple(nic_backends)


@asynccontextmanager
async def _nic_backend(
    supervisor: Supervisor, plan: NetworkPlan, in_pod_cgroup: Callable[[], AbstractContextManager[None]], name: str
) -> AsyncIterator[NicBackend]:
    if isinstance(plan, PasstPlan):
        async with _passt(supervisor, plan, name) as nic_backend:
            yield nic_backend
        return
    with ExitStack() as held:
        index = 0
        if isinstance(plan, MacvtapPlan):
            from runner.kernel import network  # here, because not every instance pays for pyroute2

            index = supervisor.held.value(name, lambda: network.add_macvtap(_link(plan)))
            held.enter_context(_macvtap_removed(supervisor, plan))
        opened = partial(_opened, supervisor, plan, in_pod_cgroup, index)
        yield held.enter_context(supervisor.held.passed_on(opened, NicBackend()))


@contextmanager
def _opened(
    supervisor: Supervisor,
    plan: BridgedPlan | MacvtapPlan | InheritedFdPlan,
    in_pod_cgroup: Callable[[], AbstractContextManager[None]],
    index: int,
) -> Iterator[NicBackend]:
    """Hold the descriptors of a network; *index* is that of its macvtap, if it has one."""
    with ExitStack() as held:
        vhosts: tuple[files.Descriptor, ...] = ()
        if isinstance(plan, BridgedPlan):
            taps = held.enter_context(character_devices.tap(plan.tap, plan.queues))
        elif isinstance(plan, MacvtapPlan):
            opening = character_devices.macvtap(plan.link, index, plan.queues, in_pod_cgroup=in_pod_cgroup)
            taps = held.enter_context(opening)
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
    with ExitStack() as held:
        stream: Socket | None = None

        def start() -> Process:
            nonlocal stream
            stream, theirs = held.enter_context(connected_pair("passt"))
            command = Command("passt", tuple(passt_argv(plan, f"--fd={theirs.fileno()}")), (theirs.fileno(),))
            process = supervisor.processes.spawn(command)
            theirs.close()
            return process

        daemon = supervisor.held.child(f"passt:{name}", supervisor.processes, start, lambda: daemon)
        try:
            yield NicBackend(stream=stream, daemon=daemon)
        finally:
            held.close()  # it ends by itself when its client disconnects
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
    before: Mapping[str, frozenset[str]] = {}
    supervisor.held.value("networks recovered", lambda: network.recover(bridges))
    try:
        # Inside, because a build that fails may leave something behind; removing what is not there does no harm.
        before = supervisor.held.value("networks", lambda: network.build(bridges))
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
            await held.enter_async_context(restarted_child(supervisor, command, f"dnsmasq:{number}"))
        yield
