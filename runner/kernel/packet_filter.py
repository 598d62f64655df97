"""One table of nftables for each bridge: what this network namespace takes from it and forwards; its ports are not concerned.

A container's namespace has ``ip_forward`` from its machine, which on a node of Kubernetes is 1, and takes any IPv6 packet. By router
advertisements a guest would lead the namespace's own packets through itself; for each of 4,000 the kernel kept 40 routes, in memory that
it charges to no cgroup; and it would keep a neighbour for each link-local address, see
:meth:`~runner.kernel.netlink.Rtnetlink.answer_the_routed`. The sysctls against that cannot be written in a container without
privileges, where ``/proc/sys`` is read-only.

Layout of the messages: ``include/uapi/linux/netfilter/nf_tables.h``. The extension headers in front of ICMPv6 are skipped by the kernel
(``nft_set_pktinfo_ipv6``), which ignores fragmented advertisements (``suppress_frag_ndisc``). Frames that are bridged pass the hook for
forwarded packets too where ``br_netfilter`` is loaded, with the bridge as both interfaces (``br_nf_forward_ip``).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from ipaddress import IPv4Interface, IPv6Interface

from runner.base.errors import doing
from runner.kernel.netlink import ANSWERED_WITHIN

_NETLINK_NETFILTER = 12
_REQUEST, _ACK, _CREATE, _APPEND = 0x1, 0x4, 0x400, 0x800
_BATCH_BEGIN, _BATCH_END, _SUBSYSTEM = 16, 17, 10
_NEW_TABLE, _DELETE_TABLE, _NEW_CHAIN, _NEW_RULE = (_SUBSYSTEM << 8 | number for number in (0, 2, 3, 6))
_ERROR = 2
_ANY_IP = 1
"""``NFPROTO_INET``: IPv4 and IPv6."""
_NESTED = 1 << 15
_HEADER, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=HH")
_LARGEST_ANSWER = 1 << 15

_INGRESS, _FORWARD, _BEFORE_OTHERS = (b"ingress", 5), (b"forward", 2), (1 << 32) - 300
"""Two chains, each with the number of its hook, and their priority -300, as the table ``raw``."""
_REGISTER, _VERDICT, _DROP, _ACCEPT = 1, 0, 0, 1
_FROM, _TO, _FAMILY, _PROTOCOL = 6, 7, 15, 16
_NETWORK_HEADER, _TRANSPORT_HEADER = 1, 2
_IPV4_SOURCE, _IPV6_SOURCE = 12, 8
_EQUAL, _DIFFERENT = 0, 1
_ROUTER_ADVERTISEMENT = 134
_NAME_SIZE = 16
"""``IFNAMSIZ``: what names are compared in."""
_LINK_LOCAL_RATE, _LINK_LOCAL_BURST = 10, 50
"""Packets a second of the other IPv6 sources, each of which may be a new neighbour, and how many may come at once."""


def filter_packets(bridge: str, guest: IPv4Interface, guest6: IPv6Interface | None) -> None:
    """Let this network namespace forward nothing to *bridge* or from it, and take packets from it only of these two addresses.

    Exceptions are a DHCP client without an address, and with *guest6* link-local ones, a few at a time, but no router advertisements.
    Raises :exc:`~runner.base.errors.HostError` where the kernel has no nftables; where it lacks only the limit, the other rules hold.
    """
    table, name = _text(1, _name(bridge)), os.fsencode(bridge).ljust(_NAME_SIZE, b"\0")
    here, accept, drop = _meta(_FROM, name), _verdict(_ACCEPT), _verdict(_DROP)
    ipv4, ipv6 = (_meta(_FAMILY, bytes([family])) for family in (socket.AF_INET, socket.AF_INET6))
    rules = [
        _rule(table, _FORWARD, here, _meta(_TO, name, _DIFFERENT), drop),
        _rule(table, _FORWARD, _meta(_TO, name), _meta(_FROM, name, _DIFFERENT), drop),
        *(
            _rule(table, _INGRESS, ipv4, _payload(_NETWORK_HEADER, _IPV4_SOURCE, source), accept)
            for source in (guest.ip.packed, bytes(4))
        ),
        _rule(table, _INGRESS, ipv4, drop),
    ]
    limit = []
    if guest6 is None:
        rules.append(_rule(table, _INGRESS, ipv6, drop))
    else:
        own = _payload(_NETWORK_HEADER, _IPV6_SOURCE, guest6.ip.packed)
        icmp = _meta(_PROTOCOL, bytes([socket.IPPROTO_ICMPV6]))
        advertisement = _payload(_TRANSPORT_HEADER, 0, bytes([_ROUTER_ADVERTISEMENT]))
        rules.append(_rule(table, _INGRESS, ipv6, own, accept))
        rules.append(_rule(table, _INGRESS, icmp, advertisement, drop))
        limit.append(_rule(table, _INGRESS, ipv6, _over(_LINK_LOCAL_RATE, _LINK_LOCAL_BURST), drop))
    with doing(f"filter the packets of {bridge!r}"):
        _commit(
            (_NEW_TABLE, _CREATE, table),  # so that there is one to delete
            (_DELETE_TABLE, 0, table),
            (_NEW_TABLE, _CREATE, table),
            _chain(table, _INGRESS, _text(3, os.fsencode(bridge))),
            _chain(table, _FORWARD),
            *rules,
        )
        if limit:  # this expression is a module of its own
            _commit(*limit)


def forget(bridge: str) -> None:
    """Remove the table of *bridge*; do nothing if there is none, or the kernel has no nftables."""
    with doing(f"remove the packet filter of {bridge!r}"):
        try:
            _commit((_DELETE_TABLE, 0, _text(1, _name(bridge))))
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.EINVAL, errno.EPROTONOSUPPORT, errno.EOPNOTSUPP}:
                raise


def _commit(*messages: tuple[int, int, bytes]) -> None:
    """Carry out *messages*, each a kind, flags and attributes, all or none."""
    begin = struct.pack("!BBH", 0, 0, _SUBSYSTEM)
    table = struct.pack("!BBH", _ANY_IP, 0, 0)
    batch = [_message(_BATCH_BEGIN, 0, 0, begin)]
    batch += [
        _message(kind, flags | _ACK, number, table + attributes)
        for number, (kind, flags, attributes) in enumerate(messages, 1)
    ]
    batch.append(_message(_BATCH_END, 0, 0, begin))
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER) as kernel:
        kernel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", ANSWERED_WITHIN, 0))
        kernel.sendto(b"".join(batch), (0, 0))  # port 0 is the kernel
        unanswered = len(messages)
        while unanswered:
            datagram, sender = kernel.recvfrom(_LARGEST_ANSWER)
            offset = 0
            while sender[0] == 0 and offset + _HEADER.size < len(datagram):
                length, kind, *_ = _HEADER.unpack_from(datagram, offset)
                if kind == _ERROR:
                    (code,) = struct.unpack_from("=i", datagram, offset + _HEADER.size)
                    if code:
                        raise OSError(-code, os.strerror(-code))
                    unanswered -= 1
                offset += max(length, _HEADER.size) + 3 & ~3


def _name(bridge: str) -> bytes:
    return os.fsencode(f"instance-runner-{bridge}")


def _message(kind: int, flags: int, number: int, content: bytes) -> bytes:
    return _HEADER.pack(_HEADER.size + len(content), kind, flags | _REQUEST, number, 0) + content


def _attribute(kind: int, value: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack("!I", value))


def _text(kind: int, value: bytes) -> bytes:
    return _attribute(kind, value + b"\0")


def _nested(kind: int, content: bytes) -> bytes:
    return _attribute(kind | _NESTED, content)


def _expression(name: str, content: bytes) -> bytes:
    return _nested(1, _text(1, name.encode()) + _nested(2, content))


def _chain(table: bytes, chain: tuple[bytes, int], device: bytes = b"") -> tuple[int, int, bytes]:
    name, hook = chain
    place = _nested(4, _number(1, hook) + _number(2, _BEFORE_OTHERS) + device)
    return _NEW_CHAIN, _CREATE, table + _text(3, name) + place + _text(7, b"filter")


def _rule(table: bytes, chain: tuple[bytes, int], *expressions: bytes) -> tuple[int, int, bytes]:
    return _NEW_RULE, _CREATE | _APPEND, table + _text(2, chain[0]) + _nested(4, b"".join(expressions))


def _meta(key: int, value: bytes, how: int = _EQUAL) -> bytes:
    return _expression("meta", _number(1, _REGISTER) + _number(2, key)) + _compared(value, how)


def _payload(header: int, offset: int, value: bytes) -> bytes:
    place = _number(1, _REGISTER) + _number(2, header) + _number(3, offset) + _number(4, len(value))
    return _expression("payload", place) + _compared(value, _EQUAL)


def _compared(value: bytes, how: int) -> bytes:
    """Go on with the next expression if the register has *value*, or a different one."""
    return _expression("cmp", _number(1, _REGISTER) + _number(2, how) + _nested(3, _attribute(1, value)))


def _over(rate: int, burst: int) -> bytes:
    """Go on with the next expression if more packets come than *rate* a second, after *burst* at once."""
    packets, beyond = 0, 1
    each = _attribute(1, struct.pack("!Q", rate)) + _attribute(2, struct.pack("!Q", 1))
    return _expression("limit", each + _number(3, burst) + _number(4, packets) + _number(5, beyond))


def _verdict(verdict: int) -> bytes:
    return _expression("immediate", _number(1, _VERDICT) + _nested(2, _nested(2, _number(1, verdict))))
