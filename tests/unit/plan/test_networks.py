from __future__ import annotations

from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import PurePosixPath

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.base.errors import SpecError
from runner.facts.descriptor import DescriptorFact
from runner.facts.disk import FileFact, ImageFact
from runner.facts.host import PodQos, Resolver
from runner.facts.network import PermanentNeighbour, Route
from runner.plan.argv.by_hand import pasteable
from runner.plan.argv.networks import dnsmasq_argv, passt_argv
from runner.plan.descriptor_claims import with_disks
from runner.plan.disks import disk_words
from runner.plan.identity import Identity
from runner.plan.instance import plan_instance
from runner.plan.network_plan import BridgedPlan, InheritedFdPlan, Ipv6Plan, PasstPlan
from runner.plan.network_planner import derived_mac, derived_subnet
from runner.plan.render import plan_json, plan_lines
from runner.spec.instance import parse_instance
from tests.support.json_schemas import fitting
from tests.support.plans import EPYC, FACTS, KERNEL, POD, plan_of, problems
from tests.unit.plan.test_argv import MACHINES

TAP = DescriptorFact("tap", "the tap 't0'", interface="t0", multi_queue=True)
INHERITED = {
    "a": TAP,
    "b": TAP,
    "other": attrs.evolve(TAP, interface="t1"),
    "single": attrs.evolve(TAP, multi_queue=False),
    "m": DescriptorFact("macvtap", "the macvtap 'm0'", interface="m0", mac="52:54:00:00:00:09"),
    "v": DescriptorFact("vhost-net", "a vhost-net"),
    "s": DescriptorFact("socket", "a connected stream socket"),
    "false": attrs.evolve(TAP, declared="vhost-net"),
    "read": attrs.evolve(TAP, writable=False),
    "disk": DescriptorFact("file", "a file of 4096 bytes", size=4096),
    "null": DescriptorFact("other", "the character device 1:3"),
}
DUAL = attrs.evolve(
    POD,
    addresses6=(IPv6Interface("fd00:10::5/64"),),
    routes6=(Route(IPv6Network("::/0"), IPv6Address("fd00:10::1")),),
)
ONE6 = IPv6Address("fd00:10::1")
LAN = {"lo": (IPv4Interface("127.0.0.1/8"),), "ens3": (IPv4Interface("192.168.77.40/24"),)}
MTU_1450 = "0800010004000000" + "08000200aa050000"
"""The metrics of a route with ``mtu lock 1450``."""
BRIDGE = KERNEL + '[[network]]\nmode = "bridge"\n'


def fd_network(names: str, more: str = "") -> str:
    return f'{KERNEL}[[network]]\nmode = "descriptor"\nfd = "{names}"\n{more}'


def given(text: str, *names: str) -> list[str]:
    return problems(text, attrs.evolve(FACTS, descriptors={name: INHERITED[name] for name in names}))


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        (fd_network("a"), (), "network[0].fd: no descriptor 'a' was inherited; there are: none"),
        (fd_network("a"), ("a", "b"), "descriptors: nothing names the descriptor 'b' (the tap 't0'); name it in a key"),
        (KERNEL, ("s",), "descriptors: nothing names the descriptor 's' (a connected stream socket)"),
        (
            fd_network("v"),
            ("v",),
            "network[0].fd: the descriptor 'v' is a vhost-net, it takes a tap or a macvtap or a stream",
        ),
        (
            fd_network("null"),
            ("null",),
            "network[0].fd: the descriptor 'null' is the character device 1:3, it takes a tap",
        ),
        (
            fd_network("a", 'vhost_fd = "b"'),
            ("a", "b"),
            "network[0].vhost_fd: the descriptor 'b' is the tap 't0', it takes a vhost",
        ),
        (
            fd_network("false"),
            ("false",),
            "network[0].fd: the descriptor 'false' is the tap 't0', but came as 'vhost-net'",
        ),
        (fd_network("read"), ("read",), "network[0].fd: the descriptor 'read' is open for reading only"),
        (fd_network("a,other"), ("a", "other"), "network[0].fd: names descriptors of different interfaces"),
        (
            fd_network("a,single"),
            ("a", "single"),
            "network[0].fd: names several, which needs a tap or macvtap that was opened",
        ),
        (fd_network("s", 'vhost_fd = "v"'), ("s", "v"), "network[0].vhost_fd: vhost-net cannot serve a socket"),
        (
            fd_network("m", 'mac = "52:54:00:00:00:08"'),
            ("m",),
            "network[0].mac: 52:54:00:00:00:08 is not that of the macvtap 'm0'",
        ),
    ],
)
def test_an_unsuitable_network_is_refused(text: str, names: tuple[str, ...], expected: str) -> None:
    found = given(text, *names)
    assert [problem[: len(expected)] for problem in found] == [expected]


