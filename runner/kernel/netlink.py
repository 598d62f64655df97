"""The only user of rtnetlink(7): links, their addresses, permanent neighbours and routes.

pyroute2 encodes and decodes the messages; the socket is ours, because pyroute2's run asyncio. The kernel executes a request
within ``sendto`` and has put its answer into the receive buffer when that returns, so nothing here waits and nothing needs a
task or an event loop. Linux 4.20 or later is required.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from ipaddress import IPv4Interface, IPv4Network, IPv6Interface, ip_address, ip_interface, ip_network
from typing import Any, Protocol, Self, TypeVar

import attrs

from runner.base.errors import doing
from runner.base.values import frozen
from runner.facts.network import IpAddress, IpInterface, IpNetwork, PermanentNeighbour, Route
from runner.kernel.partial_imports import without_init

with without_init("pyroute2"):
    from pyroute2 import netlink
    from pyroute2.netlink import rtnl
    from pyroute2.netlink.exceptions import NetlinkDecodeError
    from pyroute2.netlink.rtnl import ifaddrmsg, ndmsg, rtmsg

T = TypeVar("T")

ANSWERED_WITHIN = 5
"""Seconds after which an answer counts as lost: the kernel answers before ``sendto`` returns."""

_HEADER_SIZE = 16
"""Bytes of ``struct nlmsghdr`` (``include/uapi/linux/netlink.h``)."""
_RTEXT_FILTER_SKIP_STATS = 8
_IFF_UP = 1
_MACVLAN_MODE_BRIDGE = 4
_NOT_FORWARDING = struct.pack("=6HIHHI", 24, socket.AF_INET, 20, 1, 8, 1, 0, 8, 13, 1)
"""``IFLA_INET_CONF`` with FORWARDING 0 and ARPFILTER 1 (``IPV4_DEVCONF_…`` of ``include/uapi/linux/ip.h``)."""
_RT_TABLE_LOCAL = 255
_RT_TABLE_UNSPEC, _LARGEST_TABLE = 0, 255
"""The field of ``struct rtmsg`` for a table whose number has no room there; the attribute has it."""

_LARGEST_ANSWER = 1 << 16  # the kernel fills datagrams of 32 KiB in a dump, and more only for a single larger message
_DUMP_TRIES = 10
"""A dump is repeated when something changed in the middle of it; ten changes in a row are no coincidence."""


class _Message(Protocol):
    """A message of pyroute2, which has no types: fields by name, attributes by their name in the kernel's headers."""

    data: bytearray

    def __getitem__(self, field: str) -> Any: ...

    def get_attr(self, name: str, default: object = None) -> Any: ...

    def update(self, fields: Mapping[str, object]) -> None: ...

    def encode(self) -> None: ...

    def decode(self) -> None: ...


class _LinkMessage(netlink.nlmsg):
    """``struct ifinfomsg`` with the attributes that this module uses (``include/uapi/linux/if_link.h``).

    pyroute2's own ``ifinfmsg`` has all of them, and imports the options of 15 kinds of links and ``multiprocessing``: 8 ms of
    the 11 ms that importing pyroute2's messages would take.
    """

    fields = (("family", "B"), ("__pad", "x"), ("type", "H"), ("index", "i"), ("flags", "I"), ("change", "I"))
    nla_map = (
        (1, "IFLA_ADDRESS", "binary"),  # its length differs by the link's type
        (3, "IFLA_IFNAME", "asciiz"),
        (4, "IFLA_MTU", "uint32"),
        (5, "IFLA_LINK", "uint32"),
        (10, "IFLA_MASTER", "uint32"),
        (12, "IFLA_PROTINFO", "port_options"),
        (18, "IFLA_LINKINFO", "link_info"),
        (20, "IFLA_IFALIAS", "string"),  # a final NUL would not clear it
        (26, "IFLA_AF_SPEC", "binary"),
        (29, "IFLA_EXT_MASK", "uint32"),
    )

    class port_options(netlink.nla):  # noqa: N801 - named in the table above, as pyroute2 names them
        """Options of a bridge's port; without the flag the kernel takes them for one number."""

        nla_flags = netlink.NLA_F_NESTED
        nla_map = ((8, "IFLA_BRPORT_LEARNING", "uint8"), (12, "IFLA_BRPORT_PROXYARP_WIFI", "uint8"))

    class link_info(netlink.nla):  # noqa: N801 - named in the table above, as pyroute2 names them
        """The link's kind, and the options of the two kinds that this program makes: both are ``IFLA_INFO_DATA``."""

        nla_map = (
            (1, "IFLA_INFO_KIND", "asciiz"),
            (2, "bridge options", "bridge_options"),
            (2, "macvlan options", "macvlan_options"),
        )

        class bridge_options(netlink.nla):  # noqa: N801
            """Options of a bridge."""

            nla_map = (
                (1, "IFLA_BR_FORWARD_DELAY", "uint32"),
                (5, "IFLA_BR_STP_STATE", "uint32"),
                (23, "IFLA_BR_MCAST_SNOOPING", "uint8"),
            )

        class macvlan_options(netlink.nla):  # noqa: N801
            """Options of a macvlan, and of a macvtap."""

            nla_map = ((1, "IFLA_MACVLAN_MODE", "uint32"),)


