"""The plan of the guest's network interfaces: the links and addresses of each on the host and in the guest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from typing import Literal, assert_never

from runner.base.values import frozen
from runner.facts.descriptor import DescriptorFact
from runner.facts.host import HostFacts
from runner.facts.network import Interface, Route
from runner.facts.packages import install
from runner.plan.descriptor_claims import Claims
from runner.plan.dhcp import (
    GuestResolver,
    best_routes,
    dhcp_routes,
    guest_resolver,
    reaches_loopback,
    refuse_too_many_routes,
    remark_long_reply,
    routes_bytes,
    search_bytes,
)
from runner.plan.identity import Identity
from runner.plan.machine import DHCP_USERS
from runner.plan.network_plan import (
    EVERY,
    BridgedPlan,
    DhcpPlan,
    InheritedFdPlan,
    Ipv6Plan,
    MacvtapPlan,
    NetworkPlan,
    PasstPlan,
)
from runner.plan.problems import Problems
from runner.spec.instance import InstanceSpec, NetworkSpec, private_subnet

MOST_QUEUES = 8
"""Largest default of ``queues``: each pair costs a vhost thread, and 8 pairs carry more than a NIC."""

PASST_MTU = 65520
"""Bytes; passt's own default (passt(1), ``--mtu``): packets of that size never leave the machine."""
TAP_MTU = 65521
"""The greatest MTU of a tap (``MAX_MTU`` of ``drivers/net/tun.c``, without the Ethernet header); veth devices take up to 65535."""

PASST_FILES = 128
"""Files that passt opens in addition to one for each port: 40 to 72 (measured)."""

IPV6_LEAST_MTU = 1280
"""Bytes; on a link with a smaller MTU the kernel has no IPv6 (``IPV6_MIN_MTU``, ``net/ipv6/addrconf.c``)."""

NO_MAC = "has no MAC address of Ethernet, which the guest's network is"

SERVED = (
    'give the interface one IPv4 address, or use mode = "private" or "passt", which also serve pods with IPv6 alone'
)
"""The remedy for an interface whose addresses no guest can take over."""

OTHER_SUBNET = "name another subnet"

OWN_ADDRESSES_ALONE = {
    "macvlan": "passes frames to its own MAC address alone",
    "macvtap": "passes frames to its own MAC address alone",
    "ipvlan": "passes packets to its own IP addresses alone",
    "ipvtap": "passes packets to its own IP addresses alone",
}
"""Kinds of links over which a bridge's other ports receive nothing (``drivers/net/macvlan.c``, ``ipvlan_core.c``)."""


def derived_mac(identity: Identity, index: int) -> str:
    """Return a MAC address that depends only on *identity* and the network's *index*.

    ``52:54:00`` is QEMU's customary locally administered prefix.
    """
    digest = hashlib.sha256(f"{identity.value}/{index}".encode()).digest()
    return "52:54:00:" + digest[:3].hex(":")


def derived_subnet(identity: Identity, index: int) -> IPv6Network:
    """Return a unique local subnet (RFC 4193, with 40 bits of a hash) that depends only on *identity* and *index*."""
    digest = hashlib.sha256(f"{identity.value}/ipv6".encode()).digest()
    return IPv6Network((bytes((0xFD, *digest[:5], 0, index, *bytes(8))), 64))


def plan_networks(
    spec: InstanceSpec, identity: Identity, vcpus: int, facts: HostFacts, claims: Claims, problems: Problems
) -> Iterator[NetworkPlan]:
    """Yield the plan of each network; networks that cannot be created are added to *problems*."""
    return _NetworkPlanner(spec, identity, vcpus, facts, claims, problems).networks()


