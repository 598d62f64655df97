"""The device filter of the controller's tree on a real kernel: what a process in float may make and open, and for how long."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.node.cgroups import until
from tests.node.instances import FLOAT, PROJECT_MANIFEST, TREE, Controller, gone
from tests.node.standin_kubelet import PROJECT, Kubelet

TRY = """
import json, os, stat, sys
def outcome(act):
    try:
        act()
    except OSError as error:
        return error.strerror
    return "done"
def make(kind, number):
    os.mknod(f"/dev/made-{os.getpid()}", kind | 0o600, number)
    os.unlink(f"/dev/made-{os.getpid()}")
disk = os.stat(sys.argv[1]).st_rdev
found = {"make a disk": outcome(lambda: make(stat.S_IFBLK, disk)),
         "make a null": outcome(lambda: make(stat.S_IFCHR, os.makedev(1, 3))),
         "read the disk": outcome(lambda: os.open(sys.argv[1], os.O_RDONLY)),
         "write the disk": outcome(lambda: os.open(sys.argv[1], os.O_WRONLY))}
for path in ("null", "urandom", "ptmx", "net/tun", "vhost-net", "kmsg", "loop-control", "vhost-vsock", *sys.argv[2:]):
    found[path] = outcome(lambda: os.open(f"/dev/{path}", os.O_RDWR))
print(json.dumps(found))
"""
REFUSED = "Operation not permitted"
IN_FLOAT = {
    **dict.fromkeys(("make a disk", "make a null", "read the disk", "write the disk"), REFUSED),
    **dict.fromkeys(("kmsg", "loop-control", "vhost-vsock"), REFUSED),
    **dict.fromkeys(("null", "urandom", "ptmx", "net/tun", "vhost-net"), "done"),
}
POWERLESS = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[str]:
    """Hold a block device."""
    (tmp_path / "disk").write_bytes(bytes(1 << 20))
    add = ["losetup", "--find", "--show", str(tmp_path / "disk")]
    name = subprocess.run(add, check=True, capture_output=True, text=True).stdout.strip()
    yield name
    subprocess.run(["losetup", "--detach", name], check=True)


def attempts(disk: str, *prefix: str, inside: bool = True, more: tuple[str, ...] = ()) -> dict[str, str]:
    """Return what happens to a process, in float or outside of the tree, that makes and opens devices."""
    argv = (*(FLOAT.entering() if inside else ()), *prefix, sys.executable, "-c", TRY, disk, *more)
    found: dict[str, str] = json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout)
    return found


def status(controller: Controller) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(controller.socket))
        connection.sendall(b'{"jsonrpc": "2.0", "method": "getStatus", "id": 1}\n')
        with connection.makefile("rb") as answer:
            result: dict[str, Any] = json.loads(answer.readline())["result"]
            return result


@pytest.mark.gate
def test_a_process_in_float_makes_no_device_and_opens_no_disk(controller: Controller, disk: str) -> None:
    assert set(attempts(disk, inside=False).values()) == {"done"}, "outside of the tree nothing changes"
    assert attempts(disk) == IN_FLOAT, "whatever it may do"
    assert attempts(disk, *POWERLESS) == IN_FLOAT, "and a node that is there does not help"
    controller.kill()
    assert attempts(disk) == IN_FLOAT, "the filter stays"


def test_each_start_replaces_the_filter(controller: Controller, disk: str) -> None:
    restarted(controller, "--allow-device", "b 7:* r", "--allow-device", "c 1:11 rw")
    assert attempts(disk) == {**IN_FLOAT, "read the disk": "done", "kmsg": "done"}
    assert status(controller)["faults"] == []
    restarted(controller)
    assert attempts(disk) == IN_FLOAT


@pytest.fixture
def macvtap() -> Iterator[tuple[str, int]]:
    """Hold a macvtap, of which there is a node in /dev, and return its name and index."""
    name = "vmtap9"
    ip = partial(subprocess.run, check=True)
    ip(["ip", "link", "add", "under9", "type", "veth", "peer", "name", "far9"])
    try:
        ip(["ip", "link", "add", "link", "under9", "name", name, "type", "macvtap", "mode", "bridge"])
        interface = Path("/sys/class/net", name)
        index = int((interface / "ifindex").read_text())
        major, minor = map(int, (interface / f"tap{index}" / "dev").read_text().split(":"))
        with contextlib.suppress(FileExistsError):  # devtmpfs has made it
            os.mknod(f"/dev/tap{index}", stat.S_IFCHR | 0o600, os.makedev(major, minor))
        yield name, index
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"/dev/tap{index}")  # noqa: PTH108 - as it was made
    finally:
        ip(["ip", "link", "delete", "under9"])


OPEN_MACVTAP = """
import contextlib, sys
from pathlib import Path
from runner.kernel.character_devices import macvtap
@contextlib.contextmanager
def in_pod_cgroup():
    own = Path("/sys/fs/cgroup" + Path("/proc/self/cgroup").read_text().split("0::")[1].strip())
    Path(sys.argv[3], "cgroup.procs").write_text("0")
    yield
    (own / "cgroup.procs").write_text("0")