class _RouteMessage(rtmsg.rtmsg_base, netlink.nlmsg):
    """``struct rtmsg``; its metrics stay bytes, so that those which pyroute2 does not know are restored too."""

    nla_map = tuple((name, "binary" if name == "RTA_METRICS" else kind) for name, kind in rtmsg.rtmsg_base.nla_map)


@frozen
class _Request:
    """A request to the kernel: a message without its header."""

    layout: Callable[..., _Message]
    """The class of the request and of its answers."""
    fields: Mapping[str, object]
    attributes: tuple[tuple[str, object], ...] = ()

    def encode(self, kind: int, flags: int, sequence: int) -> bytearray:
        """Return the message to send."""
        message = self.layout()
        header = {"type": kind, "flags": flags, "sequence_number": sequence}
        message.update({**self.fields, "attrs": list(self.attributes), "header": header})
        message.encode()
        return message.data


@frozen
class FoundLink:
    """A network interface as the kernel describes it."""

    index: int
    name: str
    mac: str
    """Empty when its kind has none."""
    mtu: int
    master: int
    """The index of the bridge it is a port of; 0 when it is none."""
    alias: str
    kind: str
    """``bridge``, ``veth``, ``tun`` (which a tap is too), …; empty for hardware."""


@frozen
class Change:
    """A change of a link; ``None`` leaves the property as it is."""

    up: bool | None = None
    mac: str | None = None
    mtu: int | None = None
    master: int | None = None
    """Index of its bridge; 0 removes it from its bridge."""
    alias: str | None = None
    """The empty string clears it."""

    def __str__(self) -> str:
        return ", ".join(f"{name} {value!r}" for name, value in attrs.asdict(self).items() if value is not None)


