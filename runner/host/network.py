"""Bridges, addresses and routes of this network namespace, through rtnetlink.

pyroute2 does the talking. Importing it costs 45 ms and 12 MB, which PID 1 would carry for the whole life of the guest, so
it is imported by a helper (this module run as a program) that lives while networks are built or removed: it is started
before anything else and imports while PID 1 reads the host. The two speak JSON lines over a socket pair.

A link of ours says so in its ``ifalias``, and the interface whose place a guest has taken keeps there what it was: a
runner that was killed leaves a namespace from which the next one can tell how to put it right.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from ipaddress import IPv4Interface
from typing import Any

import attrs
import trio

from runner.errors import HostError
from runner.host.processes import Command, Process, Processes
from runner.host.sockets import connected_pair

log = logging.getLogger(__name__)

OURS = "instance-runner"
LONGEST_ALIAS = 255
"""``IFALIASZ`` less the final NUL (``include/uapi/linux/if.h``)."""
_MAIN_TABLE = 254
_RTPROT_KERNEL = 2
_RTNH_F_ONLINK = 4
_RT_SCOPE_UNIVERSE = 0
_RT_SCOPE_LINK = 253


@attrs.frozen
class LinkRoute:
    """An IPv4 route of the main table through one link; *gateway*, *source* are empty when it has none."""

    destination: str
    gateway: str = ""
    source: str = ""
    metric: int = 0
    onlink: bool = False
    protocol: int = 3
    """Who made it (``RTPROT_*``, rtnetlink(7)); 3 is ``boot``, which ip(8) and CNI plugins leave."""


@attrs.frozen
class Link:
    """A network interface and all that has to be put back when its place is given back."""

    name: str
    mac: str
    mtu: int
    addresses: tuple[str, ...] = ()
    """IPv4 with prefix length."""
    routes: tuple[LinkRoute, ...] = ()

    @classmethod
    def from_json(cls, value: Any) -> Link:
        """Read what ``attrs.asdict`` wrote."""
        routes = tuple(LinkRoute(**route) for route in value["routes"])
        return cls(value["name"], value["mac"], value["mtu"], tuple(value["addresses"]), routes)


@attrs.frozen
class Bridge:
    """A bridge to build: *tap* joins it, and *pod* too when the guest takes that interface's place."""

    name: str
    tap: str
    address: str
    mtu: int
    guest_mac: str
    pod: Link | None


class Network:
    """PID 1's end of the conversation with a helper."""

    def __init__(self, helper: Process, ours: socket.socket) -> None:
        self._helper = helper
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))

    async def read_links(self, names: Sequence[str]) -> dict[str, Link]:
        """Return the interfaces of *names* that exist; one that is given away, as it was before."""
        reply = await self._ask("read", list(names))
        return {name: Link.from_json(link) for name, link in reply.items()}

    async def build(self, bridges: Sequence[Bridge]) -> None:
        """Build *bridges*, all or none."""
        await self._ask("build", [attrs.asdict(bridge) for bridge in bridges])

    async def remove(self, bridges: Sequence[Bridge]) -> None:
        """Take down what :meth:`build` built, as far as it is there, and give back the pod's interfaces."""
        await self._ask("remove", [attrs.asdict(bridge) for bridge in bridges])

    async def dismiss(self) -> None:
        """End the helper now. It holds nothing, and a Python that is killed is gone sooner than one that ends."""
        self._stream.socket.close()
        self._helper.send_signal(signal.SIGKILL)
        await self._helper.wait()

    async def _ask(self, verb: str, what: object) -> Any:
        try:
            await self._stream.send_all(json.dumps([verb, what]).encode() + b"\n")
            line = bytearray()
            while not line.endswith(b"\n"):
                data = await self._stream.receive_some(1 << 16)
                if not data:
                    ended = await self._helper.wait()
                    raise HostError(f"cannot {verb} networks: the helper {self._helper.how_it_ended()} ({ended})")
                line += data
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise HostError(f"cannot {verb} networks: the helper {self._helper.how_it_ended()}") from error
        reply = json.loads(line)
        for remark in reply["remarks"]:
            log.warning("network: %s", remark)
        if "error" in reply:
            raise HostError(reply["error"])
        return reply["result"]


