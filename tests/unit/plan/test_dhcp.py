"""What of a pod's resolver and routes DHCP can tell its guest, and what is said of the rest."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address

import attrs
import pytest

from runner.facts.host import Resolver
from runner.facts.network import Route
from runner.plan.dhcp import LONGEST_OPTION, is_domain, search_bytes
from runner.plan.network_plan import BridgedPlan
from runner.plan.render import plan_lines
from tests.support.plans import FACTS, KERNEL, POD, plan_of, problems

BRIDGE = KERNEL + '[[network]]\nmode = "bridge"\n'
PLAIN = attrs.evolve(
    POD,
    addresses=(IPv4Interface("10.9.0.5/24"),),
    routes=(Route(IPv4Network("0.0.0.0/0"), IPv4Address("10.9.0.1")),),
)


def bridged(resolver: Resolver) -> tuple[BridgedPlan, list[str]]:
    """Return the plan of a plain pod's network with *resolver*, and its remarks about the network."""
    plan = plan_of(BRIDGE, attrs.evolve(FACTS, interfaces={"eth0": PLAIN}, resolver=resolver))
    network = plan.networks[0]
    assert isinstance(network, BridgedPlan)
    return network, [remark for remark in map(str, plan.remarks) if remark.startswith("the guest")]


def test_a_link_local_server_is_given_and_a_loopback_one_is_remarked() -> None:
    """NodeLocal DNSCache has a link-local address, which the pod reaches through its gateway, and so does the guest."""
    node_local = IPv4Address("169.254.25.10")
    assert bridged(Resolver((node_local,))) == (bridged(Resolver((node_local,)))[0], [])
    assert bridged(Resolver((node_local,)))[0].nameservers == (node_local,)
    network, [remark] = bridged(Resolver((IPv4Address("127.0.0.11"),)))
    assert network.nameservers == ()
    assert remark.startswith(
        "the guest does not get any DNS server, as /etc/resolv.conf has none but 127.0.0.11, which this"
    )
    network, [remark] = bridged(Resolver((IPv4Address("127.0.0.53"), node_local)))
    assert network.nameservers == (node_local,)
    assert remark.startswith(
        "the guest does not get the DNS server 127.0.0.53, which this container alone reaches; name one"
    )
    _, [remark] = bridged(Resolver((), (), (IPv6Address("fd00::a"),)))
    assert remark.endswith("has none but fd00::a; ipv6 = true gives it these")


@pytest.mark.parametrize("own", ["0.0.0.0", "10.9.0.5"])
def test_the_containers_own_addresses_are_no_server_of_the_guest(own: str) -> None:
    """The unspecified one is the host itself to the C library, and dnsmasq's own to dnsmasq; the pod's is the guest's."""
    network, [remark] = bridged(Resolver((IPv4Address(own),)))
    assert network.nameservers == ()
    assert f"as /etc/resolv.conf has none but {own}, which this container alone reaches; name one" in remark


def test_a_resolver_without_servers_is_remarked() -> None:
    _, [remark] = bridged(Resolver())
    assert remark.startswith(
        "the guest does not get any DNS server, as /etc/resolv.conf has none; name one of the network's"
    )


def test_a_server_without_a_route_is_remarked() -> None:
    alone = attrs.evolve(PLAIN, routes=())
    plan = plan_of(
        BRIDGE, attrs.evolve(FACTS, interfaces={"eth0": alone}, resolver=Resolver((IPv4Address("10.96.0.10"),)))
    )
    assert "the guest does not reach the DNS server 10.96.0.10: 'eth0' has no route to it" in map(str, plan.remarks)


def test_search_domains_that_do_not_fit_are_left_out_from_the_end() -> None:
    domains = tuple(f"{'d' * 40}.number-{number}.example" for number in range(10))
    network, [remark, _] = bridged(Resolver((IPv4Address("10.96.0.10"),), domains))
    assert network.search == domains[: len(network.search)] != domains
    assert search_bytes(network.search) <= LONGEST_OPTION < search_bytes(domains[: len(network.search) + 1])
    assert remark.startswith(f"the guest looks up no short names in {domains[len(network.search)]}, ")
    shared_end = tuple(f"{'n' * 4}{number}.svc.cluster.local" for number in range(10))
    assert search_bytes(shared_end) == 19 + 6 + 9 * 8, "the end of a name takes two bytes"
    assert bridged(Resolver((IPv4Address("10.96.0.10"),), shared_end)) == (
        attrs.evolve(network, search=shared_end),
        [],
    )


