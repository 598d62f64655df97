"""Networks of every kind at once with QEMU 10, and a tap that another process has opened."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import pytest

from runner.kernel import character_devices
from runner.plan.argv.networks import passt_argv
from runner.plan.memory import FORWARDED_PORT, PASST
from runner.plan.network_plan import EVERY, PasstPlan
from tests.node.cgroups import until
from tests.node.instances import NodeFixture, members_of, uid_of
from tests.node.test_runner import NAMESPACES, PROJECT, ROM, RUNNER

UP_WITHIN = 120
"""Seconds, on a busy machine."""
EXAMPLE = PROJECT / "examples" / "instances" / "two-nics.toml"
POD = """
set -e
mount -t sysfs sysfs /sys && mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs tmpfs /run && mkdir /run/netns
ip netns add far
ip link set lo up
for name in eth0 net1; do
  ip link add $name type veth peer name $name netns far
  ip link set $name up
  ip -n far link set $name up
done
ip link set eth0 address 0a:58:0a:f4:01:05
ip address add 10.244.1.5/24 dev eth0
ip address add fd00:244::5/64 dev eth0 nodad
ip address add 10.1.0.5/24 dev net1
ip route add default via 10.1.0.1
ip -n far address add 10.1.0.1/24 dev net1
ip netns exec far dnsmasq -k -C /dev/null -p 0 -i net1 -z --dhcp-range=10.1.0.77,10.1.0.77 -l /run/leases --no-ping &
while ip address show dev eth0 | grep -q tentative; do sleep 0.1; done # until duplicate address detection is over
ip -j address show dev eth0 >$1/before
"${@:2}" &
runner=$!
trap 'kill -TERM $runner' TERM
wait $runner || wait $runner && status=0 || status=$?
ip -j address show dev eth0 >$1/after
ip link >$1/links
exit $status
"""
"""A pod with two interfaces; a DHCP server is in the network of the second one."""


@pytest.fixture
def outcome(tmp_path: Path) -> Iterator[Callable[[Path], tuple[subprocess.Popen[bytes], Callable[[], str]]]]:
    """Start the runner in such a pod; it ends with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(spec: Path) -> tuple[subprocess.Popen[bytes], Callable[[], str]]:
        output = tmp_path / "output"
        run = (*RUNNER, "run", "--not-pid1", "--log-level", "debug", "--state-dir", tmp_path / "state", spec)
        argv = (*NAMESPACES, "bash", "-c", POD, "pod", tmp_path, *run)
        with output.open("wb") as log:
            started.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        return started[0], lambda: output.read_text(errors="replace")

    yield start
    for process in started:
        process.kill()
        process.wait()
        print((tmp_path / "output").read_text(errors="replace"))


@pytest.mark.usefixtures("rom")
@pytest.mark.node_only
def test_a_machine_with_a_network_of_every_kind(
    tmp_path: Path, outcome: Callable[[Path], tuple[subprocess.Popen[bytes], Callable[[], str]]]
) -> None:
    """The example's two, a private one and passt, with QEMU 10 and vhost-net; at the end the pod is as before.

    tests/machine tests what a Linux guest sees of them, because it boots one within seconds.
    """
    text, changed = re.subn(r"\[boot\]\n(\w+ = .*\n)+", f'[boot]\nfirmware = "{ROM}"\n', EXAMPLE.read_text())
    assert changed == 1
    text = text.replace("count = 2\n", 'count = 2\naccel = "tcg"\n').replace("512MiB", "64MiB")
    spec = tmp_path / "spec.toml"
    private = '[[network]]\nipv6 = true\nsubnet6 = "fd00:77::/64"\n'
    spec.write_text(f'{text}{private}[[network]]\nmode = "passt"\n[shutdown]\ngrace = 20\n')

    process, output = outcome(spec)
    until(lambda: "ROM-GUEST-UP" in output() or process.poll() is not None, "the guest to be up", UP_WITHIN)
    assert process.poll() is None, output()
    [qemu] = re.findall(r"role=qemu argv=(.*)", output())
    assert qemu.count("vhostfds=") == 3
    assert qemu.count("mq=on,vectors=6") == 3
    assert re.search("role=passt argv=.*--one-off", output())
    until(lambda: "NETDEV_STREAM_CONNECTED" in output(), "QEMU to have passt's socket")

    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), 15)
    assert process.wait(60) == 0, output()
    assert "ended outcome=stopped status=0 faults=0" in output()
    assert (tmp_path / "after").read_text() == (tmp_path / "before").read_text()
    assert not re.search("vmbr|vmtap", (tmp_path / "links").read_text())


