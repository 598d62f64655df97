"""Network interfaces and name servers, as they were found, with all that is needed to give them back."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network

import attrs


@attrs.frozen
class Route:
    """A route through one interface, in the main table."""

    destination: IPv4Network | IPv6Network
    gateway: IPv4Address | IPv6Address | None = None
    source: IPv4Address | IPv6Address | None = None
    metric: int = 0
    onlink: bool = False
    """The gateway is reachable although no address of the interface covers it."""
    protocol: int = 3
    """Who made it (``RTPROT_*``); kept, like *metrics*, so that it can be given back as it was."""
    metrics: str = ""
    """Its MTU, window and so on, as the kernel gave them."""


@attrs.frozen
class PermanentNeighbour:
    """A permanent entry of an interface's neighbour table."""

    address: str
    mac: str


@attrs.frozen
class Interface:
    """A network interface as it was found, with all that is needed to give it back."""

    name: str
    mac: str
    mtu: int
    addresses: tuple[IPv4Interface, ...] = ()
    routes: tuple[Route, ...] = ()
    broadcast: bool = False
    """Whether its addresses came with their subnet's broadcast address."""
    addresses6: tuple[IPv6Interface, ...] = ()
    """The global ones that are there for good; not those that a router's advertisements made."""
    routes6: tuple[Route, ...] = ()
    neighbours: tuple[PermanentNeighbour, ...] = ()
    several_ways: tuple[str, ...] = ()
    """The destinations of routes over several gateways, of which this interface is one."""


@attrs.frozen
class Resolver:
    """What ``/etc/resolv.conf`` says."""

    nameservers: tuple[IPv4Address, ...] = ()
    search: tuple[str, ...] = ()
    nameservers6: tuple[IPv6Address, ...] = ()