class Rtnetlink:
    """A netlink socket to the network namespace that this thread is in.

    Every method raises :exc:`~runner.base.errors.HostError`, caused by the kernel's ``OSError``.

    Example::

        with Rtnetlink() as rtnetlink:
            link = rtnetlink.link("eth0")
    """

    def __init__(self) -> None:
        self._sequence = 0
        with doing("open rtnetlink"):
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
            try:
                # Errors come with a message of the kernel's.
                self._socket.setsockopt(netlink.SOL_NETLINK, netlink.NETLINK_EXT_ACK, 1)
                # Addresses and routes are dumped of one link; without this the kernel ignores which.
                self._socket.setsockopt(netlink.SOL_NETLINK, netlink.NETLINK_GET_STRICT_CHK, 1)
                # PID 1 must not wait for ever in a release, even for an answer that is lost.
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", ANSWERED_WITHIN, 0))
            except OSError:
                self._socket.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def links(self) -> list[FoundLink]:
        """Return every link of the namespace."""
        with doing("read the network interfaces"):
            messages = self._dump(rtnl.RTM_GETLINK, _link_request({}, _WITHOUT_STATISTICS))
            return [_understood(_found, message) for message in messages]

    def link(self, name: str) -> FoundLink | None:
        """Return the link *name*, if there is one."""
        request = _link_request({}, _name(name), _WITHOUT_STATISTICS)
        with doing(f"look for the network interface {name!r}"):
            try:
                answers = self._ask(rtnl.RTM_GETLINK, 0, request)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return None
                raise
            if len(answers) != 1:
                raise _malformed()
            found = _understood(_found, answers[0])
        return found if found.name == name else None  # the kernel searches alternative names of links too

    def add_bridge(self, name: str, mtu: int) -> None:
        """Create the bridge *name*, which forwards at once and floods multicast (no STP, no IGMP snooping)."""
        options = [("IFLA_BR_STP_STATE", 0), ("IFLA_BR_FORWARD_DELAY", 0), ("IFLA_BR_MCAST_SNOOPING", 0)]
        info = [("IFLA_INFO_KIND", "bridge"), ("bridge options", {"attrs": options})]
        request = _link_request({}, _name(name), ("IFLA_MTU", mtu), ("IFLA_LINKINFO", {"attrs": info}))
        with doing(f"make the bridge {name!r}"):
            self._ask(rtnl.RTM_NEWLINK, netlink.NLM_F_CREATE | netlink.NLM_F_EXCL, request)

    def add_macvtap(self, name: str, over: FoundLink, mac: str, mtu: int) -> None:
        """Create the macvtap *name* over the link *over* in mode ``bridge``, in which its siblings reach each other."""
        options = [("IFLA_MACVLAN_MODE", _MACVLAN_MODE_BRIDGE)]
        info = [("IFLA_INFO_KIND", "macvtap"), ("macvlan options", {"attrs": options})]
        request = _link_request(
            {},
            _name(name),
            ("IFLA_LINK", over.index),
            ("IFLA_ADDRESS", _packed_mac(mac)),
            ("IFLA_MTU", mtu),
            ("IFLA_LINKINFO", {"attrs": info}),
        )
        with doing(f"make the macvtap {name!r} over {over.name!r}"):
            self._ask(rtnl.RTM_NEWLINK, netlink.NLM_F_CREATE | netlink.NLM_F_EXCL, request)

    def set_link(self, link: FoundLink, change: Change) -> None:
        """Apply *change* to *link*."""
        values = {
            "IFLA_ADDRESS": None if change.mac is None else _packed_mac(change.mac),
            "IFLA_MTU": change.mtu,
            "IFLA_MASTER": change.master,
            "IFLA_IFALIAS": None if change.alias is None else os.fsencode(change.alias),
        }
        flags = {"flags": _IFF_UP if change.up else 0, "change": 0 if change.up is None else _IFF_UP}
        attributes = ((name, value) for name, value in values.items() if value is not None)
        with doing(f"set {change} of the network interface {link.name!r}"):
            self._ask(rtnl.RTM_SETLINK, 0, _link_request({"index": link.index, **flags}, *attributes))

    def delete_link(self, link: FoundLink) -> None:
        """Delete *link*."""
        with doing(f"delete the network interface {link.name!r}"):
            self._ask(rtnl.RTM_DELLINK, 0, _link_request({"index": link.index}))

    def addresses(self, link: FoundLink) -> tuple[IPv4Interface, ...]:
        """Return the IPv4 addresses of *link*."""
        found = self._read_addresses(link, socket.AF_INET, _address)
        return tuple(address for address in found if isinstance(address, IPv4Interface))

    def addresses6(self, link: FoundLink) -> tuple[IPv6Interface, ...]:
        """Return the permanent global IPv6 addresses of *link*."""
        addresses = self._read_addresses(link, socket.AF_INET6, _permanent_address)
        return tuple(address for address in addresses if isinstance(address, IPv6Interface))

    def has_broadcast(self, link: FoundLink) -> bool:
        """Tell whether the IPv4 addresses of *link* came with a broadcast address."""
        return any(self._read_addresses(link, socket.AF_INET, _has_broadcast))

    def peers(self, link: FoundLink) -> tuple[IpAddress, ...]:
        """Return the other ends of the point-to-point addresses of *link*."""
        families = (socket.AF_INET, socket.AF_INET6)
        found = (peer for family in families for peer in self._read_addresses(link, family, _peer))
        return tuple(peer for peer in found if peer is not None)

    def _read_addresses(self, link: FoundLink, family: int, read: Callable[[_Message], T]) -> list[T]:
        """Return the results of *read* for the addresses of *link*."""
        request = _Request(ifaddrmsg.ifaddrmsg, {"family": family, "index": link.index})
        with doing(f"read the addresses of {link.name!r}"):
            return [_understood(read, message) for message in self._dump(rtnl.RTM_GETADDR, request)]

    def add_address(self, link: FoundLink, address: IpInterface) -> None:
        """Add an address that *link* does not have, without a route to its subnet."""
        request = _address_request(link, address, ifaddrmsg.IFA_F_NOPREFIXROUTE)
        with doing(f"give {link.name!r} the address {address}"):
            self._ask(rtnl.RTM_NEWADDR, netlink.NLM_F_CREATE | netlink.NLM_F_EXCL, request)

    def replace_address(self, link: FoundLink, address: IpInterface, *, broadcast: bool = False) -> None:
        """Add an address that *link* may have already; *broadcast* sets its subnet's broadcast address."""
        request = _address_request(link, address)
        if broadcast:
            more = ("IFA_BROADCAST", str(address.network.broadcast_address))
            request = attrs.evolve(request, attributes=(*request.attributes, more))
        with doing(f"give {link.name!r} the address {address}"):
            self._ask(rtnl.RTM_NEWADDR, netlink.NLM_F_CREATE | netlink.NLM_F_REPLACE, request)

    def delete_address(self, link: FoundLink, address: IpInterface) -> None:
        """Remove an address from *link*."""
        with doing(f"take the address {address} from {link.name!r}"):
            self._ask(rtnl.RTM_DELADDR, 0, _address_request(link, address))

    def neighbours(self, link: FoundLink) -> tuple[PermanentNeighbour, ...]:
        """Return the permanent neighbours of *link*."""
        with doing(f"read the neighbours of {link.name!r}"):
            messages = self._dump(rtnl.RTM_GETNEIGH, _Request(ndmsg.ndmsg, {}, (("NDA_IFINDEX", link.index),)))
            found = [_understood(partial(_neighbour, index=link.index), message) for message in messages]
        return tuple(filter(None, found))

    def replace_neighbour(self, link: FoundLink, neighbour: PermanentNeighbour) -> None:
        """Add a permanent neighbour to *link*, replacing the entry of that address."""
        fields = {
            "family": _family(neighbour.address),
            "ifindex": link.index,
            "state": ndmsg.NUD_PERMANENT,
        }
        attributes = (("NDA_DST", str(neighbour.address)), ("NDA_LLADDR", neighbour.mac))
        with doing(f"tell {link.name!r} the neighbour {neighbour.address}"):
            self._ask(
                rtnl.RTM_NEWNEIGH,
                netlink.NLM_F_CREATE | netlink.NLM_F_REPLACE,
                _Request(ndmsg.ndmsg, fields, attributes),
            )

    def answer_arp(self, bridge: FoundLink, port: FoundLink, neighbour: PermanentNeighbour) -> None:
        """Let *bridge* answer ARP requests for *neighbour*, which is behind its *port*, with the neighbour's MAC address.

        ``br_do_proxy_suppress_arp`` of ``net/bridge/br_arp_nd_proxy.c``: the bridge answers for each of its neighbours whose port has this
        option. The option ``proxy_arp`` would keep broadcasts from the guest.
        """
        self.replace_neighbour(bridge, neighbour)
        self.forward_to(port, neighbour.mac)
        with doing(f"answer ARP for {neighbour.address} on {bridge.name!r}"):
            self._set_port(port, "IFLA_BRPORT_PROXYARP_WIFI", 1)

    def forward_to(self, port: FoundLink, mac: str) -> None:
        """Let the bridge of *port* send the frames to *mac* to this port alone."""
        known = {"family": socket.AF_BRIDGE, "ifindex": port.index, "state": ndmsg.NUD_NOARP, "flags": ndmsg.NTF_MASTER}
        request = _Request(ndmsg.ndmsg, known, (("NDA_LLADDR", mac),))
        with doing(f"send the frames to {mac} to {port.name!r}"):
            self._ask(rtnl.RTM_NEWNEIGH, netlink.NLM_F_CREATE | netlink.NLM_F_REPLACE, request)

    def answer_the_routed(self, link: FoundLink) -> None:
        """Forward no IPv4 packets from *link*, and answer its ARP requests only to addresses to which a route leads through it.

        The kernel would keep a neighbour for each asker, in a table of at most ``gc_thresh3`` entries (1024) that all network namespaces
        of the machine share: while it is full, none of them finds a new neighbour (``arp_process``, ``neigh_alloc``). ``rp_filter``
        would not help where it is 2 for all links. In a container ``/proc/sys`` is read-only, and netlink has the same settings.
        """
        with doing(f"answer only the routed addresses on {link.name!r}"):
            self._ask(rtnl.RTM_SETLINK, 0, _link_request({"index": link.index}, ("IFLA_AF_SPEC", _NOT_FORWARDING)))

    def stop_learning(self, port: FoundLink) -> None:
        """Let the bridge of *port* learn no MAC addresses behind it, so that it sends frames for them to every other port.

        Each frame may have another source address, and the kernel keeps a learned one for 5 minutes, without a limit on their number,
        in memory that it charges to no cgroup (``br_fdb_update`` of ``net/bridge/br_fdb.c``).
        """
        with doing(f"stop learning addresses behind {port.name!r}"):
            self._set_port(port, "IFLA_BRPORT_LEARNING", 0)

    def _set_port(self, port: FoundLink, option: str, value: int) -> None:
        options = ("IFLA_PROTINFO", {"attrs": [(option, value)]})
        self._ask(rtnl.RTM_SETLINK, 0, _link_request({"family": socket.AF_BRIDGE, "index": port.index}, options))

    def routes(self, link: FoundLink) -> tuple[Route, ...]:
        """Return the IPv4 routes through *link* of every table but the local one, including the kernel's own."""
        return self._routes(link, socket.AF_INET)

    def routes6(self, link: FoundLink) -> tuple[Route, ...]:
        """Return the IPv6 routes through *link* of every table but the local one, including the kernel's own."""
        return self._routes(link, socket.AF_INET6)

    def _routes(self, link: FoundLink, family: int) -> tuple[Route, ...]:
        return tuple(filter(None, self._read_routes(link, family, partial(_route, index=link.index))))

    def multipath(self, link: FoundLink) -> tuple[IpNetwork, ...]:
        """Return the destinations of multipath routes of every table, one of whose gateways is behind *link*."""
        families = (socket.AF_INET, socket.AF_INET6)
        read = partial(_multipath, index=link.index)
        return tuple(
            found for family in families for found in self._read_routes(link, family, read) if found is not None
        )

    def belongings(self, link: FoundLink) -> frozenset[str]:
        """Return the addresses, routes of every table and kind, and permanent neighbours of *link*, each as words to compare.

        Those that the kernel itself adds and removes are left out.
        """
        families = (socket.AF_INET, socket.AF_INET6)
        found: list[str | None] = [f"neighbour {each.address} {each.mac}" for each in self.neighbours(link)]
        for family in families:
            found += self._read_addresses(link, family, _address_words)
            found += self._read_routes(link, family, partial(_route_words, index=link.index))
        return frozenset(filter(None, found))

    def _read_routes(self, link: FoundLink, family: int, read: Callable[[_Message], T]) -> list[T]:
        """Return the results of *read* for the routes through *link*."""
        # The caller picks the table: the kernel refuses to dump one that was never used (ENOENT).
        request = _Request(_RouteMessage, {"family": family}, (("RTA_OIF", link.index),))
        with doing(f"read the routes of {link.name!r}"):
            return [_understood(read, message) for message in self._dump(rtnl.RTM_GETROUTE, request)]

    def replace_route(self, link: FoundLink, route: Route) -> None:
        """Add *route* to its table, replacing one with the same destination and metric."""
        fields = {
            "family": _family(route.destination.network_address),
            "dst_len": route.destination.prefixlen,
            "table": route.table if route.table <= _LARGEST_TABLE else _RT_TABLE_UNSPEC,
            "proto": route.protocol,
            "scope": _scope(route),
            "type": rtnl.rt_type["unicast"],
            "flags": rtmsg.RTNH_F_ONLINK if route.onlink else 0,
        }
        values: dict[str, object] = {
            "RTA_DST": str(route.destination.network_address),
            "RTA_OIF": link.index,
            "RTA_TABLE": route.table,
            "RTA_GATEWAY": None if route.gateway is None else str(route.gateway),
            "RTA_PREFSRC": None if route.source is None else str(route.source),
            "RTA_PRIORITY": route.metric or None,
            "RTA_METRICS": bytes.fromhex(route.metrics) or None,
        }
        attributes = tuple((name, value) for name, value in values.items() if value is not None)
        with doing(f"put the route {route} through {link.name!r}"):
            self._ask(
                rtnl.RTM_NEWROUTE,
                netlink.NLM_F_CREATE | netlink.NLM_F_REPLACE,
                _Request(_RouteMessage, fields, attributes),
            )

    def _dump(self, kind: int, request: _Request) -> list[_Message]:
        """Return all objects of one kind, as they existed at one moment."""
        for _ in range(_DUMP_TRIES):
            answers, torn = self._request(kind, netlink.NLM_F_DUMP, request)
            if not torn:
                return answers
        raise OSError(errno.EAGAIN, f"it changed each of the {_DUMP_TRIES} times it was read")

    def _ask(self, kind: int, flags: int, request: _Request) -> list[_Message]:
        return self._request(kind, flags, request)[0]

    def _request(self, kind: int, flags: int, request: _Request) -> tuple[list[_Message], bool]:
        """Send a request and return its answers, and whether something changed between two of them."""
        self._sequence += 1
        flags |= netlink.NLM_F_REQUEST | netlink.NLM_F_ACK
        self._socket.sendto(request.encode(kind, flags, self._sequence), (0, 0))  # port 0 is the kernel
        answers: list[_Message] = []
        torn = False
        while True:
            for answer in self._receive(request.layout):
                header = answer["header"]
                torn = torn or bool(header["flags"] & netlink.NLM_F_DUMP_INTR)
                if header["type"] in _FINAL:
                    _check(answer)
                    return answers, torn
                answers.append(answer)

    def _receive(self, layout: Callable[..., _Message]) -> Iterator[_Message]:
        """Yield each message of the next datagram that answers the last request."""
        try:
            datagram, _, how, sender = self._socket.recvmsg(_LARGEST_ANSWER)
        except BlockingIOError:
            raise TimeoutError(errno.ETIMEDOUT, f"no answer within {ANSWERED_WITHIN} s") from None
        if how & socket.MSG_TRUNC:
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        if sender[0] != 0:  # a process may write to this socket too
            return
        offset = 0
        while offset + _HEADER_SIZE <= len(datagram):
            header = _decoded(netlink.nlmsg, datagram, offset)["header"]
            if header["sequence_number"] == self._sequence:  # others answer a request that was given up
                yield _decoded(netlink.nlmsgerr if header["type"] in _FINAL else layout, datagram, offset)
            offset += (max(header["length"], _HEADER_SIZE) + 3) & ~3


