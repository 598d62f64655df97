"""Networks on real links: a guest gets a pod's interface and returns it, and dnsmasq offers the pod's configuration.

The guest is a DHCP client in a network namespace of its own, behind a link with the guest's MAC address on our bridge.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Interface, IPv6Address, IPv6Interface, ip_address
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
import pytest
import trio

from runner.base.errors import HostError, Status, explain
from runner.facts.disk import FileFact
from runner.facts.host import HostFacts, Resolver
from runner.facts.network import Interface
from runner.facts.roots import Roots
from runner.instance.parts.qemu import GuestEnd
from runner.instance.supervisor import Supervisor
from runner.kernel import character_devices
from runner.kernel.child_processes import Command
from runner.kernel.hardware_reader import read_hardware
from runner.kernel.network import Bridge, build, read_interfaces, recover, remove
from runner.kernel.procfs import Procfs
from runner.plan.argv.networks import dnsmasq_argv
from runner.plan.instance import InstancePlan, plan_instance
from runner.spec.instance import parse_instance
from tests.support.fake_host import FakeHost

MAC, GUEST = "0a:58:0a:f4:01:05", IPv4Interface("10.244.1.5/32")


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def state_of(interface: str) -> dict[str, Any]:
    """Return the state to restore: addresses, MAC, MTU, alias, master and routes."""
    [link] = json.loads(ip("-j", "address", "show", "dev", interface))
    routes = json.loads(ip("-j", "route", "show", "dev", interface))
    inet = [
        (each["local"], each["prefixlen"], each.get("broadcast"))
        for each in link["addr_info"]
        if each["family"] == "inet"
    ]
    inet6 = [each["local"] for each in link["addr_info"] if each["family"] == "inet6" and each["scope"] == "global"]
    routes += json.loads(ip("-j", "-6", "route", "show", "dev", interface, "proto", "static"))
    facts = {key: link.get(key) for key in ("address", "mtu", "ifalias", "master", "operstate")}
    return {**facts, "inet": inet, "inet6": inet6, "routes": sorted(routes, key=str)}


ROUTED = ("10.244.1.5/32", "169.254.1.1", (("169.254.1.1", "scope", "link"), ("default", "via", "169.254.1.1")))
ONLINK = (
    "10.244.1.5/32",
    "10.9.9.9",
    (("default", "via", "10.9.9.9", "onlink"), ("10.7.0.0/16", "via", "10.9.9.9", "onlink", "metric", "7")),
)
PLAIN = (
    "10.0.5.7/24",
    "10.0.5.1",
    (("default", "via", "10.0.5.1", "mtu", "1400"), ("fd00:2::/64", "via", "fd00:1::1")),
)


@pytest.fixture
def pod(request: pytest.FixtureRequest) -> Iterator[str]:
    """Make an interface `eth0` as a CNI plugin leaves it, its other end in the namespace `gateway`; and a namespace `guest`."""
    address, gateway, routes = getattr(request, "param", ROUTED)
    for name in ("gateway", "guest"):
        ip("netns", "add", name)
    ip("link", "add", "eth0", "address", MAC, "mtu", "1450", "type", "veth", "peer", "name", "gw0", "netns", "gateway")
    ip("address", "add", address, *(("broadcast", "+") if address.endswith("/24") else ()), "dev", "eth0")
    ip("address", "add", "fd00:1::5/64", "dev", "eth0", "nodad")
    ip("link", "set", "eth0", "up")
    ip("-n", "gateway", "link", "set", "gw0", "up")
    ip("-n", "gateway", "link", "set", "gw0", "up")
    ip("-n", "gateway", "address", "add", f"{gateway}/32", "dev", "gw0")
    ip("-n", "gateway", "route", "add", str(IPv4Interface(address).ip), "dev", "gw0")
    for route in routes:
        ip("route", "add", *route, "dev", "eth0")
    yield gateway
    ip("link", "delete", "eth0")
    for name in ("gateway", "guest"):
        ip("netns", "delete", name)


def read_eth0() -> Interface:
    return read_interfaces(["eth0"])["eth0"]


def bridged(fake_host: FakeHost, link: Interface) -> InstancePlan:
    """Plan mode bridge with a fake QEMU and the real dnsmasq."""
    private: InstancePlan = fake_host.plan("[[network]]\n")
    facts = HostFacts(
        allowed_cpus=private.placement.cpus,
        hardware=read_hardware(),
        memory_nodes=Procfs().memory_nodes(),
        memory=1 << 40,
        state_directory=private.state_directory,
        qemu=private.machine.program,
        sleep=PurePosixPath(private.anchor[0]),
        dnsmasq=PurePosixPath(str(shutil.which("dnsmasq"))),
        files={PurePosixPath("/rom"): FileFact("file", 1 << 16)},
        users={},
        interfaces={"eth0": link},
        resolver=Resolver((IPv4Address("10.96.0.10"),), ("default.svc.cluster.local", "cluster.local")),
    )
    text = b'[boot]\nfirmware = "/rom"\n[[network]]\nmode = "bridge"\nipv6 = true\n'
    planned = plan_instance("spec", parse_instance("spec", text), facts)
    return attrs.evolve(
        private,
        dhcp=planned.dhcp,
        machine=attrs.evolve(private.machine, networks=planned.networks),
    )


LEASE = """#!/bin/sh
[ "$1" = bound ] || exit 0
env > "$LEASE_FILE"
ip address add "$ip/$mask" dev eth0
set -- $staticroutes
while [ $# -ge 2 ]; do
  if [ "$2" = 0.0.0.0 ]; then ip route add "$1" dev eth0; else ip route add "$1" via "$2" dev eth0; fi
  shift 2
done
if ! ip route show default | grep -q .; then ip route add default via "$router" dev eth0; fi
"""


RENEW = """
import socket, struct, sys
# A DHCPREQUEST to renew a lease (RFC 2131, 4.3.2) by broadcast, from the address itself; the answer's option 53 is ACK (5).
mac, address = bytes.fromhex(sys.argv[1].replace(":", "")), socket.inet_aton(sys.argv[2])
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
    asking.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    asking.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0")
    asking.bind((sys.argv[2], 68))
    asking.settimeout(10)
    head = struct.pack("!BBBBIHH4s12x16s64x128x", 1, 1, 6, 0, 0x77, 0, 0, address, mac)
    asking.sendto(head + b"\\x63\\x82\\x53\\x63\\x35\\x01\\x03\\xff", ("255.255.255.255", 67))
    answer = asking.recv(1500)[240:]
    sys.exit(0 if b"\\x35\\x01\\x05" in answer else 1)
"""


async def act_as_guest(host: Supervisor, root: Path, gateway: str, *then: str) -> dict[str, str]:
    """Ask for an address as the guest would, use it, do what *then* says, and return the variables of the lease."""

    async def run(*argv: str) -> None:
        process = host.processes.spawn(Command("test", argv))
        with trio.fail_after(60):
            assert await process.wait() == 0, (argv, list(process.last_lines))

    script = root / "lease.sh"
    script.write_text(LEASE.replace("$LEASE_FILE", str(root / "lease")))
    script.chmod(0o755)
    await run("ip", "link", "add", "port", "type", "veth", "peer", "name", "eth0", "netns", "guest", "address", MAC)
    await run("ip", "link", "set", "port", "master", "vmbr0", "up")
    inside = ("ip", "netns", "exec", "guest")
    await run(*inside, "ip", "link", "set", "eth0", "up")
    options = ("-O", "mtu", "-O", "staticroutes", "-O", "search", "-O", "domain")
    await run(
        *inside, "busybox", "udhcpc", "-i", "eth0", "-q", "-n", "-f", "-t", "10", "-T", "1", *options, "-s", str(script)
    )
    await run(*inside, "ping", "-c", "1", "-W", "5", gateway)
    if then:
        await run(*inside, *then)
    await run("ip", "link", "delete", "port")
    pairs = (line.partition("=") for line in (root / "lease").read_text().splitlines())
    return {name: value for name, _, value in pairs}


@pytest.mark.parametrize(
    "pod", [ROUTED, ONLINK, PLAIN], indirect=True, ids=["off-link gateway", "onlink", "plain subnet"]
)
async def test_a_bridged_guest_gets_the_pods_address_and_returns_it(fake_host: FakeHost, pod: str) -> None:
    before = state_of("eth0")
    plan = bridged(fake_host, read_eth0())
    during: dict[str, Any] = {}

    async def guest(host: Supervisor) -> None:
        with trio.fail_after(30):
            while "cont" not in fake_host.commands():
                await trio.sleep(0.01)
        during.update(await act_as_guest(host, fake_host.root, pod))
        process = host.processes.spawn(Command("test", ("ip", "-j", "address", "show", "dev", "eth0")))
        await process.wait()
        during["eth0"] = "".join(process.last_lines)
        fake_host.stop.ask("test")

    result = await fake_host.run(plan, meanwhile=guest)
    assert isinstance(result, GuestEnd), result
    assert result.status is Status.STOPPED
    assert fake_host.faults.sentences == []
    [[address, prefix, _]] = before["inet"]
    assert (during["ip"], during["mask"]) == (address, str(prefix))
    assert during["router"] == pod
    assert (during["dns"], during["search"]) == ("10.96.0.10", "default.svc.cluster.local cluster.local")
    assert during["mtu"] == ("1400" if pod == PLAIN[1] else "1450"), "that of its route, else of the link"
    [eth0] = json.loads(during["eth0"])
    assert eth0["address"] != MAC, "frames to the guest's MAC must not be ours"
    assert [each for each in eth0["addr_info"] if each["family"] == "inet"] == []
    assert eth0["master"] == "vmbr0"
    assert state_of("eth0") == before


async def running_guest(fake_host: FakeHost, pod: str, *then: str) -> None:
    """Run an instance on the pod's interface whose guest reaches the gateway and does what *then* says; compare the state."""
    before = state_of("eth0"), ip("neighbour", "show", "nud", "permanent")

    async def guest(host: Supervisor) -> None:
        async def act() -> None:
            await act_as_guest(host, fake_host.root, pod, *then)

        await fake_host.act_while_it_runs(act)

    result = await fake_host.run(bridged(fake_host, read_eth0()), meanwhile=guest)
    assert isinstance(result, GuestEnd), explain(result)
    assert fake_host.faults.sentences == []
    assert (state_of("eth0"), ip("neighbour", "show", "nud", "permanent")) == before


async def test_a_gateway_that_answers_no_arp_is_reached(fake_host: FakeHost, pod: str) -> None:
    """Some CNI plugins tell a pod its gateway by a permanent neighbour alone (the AWS VPC CNI): the bridge answers for it."""
    [gateway] = json.loads(ip("-n", "gateway", "-j", "link", "show", "gw0"))
    ip("neighbour", "add", pod, "lladdr", gateway["address"], "dev", "eth0", "nud", "permanent")
    silent = "echo 8 >/proc/sys/net/ipv4/conf/gw0/arp_ignore"  # Documentation/networking/ip-sysctl.rst: no reply at all
    ip("netns", "exec", "gateway", "sh", "-c", silent)
    await running_guest(fake_host, pod)


async def test_a_renewal_is_answered_where_reverse_paths_are_strict(fake_host: FakeHost, pod: str) -> None:
    """With ``rp_filter`` 1, several distributions' default, a packet from an address without a route is dropped."""
    strict = Path("/proc/sys/net/ipv4/conf/all/rp_filter")
    before = strict.read_text()
    strict.write_text("1")
    try:
        await running_guest(fake_host, pod, sys.executable, "-IS", "-c", RENEW, MAC, "10.244.1.5")
    finally:
        strict.write_text(before)


async def test_the_interface_is_restored_after_a_killed_runner(fake_host: FakeHost, pod: str) -> None:
    """The alias of eth0 records its state; the next runner reads it, removes the leftovers, and continues."""
    del pod
    before = state_of("eth0")
    link = read_eth0()
    bridge = Bridge("vmbr0", "vmtap0", IPv4Interface("169.254.77.1/32"), 1450, MAC, GUEST, link)
    with pytest.raises(HostError, match="cannot find the network interface 'vmtap0'"):
        build([bridge])
    remove([bridge])
    assert state_of("eth0") == before, "a failed build is reversed"

    ip("tuntap", "add", "vmtap0", "mode", "tap")
    build([bridge])
    with pytest.raises(HostError, match="another instance of this network namespace uses it"):
        recover([bridge])
    assert "vmbr0" in ip("link", "show", "vmbr0"), "refused, and nothing of it touched"
    ip("link", "delete", "vmtap0")  # the runner is killed: its tap goes with its descriptor, the bridge stays
    assert state_of("eth0")["inet"] == []

    assert read_eth0() == link, "the plan uses the recorded state"
    plan = bridged(fake_host, read_eth0())
    fake_host.stop.ask("test")
    result = await fake_host.run(plan)
    assert isinstance(result, GuestEnd), result
    assert fake_host.faults.sentences == []
    assert state_of("eth0") == before


def test_the_bridge_learns_no_addresses(pod: str) -> None:
    """Neither a guest nor a neighbour fills the kernel's memory by frames that each have another source address."""
    del pod
    bridge = Bridge("vmbr0", "vmtap0", IPv4Interface("169.254.77.1/32"), 1450, MAC, GUEST, read_eth0())
    frames = [
        b"\2" + bytes(5) + b"\2\1" + bytes(3) + bytes([number]) + b"\x88\xb5" + bytes(46) for number in range(200)
    ]
    send = "import socket; link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW); link.bind(('gw0', 0))"
    with character_devices.tap("vmtap0") as (queue,):
        had = build([bridge])
        try:
            for frame in frames[:100]:
                os.write(queue.number, bytes(10) + frame)  # behind the header of virtio-net
            code = f"{send}; [link.send(frame) for frame in {frames[100:]}]"
            ip("netns", "exec", "gateway", sys.executable, "-IS", "-c", code)
            shown = subprocess.run(["bridge", "-j", "fdb", "show", "br", "vmbr0"], check=True, capture_output=True)
        finally:
            remove([bridge], had)
    assert [each["mac"] for each in json.loads(shown.stdout) if each["mac"].startswith("02:01:")] == []


def frame(kind: int, packet: bytes, to: str = "ff:ff:ff:ff:ff:ff") -> bytes:
    """Return a frame of the guest as it is written to its tap, behind the header of virtio-net."""
    return bytes(10) + bytes.fromhex((to + MAC).replace(":", "")) + struct.pack("!H", kind) + packet


def icmpv6(source: str, destination: str, message: bytes, *extension: int) -> bytes:
    """Return the packet of an ICMPv6 *message*, behind an *extension* header, if any."""
    addresses = ip_address(source).packed + ip_address(destination).packed
    summed = addresses + struct.pack("!II", len(message), socket.IPPROTO_ICMPV6) + message
    total = sum(struct.unpack(f"!{len(summed) // 2}H", summed))
    message = message[:2] + struct.pack("!H", ~(total + (total >> 16)) & 0xFFFF) + message[4:]
    following = extension[0] if extension else socket.IPPROTO_ICMPV6
    before = struct.pack("!BBBBI", socket.IPPROTO_ICMPV6, 0, 1, 4, 0) if extension else b""
    return struct.pack("!IHBB", 6 << 28, len(before + message), following, 255) + addresses + before + message


def router_advertisement(*extension: int) -> bytes:
    """Return the frame by which a guest offers itself as the router of a prefix, behind an *extension* header, if any."""
    body = struct.pack("!BBHBBHII", 134, 0, 0, 64, 8, 9000, 0, 0) + b"\1\1" + bytes.fromhex("020102030405")
    prefix = ip_address("2001:db8:1::").packed
    body += struct.pack("!BBBBIII", 3, 4, 64, 0xC0, 0xFFFFFFFF, 0xFFFFFFFF, 0) + prefix
    return frame(0x86DD, icmpv6("fe80::1", "ff02::1", body, *extension), "33:33:00:00:00:01")


def udp(source: str, destination: str) -> bytes:
    """Return a UDP packet over IPv4, without the checksum of UDP."""
    addresses = ip_address(source).packed + ip_address(destination).packed
    header = struct.pack("!BBHHHBBH", 0x45, 0, 36, 1, 0, 64, socket.IPPROTO_UDP, 0) + addresses
    total = sum(struct.unpack("!10H", header))
    header = header[:10] + struct.pack("!H", ~(total + (total >> 16)) & 0xFFFF) + header[12:]
    return header + struct.pack("!HHHH", 9, 9, 16, 0) + b"a packet"


def arp_request(source: str, target: str) -> bytes:
    packed = bytes.fromhex(MAC.replace(":", "")) + ip_address(source).packed + bytes(6) + ip_address(target).packed
    return frame(0x0806, struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1) + packed + bytes(18))


