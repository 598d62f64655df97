"""Bridges, addresses and routes of this network namespace, through :mod:`runner.kernel.netlink`.

The ``ifalias`` of a link that this program has made is ``instance-runner``. While a guest has taken the place of the pod's interface, the
interface's ``ifalias`` describes its earlier configuration, so that the next runner can restore it after this one was killed.
Taking over and restoring are here and not with the instance's parts, because ``check`` and ``plan``, which know no instance, read the
same description; :mod:`runner.instance.parts.links` decides when both happen.

The kernel executes a request within the system call: a private network takes nine requests and a millisecond to build, three
requests and 30 ms to remove, most of which the kernel waits for readers of the link (RCU). That is why PID 1 does it itself,
between two steps of its event loop.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Interface, IPv6Interface, ip_address, ip_interface, ip_network
from types import MappingProxyType

import attrs

from runner.base.errors import HostError, explain
from runner.base.events import InstanceEvent
from runner.base.values import frozen
from runner.facts.network import MAIN_TABLE, Interface, IpAddress, IpInterface, PermanentNeighbour, Route
from runner.facts.roots import Roots
from runner.kernel.netlink import Change, FoundLink, Rtnetlink
from runner.kernel.packet_filter import filter_packets, forget

log = logging.getLogger(__name__)

OURS = "instance-runner"
LONGEST_ALIAS = 255
"""``IFALIASZ`` less the final NUL (``include/uapi/linux/if.h``)."""
_RTPROT_KERNEL, _RTPROT_RA = 2, 9
_NEIGHBOUR_WORDS = 2


@frozen
class Macvtap:
    """A macvtap to create over the link *over*."""

    name: str
    over: str
    mac: str
    mtu: int


@frozen
class Bridge:
    """A bridge to build: *tap* becomes a port of it, and so does *pod* when the guest takes that interface's place."""

    name: str
    tap: str
    address: IPv4Interface
    mtu: int
    guest_mac: str
    guest: IPv4Interface
    """The only IPv4 address that a route leads to on this bridge, and from which packets are taken there."""
    pod: Interface | None
    address6: IPv6Interface | None = None
    guest6: IPv6Interface | None = None
    """The guest's IPv6 address, if it has one; with *pod* it is that interface's, which loses all of its own."""


def read_interfaces(names: Iterable[str], roots: Roots | None = None) -> dict[str, Interface]:
    """Return the existing interfaces of *names*, with their configuration before a guest took their place."""
    sys = (roots or Roots()).sys
    with Rtnetlink() as rtnetlink:
        links = {name: _read(rtnetlink, name) for name in names}
    return {
        # "physfn" leads from a virtual function to its card (Documentation/ABI/testing/sysfs-bus-pci)
        name: attrs.evolve(link, virtual_function=os.path.exists(sys / f"class/net/{name}/device/physfn"))  # noqa: PTH110
        for name, link in links.items()
        if link is not None
    }


def read_addresses() -> dict[str, tuple[IPv4Interface, ...]]:
    """Return the IPv4 addresses of each interface that this program has not made, by its name."""
    with Rtnetlink() as rtnetlink:
        found = {link.name: rtnetlink.addresses(link) for link in rtnetlink.links() if link.alias != OURS}
    return {name: addresses for name, addresses in found.items() if addresses}


def recover(bridges: Sequence[Bridge]) -> None:
    """Remove the parts of *bridges* that a killed runner has left, and refuse bridges that another program has made.

    Call it before :func:`build`, and outside the block that calls :func:`remove` on failure: another program's bridge must
    not be taken for a half-built one.
    """
    with Rtnetlink() as rtnetlink:
        for bridge in bridges:
            _recover(rtnetlink, bridge)


def build(bridges: Sequence[Bridge]) -> Mapping[str, frozenset[str]]:
    """Build *bridges*; their taps exist already. Return, by name, what each of the pod's interfaces had before.

    If it fails, parts are left, which :func:`remove` removes.
    """
    with Rtnetlink() as rtnetlink:
        pods = [_find(rtnetlink, bridge.pod.name) for bridge in bridges if bridge.pod is not None]
        before = {pod.name: rtnetlink.belongings(pod) for pod in pods}
        for bridge in bridges:
            _build(rtnetlink, bridge)
    return before


