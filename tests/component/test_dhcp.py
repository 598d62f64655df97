"""The limits of DHCP that the plan knows, tried on the real dnsmasq and a real client."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from pathlib import Path, PurePosixPath

import attrs
import pytest

from runner.facts.host import Resolver
from runner.facts.network import Interface, Route
from runner.instance.parts.links import AddressWatch
from runner.plan import dhcp
from runner.plan.argv.networks import DNSMASQ_UP, dnsmasq_argv
from runner.plan.instance import InstancePlan
from tests.support.plans import FACTS, KERNEL, plan_of

MAC = "0a:58:0a:f4:01:05"
DNSMASQ = PurePosixPath(str(shutil.which("dnsmasq")))


def accepts(*options: str) -> bool:
    argv = [str(DNSMASQ), "--test", "--conf-file=/dev/null", "--no-resolv", *options]
    return subprocess.run(argv, check=False, capture_output=True).returncode == 0


def names(size: int) -> tuple[str, ...]:
    """Return search domains, the first of one letter, that take *size* bytes of the option."""
    found, rest = ["d"], size - 3
    while rest:
        taken = min(rest, 42) - (3 if 0 < rest - 42 < 3 else 0)
        found.append(f"{len(found)}".rjust(taken - 2, "n"))
        rest -= taken
    assert dhcp.search_bytes(found) == size
    return tuple(found)


def test_an_option_of_255_bytes_is_the_longest() -> None:
    for size, fine in ((dhcp.LONGEST_OPTION, True), (dhcp.LONGEST_OPTION + 1, False)):
        assert accepts("--dhcp-option=option:domain-search," + ",".join(names(size))) is fine
    routes = [Route(IPv4Network(f"172.16.{each}.0/24"), IPv4Address("10.9.0.7")) for each in range(32)]
    for number, fine in ((31, True), (32, False)):
        text = ",".join(f"{each.destination},{each.gateway}" for each in routes[:number])
        assert accepts(f"--dhcp-option=option:classless-static-route,{text}") is fine
        assert (dhcp.routes_bytes(routes[:number]) <= dhcp.LONGEST_OPTION) is fine
    for number, fine in ((dhcp.MOST_SERVERS, True), (dhcp.MOST_SERVERS + 1, False)):
        assert accepts("--dhcp-option=option:dns-server" + number * ",10.0.0.1") is fine


def test_the_end_of_a_name_that_was_there_before_takes_two_bytes() -> None:
    """The border is where the plan counts it, so dnsmasq compresses as it does."""
    domains = tuple(f"n{number:03}.svc.cluster.local" for number in range(60))
    most = max(number for number in range(60) if dhcp.search_bytes(domains[:number]) <= dhcp.LONGEST_OPTION)
    assert most == 34
    assert accepts("--dhcp-option=option:domain-search," + ",".join(domains[:most]))
    assert not accepts("--dhcp-option=option:domain-search," + ",".join(domains[: most + 1]))


@pytest.mark.parametrize("name", ["a" * 63 + ".b", "a" * 64 + ".b", "_x.y.", "114.114.114.114", "DHCP"])
def test_dnsmasq_takes_a_domain_that_the_plan_takes(name: str) -> None:
    assert accepts(f"--dhcp-option=option:domain-search,{name}") is dhcp.is_domain(name)


def plan(search: tuple[str, ...], routes: int) -> InstancePlan:
    to = (Route(IPv4Network(f"172.16.{each}.0/24"), IPv4Address("10.9.0.7")) for each in range(routes))
    pod = Interface(
        "eth0",
        MAC,
        1450,
        (IPv4Interface("10.9.0.5/24"),),
        (Route(IPv4Network("0.0.0.0/0"), IPv4Address("10.9.0.1")), *to),
    )
    facts = attrs.evolve(
        FACTS,
        dnsmasq=DNSMASQ,
        users={},
        interfaces={"eth0": pod},
        resolver=Resolver((IPv4Address("10.96.0.10"),), search),
    )
    return plan_of(KERNEL + '[[network]]\nmode = "bridge"\n', facts)


@pytest.fixture
def link() -> Iterator[None]:
    """Make the bridge's end of a link, and the guest's in the namespace `guest`."""
    for words in (
        "netns add guest",
        f"link add name vmbr0 type veth peer name eth0 address {MAC} netns guest",
        "link set vmbr0 up",
        "address add 169.254.77.1/32 dev vmbr0",
        "-n guest link set eth0 up",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    yield
    subprocess.run(["ip", "link", "delete", "vmbr0"], check=True)
    subprocess.run(["ip", "netns", "delete", "guest"], check=True)


@contextmanager
def serving(argv: list[str]) -> Iterator[list[str]]:
    """Run dnsmasq once it has said that it serves; yield a list that has its other lines at the end."""
    output = list[str]()
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env={**os.environ, "LC_ALL": "C"}) as dnsmasq:
        assert dnsmasq.stderr is not None
        try:
            assert any(DNSMASQ_UP in line for line in dnsmasq.stderr)
            yield output
        finally:
            dnsmasq.terminate()
            output += dnsmasq.stderr.read().splitlines()


def ask(options: str, *more: str) -> None:
    asking = ["busybox", "udhcpc", "-i", "eth0", "-q", "-n", "-f", "-T", "1", *options.split(), *more]
    subprocess.run(["ip", "netns", "exec", "guest", *asking], check=True, capture_output=True)


def lease(tmp_path: Path) -> dict[str, str]:
    """Ask for a lease as udhcpc does, which takes replies of 576 bytes, and return its variables."""
    script = tmp_path / "lease"
    script.write_text(f'#!/bin/sh\n[ "$1" = bound ] && env >{tmp_path}/found\nexit 0\n')
    script.chmod(0o755)
    ask("-t 10 -O mtu -O staticroutes -O search -O domain -s", str(script))
    pairs = (line.partition("=") for line in (tmp_path / "found").read_text().splitlines())
    return {name: value for name, _, value in pairs}


@pytest.mark.usefixtures("link")
@pytest.mark.parametrize(("extra", "fits"), [(0, True), (20, False)])
def test_a_short_reply_has_room_for_what_the_plan_says(tmp_path: Path, extra: int, *, fits: bool) -> None:
    """With more, dnsmasq leaves out the search domains, and never the routes, the router, the servers or the MTU."""
    routes = 3
    size = dhcp.SHORT_REPLY + extra - (2 + 5 + 8 * routes) - (2 + 4) - (2 + 4) - (2 + 2) - (2 + 1) - 2
    found = plan(names(size), routes)
    assert any("may get no search domains" in str(remark) for remark in found.remarks) is not fits
    with serving(dnsmasq_argv(found.dhcp[0])):
        got = lease(tmp_path)
    assert (got["ip"], got["router"], got["dns"], got["mtu"]) == ("10.9.0.5", "10.9.0.1", "10.96.0.10", "1450")
    assert len(got["staticroutes"].split()) == 2 * (routes + 1)
    assert ("search" in got) is fits


@pytest.mark.usefixtures("link")
def test_what_dnsmasq_says_of_a_guest_without_an_address() -> None:
    """Another machine has the address: the guest declines it, and dnsmasq does not offer it again for 10 minutes."""
    found, reasons = plan(("a.example",), 1), list[str]()
    network = found.dhcp[0].network
    watch = AddressWatch(network, lambda bridge, reason: reasons.append(f"{bridge} {reason}"))
    with serving(dnsmasq_argv(found.dhcp[0])) as output:
        ask("-t 2 -s /bin/true")
    for line in output:
        watch.read(f"dnsmasq: {line}")
    assert reasons == ["vmbr0 "]
    for line in (
        f"dnsmasq-dhcp[7]: DHCPDECLINE(vmbr0) {network.guest.ip} {network.mac} ",  # as dnsmasq 2.90 has said it
        f"dnsmasq-dhcp[7]: DHCPDISCOVER(vmbr0) {network.mac} no address available",
    ):
        watch.read(line)
        assert "it has declined 10.9.0.5, which another machine of its network answers for" in reasons.pop()
