"""`instance-runner check` on a Kubernetes node and in pods of every kind, and `run` in the same pods."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.base.cpuset import CpuSet
from tests.node.cgroups import SECONDS, Cgroup
from tests.node.instances import SOCKETS, Controller
from tests.node.standin_kubelet import Container, Kubelet, Mount, Pod
from tests.support.fake_kernel import FAKE_KERNEL

UID = "0f5c3c5e-8f2a-4b0e-9d1d-2f3b5a6c7d8e"
PROJECT = Path(__file__).resolve().parents[2]
BLOCK = "--block-signal=TERM,INT,HUP"
CHECK = ("env", BLOCK, "python3", "-m", "runner", "check", "--json")
SPEC = '[cpu]\nplacement = "{0}"\naccel = "tcg"\n[memory]\nsize = "64MiB"\n[boot]\nkernel = "/spec/kernel"\n'


def findings(report: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {each["subject"]: each for each in report["judgements"]}


def checked_here(kubelet: Kubelet, *more: str) -> tuple[int, dict[str, Any]]:
    """Run the check on the node, where every process is visible."""
    argv = [sys.executable, "-m", "runner", "check", "--json", "--kubelet-dir", str(kubelet.directory), *more]
    done = subprocess.run(argv, cwd=PROJECT, check=False, capture_output=True, text=True, timeout=SECONDS)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def checked_in(kubelet: Kubelet, pod: Pod) -> tuple[int, dict[str, Any]]:
    """Run *pod*, whose command is the check, to its end."""
    main = kubelet.run(pod)["main"]
    status = main.wait(SECONDS)
    assert main.output.startswith("{"), main.output
    return status, json.loads(main.output)


@pytest.fixture
def core(numa: dict[int, CpuSet]) -> CpuSet:
    """Return a whole core that is not CPU 0's."""
    last = max(numa[0])
    return CpuSet.parse(Path(f"/sys/devices/system/cpu/cpu{last}/topology/core_cpus_list").read_text())


def test_a_node_with_its_controller(kubelet: Kubelet, controller: Controller, core: CpuSet) -> None:
    sleep = Container(("sh", "-c", "echo up; exec sleep infinity"), cpus=core)
    kubelet.run(Pod(UID, (sleep,)))["main"].wait_for("up")
    status, report = checked_here(kubelet, "--socket", str(controller.socket))
    found = findings(report)
    assert (status, report["place"]) == (0, "node"), report
    assert report["verdict"] != "error"
    good = ("cgroups", "kernel", "cores", "cpu-manager", "memory-manager", "controller")
    assert {name: found[name]["level"] for name in good} == dict.fromkeys(good, "ok"), report
    assert f"exclusive '{core}'" in found["cpu-manager"]["found"]
    assert found["cores"]["found"] == f"pod {UID}: CPUs '{core}' are whole cores of one NUMA node"
    assert found["topology-manager"]["level"] == "unknown"
    assert not {"own-cpus", "qemu", "mbind"} & found.keys(), "these checks are for a pod"


def test_half_cores_and_processes_outside_of_the_pods(kubelet: Kubelet, core: CpuSet, tree: Cgroup) -> None:
    kubelet.admit(Pod(UID, (Container(("true",), cpus=CpuSet([max(core)])),)))
    tree.delegate()
    neighbour = tree.child("neighbour")
    with subprocess.Popen(["sleep", "infinity"]) as process:
        neighbour.write("cgroup.procs", process.pid)
        try:
            _, report = checked_here(kubelet)
        finally:
            process.kill()
    neighbour.wait_empty()
    found = findings(report)
    assert found["cores"]["level"] == "warning"
    assert (found["neighbours"]["level"], tree.path.name in found["neighbours"]["found"]) == ("warning", True), found
    assert str(kubelet.default) in found["neighbours"]["remedy"]


def test_a_guaranteed_pod_and_the_controller(kubelet: Kubelet, controller: Controller, core: CpuSet) -> None:
    """It sees its own cgroup as the root, and recognises its QoS class by what the kubelet sets."""
    mounts: tuple[Mount, ...] = ((controller.directory, SOCKETS, "rw"),)
    status, report = checked_in(kubelet, Pod(UID, (Container(CHECK, cpus=core, mounts=mounts),)))
    found = findings(report)
    assert (status, report["place"]) == (0, "pod"), report
    assert found["own-cpus"]["found"].startswith("the pod is Guaranteed (its oom_score_adj is -997)")
    good = ("own-cpus", "cgroups", "cpu-time", "cores", "pid-namespace", "signals", "mbind", "controller")
    programs = ("qemu", "dnsmasq", "virtiofsd", "sleep")
    assert {name: found[name]["level"] for name in (*good, *programs)} == dict.fromkeys((*good, *programs), "ok"), (
        report
    )
    assert found["tun"]["level"] == "warning"


def test_a_guaranteed_pod_with_what_it_should_not_have(kubelet: Kubelet, core: CpuSet) -> None:
    """Privileged, a seccomp profile without mbind, no entry point that blocks signals."""
    container = Container(CHECK[2:], cpus=core, privileged=True, forbidden=("mbind",))
    status, report = checked_in(kubelet, Pod(UID, (container,)))
    found = findings(report)
    assert (status, found["own-cpus"]["level"], found["tun"]["level"]) == (0, "ok", "ok"), report
    assert (found["mbind"]["level"], "SYS_NICE" in found["mbind"]["remedy"]) == ("warning", True)
    assert (found["signals"]["level"], BLOCK in found["signals"]["remedy"]) == ("warning", True)


def test_a_pod_without_cpus_of_its_own_and_with_the_hosts_processes(kubelet: Kubelet) -> None:
    status, report = checked_in(kubelet, Pod(UID, (Container(CHECK),), qos="besteffort", host_pid=True))
    found = findings(report)
    assert (status, report["place"], report["verdict"]) == (3, "pod", "error")
    assert (found["own-cpus"]["level"], "requests equal to limits" in found["own-cpus"]["remedy"]) == ("error", True)
    assert (found["pid-namespace"]["level"], "hostPID" in found["pid-namespace"]["remedy"]) == ("error", True)


@pytest.mark.node_only
def test_run_refuses_what_check_calls_an_error(kubelet: Kubelet, tmp_path: Path) -> None:
    (tmp_path / "kernel").write_bytes(FAKE_KERNEL)
    (tmp_path / "auto").write_text(SPEC.format("auto"))
    (tmp_path / "less").write_text(SPEC.format("affinity"))
    script = f"env {BLOCK} python3 -m runner check /spec/auto; echo check $?; python3 -m runner plan /spec/less; echo plan $?; "
    script += f"exec env {BLOCK} python3 -m runner run /spec/auto"
    container = Container(("sh", "-c", script), mounts=((tmp_path, "/spec", "ro"),))
    main = kubelet.run(Pod(UID, (container,), qos="burstable"))["main"]
    assert main.wait(SECONDS) == 30, main.output
    sentence = "the pod is Burstable (its oom_score_adj is 900), so it shares its CPUs with other pods"
    assert [line.split()[:2] for line in main.lines if line.startswith("error")] == [["error", "own-cpus"]], main.output
    assert "check 3" in main.lines
    assert any(line.startswith("warning") and sentence in line for line in main.lines), main.output
    assert "plan 0" in main.lines
    assert f"/spec/auto: cpu.placement: {sentence}" in main.lines[-2], main.output
