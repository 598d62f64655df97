"""Bridges, addresses and routes of this network namespace, through :mod:`runner.host.rtnetlink`.

A link of ours says so in its ``ifalias``, and the interface whose place a guest has taken keeps there what it was: a
runner that was killed leaves a namespace from which the next one can tell how to put it right.

The kernel does what it is asked within the system call: a private network is made of seven requests in a millisecond, and
gone after two in 30, most of which the kernel waits for those that still read the link. That is why PID 1 does it itself,
between two steps of its event loop.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Interface, IPv4Network

import attrs

from runner.errors import HostError
from runner.host.rtnetlink import Change, FoundLink, LinkRoute, Rtnetlink

log = logging.getLogger(__name__)

OURS = "instance-runner"
LONGEST_ALIAS = 255
"""``IFALIASZ`` less the final NUL (``include/uapi/linux/if.h``)."""
_RTPROT_KERNEL = 2


@attrs.frozen
class Link:
    """A network interface and all that has to be put back when its place is given back."""

    name: str
    mac: str
    mtu: int
    addresses: tuple[IPv4Interface, ...] = ()
    routes: tuple[LinkRoute, ...] = ()
    """Without those the kernel makes itself when the link gets an address."""
    broadcast: bool = False
    """Whether its addresses came with their subnet's broadcast address."""


@attrs.frozen
class Bridge:
    """A bridge to build: *tap* joins it, and *pod* too when the guest takes that interface's place."""

    name: str
    tap: str
    address: IPv4Interface
    mtu: int
    guest_mac: str
    pod: Link | None


def read_links(names: Iterable[str]) -> dict[str, Link]:
    """Return the interfaces of *names* that exist; one that is given away, as it was before."""
    with Rtnetlink() as rtnetlink:
        links = {name: _read(rtnetlink, name) for name in names}
    return {name: link for name, link in links.items() if link is not None}


def recover(bridges: Sequence[Bridge]) -> None:
    """Take down what a runner that was killed has left of *bridges*; refuse what is somebody else's.

    Comes before :func:`build`, and outside of whatever calls :func:`remove` when that fails: a bridge that is somebody
    else's must not be taken for a half-built one.
    """
    with Rtnetlink() as rtnetlink:
        for bridge in bridges:
            _recover(rtnetlink, bridge)


def build(bridges: Sequence[Bridge]) -> None:
    """Build *bridges*, all or none; their taps are there already."""
    with Rtnetlink() as rtnetlink:
        try:
            for bridge in bridges:
                _build(rtnetlink, bridge)
        except HostError:
            _remove_all(rtnetlink, bridges)
            raise


def remove(bridges: Sequence[Bridge]) -> None:
    """Take down what :func:`build` built, as far as it is there, and give back the pod's interfaces."""
    log.debug("network: giving back bridges=%s", ",".join(bridge.name for bridge in bridges))
    with Rtnetlink() as rtnetlink:
        _remove_all(rtnetlink, bridges)


def _read(rtnetlink: Rtnetlink, name: str) -> Link | None:
    """Return link *name* as it is, or as it was before a guest took its place."""
    link = rtnetlink.link(name)
    if link is None:
        return None
    kept = _kept(link)
    if kept is not None:
        return kept
    routes = tuple(route for route in rtnetlink.routes(link) if route.protocol != _RTPROT_KERNEL)
    return Link(name, link.mac, link.mtu, rtnetlink.addresses(link), routes, rtnetlink.has_broadcast(link))


def _find(rtnetlink: Rtnetlink, name: str) -> FoundLink:
    link = rtnetlink.link(name)
    if link is None:
        raise HostError(f"cannot find the network interface {name!r}")
    return link


def _build(rtnetlink: Rtnetlink, bridge: Bridge) -> None:
    made = _make(rtnetlink, bridge)
    if bridge.pod is not None:
        _give_away(rtnetlink, bridge.pod, made, bridge.guest_mac)
    rtnetlink.add_address(made, bridge.address)
    rtnetlink.set_link(_find(rtnetlink, bridge.tap), Change(mtu=bridge.mtu, master=made.index, up=True))


def _make(rtnetlink: Rtnetlink, bridge: Bridge) -> FoundLink:
    rtnetlink.add_bridge(bridge.name, bridge.mtu)
    try:
        made = _find(rtnetlink, bridge.name)
        rtnetlink.set_link(made, Change(alias=OURS, up=True))
    except HostError:  # it does not say yet that it is ours, so nothing else would ever take it down
        rtnetlink.delete_link(_find(rtnetlink, bridge.name))
        raise
    return made


def _remove_all(rtnetlink: Rtnetlink, bridges: Sequence[Bridge]) -> None:
    """Remove all, the last first; the first failure is reported when every one was tried."""
    failures = []
    for bridge in reversed(bridges):
        try:
            _remove(rtnetlink, bridge)
        except HostError as failure:
            failures.append(failure)
    if failures:
        raise failures[0]