_FINAL = {netlink.NLMSG_ERROR, netlink.NLMSG_DONE}
"""The types of the message that ends an answer; an error of 0 is an acknowledgement, or the end of a complete dump."""

_WITHOUT_STATISTICS = ("IFLA_EXT_MASK", _RTEXT_FILTER_SKIP_STATS)


def _decoded(layout: Callable[..., _Message], datagram: bytes, offset: int) -> _Message:
    """Return the message at *offset*. Raises ``OSError`` when pyroute2 cannot decode it."""
    message = layout(datagram, offset=offset)
    try:
        message.decode()
    except (NetlinkDecodeError, *_MISREAD) as error:
        raise _malformed() from error
    return message


_MISREAD = (AttributeError, LookupError, TypeError, ValueError, struct.error)
"""The exceptions raised by reading a message that lacks an attribute, or has one in another form than the kernel's headers say."""


def _understood(read: Callable[[_Message], T], message: _Message) -> T:
    """Return the result of *read* for *message*. Raises ``OSError`` if the message is not as expected."""
    try:
        return read(message)
    except _MISREAD:
        raise _malformed() from None


def _malformed() -> OSError:
    return OSError(errno.EBADMSG, "the answer is malformed")


def _check(final: _Message) -> None:
    """Raise the error of the *final* message, if it is one."""
    code = -final["error"]
    if code == 0:
        return
    flags = final["header"]["flags"]
    words = final.get_attr("NLMSGERR_ATTR_MSG") if flags & netlink.NLM_F_ACK_TLVS else None
    raise OSError(code, os.strerror(code) if words is None else f"{os.strerror(code)}: {words}")


