"""The stand-in kubelet makes pods as the real one does, with either runtime."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from runner.base.cpuset import CpuSet
from tests.node.cgroups import ROOT, Cgroup, cgroup_of
from tests.node.standin_kubelet import Container, Kubelet, Pod, Runtime, cpu_checksum

pytestmark = pytest.mark.node_only

UID = "0f5c3c5e-8f2a-4b0e-9d1d-2f3b5a6c7d8e"
BOTH = pytest.mark.parametrize("runtime", ["crun", "runc"])
SLEEP = ("sh", "-c", "echo up; exec sleep infinity")


def state(kubelet: Kubelet) -> dict[str, Any]:
    loaded = json.loads(kubelet.cpu_state.read_text())
    assert isinstance(loaded, dict)
    return loaded


def test_the_checksum_is_the_kubelets() -> None:
    """The expected value is from a file of kubelet 1.36."""
    entries = {"p3": {"a": "3,11"}, "p2": {"a": "4-6,12-14"}}
    assert cpu_checksum("static", "0-2,7-10,15", entries) == 1529921768


def test_an_allocation_is_two_generations_of_the_state_file(kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between them the CPUs are in neither set."""
    written: list[dict[str, Any]] = []
    write = kubelet.write_cpu_state

    def record() -> None:
        write()
        written.append(state(kubelet))

    monkeypatch.setattr(kubelet, "write_cpu_state", record)
    before = state(kubelet)["defaultCpuSet"]
    kubelet.admit(Pod(UID, (Container(SLEEP, cpus=CpuSet([2, 3])),)))
    first, second = written
    assert CpuSet.parse(first["defaultCpuSet"]) == CpuSet.parse(before) - CpuSet([2, 3])
    assert "entries" not in first
    assert second["entries"] == {UID: {"main": "2-3"}}
    assert second["defaultCpuSet"] == first["defaultCpuSet"]


def test_the_state_file_is_replaced_not_rewritten(kubelet: Kubelet) -> None:
    with kubelet.cpu_state.open() as held:
        kubelet.admit(Pod(UID, (Container(SLEEP, cpus=CpuSet([2])),)))
        assert "entries" not in json.load(held)
        assert kubelet.cpu_state.stat().st_ino != Path(f"/proc/self/fd/{held.fileno()}").stat().st_ino
    assert sorted(path.name for path in kubelet.directory.iterdir()) == ["cpu_manager_state", "memory_manager_state"]


def test_reserved_cpus_are_never_allocated(kubelet: Kubelet) -> None:
    with pytest.raises(AssertionError, match="available"):
        kubelet.admit(Pod(UID, (Container(SLEEP, cpus=CpuSet([0, 1])),)))


@BOTH
def test_a_guaranteed_pod_runs_in_the_kubelets_cgroup_on_its_cpus(kubelet: Kubelet, runtime: Runtime) -> None:
    pod = Pod(UID, (Container(SLEEP, cpus=CpuSet([2, 3]), mems=CpuSet([0])),), runtime=runtime)
    main = kubelet.run(pod)["main"]
    main.wait_for("up")
    assert str(main.scope) == (
        f"/kubepods.slice/kubepods-pod0f5c3c5e_8f2a_4b0e_9d1d_2f3b5a6c7d8e.slice/cri-containerd-{main.id}.scope"
    )
    assert cgroup_of(main.pid) == str(main.scope)
    assert main.scope.read("cpuset.cpus") == "2-3"
    assert main.scope.read("cpuset.mems") == "0"
    assert main.scope.read("cgroup.type") == "domain"
    assert main.scope.words("cgroup.controllers") == Cgroup(ROOT).words("cgroup.controllers")