def read_frames(link: int) -> list[bytes]:
    """Return the frames that have reached *link*, the descriptor of a tap or a packet socket."""
    frames = []
    os.set_blocking(link, False)
    with suppress(BlockingIOError):
        while True:
            frames.append(os.read(link, 2000))
    return frames


def hostile_bridge(*, takes_pod: bool, ipv6: bool) -> Bridge:
    """Return a bridge with a guest in the place of the pod's interface, or on a private network."""
    if takes_pod:
        eth0 = read_eth0()
        address, guest6 = IPv4Interface("169.254.77.1/32"), eth0.addresses6[0] if ipv6 else None
        return Bridge("vmbr0", "vmtap0", address, 1450, MAC, GUEST, eth0, guest6=guest6)
    host6, guest6 = (IPv6Interface("fd00:9::1/64"), IPv6Interface("fd00:9::2/64")) if ipv6 else (None, None)
    host, guest = IPv4Interface("10.9.0.1/16"), IPv4Interface("10.9.0.2/16")
    return Bridge("vmbr0", "vmtap0", host, 1450, MAC, guest, None, host6, guest6)


@pytest.mark.parametrize("ipv6", [True, False])
@pytest.mark.parametrize("takes_pod", [True, False])
def test_the_guest_is_no_router_of_the_pod(pod: str, *, takes_pod: bool, ipv6: bool) -> None:
    del pod
    bridge = hostile_bridge(takes_pod=takes_pod, ipv6=ipv6)
    with character_devices.tap("vmtap0") as (queue,):
        had = build([bridge])
        try:
            for advertisement in (router_advertisement(), router_advertisement(socket.IPPROTO_DSTOPTS)):
                os.write(queue.number, advertisement)
            [link] = json.loads(ip("-s", "-j", "link", "show", "dev", "vmbr0"))
            routes = ip("-6", "route", "show", "dev", "vmbr0")
        finally:
            remove([bridge], had)
        had = build([bridge])  # nothing is left that would be in its way
        remove([bridge], had)
    assert link["stats64"]["rx"]["packets"] >= 2  # the bridge has passed them to the host
    assert "2001:db8:1" not in routes
    assert "default" not in routes