@asynccontextmanager
async def network_helper(processes: Processes) -> AsyncIterator[Network]:
    """Hold a helper that reads, builds and removes networks."""
    with connected_pair("the network helper") as (ours, theirs):
        command = Command(
            "network-helper", (sys.executable, "-I", "-m", __name__, str(theirs.fileno())), (theirs.fileno(),)
        )
        async with processes.daemon(command, 0) as helper:
            theirs.close()
            yield Network(helper, ours)


# ------------------------------------------------------------------------------------------------ the helper's side


class _Rtnetlink:
    """What is done to links, in words of ours; errors name what was attempted."""

    def __init__(self, ipr: Any) -> None:
        self._ipr = ipr
        self.remarks: list[str] = []

    def find(self, name: str) -> Any | None:
        """Return the kernel's message about link *name*, if there is such a link."""
        with _doing(f"look for {name!r}"):
            found = [link for link in self._ipr.get_links() if link.get_attr("IFLA_IFNAME") == name]
        return found[0] if found else None

    def index(self, name: str) -> int:
        link = self.find(name)
        if link is None:
            raise HostError(f"cannot find the network interface {name!r}")
        return int(link["index"])

    def read(self, name: str) -> Link | None:
        """Return link *name* as it is, or as it was before a guest took its place."""
        link = self.find(name)
        if link is None:
            return None
        kept = _kept(link)
        if kept is not None:
            return kept
        index = link["index"]
        with _doing(f"read the addresses and routes of {name!r}"):
            addresses = tuple(
                f"{address.get_attr('IFA_LOCAL') or address.get_attr('IFA_ADDRESS')}/{address['prefixlen']}"
                for address in self._ipr.get_addr(family=socket.AF_INET, index=index)
            )
            routes = tuple(
                _route(route)
                for route in self._ipr.get_routes(family=socket.AF_INET, table=_MAIN_TABLE)
                if route.get_attr("RTA_OIF") == index and route["proto"] != _RTPROT_KERNEL
            )
        return Link(name, link.get_attr("IFLA_ADDRESS") or "", link.get_attr("IFLA_MTU"), addresses, routes)

    def build(self, bridge: Bridge) -> None:
        """Build one bridge."""
        with _doing(f"make the bridge {bridge.name!r}"):
            self._ipr.link(
                "add",
                ifname=bridge.name,
                kind="bridge",
                br_stp_state=0,
                br_forward_delay=0,
                br_mcast_snooping=0,
                mtu=bridge.mtu,
            )
            index = self.index(bridge.name)
            self._ipr.link("set", index=index, ifalias=OURS)
            self._ipr.link("set", index=index, state="up")
        if bridge.pod is not None:
            self._give_away(bridge.pod, index, bridge.guest_mac)
        with _doing(f"give {bridge.name!r} the address {bridge.address}"):
            address = IPv4Interface(bridge.address)
            self._ipr.addr("add", index=index, address=str(address.ip), prefixlen=address.network.prefixlen)
        with _doing(f"put {bridge.tap!r} into {bridge.name!r}"):
            self._ipr.link("set", index=self.index(bridge.tap), mtu=bridge.mtu, master=index, state="up")

    def remove(self, bridge: Bridge) -> None:
        """Give back the pod's interface and delete the bridge; what is not there is no matter."""
        if bridge.pod is not None:
            self._give_back(bridge.pod)
        link = self.find(bridge.name)
        if link is not None and link.get_attr("IFLA_IFALIAS") == OURS:
            with _doing(f"delete the bridge {bridge.name!r}"):
                self._ipr.link("del", index=link["index"])

    def recover(self, bridge: Bridge) -> None:
        """Take down what a runner that was killed has left of *bridge*; refuse what is somebody else's."""
        found = self.find(bridge.name)
        if found is None and bridge.pod is None:
            return
        if found is not None and found.get_attr("IFLA_IFALIAS") != OURS:
            raise HostError(
                f"cannot make the bridge {bridge.name!r}: a link of that name exists and is not ours; remove it"
            )
        if found is not None:
            if any(link.get_attr("IFLA_MASTER") == found["index"] and _is_tap(link) for link in self._ipr.get_links()):
                raise HostError(
                    f"cannot make the bridge {bridge.name!r}: another instance of this network namespace uses it"
                )
            self.remarks.append(f"found {bridge.name!r} of a runner that was killed; taking it down")
        self.remove(bridge)

    def _give_away(self, pod: Link, bridge: int, guest_mac: str) -> None:
        """Let the guest take the place of *pod*: its address, and its MAC unless the guest has one of its own."""
        kept = _alias(pod)
        if len(kept) > LONGEST_ALIAS:
            self.remarks.append(
                f"{pod.name!r} has too many routes to be remembered in its alias; it is lost if this runner is killed"
            )
            kept = OURS
        index = self.index(pod.name)
        with _doing(f"let the guest take the place of {pod.name!r}"):
            self._ipr.link("set", index=index, ifalias=kept)
            for address in map(IPv4Interface, pod.addresses):
                self._ipr.addr("del", index=index, address=str(address.ip), prefixlen=address.network.prefixlen)
            if guest_mac == pod.mac:
                # A frame to a MAC of the bridge's own ports is ours; this one must reach the guest.
                self._set_mac(index, "02:" + os.urandom(5).hex(":"))
            self._ipr.link("set", index=index, master=bridge, state="up")

    def _give_back(self, pod: Link) -> None:
        """Make the pod's interface what it was; does nothing where that is so already."""
        link = self.find(pod.name)
        if link is None:
            raise HostError(f"cannot give back {pod.name!r}: it is gone")
        if not (link.get_attr("IFLA_IFALIAS") or "").startswith(OURS):
            return
        index = link["index"]
        with _doing(f"give back {pod.name!r}"):
            if link.get_attr("IFLA_MASTER"):
                self._ipr.link("set", index=index, master=0)
            if link.get_attr("IFLA_ADDRESS") != pod.mac:
                self._set_mac(index, pod.mac)
            self._ipr.link("set", index=index, mtu=pod.mtu, state="up")
            for address in map(IPv4Interface, pod.addresses):
                self._ipr.addr("replace", index=index, address=str(address.ip), prefixlen=address.network.prefixlen)
            for route in sorted(pod.routes, key=lambda route: bool(route.gateway)):  # on-link ones first
                self._ipr.route("replace", **_route_arguments(route, index))
            # Last, because it says that there is something to put right. An empty alias clears it.
            self._ipr.link("set", index=index, ifalias="")

    def _set_mac(self, index: int, mac: str) -> None:
        self._ipr.link("set", index=index, state="down")  # some drivers refuse while it is up
        self._ipr.link("set", index=index, address=mac)
        self._ipr.link("set", index=index, state="up")