@BOTH
def test_pods_of_the_shared_pool_are_shrunk_and_widened(kubelet: Kubelet, runtime: Runtime) -> None:
    shared = kubelet.run(Pod("shared", (Container(SLEEP),), qos="burstable", runtime=runtime))["main"]
    shared.wait_for("up")
    everything = kubelet.default
    assert str(shared.scope).startswith("/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podshared.slice/")
    assert shared.scope.cpus("cpuset.cpus") == everything
    kubelet.run(Pod(UID, (Container(SLEEP, cpus=CpuSet([1, 2])),), runtime=runtime))["main"].wait_for("up")
    assert shared.scope.cpus("cpuset.cpus") == everything - CpuSet([1, 2])
    kubelet.stop(UID, grace=0)
    assert shared.scope.cpus("cpuset.cpus") == everything - CpuSet([1, 2]), "the entries outlive the pod"
    kubelet.reconcile()
    assert shared.scope.cpus("cpuset.cpus") == everything == CpuSet.parse(state(kubelet)["defaultCpuSet"])
    assert "entries" not in state(kubelet)


@BOTH
def test_a_stopped_pod_gets_sigterm_and_leaves_its_entries_for_a_while(kubelet: Kubelet, runtime: Runtime) -> None:
    code = "import signal,sys; signal.signal(15, lambda *_: sys.exit(7)); print('up', flush=True); signal.pause()"
    pod = Pod(UID, (Container(("python3", "-c", code), cpus=CpuSet([2])),), runtime=runtime)
    kubelet.run(pod)["main"].wait_for("up")
    assert kubelet.stop(UID) == {"main": 7}
    assert not (ROOT / pod.cgroup_path).exists()
    assert state(kubelet)["entries"] == {UID: {"main": "2"}}
    kubelet.reconcile()
    assert "entries" not in state(kubelet)


@BOTH
def test_a_privileged_container_writes_the_hosts_cgroups(kubelet: Kubelet, runtime: Runtime) -> None:
    script = "cat /proc/self/cgroup; mkdir /sys/fs/cgroup/of-a-pod && rmdir /sys/fs/cgroup/of-a-pod && echo wrote"
    main = kubelet.run(Pod(UID, (Container(("sh", "-c", script), privileged=True),), runtime=runtime))["main"]
    assert main.wait() == 0, main.output
    assert main.output.split("\n") == [f"0::{main.scope}", "wrote"]


@BOTH
def test_a_least_privileged_container_sees_no_cgroups(kubelet: Kubelet, runtime: Runtime) -> None:
    script = "cat /proc/self/cgroup; ls /sys/fs/cgroup; id -u; grep CapEff /proc/self/status"
    container = Container(("sh", "-c", script), cgroupfs="none", uid=1000)
    main = kubelet.run(Pod(UID, (container,), runtime=runtime))["main"]
    assert main.wait() == 0, main.output
    assert main.output.split() == ["0::/", "1000", "CapEff:", "0000000000000000"]


@BOTH
@pytest.mark.parametrize("kind", ["private", "host", "shared"])
def test_process_namespaces(kubelet: Kubelet, runtime: Runtime, kind: str) -> None:
    """Only in its own is a container's first process PID 1."""
    script = "echo pid $$; grep -c . /proc/1/comm; cat /proc/1/comm"
    pod = Pod(
        UID,
        (Container(("sh", "-c", script)),),
        host_pid=kind == "host",
        share_processes=kind == "shared",
        runtime=runtime,
    )
    main = kubelet.run(pod)["main"]
    assert main.wait() == 0, main.output
    first = Path("/proc/1/comm").read_text().strip()
    pid, comm = main.lines[0], main.lines[-1]
    assert (pid == "pid 1") == (kind == "private")
    assert comm == {"private": "sh", "host": first, "shared": "pause"}[kind]