MOST_ASKERS = 50 + 50
"""Neighbours that a guest with IPv6 may cause: those of one burst, and of the seconds that the test takes."""


@pytest.mark.parametrize("ipv6", [True, False])
@pytest.mark.parametrize("takes_pod", [True, False])
def test_the_guest_does_not_fill_the_machines_table_of_neighbours(pod: str, *, takes_pod: bool, ipv6: bool) -> None:
    """The table has 1024 entries for all network namespaces together, and a guest can make up any number of addresses."""
    del pod
    # As some distributions set it, after which it is 2 for every link; and no address is tentative for a second.
    settings = {"ipv4/conf/all/rp_filter": "2", "ipv6/conf/default/dad_transmits": "0"}
    before = {name: Path("/proc/sys/net", name).read_text() for name in settings}
    for name, value in settings.items():
        Path("/proc/sys/net", name).write_text(value)
    bridge = hostile_bridge(takes_pod=takes_pod, ipv6=ipv6)
    host = str(bridge.address.ip)
    with character_devices.tap("vmtap0") as (queue,):
        had = build([bridge])
        try:
            [link] = json.loads(ip("-j", "address", "show", "dev", "vmbr0"))
            [host6] = [each["local"] for each in link["addr_info"] if each["local"].startswith("fe80")]
            solicited = ip_address("ff02::1:ff00:0").packed[:13] + ip_address(host6).packed[13:]
            for number in range(400):
                source, source6 = f"10.9.{number // 250 + 1}.{number % 250 + 1}", f"fe80::{number + 1:x}"
                solicitation = struct.pack("!BBHI", 135, 0, 0, 0) + ip_address(host6).packed
                solicitation += b"\1\1" + bytes.fromhex(MAC.replace(":", ""))
                asked = icmpv6(source6, str(ip_address(solicited)), solicitation)
                echo = icmpv6(source6.replace("::", "::1:"), host6, struct.pack("!BBHI", 128, 0, 0, 0))
                wrong = struct.pack("!IHBB", 6 << 28, 8, 0, 64) + echo[8:40] + bytes.fromhex("3b009e0400000000")
                for written in (
                    arp_request(source, host),
                    frame(0x0800, udp(source, host), link["address"]),
                    frame(0x86DD, asked, "33:33:ff" + solicited[13:].hex()),
                    frame(0x86DD, echo, link["address"]),
                    frame(0x86DD, wrong, link["address"]),  # an option that must be answered, which precedes most hooks
                ):
                    os.write(queue.number, written)
            os.write(queue.number, arp_request(str(bridge.guest.ip), host))
            neighbours = ip("-4", "neighbour", "show").splitlines()
            neighbours6 = ip("-6", "neighbour", "show").splitlines()
        finally:
            remove([bridge], had)
            for name, value in before.items():
                Path("/proc/sys/net", name).write_text(value)
    on_it = [each.split()[0] for each in neighbours if each.startswith("10.9.") or "vmbr0" in each]
    assert on_it == [str(bridge.guest.ip)], "its own address is answered"
    assert len(neighbours6) <= (MOST_ASKERS if ipv6 else 5)


