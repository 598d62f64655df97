"""Requests to rtnetlink, on real links of the tests' own network namespace; ip(8) shows their effect."""

from __future__ import annotations

import errno
import json
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from typing import Any

import attrs
import pytest

from runner.base.errors import HostError, explain
from runner.facts.network import Route
from runner.kernel import netlink as module
from runner.kernel.netlink import Change, FoundLink, Rtnetlink


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def shown(name: str) -> dict[str, Any]:
    [link] = json.loads(ip("-d", "-j", "address", "show", "dev", name))
    return dict(link)


@pytest.fixture
def rtnetlink() -> Iterator[Rtnetlink]:
    with Rtnetlink() as opened:
        yield opened


@pytest.fixture
def bridge(rtnetlink: Rtnetlink) -> Iterator[FoundLink]:
    rtnetlink.add_bridge("bridge", 1400)
    found = rtnetlink.link("bridge")
    assert found is not None
    yield found
    left = rtnetlink.link("bridge")
    if left is not None:
        rtnetlink.delete_link(left)


def refused(act: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(HostError) as caught:
        act(*arguments)
    assert isinstance(caught.value.__cause__, OSError)
    return explain(caught.value)


def test_a_bridge_is_made_and_deleted(rtnetlink: Rtnetlink, bridge: FoundLink) -> None:
    link = shown("bridge")
    assert bridge == FoundLink(link["ifindex"], "bridge", link["address"], 1400, 0, "", "bridge")
    info = link["linkinfo"]["info_data"]
    assert (info["stp_state"], info["forward_delay"], info["mcast_snooping"]) == (0, 0, 0)
    assert bridge in rtnetlink.links()
    rtnetlink.delete_link(bridge)
    assert rtnetlink.link("bridge") is None
    assert bridge not in rtnetlink.links()


def test_links_are_changed(rtnetlink: Rtnetlink, bridge: FoundLink) -> None:
    ip("link", "add", "left", "type", "veth", "peer", "name", "right")
    try:
        left = rtnetlink.link("left")
        assert left is not None
        assert (left.kind, left.master) == ("veth", 0)
        change = Change(up=True, mac="02:00:00:00:00:07", mtu=1300, master=bridge.index, alias="what it is")
        rtnetlink.set_link(left, change)
        assert rtnetlink.link("left") == FoundLink(
            left.index, "left", "02:00:00:00:00:07", 1300, bridge.index, "what it is", "veth"
        )
        assert "UP" in shown("left")["flags"]
        rtnetlink.set_link(left, Change())
        assert "UP" in shown("left")["flags"], "unnamed attributes are unchanged"
        rtnetlink.set_link(left, Change(up=False, master=0, alias=""))
        assert rtnetlink.link("left") == FoundLink(left.index, "left", "02:00:00:00:00:07", 1300, 0, "", "veth")
        assert "UP" not in shown("left")["flags"]
        assert "ifalias" not in shown("left"), "cleared, not empty"
    finally:
        ip("link", "delete", "left")


def test_a_link_is_found_by_its_own_name_only(rtnetlink: Rtnetlink, bridge: FoundLink) -> None:
    ip("link", "property", "add", "dev", bridge.name, "altname", "other")
    assert rtnetlink.link("other") is None
    assert rtnetlink.link("missing") is None


def test_addresses(rtnetlink: Rtnetlink, bridge: FoundLink) -> None:
    first, second = IPv4Interface("10.1.2.3/24"), IPv4Interface("169.254.77.1/32")
    assert rtnetlink.addresses(bridge) == ()
    rtnetlink.add_address(bridge, first)
    assert refused(rtnetlink.add_address, bridge, first).startswith(
        "cannot give 'bridge' the address 10.1.2.3/24: File exists"
    )
    rtnetlink.replace_address(bridge, first)
    rtnetlink.replace_address(bridge, second)
    assert rtnetlink.addresses(bridge) == (first, second)
    listed = [(each["local"], each["prefixlen"]) for each in shown("bridge")["addr_info"] if each["family"] == "inet"]
    assert listed == [("10.1.2.3", 24), ("169.254.77.1", 32)]
    rtnetlink.delete_address(bridge, first)
    assert rtnetlink.addresses(bridge) == (second,)
    assert "Cannot assign requested address" in refused(rtnetlink.delete_address, bridge, first)


def test_addresses_are_those_of_one_link_and_our_end(rtnetlink: Rtnetlink, bridge: FoundLink) -> None:
    ip("address", "add", "10.1.1.1", "peer", "10.1.1.2/32", "dev", "bridge")
    ip("link", "add", "other", "type", "bridge")
    try:
        ip("address", "add", "10.9.9.9/32", "dev", "other")
        assert rtnetlink.addresses(bridge) == (IPv4Interface("10.1.1.1/32"),)
    finally:
        ip("link", "delete", "other")


def test_routes(rtnetlink: Rtnetlink, bridge: FoundLink) -> None:
    rtnetlink.replace_address(bridge, IPv4Interface("10.1.2.3/24"))
    rtnetlink.set_link(bridge, Change(up=True))
    [own] = rtnetlink.routes(bridge)
    assert own == Route(IPv4Network("10.1.2.0/24"), source=IPv4Address("10.1.2.3"), protocol=2)
    wanted = (
        Route(IPv4Network("0.0.0.0/0"), IPv4Address("10.1.2.1")),
        Route(IPv4Network("10.5.0.0/16"), source=IPv4Address("10.1.2.3"), metric=7, protocol=4),
        Route(IPv4Network("10.6.0.0/16"), IPv4Address("192.0.2.1"), onlink=True),
    )
    for route in wanted:
        rtnetlink.replace_route(bridge, route)
        rtnetlink.replace_route(bridge, route)
    others = [Route(IPv4Network("10.7.0.0/16"), table=table) for table in (77, 255 << 8)]
    ip("route", "add", "10.7.0.0/16", "dev", "bridge", "table", "77")
    rtnetlink.replace_route(bridge, others[1])
    assert sorted(rtnetlink.routes(bridge), key=str) == sorted((own, *wanted, *others), key=str)
    moved = attrs.evolve(wanted[0], gateway=IPv4Address("10.1.2.2"))
    rtnetlink.replace_route(bridge, moved)
    assert moved in rtnetlink.routes(bridge)
    assert wanted[0] not in rtnetlink.routes(bridge)
    assert json.loads(ip("-j", "route", "show", "default"))[0]["gateway"] == "10.1.2.2"


def test_metrics_that_pyroute2_does_not_know_are_restored(rtnetlink: Rtnetlink, bridge: FoundLink) -> None:
    rtnetlink.set_link(bridge, Change(up=True))
    wanted = ("10.6.0.0/16", "mtu", "lock", "1300", "fastopen_no_cookie", "1")  # RTAX_FASTOPEN_NO_COOKIE: Linux 4.15
    ip("route", "add", *wanted, "dev", "bridge")
    before = ip("-d", "-j", "route", "show", "dev", "bridge", "10.6.0.0/16")
    assert "fastopen_no_cookie" in before
    [route] = [each for each in rtnetlink.routes(bridge) if str(each) == "10.6.0.0/16"]
    ip("route", "delete", "10.6.0.0/16", "dev", "bridge")
    rtnetlink.replace_route(bridge, route)
    assert ip("-d", "-j", "route", "show", "dev", "bridge", "10.6.0.0/16") == before


def test_errors_have_the_kernels_reason(rtnetlink: Rtnetlink, bridge: FoundLink) -> None:
    assert refused(rtnetlink.add_bridge, "bridge", 1500) == "cannot make the bridge 'bridge': File exists"
    gone = attrs.evolve(bridge, index=1 << 20, name="gone")
    assert refused(rtnetlink.set_link, gone, Change(mtu=1400)) == (
        "cannot set mtu 1400 of the network interface 'gone': No such device"
    )
    assert refused(rtnetlink.delete_link, gone).endswith("'gone': No such device")
    assert refused(rtnetlink.addresses, gone) == "cannot read the addresses of 'gone': No such device"
    assert refused(rtnetlink.routes, gone) == "cannot read the routes of 'gone': No such device"
    assert "Numerical result out of range" in refused(rtnetlink.set_link, bridge, Change(alias="x" * 256))
    rtnetlink.set_link(bridge, Change(alias="x" * 255))
    unreachable = Route(IPv4Network("0.0.0.0/0"), IPv4Address("10.9.9.9"))
    assert refused(rtnetlink.replace_route, bridge, unreachable).startswith(
        "cannot put the route 0.0.0.0/0 via 10.9.9.9 through 'bridge': Network is"
    )
    assert refused(rtnetlink.set_link, bridge, Change(mtu=10)).endswith(
        "Invalid argument: mtu less than device minimum"  # the kernel's extended acknowledgement
    )


def test_a_dump_of_many_links(rtnetlink: Rtnetlink) -> None:
    pairs = range(150)
    adds = (f"link add left{n} group 9 alias {'x' * 250} type veth peer name right{n}\n" for n in pairs)
    try:
        subprocess.run(["ip", "-batch", "-"], check=True, text=True, input="".join(adds))
        names = [link.name for link in rtnetlink.links()]
        assert {f"{end}{n}" for n in pairs for end in ("left", "right")} <= set(names)
        assert len(names) == len(set(names))
    finally:
        ip("link", "delete", "group", "9")  # all at once: one by one takes the kernel ten seconds


def test_a_dump_while_links_come_and_go(rtnetlink: Rtnetlink, bridge: FoundLink) -> None:
    """Every dump is consistent: an interrupted one is read again."""
    stay = {bridge.name, "lo"}
    over = threading.Event()

    def churn() -> None:
        with Rtnetlink() as other:
            while not over.is_set():
                other.add_bridge("churn", 1500)
                link = other.link("churn")
                assert link is not None
                other.delete_link(link)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(200):
            names = [link.name for link in rtnetlink.links()]
            assert stay <= set(names)
            assert len(names) == len(set(names))
    finally:
        over.set()
        thread.join()


class Kernel:
    """A fake netlink socket whose answers a test gives."""

    def __init__(self, *datagrams: tuple[bytes, int] | OSError) -> None:
        self._datagrams = list(datagrams)
        self.asked = 0

    def sendto(self, _data: bytes, _address: tuple[int, int]) -> None:
        self.asked += 1

    def recvmsg(self, _size: int) -> tuple[bytes, list[object], int, tuple[int, int]]:
        datagram = self._datagrams.pop(0)
        if isinstance(datagram, OSError):
            raise datagram
        return datagram[0], [], 0, (datagram[1], 0)

    def close(self) -> None:
        pass


FakeKernel = Callable[..., Kernel]


def message(kind: int, sequence: int, body: bytes = bytes(4), flags: int = 0) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, flags, sequence, 0) + body


