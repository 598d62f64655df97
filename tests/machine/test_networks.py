"""The example with two network interfaces, and a disk as an inherited descriptor, with this machine's QEMU and a real guest."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import pytest

from runner.plan.argv.networks import passt_argv
from runner.plan.network_plan import PasstPlan
from runner.spec.instance import parse_instance
from tests.support.program_runs import PROJECT, ProgramStarter, until

POD = """
mount -t sysfs sysfs /sys && mount -t cgroup2 cgroup2 /sys/fs/cgroup 2>/dev/null
ip link add eth0 address 0a:58:0a:f4:01:05 type veth peer name far0
ip link add net1 type veth peer name far1
for link in lo eth0 far0 net1 far1; do ip link set $link up; done
ip address add 10.244.1.5/24 dev eth0
exec 3<>"$0"
export LISTEN_FDS=1 LISTEN_FDNAMES=disk0 LISTEN_PID=$$
exec "$@"
"""
"""A pod with two interfaces, whose runtime lets the program inherit an open disk (``--preserve-fds``)."""


def test_the_example_with_two_interfaces_and_a_disk_by_its_descriptor(start: ProgramStarter, tmp_path: Path) -> None:
    example = (PROJECT / "examples" / "instances" / "two-nics.toml").read_text()
    text, changed = re.subn(r"\[boot\]\n(\w+ = .*\n)+", "", example)
    assert changed == 1, "the tests use their own guest"
    disk = tmp_path / "disk"
    disk.write_bytes(b"HANDED-OVER".ljust(4096, b"\0"))
    text = text[text.index("[cpu]") :]
    run = start(text + '[[disk]]\nfd = "disk0"\n', inside=("bash", "-c", POD, str(disk)))
    run.until_done()
    assert "guest: address 10.244.1.5/24 mtu 1500" in run.console
    assert "guest: interface eth0 0a:58:0a:f4:01:05 mtu 1500 queues 2" in run.console
    assert re.search("guest: interface eth1 52:54:00:[0-9a-f:]{8} mtu 1400 queues 2", run.console)
    assert "guest: disk vda of 8 sectors beginning with HANDED-OVER" in run.console
    assert "inherited descriptor name=disk0 kind=a file of 4096 bytes" in run.log
    assert run.stop() == 0, run.log
    assert "faults=0" in run.log


POD_NETWORK = """
ip link set lo up && ip tuntap add pod mode tap && ip address add 10.9.9.1/24 dev pod && ip link set pod up
ip route add default via 10.9.9.2
"""
"""An interface that passt can use."""
FORMS = '[22, "8000-8010", "80:8080/tcp", "127.0.0.1/9000-9001:90-91", "53/udp"]'
IN_A_POD = f"""
{POD_NETWORK}echo 0 >/proc/sys/net/ipv4/ip_unprivileged_port_start
exec setpriv --bounding-set=-all,+setuid,+setgid "$@"
"""


def test_passt_takes_the_ports_as_they_are_planned() -> None:
    text = f'[boot]\nkernel = "/k"\n[[network]]\nmode = "passt"\nports = {FORMS}\n'
    forwards = parse_instance("spec", text.encode()).network[0].forwards
    tcp, udp = (tuple(str(each) for each in forwards if each.protocol == protocol) for protocol in ("tcp", "udp"))
    plan = PasstPlan("02:00:00:00:00:01", 1500, 1, PurePosixPath("passt"), tcp, udp)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        argv = ("unshare", "--net", "sh", "-ec", IN_A_POD, "sh", *passt_argv(plan, f"--fd={theirs.fileno()}"))
        with subprocess.Popen(argv, pass_fds=(theirs.fileno(),)) as passt:
            expected = {"tcp": [22, 80, *range(8000, 8011), 9000, 9001], "udp": [53]}

            def listens() -> dict[str, list[int]]:
                return {protocol: listened_at(passt.pid, protocol) for protocol in expected}

            until(lambda: passt.poll() is not None or listens() == expected, "passt")
            assert listens() == expected
            ours.close()  # --one-off: it ends with its client
            theirs.close()
            assert passt.wait(30) == 0


OUTSIDE, GATEWAY = "198.51.100.7", "10.9.9.2"
LISTENING = f"""
{POD_NETWORK}ip address add {OUTSIDE}/32 dev lo
python3 -c '
import socket, time
kept = [socket.create_server((address, 8080)) for address in ("127.0.0.1", "{OUTSIDE}")]
print("up", flush=True)
time.sleep(600)' &
exec "$@"
"""
"""A pod in which two programs listen: one at the loopback address, and one at another address, which the guest may reach."""


def syn(destination: str) -> bytes:
    """Return the frame with which a guest of the pod's address opens a connection to port 8080, in QEMU's stream format."""
    addresses = socket.inet_aton("10.9.9.1") + socket.inet_aton(destination)
    tcp = struct.pack("!HHIIBBHHH", 40000, 8080, 1, 0, 5 << 4, 2, 64240, 0, 0)
    tcp = tcp[:16] + checksum(addresses + struct.pack("!HH", socket.IPPROTO_TCP, len(tcp)) + tcp) + tcp[18:]
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 1, 0, 64, socket.IPPROTO_TCP, 0) + addresses
    ip = ip[:10] + checksum(ip) + ip[12:]
    frame = bytes.fromhex("020000000002 020000000001 0800") + ip + tcp
    return struct.pack("!I", len(frame)) + frame


def checksum(data: bytes) -> bytes:
    """Return the checksum of RFC 1071 of *data*, of an even length."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    return struct.pack("!H", ~(total + total // 0x10000) & 0xFFFF)