@pytest.mark.parametrize("takes_pod", [True, False])
def test_nothing_is_forwarded_from_the_bridge_or_to_it(pod: str, *, takes_pod: bool) -> None:
    """A container's namespace has ``ip_forward`` from its machine, which is 1 on a node of Kubernetes."""
    del pod
    forwarding = [Path(f"/proc/sys/net/{each}/conf/all/forwarding") for each in ("ipv4", "ipv6")]
    before = [each.read_text() for each in forwarding]
    for each in forwarding:
        each.write_text("1")
    ip("link", "add", "other", "type", "veth", "peer", "name", "other0", "netns", "gateway")
    bridge = hostile_bridge(takes_pod=takes_pod, ipv6=True)
    guest, guest6 = str(bridge.guest.ip), str(bridge.guest6.ip if bridge.guest6 else None)
    with character_devices.tap("vmtap0") as (queue,), socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as other:
        had = build([bridge])
        try:
            for address, far in (("10.8.0.1/24", "10.8.0.2"), ("fd00:8::1/64", "fd00:8::2")):
                ip("address", "add", address, "dev", "other", *(("nodad",) if ":" in address else ()))
                ip("neighbour", "add", far, "lladdr", "02:00:00:00:00:02", "dev", "other")
            ip("link", "set", "other", "up")
            ip("-n", "gateway", "link", "set", "other0", "up")
            ip("neighbour", "add", guest, "lladdr", MAC, "dev", "vmbr0")
            other.bind(("other", 3))  # ETH_P_ALL
            [link] = json.loads(ip("-j", "link", "show", "dev", "vmbr0"))
            for source in (guest, "10.8.0.77", "192.0.2.7"):
                os.write(queue.number, frame(0x0800, udp(source, "10.8.0.2"), link["address"]))
            os.write(queue.number, frame(0x0800, udp("10.8.0.77", str(bridge.address.ip)), link["address"]))
            echo = icmpv6(guest6, "fd00:8::2", struct.pack("!BBHI", 128, 0, 0, 0) + b"a packet")
            os.write(queue.number, frame(0x86DD, echo, link["address"]))
            sent = read_frames(other.fileno())
            asked = ip("neighbour", "show", "dev", "other", "10.8.0.77")
            [link] = json.loads(ip("-j", "link", "show", "dev", "other"))
            inward = frame(0x0800, udp("10.8.0.2", guest), link["address"])[10:]
            send = "import socket; link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW); link.bind(('other0', 0))"
            ip("netns", "exec", "gateway", sys.executable, "-IS", "-c", f"{send}; link.send({inward!r})")
            received = read_frames(queue.number)
            arrived = read_frames(other.fileno())
        finally:
            remove([bridge], had)
            for each, value in zip(forwarding, before, strict=True):
                each.write_text(value)
            ip("link", "delete", "other")
    assert [each for each in sent + received if b"a packet" in each] == []
    assert asked == "", "a packet from an address that is not the guest's is not answered"
    assert any(b"a packet" in each for each in arrived)