with macvtap(sys.argv[1], int(sys.argv[2]), 1, in_pod_cgroup=in_pod_cgroup) as [tap]:
    print("opened", Path("/proc/self/cgroup").read_text())
"""


def test_a_macvtap_is_opened_in_the_pods_cgroup_and_in_float_where_that_is_allowed(
    controller: Controller, disk: str, macvtap: tuple[str, int]
) -> None:
    """Which macvtap is whose, no device filter knows: in float none is anybody's."""
    name, index = macvtap
    tap = f"tap{index}"
    assert attempts(disk, inside=False, more=(tap,))[tap] == "done"
    assert attempts(disk, more=(tap,)) == {**IN_FLOAT, tap: REFUSED}
    outside = "/sys/fs/cgroup"  # as a container's cgroup whose filter lets it use the device
    argv = (*FLOAT.entering(), sys.executable, "-c", OPEN_MACVTAP, name, str(index), outside)
    found = subprocess.run(argv, cwd=PROJECT, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert found.startswith(f"opened 0::{FLOAT}"), "where the container may use it, float's filter is not asked"
    restarted(controller, "--allow-macvtap")
    assert attempts(disk, more=(tap,)) == {**IN_FLOAT, tap: "done"}
    restarted(controller)
    assert attempts(disk, more=(tap,)) == {**IN_FLOAT, tap: REFUSED}


def restarted(controller: Controller, *more: str) -> None:
    controller.kill()
    arguments = controller.arguments
    controller.arguments = (*arguments, *more)
    controller.start()
    controller.arguments = arguments


def test_a_tree_that_was_made_anew_is_noticed(controller: Controller, disk: str) -> None:
    assert controller.process is not None
    controller.process.send_signal(signal.SIGSTOP)
    assert controller.bystander is not None
    controller.bystander.end()
    until(lambda: gone(TREE), "the tree to be removed")
    controller.process.send_signal(signal.SIGCONT)
    until(TREE.path.exists, "the controller to make the tree again")
    controller.put_bystander()
    assert attempts(disk)["read the disk"] == "done"
    assert any("was removed, and its device filter with it" in fault for fault in status(controller)["faults"])
    restarted(controller)
    assert status(controller)["faults"] == []
    assert attempts(disk) == IN_FLOAT


def capabilities_of_the_daemon_set() -> list[str]:
    """Return the capabilities that the manifest adds to none."""
    text = PROJECT_MANIFEST.read_text()
    assert "drop: [ALL]" in text
    [added] = re.findall(r"add: \[(.*)\]", text)
    return [f"+{name.strip().lower()}" for name in added.split(",")]


@pytest.mark.parametrize("lacking", ["", pytest.param("+sys_admin", marks=pytest.mark.node_only)])
def test_the_capabilities_of_the_daemon_set_suffice_and_are_given_away(
    kubelet: Kubelet, tmp_path: Path, disk: str, lacking: str
) -> None:
    given = ",".join(["-all", *(name for name in capabilities_of_the_daemon_set() if name != lacking)])
    controller = Controller(kubelet, tmp_path / "sockets")
    # With SYS_ADMIN it starts in a cgroup namespace of its own, as a container does; without, it could not leave that.
    namespace = () if lacking else ("unshare", "--cgroup")
    controller.prefix = (*namespace, "setpriv", f"--bounding-set={given}", "--inh-caps=-all")
    try:
        controller.start()
        assert controller.process is not None
        process = Path(f"/proc/{controller.process.pid}")
        kept = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
        left = f"{1 << 1 | 1 << 23 | 1 << 24:016x}"
        assert (kept["CapEff"], kept["CapPrm"], kept["CapInh"]) == (left, left, f"{0:016x}")
        assert kept["NoNewPrivs"] == "1"
        assert os.readlink(process / "ns" / "cgroup") == os.readlink("/proc/1/ns/cgroup")  # noqa: PTH115 - magic links
        if lacking:
            [fault] = status(controller)["faults"]
            assert "cannot attach the device filter" in fault
            assert status(controller)["remedies"] == {fault: "it takes CAP_SYS_ADMIN"}
        else:
            assert status(controller)["faults"] == []
            assert attempts(disk) == IN_FLOAT
    finally:
        print(controller.log.read_text())
        controller.end()