def remove(bridges: Sequence[Bridge], before: Mapping[str, frozenset[str]] = MappingProxyType({})) -> None:
    """Remove the parts of *bridges* that exist, and restore the pod's interfaces.

    Anything they had *before* and lack now is logged, because the kernel may delete more than this program restores.
    """
    log.debug(InstanceEvent.NETWORK_REMOVING, ",".join(bridge.name for bridge in bridges))
    with Rtnetlink() as rtnetlink:
        _remove_all(rtnetlink, bridges)
        for name, belongings in before.items():
            for lost in sorted(belongings - rtnetlink.belongings(_find(rtnetlink, name))):
                log.warning(InstanceEvent.NETWORK_NOT_RESTORED, name, lost)


def _read(rtnetlink: Rtnetlink, name: str) -> Interface | None:
    """Return the configuration of interface *name*, or the one it had before a guest took its place."""
    link = rtnetlink.link(name)
    if link is None:
        return None
    if link.alias.startswith(f"{OURS} was "):
        try:
            return _parse_alias(name, link.alias + _rest(rtnetlink, name), link.kind)
        except (TypeError, ValueError):  # too many words raise TypeError
            raise HostError(
                f"cannot tell what {name!r} was before a guest took its place: its alias {link.alias!r} is malformed",
                remedy="recreate the pod",
            ) from None
    routes = [route for route in rtnetlink.routes(link) if route.protocol != _RTPROT_KERNEL]
    routes6 = [route for route in rtnetlink.routes6(link) if route.protocol not in {_RTPROT_KERNEL, _RTPROT_RA}]
    return Interface(
        name,
        link.mac,
        link.mtu,
        rtnetlink.addresses(link),
        _of_main_table(routes),
        rtnetlink.has_broadcast(link),
        rtnetlink.addresses6(link),
        _of_main_table(routes6),
        rtnetlink.neighbours(link),
        rtnetlink.multipath(link),
        tuple(route for route in routes + routes6 if route.table != MAIN_TABLE),
        link.kind,
        bool(link.master),
        rtnetlink.peers(link),
    )


def _of_main_table(routes: Iterable[Route]) -> tuple[Route, ...]:
    return tuple(route for route in routes if route.table == MAIN_TABLE)


def _find(rtnetlink: Rtnetlink, name: str) -> FoundLink:
    link = rtnetlink.link(name)
    if link is None:
        raise HostError(f"cannot find the network interface {name!r}")
    return link


def _build(rtnetlink: Rtnetlink, bridge: Bridge) -> None:
    made = _make(rtnetlink, bridge)
    if bridge.pod is not None:
        _take_over(rtnetlink, bridge.pod, made, bridge)
    rtnetlink.add_address(made, bridge.address)
    if bridge.address6 is not None:
        rtnetlink.add_address(made, bridge.address6)
    for guest in (bridge.guest, bridge.guest6):
        if guest is not None:
            rtnetlink.replace_route(made, Route(ip_network(guest.ip)))
    tap = _find(rtnetlink, bridge.tap)
    rtnetlink.set_link(tap, Change(mtu=bridge.mtu, master=made.index, up=True))
    rtnetlink.stop_learning(tap)
    rtnetlink.forward_to(tap, bridge.guest_mac)


def _make(rtnetlink: Rtnetlink, bridge: Bridge) -> FoundLink:
    rtnetlink.add_bridge(bridge.name, bridge.mtu)
    try:
        made = _find(rtnetlink, bridge.name)
        rtnetlink.answer_the_routed(made)
        try:
            filter_packets(bridge.name, bridge.guest, bridge.guest6)
        except HostError as error:
            log.warning(InstanceEvent.PACKETS_UNFILTERED, explain(error))
        # With a MAC address of its own, the bridge keeps that address and its permanent neighbours, whichever ports it gets.
        rtnetlink.set_link(made, Change(alias=OURS, mac=_random_mac(), up=True))
    except HostError as error:  # it has no alias yet, so nothing else would ever remove it
        try:
            rtnetlink.delete_link(_find(rtnetlink, bridge.name))
        except HostError as left:
            raise HostError(f"{explain(error)}; and the bridge is not removed: {explain(left)}") from None
        raise
    return made


def _remove_all(rtnetlink: Rtnetlink, bridges: Sequence[Bridge]) -> None:
    """Remove all bridges, the last first; raise the first error after all were tried."""
    failures = []
    for bridge in reversed(bridges):
        try:
            _remove(rtnetlink, bridge)
        except HostError as failure:
            failures.append(failure)
    if failures:
        raise failures[0]


