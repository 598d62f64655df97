"""The limits of dnsmasq and of DHCP clients, and the part of a pod's routes and resolver that they allow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Interface, IPv6Address, ip_network

from runner.base.values import frozen
from runner.facts.host import Resolver
from runner.facts.network import Interface, IpAddress, IpNetwork, Route
from runner.plan.problems import Problems

# The limits of dnsmasq, the same in every version from 2.40 to 2.93. tests/component/test_dhcp.py starts dnsmasq at each limit.

LONGEST_OPTION = 255
"""Bytes of one DHCPv4 option (``parse_dhcp_opt`` of ``src/option.c``): no version splits a longer one (RFC 3396)."""

LONGEST_LABEL, LONGEST_NAME = 63, 253
"""Characters of one label of a domain name and of the whole name (``canonicalise``; RFC 1035, 2.3.4)."""

SHORT_REPLY = 265
"""Bytes of our options that fit beside dnsmasq's own into a reply of 576 bytes, which every client accepts (RFC 2131, 2).

277 with udhcpc (measured), 9 fewer with a client identifier. A client that accepts more announces it (option 57). If there are too many
options, dnsmasq omits the last ones, and logs it.
"""

MOST_SERVERS = LONGEST_OPTION // 4
"""Name servers in one option; the C library reads the first three of ``/etc/resolv.conf`` (resolv.conf(5))."""

_LABEL = re.compile(rf"[A-Za-z0-9_](?:[A-Za-z0-9_-]{{0,{LONGEST_LABEL - 1}}})")


@frozen
class GuestResolver:
    """The name servers and search domains that the guest gets."""

    nameservers: tuple[IPv4Address, ...] = ()
    nameservers6: tuple[IPv6Address, ...] = ()
    search: tuple[str, ...] = ()


def is_domain(name: str) -> bool:
    """Tell whether dnsmasq accepts *name* as a domain."""
    labels = name.removesuffix(".").split(".")
    return len(name) <= LONGEST_NAME and all(_LABEL.fullmatch(label) for label in labels)


def search_bytes(names: Iterable[str]) -> int:
    """Return the size of *names* in the option domain-search, where a repeated suffix takes two bytes (RFC 3397)."""
    size, known = 0, set[str]()
    for name in names:
        labels = name.removesuffix(".").split(".")
        for number, label in enumerate(labels):
            if (rest := ".".join(labels[number:])) in known:
                size += 2
                break
            known.add(rest)
            size += 1 + len(label)
        else:
            size += 1
    return size


def routes_bytes(routes: Iterable[Route]) -> int:
    """Return the bytes of *routes* in the option classless-static-route (RFC 3442)."""
    return sum(5 + (route.destination.prefixlen + 7) // 8 for route in routes)


def best_routes(routes: Sequence[Route]) -> tuple[Route, ...]:
    """Return the route with the lowest metric to each destination: DHCP has no metrics, and a client uses the last of several."""
    best: dict[IpNetwork, Route] = {}
    for route in routes:
        if (known := best.get(route.destination)) is None or route.metric < known.metric:
            best[route.destination] = route
    return tuple(best.values())


def dhcp_routes(guest: IPv4Interface, routes: Sequence[Route]) -> list[Route]:
    """Return *routes* in the order for DHCP option 121: those without a gateway first, then those through gateways.

    A gateway outside every on-link route (a pod with a /32 address) gets a route of its own, because a client installs
    the list in order and refuses an unreachable gateway.
    """
    direct = [route for route in routes if route.gateway is None]
    beyond = [route for route in routes if route.gateway is not None]
    for route in beyond:
        gateway = route.gateway
        if gateway is None or gateway in guest.network or any(gateway in other.destination for other in direct):
            continue
        direct.append(Route(ip_network(gateway)))
    return direct + beyond


def refuse_too_many_routes(
    where: str, name: str, guest: IPv4Interface, routes: Sequence[Route], problems: Problems
) -> None:
    """Refuse *routes* of the interface *name* that exceed one DHCP option: without them the guest could not reach all networks."""
    size = routes_bytes(dhcp_routes(guest, routes))
    if size > LONGEST_OPTION:
        problems.refuse(
            where,
            f"{name!r} has {len(routes)} routes, which take {size} bytes of a DHCP option, and dnsmasq sends no more than "
            f"{LONGEST_OPTION}",
            "give the interface fewer routes",
        )


def guest_resolver(resolver: Resolver, pod: Interface, *, ipv6: bool, problems: Problems) -> GuestResolver:
    """Return the parts of the pod's *resolver* that the guest gets; others cause a remark.

    Addresses of the container itself are left out, because in the guest they are the guest's own: loopback addresses, the unspecified
    address, which the C library and dnsmasq treat as loopback, and the address that the guest takes over. A link-local one is reached by
    the routes of its network.
    """
    taken = {pod.addresses[0].ip, *(each.ip for each in pod.addresses6 if ipv6)}
    listed: tuple[IpAddress, ...] = resolver.nameservers + resolver.nameservers6
    own = [each for each in listed if each.is_loopback or each.is_unspecified or each in taken]
    servers = tuple(each for each in resolver.nameservers if each not in own)[:MOST_SERVERS]
    servers6 = tuple(IPv6Address(int(each)) for each in resolver.nameservers6 if each not in own)  # without a scope
    found = GuestResolver(
        servers,
        servers6 if ipv6 else (),
        _fitting(tuple(filter(is_domain, resolver.search))),
    )
    none = "" if found.nameservers or found.nameservers6 else "any DNS server, as /etc/resolv.conf has none but "
    named = "name one of the network's in the pod's dnsConfig, or one in the guest (cloud_init.network_config)"
    if own:
        problems.remark(
            "network",
            f"the guest does not get {none or 'the DNS server '}{', '.join(map(str, own))}, which this container alone reaches",
            named,
        )
    elif not listed:
        problems.remark("network", "the guest does not get any DNS server, as /etc/resolv.conf has none", named)
    if none and servers6:
        problems.remark(
            "network", f"the guest does not get {none}{', '.join(map(str, servers6))}", "ipv6 = true gives it these"
        )
    for server in found.nameservers:
        if server not in pod.addresses[0].network and not any(server in route.destination for route in pod.routes):
            problems.remark(
                "network", f"the guest does not reach the DNS server {server}: {pod.name!r} has no route to it"
            )
    _remark_search(resolver.search, found.search, problems)
    return found


def reaches_loopback(resolver: Resolver, where: str, problems: Problems) -> bool:
    """Tell whether a guest of passt reaches the pod's loopback, with a remark at *where*: all of the pod's DNS servers are there."""
    servers: tuple[IpAddress, ...] = resolver.nameservers + resolver.nameservers6
    if not servers or not all(each.is_loopback for each in servers):
        return False
    problems.remark(
        where,
        f"the guest reaches all that listens at 127.0.0.1 here, by its gateway's address: the DNS server {servers[0]} is there",
        "name one of the network's in the pod's dnsConfig",
    )
    return True


def _fitting(names: Sequence[str]) -> tuple[str, ...]:
    """Return as many of *names*, from the first, as fit into one option."""
    return tuple(name for number, name in enumerate(names, 1) if search_bytes(names[:number]) <= LONGEST_OPTION)


def _remark_search(asked: Sequence[str], found: Sequence[str], problems: Problems) -> None:
    wrong = [name for name in asked if not is_domain(name)]
    if wrong:
        problems.remark("network", f"the guest does not get the search domain {wrong[0]!r}, which is no domain name")
    rest = [name for name in asked if is_domain(name) and name not in found]
    if rest:
        problems.remark(
            "network",
            f"the guest looks up no short names in {', '.join(rest)}: of {len(asked)} search domains these do not fit into the "
            f"{LONGEST_OPTION} bytes of a DHCP option",
            "name fewer, or all of them in cloud_init.network_config",
        )


def remark_long_reply(sizes: Iterable[int], problems: Problems) -> None:
    """Remark options of *sizes* bytes, the most important first, that a client may not get."""
    size = sum(2 + each for each in sizes if each)
    if size > SHORT_REPLY:
        problems.remark(
            "network",
            f"the guest may get no search domains: a DHCP client that takes only 576 bytes (udhcpc, dhclient) does not "
            f"get {size} bytes of options",
            "let it ask for more (option 57), or name fewer domains or routes",
        )