@frozen
class _NetworkPlanner:
    """The values that the decisions about all networks of one instance share; only claims and problems change."""

    _spec: InstanceSpec
    _identity: Identity
    _vcpus: int
    _facts: HostFacts
    _claims: Claims
    _problems: Problems

    def networks(self) -> Iterator[NetworkPlan]:
        networks = self._spec.network
        made = next((index for index, each in enumerate(networks) if each.mode in {"private", "bridge"}), None)
        if made is not None and not self._facts.tun:
            self._problems.refuse(
                f"network[{made}]",
                "cannot use /dev/net/tun: it is missing or not writable",
                "give the pod the device",
            )
        for index, network in enumerate(networks):
            plan = self._network(index, network)
            if plan is not None:
                yield plan

    def _network(self, index: int, network: NetworkSpec) -> NetworkPlan | None:
        match network.mode:
            case "private":
                return self._private(index, network)
            case "bridge":
                return self._bridged(index, network)
            case "macvtap":
                return self._macvtap(index, network)
            case "passt":
                return self._passt(index, network)
            case "descriptor":
                return self._inherited(index, network)
            case other:
                assert_never(other)

    def _queues(self, network: NetworkSpec) -> int:
        return network.queues or min(self._vcpus, MOST_QUEUES)

    def _mac(self, index: int, network: NetworkSpec) -> str:
        return network.mac or derived_mac(self._identity, index)

    def _mac_among_others(self, index: int, network: NetworkSpec) -> str:
        """Return the MAC address of a guest on a shared link, and remark one that another guest there may also have."""
        if network.mac is None and self._identity.repeated:
            self._problems.remark(
                f"network[{index}].mac",
                f"network {index} works for one guest alone if another container of this machine has the same state directory and name: "
                "both guests have the same MAC address then",
                "set instance.uuid, or the network's mac",
            )
        return self._mac(index, network)

    def _private(self, index: int, network: NetworkSpec) -> BridgedPlan:
        subnet = private_subnet(index, network)
        self._judge_overlap(index, subnet)
        host = IPv4Interface((subnet[1], subnet.prefixlen))
        return BridgedPlan(
            mac=self._mac(index, network),
            mtu=network.mtu or 1500,
            queues=self._queues(network),
            bridge=f"vmbr{index}",
            tap=f"vmtap{index}",
            host=host,
            guest=IPv4Interface((network.address or subnet[2], subnet.prefixlen)),
            gateway=host.ip,
            routes=(),
            nameservers=(),
            search=(),
            pod=None,
            ipv6=self._private_ipv6(index, network),
            vhost=self._facts.vhost_net,
        )

    def _judge_overlap(self, index: int, subnet: IPv4Network) -> None:
        """Refuse a subnet that contains addresses of the machine, such as its gateway's; remark one that contains a container's."""
        for name, addresses in self._facts.addresses.items():
            for address in addresses:
                if not address.network.overlaps(subnet):
                    continue
                lost = (
                    f"overlaps {address.network}, the network of {name!r} here: hosts in both are not reached from here"
                )
                if self._facts.machines_network:
                    self._problems.refuse(f"network[{index}].subnet", f"{subnet} {lost}", OTHER_SUBNET)
                else:
                    self._problems.remark(f"network[{index}].subnet", f"the subnet {subnet} {lost}", OTHER_SUBNET)

    def _private_ipv6(self, index: int, network: NetworkSpec) -> Ipv6Plan | None:
        if not network.ipv6 or self._without_ipv6(index, network.mtu or 1500):
            return None
        subnet = network.subnet6 or derived_subnet(self._identity, index)
        host, guest = (IPv6Interface((subnet[number], 64)) for number in (1, 2))
        return Ipv6Plan(guest, host)

    def _without_ipv6(self, index: int, mtu: int) -> bool:
        """Refuse IPv6 where this network namespace has none, and on links whose packets are too small for it."""
        error = self._facts.ipv6_error
        if error is None and mtu < IPV6_LEAST_MTU:
            error = f"it takes an MTU of {IPV6_LEAST_MTU} (RFC 8200, 5), and the network's is {mtu}"
        if error is not None:
            self._problems.refuse(f"network[{index}].ipv6", f"cannot give the guest IPv6: {error}")
        return error is not None

    def _interface(self, index: int, network: NetworkSpec) -> Interface | None:
        """Return the interface that *network* is on, if it exists; refuse an MTU greater than the interface's."""
        name = network.interface or "eth0"
        interface = self._facts.interfaces.get(name)
        if interface is None:
            self._problems.refuse(
                f"network[{index}].interface",
                f"there is no network interface {name!r} here",
                'name the pod\'s, or use mode = "private"',
            )
        elif network.mtu is not None and network.mtu > interface.mtu:
            self._problems.refuse(
                f"network[{index}].mtu", f"{network.mtu} is more than the {interface.mtu} of {name!r}"
            )
        return interface

    def _bridged(self, index: int, network: NetworkSpec) -> BridgedPlan | None:
        pod = self._interface(index, network)
        if pod is None:
            return None
        where, name = f"network[{index}].interface", pod.name
        if self._facts.machines_network:
            self._problems.refuse(
                f"network[{index}].mode",
                f"the guest would take the address of {name!r} away from the machine itself: this process is in the machine's "
                "own network namespace",
                self._out_of_the_machines_network(),
            )
            return None
        if (reason := _no_port(pod)) is not None:
            self._problems.refuse(
                where, f"{name!r} {reason}", 'use mode = "private", or a CNI plugin that gives the pod a veth'
            )
            return None
        if len(pod.addresses) != 1 or pod.peers:
            self._problems.refuse(
                where, f"{name!r} must have exactly one IPv4 address for the guest to take over, {_found(pod)}", SERVED
            )
            return None
        inexpressible = [(route, "over several gateways") for route in pod.multipath]
        inexpressible += [
            (each.destination, f"via {each.gateway}") for each in pod.routes if isinstance(each.gateway, IPv6Address)
        ]
        for route, how in inexpressible:
            self._problems.refuse(
                where,
                f"{name!r} has the route {route} {how}, which DHCP cannot express and an alias cannot keep",
                "give it one IPv4 gateway",
            )
        given = best_routes(pod.routes)
        self._remark_kept(where, pod, given)
        guest = pod.addresses[0]
        resolver = guest_resolver(self._facts.resolver, pod, ipv6=network.ipv6, problems=self._problems)
        gateways = (route.gateway for route in given if route.destination.prefixlen == 0)
        gateway = next((each for each in gateways if isinstance(each, IPv4Address)), None)
        # Mask and gateway suffice unless the gateway is off the link or there are other routes (RFC 3442).
        on_link = [route.gateway is not None and route.gateway in guest.network for route in given]
        plain = all(on_link) and all(route.destination.prefixlen == 0 for route in given)
        routes = () if plain else given
        refuse_too_many_routes(where, name, guest, routes, self._problems)
        self._remark_options(guest, routes, resolver)
        mtu = self._pods_mtu(where, network, pod)
        return BridgedPlan(
            mac=network.mac or pod.mac,
            mtu=mtu,
            queues=self._queues(network),
            bridge=f"vmbr{index}",
            tap=f"vmtap{index}",
            host=IPv4Interface(f"169.254.77.{index + 1}/32"),
            guest=guest,
            gateway=gateway,
            routes=routes,
            nameservers=resolver.nameservers,
            search=resolver.search,
            pod=pod,
            ipv6=self._pods_ipv6(index, network, pod, resolver, mtu),
            vhost=self._facts.vhost_net,
            dns_options=self._facts.resolver.options,
        )

    def _pods_mtu(self, where: str, network: NetworkSpec, pod: Interface) -> int:
        """Return the guest's MTU: at most the MTU of the pod's routes, which a CNI plugin with a tunnel lowers instead of the link's."""
        routes = pod.routes + (pod.routes6 if network.ipv6 else ())
        least = min((TAP_MTU, pod.mtu, *(route.mtu for route in routes if route.mtu)))
        if network.mtu is not None and network.mtu > least:
            self._problems.remark(
                f"{where}.mtu",
                f"packets of more than {least} bytes may be lost: the routes of {pod.name!r} take no larger ones, and the guest sends "
                f"up to {network.mtu}",
                "leave the network's mtu out",
            )
        return network.mtu or least

    def _remark_kept(self, where: str, pod: Interface, given: Sequence[Route]) -> None:
        """Remark the properties of *pod* that the guest does not get; they are restored at the end. ARP for IPv4 neighbours is answered."""
        if pod.virtual_function:
            self._problems.remark(
                where,
                f"the guest may receive nothing: {pod.name!r} is a virtual function (SR-IOV), which passes only frames of its own MAC "
                "address unless it is trusted",
                "on the node: `ip link set PF vf N trust on spoofchk off`, or pass it by [[device]]",
            )
        if others := ", ".join(str(each) for each in pod.routes if each not in given):
            self._problems.remark(
                where,
                f"the guest does not get the route {others} of {pod.name!r}: by DHCP it gets one to each destination, that of the "
                "lowest metric",
            )
        lost = ", ".join(str(each.address) for each in pod.neighbours if isinstance(each.address, IPv6Address))
        if lost:
            self._problems.remark(
                where, f"the guest may not reach {lost}, which {pod.name!r} knows as a permanent neighbour alone"
            )
        tables = ", ".join(map(str, sorted({route.table for route in pod.other_routes})))
        if tables:
            self._problems.remark(
                where,
                f"the guest routes by the main table of {pod.name!r} alone: it does not get the routes of table {tables}, which a "
                "rule of the pod may choose",
                "configure them in the guest where it needs them",
            )

    def _remark_options(self, guest: IPv4Interface, routes: Sequence[Route], resolver: GuestResolver) -> None:
        sizes = (
            routes_bytes(dhcp_routes(guest, routes)),
            4 * len(resolver.nameservers),
            4,  # the router
            2,  # the MTU
            len(resolver.search[0]) if resolver.search else 0,
            search_bytes(resolver.search),
        )
        remark_long_reply(sizes, self._problems)

    def _out_of_the_machines_network(self) -> str:
        """Return the remedy for running in the machine's network namespace, by the way in which this process was started."""
        if self._facts.pod is not None:
            return "give the pod a network of its own (without hostNetwork: true)"
        return (
            "start the container with a network of its own (without --network host); a service of the machine itself can use "
            'mode = "private", "macvtap" or "passt"'
        )

    def _pods_ipv6(
        self, index: int, network: NetworkSpec, pod: Interface, resolver: GuestResolver, mtu: int
    ) -> Ipv6Plan | None:
        where = f"network[{index}].ipv6"
        if not network.ipv6 and pod.addresses6:
            self._problems.remark(
                where, f"the guest does not get the IPv6 address of {pod.name!r}", "ipv6 = true gives it by DHCPv6"
            )
        if not network.ipv6 or self._without_ipv6(index, mtu):
            return None
        if len(pod.addresses6) != 1:
            addresses = ", ".join(map(str, pod.addresses6)) or "none"
            self._problems.refuse(
                where,
                f"{pod.name!r} must have exactly one global IPv6 address for the guest to take over, found {addresses}",
            )
            return None
        self._problems.remark(
            where,
            f"the guest gets the IPv6 address of {pod.name!r} by DHCPv6, which has no routes: its IPv6 gateway must come from a router "
            "advertisement of the pod's network, or from the guest's own configuration",
        )
        return Ipv6Plan(pod.addresses6[0], None, resolver.nameservers6)

    def _macvtap(self, index: int, network: NetworkSpec) -> MacvtapPlan | None:
        over = self._interface(index, network)
        if self._facts.user_namespace:  # mknod(2) needs CAP_MKNOD in the machine's first user namespace (fs/namei.c)
            self._problems.refuse(
                f"network[{index}].mode",
                "a macvtap takes a device node of its own, and in a user namespace none can be made",
                'use mode = "bridge", or let the pod do without a user namespace (hostUsers: true)',
            )
        if over is None:
            return None
        if (reason := _no_base(over)) is not None:
            self._problems.refuse(
                f"network[{index}].interface", f"{over.name!r} {reason}", 'use mode = "private" or "passt"'
            )
        return MacvtapPlan(
            mac=self._mac_among_others(index, network),
            mtu=network.mtu or over.mtu,
            queues=self._queues(network),
            link=f"vmtap{index}",
            over=over.name,
            vhost=self._facts.vhost_net,
        )

    def _passt(self, index: int, network: NetworkSpec) -> PasstPlan | None:
        if self._facts.passt is None:
            missing = install("passt", self._facts.os_release)
            self._problems.refuse(f"network[{index}].mode", "cannot find the program 'passt' in PATH", missing)
            return None
        if self._facts.passt_error:
            self._problems.refuse(f"network[{index}].mode", f"passt does not start here: it {self._facts.passt_error}")
        for other in self._spec.network:
            pod = self._facts.interfaces.get(other.interface or "eth0")
            if other.mode == "bridge" and pod and any(route.destination.prefixlen == 0 for route in pod.routes):
                self._problems.refuse(
                    f"network[{index}].mode",
                    f'passt speaks with the address of {pod.name!r}, which another network gives away (mode = "bridge")',
                )
        lowest = self._facts.unprivileged_port
        for each in network.forwards:
            if each.first < lowest:
                self._problems.refuse(
                    f"network[{index}].ports",
                    f"passt cannot listen at {each.first}: net.ipv4.ip_unprivileged_port_start is {lowest} here, and it listens "
                    "without root's rights",
                    f"set it to 0 in the pod's securityContext.sysctls, or name ports from {lowest} on",
                )
        if network.listened_at + PASST_FILES > self._facts.open_files:
            self._problems.refuse(
                f"network[{index}].ports",
                f"passt would listen at up to {network.listened_at} ports, and may have {self._facts.open_files} files open here",
                "raise the container's limit (RLIMIT_NOFILE), or name fewer ports",
            )
        tcp, udp = (
            tuple(str(each) for each in network.forwards if each.protocol == protocol) for protocol in ("tcp", "udp")
        )
        return PasstPlan(
            self._mac(index, network),
            network.mtu or PASST_MTU,
            1,
            self._facts.passt,
            (EVERY,) if network.ports == "all" else tcp,
            udp,
            reaches_loopback(self._facts.resolver, f"network[{index}].mode", self._problems),
        )

    def _inherited(self, index: int, network: NetworkSpec) -> InheritedFdPlan | None:
        where = f"network[{index}].fd"
        descriptors = [self._claims.claim(where, name, {"tap", "macvtap", "socket"}, write=True) for name in network.fd]
        for name in network.vhost_fd:
            self._claims.claim(f"network[{index}].vhost_fd", name, {"vhost-net"}, write=True)
        first = next((each for each in descriptors if each is not None), None)
        kind = _kind(first)
        if first is not None and any(
            each is not None and (each.kind, each.interface) != (kind, first.interface) for each in descriptors
        ):
            self._problems.refuse(where, "names descriptors of different interfaces", "each queue is one of the same")
        if len(descriptors) > 1 and (
            kind == "socket" or any(each is not None and not each.multi_queue for each in descriptors)
        ):
            self._problems.refuse(
                where, "names several, which needs a tap or macvtap that was opened with IFF_MULTI_QUEUE each time"
            )
        if kind == "socket" and network.vhost_fd:
            self._problems.refuse(f"network[{index}].vhost_fd", "vhost-net cannot serve a socket", "leave it out")
        if first is not None and kind == "macvtap":
            if network.mac not in {None, first.mac}:
                self._problems.refuse(
                    f"network[{index}].mac",
                    f"{network.mac} is not that of the macvtap {first.interface!r}, {first.mac}",
                )
            mac = first.mac
        else:
            mac = self._mac_among_others(index, network)
        return InheritedFdPlan(
            mac=mac,
            mtu=network.mtu or 1500,
            queues=len(network.fd),
            kind=kind,
            fds=network.fd,
            vhost_fds=network.vhost_fd,
            vhost=kind != "socket" and not network.vhost_fd and self._facts.vhost_net,
        )


