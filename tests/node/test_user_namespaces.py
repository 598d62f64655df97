"""Instances in pods with a user namespace of their own (``hostUsers: false``)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.node.instances import CAPABILITIES, DEVICES, NodeFixture
from tests.node.standin_kubelet import IDS, MIB, Container, Kubelet, Pod

KVM = "/dev/kvm"


def users(pid: int) -> set[int]:
    """Return the real, effective, saved and file system user of a process, as the node numbers them."""
    [numbers] = re.findall(r"^Uid:(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return {int(number) for number in numbers.split()}


@pytest.mark.usefixtures("rom")
def test_an_instance_runs_in_a_user_namespace(node_fixture: NodeFixture, tmp_path: Path) -> None:
    """With a network, a share and exclusive CPUs; no process of it is a user of the node's. crun maps the volumes' owners."""
    share = tmp_path / "share"
    share.mkdir()
    shared = '[[share]]\ntag = "share"\npath = "/share"\n'
    mounts = [(share, "/share", "rw")]
    instance = node_fixture.start(1, "2-3", shared, host_users=False, more_mounts=mounts, memory=512 * MIB)
    try:
        instance.up()
        instance.is_placed()
        first = node_fixture.kubelet.pods[instance.uid].first_id
        assert first >= IDS
        processes = instance.processes()
        [qemu] = processes["qemu"]
        assert users(instance.running.pid) == {first}, "PID 1 is root of its namespace"
        assert users(qemu) == {first + 65534}, "QEMU runs as the namespace's user nobody"
        everyone = {user for pids in processes.values() for pid in pids for user in users(pid)}
        assert {user // IDS for user in everyone} == {first // IDS}
        assert {"dnsmasq", "virtiofsd"} <= processes.keys()
        assert "guarantee enforced cpus=2-3" in instance.running.output
        assert int(instance.running.scope.read("memory.current")) > 64 * MIB, (
            "the pod is charged for the guest's memory"
        )
    finally:
        print(instance.running.output)
    assert instance.stop() == 0
    assert "faults=0" in instance.running.output


def test_with_runc_a_device_node_is_the_machines_and_its_mode_for_others_counts(kubelet: Kubelet) -> None:
    """The plan says so. With crun a container has nodes of its own, which are its root's."""
    if not Path(KVM).exists():
        pytest.skip("KVM is missing: tests/node/run brings a machine that has it")
    assert Path(KVM).stat().st_mode & 0o777 == 0o660, "as udev makes it in Debian"
    spec = '[boot]\nfirmware = "/rom"\n[cpu]\nplacement = "affinity"\naccel = "kvm"\n[[network]]\nmode = "macvtap"\n'
    plan = f"{sys.executable} -m runner plan - <<'EOF'\n{spec}EOF\n"
    main = Container(
        ("sh", "-c", f"cat /proc/self/uid_map; {plan}"), devices=(*DEVICES, KVM), capabilities=CAPABILITIES
    )
    pod = Pod("00000001-0000-4000-8000-000000000001", (main,), runtime="runc", host_users=False)
    running = kubelet.run(pod)["main"]
    assert running.wait() == 30, running.output
    assert re.search(rf"^ +0 +{pod.first_id} +{IDS}$", running.output, re.MULTILINE), running.output
    assert (
        f"cpu.accel: no KVM ({KVM}: Permission denied); let every user open it, on the node, by a rule of udev"
        in running.output
    )
    assert (
        "network[0].mode: a macvtap takes a device node of its own, and in a user namespace none can be made"
        in running.output
    )
