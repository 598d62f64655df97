"""The links of the guest's networks, made by rtnetlink: macvtaps and bridges, with a dnsmasq on each that has one."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager

import attrs

from runner.base.events import InstanceEvent
from runner.instance.parts.daemons import restarted_child
from runner.instance.supervisor import Supervisor
from runner.kernel import network
from runner.kernel.child_processes import Command
from runner.kernel.network import Bridge, Macvtap
from runner.plan.argv.networks import DNSMASQ_UP, dnsmasq_argv
from runner.plan.instance import InstancePlan
from runner.plan.network_plan import BridgedPlan, MacvtapPlan, NetworkPlan

log = logging.getLogger(__name__)


@asynccontextmanager
async def macvtaps_added(supervisor: Supervisor, plans: Sequence[NetworkPlan]) -> AsyncIterator[Mapping[int, int]]:
    """Hold the macvtaps among *plans*; yield the index of each by its place there."""
    with ExitStack() as stack:
        yield {
            number: stack.enter_context(_macvtap(supervisor, plan, f"nic:{number}"))
            for number, plan in enumerate(plans)
            if isinstance(plan, MacvtapPlan)
        }


@contextmanager
def _macvtap(supervisor: Supervisor, plan: MacvtapPlan, name: str) -> Iterator[int]:
    link = Macvtap(plan.link, plan.over, plan.mac, plan.mtu)
    index = supervisor.held.value(name, lambda: network.add_macvtap(link))
    try:
        yield index
    finally:
        with supervisor.faults.recorded(f"remove the macvtap {plan.link!r}"):
            network.remove_macvtap(link)


@attrs.define
class AddressWatch:
    """Watches whether the guest gets its address of *network*, by the output of dnsmasq (``src/rfc2131.c``)."""

    network: BridgedPlan
    note: Callable[[str, str], None]
    """Called with the bridge, and the reason why the guest does not get the address; empty if it does."""
    given: bool = False
    """Whether the guest was seen to have the address; true after a renewal, because its lease does not end."""

    def read(self, line: str) -> None:
        """Take in a *line* of dnsmasq's output."""
        network = self.network
        if f"({network.bridge})" not in line:
            return
        own = f" {network.mac}" in line
        if own and "DHCPACK(" in line:
            self.given = True
            self.note(network.bridge, "")
        elif own and ("DHCPDECLINE(" in line or line.endswith("no address available")):
            self.note(
                network.bridge,
                f"the guest gets no address by DHCP: it has declined {network.guest.ip}, which another machine of its network answers for; "
                "dnsmasq offers it again after 10 minutes",
            )
        elif not own and not self.given and network.pod is None and line.endswith(" ignored"):
            self.note(
                network.bridge,
                f"the guest gets no address by DHCP: it asks with another MAC address than {network.mac}, which alone gets one here",
            )


@asynccontextmanager
async def bridged(supervisor: Supervisor, plan: InstancePlan) -> AsyncIterator[None]:
    """Hold the bridges of *plan*, whose taps exist already, and the dnsmasq of each bridge that has one."""

    def note(bridge: str, reason: str) -> None:
        if reason:
            supervisor.log_limit.log(log.warning, InstanceEvent.GUEST_WITHOUT_ADDRESS, reason)
        supervisor.guest_state.set_no_address(bridge, reason)

    with _built(supervisor, [each for each in plan.networks if isinstance(each, BridgedPlan)]):
        async with AsyncExitStack() as stack:
            for number, dhcp in enumerate(plan.dhcp):
                watch = AddressWatch(dhcp.network, note, given=supervisor.held.resuming)
                command = Command("dnsmasq", tuple(dnsmasq_argv(dhcp)), up=DNSMASQ_UP, on_line=watch.read)
                await stack.enter_async_context(restarted_child(supervisor, command, f"dnsmasq:{number}"))
            yield


@contextmanager
def _built(supervisor: Supervisor, plans: Sequence[BridgedPlan]) -> Iterator[None]:
    bridges = [_bridge(plan) for plan in plans]
    before: Mapping[str, frozenset[str]] = {}
    supervisor.held.value("networks recovered", lambda: network.recover(bridges))
    try:
        # Inside the block, because a failed build may leave parts behind; removing a missing part does no harm.
        before = supervisor.held.value("networks", lambda: network.build(bridges))
        yield
    finally:
        # Bounded without a timeout here: the kernel does it within the call, and kernel/netlink.py does not wait for an
        # answer that was lost. It acquires one descriptor, as `build` did.
        with supervisor.faults.recorded("give back the network"):
            network.remove(bridges, before)


def _bridge(plan: BridgedPlan) -> Bridge:
    address6, guest6 = (None, None) if plan.ipv6 is None else (plan.ipv6.host, plan.ipv6.guest)
    return Bridge(
        plan.bridge,
        plan.tap,
        plan.host,
        plan.mtu,
        plan.mac,
        plan.guest,
        plan.pod,
        address6,
        guest6,
    )