def test_frames_to_the_guest_reach_its_tap_alone(pod: str) -> None:
    """The bridge learns no addresses; without one of its own for the guest, the pod's link would see what the host tells the guest."""
    del pod
    bridge = hostile_bridge(takes_pod=True, ipv6=False)
    with character_devices.tap("vmtap0") as (queue,), socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as host:
        had = build([bridge])
        try:
            host.bind(("vmbr0", 0))
            for _ in range(100):
                host.send(bytes.fromhex(MAC.replace(":", "")) + bytes.fromhex("020000000001") + b"\x88\xb5" + bytes(46))
            received = read_frames(queue.number)
            [eth0] = json.loads(ip("-s", "-j", "link", "show", "dev", "eth0"))
        finally:
            remove([bridge], had)
    assert len(received) >= 100
    assert eth0["stats64"]["tx"]["packets"] < 100


def test_every_refused_step_is_reversed(pod: str) -> None:
    """Every request of a build fails once; after the removal the pod's interface is what it was and no bridge is left."""
    del pod
    before = state_of("eth0")
    link = read_eth0()
    bridges = [
        Bridge("vmbr0", "vmtap0", IPv4Interface("192.168.77.1/24"), 1500, MAC, IPv4Interface("192.168.77.2/24"), None),
        Bridge("vmbr1", "vmtap1", IPv4Interface("169.254.77.1/32"), 1450, MAC, GUEST, link),
    ]
    asked = n = 0

    def refusing(event: str, _arguments: object) -> None:  # what Python announces before each request (PEP 578)
        nonlocal asked
        asked += event == "socket.sendto"
        if event == "socket.sendto" and asked == n:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    def ipv4(state: dict[str, Any]) -> dict[str, Any]:
        """Leave out IPv6: it is lost with the link, which goes down where the kernel cannot change the MAC address of one up."""
        return {**state, "inet6": None}

    sys.addaudithook(refusing)
    for tap in ("vmtap0", "vmtap1"):
        ip("tuntap", "add", tap, "mode", "tap")
    try:
        for n in range(1, 100):  # noqa: B007 - `refusing` reads it
            asked = 0
            try:
                build(bridges)
                break
            except HostError as error:
                reason = explain(error)
            remove(bridges)
            assert reason.endswith("Cannot allocate memory")
            assert ipv4(state_of("eth0")) == ipv4(before), reason
            assert "vmbr" not in ip("link", "show", "type", "bridge"), reason
        assert asked > 15
        n = 0
        assert ipv4(state_of("eth0")) != ipv4(before)
        remove(bridges)
        assert ipv4(state_of("eth0")) == ipv4(before)
        assert read_eth0() == link
        remove(bridges)  # removing twice is no error
    finally:
        for tap in ("vmtap0", "vmtap1"):
            ip("link", "delete", tap)