def test_an_inherited_tap_is_used_unchanged() -> None:
    facts = attrs.evolve(FACTS, descriptors={name: INHERITED[name] for name in ("a", "b", "m", "s", "v")})
    text = (
        fd_network("a,b")
        + fd_network("m", 'vhost_fd = "v"\n').removeprefix(KERNEL)
        + fd_network("s").removeprefix(KERNEL)
    )
    taps, macvtap, socket = plan_of(text, facts).networks
    assert isinstance(taps, InheritedFdPlan)
    assert isinstance(macvtap, InheritedFdPlan)
    assert isinstance(socket, InheritedFdPlan)
    assert (taps.queues, taps.kind, taps.vhost) == (2, "tap", True)
    assert (macvtap.mac, macvtap.vhost, macvtap.vhost_fds) == ("52:54:00:00:00:09", False, ("v",))
    assert (socket.kind, socket.vhost) == ("socket", False)


def test_a_plan_made_beforehand_trusts_the_spec_for_disks_by_descriptor() -> None:
    text = KERNEL + '[[disk]]\nfd = "root"\n[[disk]]\npath = "/missing"\n'
    spec = parse_instance("spec", text.encode())
    with pytest.raises(SpecError) as raised:
        plan_instance("spec", spec, FACTS)
    assert [str(problem) for problem in raised.value.problems] == ["disk[1].path: '/missing' does not exist"], (
        "the second"
    )
    facts = attrs.evolve(FACTS, files={**FACTS.files, PurePosixPath("/missing"): FileFact("file", 4096)})
    handed_over, named = plan_instance("spec", spec, facts).machine.disks
    assert disk_words(handed_over).startswith("fd:root, raw, writable, ")
    assert named.name == "disk1"


def test_a_disk_by_its_descriptor() -> None:
    facts = attrs.evolve(
        FACTS,
        descriptors={"disk": INHERITED["disk"]},
        files={**FACTS.files, PurePosixPath("/proc/self/fd/9"): FileFact("file", 4096, image=ImageFact("raw"))},
    )
    spec = parse_instance("spec", b'[[disk]]\nfd = "disk"\n')
    assert plan_instance("spec", with_disks(spec, {"disk": 9}), facts).machine.disks[0].path == PurePosixPath(
        "/proc/self/fd/9"
    )
    assert given('[[disk]]\nfd = "disk"\n[[disk]]\npath = "/disk"\n', "a") == [
        "disk[0].fd: no descriptor 'disk' was inherited; there are: 'a'",
        "descriptors: nothing names the descriptor 'a' (the tap 't0'); name it in a key fd, or do not pass it",
        "disk[0].path: 'fd:disk' does not exist",
    ]
    assert problems("[[disk]]\n") == [
        "disk[0].path: is missing; a disk needs a path, or the fd that it is inherited as"
    ]
    both = problems('[[disk]]\nfd = "disk"\npath = "/disk"\n')
    assert both == ["disk[0].fd: path and fd are both given; leave one of them out"]
    text = '[[disk]]\nfd = "a"\n' + fd_network("a").removeprefix(KERNEL)
    assert problems(text) == ["network[0].fd: the descriptor 'a' is taken by disk[0].fd already"]


def test_a_plan_made_beforehand_trusts_the_spec_for_networks() -> None:
    assert isinstance(plan_of(fd_network("a")).networks[0], InheritedFdPlan)


@pytest.mark.parametrize(
    ("vcpus", "more", "queues"), [(1, "", 1), (5, "", 5), (7, "queues = 3", 3), (2, "queues = 4", 4)]
)
def test_queues(vcpus: int, more: str, queues: int) -> None:
    assert plan_of(f"{KERNEL}[cpu]\ncount = {vcpus}\n[[network]]\n{more}").networks[0].queues == queues