def _link_request(fields: Mapping[str, object], *attributes: tuple[str, object]) -> _Request:
    return _Request(_LinkMessage, fields, attributes)


def _name(name: str) -> tuple[str, object]:
    return "IFLA_IFNAME", os.fsencode(name)


def _packed_mac(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))


def _found(message: _Message) -> FoundLink:
    info: _Message | None = message.get_attr("IFLA_LINKINFO")
    return FoundLink(
        message["index"],
        os.fsdecode(message.get_attr("IFLA_IFNAME")),
        message.get_attr("IFLA_ADDRESS", b"").hex(":"),
        message.get_attr("IFLA_MTU", 0),
        message.get_attr("IFLA_MASTER", 0),
        os.fsdecode(message.get_attr("IFLA_IFALIAS", "")).rstrip("\0"),
        "" if info is None else info.get_attr("IFLA_INFO_KIND", ""),
    )


def _address(message: _Message) -> IpInterface:
    # Where the two differ, IFA_ADDRESS is the other end of a point-to-point link.
    return ip_interface(f"{message.get_attr('IFA_LOCAL') or message.get_attr('IFA_ADDRESS')}/{message['prefixlen']}")


def _peer(message: _Message) -> IpAddress | None:
    """Return the other end of a point-to-point address."""
    local, far = message.get_attr("IFA_LOCAL"), message.get_attr("IFA_ADDRESS")
    return None if local in {None, far} or far is None else ip_address(far)


