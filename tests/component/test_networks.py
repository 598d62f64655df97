"""Every kind of network on real links and with the real dnsmasq; the guest is a network namespace."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import IPv4Interface, ip_address
from pathlib import Path, PurePosixPath
from typing import Any
from unittest.mock import Mock

import attrs
import pytest
import trio

from runner.base.errors import HostError, Status, explain
from runner.instance.parts.qemu import GuestEnd
from runner.instance.supervisor import Supervisor
from runner.kernel import character_devices, network
from runner.kernel.child_processes import Command
from runner.kernel.inherited_fds import probe_descriptor
from runner.plan.instance import InstancePlan
from runner.plan.network_plan import PasstPlan
from tests.support.fake_host import FakeHost

MAC = "52:54:00:00:00:77"
ASK_AGAIN = """
import os, socket, struct, sys
# An INIT-REBOOT request (RFC 2131, 4.3.2) for an address of an earlier lease; the answer's option 53 is ACK (5) or NAK (6).
mac = bytes.fromhex(sys.argv[1].replace(":", ""))
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
    asking.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    asking.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0")
    asking.bind(("", 68))
    asking.settimeout(10)
    head = struct.pack("!BBBBIHH16x16s64x128x", 1, 1, 6, 0, 0x77, 0, 0x8000, mac)
    options = b"\\x63\\x82\\x53\\x63\\x35\\x01\\x03\\x32\\x04" + socket.inet_aton(sys.argv[2]) + b"\\xff"
    asking.sendto(head + options, ("255.255.255.255", 67))
    answer = asking.recv(1500)[240:]
    while answer[0] != 53:
        answer = answer[2 + answer[1] :]
    print({5: "ACK", 6: "NAK"}[answer[2]])
"""

ASK_DHCPV6 = """
import errno, socket, struct, sys, time
# A Solicit for one address (RFC 8415): client identifier, IA_NA, elapsed time; the Advertise's IA_NA holds the address.
mac = bytes.fromhex(sys.argv[1].replace(":", ""))
def option(kind, value):
    return struct.pack("!HH", kind, len(value)) + value
def inside(options, wanted):
    while options:
        kind, length = struct.unpack("!HH", options[:4])
        if kind == wanted:
            return options[4 : 4 + length]
        options = options[4 + length :]
with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as asking:
    asking.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0")
    asking.bind(("", 546))
    asking.settimeout(10)
    question = option(1, b"\\0\\3\\0\\1" + mac) + option(3, struct.pack("!III", 7, 0, 0)) + option(8, bytes(2))
    while True:
        try:
            asking.sendto(b"\\1abc" + question, ("ff02::1:2", 547, 0, socket.if_nametoindex("eth0")))
            break
        except OSError as error:  # eth0's own address is looked at for another owner first (RFC 4862, 5.4)
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            time.sleep(0.05)
    answer = asking.recv(1500)
    address = inside(inside(answer[4:], 3)[12:], 5)[:16]
    print(socket.inet_ntop(socket.AF_INET6, address))