def test_at_most_eight_queues_by_default() -> None:
    assert plan_of(f"{KERNEL}[cpu]\ncount = 40\n[[network]]\n", EPYC).networks[0].queues == 8


def test_a_guest_gets_the_pods_ipv6_address_only_on_request() -> None:
    facts = attrs.evolve(FACTS, interfaces={"eth0": DUAL})
    asked, unasked = plan_of(BRIDGE + "ipv6 = true\n", facts), plan_of(BRIDGE, facts)
    assert isinstance(asked.networks[0], BridgedPlan)
    assert isinstance(unasked.networks[0], BridgedPlan)
    assert asked.networks[0].ipv6 == Ipv6Plan(IPv6Interface("fd00:10::5/64"), None)
    assert unasked.networks[0].ipv6 is None
    assert any("by DHCPv6, which has no routes" in remark for remark in map(str, asked.remarks))
    assert any("the guest does not get the IPv6 address of 'eth0'" in remark for remark in map(str, unasked.remarks))


@pytest.mark.parametrize(
    ("text", "facts", "expected"),
    [
        (
            BRIDGE + "ipv6 = true\n",
            {},
            "network[0].ipv6: 'eth0' must have exactly one global IPv6 address for the guest",
        ),
        (
            BRIDGE + "ipv6 = true\n",
            {"ipv6_error": "the kernel has none", "interfaces": {"eth0": DUAL}},
            "network[0].ipv6: cannot give",
        ),
        (
            KERNEL + "[[network]]\n",
            {"addresses": LAN, "machines_network": True},
            "network[0].subnet: 192.168.77.0/24 overlaps 192.168.77.0/24, the network of 'ens3' here",
        ),
        (
            KERNEL + "[[network]]\nipv6 = true\nmtu = 1279\n",
            {},
            "network[0].ipv6: cannot give the guest IPv6: it takes an MTU of 1280 (RFC 8200, 5), and the network's is 1279",
        ),
        (
            KERNEL + '[[network]]\nmode = "macvtap"\n',
            {"interfaces": {"eth0": attrs.evolve(POD, mac="")}},
            "network[0].interface: 'eth0' has no MAC address",
        ),
        (
            KERNEL + '[[network]]\nmode = "macvtap"\n',
            {"interfaces": {"eth0": attrs.evolve(POD, kind="ipoib", mac="80:00:02:08:" + ":".join(["fe"] * 16))}},
            "network[0].interface: 'eth0' has no MAC address of Ethernet",
        ),
        (
            KERNEL + '[[network]]\nmode = "macvtap"\n',
            {"interfaces": {"eth0": attrs.evolve(POD, port=True)}},
            "network[0].interface: 'eth0' belongs to a bridge or bond already",
        ),
        (
            KERNEL + '[[network]]\nmode = "macvtap"\n',
            {"interfaces": {"eth0": attrs.evolve(POD, kind="ipvlan")}},
            "network[0].interface: 'eth0' is a ipvlan, which passes packets to its own IP addresses alone",
        ),
        (
            KERNEL + "[[network]]\nipv6 = true\n",
            {"ipv6_error": "none here"},
            "network[0].ipv6: cannot give the guest IPv6",
        ),
        (
            BRIDGE,
            {"interfaces": {"eth0": attrs.evolve(POD, multipath=(IPv4Network("0.0.0.0/0"),))}},
            "network[0].interface: 'eth0' has the route 0.0.0.0/0 over several gateways",
        ),
        (
            BRIDGE,
            {"interfaces": {"eth0": attrs.evolve(POD, routes=(Route(IPv4Network("0.0.0.0/0"), ONE6),))}},
            "network[0].interface: 'eth0' has the route 0.0.0.0/0 via fd00:10::1, which DHCP cannot express and an alias cannot keep",
        ),
        (KERNEL + '[[network]]\nmode = "passt"\n', {"passt": None}, "network[0].mode: cannot find the program 'passt'"),
        (
            KERNEL + '[[network]]\nmode = "passt"\nports = ["2222:22", "127.0.0.1/80:8080"]\n',
            {"unprivileged_port": 1024},
            "network[0].ports: passt cannot listen at 80: net.ipv4.ip_unprivileged_port_start is 1024 here, and it ",
        ),
        (
            KERNEL + '[[network]]\nmode = "passt"\nports = "all"\n',
            {"unprivileged_port": 1024},
            "network[0].ports: passt cannot listen at 1: net.ipv4.ip_unprivileged_port_start is 1024 here, and it ",
        ),
        (
            KERNEL + '[[network]]\nmode = "passt"\nports = "all"\n',
            {"open_files": 20_000},
            "network[0].ports: passt would listen at up to 49151 ports, and may have 20000 files open here; raise the",
        ),
        (BRIDGE + '[[network]]\nmode = "passt"\n', {}, "network[1].mode: passt speaks with the address of 'eth0'"),
        (
            KERNEL + '[[network]]\nmode = "macvtap"\nmtu = 9000\n',
            {},
            "network[0].mtu: 9000 is more than the 1450 of 'eth0'",
        ),
        (
            KERNEL + '[[network]]\nmode = "macvtap"\n',
            {"user_namespace": True},
            "network[0].mode: a macvtap takes a device node of its own, and in a user namespace none can be made; use mode =",
        ),
        (
            KERNEL + '[[network]]\nmode = "macvtap"\ninterface = "x"\n',
            {},
            "network[0].interface: there is no network inter",
        ),
    ],
)
def test_an_unavailable_network_is_refused(text: str, facts: dict[str, object], expected: str) -> None:
    found = problems(text, attrs.evolve(FACTS, **facts))  # type: ignore[arg-type]
    assert [problem[: len(expected)] for problem in found] == [expected]