def _permanent_address(message: _Message) -> IpInterface | None:
    """Return the address if it is a global one that no router's advertisement made."""
    flags = message["flags"] | message.get_attr("IFA_FLAGS", 0)
    permanent = bool(flags & ifaddrmsg.IFA_F_PERMANENT) and not flags & ifaddrmsg.IFA_F_TEMPORARY
    return _address(message) if message["scope"] == rtnl.rt_scope["universe"] and permanent else None


def _has_broadcast(message: _Message) -> bool:
    return message.get_attr("IFA_BROADCAST") is not None


def _address_request(link: FoundLink, address: IpInterface, flags: int = 0) -> _Request:
    fields = {"family": _family(address.ip), "prefixlen": address.network.prefixlen, "index": link.index}
    attributes: tuple[tuple[str, object], ...] = (("IFA_LOCAL", str(address.ip)), ("IFA_ADDRESS", str(address.ip)))
    if isinstance(address, IPv6Interface):  # it is new here or was this link's a moment ago: nothing to detect
        flags |= ifaddrmsg.IFA_F_NODAD
    return _Request(ifaddrmsg.ifaddrmsg, fields, (*attributes, ("IFA_FLAGS", flags)))


def _family(address: IpAddress) -> int:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6  # noqa: PLR2004 - IPv4