def _is_tap(link: Any) -> bool:
    """Tell whether *link* is a tap; those of ours live as long as somebody holds their descriptor."""
    info = link.get_attr("IFLA_LINKINFO")
    return info is not None and info.get_attr("IFLA_INFO_KIND") == "tun"


def _route(message: Any) -> LinkRoute:
    destination = f"{message.get_attr('RTA_DST') or '0.0.0.0'}/{message['dst_len']}"
    return LinkRoute(
        destination,
        message.get_attr("RTA_GATEWAY") or "",
        message.get_attr("RTA_PREFSRC") or "",
        message.get_attr("RTA_PRIORITY") or 0,
        bool(message["flags"] & _RTNH_F_ONLINK),
        message["proto"],
    )


def _route_arguments(route: LinkRoute, index: int) -> dict[str, object]:
    arguments: dict[str, object] = {
        "dst": route.destination,
        "oif": index,
        "table": _MAIN_TABLE,
        "proto": route.protocol,
    }
    arguments["scope"] = _RT_SCOPE_UNIVERSE if route.gateway else _RT_SCOPE_LINK
    if route.gateway:
        arguments["gateway"] = route.gateway
        if route.onlink:
            arguments["flags"] = _RTNH_F_ONLINK
    if route.source:
        arguments["prefsrc"] = route.source
    if route.metric:
        arguments["priority"] = route.metric
    return arguments


