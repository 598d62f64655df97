"""Disks in a pod of the node: a block device, a shared base, one attached later; the threads that serve them are in float."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.base.cpuset import CpuSet
from tests.node.instances import (
    ARRANGED,
    DEVICES,
    Controller,
    Instance,
    spec_text,
    start_instance,
    threads_of,
)
from tests.node.standin_kubelet import PROJECT, Kubelet

pytestmark = pytest.mark.usefixtures("rom")
MIB = 1 << 20


@contextlib.contextmanager
def block_device(file: Path) -> Iterator[str]:
    """Hold a block device of 4 KiB sectors."""
    file.write_bytes(bytes(16 * MIB))
    add = ["losetup", "--find", "--show", "--sector-size", "4096", str(file)]
    name = subprocess.run(add, check=True, capture_output=True, text=True).stdout.strip()
    yield name
    subprocess.run(["losetup", "--detach", name], check=True)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[str]:
    with block_device(tmp_path / "device") as name:
        yield name


@pytest.fixture
def later_device(tmp_path: Path) -> Iterator[str]:
    with block_device(tmp_path / "later-device") as name:
        yield name


OPENED_IN_FLOAT = """
until grep -q /float /proc/self/cgroup; do sleep 0.1; done
head -c 1 "$1" >/dev/null && echo opened "$1"
"""


def ctl(instance: Instance, *arguments: str) -> Any:
    return json.loads(instance.running.execute(sys.executable, "-m", "runner", "ctl", "--json", *arguments))


def iothreads(instance: Instance) -> dict[str, tuple[str, str]]:
    """Return the iothreads of the receipt by name, with cgroup and CPUs."""
    threads = instance.receipt()["threads"]
    return {each["name"]: (each["cgroup"], each["allowed_cpus"]) for each in threads if each["role"] == "iothread"}


@ARRANGED  # so that the sweep brings what is exec'ed into the pod to float
def test_disks_in_a_pod(
    kubelet: Kubelet,
    controller: Controller,
    numa: dict[int, CpuSet],
    device: str,
    later_device: str,
    tmp_path: Path,
) -> None:
    disks = tmp_path / "disks"
    disks.mkdir()
    for name in ("base", "later"):
        (disks / name).write_bytes(b"\1" * (8 * MIB))
    cpus = CpuSet(list(numa[max(numa)])[:2])
    spec = spec_text(
        cpus,
        f'[[disk]]\npath = "{device}"\niothread = true\n[[disk]]\npath = "/disks/base"\nephemeral = true\n',
    ).replace("[cpu]\n", '[cpu]\nplacement = "controller"\n')
    instance = start_instance(
        kubelet,
        1,
        cpus,
        spec=spec,
        directory=tmp_path,
        sockets=controller.directory,
        devices=(*DEVICES, device, later_device),
        more_mounts=[(disks, "/disks", "rw")],
    )
    instance.up()
    instance.is_placed()
    assert {name: (Path(group).parts[-2:], allowed) for name, (group, allowed) in iothreads(instance).items()} == {
        "IO disk0": ((f"instance-{instance.uid}", "float"), str(kubelet.default))
    }

    # The guest sees the device's sector size; QEMU bypasses the page cache and needs no worker threads.
    [qemu] = instance.processes()["qemu"]
    argv = Path(f"/proc/{qemu}/cmdline").read_text().split("\0")
    [block] = [json.loads(word) for word in argv if '"disk0-file"' in word and word.startswith('{"driver": "host')]
    assert (block["driver"], block["cache"], block["aio"]) == ("host_device", {"direct": True}, "native")
    assert any("logical_block_size=4096,physical_block_size=4096" in word for word in argv)

    # On the node, where there is no receipt, it is recognised by its name.
    inspect = (sys.executable, "-m", "runner", "inspect", "--kubelet-dir", str(kubelet.directory), "--json")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    seen = subprocess.run(inspect, check=False, capture_output=True, text=True, cwd=PROJECT, env=environment).stdout
    assert '"role": "iothread"' in seen, seen

    # The thread of a disk that is attached while the guest runs is in float too, also in the receipt.
    assert ctl(instance, "disk", "attach", "/disks/later", "iothread=true", "serial=later")["name"] == "disk2"
    instance.is_placed()
    assert set(iothreads(instance)) == {"IO disk0", "IO disk2"}
    assert {allowed for _, allowed in iothreads(instance).values()} == {str(kubelet.default)}
    assert {thread.name for thread in threads_of(qemu)} >= {"IO disk0", "IO disk2"}

    # A device that the pod was given is attached too, although in float, where this program is, no process opens it.
    for path, expected in (("/dev/zero", "opened /dev/zero\n"), (device, "")):
        assert instance.running.execute("sh", "-c", f"{OPENED_IN_FLOAT}true", "sh", path) == expected
    assert ctl(instance, "disk", "attach", later_device)["name"] == "disk3"
    instance.is_placed()
    with (tmp_path / "later-device").open("r+b") as file:
        file.truncate(24 * MIB)
    subprocess.run(["losetup", "--set-capacity", later_device], check=True)
    assert ctl(instance, "disk", "grow", "disk3")["size"] == 24 * MIB
    instance.is_placed()

    # The device has grown on the host; the guest sees it after `disk grow`.
    with (tmp_path / "device").open("r+b") as file:
        file.truncate(32 * MIB)
    subprocess.run(["losetup", "--set-capacity", device], check=True)
    assert ctl(instance, "disk", "grow", "disk0")["size"] == 32 * MIB
    assert ctl(instance, "disk", "grow", "disk2", "12MiB")["size"] == 12 * MIB
    assert (disks / "later").stat().st_size == 12 * MIB
    instance.is_placed()
    assert instance.stop() == 0
    assert (disks / "base").read_bytes() == b"\1" * (8 * MIB)