def _remove(rtnetlink: Rtnetlink, bridge: Bridge) -> None:
    """Give back the pod's interface and delete the bridge; what is not there is no matter."""
    try:
        if bridge.pod is not None:
            _give_back(rtnetlink, bridge.pod)
    finally:
        link = rtnetlink.link(bridge.name)
        if link is not None and link.alias == OURS:
            rtnetlink.delete_link(link)


def _recover(rtnetlink: Rtnetlink, bridge: Bridge) -> None:
    """Take down what a runner that was killed has left of *bridge*; refuse what is somebody else's."""
    found = rtnetlink.link(bridge.name)
    if found is None and bridge.pod is None:
        return
    if found is not None and found.alias != OURS:
        raise HostError(
            f"cannot make the bridge {bridge.name!r}: a link of that name exists and is not ours; remove it"
        )
    if found is not None:
        # A tap of ours lives as long as somebody holds its descriptor.
        if any(link.master == found.index and link.kind == "tun" for link in rtnetlink.links()):
            raise HostError(
                f"cannot make the bridge {bridge.name!r}: another instance of this network namespace uses it"
            )
        log.warning("network: found %r of a runner that was killed; taking it down", bridge.name)
    _remove(rtnetlink, bridge)


def _give_away(rtnetlink: Rtnetlink, pod: Link, bridge: FoundLink, guest_mac: str) -> None:
    """Let the guest take the place of *pod*: its address, and its MAC unless the guest has one of its own."""
    kept = _alias(pod)
    if len(kept) > LONGEST_ALIAS:
        log.warning(
            "network: %r has too many routes to be remembered in its alias; it is lost if this runner is killed",
            pod.name,
        )
        kept = OURS
    link = _find(rtnetlink, pod.name)
    rtnetlink.set_link(link, Change(alias=kept))  # first, because from here on there is something to put right
    for address in pod.addresses:
        rtnetlink.delete_address(link, address)
    if guest_mac == pod.mac:
        # A frame to a MAC of the bridge's own ports is ours; this one must reach the guest.
        _set_mac(rtnetlink, link, "02:" + os.urandom(5).hex(":"))
    rtnetlink.set_link(link, Change(master=bridge.index, up=True))


def _give_back(rtnetlink: Rtnetlink, pod: Link) -> None:
    """Make the pod's interface what it was; does nothing where that is so already."""
    link = rtnetlink.link(pod.name)
    if link is None:
        raise HostError(f"cannot give back {pod.name!r}: it is gone")
    if not link.alias.startswith(OURS):
        return
    if link.master:
        rtnetlink.set_link(link, Change(master=0))
    if link.mac != pod.mac:
        _set_mac(rtnetlink, link, pod.mac)
    rtnetlink.set_link(link, Change(mtu=pod.mtu, up=True))
    for address in pod.addresses:
        rtnetlink.replace_address(link, address, broadcast=pod.broadcast)
    for route in sorted(pod.routes, key=lambda route: route.gateway is not None):  # on-link ones first
        rtnetlink.replace_route(link, route)
    rtnetlink.set_link(link, Change(alias=""))  # last, because it says that there is something to put right


def _set_mac(rtnetlink: Rtnetlink, link: FoundLink, mac: str) -> None:
    try:
        rtnetlink.set_link(
            link, Change(mac=mac)
        )  # while it is up, because taking it down loses its IPv6 addresses and routes
    except HostError:  # what some drivers do not allow
        rtnetlink.set_link(link, Change(up=False))
        rtnetlink.set_link(link, Change(mac=mac))
        rtnetlink.set_link(link, Change(up=True))


def _alias(link: Link) -> str:
    """Return *link* in as few characters as can still be read by a person."""
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
            )
        )
        for route in link.routes
    )
    addresses = "+".join(map(str, link.addresses)) + ("+brd" if link.broadcast else "")
    return " ".join((OURS, "was", link.mac, str(link.mtu), addresses, *routes))


def _kept(link: FoundLink) -> Link | None:
    """Read back what :func:`_alias` wrote; ``None`` when this link's place was not given away."""
    words = link.alias.split(" ")
    if words[:2] != [OURS, "was"]:
        return None
    mac, mtu, addresses, *routes = words[2:]
    parsed = []
    for route in routes:
        destination, gateway, source, metric, protocol, onlink, metrics = route.split(",")
        parsed.append(
            LinkRoute(
                IPv4Network(destination),
                _ip(gateway),
                _ip(source),
                int(metric),
                bool(onlink),
                protocol=int(protocol),
                metrics=metrics,
            )
        )
    words = addresses.split("+")
    held = tuple(IPv4Interface(address) for address in words if address not in {"", "brd"})
    return Link(link.name, mac, int(mtu), held, tuple(parsed), "brd" in words)


def _text(address: IPv4Address | None) -> str:
    return "" if address is None else str(address)


def _ip(text: str) -> IPv4Address | None:
    return IPv4Address(text) if text else None