def test_what_the_guest_does_not_get_is_remarked() -> None:
    """ARP for an IPv4 neighbour is answered; of IPv6 neighbours and other tables the guest knows nothing."""
    neighbours = [PermanentNeighbour(address, "02:00:00:00:00:01") for address in (IPv4Address("169.254.1.1"), ONE6)]
    for given, expected in (
        ({"neighbours": (neighbours[0],)}, ""),
        (
            {"neighbours": tuple(neighbours)},
            "the guest may not reach fd00:10::1, which 'eth0' knows as a permanent neighbour",
        ),
        (
            {"other_routes": (Route(IPv4Network("10.0.0.0/8"), table=100),)},
            "it does not get the routes of table 100, which",
        ),
        ({"virtual_function": True}, "the guest may receive nothing: 'eth0' is a virtual function (SR-IOV), which"),
    ):
        pod = attrs.evolve(POD, **given)
        remarks = plan_of(BRIDGE, attrs.evolve(FACTS, interfaces={"eth0": pod})).remarks
        ours = [remark for remark in map(str, remarks) if "'eth0'" in remark]
        assert [expected in remark for remark in ours] == [True] * bool(expected)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"kind": "macvlan"},
            "'eth0' is a macvlan, which passes frames to its own MAC address alone: a guest behind it",
        ),
        ({"kind": "ipvlan"}, "'eth0' is a ipvlan, which passes packets to its own IP addresses alone"),
        ({"kind": "bridge"}, "'eth0' is a bridge, and a bridge cannot belong to another; use mode"),
        ({"kind": "tun", "mac": ""}, "'eth0' has no MAC address of Ethernet, which the guest's network is; use mode"),
        ({"kind": "netkit", "mac": "00:00:00:00:00:00"}, "'eth0' has no MAC address of Ethernet"),
        ({"port": True}, "'eth0' belongs to a bridge or bond already"),
        ({"addresses": ()}, "'eth0' must have exactly one IPv4 address for the guest to take over, found none; give"),
        (
            {"addresses": (), "addresses6": (IPv6Interface("fd00:10::5/64"),)},
            "'eth0' must have exactly one IPv4 address for the guest to take over, found IPv6 alone (fd00:10::5/64); give the interface",
        ),
        (
            {"peers": (IPv4Address("10.0.0.1"),)},
            "'eth0' must have exactly one IPv4 address for the guest to take over, found a point",
        ),
    ],
)
def test_an_interface_that_no_guest_can_take_over_is_refused(change: dict[str, object], expected: str) -> None:
    pod = attrs.evolve(POD, **change)  # type: ignore[arg-type]
    [found] = problems(BRIDGE, attrs.evolve(FACTS, interfaces={"eth0": pod}))
    assert found.startswith(f"network[0].interface: {expected}")
    assert "; " in found, "a remedy"