def _alias(link: Link) -> str:
    """Return *link* in as few characters as can still be read by a person."""
    routes = [
        ",".join(
            (
                route.destination,
                route.gateway,
                route.source,
                str(route.metric),
                str(route.protocol),
                "onlink"[: 6 * route.onlink],
            )
        )
        for route in link.routes
    ]
    return " ".join((OURS, "was", link.mac, str(link.mtu), "+".join(link.addresses), *routes))


def _kept(link: Any) -> Link | None:
    """Read back what :func:`_alias` wrote; ``None`` when this link's place was not given away."""
    words = (link.get_attr("IFLA_IFALIAS") or "").split(" ")
    if words[:2] != [OURS, "was"]:
        return None
    mac, mtu, addresses, *routes = words[2:]
    parsed = []
    for route in routes:
        destination, gateway, source, metric, protocol, onlink = route.split(",")
        parsed.append(LinkRoute(destination, gateway, source, int(metric), bool(onlink), int(protocol)))
    return Link(link.get_attr("IFLA_IFNAME"), mac, int(mtu), tuple(addresses.split("+")), tuple(parsed))


@contextmanager
def _doing(what: str) -> Iterator[None]:
    """Say what was attempted when the kernel refuses."""
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        yield
    except (NetlinkError, OSError) as error:
        code = error.code if isinstance(error, NetlinkError) else error.errno
        raise HostError(f"cannot {what}: {os.strerror(code or 0)}") from error


def _bridge(value: Mapping[str, Any]) -> Bridge:
    pod = value["pod"]
    return Bridge(**{**value, "pod": None if pod is None else Link.from_json(pod)})


def _answer(rtnetlink: _Rtnetlink, verb: str, what: Any) -> object:
    if verb == "read":
        links = {name: rtnetlink.read(name) for name in what}
        return {name: attrs.asdict(link) for name, link in links.items() if link is not None}
    bridges = [_bridge(value) for value in what]
    if verb == "build":
        _build(rtnetlink, bridges)
    else:
        _remove(rtnetlink, bridges)
    return None


def _build(rtnetlink: _Rtnetlink, bridges: Sequence[Bridge]) -> None:
    for bridge in bridges:  # first, because a bridge that is somebody else's must not be taken for a half-built one
        rtnetlink.recover(bridge)
    try:
        for bridge in bridges:
            rtnetlink.build(bridge)
    except HostError:
        _remove(rtnetlink, bridges)
        raise


def _remove(rtnetlink: _Rtnetlink, bridges: Sequence[Bridge]) -> None:
    """Remove all, the last first; the first failure is reported when every one was tried."""
    failures = []
    for bridge in reversed(bridges):
        try:
            rtnetlink.remove(bridge)
        except HostError as failure:
            failures.append(failure)
    if failures:
        raise failures[0]


def _serve(fd: int) -> None:
    """Answer requests on *fd* until the other end hangs up."""
    from pyroute2 import IPRoute

    with socket.socket(fileno=fd) as peer, peer.makefile("rwb") as lines, IPRoute() as ipr:
        for line in lines:
            verb, what = json.loads(line)
            rtnetlink = _Rtnetlink(ipr)
            try:
                reply: dict[str, object] = {"result": _answer(rtnetlink, verb, what)}
            except HostError as error:
                reply = {"error": str(error)}
            lines.write(json.dumps({**reply, "remarks": rtnetlink.remarks}).encode() + b"\n")
            lines.flush()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