@pytest.mark.usefixtures("rom")
def test_a_tap_inherited_from_the_runtime(node_fixture: NodeFixture) -> None:
    """Inherited through crun's ``--preserve-fds``: only QEMU has it, and no process has it after the instance's end."""
    with character_devices.tap("inherited0") as [tap]:
        environment = {
            "POD_UID": uid_of(1),
            "PYTHONPATH": os.pathsep.join(["/project", *filter(None, sys.path)]),
            "LISTEN_PID": "1",
            "LISTEN_FDS": "1",
            "LISTEN_FDNAMES": "net0",
        }
        more = '[[network]]\nmode = "descriptor"\nfd = "net0"\n'
        instance = node_fixture.start(1, "1", more, environment=environment, descriptors=(tap.number,))
        instance.up()
        assert "inherited descriptor name=net0 kind=the tap 'inherited0'" in instance.running.output
        holders: dict[str, int] = {}
        for pid in members_of(instance.running.pid):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]  # noqa: PTH115 - a magic link
            holders[name] = holders.get(name, 0) + links.count("/dev/net/tun")
        tap.close()
        assert {name: count for name, count in holders.items() if count} == {"qemu-system-x86": 2}
        assert Path("/sys/class/net/inherited0").exists()
        assert instance.stop() == 0
        assert "ended outcome=stopped status=0 faults=0" in instance.running.output
    until(lambda: not Path("/sys/class/net/inherited0").exists(), "the last process to close the tap", 10)


KEPT = 941
EVERY_PORT = f"""
ip link set lo up && ip tuntap add pod mode tap && ip address add 10.9.9.1/24 dev pod && ip link set pod up
ip route add default via 10.9.9.2 && echo 0 >/proc/sys/net/ipv4/ip_unprivileged_port_start
echo "1024 64000" >/proc/sys/net/ipv4/ip_local_port_range # 2558 ports are left, because the emulated kernel is slow
python3 -c 'import socket, sys; kept = socket.create_server(("", {KEPT})); sys.stdin.read()' <&0 &
until grep -q :{KEPT:04X} /proc/net/tcp; do sleep 0.1; done
echo $$ >"$0/cgroup.procs" && exec setpriv --bounding-set=-all,+setuid,+setgid "$@"
"""
"""A pod in which a port is taken; then passt in the cgroup of the first argument."""


def test_every_port_that_is_free_is_passts_and_costs_what_is_planned() -> None:
    group = Path("/sys/fs/cgroup/every-port")
    Path("/sys/fs/cgroup/cgroup.subtree_control").write_text("+memory")
    group.mkdir()
    free = {*range(1, 1024), *range(64_001, 1 << 16)} - {KEPT}
    plan = PasstPlan("02:00:00:00:00:01", 1500, 1, PurePosixPath("passt"), (EVERY,))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        argv = ("unshare", "--net", "bash", "-ec", EVERY_PORT, str(group), *passt_argv(plan, f"--fd={theirs.fileno()}"))
        with subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=(theirs.fileno(),)) as passt:
            table = Path(f"/proc/{passt.pid}/net/tcp")  # the pod has no IPv6

            def listened_at() -> set[int]:
                return {int(each, 16) for each in re.findall(r": \w+:(\w{4}) 0+:0000 0A", table.read_text())}

            until(lambda: passt.poll() is not None or len(listened_at()) > len(free), "passt", 120)
            assert passt.poll() is None
            assert listened_at() == free | {KEPT}
            charged = int((group / "memory.current").read_text())
            ours.close()  # --one-off: it ends with its client
            theirs.close()
            assert passt.wait(60) == 0
    print(f"{len(free)} ports, {charged} bytes")
    assert 3000 * len(free) < charged < PASST + len(free) * FORWARDED_PORT
    until(lambda: not (group / "cgroup.procs").read_text(), "the cgroup to be empty")
    group.rmdir()