def _no_port(pod: Interface) -> str | None:
    """Return the reason why a bridge cannot connect a guest through *pod*; ``None`` if it can."""
    if pod.kind in {"macvlan", "macvtap"}:
        return _alone(pod)
    bridge = "is a bridge, and a bridge cannot belong to another" if pod.kind == "bridge" else None
    return _no_base(pod) or bridge


def _no_base(link: Interface) -> str | None:
    """Return the reason why a guest with its own MAC address cannot use a link over *link*; ``None`` if it can.

    A macvtap over a macvlan is in effect over the link below it (``macvlan_common_newlink``).
    """
    if link.kind in {"ipvlan", "ipvtap"}:
        return _alone(link)
    if not _is_ethernet(link.mac):
        return NO_MAC
    return "belongs to a bridge or bond already, and can belong to one only" if link.port else None


def _alone(link: Interface) -> str:
    return f"is a {link.kind}, which {OWN_ADDRESSES_ALONE[link.kind]}: a guest behind it would receive nothing"


def _is_ethernet(mac: str) -> bool:
    """Tell whether *mac* is an Ethernet address: a Cilium netkit's is all zeroes, and IP over InfiniBand has 20 bytes."""
    return len(mac) == len("00:00:00:00:00:00") and mac != "00:00:00:00:00:00"


