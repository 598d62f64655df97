"""Network interfaces, with everything that is needed to restore them, and name servers, as they were read."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network, ip_address
from typing import Self

from runner.values import frozen

IpAddress = IPv4Address | IPv6Address
IpInterface = IPv4Interface | IPv6Interface
IpNetwork = IPv4Network | IPv6Network

_DOMAIN = re.compile(r"[A-Za-z0-9._-]{1,253}")


@frozen
class Route:
    """A route of the main table through one interface."""

    destination: IpNetwork
    gateway: IpAddress | None = None
    source: IpAddress | None = None
    metric: int = 0
    onlink: bool = False
    """The gateway is reachable although no address of the interface covers it."""
    protocol: int = 3
    """The origin of the route (``RTPROT_*``, rtnetlink(7)); 3 is ``boot``, which ip(8) and CNI plugins set."""
    metrics: str = ""
    """The bytes of its ``RTA_METRICS`` (MTU, window, …) in hexadecimal, so that they can be restored."""

    def __str__(self) -> str:
        return str(self.destination) if self.gateway is None else f"{self.destination} via {self.gateway}"


@frozen
class PermanentNeighbour:
    """A permanent entry of an interface's neighbour table; the kernel drops it when the MAC address changes."""

    address: IpAddress
    mac: str


@frozen
class Interface:
    """A network interface with everything that is needed to restore it.

    An interface whose addresses a guest has taken over is described as it was before that.
    """

    name: str
    mac: str
    mtu: int
    addresses: tuple[IPv4Interface, ...] = ()
    routes: tuple[Route, ...] = ()
    """IPv4 routes, without those that the kernel adds itself when the interface gets an address."""
    broadcast: bool = False
    """Whether its addresses have their subnet's broadcast address set."""
    addresses6: tuple[IPv6Interface, ...] = ()
    """The permanent global addresses, without those from router advertisements."""
    routes6: tuple[Route, ...] = ()
    """IPv6 routes, without those that the kernel adds itself and those from router advertisements."""
    neighbours: tuple[PermanentNeighbour, ...] = ()
    multipath: tuple[IpNetwork, ...] = ()
    """The destinations of multipath routes through this interface; such routes can be neither moved nor restored."""


@frozen
class Resolver:
    """The name servers and search domains of ``/etc/resolv.conf`` that a guest can use as well."""

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