"""


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def guest() -> Iterator[str]:
    """Make the network namespace of a guest."""
    ip("netns", "add", "guest")
    yield "guest"
    ip("netns", "delete", "guest")


@pytest.fixture
def pod() -> Iterator[str]:
    """Make an interface of a pod."""
    ip("link", "add", "eth0", "mtu", "1450", "type", "veth", "peer", "name", "far0")
    ip("link", "set", "eth0", "up")
    ip("link", "set", "far0", "up")
    yield "eth0"
    ip("link", "delete", "eth0")


async def run(host: Supervisor, *argv: str) -> str:
    """Run a program to its end and return its last lines of output."""
    process = host.processes.spawn(Command("test", argv))
    with trio.fail_after(30):
        assert await process.wait() == 0, (argv, list(process.last_lines))
    return "\n".join(process.last_lines)


async def running(fake_host: FakeHost) -> None:
    with trio.fail_after(30):
        while not fake_host.guest_runs():
            await trio.sleep(0.01)


def with_dnsmasq(plan: InstancePlan) -> InstancePlan:
    """Return *plan* with the real dnsmasq."""
    real = PurePosixPath(str(shutil.which("dnsmasq")))
    return attrs.evolve(plan, dhcp=tuple(attrs.evolve(each, program=real, user="nobody") for each in plan.dhcp))


async def test_a_private_network_in_both_families(fake_host: FakeHost, guest: str) -> None:
    """The guest gets its addresses by DHCP and DHCPv6, its router by an advertisement, and a NAK for an old lease."""
    text = f'[[network]]\nmac = "{MAC}"\naddress = "192.168.77.9"\nipv6 = true\nsubnet6 = "fd00:77::/64"\nmtu = 1400\n'
    plan = with_dnsmasq(fake_host.plan(text))
    before = fake_host.snapshot()
    answers: dict[str, Any] = {}

    async def act_as_guest(host: Supervisor) -> None:
        await running(fake_host)
        await run(host, *f"ip link add port type veth peer name eth0 netns {guest} address {MAC}".split())
        await run(host, *["ip", "link", "set", "port", "master", "vmbr0", "up"])
        inside = ("ip", "netns", "exec", guest)
        await run(host, *inside, *["ip", "link", "set", "eth0", "up"])
        script = fake_host.root / "lease.sh"
        script.write_text(f'#!/bin/sh\n[ "$1" = bound ] && env >> {fake_host.root}/lease\nexit 0\n')
        script.chmod(0o755)
        ask = ("-i", "eth0", "-q", "-n", "-f", "-t", "15", "-T", "1", "-s", str(script))
        await run(host, *inside, "busybox", "udhcpc", "-O", "mtu", *ask)
        for address in ("192.168.77.2", "192.168.77.9"):
            answers[address] = await run(host, *inside, sys.executable, "-IS", "-c", ASK_AGAIN, MAC, address)
        with trio.fail_after(30):
            while "proto ra" not in (routes := await run(host, *inside, *["ip", "-6", "route", "show", "default"])):
                await trio.sleep(0.1)
        answers["routes"] = routes
        answers["ipv6"] = await run(host, *inside, sys.executable, "-IS", "-c", ASK_DHCPV6, MAC)
        await run(host, *f"ip -n {guest} -6 address add {answers['ipv6']}/128 dev eth0 nodad".split())
        await run(host, *inside, *["ping", "-6", "-c", "1", "-W", "5", "fd00:77::1"])
        await run(host, *["ip", "link", "delete", "port"])
        fake_host.stop.ask("test")

    result = await fake_host.run(plan, meanwhile=act_as_guest)
    assert isinstance(result, GuestEnd), explain(result)
    assert (answers["192.168.77.2"], answers["192.168.77.9"]) == ("NAK", "ACK")
    assert "mtu 1400" in answers["routes"]
    assert answers["ipv6"] == "fd00:77::2"
    lease = (fake_host.root / "lease").read_text().splitlines()
    assert {"ip=192.168.77.9", "mtu=1400"} <= set(lease)
    for path in (fake_host.root / "lease", fake_host.root / "lease.sh"):
        path.unlink()
    assert fake_host.faults.sentences == []
    assert fake_host.snapshot() == before


async def test_as_many_queues_as_vcpus(fake_host: FakeHost) -> None:
    """QEMU gets a descriptor for each queue of one tap, and the kernel confirms that all belong to it."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a second CPU is missing")
    plan = fake_host.plan("[cpu]\ncount = 2\n[[network]]\n", qemu={"at_cont": "shutdown"})
    before = fake_host.snapshot()
    seen: list[Any] = []

    with character_devices.tap("vmtapX", 3) as taps:
        seen = [probe_descriptor(tap.number) for tap in taps]
    assert [(each.kind, each.interface, each.multi_queue) for each in seen] == 3 * [("tap", "vmtapX", True)]
    with character_devices.tap("vmtapX") as [tap]:
        assert not probe_descriptor(tap.number).multi_queue
    assert isinstance(await fake_host.run(plan), GuestEnd)
    [qemu] = fake_host.records("qemu", "start")
    argv = " ".join(qemu["argv"])
    assert "fds=" in argv
    assert "mq=on,vectors=6" in argv
    assert fake_host.snapshot() == before


