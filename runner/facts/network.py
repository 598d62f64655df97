"""Facts about network interfaces, complete enough to restore them."""

from __future__ import annotations

import sys
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network

from runner.base.values import frozen

IpAddress = IPv4Address | IPv6Address
IpInterface = IPv4Interface | IPv6Interface
IpNetwork = IPv4Network | IPv6Network


MAIN_TABLE = 254
"""The routing table that is used unless a rule names another (``RT_TABLE_MAIN``, rtnetlink(7))."""
_RTAX_MTU, _ATTRIBUTE_KIND = 2, 0x3FFF
"""``include/uapi/linux/rtnetlink.h``; the bits of an attribute's type that are no flags (``netlink.h``, ``NLA_TYPE_MASK``)."""


@frozen
class Route:
    """A route through one interface."""

    destination: IpNetwork
    gateway: IpAddress | None = None
    """With ``RTA_VIA`` (RFC 8950) its family differs from the destination's."""
    source: IpAddress | None = None
    metric: int = 0
    onlink: bool = False
    """Whether the gateway is reachable although no address of the interface covers it."""
    protocol: int = 3
    """The origin of the route (``RTPROT_*``, rtnetlink(7)); 3 is ``boot``, which ip(8) and CNI plugins set."""
    metrics: str = ""
    """The bytes of its ``RTA_METRICS`` (MTU, window, …) in hexadecimal, so that they can be restored."""
    table: int = MAIN_TABLE
    """The number of its routing table."""

    @property
    def mtu(self) -> int | None:
        """The largest packet in bytes on this route, from its metrics; ``None`` if they have none."""
        rest = bytes.fromhex(self.metrics)
        while len(rest) >= 8:  # noqa: PLR2004 - length, type and a number (netlink(7))
            length, kind = (int.from_bytes(rest[at : at + 2], sys.byteorder) for at in (0, 2))
            if kind & _ATTRIBUTE_KIND == _RTAX_MTU:
                return int.from_bytes(rest[4:8], sys.byteorder)
            rest = rest[max(length + 3 & ~3, 4) :]
        return None

    def __str__(self) -> str:
        via = "" if self.gateway is None else f" via {self.gateway}"
        return f"{self.destination}{via}" + (f" table {self.table}" if self.table != MAIN_TABLE else "")


@frozen
class PermanentNeighbour:
    """A permanent entry of an interface's neighbour table; the kernel drops it when the MAC address changes."""

    address: IpAddress
    mac: str


@frozen
class Interface:
    """A network interface with everything that is needed to restore it.

    If a guest has taken over its addresses, its former configuration is described.
    """

    name: str
    mac: str
    mtu: int
    addresses: tuple[IPv4Interface, ...] = ()
    routes: tuple[Route, ...] = ()
    """IPv4 routes of the main table, without those that the kernel adds itself when the interface gets an address."""
    broadcast: bool = False
    """Whether its addresses have their subnet's broadcast address set."""
    addresses6: tuple[IPv6Interface, ...] = ()
    """The permanent global addresses, without those from router advertisements."""
    routes6: tuple[Route, ...] = ()
    """IPv6 routes of the main table, without those that the kernel adds itself and those from router advertisements."""
    neighbours: tuple[PermanentNeighbour, ...] = ()
    multipath: tuple[IpNetwork, ...] = ()
    """The destinations of multipath routes through this interface; such routes can be neither moved nor restored."""
    other_routes: tuple[Route, ...] = ()
    """Routes of other tables, which the kernel deletes with the addresses."""
    kind: str = ""
    """``veth``, ``macvlan``, …; empty for hardware."""
    port: bool = False
    """Whether it belongs to a bridge or bond of another program."""
    peers: tuple[IpAddress, ...] = ()
    """The other ends of its point-to-point addresses."""
    virtual_function: bool = False
    """Whether it is a virtual function of a network card (SR-IOV)."""