DELEGATED = """
import os, subprocess, threading
from pathlib import Path
root = Path("/sys/fs/cgroup")
def write(file, value):
    fd = os.open(root / file, os.O_WRONLY)
    os.write(fd, f"{value}\\n".encode())
    os.close(fd)
def where(tid):
    return Path(f"/proc/self/task/{tid}/cgroup").read_text().strip()
anchor = subprocess.Popen(["sleep", "infinity"])
gate = threading.Event()
vcpu = threading.Thread(target=gate.wait)
vcpu.start()
(root / "float").mkdir()
write("float/cgroup.type", "threaded")
write("cgroup.subtree_control", "+cpuset")
(root / "instance").mkdir()
write("instance/cgroup.type", "threaded")
write("instance/cpuset.cpus", "3")
write("float/cgroup.procs", 0)
write("instance/cgroup.threads", vcpu.native_id)
print("leader", where(os.getpid()))
print("vcpu", where(vcpu.native_id), os.sched_getaffinity(vcpu.native_id))
print("anchor", Path(f"/proc/{anchor.pid}/cgroup").read_text().strip())
print("scope", (root / "cgroup.type").read_text().strip(), flush=True)
gate.set()
anchor.kill()
"""


@BOTH
def test_a_container_can_make_its_own_scope_the_threaded_root(kubelet: Kubelet, runtime: Runtime) -> None:
    """The placement of `docker run --privileged`: a private cgroup namespace, and no controller outside."""
    container = Container(
        ("python3", "-I", "-S", "-c", DELEGATED), privileged=True, cgroup_namespace="private", cpus=CpuSet([2, 3])
    )
    main = kubelet.run(Pod(UID, (container,), runtime=runtime))["main"]
    assert main.wait() == 0, main.output
    assert main.lines == [
        "leader 0::/float",
        "vcpu 0::/instance {3}",
        "anchor 0::/",
        "scope domain threaded",
    ]


@BOTH
def test_a_process_executed_in_a_pod_may_run_on_its_exclusive_cpus(kubelet: Kubelet, runtime: Runtime) -> None:
    """`kubectl exec` and exec probes do so; this is the reason for the sweep."""
    pod = Pod(UID, (Container(SLEEP, cpus=CpuSet([2, 3])),), runtime=runtime)
    main = kubelet.run(pod)["main"]
    main.wait_for("up")
    output = main.execute("sh", "-c", "grep Cpus_allowed_list /proc/self/status")
    assert output.split()[-1] == "2-3"


@BOTH
def test_a_pod_whose_cgroup_is_empty_can_still_be_killed_by_its_first_process(
    kubelet: Kubelet, tree: Cgroup, runtime: Runtime
) -> None:
    """With a PID namespace of its own, the end of PID 1 ends every process, whatever its cgroup is."""
    tree.delegate("cpuset")
    elsewhere = tree.child("elsewhere")
    main = kubelet.run(Pod(UID, (Container(SLEEP, cpus=CpuSet([2])),), runtime=runtime))["main"]
    main.wait_for("up")
    elsewhere.write("cgroup.procs", main.pid)
    assert not main.scope.populated()
    main.kill("KILL")
    assert main.wait() == 137
    elsewhere.wait_empty()


def test_the_numa_node_of_a_pods_memory_is_in_the_memory_state(kubelet: Kubelet) -> None:
    kubelet.admit(Pod(UID, (Container(SLEEP, cpus=CpuSet([2]), mems=CpuSet([0]), memory=1 << 30),)))
    loaded = json.loads(kubelet.memory_state.read_text())
    assert loaded["entries"] == {UID: {"main": [{"numaAffinity": [0], "type": "memory", "size": 1 << 30}]}}
    assert loaded["machineState"]["0"]["numberOfAssignments"] == 1


def test_the_checkout_is_importable_in_a_container(kubelet: Kubelet) -> None:
    """It takes the place of the program in its image."""
    main = kubelet.run(Pod(UID, (Container(("python3", "-c", "import runner, trio; print(runner.__path__)")),)))["main"]
    assert main.wait() == 0, main.output
    assert "/project/runner" in main.output


def test_nothing_of_a_pod_is_left(kubelet: Kubelet) -> None:
    kubelet.run(Pod(UID, (Container(SLEEP, cpus=CpuSet([2])),)))["main"].wait_for("up")
    kubelet.stop(UID, grace=0)
    kubelet.reconcile()
    assert subprocess.run(["crun", "list", "--quiet"], capture_output=True, text=True, check=True).stdout == ""
    assert [str(child) for child in kubelet.cgroup.children()] == []
