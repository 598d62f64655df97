"""Where systemd is PID 1, a container's cgroup is a scope unit, and systemd ends an empty scope.

Run by ``tests/node/run --systemd``.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from tests.node.cgroups import Cgroup, cgroup_of
from tests.node.standin_kubelet import Container, Kubelet, Pod, Runtime, unit_state

UID = "0f5c3c5e-8f2a-4b0e-9d1d-2f3b5a6c7d8e"
BOTH = pytest.mark.parametrize("runtime", ["crun", "runc"])

LEAVE = """
import signal, subprocess, sys
if sys.argv[1] == "anchored":
    subprocess.Popen(["sleep", "infinity"])
print("up", flush=True)
signal.sigwait({signal.SIGUSR1})
"""


def pod(runtime: Runtime, what: str) -> Pod:
    return Pod(UID, (Container(("python3", "-c", LEAVE, what), cpus=CpuSet([2, 3])),), runtime=runtime)


def test_systemd_is_pid_1() -> None:
    assert Path("/proc/1/comm").read_text() == "systemd\n"


@BOTH
@pytest.mark.node_only
def test_a_container_is_a_scope_unit_on_its_cpus(kubelet: Kubelet, runtime: Runtime) -> None:
    main = kubelet.run(pod(runtime, "alone"))["main"]
    main.wait_for("up")
    inner = {"crun": "/container", "runc": ""}[runtime]  # crun's annotation run.oci.systemd.subgroup
    assert cgroup_of(main.pid) == f"{main.scope}{inner}"
    assert main.scope.path.name == f"cri-containerd-{main.id}.scope"
    assert unit_state(main.scope) == "active"
    assert main.scope.cpus("cpuset.cpus") == CpuSet([2, 3])


@BOTH
@pytest.mark.node_only
def test_with_an_anchor_the_scope_survives_when_pid_1_leaves(
    kubelet: Kubelet, threaded: Cgroup, runtime: Runtime
) -> None:
    main = kubelet.run(pod(runtime, "anchored"))["main"]
    main.wait_for("up")
    threaded.child("float", threaded=True).write("cgroup.procs", main.pid)
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    assert main.scope.populated()
    assert unit_state(main.scope) == "active"
    main.update_cpus(CpuSet([1, 2]))
    assert main.scope.cpus("cpuset.cpus") == CpuSet([1, 2])


@BOTH
@pytest.mark.node_only
def test_without_an_anchor_the_scope_ends_at_once(kubelet: Kubelet, threaded: Cgroup, runtime: Runtime) -> None:
    main = kubelet.run(pod(runtime, "alone"))["main"]
    main.wait_for("up")
    threaded.child("float", threaded=True).write("cgroup.procs", main.pid)
    main.scope.wait_gone()
    assert unit_state(main.scope) in {"inactive", "failed"}