@pytest.fixture
def fake_kernel(rtnetlink: Rtnetlink, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKernel]:
    """Yield a function that replaces the socket by a fake one with the given answers."""

    def answer(*datagrams: tuple[bytes, int] | OSError) -> Kernel:
        kernel = Kernel(*datagrams)
        monkeypatch.setattr(rtnetlink, "_socket", kernel)
        return kernel

    with rtnetlink._socket:
        yield answer


def test_an_interrupted_dump_is_repeated_a_limited_number_of_times(
    rtnetlink: Rtnetlink, fake_kernel: FakeKernel
) -> None:
    interrupted = [(message(3, number, flags=0x10), 0) for number in range(1, 11)]
    kernel = fake_kernel(*interrupted[:2], (message(3, 3), 0))
    assert rtnetlink.links() == []
    assert kernel.asked == 3
    rtnetlink._sequence = 0
    fake_kernel(*interrupted)
    assert "it changed each of the 10 times it was read" in refused(rtnetlink.links)


def test_a_lost_answer_times_out_and_a_late_one_is_not_taken_for_another(
    rtnetlink: Rtnetlink, fake_kernel: FakeKernel
) -> None:
    late = struct.pack("=i", -errno.EPERM)
    fake_kernel(
        BlockingIOError(errno.EAGAIN, ""), (message(2, 1, late), 0), (message(2, 2, late), 4711), (message(2, 2), 0)
    )
    assert refused(rtnetlink.add_bridge, "bridge", 1500).endswith(f"no answer within {module.ANSWERED_WITHIN} s")
    rtnetlink.add_bridge("bridge", 1500)  # its answer is the fourth: the second is late, the third is not the kernel's