def test_a_subnet_that_the_container_is_in_as_well_is_remarked() -> None:
    remarks = plan_of(KERNEL + "[[network]]\n", attrs.evolve(FACTS, addresses=LAN)).remarks
    assert any("the subnet 192.168.77.0/24 overlaps 192.168.77.0/24, the network" in str(each) for each in remarks)
    assert not any("overlaps" in str(each) for each in plan_of(KERNEL + "[[network]]\n").remarks)


def test_an_ipv6_subnet_is_stable_and_unique() -> None:
    a, b = Identity("a"), Identity("b")
    subnets = {derived_subnet(each, index) for each in (a, b) for index in range(3)}
    assert len(subnets) == 6
    assert derived_subnet(a, 0) == derived_subnet(a, 0)
    assert all(subnet.subnet_of(IPv6Network("fd00::/8")) and subnet.prefixlen == 64 for subnet in subnets)


DERIVED = '[[network]]\n[[network]]\nmode = "macvtap"\n[guest]\nvsock = "auto"\n'


@pytest.mark.parametrize(
    ("one", "other", "origin"),
    [
        ({"pod_uid": "a"}, {"pod_uid": "b"}, "the pod's UID"),
        ({"machine_id": "a"}, {"machine_id": "b"}, "this machine's id and the state directory"),
        (
            {"machine_id": "a"},
            {"machine_id": "a", "state_directory": PurePosixPath("/other")},
            "this machine's id and the state directory",
        ),
        ({}, {"state_directory": PurePosixPath("/other")}, "the state directory"),
    ],
)
def test_what_must_be_unique_differs_between_instances_of_one_name(
    one: dict[str, object], other: dict[str, object], origin: str
) -> None:
    """Two pods of one manifest, two machines, two places on one machine; and each is the same at its next start."""

    def unique(more: dict[str, object]) -> list[object]:
        plan = plan_of(KERNEL + DERIVED, attrs.evolve(FACTS, **more))  # type: ignore[arg-type]
        assert plan.machine.guest.vsock is not None
        assert all(f" from {origin}" in line for line in plan_lines(plan) if "  3 network" in line)
        return [*(network.mac for network in plan.networks), plan.machine.guest.vsock.cid]

    found = [unique(one), unique(other)]
    assert found == [unique(one), unique(other)], "the same at its next start"
    assert len({*found[0], *found[1]}) == 6


@pytest.mark.parametrize(
    ("facts", "text", "remarked"),
    [
        ({}, '[[network]]\nmode = "macvtap"\n', True),
        ({}, '[[network]]\nmode = "descriptor"\nfd = "a"\n', True),
        ({}, '[[network]]\nmode = "macvtap"\nmac = "52:54:00:00:00:01"\n', False),
        ({}, '[[network]]\nmode = "macvtap"\n[instance]\nuuid = "3ceda12c-3ee9-40fa-9f42-61428fe654a6"\n', False),
        ({}, '[[network]]\n[[network]]\nmode = "bridge"\n', False),
        ({"pod_uid": "a"}, '[[network]]\nmode = "macvtap"\n', False),
        ({"machines_network": True}, '[[network]]\nmode = "macvtap"\n', False),
    ],
)
def test_the_same_containers_of_one_machine_may_have_one_mac(
    facts: dict[str, object], text: str, *, remarked: bool
) -> None:
    """`docker compose up --scale`: without a pod nothing tells them apart that stays the same at the next start."""
    remarks = plan_of(KERNEL + text, attrs.evolve(FACTS, **facts)).remarks  # type: ignore[arg-type]
    assert any("both guests have the same MAC address" in str(each) for each in remarks) is remarked


def test_a_uuid_of_the_spec_is_the_identity_in_every_pod() -> None:
    text = '[instance]\nuuid = "3ceda12c-3ee9-40fa-9f42-61428fe654a6"\n' + KERNEL + DERIVED
    one, other = (plan_of(text, attrs.evolve(FACTS, pod_uid=uid)) for uid in "ab")
    assert one.networks == other.networks
    given = plan_of(KERNEL + '[[network]]\nmac = "52:54:00:00:00:01"\n')
    assert any("(52:54:00:00:00:01, MTU" in line for line in plan_lines(given)), "nothing is derived"