@pytest.mark.parametrize("bridge_gone", [False, True])
def test_a_failed_build_names_its_own_reason_though_it_cannot_be_reversed(pod: str, *, bridge_gone: bool) -> None:
    """It is the reason of the failed start; what is not restored is reported by the release."""
    del pod
    bridge = Bridge("vmbr1", "vmtap1", IPv4Interface("169.254.77.1/32"), 1450, MAC, GUEST, read_eth0())
    failed = False

    def losing(event: str, _arguments: object) -> None:  # what Python announces before each request (PEP 578)
        nonlocal failed
        if event != "socket.sendto" or failed or "vmbr1" not in ip("link", "show", "type", "bridge"):
            return
        if bridge_gone or "vmbr1" in ip("link", "show", "eth0"):
            failed = True
            ip("link", "delete", "vmbr1" if bridge_gone else "eth0")
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    sys.addaudithook(losing)
    ip("tuntap", "add", "vmtap1", "mode", "tap")
    try:
        with pytest.raises(HostError) as error:
            build([bridge])
        assert "Cannot allocate memory" in explain(error.value)
        if bridge_gone:
            assert "; and the bridge is not removed: cannot find the network interface 'vmbr1'" in explain(error.value)
        else:
            with pytest.raises(HostError, match="cannot restore 'eth0': it is gone"):
                remove([bridge])
    finally:
        failed = True
        ip("link", "delete", "vmtap1")
        if not bridge_gone:
            ip("link", "add", "eth0", "type", "veth", "peer", "gw1")  # the fixture deletes it