def test_a_malformed_answer_is_an_error_like_others(rtnetlink: Rtnetlink, fake_kernel: FakeKernel) -> None:
    """A release records errors of the host; another exception would end it."""
    fake_kernel((message(16, 1, b"\0\0"), 0))
    assert "cannot read the network interfaces: the answer is malformed" in refused(rtnetlink.links)


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


LINK = FoundLink(1, "lo", "", 65536, 0, "", "")
ADDRESS = struct.pack("=BBBBi", socket.AF_INET, 24, 0x80, 0, 1)
ROUTE = struct.pack("=BBBBBBBBI", socket.AF_INET, 24, 0, 0, 254, 3, 0, 1, 0)
NEIGHBOUR = struct.pack("=BxxxiHBB", socket.AF_INET, 1, 0x80, 0, 1)


@pytest.mark.parametrize(
    ("ask", "answers", "what"),
    [
        (lambda netlink: netlink.links(), [(16, bytes(16))], "read the network interfaces"),
        (lambda netlink: netlink.links(), [(16, bytes(16) + attribute(4, b""))], "read the network interfaces"),
        (lambda netlink: netlink.link("lo"), [], "look for the network interface 'lo'"),
        (
            lambda netlink: netlink.link("lo"),
            [(16, bytes(16) + attribute(3, b"lo\0"))] * 2,
            "look for the network interface",
        ),
        (lambda netlink: netlink.addresses(LINK), [(20, ADDRESS)], "read the addresses of 'lo'"),
        (
            lambda netlink: netlink.addresses(LINK),
            [(20, ADDRESS + attribute(2, b"\x01"))],
            "read the addresses of 'lo'",
        ),
        (lambda netlink: netlink.addresses6(LINK), [(20, ADDRESS)], "read the addresses of 'lo'"),
        (lambda netlink: netlink.has_broadcast(LINK), [(20, b"\x02")], "read the addresses of 'lo'"),
        (
            lambda netlink: netlink.neighbours(LINK),
            [(28, NEIGHBOUR + attribute(2, bytes(6)))],
            "read the neighbours of 'lo'",
        ),
        (
            lambda netlink: netlink.routes(LINK),
            [(24, ROUTE + attribute(4, struct.pack("=I", 1)) + attribute(1, bytes([10, 0, 0, 9])))],
            "read the routes of 'lo'",
        ),
        (lambda netlink: netlink.multipath(LINK), [(24, ROUTE + attribute(9, b"\x01"))], "read the routes of 'lo'"),
    ],
)
def test_an_answer_that_lacks_something_is_an_error_like_others(
    rtnetlink: Rtnetlink,
    fake_kernel: FakeKernel,
    ask: Callable[[Rtnetlink], object],
    answers: list[tuple[int, bytes]],
    what: str,
) -> None:
    """A name, an address, another one of the two that were asked for; or an attribute is of another length."""
    fake_kernel(*((message(kind, 1, body), 0) for kind, body in answers), (message(3, 1), 0))
    assert f"cannot {what}" in (sentence := refused(ask, rtnetlink))
    assert "the answer is malformed" in sentence


def test_an_endless_answer_is_given_up(rtnetlink: Rtnetlink) -> None:
    with Rtnetlink() as opened, pytest.raises(TimeoutError):
        list(opened._receive(module._LinkMessage))
    del rtnetlink
