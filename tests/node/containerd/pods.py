"""The stand-in kubelet with containerd for its runtime: it starts pods through the CRI, as the real one does.

Its requests are those that ``pkg/kubelet/kuberuntime`` makes of a manifest: labels, log files, the termination log, the
masked paths of ``/proc`` and ``/sys``, the pod's slice.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from runner.base.cpuset import CpuSet
from tests.node.cgroups import ROOT, SECONDS, Cgroup
from tests.node.containerd.cri import Cri, Message
from tests.node.standin_kubelet import OOM_SCORE_ADJ, PROJECT, Container, Kubelet, Pod, Running

POD_IP = "pod-ip"
"""A placeholder for the pod's address in a container's command and environment."""
POD, CONTAINER, NODE = 0, 1, 2
"""The owner of a namespace (``NamespaceMode``)."""
UNCONFINED = 1
MASKED = [
    *("/proc/asound", "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list"),
    *("/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware", "/sys/devices/virtual/powercap"),
]
READ_ONLY = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]
"""``pkg/securitycontext/util.go``."""


class Contained(Running):
    """A container that containerd runs; its log is read until its first process has ended, or until :meth:`close`.

    One of the two has to be waited for: a ``tail`` that is forgotten is a ``ResourceWarning``, and fails the test.
    """

    def __init__(self, cri: Cri, name: str, scope: Cgroup, log: Path) -> None:
        self.cri = cri
        info = json.loads(cri("ContainerStatus", container_id=name, verbose=True)["info"]["info"])
        self.pid = int(info["pid"])
        follow = ["tail", "--lines=+1", "--follow=name", "--retry", f"--pid={self.pid}", str(log)]
        process = subprocess.Popen(
            follow, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace"
        )
        super().__init__(name, (), scope, process)

    def status(self) -> Message:
        """Return its status from containerd."""
        status: Message = self.cri("ContainerStatus", container_id=self.id)["status"]
        return status

    def stop(self, grace: float) -> None:
        """Stop it, and kill it after *grace* seconds."""
        self.cri("StopContainer", container_id=self.id, timeout=round(grace), seconds=grace + SECONDS)

    def wait(self, seconds: float = SECONDS) -> int:
        """Return its exit status."""
        super().wait(seconds)
        return int(self.status().get("exit_code", 0))

    def close(self) -> None:
        """End the reading of its log; the container is left as it is."""
        self.process.terminate()
        self.process.wait(SECONDS)
        self.reader.join(SECONDS)

    def execute(self, *command: str) -> str:
        """Run a command in it, as an exec probe does, and return what it wrote."""
        done = self.cri("ExecSync", container_id=self.id, cmd=command, timeout=round(SECONDS))
        assert not done.get("exit_code"), done
        return bytes(done.get("stdout", b"")).decode()

    def update_cpus(self, cpus: CpuSet) -> None:
        """Change its cpuset, as the CPU Manager does every ten seconds."""
        self.cri("UpdateContainerResources", container_id=self.id, linux={"cpuset_cpus": str(cpus)})


class KubeletOfContainerd(Kubelet):
    """The stand-in kubelet whose pods are run by containerd."""

    def __init__(self, directory: Path, numa: Mapping[int, CpuSet], *, reserved: CpuSet, cri: Cri) -> None:
        super().__init__(directory, numa, reserved=reserved, systemd=True)
        self.cri = cri
        self.sandboxes: dict[str, str] = {}

    def address(self, uid: str) -> str:
        """Return a pod's address."""
        status = self.cri("PodSandboxStatus", pod_sandbox_id=self.sandboxes[uid])["status"]
        return str(status["network"]["ip"])

    def namespace(self, uid: str) -> str:
        """Return the pod's network namespace, by its path."""
        status = self.cri("PodSandboxStatus", pod_sandbox_id=self.sandboxes[uid], verbose=True)
        namespaces = json.loads(status["info"]["info"])["runtimeSpec"]["linux"]["namespaces"]
        return next(str(each["path"]) for each in namespaces if each["type"] == "network")

    def termination_log(self, uid: str, name: str) -> Path:
        """Return the file that a container finds at ``/dev/termination-log``."""
        return self.directory / "pods" / uid / "containers" / name / "termination-log"

    def start(self, pod: Pod) -> dict[str, Running]:
        """Start an admitted pod: its sandbox with its network, then its containers."""
        self.pods[pod.uid] = pod
        running = self.running.setdefault(pod.uid, {})
        sandbox = self.sandbox(pod)
        Path(sandbox["log_directory"]).mkdir(parents=True)
        name = self.cri("RunPodSandbox", config=sandbox)["pod_sandbox_id"]
        self.sandboxes[pod.uid] = name
        address = self.address(pod.uid)
        for container in pod.containers:
            config = self.config(pod, container, address)
            created = self.cri("CreateContainer", pod_sandbox_id=name, config=config, sandbox_config=sandbox)
            made = created["container_id"]
            self.cri("StartContainer", container_id=made)
            scope = Cgroup(ROOT / pod.cgroup_path / f"cri-containerd-{made}.scope")
            running[container.name] = Contained(
                self.cri, made, scope, Path(sandbox["log_directory"]) / config["log_path"]
            )
        return running

    def stop(self, uid: str, grace: float = SECONDS) -> dict[str, int]:
        """End a pod: its containers, then its sandbox with its network, then its cgroup."""
        statuses = {}
        for name, container in self.running.pop(uid).items():
            assert isinstance(container, Contained)
            container.stop(grace)
            statuses[name] = container.wait()
        sandbox = self.sandboxes.pop(uid, None)
        if sandbox is not None:  # its creation succeeded
            self.cri("StopPodSandbox", pod_sandbox_id=sandbox)
            self.cri("RemovePodSandbox", pod_sandbox_id=sandbox)
        slice_ = self.pods[uid].cgroup_path
        subprocess.run(["systemctl", "stop", slice_.name], check=True)
        Cgroup(ROOT / slice_).remove()
        return statuses

    def sandbox(self, pod: Pod) -> Message:
        """Return the request that the kubelet makes before the first container (``kuberuntime_sandbox.go``)."""
        name = f"pod-{pod.uid[:8]}"
        return {
            "metadata": {"name": name, "uid": pod.uid, "namespace": "default"},
            "hostname": name,
            "log_directory": str(self.scratch / "log" / f"default_{name}_{pod.uid}"),
            "dns_config": {"servers": ["10.96.0.10"], "searches": ["default.svc.cluster.local"]},
            "labels": labels(pod),
            "linux": {
                "cgroup_parent": f"/{pod.cgroup_path}",
                "security_context": {
                    "namespace_options": namespaces(pod),
                    "privileged": any(container.privileged for container in pod.containers),
                    "seccomp": {},
                },
            },
        }

    def config(self, pod: Pod, container: Container, address: str) -> Message:
        """Return the request that the kubelet makes for a container (``kuberuntime_container.go``)."""
        arguments = [word.replace(POD_IP, address) for word in container.command]
        log = self.termination_log(pod.uid, container.name)
        log.parent.mkdir(parents=True)
        log.touch()
        log.chmod(0o666)
        mounts = [*container.mounts, (log, "/dev/termination-log", "rw")]
        environment = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", **container.environment}
        hidden = {} if container.privileged else {"masked_paths": MASKED, "readonly_paths": READ_ONLY}
        return {
            "metadata": {"name": container.name},
            "image": {"image": container.reference},
            **({"args": arguments} if container.keeps_entry_point else {"command": arguments}),
            "envs": [{"key": key, "value": value.replace(POD_IP, address)} for key, value in environment.items()],
            "mounts": [
                {"container_path": path, "host_path": str(source), "readonly": mode == "ro"}
                for source, path, mode in mounts
            ],
            "devices": [
                {"container_path": path, "host_path": path, "permissions": "rwm"} for path in container.devices
            ],
            "labels": {**labels(pod), "io.kubernetes.container.name": container.name},
            "log_path": f"{container.name}.log",
            "linux": {
                "resources": {
                    "cpu_shares": max(2, 1024 * len(container.cpus)),
                    "memory_limit_in_bytes": container.memory,
                    "oom_score_adj": OOM_SCORE_ADJ[pod.qos],
                    "cpuset_cpus": str(container.cpus or self.default),
                    "cpuset_mems": str(container.mems),
                },
                "security_context": {
                    "privileged": container.privileged,
                    "namespace_options": namespaces(pod),
                    "capabilities": {
                        "add_capabilities": [name.removeprefix("CAP_") for name in container.capabilities],
                        "drop_capabilities": ["ALL"] if container.drop_all else [],
                    },
                    "readonly_rootfs": container.read_only_root,
                    "no_new_privs": not container.allow_privilege_escalation,
                    "seccomp": {"profile_type": UNCONFINED} if container.privileged else {},
                    **hidden,
                },
            },
        }


def labels(pod: Pod) -> dict[str, str]:
    """Return the labels by which the kubelet finds a pod's containers (``kuberuntime/labels.go``)."""
    return {
        "io.kubernetes.pod.name": f"pod-{pod.uid[:8]}",
        "io.kubernetes.pod.namespace": "default",
        "io.kubernetes.pod.uid": pod.uid,
    }


def namespaces(pod: Pod) -> dict[str, int]:
    """Return the namespace modes of the pod's containers."""
    return {"network": POD, "pid": NODE if pod.host_pid else POD if pod.share_processes else CONTAINER, "ipc": POD}


def inspect(kubelet: Path) -> subprocess.CompletedProcess[str]:
    """Run ``inspect`` on the node; *kubelet* is the directory of the kubelet's files."""
    return subprocess.run(
        [sys.executable, "-m", "runner", "inspect", "--kubelet-dir", str(kubelet)],
        check=False,
        capture_output=True,
        text=True,
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
