"""The controller on a real kernel: its tree, its peers identified by the kernel, its death under running instances.

Runs on any machine with root, cgroup v2 with cpuset and four CPUs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from runner.kernel import inotify
from runner.kernel.cgroup import CgroupError
from runner.kernel.cgroup_mounts import read_cgroup_mounts
from tests.node.cgroups import SECONDS, until
from tests.node.minimal_pods import MOUNT, A, B, Machine, allowed, cgroup_of, missing, reason, result

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing")


def test_the_tree_is_built_and_follows_the_kubelet(machine: Machine) -> None:
    with machine.controller() as process:
        assert machine.root.kind() == "domain"
        assert machine.root.enabled() >= {"cpu", "cpuset", "memory", "pids"}
        assert machine.domain("bystander").kind() == "domain threaded"
        until(lambda: machine.domain("bystander").enabled() == {"cpu", "cpuset", "pids"})
        assert machine.float_cgroup.kind() == "threaded"
        assert machine.float_cgroup.effective_cpus() == machine.shared
        assert machine.float_cgroup.effective_mems() == machine.mems
        foreign = machine.root.child("foreign")
        foreign.create()
        shared = machine.put_state({B: machine.b})
        until(lambda: machine.float_cgroup.effective_cpus() == shared)
        assert foreign.kind() == "domain"
        assert foreign.cpus() == CpuSet()
        process.terminate()
        assert process.wait(SECONDS) == 0
    assert machine.float_cgroup.effective_cpus() == shared


def test_the_mount_has_nsdelegate_again_after_another_program_took_it(machine: Machine, tmp_path: Path) -> None:
    """A mount of cgroup2 without options in the first cgroup namespace takes them from all mounts: runtimes make such for containers."""

    def options() -> set[str]:
        return set(read_cgroup_mounts(Path("/proc")).options)

    def mount_without_options() -> None:
        subprocess.run(("mount", "-t", "cgroup2", "none", tmp_path), check=True)
        subprocess.run(("umount", tmp_path), check=True)

    subprocess.run(("mount", "-o", "remount,nsdelegate,memory_recursiveprot", MOUNT.path), check=True)
    mount_without_options()
    assert not options()
    with machine.controller() as process:
        until(lambda: options() == {"nsdelegate"})
        subprocess.run(("mount", "-o", "remount,nsdelegate,memory_recursiveprot", MOUNT.path), check=True)
        time.sleep(2)  # it looks once a second
        mount_without_options()
        until(lambda: options() == {"nsdelegate", "memory_recursiveprot"})
        pod = machine.pod(A, machine.a)
        assert result(pod.call(machine.socket, "getStatus"))["faults"] == []
        process.terminate()
        assert process.wait(SECONDS) == 0
    subprocess.run(("mount", "-o", "remount,nsdelegate,memory_recursiveprot", MOUNT.path), check=True)


def test_half_built_domains_are_removed_and_made_by_a_registration(machine: Machine) -> None:
    machine.root.create()
    machine.root.enable(["cpuset", "memory"])
    machine.domain(A).create()
    machine.pod_float(A).create()
    pod = machine.pod(A, machine.a)
    with machine.controller():
        until(lambda: not machine.domain(A).exists())
        assert result(pod.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a)))
        assert (machine.instance(A).kind(), machine.instance(A).effective_cpus()) == ("threaded", machine.a)
        assert (machine.pod_float(A).kind(), machine.pod_float(A).effective_cpus()) == ("threaded", machine.shared)


def test_a_tree_of_the_articles_shape_is_removed_when_it_is_empty(machine: Machine) -> None:
    """One float for all, threaded, and threaded groups beside it: no domain can be made before they have gone."""
    machine.root.create()
    machine.root.enable(["cpuset"])
    old = [machine.root.child("float"), machine.root.child("float").child(A), machine.domain(A)]
    for group in old:
        group.create()
        group.make_threaded()
    assert machine.root.kind() == "domain threaded"
    pod = machine.pod(A, machine.a)
    used = subprocess.Popen(["sleep", "infinity"])
    try:
        old[1].admit(used.pid)
        with machine.controller(bystander=False):
            answer = pod.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a))
            assert "drain the node" in str(answer[0]["error"])
            assert "drain the node" in str(machine.ask("getStatus")["remedies"])
            assert all(group.exists() for group in old)
            used.kill()
            used.wait()
            until(lambda: not any(group.exists() for group in old))
            assert machine.root.kind() == "domain"
            assert result(pod.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a)))
    finally:
        used.kill()
        used.wait()


def test_an_instance_needs_nothing_but_its_descriptors(machine: Machine) -> None:
    """Register in the pod, enter float, confine and pin a thread, come back, deregister: no cgroupfs needed."""
    pod = machine.pod(A, machine.a, prefix=("unshare", "--pid", "--fork", "setpriv", "--reuid=1000", "--clear-groups"))
    machine.socket.parent.chmod(0o755)
    for parent in machine.socket.parents[:-1]:
        parent.chmod(parent.stat().st_mode | 0o011)
    with machine.controller():
        pod.execute("anchor")
        answer = pod.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a))
        assert result(answer) == {
            "cgroup_path": str(machine.instance(A).path),
            "float_path": str(machine.pod_float(A).path),
            "cpuset": str(machine.a),
            "protocol": 3,
            "memory": int(machine.domain(A).read("memory.max")),
        }
        assert answer[1] == 5
        assert machine.instance(A).effective_cpus() == machine.a
        assert pod.execute("write", 0, 0) == 2
        assert cgroup_of(pod.pid) == f"/{machine.root.name}/instance-{A}/float"
        assert len(pod.scope.processes()) == 1  # the anchor keeps it
        inner = pod.execute("thread")
        assert isinstance(inner, int)
        assert pod.execute("write", 1, inner) == len(str(inner)) + 1
        tid = next(iter(machine.instance(A).threads()))
        assert cgroup_of(pod.pid, tid) == f"/{machine.root.name}/instance-{A}/vcpus"
        assert allowed(pod.pid, tid) == str(machine.a)
        cpu = min(machine.a)
        assert pod.execute("pin", inner, [cpu]) is None
        assert allowed(pod.pid, tid) == str(cpu)
        assert allowed(pod.pid, pod.pid) == str(machine.shared)
        # From float it is identified by its anchor, and a populated cgroup is not removed.
        assert result(pod.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a)))
        assert reason(pod.call(machine.socket, "deregisterCgroup", uuid=A)) == "host"
        # Writing one process to the pod's cgroup moves all of its threads.
        assert pod.execute("write", 2, 0) == 2
        assert cgroup_of(pod.pid, tid) == f"/{pod.scope.path.relative_to(MOUNT.path)}"
        assert result(pod.call(machine.socket, "deregisterCgroup", uuid=A)) == {"removed": True}
        assert result(pod.call(machine.socket, "deregisterCgroup", uuid=A)) == {"removed": False}
        assert not machine.instance(A).exists()


def test_a_pod_cannot_act_for_another_pod(machine: Machine) -> None:
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    with machine.controller():
        for pod in (a, b):
            pod.execute("anchor")
        result(a.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a)))
        result(b.call(machine.socket, "registerCgroup", uuid=B, cpuset=str(machine.b)))
        for in_float in (False, True):
            if in_float:
                b.execute("write", 0, 0)
                assert cgroup_of(b.pid).endswith(f"/instance-{B}/float")
            for uuid in (A, "123"):
                assert reason(b.call(machine.socket, "registerCgroup", uuid=uuid, cpuset=str(machine.a))) == "identity"
                assert reason(b.call(machine.socket, "deregisterCgroup", uuid=uuid)) == "identity"
        assert machine.instance(A).effective_cpus() == machine.a


def test_a_shell_and_a_pod_in_the_hosts_namespace_are_refused(machine: Machine) -> None:
    host = machine.pod(B, machine.b, prefix=())
    pod = machine.pod(A, machine.a)
    with machine.controller():
        for uuid, peer in ((B, host),):
            assert reason(peer.call(machine.socket, "registerCgroup", uuid=uuid, cpuset=str(machine.b))) == "identity"
        result(pod.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a)))
        request = {"jsonrpc": "2.0", "method": "deregisterCgroup", "params": {"uuid": A}, "id": 1}
        code = (
            "import os, socket, sys\n"
            f"open({str(pod.scope.path / 'cgroup.procs')!r}, 'w').write('0')\n"
            f"s = socket.socket(socket.AF_UNIX); s.connect({str(machine.socket)!r})\n"
            f"s.sendall({json.dumps(request)!r}.encode() + b'\\n'); print(s.recv(65536).decode())"
        )
        shell = subprocess.run(
            ["nsenter", f"--target={pod.pid}", "--pid", sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "shareProcessNamespace" in json.loads(shell.stdout)["error"]["message"]
        assert machine.instance(A).exists()


def test_the_controller_is_killed_under_a_running_instance(machine: Machine) -> None:
    pod = machine.pod(A, machine.a)
    with machine.controller() as process:
        pod.execute("anchor")
        result(pod.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a)))
        pod.execute("write", 0, 0)
        pod.execute("write", 1, pod.execute("thread"))
        process.kill()
    with inotify.watching() as queue:
        for group in (machine.root, machine.float_cgroup, machine.instance(A)):
            queue.watch(group.path, inotify.MODIFY | inotify.CREATE | inotify.DELETE)
        for _ in range(3):
            with machine.controller() as process:
                process.kill()
        with machine.controller():
            assert result(pod.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a)))
        assert queue.pending() == (), "no file of the tree was written to"
    assert machine.float_cgroup.effective_cpus() == machine.shared
    assert machine.instance(A).effective_cpus() == machine.a
    assert machine.instance(A).populated()


def test_the_instance_of_a_killed_runner_is_removed_with_its_pod(machine: Machine) -> None:
    pod = machine.pod(A, machine.a)
    with machine.controller():
        pod.execute("anchor")
        result(pod.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a)))
        pod.execute("write", 0, 0)
        pod.execute("write", 1, pod.execute("thread"))
        shared = machine.put_state({B: machine.b})  # the pod's entry is gone, its threads are not
        time.sleep(0.5)
        assert machine.instance(A).populated()
        assert machine.instance(A).effective_cpus() == machine.a
        assert machine.float_cgroup.effective_cpus() == shared - machine.a
        os.kill(pod.pid, signal.SIGKILL)
        until(lambda: not machine.instance(A).exists())
        until(lambda: machine.float_cgroup.effective_cpus() == shared)


def test_drift_is_corrected(machine: Machine) -> None:
    pod = machine.pod(A, machine.a)
    with machine.controller():
        result(pod.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a)))
        machine.instance(A).set_cpus(machine.all)
        until(lambda: machine.instance(A).effective_cpus() == machine.a)
        machine.float_cgroup.set_cpus(machine.a)
        until(lambda: machine.float_cgroup.effective_cpus() == machine.shared)
        machine.root.set_cpus(machine.shared)
        until(lambda: machine.instance(A).effective_cpus() == machine.a)
        with pytest.raises(CgroupError, match="a child still uses the controller"):
            machine.root.write("cgroup.subtree_control", "-cpuset")
        machine.domain(A).write("cgroup.subtree_control", "-cpuset")

        def whole() -> bool:
            with contextlib.suppress(CgroupError):
                return machine.instance(A).cpus() == machine.a and machine.pod_float(A).cpus() == machine.shared
            return False

        until(whole)
        assert machine.instance(A).effective_cpus() == machine.a