def _found(pod: Interface) -> str:
    """Return the addresses of *pod* as words of a message that says why no guest can take one over."""
    if pod.peers:
        return f"found a point-to-point address whose other end is {', '.join(map(str, pod.peers))}"
    if not pod.addresses and pod.addresses6:
        return f"found IPv6 alone ({', '.join(map(str, pod.addresses6))})"
    return f"found {', '.join(map(str, pod.addresses)) or 'none'}"


def _kind(descriptor: DescriptorFact | None) -> Literal["tap", "macvtap", "socket"]:
    """Return the kind of a claimed descriptor; a tap if none is inherited yet."""
    match None if descriptor is None else descriptor.kind:
        case "macvtap":
            return "macvtap"
        case "socket":
            return "socket"
        case _:
            return "tap"


def plan_dhcp(networks: Iterable[NetworkPlan], facts: HostFacts, problems: Problems) -> Iterator[DhcpPlan]:
    """Yield the dnsmasq of each network with a bridge that this program creates."""
    user = next((name for name in DHCP_USERS if name in facts.users), "root")
    for index, network in enumerate(networks):
        if not isinstance(network, BridgedPlan):
            continue
        if facts.dnsmasq is None:
            problems.refuse(
                f"network[{index}]",
                "cannot find the program 'dnsmasq' in PATH",
                install("dnsmasq", facts.os_release),
            )
        else:
            yield DhcpPlan(facts.dnsmasq, user, network)
