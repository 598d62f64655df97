"""Network interfaces and name servers as they were read, with everything that is needed to restore them."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network, ip_address
from typing import Self

import attrs

IpAddress = IPv4Address | IPv6Address
IpInterface = IPv4Interface | IPv6Interface
IpNetwork = IPv4Network | IPv6Network

_DOMAIN = re.compile(r"[A-Za-z0-9._-]{1,253}")


@attrs.frozen
class Route:
    """A route of the main table through one interface."""

    destination: IpNetwork
    gateway: IpAddress | None = None
    source: IpAddress | None = None
    metric: int = 0
    onlink: bool = False
    """The gateway is reachable although no address of the interface covers it."""
    protocol: int = 3
    """The origin of the route (``RTPROT_*``, rtnetlink(7)); 3 is ``boot``, which ip(8) and CNI plugins set. It is kept, like
    *metrics*, so that the route can be restored."""
    metrics: str = ""
    """Its ``RTA_METRICS`` (MTU, window, …) as the kernel gave them, in hexadecimal."""

    def __str__(self) -> str:
        return str(self.destination) if self.gateway is None else f"{self.destination} via {self.gateway}"


@attrs.frozen
class PermanentNeighbour:
    """A permanent entry of an interface's neighbour table; the kernel drops it when the MAC address changes."""

    address: IpAddress
    mac: str


@attrs.frozen
class Interface:
    """A network interface with everything that is needed to restore it.

    One whose place a guest has taken is described as it was before.
    """

    name: str
    mac: str
    mtu: int
    addresses: tuple[IPv4Interface, ...] = ()
    routes: tuple[Route, ...] = ()
    """Without the routes that the kernel adds itself when the interface gets an address."""
    broadcast: bool = False
    """Whether its addresses came with their subnet's broadcast address."""
    addresses6: tuple[IPv6Interface, ...] = ()
    """The permanent global addresses; not those that a router's advertisements made."""
    routes6: tuple[Route, ...] = ()
    """Without the routes of the kernel and of a router's advertisements."""
    neighbours: tuple[PermanentNeighbour, ...] = ()
    multipath: tuple[IpNetwork, ...] = ()
    """The destinations of multipath routes through this interface, which can be neither moved nor restored."""


@attrs.frozen
class Resolver:
    """The name servers and search domains of ``/etc/resolv.conf`` that a guest can use too."""

    nameservers: tuple[IPv4Address, ...] = ()
    search: tuple[str, ...] = ()
    nameservers6: tuple[IPv6Address, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``resolv.conf(5)`` without loopback and link-local servers, which a guest cannot reach."""
        nameservers: list[IpAddress] = []
        search: tuple[str, ...] = ()
        for line in text.splitlines():
            word, *rest = line.split() or [""]
            if word == "nameserver" and rest:
                try:
                    address = ip_address(rest[0])
                except ValueError:
                    continue
                if not address.is_loopback and not address.is_link_local:
                    nameservers.append(address)
            elif word in {"search", "domain"}:
                search = tuple(name for name in rest if _DOMAIN.fullmatch(name) and name != ".")
        return cls(
            tuple(each for each in nameservers if isinstance(each, IPv4Address)),
            search,
            tuple(each for each in nameservers if isinstance(each, IPv6Address)),
        )