def _remove(rtnetlink: Rtnetlink, bridge: Bridge) -> None:
    """Restore the pod's interface and delete the bridge, as far as they exist.

    A bridge whose alias holds the second half of an interface's description stays until that interface is restored.
    """
    failure: HostError | None = None
    try:
        if bridge.pod is not None:
            _restore(rtnetlink, bridge.pod)
    except HostError as error:
        failure = error
    link = rtnetlink.link(bridge.name)
    needed = failure is not None and bridge.pod is not None and _rest(rtnetlink, bridge.pod.name)
    try:
        if link is not None and link.alias.startswith(OURS) and not needed:
            rtnetlink.delete_link(link)
        forget(bridge.name)
    except HostError as error:
        failure = failure or error
    if failure is not None:
        raise failure


def _recover(rtnetlink: Rtnetlink, bridge: Bridge) -> None:
    """Remove the parts of *bridge* that a killed runner has left, and refuse a bridge that another program has made."""
    found = rtnetlink.link(bridge.name)
    if found is None and bridge.pod is None:
        return
    if found is not None and not found.alias.startswith(OURS):
        raise HostError(
            f"cannot make the bridge {bridge.name!r}: a link of that name exists and is not instance-runner's",
            remedy="remove it",
        )
    if found is not None:
        # A tap exists for as long as a process holds its descriptor.
        if any(link.master == found.index and link.kind == "tun" for link in rtnetlink.links()):
            raise HostError(
                f"cannot make the bridge {bridge.name!r}: another instance of this network namespace uses it"
            )
        log.warning(InstanceEvent.NETWORK_RECOVERED, bridge.name)
    _remove(rtnetlink, bridge)


def _take_over(rtnetlink: Rtnetlink, pod: Interface, made: FoundLink, bridge: Bridge) -> None:
    """Let the guest take the place of *pod*: its addresses, and its MAC unless the guest has one of its own."""
    kept = _alias(pod)
    rest = f"{OURS} of {pod.name} "
    if len(kept) > 2 * LONGEST_ALIAS - len(rest):
        log.warning(
            InstanceEvent.NETWORK_UNRECOVERABLE,
            pod.name,
        )
        kept = OURS
    link = _find(rtnetlink, pod.name)
    if kept[LONGEST_ALIAS:]:
        rtnetlink.set_link(made, Change(alias=rest + kept[LONGEST_ALIAS:]))
    # First, because from here on there is something to restore.
    rtnetlink.set_link(link, Change(alias=kept[:LONGEST_ALIAS]))
    taken: tuple[IpInterface, ...] = pod.addresses + (pod.addresses6 if bridge.guest6 else ())
    for address in taken:
        rtnetlink.delete_address(link, address)
    if bridge.guest_mac == pod.mac:
        # A bridge takes frames to the MAC address of one of its ports for itself; these must reach the guest.
        _set_mac(rtnetlink, link, _random_mac())
    rtnetlink.set_link(link, Change(master=made.index, up=True))
    rtnetlink.stop_learning(link)
    for neighbour in pod.neighbours:
        if isinstance(neighbour.address, IPv4Address):
            rtnetlink.answer_arp(made, link, neighbour)


def _restore(rtnetlink: Rtnetlink, pod: Interface) -> None:
    """Restore the pod's interface; do nothing if it is restored already."""
    link = rtnetlink.link(pod.name)
    if link is None:
        raise HostError(f"cannot restore {pod.name!r}: it is gone")
    if not link.alias.startswith(OURS):
        return
    if link.master:
        rtnetlink.set_link(link, Change(master=0))
    if link.mac != pod.mac:
        _set_mac(rtnetlink, link, pod.mac)
    rtnetlink.set_link(link, Change(mtu=pod.mtu, up=True))
    for address in pod.addresses:
        rtnetlink.replace_address(link, address, broadcast=pod.broadcast)
    for address6 in pod.addresses6:
        rtnetlink.replace_address(link, address6)
    for route in sorted(_every_route(pod), key=lambda route: route.gateway is not None):  # on-link ones first
        rtnetlink.replace_route(link, route)
    for neighbour in pod.neighbours:
        rtnetlink.replace_neighbour(link, neighbour)
    rtnetlink.set_link(link, Change(alias=""))  # last, because it says that there is something to restore


def _every_route(pod: Interface) -> tuple[Route, ...]:
    return pod.routes + pod.routes6 + pod.other_routes


def _random_mac() -> str:
    """Return a locally administered MAC address."""
    return "02:" + os.urandom(5).hex(":")