def accepting(frames: BinaryIO) -> Iterator[str]:
    """Yield the addresses that accept connections, by the frames that come from passt: those with SYN and ACK (RFC 9293)."""
    while size := frames.read(4):
        frame = frames.read(*struct.unpack("!I", size))
        if frame[12:14] == b"\x08\x00" and frame[23] == socket.IPPROTO_TCP and frame[47] & 18 == 18:
            yield socket.inet_ntoa(frame[26:30])


@pytest.mark.parametrize("reaches", [True, False])
def test_a_guest_of_passt_does_not_reach_what_listens_at_the_pods_loopback_address(*, reaches: bool) -> None:
    plan = PasstPlan("02:00:00:00:00:01", 1500, 1, PurePosixPath("passt"), reaches_loopback=reaches)
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("rb") as frames:
        pod = ("unshare", "--net", "--pid", "--fork", "--kill-child", "sh", "-ec", LISTENING, "sh")
        argv = (*pod, *passt_argv(plan, f"--fd={theirs.fileno()}"))
        with subprocess.Popen(argv, pass_fds=(theirs.fileno(),), stdout=subprocess.PIPE, text=True) as passt:
            try:
                assert passt.stdout is not None
                assert passt.stdout.readline() == "up\n"
                theirs.close()  # the frames end with passt
                ours.sendall(syn(GATEWAY) + syn(OUTSIDE))
                seen = accepting(frames)
                assert {next(seen) for _ in range(1 + reaches)} == ({GATEWAY, OUTSIDE} if reaches else {OUTSIDE})
            finally:
                passt.kill()


def listened_at(pid: int, protocol: str) -> list[int]:
    """Return the ports of the network namespace of *pid* at which there is a socket without a peer."""
    with contextlib.suppress(OSError):  # it has ended
        tables = [Path(f"/proc/{pid}/net/{protocol}{version}").read_text() for version in ("", "6")]
        return sorted({int(port, 16) for each in tables for port in re.findall(r": \w+:(\w{4}) 0+:0000 ", each)})
    return []


LISTEN = f"""
{POD_NETWORK}echo "$1" >/proc/sys/net/ipv4/ip_unprivileged_port_start
exec setpriv --bounding-set=-all,+setuid,+setgid passt --foreground --one-off --tcp-ports=80:80 --udp-ports=none --socket="$2"
"""


@pytest.mark.parametrize("lowest", [80, 81])
def test_passt_listens_where_every_process_may(tmp_path: Path, lowest: int) -> None:
    """Older versions also listen below that with NET_BIND_SERVICE, those of 2026 do not: the plan refuses it."""
    argv = ("unshare", "--net", "sh", "-ec", LISTEN, "sh", str(lowest), str(tmp_path / "socket"))
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(argv, stdout=log, stderr=log) as passt:

        def listens() -> bool:
            with contextlib.suppress(OSError):  # it has ended
                return ":0050 " in Path(f"/proc/{passt.pid}/net/tcp").read_text()
            return False

        def failed() -> bool:
            return "ermission denied" in (output := (tmp_path / "log").read_text()) or "Failed to bind" in output

        try:
            until(lambda: passt.poll() is not None or listens() or failed(), "passt")
            assert (listens(), failed()) == (lowest == 80, lowest != 80), (tmp_path / "log").read_text()
        finally:
            passt.kill()


WITHOUT_NAMESPACES = f"""
{POD_NETWORK}echo "$0" >/proc/sys/user/max_user_namespaces
exec "$@"
"""


@pytest.mark.parametrize("most", [0, 8])
def test_a_passt_that_may_make_no_namespace_is_refused_before_anything_is_started(tmp_path: Path, most: int) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(f'[boot]\nkernel = "{tmp_path}/none"\n[[network]]\nmode = "passt"\n')
    argv = ["unshare", "--user", "--map-root-user", "--net", "sh", "-ec", WITHOUT_NAMESPACES, str(most)]
    argv += [sys.executable, "-m", "runner", "plan", str(spec)]
    done = subprocess.run(argv, cwd=PROJECT, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    refusal = (
        "network[0].mode: passt does not start here: it exited with status 1, saying \"Couldn't create user namespace: No space "
        'left on device"; a user may make 0 user namespaces here: raise user.max_user_namespaces on the node\n'
    )
    assert (refusal in done.stderr) == (most == 0), done.stderr
    assert ("network[0]" in done.stderr) == (most == 0), done.stderr
    assert "boot.kernel" in done.stderr, "it was planned"