def _scope(route: Route) -> int:
    """Return the route's scope as ip(8) chooses it: an IPv4 network without a gateway is on the link."""
    on_link = route.gateway is None and isinstance(route.destination, IPv4Network)
    return int(rtnl.rt_scope["link" if on_link else "universe"])


def _neighbour(message: _Message, index: int) -> PermanentNeighbour | None:
    """Return the neighbour, if it is a permanent one of link *index*."""
    mac = message.get_attr("NDA_LLADDR")
    is_ip = message["family"] in {socket.AF_INET, socket.AF_INET6}
    if is_ip and message["ifindex"] == index and message["state"] & ndmsg.NUD_PERMANENT and mac:
        return PermanentNeighbour(ip_address(message.get_attr("NDA_DST")), mac)
    return None


def _destination(message: _Message) -> IpNetwork:
    everything = "0.0.0.0" if message["family"] == socket.AF_INET else "::"
    return ip_network(f"{message.get_attr('RTA_DST', everything)}/{message['dst_len']}")


def _route(message: _Message, index: int) -> Route | None:
    """Return the route, if it is one of another table than the local one through link *index* alone."""
    unicast, table = message["type"] == rtnl.rt_type["unicast"], _table(message)
    if table == _RT_TABLE_LOCAL or message.get_attr("RTA_OIF") != index or not unicast:
        return None
    via = message.get_attr("RTA_VIA")
    return Route(
        _destination(message),
        _ip(message.get_attr("RTA_GATEWAY") if via is None else via["addr"]),
        _ip(message.get_attr("RTA_PREFSRC")),
        message.get_attr("RTA_PRIORITY", 0),
        bool(message["flags"] & rtmsg.RTNH_F_ONLINK),
        message["proto"],
        message.get_attr("RTA_METRICS", b"").hex(),
        table,
    )