@pytest.mark.parametrize(
    ("facts", "remedy"),
    [
        (
            {"pod": PodQos("guaranteed", ""), "allowed_cpus": CpuSet(range(1, 8))},
            "give the pod a network of its own (without hostNetwork: true)",
        ),
        (
            {},
            "start the container with a network of its own (without --network host); a service of the machine itself can use",
        ),
    ],
)
def test_the_machines_own_interface_is_never_taken(facts: dict[str, object], remedy: str) -> None:
    """A pod on the host's network, a service of systemd, and docker run --network host."""
    [found] = problems(BRIDGE, attrs.evolve(FACTS, machines_network=True, **facts))  # type: ignore[arg-type]
    assert found.startswith("network[0].mode: the guest would take the address of 'eth0' away from the machine itself")
    assert remedy in found
    others = KERNEL + '[[network]]\n[[network]]\nmode = "macvtap"\n[[network]]\nmode = "passt"\n'
    assert plan_of(others, attrs.evolve(FACTS, machines_network=True)).networks


TUNNELLED = attrs.evolve(
    POD,
    mtu=1500,
    routes=(
        Route(IPv4Network("10.0.1.1/32")),
        Route(IPv4Network("0.0.0.0/0"), IPv4Address("10.0.1.1"), metrics=MTU_1450),
    ),
)


@pytest.mark.parametrize(("mode", "mtu"), [("bridge", 65521), ("macvtap", 65535)])
def test_a_tap_has_a_smaller_greatest_mtu_than_the_interface_may_have(mode: str, mtu: int) -> None:
    facts = attrs.evolve(FACTS, interfaces={"eth0": attrs.evolve(POD, mtu=65535)})
    assert plan_of(f'{KERNEL}[[network]]\nmode = "{mode}"\n', facts).networks[0].mtu == mtu


@pytest.mark.parametrize(
    ("more", "mtu", "remarked"), [("", 1450, False), ("mtu = 1400\n", 1400, False), ("mtu = 1500\n", 1500, True)]
)
def test_a_guests_packets_are_as_small_as_the_pods_routes_ask(more: str, mtu: int, *, remarked: bool) -> None:
    """Cilium with a tunnel leaves the link its 1500 bytes, and gives the default route 1450."""
    plan = plan_of(BRIDGE + more, attrs.evolve(FACTS, interfaces={"eth0": TUNNELLED}))
    assert plan.networks[0].mtu == mtu
    lost = "packets of more than 1450 bytes may be lost: the routes of 'eth0' take no larger ones, and the guest sends up to 1500"
    assert any(lost in str(remark) for remark in plan.remarks) is remarked
    dual = attrs.evolve(DUAL, mtu=1500, routes6=(attrs.evolve(DUAL.routes6[0], metrics=MTU_1450),))
    both = plan_of(BRIDGE + "ipv6 = true\n", attrs.evolve(FACTS, interfaces={"eth0": dual}))
    assert both.networks[0].mtu == 1450


@pytest.mark.parametrize(
    ("ports", "options", "shown"),
    [
        ("[]", "--tcp-ports=none --udp-ports=none", "and nothing reaches the guest"),
        (
            '[22, "8000-8010", "80:8080/tcp", "127.0.0.1/9000-9001:90-91", "53/udp"]',
            "--tcp-ports=22 --tcp-ports=8000-8010 --tcp-ports=80:8080 --tcp-ports=127.0.0.1/9000-9001:90-91 --udp-ports=53",
            "and ports 22, 8000-8010, 80:8080, 127.0.0.1/9000-9001:90-91, 53/udp alone lead to it",
        ),
        ('"all"', "--tcp-ports=all --udp-ports=none", "and all of its TCP ports lead to it but those that the runner"),
    ],
)
def test_ports_are_passts(ports: str, options: str, shown: str) -> None:
    plan = plan_of(KERNEL + f'[[network]]\nmode = "passt"\nports = {ports}\n')
    [network] = plan.networks
    assert isinstance(network, PasstPlan)
    argv = passt_argv(network, "--fd=7")
    assert argv == [
        *["/usr/bin/passt", "--foreground", "--one-off", "--quiet", "--mtu=65520", "--no-map-gw"],
        *options.split(),
        "--fd=7",
    ]
    assert any(shown in line for line in plan_lines(plan))