def test_a_route_is_restored_with_its_protocol(pod: str) -> None:
    del pod
    ip("route", "add", "10.8.0.0/16", "dev", "eth0", "proto", "static", "metric", "9")
    before = state_of("eth0")
    link = read_eth0()
    ip("tuntap", "add", "vmtap0", "mode", "tap")
    bridges = [Bridge("vmbr0", "vmtap0", IPv4Interface("169.254.77.1/32"), 1450, MAC, GUEST, link)]
    try:
        build(bridges)
        assert read_eth0() == link
        remove(bridges)
    finally:
        ip("link", "delete", "vmtap0")
    assert state_of("eth0") == before


def test_what_a_plan_judges_is_read(pod: str, tmp_path: Path) -> None:
    """An IPv6 gateway of IPv4, a route's MTU, and a card that is a virtual function."""
    del pod
    ip("-4", "route", "add", "10.8.0.0/16", "via", "inet6", "fe80::1", "dev", "eth0")
    ip("route", "add", "10.9.0.0/16", "dev", "eth0", "mtu", "lock", "1400")
    (tmp_path / "sys/class/net/eth0/device/physfn").mkdir(parents=True)
    link = read_interfaces(["eth0"], Roots.below(tmp_path))["eth0"]
    routes = {str(route.destination): route for route in link.routes}
    assert routes["10.8.0.0/16"].gateway == IPv6Address("fe80::1")
    assert [routes[each].mtu for each in ("10.9.0.0/16", "10.8.0.0/16")] == [1400, None]
    assert (link.virtual_function, read_eth0().virtual_function) == (True, False)