def _table(message: _Message) -> int:
    return int(message.get_attr("RTA_TABLE", message["table"]))


_VOLATILE = {"RTA_OIF", "RTA_TABLE", "RTA_DST", "RTA_CACHEINFO", "RTA_EXPIRES", "RTA_PREF"}
_NOT_OURS = {2, 9}
"""``RTPROT_KERNEL`` and ``RTPROT_RA`` (rtnetlink(7))."""


def _route_words(message: _Message, index: int) -> str | None:
    """Return the route as words, if a program has put it through link *index*."""
    hops = message.get_attr("RTA_MULTIPATH", ())
    through = message.get_attr("RTA_OIF") == index or any(hop["oif"] == index for hop in hops)
    if not through or message["proto"] in _NOT_OURS:
        return None
    kind = next((name for name, number in rtnl.rt_type.items() if number == message["type"]), message["type"])
    rest = sorted(f"{name[4:].lower()} {value}" for name, value in message["attrs"] if name not in _VOLATILE)
    fields = f"tos {message['tos']} scope {message['scope']} proto {message['proto']}"
    return " ".join((f"route {_destination(message)} table {_table(message)} {kind}", fields, *rest))


def _address_words(message: _Message) -> str | None:
    """Return the address as words, if it is a permanent one and not the link's own."""
    if message["scope"] == rtnl.rt_scope["link"] or not message["flags"] & ifaddrmsg.IFA_F_PERMANENT:
        return None
    names = ("IFA_LOCAL", "IFA_BROADCAST", "IFA_LABEL")
    rest = (f"{name[4:].lower()} {message.get_attr(name)}" for name in names if message.get_attr(name) is not None)
    return " ".join((f"address {message.get_attr('IFA_ADDRESS')}/{message['prefixlen']}", *rest))


def _multipath(message: _Message, index: int) -> IpNetwork | None:
    """Return the destination, if it is a multipath route with a gateway behind link *index*."""
    through = any(hop["oif"] == index for hop in message.get_attr("RTA_MULTIPATH", ()))
    return _destination(message) if through else None


def _ip(text: str | None) -> IpAddress | None:
    return None if text is None else ip_address(text)