@pytest.fixture
def sysfs(tmp_path: Path) -> Iterator[Path]:
    """Mount sysfs as this network namespace has it; /sys shows that of another one."""
    place = tmp_path / "sys"
    place.mkdir()
    subprocess.run(["mount", "-t", "sysfs", "sysfs", place], check=True)
    yield place
    subprocess.run(["umount", place], check=True)
    place.rmdir()


def test_a_macvtap_by_its_descriptors(pod: str, sysfs: Path) -> None:
    link = network.Macvtap("vmtap0", pod, MAC, 1400)
    index = network.add_macvtap(link)
    nodes = set(Path("/dev").iterdir())
    made_within: list[set[Path]] = []

    @contextlib.contextmanager
    def in_pod_cgroup() -> Iterator[None]:
        before = set(Path("/dev").iterdir())
        yield
        made_within.append(set(Path("/dev").iterdir()) - before)

    with character_devices.macvtap("vmtap0", index, 2, sysfs, in_pod_cgroup=in_pod_cgroup) as taps:
        assert [len(made) for made in made_within] == [1]
        found = [probe_descriptor(tap.number) for tap in taps]
        assert [(each.kind, each.interface, each.mac) for each in found] == 2 * [("macvtap", "vmtap0", MAC)]
        assert all(each.multi_queue for each in found)
        assert set(Path("/dev").iterdir()) == nodes, "the node is removed once it is open"
    [shown] = json.loads(ip("-j", "link", "show", "vmtap0"))
    assert (shown["mtu"], shown["ifalias"], shown["link"]) == (1400, "instance-runner", pod)
    assert "UP" in shown["flags"]
    assert network.add_macvtap(link), "the leftovers of a killed runner are removed"
    with pytest.raises(HostError, match="a link of that name exists and is not instance-runner's"):
        network.add_macvtap(attrs.evolve(link, mac="52:54:00:00:00:78"))
    network.remove_macvtap(link)
    network.remove_macvtap(link)
    assert "vmtap0" not in ip("link")
    with pytest.raises(HostError, match="cannot find the network interface 'eth9'"):
        network.add_macvtap(attrs.evolve(link, over="eth9"))


def test_the_device_of_another_macvtap_is_not_taken(pod: str, sysfs: Path) -> None:
    """A device node is found by its numbers; only the open descriptor shows which interface it is."""
    links = [network.Macvtap(f"vmtap{number}", pod, f"52:54:00:00:00:0{number}", 1400) for number in range(2)]
    first, second = map(network.add_macvtap, links)
    tree = sysfs.parent / "tree" / "class" / "net" / "vmtap0" / f"tap{first}"
    tree.mkdir(parents=True)
    (tree / "dev").write_text((sysfs / "class" / "net" / "vmtap1" / f"tap{second}" / "dev").read_text())
    try:
        with (
            pytest.raises(HostError, match="cannot use the macvtap 'vmtap0': its device node is of 'vmtap1'"),
            character_devices.macvtap("vmtap0", first, 1, sysfs.parent / "tree"),
        ):
            pass
    finally:
        for link in links:
            network.remove_macvtap(link)


async def test_the_death_of_passt_ends_the_instance(fake_host: FakeHost) -> None:
    passt = fake_host.program("passt", "fake_daemon.py", dies_after=0.3)
    plan = fake_host.plan("[[network]]\n")
    machine = attrs.evolve(plan.machine, networks=(PasstPlan(MAC, 65520, 1, passt),))
    wire = attrs.evolve(plan, dhcp=(), machine=machine)
    before = fake_host.snapshot()
    result = await fake_host.run(wire)
    assert isinstance(result, GuestEnd), explain(result)
    assert (result.status, result.detail) == (Status.SERVICE_DIED, "passt was killed by SIGALRM")
    [qemu] = fake_host.records("qemu", "start")
    assert any(word.startswith("stream,id=net0,server=off,addr.type=fd,addr.str=") for word in qemu["argv"])
    [started] = fake_host.records("passt", "start")
    assert "--tcp-ports=none" in started["argv"]
    assert fake_host.faults.sentences == []
    assert fake_host.snapshot() == before