@pytest.mark.parametrize("pod", [PLAIN], indirect=True)
def test_routes_of_other_tables_are_restored_and_what_is_lost_is_logged(
    pod: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel deletes them with the address; a CNI plugin for routes by source has made them (sbr)."""
    for words in (
        f"route add default via {pod} dev eth0 table 100",
        "route add 10.0.5.0/24 dev eth0 table 100",
        f"route add 10.3.0.0/16 via {pod} dev eth0 table 70000",
        "-6 route add fd00:3::/64 via fd00:1::1 dev eth0 table 100",
        "rule add from 10.0.5.7/32 table 100",
    ):
        ip(*words.split())
    ip("tuntap", "add", "vmtap0", "mode", "tap")

    def state() -> list[str]:
        shown = [
            ip(*words.split()) for words in ("-4 route show table all", "-6 route show table all proto boot", "rule")
        ]
        return [line for text in shown for line in text.splitlines() if "vmbr" not in line]

    before, link = state(), read_eth0()
    bridges = [
        Bridge("vmbr0", "vmtap0", IPv4Interface("169.254.77.1/32"), 1450, MAC, GUEST, link, guest6=link.addresses6[0])
    ]
    try:
        had = build(bridges)
        assert read_eth0() == link, "recorded for the next runner"
        remove(bridges, had)
        assert state() == before
        assert caplog.records == []

        ip("route", "add", "10.5.0.0/16", "dev", "eth0", "tos", "0x10", "src", "10.0.5.7")
        had = build(bridges)
        remove(bridges, had)
    finally:
        ip("link", "delete", "vmtap0")
        ip("rule", "delete", "from", "10.0.5.7/32", "table", "100")
    assert "'eth0' has not got back lost='route 10.5.0.0/16 table 254 unicast tos 16" in caplog.text


async def test_a_foreign_bridge_is_left_alone(fake_host: FakeHost) -> None:
    ip("link", "add", "vmbr0", "type", "bridge")
    try:
        result = await fake_host.run(fake_host.plan("[[network]]\n"))
        assert isinstance(result, HostError)
        assert "a link of that name exists and is not instance-runner's" in str(result)
        assert "vmbr0" in ip("link", "show", "vmbr0")
    finally:
        ip("link", "delete", "vmbr0")
    assert fake_host.faults.sentences == []


async def test_a_tap_that_another_process_holds_is_refused(fake_host: FakeHost) -> None:
    ip("tuntap", "add", "vmtap0", "mode", "tun")
    try:
        result = await fake_host.run(fake_host.plan("[[network]]\n"))
        assert isinstance(result, HostError)
        assert "cannot make the tap interface 'vmtap0'" in str(result)
    finally:
        ip("link", "delete", "vmtap0")


async def test_dnsmasq_answers_only_its_guest(fake_host: FakeHost, pod: str) -> None:
    """On a bridged link there are other hosts: a client with another MAC address gets no answer."""
    del pod
    plan = bridged(fake_host, read_eth0())

    async def ask_as_another_host(host: Supervisor) -> None:
        with trio.fail_after(30):
            while "cont" not in fake_host.commands():
                await trio.sleep(0.01)
        for argv in (
            ("ip", "link", "add", "port", "type", "veth", "peer", "name", "eth0", "netns", "guest"),
            ("ip", "link", "set", "port", "master", "vmbr0", "up"),
            ("ip", "-n", "guest", "link", "set", "eth0", "up"),
        ):
            assert await host.processes.spawn(Command("test", argv)).wait() == 0
        asking = (
            "ip",
            "netns",
            "exec",
            "guest",
            "busybox",
            "udhcpc",
            "-i",
            "eth0",
            "-q",
            "-n",
            "-f",
            "-t",
            "2",
            "-T",
            "1",
            "-s",
            "/bin/true",
        )
        assert await host.processes.spawn(Command("test", asking)).wait() == 1, "no lease"
        assert await host.processes.spawn(Command("test", ("ip", "link", "delete", "port"))).wait() == 0
        fake_host.stop.ask("test")

    result = await fake_host.run(plan, meanwhile=ask_as_another_host)
    assert isinstance(result, GuestEnd), result


def test_dnsmasq_accepts_the_generated_configuration(fake_host: FakeHost) -> None:
    """Dnsmasq knows every option of the generated configuration."""
    for dhcp in fake_host.plan("[[network]]\n[[network]]\n").dhcp:
        argv = [str(shutil.which("dnsmasq")), *dnsmasq_argv(dhcp)[1:], "--test"]
        assert subprocess.run(argv, check=False, capture_output=True).returncode == 0
