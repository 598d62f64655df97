"""The plans of the guest's network interfaces; :mod:`runner.plan.network_planner` makes them."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Interface, IPv6Address, IPv6Interface
from pathlib import PurePosixPath
from typing import Literal

from runner.base.values import frozen
from runner.facts.network import Interface, Route


@frozen
class Nic:
    """The properties of a network interface that the guest sees."""

    mac: str
    mtu: int
    queues: int
    """Pairs of receive and transmit queues."""


@frozen
class Ipv6Plan:
    """The guest's IPv6 address on one bridge, which it gets by router advertisement and DHCPv6."""

    guest: IPv6Interface
    host: IPv6Interface | None
    """The bridge's address; ``None`` in the pod's network, where the bridge has none."""
    nameservers: tuple[IPv6Address, ...] = ()


@frozen
class BridgedPlan(Nic):
    """A tap on a bridge that this program creates; dnsmasq gives the guest its address there (modes ``private``, ``bridge``)."""

    bridge: str
    tap: str
    host: IPv4Interface
    """The bridge's address, from which dnsmasq answers."""
    guest: IPv4Interface
    gateway: IPv4Address | None
    routes: tuple[Route, ...]
    """The guest's routes (RFC 3442); empty if its netmask and gateway suffice."""
    nameservers: tuple[IPv4Address, ...]
    search: tuple[str, ...]
    pod: Interface | None
    """The interface whose address the guest takes over, with its former configuration (mode ``bridge``); ``None`` with ``private``."""
    ipv6: Ipv6Plan | None
    vhost: bool
    dns_options: tuple[str, ...] = ()
    """Options of the pod's resolver that DHCP cannot convey."""


@frozen
class MacvtapPlan(Nic):
    """A link over another one, with its own MAC address (``Documentation/networking/``, ``drivers/net/macvtap.c``)."""

    link: str
    over: str
    vhost: bool


EVERY = "all"
"""In :attr:`PasstPlan.ports`: all free ports that are not ephemeral. This program listens on its own before passt starts."""


@frozen
class PasstPlan(Nic):
    """passt(1), which translates between the guest's frames and sockets of the pod."""

    program: PurePosixPath
    ports: tuple[str, ...] = ()
    """TCP ports of the pod that are forwarded to the guest, in passt's form."""
    udp_ports: tuple[str, ...] = ()
    reaches_loopback: bool = False
    """Whether the guest reaches the pod's loopback by its gateway's address, because the DNS servers are there."""


@frozen
class InheritedFdPlan(Nic):
    """Descriptors that another program opened, by name."""

    kind: Literal["tap", "macvtap", "socket"]
    fds: tuple[str, ...]
    vhost_fds: tuple[str, ...]
    vhost: bool
    """Whether this program opens /dev/vhost-net for each queue; never together with *vhost_fds*."""


NetworkPlan = BridgedPlan | MacvtapPlan | PasstPlan | InheritedFdPlan


@frozen
class DhcpPlan:
    """dnsmasq on one bridge."""

    program: PurePosixPath
    user: str
    network: BridgedPlan