def test_permanent_neighbours_and_ipv6_are_restored(pod: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are recorded in the aliases of the interface and of the bridge, because one alias has at most 255 characters."""
    ip("address", "add", "10.0.0.5/24", "dev", pod)
    ip("address", "add", "fd00:1::5/64", "dev", pod, "nodad")
    ip("neighbour", "add", "10.0.0.1", "lladdr", "02:00:00:00:00:01", "dev", pod, "nud", "permanent")
    for number in range(6):
        ip("route", "add", f"fd00:{number + 2}::/64", "via", "fe80::1", "dev", pod)

    def state() -> tuple[str, ...]:
        shown = (
            "-6 address show dev eth0 scope global",
            "-6 route show dev eth0",
            "neighbour show dev eth0 nud permanent",
        )
        return tuple(ip(*words.split()) for words in shown)

    before = state()
    link = network.read_interfaces([pod])[pod]
    assert len(network._alias(link)) > network.LONGEST_ALIAS
    (guest,), address = link.addresses, IPv4Interface("169.254.77.1/32")
    bridge = network.Bridge("vmbr0", "vmtap0", address, 1450, link.mac, guest, link, guest6=link.addresses6[0])
    unreachable = attrs.evolve(link.routes6[0], gateway=ip_address("fd99::1"))
    refused = attrs.evolve(bridge, pod=attrs.evolve(link, routes6=(unreachable,)))
    with character_devices.tap("vmtap0"):
        network.build([bridge])
        assert "fd00:1::5" not in state()[0]
        with pytest.raises(HostError):
            network.remove([refused])
        assert network.read_interfaces([pod])[pod] == link, "another runner could restore it"
        with monkeypatch.context() as patched:
            patched.setattr(network, "forget", Mock(side_effect=HostError("cannot remove the packet filter")))
            with pytest.raises(HostError, match="cannot restore 'eth9': it is gone"):
                network.remove([attrs.evolve(bridge, name="vmbr9", pod=attrs.evolve(link, name="eth9"))])
    network.recover([bridge])
    assert state() == before
    assert network.read_interfaces([pod])[pod] == link


def test_the_addresses_of_others_are_read(pod: str) -> None:
    """A private network must not lie in them; a bridge that a killed runner has left is removed first."""
    ip("address", "add", "192.168.77.40/24", "dev", pod)
    ip("link", "add", "vmbr0", "type", "bridge")
    ip("link", "set", "vmbr0", "alias", "instance-runner")
    ip("address", "add", "192.168.77.1/24", "dev", "vmbr0")
    try:
        found = network.read_addresses()
    finally:
        ip("link", "delete", "vmbr0")
    assert found[pod] == (IPv4Interface("192.168.77.40/24"),)
    assert "vmbr0" not in found


@pytest.mark.parametrize("route", ["10.9.0.0/16,10.0.0.1,", "10.9.0.0/16,10.0.0.1,,0,3,,,254,7"])
def test_a_malformed_alias_is_an_error(pod: str, route: str) -> None:
    ip("link", "set", pod, "alias", f"instance-runner was 02:00:00:00:00:01 1500 10.0.0.5/24 {route}")
    with pytest.raises(HostError, match="is malformed; recreate the pod"):
        network.read_interfaces([pod])


def test_a_route_over_several_gateways_is_seen(pod: str) -> None:
    ip("address", "add", "10.0.0.5/24", "dev", pod)
    ip(
        *[
            "route",
            "add",
            "10.9.0.0/16",
            "nexthop",
            "via",
            "10.0.0.1",
            "dev",
            "eth0",
            "nexthop",
            "via",
            "10.0.0.2",
            "dev",
            "eth0",
        ]
    )
    assert [str(each) for each in network.read_interfaces([pod])[pod].multipath] == ["10.9.0.0/16"]
