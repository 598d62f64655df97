"""One table of nftables for each bridge: this network namespace takes no router advertisements that come in through it.

A guest may send any number of them, and with the kernel's defaults (``accept_ra``) the namespace believes each: it routes its own IPv6
packets through the guest, and keeps a route for every prefix, 160,000 after 4,000 advertisements (measured), in memory that it charges to
no cgroup. The sysctl cannot be written in a container without privileges, where ``/proc/sys`` is read-only.

Advertisements between the ports of the bridge are not concerned. Layout of the messages: ``include/uapi/linux/netfilter/nf_tables.h``; the
extension headers in front of ICMPv6 are skipped by the kernel (``nft_set_pktinfo_ipv6``), which ignores fragmented advertisements
(``suppress_frag_ndisc``).
"""

from __future__ import annotations

import errno
import os
import socket
import struct

from runner.base.errors import doing
from runner.kernel.netlink import ANSWERED_WITHIN

_NETLINK_NETFILTER = 12
_REQUEST, _ACK, _CREATE, _APPEND = 0x1, 0x4, 0x400, 0x800
_BATCH_BEGIN, _BATCH_END, _SUBSYSTEM = 16, 17, 10
_NEW_TABLE, _DELETE_TABLE, _NEW_CHAIN, _NEW_RULE = (_SUBSYSTEM << 8 | number for number in (0, 2, 3, 6))
_ERROR = 2
_NESTED = 1 << 15
_HEADER, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=HH")
_LARGEST_ANSWER = 1 << 15

_LOCAL_IN, _BEFORE_OTHERS = 1, (1 << 32) - 300
"""The hook for packets to this namespace, and priority -300, as the table ``raw``."""
_REGISTER, _VERDICT, _DROP = 1, 0, 0
_INTERFACE_NAME, _PROTOCOL, _TRANSPORT_HEADER = 6, 16, 2
_ROUTER_ADVERTISEMENT = 134
_NAME_SIZE = 16
"""``IFNAMSIZ``: what names are compared in."""


def refuse_advertisements(bridge: str) -> None:
    """Let this network namespace take no router advertisements from *bridge*, also if it did so before.

    Raises :exc:`~runner.base.errors.HostError` where the kernel has no nftables.
    """
    name = _name(bridge)
    table, chain = _text(1, name), b"input"
    hook = _nested(4, _number(1, _LOCAL_IN) + _number(2, _BEFORE_OTHERS))
    expressions = (
        _expression("meta", _number(1, _REGISTER) + _number(2, _INTERFACE_NAME)),
        _equal(os.fsencode(bridge).ljust(_NAME_SIZE, b"\0")),
        _expression("meta", _number(1, _REGISTER) + _number(2, _PROTOCOL)),
        _equal(bytes([socket.IPPROTO_ICMPV6])),
        _expression("payload", _number(1, _REGISTER) + _number(2, _TRANSPORT_HEADER) + _number(3, 0) + _number(4, 1)),
        _equal(bytes([_ROUTER_ADVERTISEMENT])),
        _expression("immediate", _number(1, _VERDICT) + _nested(2, _nested(2, _number(1, _DROP)))),
    )
    with doing(f"refuse router advertisements from {bridge!r}"):
        _commit(
            (_NEW_TABLE, _CREATE, table),  # so that there is one to delete
            (_DELETE_TABLE, 0, table),
            (_NEW_TABLE, _CREATE, table),
            (_NEW_CHAIN, _CREATE, table + _text(3, chain) + hook + _text(7, b"filter")),
            (_NEW_RULE, _CREATE | _APPEND, table + _text(2, chain) + _nested(4, b"".join(expressions))),
        )


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
    table = struct.pack("!BBH", socket.AF_INET6, 0, 0)
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


def _equal(value: bytes) -> bytes:
    """Go on with the next expression if the register has *value*."""
    return _expression("cmp", _number(1, _REGISTER) + _number(2, 0) + _nested(3, _attribute(1, value)))