def test_a_guest_of_passt_reaches_no_loopback_unless_the_only_dns_servers_are_there() -> None:
    text, remark = KERNEL + '[[network]]\nmode = "passt"\n', "the guest reaches all that listens at 127.0.0.1 here"
    for servers, reaches in (((), False), (("10.96.0.10", "127.0.0.53"), False), (("127.0.0.11",), True)):
        facts = attrs.evolve(FACTS, resolver=Resolver(tuple(map(IPv4Address, servers))))
        plan = plan_of(text, facts)
        [network] = plan.networks
        assert isinstance(network, PasstPlan)
        assert ("--no-map-gw" in passt_argv(network, "--fd=7")) is not reaches
        assert any(remark in str(each) for each in plan.remarks) is reaches


def test_a_name_of_an_interface_is_one_word_of_the_script() -> None:
    """The kernel allows every character in it but a slash, a colon and white space."""
    facts = attrs.evolve(FACTS, interfaces={"a;$(id)": attrs.evolve(POD, name="a;$(id)")})
    plan = plan_of(KERNEL + '[[network]]\nmode = "macvtap"\ninterface = "a;$(id)"\n', facts)
    assert "ip link add link 'a;$(id)' name " in pasteable(plan, None)


def test_every_kind_is_printed_and_in_the_script() -> None:
    plan = plan_of(MACHINES["networks"])
    shown = [line for line in plan_lines(plan) if "  3 network" in line]
    assert [
        word in line
        for word, line in zip(
            ("fd", "macvtap vmtap1 over eth0", "passt", "tap inherited as a, b", "net1"), shown, strict=True
        )
    ] == [True] * 5
    assert fitting("plan", plan_json(plan))["networks"][4]["ipv6"]["guest"] == "fd00:10::5/64"
    script = pasteable(plan, None)
    for word in ("type macvtap mode bridge", "/usr/bin/passt", "exec 20<>", "multi_queue", "vectors=6"):
        assert word in script


def test_a_bridged_guest_gets_the_pods_address() -> None:
    network = plan_of(KERNEL + '[[network]]\nmode = "bridge"\n').networks[0]
    assert isinstance(network, BridgedPlan)
    assert (network.mac, network.mtu, str(network.guest)) == (POD.mac, 1450, "10.244.1.5/32")
    assert network.routes == POD.routes
    argv = dnsmasq_argv(plan_of(KERNEL + '[[network]]\nmode = "bridge"\n').dhcp[0])
    assert "--dhcp-option=option:classless-static-route,169.254.1.1/32,0.0.0.0,0.0.0.0/0,169.254.1.1" in argv
    assert "--shared-network=vmbr0,10.244.1.5" in argv


def test_a_gateway_no_route_leads_to_gets_one() -> None:
    lonely = attrs.evolve(POD, routes=(Route(IPv4Network("0.0.0.0/0"), IPv4Address("169.254.1.1"), onlink=True),))
    plan = plan_of(KERNEL + '[[network]]\nmode = "bridge"\n', attrs.evolve(FACTS, interfaces={"eth0": lonely}))
    assert "--dhcp-option=option:classless-static-route,169.254.1.1/32,0.0.0.0,0.0.0.0/0,169.254.1.1" in dnsmasq_argv(
        plan.dhcp[0]
    )


def test_a_plain_pod_network_needs_no_route_list() -> None:
    plain = attrs.evolve(
        POD,
        addresses=(IPv4Interface("10.0.0.5/24"),),
        routes=(Route(IPv4Network("0.0.0.0/0"), IPv4Address("10.0.0.1")),),
    )
    plan = plan_of(KERNEL + '[[network]]\nmode = "bridge"\n', attrs.evolve(FACTS, interfaces={"eth0": plain}))
    argv = dnsmasq_argv(plan.dhcp[0])
    assert "--dhcp-option=option:router,10.0.0.1" in argv
    assert not any("classless" in argument for argument in argv)


def test_mac_addresses_are_stable_and_unique() -> None:
    a, b = Identity("a"), Identity("b")
    assert derived_mac(a, 0) == derived_mac(a, 0)
    assert len({derived_mac(each, index) for each in (a, b) for index in range(3)}) == 6
    assert derived_mac(a, 0).startswith("52:54:00:")
