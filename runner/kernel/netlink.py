"""The one door to rtnetlink(7): links, their addresses and permanent neighbours, and the routes of the main table.

A request is a header, a fixed structure and attributes. The kernel executes it within ``sendto`` and has put its answer into
the receive buffer when that returns, so nothing here waits and nothing needs a task. Numbers and structures are those of
``include/uapi/linux/netlink.h``, ``rtnetlink.h``, ``if_link.h`` and ``if_addr.h``; Linux 4.20 or later is required.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from typing import Self

import attrs

from runner.errors import HostError
from runner.facts.network import IpAddress, IpInterface, IpNetwork, PermanentNeighbour, Route
from runner.values import frozen

ANSWERED_WITHIN = 5
"""Seconds after which an answer counts as lost: the kernel answers before ``sendto`` returns."""

_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_LINK = struct.Struct("=BxHiII")  # ifinfomsg: family, type, index, flags, change
_ADDRESS = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefix length, flags, scope, index
_NEIGHBOUR = struct.Struct("=B3xiHBB")  # ndmsg: family, index, state, flags, type
_NEXT_HOP = struct.Struct("=HBBi")  # rtnexthop: length, flags, hops, index
_ROUTE = struct.Struct("=BBBBBBBBI")  # rtmsg: family, dst and src length, tos, table, protocol, scope, type, flags
_ATTRIBUTE = struct.Struct("=HH")  # nlattr: length, type
_ATTRIBUTE_TYPE = 0x3FFF  # the other two bits are flags
_U8 = struct.Struct("=B")
_U32 = struct.Struct("=I")
_S32 = struct.Struct("=i")

_SOL_NETLINK = 270
_NETLINK_CAP_ACK = 10
_NETLINK_EXT_ACK = 11
_NETLINK_GET_STRICT_CHK = 12

_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_NLM_F_REQUEST = 0x1
_NLM_F_ACK = 0x4
_NLM_F_DUMP = 0x300
_NLM_F_REPLACE = 0x100
_NLM_F_EXCL = 0x200
_NLM_F_CREATE = 0x400
_NLM_F_DUMP_INTR = 0x10
_NLM_F_CAPPED = 0x100
_NLM_F_ACK_TLVS = 0x200
_NLMSGERR_ATTR_MSG = 1

_RTM_NEWLINK, _RTM_DELLINK, _RTM_GETLINK, _RTM_SETLINK = 16, 17, 18, 19
_RTM_NEWADDR, _RTM_DELADDR, _RTM_GETADDR = 20, 21, 22
_RTM_NEWROUTE, _RTM_GETROUTE = 24, 26
_RTM_NEWNEIGH, _RTM_GETNEIGH = 28, 30

_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_LINK, _IFLA_MASTER = 1, 3, 4, 5, 10
_IFLA_MACVLAN_MODE = 1
_MACVLAN_MODE_BRIDGE = 4
_IFLA_LINKINFO, _IFLA_IFALIAS, _IFLA_EXT_MASK = 18, 20, 29
_IFLA_INFO_KIND, _IFLA_INFO_DATA = 1, 2
_IFLA_BR_FORWARD_DELAY, _IFLA_BR_STP_STATE, _IFLA_BR_MCAST_SNOOPING = 1, 5, 23
_RTEXT_FILTER_SKIP_STATS = 8
_IFF_UP = 1

_IFA_ADDRESS, _IFA_LOCAL, _IFA_BROADCAST, _IFA_FLAGS = 1, 2, 4, 8
_IFA_F_TEMPORARY, _IFA_F_NODAD, _IFA_F_PERMANENT = 0x01, 0x02, 0x80

_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PRIORITY, _RTA_PREFSRC, _RTA_METRICS, _RTA_MULTIPATH = 1, 4, 5, 6, 7, 8, 9
_RT_TABLE_MAIN = 254
_RT_SCOPE_UNIVERSE, _RT_SCOPE_LINK = 0, 253
_RTN_UNICAST = 1
_RTNH_F_ONLINK = 4

_NDA_DST, _NDA_LLADDR, _NDA_IFINDEX = 1, 2, 8
_NUD_PERMANENT = 0x80

_LARGEST_ANSWER = 1 << 16  # the kernel fills datagrams of 32 KiB in a dump, and more only for a single larger message
_DUMP_TRIES = 10
"""A dump is repeated when something changed in the middle of it; ten times in a row are not coincidence."""


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

    Every method raises :exc:`~runner.errors.HostError`, caused by the kernel's ``OSError``.

    Example::

        with Rtnetlink() as rtnetlink:
            link = rtnetlink.link("eth0")
    """

    def __init__(self) -> None:
        self._sequence = 0
        with _doing("open rtnetlink"):
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
            try:
                # Errors come with a message of the kernel's, and without a copy of the request.
                self._socket.setsockopt(_SOL_NETLINK, _NETLINK_EXT_ACK, 1)
                self._socket.setsockopt(_SOL_NETLINK, _NETLINK_CAP_ACK, 1)
                # Addresses and routes are dumped of one link; without this the kernel ignores which.
                self._socket.setsockopt(_SOL_NETLINK, _NETLINK_GET_STRICT_CHK, 1)
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
        with _doing("read the network interfaces"):
            return [_found(body) for body in self._dump(_RTM_GETLINK, _LINK.pack(0, 0, 0, 0, 0) + _WITHOUT_STATISTICS)]

    def link(self, name: str) -> FoundLink | None:
        """Return the link *name*, if there is one."""
        request = _LINK.pack(0, 0, 0, 0, 0) + _text(_IFLA_IFNAME, name) + _WITHOUT_STATISTICS
        with _doing(f"look for the network interface {name!r}"):
            try:
                [answer] = self._ask(_RTM_GETLINK, 0, request)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return None
                raise
        found = _found(answer)
        return found if found.name == name else None  # the kernel searches alternative names of links too

    def add_bridge(self, name: str, mtu: int) -> None:
        """Create the bridge *name*, which forwards at once and floods multicast (no STP, no IGMP snooping)."""
        options = (
            _attribute(_IFLA_BR_STP_STATE, _U32.pack(0))
            + _attribute(_IFLA_BR_FORWARD_DELAY, _U32.pack(0))
            + _attribute(_IFLA_BR_MCAST_SNOOPING, _U8.pack(0))
        )
        info = _text(_IFLA_INFO_KIND, "bridge") + _attribute(_IFLA_INFO_DATA, options)
        request = (
            _LINK.pack(0, 0, 0, 0, 0)
            + _text(_IFLA_IFNAME, name)
            + _attribute(_IFLA_MTU, _U32.pack(mtu))
            + _attribute(_IFLA_LINKINFO, info)
        )
        with _doing(f"make the bridge {name!r}"):
            self._ask(_RTM_NEWLINK, _NLM_F_CREATE | _NLM_F_EXCL, request)

    def add_macvtap(self, name: str, over: FoundLink, mac: str, mtu: int) -> None:
        """Create the macvtap *name* over the link *over* in mode ``bridge``, in which its siblings reach each other."""
        mode = _attribute(_IFLA_MACVLAN_MODE, _U32.pack(_MACVLAN_MODE_BRIDGE))
        request = (
            _LINK.pack(0, 0, 0, 0, 0)
            + _text(_IFLA_IFNAME, name)
            + _attribute(_IFLA_LINK, _U32.pack(over.index))
            + _attribute(_IFLA_ADDRESS, bytes.fromhex(mac.replace(":", "")))
            + _attribute(_IFLA_MTU, _U32.pack(mtu))
            + _attribute(_IFLA_LINKINFO, _text(_IFLA_INFO_KIND, "macvtap") + _attribute(_IFLA_INFO_DATA, mode))
        )
        with _doing(f"make the macvtap {name!r} over {over.name!r}"):
            self._ask(_RTM_NEWLINK, _NLM_F_CREATE | _NLM_F_EXCL, request)

    def set_link(self, link: FoundLink, change: Change) -> None:
        """Apply *change* to *link*."""
        flags = _IFF_UP if change.up else 0
        request = _LINK.pack(0, 0, link.index, flags, 0 if change.up is None else _IFF_UP)
        if change.mac is not None:
            request += _attribute(_IFLA_ADDRESS, bytes.fromhex(change.mac.replace(":", "")))
        if change.mtu is not None:
            request += _attribute(_IFLA_MTU, _U32.pack(change.mtu))
        if change.master is not None:
            request += _attribute(_IFLA_MASTER, _U32.pack(change.master))
        if change.alias is not None:
            request += _attribute(_IFLA_IFALIAS, os.fsencode(change.alias))  # a final NUL would not clear it
        with _doing(f"set {change} of the network interface {link.name!r}"):
            self._ask(_RTM_SETLINK, 0, request)

    def delete_link(self, link: FoundLink) -> None:
        """Delete *link*."""
        with _doing(f"delete the network interface {link.name!r}"):
            self._ask(_RTM_DELLINK, 0, _LINK.pack(0, 0, link.index, 0, 0))

    def addresses(self, link: FoundLink) -> tuple[IPv4Interface, ...]:
        """Return the IPv4 addresses of *link*."""
        found = map(_address, self._address_messages(link, socket.AF_INET))
        return tuple(address for address in found if isinstance(address, IPv4Interface))

    def addresses6(self, link: FoundLink) -> tuple[IPv6Interface, ...]:
        """Return the permanent global IPv6 addresses of *link*."""
        messages = (body for body in self._address_messages(link, socket.AF_INET6) if _is_permanent(body))
        return tuple(address for address in map(_address, messages) if isinstance(address, IPv6Interface))

    def has_broadcast(self, link: FoundLink) -> bool:
        """Tell whether the IPv4 addresses of *link* came with a broadcast address."""
        messages = self._address_messages(link, socket.AF_INET)
        return any(_IFA_BROADCAST in _attributes(body[_ADDRESS.size :]) for body in messages)

    def _address_messages(self, link: FoundLink, family: int) -> list[bytes]:
        with _doing(f"read the addresses of {link.name!r}"):
            return self._dump(_RTM_GETADDR, _ADDRESS.pack(family, 0, 0, 0, link.index))

    def add_address(self, link: FoundLink, address: IpInterface) -> None:
        """Add an address that *link* does not have."""
        with _doing(f"give {link.name!r} the address {address}"):
            self._ask(_RTM_NEWADDR, _NLM_F_CREATE | _NLM_F_EXCL, _address_request(link, address))

    def replace_address(self, link: FoundLink, address: IpInterface, *, broadcast: bool = False) -> None:
        """Add an address that *link* may have already; *broadcast* sets its subnet's broadcast address."""
        request = _address_request(link, address)
        if broadcast:
            request += _attribute(_IFA_BROADCAST, address.network.broadcast_address.packed)
        with _doing(f"give {link.name!r} the address {address}"):
            self._ask(_RTM_NEWADDR, _NLM_F_CREATE | _NLM_F_REPLACE, request)

    def delete_address(self, link: FoundLink, address: IpInterface) -> None:
        """Remove an address from *link*."""
        with _doing(f"take the address {address} from {link.name!r}"):
            self._ask(_RTM_DELADDR, 0, _address_request(link, address))

    def neighbours(self, link: FoundLink) -> tuple[PermanentNeighbour, ...]:
        """Return the permanent neighbours of *link*."""
        request = _NEIGHBOUR.pack(0, 0, 0, 0, 0) + _attribute(_NDA_IFINDEX, _U32.pack(link.index))
        with _doing(f"read the neighbours of {link.name!r}"):
            bodies = self._dump(_RTM_GETNEIGH, request)
        return tuple(neighbour for body in bodies for neighbour in _neighbour(body, link.index))

    def replace_neighbour(self, link: FoundLink, neighbour: PermanentNeighbour) -> None:
        """Add a permanent neighbour to *link*, replacing the entry of that address."""
        family = _family(neighbour.address)
        request = _NEIGHBOUR.pack(family, link.index, _NUD_PERMANENT, 0, 0)
        request += _attribute(_NDA_DST, neighbour.address.packed)
        request += _attribute(_NDA_LLADDR, bytes.fromhex(neighbour.mac.replace(":", "")))
        with _doing(f"tell {link.name!r} the neighbour {neighbour.address}"):
            self._ask(_RTM_NEWNEIGH, _NLM_F_CREATE | _NLM_F_REPLACE, request)

    def routes(self, link: FoundLink) -> tuple[Route, ...]:
        """Return the IPv4 routes of the main table through *link*, those of the kernel itself included."""
        return tuple(route for body in self._route_messages(link, socket.AF_INET) for route in _route(body, link.index))

    def routes6(self, link: FoundLink) -> tuple[Route, ...]:
        """Return the IPv6 routes of the main table through *link*, those of the kernel itself included."""
        return tuple(
            route for body in self._route_messages(link, socket.AF_INET6) for route in _route(body, link.index)
        )

    def multipath(self, link: FoundLink) -> tuple[IpNetwork, ...]:
        """Return the destinations of multipath routes, one of whose gateways is behind *link*."""
        messages = (body for family in (socket.AF_INET, socket.AF_INET6) for body in self._route_messages(link, family))
        return tuple(destination for body in messages for destination in _multipath(body, link.index))

    def _route_messages(self, link: FoundLink, family: int) -> list[bytes]:
        # The caller picks the table: the kernel refuses to dump one that was never used (ENOENT).
        request = _ROUTE.pack(family, 0, 0, 0, 0, 0, 0, 0, 0) + _attribute(_RTA_OIF, _U32.pack(link.index))
        with _doing(f"read the routes of {link.name!r}"):
            return self._dump(_RTM_GETROUTE, request)

    def replace_route(self, link: FoundLink, route: Route) -> None:
        """Add *route* to the main table, replacing one with the same destination and metric."""
        flags = _RTNH_F_ONLINK if route.onlink else 0
        length = route.destination.prefixlen
        request = _ROUTE.pack(
            _family(route.destination.network_address),
            length,
            0,
            0,
            _RT_TABLE_MAIN,
            route.protocol,
            _scope(route),
            _RTN_UNICAST,
            flags,
        )
        request += _attribute(_RTA_DST, route.destination.network_address.packed)
        request += _attribute(_RTA_OIF, _U32.pack(link.index))
        if route.gateway is not None:
            request += _attribute(_RTA_GATEWAY, route.gateway.packed)
        if route.source is not None:
            request += _attribute(_RTA_PREFSRC, route.source.packed)
        if route.metric:
            request += _attribute(_RTA_PRIORITY, _U32.pack(route.metric))
        if route.metrics:
            request += _attribute(_RTA_METRICS, bytes.fromhex(route.metrics))
        with _doing(f"put the route {route} through {link.name!r}"):
            self._ask(_RTM_NEWROUTE, _NLM_F_CREATE | _NLM_F_REPLACE, request)

    def _dump(self, kind: int, request: bytes) -> list[bytes]:
        """Return all objects of a kind, as they were at one moment."""
        for _ in range(_DUMP_TRIES):
            answers, torn = self._request(kind, _NLM_F_DUMP, request)
            if not torn:
                return answers
        raise OSError(errno.EAGAIN, f"it changed each of the {_DUMP_TRIES} times it was read")

    def _ask(self, kind: int, flags: int, request: bytes) -> list[bytes]:
        return self._request(kind, flags, request)[0]

    def _request(self, kind: int, flags: int, request: bytes) -> tuple[list[bytes], bool]:
        """Send a request and return the bodies of its answers, and whether something changed between two of them."""
        self._sequence += 1
        header = _HEADER.pack(_HEADER.size + len(request), kind, flags | _NLM_F_REQUEST | _NLM_F_ACK, self._sequence, 0)
        self._socket.sendto(header + request, (0, 0))  # port 0 is the kernel
        answers: list[bytes] = []
        torn = False
        while True:
            for answer, answer_flags, body in self._receive():
                torn = torn or bool(answer_flags & _NLM_F_DUMP_INTR)
                if answer in {_NLMSG_ERROR, _NLMSG_DONE}:
                    _check(answer, answer_flags, body)
                    return answers, torn
                answers.append(body)

    def _receive(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield type, flags and body of each message of the next datagram that answers the last request."""
        try:
            datagram, _, how, sender = self._socket.recvmsg(_LARGEST_ANSWER)
        except BlockingIOError:
            raise TimeoutError(errno.ETIMEDOUT, f"no answer within {ANSWERED_WITHIN} s") from None
        if how & socket.MSG_TRUNC:
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        if sender[0] != 0:  # a process may write to this socket too
            return
        offset = 0
        while offset + _HEADER.size <= len(datagram):
            length, kind, flags, sequence, _ = _HEADER.unpack_from(datagram, offset)
            if sequence == self._sequence:  # others answer a request that was given up
                yield kind, flags, datagram[offset + _HEADER.size : offset + length]
            offset += _aligned(max(length, _HEADER.size))


def _check(kind: int, flags: int, body: bytes) -> None:
    """Raise the error of the final message; code 0 is an acknowledgement, or the end of a complete dump."""
    (code,) = _S32.unpack_from(body)
    if code == 0:
        return
    words = {}
    if flags & _NLM_F_ACK_TLVS:
        begin = _S32.size
        if kind == _NLMSG_ERROR:  # the header of the request follows, and unless it was capped the request itself
            request = _HEADER.size if flags & _NLM_F_CAPPED else int(_U32.unpack_from(body, begin)[0])
            begin += _aligned(request)
        words = _attributes(body[begin:])
    reason = os.strerror(-code)
    if _NLMSGERR_ATTR_MSG in words:
        reason += f": {_string(words[_NLMSGERR_ATTR_MSG])}"
    raise OSError(-code, reason)


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def _attribute(kind: int, value: bytes) -> bytes:
    head = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind)
    return head + value + bytes(-len(value) % 4)


def _text(kind: int, value: str) -> bytes:
    return _attribute(kind, os.fsencode(value) + b"\0")


_WITHOUT_STATISTICS = _attribute(_IFLA_EXT_MASK, _U32.pack(_RTEXT_FILTER_SKIP_STATS))


def _attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    offset = 0
    while offset + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        found[kind & _ATTRIBUTE_TYPE] = data[offset + _ATTRIBUTE.size : offset + length]
        offset += _aligned(max(length, _ATTRIBUTE.size))
    return found


def _string(value: bytes) -> str:
    return os.fsdecode(value.rstrip(b"\0"))


def _number(value: bytes | None) -> int:
    return 0 if value is None else int(_U32.unpack(value)[0])


def _found(body: bytes) -> FoundLink:
    _, _, index, _, _ = _LINK.unpack_from(body)
    attributes = _attributes(body[_LINK.size :])
    info = _attributes(attributes.get(_IFLA_LINKINFO, b""))
    return FoundLink(
        index,
        _string(attributes[_IFLA_IFNAME]),
        attributes.get(_IFLA_ADDRESS, b"").hex(":"),
        _number(attributes.get(_IFLA_MTU)),
        _number(attributes.get(_IFLA_MASTER)),
        _string(attributes.get(_IFLA_IFALIAS, b"")),
        _string(info.get(_IFLA_INFO_KIND, b"")),
    )


def _address(body: bytes) -> IpInterface:
    family, length, _, _, _ = _ADDRESS.unpack_from(body)
    attributes = _attributes(body[_ADDRESS.size :])
    # Where the two differ, IFA_ADDRESS is the other end of a point-to-point link.
    packed = attributes.get(_IFA_LOCAL) or attributes[_IFA_ADDRESS]
    return IPv4Interface((packed, length)) if family == socket.AF_INET else IPv6Interface((packed, length))


def _is_permanent(body: bytes) -> bool:
    """Tell whether the address is a global one that no router's advertisement made."""
    _, _, flags, scope, _ = _ADDRESS.unpack_from(body)
    flags |= _number(_attributes(body[_ADDRESS.size :]).get(_IFA_FLAGS))
    return scope == _RT_SCOPE_UNIVERSE and bool(flags & _IFA_F_PERMANENT) and not flags & _IFA_F_TEMPORARY


def _address_request(link: FoundLink, address: IpInterface) -> bytes:
    request = _ADDRESS.pack(_family(address.ip), address.network.prefixlen, 0, 0, link.index)
    request += _attribute(_IFA_LOCAL, address.packed) + _attribute(_IFA_ADDRESS, address.packed)
    if isinstance(
        address, IPv6Interface
    ):  # it is new here or was this link's a moment ago: no duplicate address detection
        request += _attribute(_IFA_FLAGS, _U32.pack(_IFA_F_NODAD))
    return request


def _family(address: IpAddress) -> int:
    return socket.AF_INET if isinstance(address, IPv4Address) else socket.AF_INET6


def _scope(route: Route) -> int:
    """Return the distance of the destination as ip(8) chooses it: an IPv4 network without a gateway is on the link."""
    on_link = route.gateway is None and isinstance(route.destination, IPv4Network)
    return _RT_SCOPE_LINK if on_link else _RT_SCOPE_UNIVERSE


def _neighbour(body: bytes, index: int) -> Iterator[PermanentNeighbour]:
    """Yield the neighbour, if it is a permanent one of link *index*."""
    family, link, state, _, _ = _NEIGHBOUR.unpack_from(body)
    attributes = _attributes(body[_NEIGHBOUR.size :])
    if (
        family in {socket.AF_INET, socket.AF_INET6}
        and link == index
        and state & _NUD_PERMANENT
        and _NDA_LLADDR in attributes
    ):
        yield PermanentNeighbour(_host(family, attributes[_NDA_DST]), attributes[_NDA_LLADDR].hex(":"))


def _destination(body: bytes) -> IpNetwork:
    family, length, *_ = _ROUTE.unpack_from(body)
    attributes = _attributes(body[_ROUTE.size :])
    if family == socket.AF_INET:
        return IPv4Network((attributes.get(_RTA_DST, bytes(4)), length))
    return IPv6Network((attributes.get(_RTA_DST, bytes(16)), length))


def _route(body: bytes, index: int) -> Iterator[Route]:
    """Yield the route, if it is one of the main table through link *index* alone."""
    family, _, _, _, table, protocol, _, kind, flags = _ROUTE.unpack_from(body)
    attributes = _attributes(body[_ROUTE.size :])
    if table == _RT_TABLE_MAIN and _number(attributes.get(_RTA_OIF)) == index and kind == _RTN_UNICAST:
        yield Route(
            _destination(body),
            None if _RTA_GATEWAY not in attributes else _host(family, attributes[_RTA_GATEWAY]),
            None if _RTA_PREFSRC not in attributes else _host(family, attributes[_RTA_PREFSRC]),
            _number(attributes.get(_RTA_PRIORITY)),
            bool(flags & _RTNH_F_ONLINK),
            protocol,
            attributes.get(_RTA_METRICS, b"").hex(),
        )


def _multipath(body: bytes, index: int) -> Iterator[IpNetwork]:
    """Yield the route's destination, if it is a multipath route with a gateway behind link *index*."""
    table = _ROUTE.unpack_from(body)[4]
    hops = _attributes(body[_ROUTE.size :]).get(_RTA_MULTIPATH, b"")
    links = []
    while len(hops) >= _NEXT_HOP.size:
        length, _, _, link = _NEXT_HOP.unpack_from(hops)
        links.append(link)
        hops = hops[_aligned(max(length, _NEXT_HOP.size)) :]
    if table == _RT_TABLE_MAIN and index in links:
        yield _destination(body)


def _host(family: int, packed: bytes) -> IpAddress:
    return IPv4Address(packed) if family == socket.AF_INET else IPv6Address(packed)


@contextmanager
def _doing(what: str) -> Iterator[None]:
    """Raise :exc:`~runner.errors.HostError` with *what* was attempted when the kernel refuses."""
    try:
        yield
    except OSError as error:
        raise HostError(f"cannot {what}") from error