@pytest.mark.parametrize(
    ("name", "fine"),
    [
        ("cluster.local", True),
        ("DHCP", True),
        ("114.114.114.114", True),
        ("_x.y.", True),
        ("a" * 63 + ".b", True),
        ("a" * 64 + ".b", False),
        ("a..b", False),
        (".a", False),
        ("bad_$name", False),
        (".".join(["a" * 63] * 4), False),
    ],
)
def test_what_is_no_domain_is_remarked(name: str, *, fine: bool) -> None:
    assert is_domain(name) is fine
    network, remarks = bridged(Resolver((IPv4Address("10.96.0.10"),), ("x.y", name)))
    assert network.search == (("x.y", name) if fine else ("x.y",))
    assert remarks == ([] if fine else [f"the guest does not get the search domain {name!r}, which is no domain name"])


@pytest.mark.parametrize(("count", "fits"), [(31, True), (32, False)])
def test_too_many_routes_are_refused(count: int, *, fits: bool) -> None:
    """Each takes eight bytes, the default route five: without them packets would go astray."""
    routes = tuple(Route(IPv4Network(f"172.16.{each}.0/24"), IPv4Address("10.9.0.7")) for each in range(count))
    facts = attrs.evolve(FACTS, interfaces={"eth0": attrs.evolve(PLAIN, routes=PLAIN.routes + routes)})
    if fits:
        plan_of(BRIDGE, facts)
    else:
        [found] = problems(BRIDGE, facts)
        assert found.startswith("network[0].interface: 'eth0' has 33 routes, which take 261 bytes")


def test_one_route_to_each_destination_is_given() -> None:
    """A client would take the last of two default routes, as DHCP knows no metrics."""
    default, net = IPv4Network("0.0.0.0/0"), IPv4Network("10.7.0.0/16")
    worse, better = (Route(default, IPv4Address(f"10.9.0.{200 - metric}"), metric=metric) for metric in (200, 100))
    third = Route(net, IPv4Address("10.9.0.3"))
    pod = attrs.evolve(PLAIN, routes=(worse, better, third))
    plan = plan_of(BRIDGE, attrs.evolve(FACTS, interfaces={"eth0": pod}))
    network = plan.networks[0]
    assert isinstance(network, BridgedPlan)
    assert (network.gateway, network.routes) == (better.gateway, (better, third))
    assert any(f"the guest does not get the route {worse} of 'eth0'" in str(remark) for remark in plan.remarks)
    assert network.pod == pod, "all are restored"


def test_a_default_route_without_a_gateway_is_given_as_one_on_the_link() -> None:
    pod = attrs.evolve(PLAIN, routes=(Route(IPv4Network("0.0.0.0/0")),))
    network = plan_of(BRIDGE, attrs.evolve(FACTS, interfaces={"eth0": pod})).networks[0]
    assert isinstance(network, BridgedPlan)
    assert (network.gateway, network.routes) == (None, pod.routes)


def test_a_reply_that_a_short_client_does_not_take_is_remarked() -> None:
    routes = tuple(Route(IPv4Network(f"172.16.{each}.0/24"), IPv4Address("10.9.0.7")) for each in range(29))
    facts = attrs.evolve(FACTS, interfaces={"eth0": attrs.evolve(PLAIN, routes=PLAIN.routes + routes)})
    assert any("may get no search domains" in str(remark) for remark in plan_of(BRIDGE, facts).remarks)


def test_what_dhcp_cannot_say_is_shown() -> None:
    facts = attrs.evolve(FACTS, resolver=attrs.evolve(FACTS.resolver, options=("ndots:5",)))
    shown = "DNS 10.96.0.10 default.svc.cluster.local cluster.local (without ndots:5, which DHCP cannot say)"
    assert any(shown in line for line in plan_lines(plan_of(BRIDGE, facts)))