def _set_mac(rtnetlink: Rtnetlink, link: FoundLink, mac: str) -> None:
    try:
        rtnetlink.set_link(
            link, Change(mac=mac)
        )  # while it is up, because taking it down loses its IPv6 addresses and routes
    except HostError:  # some drivers do not allow it
        rtnetlink.set_link(link, Change(up=False))
        rtnetlink.set_link(link, Change(mac=mac))
        rtnetlink.set_link(link, Change(up=True))


def _alias(link: Interface) -> str:
    """Return the description of *link* for its alias: short, and readable by a person."""
    routes = (
        ",".join(
            (
                str(route.destination),
                _text(route.gateway),
                _text(route.source),
                str(route.metric),
                str(route.protocol),
                "onlink" if route.onlink else "",
                route.metrics,
                *(() if route.table == MAIN_TABLE else (str(route.table),)),
            )
        )
        for route in _every_route(link)
    )
    neighbours = (f"{neighbour.address},{neighbour.mac}" for neighbour in link.neighbours)
    addresses = "+".join(map(str, (*link.addresses, *link.addresses6))) + ("+brd" if link.broadcast else "")
    return " ".join((OURS, "was", link.mac, str(link.mtu), addresses, *routes, *neighbours))


def _rest(rtnetlink: Rtnetlink, name: str) -> str:
    """Return the rest of the description of interface *name*, which did not fit in its alias and is in the alias of its bridge."""
    head = f"{OURS} of {name} "
    return next((link.alias.removeprefix(head) for link in rtnetlink.links() if link.alias.startswith(head)), "")


def _parse_alias(name: str, alias: str, kind: str) -> Interface:
    """Parse the description that :func:`_alias` wrote about interface *name*, which is of *kind*."""
    mac, mtu, addresses, *words = alias.split(" ")[2:]
    routes, neighbours = [], []
    for word in words:
        parts = word.split(",")
        if len(parts) == _NEIGHBOUR_WORDS:
            neighbours.append(PermanentNeighbour(ip_address(parts[0]), parts[1]))
            continue
        destination, gateway, source, metric, protocol, onlink, metrics, *table = parts
        routes.append(
            Route(
                ip_network(destination),
                _ip(gateway),
                _ip(source),
                int(metric),
                bool(onlink),
                protocol=int(protocol),
                metrics=metrics,
                table=int(*table) if table else MAIN_TABLE,
            )
        )
    listed = addresses.split("+")
    held = [ip_interface(address) for address in listed if address not in {"", "brd"}]
    return Interface(
        name,
        mac,
        int(mtu),
        tuple(address for address in held if isinstance(address, IPv4Interface)),
        tuple(route for route in _of_main_table(routes) if route.destination.version == 4),  # noqa: PLR2004 - IPv4
        "brd" in listed,
        tuple(address for address in held if isinstance(address, IPv6Interface)),
        tuple(route for route in _of_main_table(routes) if route.destination.version == 6),  # noqa: PLR2004 - IPv6
        tuple(neighbours),
        other_routes=tuple(route for route in routes if route.table != MAIN_TABLE),
        kind=kind,
    )


def _text(address: IpAddress | None) -> str:
    return "" if address is None else str(address)


def _ip(text: str) -> IpAddress | None:
    return ip_address(text) if text else None


def add_macvtap(plan: Macvtap) -> int:
    """Create a macvtap, which :func:`remove_macvtap` removes, and return its index.

    One that a killed runner of the same instance has left is removed first.
    """
    with Rtnetlink() as rtnetlink:
        over = _find(rtnetlink, plan.over)
        link = rtnetlink.link(plan.name)
        if link is not None:
            if (link.alias, link.mac) != (OURS, plan.mac):
                raise HostError(
                    f"cannot make the macvtap {plan.name!r}: a link of that name exists and is not instance-runner's",
                    remedy="remove it",
                )
            log.warning(InstanceEvent.NETWORK_RECOVERED, plan.name)
            rtnetlink.delete_link(link)
        rtnetlink.add_macvtap(plan.name, over, plan.mac, plan.mtu)
        made = _find(rtnetlink, plan.name)
        try:
            rtnetlink.set_link(made, Change(alias=OURS, up=True))
        except HostError:
            rtnetlink.delete_link(made)
            raise
        return made.index


def remove_macvtap(plan: Macvtap) -> None:
    """Remove the macvtap, if it exists."""
    with Rtnetlink() as rtnetlink:
        link = rtnetlink.link(plan.name)
        if link is not None and link.alias == OURS:
            rtnetlink.delete_link(link)
