"""A stand-in for the kubelet that does what pods and their neighbours observe: state files, cgroups, containers.

It writes the same files as the real one, in the same order (``pkg/kubelet/cm`` of kubernetes/kubernetes), and starts
containers with an OCI runtime as containerd does. It decides nothing: a test chooses the CPUs of a container. The work
that the real one does every ten seconds is done when :meth:`Kubelet.reconcile` is called.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from runner.base.cpuset import CpuSet
from tests.node.cgroups import ROOT, SECONDS, Cgroup

PROJECT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def capabilities(names: str) -> tuple[str, ...]:
    """Return the capabilities of these names (``capabilities(7)``)."""
    return tuple(f"CAP_{name}" for name in names.split())


DEFAULT_CAPABILITIES = capabilities("""
    CHOWN DAC_OVERRIDE FSETID FOWNER MKNOD NET_RAW SETGID SETUID SETFCAP SETPCAP NET_BIND_SERVICE SYS_CHROOT KILL
    AUDIT_WRITE
""")
"""Those of an unprivileged container of containerd (``oci.WithDefaultSpec``)."""
ALL_CAPABILITIES = capabilities("""
    CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE
    NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN
    SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE
    MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE
""")

OOM_SCORE_ADJ = {"guaranteed": -997, "burstable": 900, "besteffort": 1000}
"""The values that the kubelet sets (``qos/policy.go``); for Burstable it depends on the memory request."""

Runtime = Literal["crun", "runc"]
SANDBOX_RUNTIME: Runtime = "crun" if shutil.which("crun") else "runc"
"""The faster one, because a sandbox only holds namespaces."""
Mount = tuple[Path, str, Literal["ro", "rw"]]
IDS = 1 << 16
"""Users and groups of a pod's user namespace (``userNsLength``)."""


@dataclass(frozen=True)
class Container:
    """One container as a pod's manifest and the kubelet's managers describe it."""

    command: tuple[str, ...]
    name: str = "main"
    image: Path | None = None
    """Its root file system; without one the node's own, with the checkout as ``/project`` where an image would have it."""
    reference: str = ""
    """The image's name, for a runtime that has images."""
    keeps_entry_point: bool = False
    """:attr:`command` is only what follows the image's own entry point."""
    cpus: CpuSet = field(default_factory=CpuSet)
    """Exclusive CPUs; empty: it runs on the shared pool."""
    mems: CpuSet = field(default_factory=CpuSet)
    """NUMA nodes of its memory; empty: all."""
    memory: int = 512 * MIB
    hugepages: Mapping[str, int] = field(default_factory=dict)
    """Page size as the kernel writes it (``2MB``) → bytes."""
    privileged: bool = False
    """Every capability, all devices, ``/sys`` writable, the host's cgroup namespace, as in containerd."""
    capabilities: tuple[str, ...] = ()
    """Besides containerd's default ones."""
    drop_all: bool = False
    """Only :attr:`capabilities`, no default ones."""
    allow_privilege_escalation: bool = True
    read_only_root: bool = False
    cgroup_namespace: Literal["private", "host"] | None = None
    """Default: the host's for a privileged container, as containerd does on cgroup v2; Docker gives a private one."""
    cgroupfs: Literal["rw", "ro", "none"] | None = None
    """Default: ``rw`` for a privileged container, else ``ro``."""
    devices: tuple[str, ...] = ()
    """Device nodes of the host besides the standard ones, as device plugins add them."""
    mounts: tuple[Mount, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    uid: int = 0
    forbidden: tuple[str, ...] = ()
    """System calls that its seccomp profile refuses with EPERM."""
    descriptors: tuple[int, ...] = ()
    """Open descriptors of ours that it inherits as 3 and the next ones (``--preserve-fds``)."""


@dataclass(frozen=True)
class Pod:
    """A pod as its manifest describes it."""

    uid: str
    containers: tuple[Container, ...]
    qos: Literal["guaranteed", "burstable", "besteffort"] = "guaranteed"
    host_pid: bool = False
    share_processes: bool = False
    host_users: bool = True
    """``False``: its containers share a user namespace with :data:`IDS` users and groups, of which 0 is another one here."""
    runtime: Runtime = "crun"

    @property
    def first_id(self) -> int:
        """Return the node's user and group that are 0 in the pod: other ones for each pod (``userns_manager.go``)."""
        return 0 if self.host_users else IDS * (1 + int(hashlib.sha256(self.uid.encode()).hexdigest()[:3], 16))

    @property
    def id_mappings(self) -> list[dict[str, int]]:
        """Return the mapping of its users, and of its groups, as the runtime specification has it."""
        return [{"containerID": 0, "hostID": self.first_id, "size": IDS}]

    @property
    def cgroup_path(self) -> Path:
        """Return the pod's slice below the hierarchy's root (``cm/pod_container_manager_linux.go``)."""
        middle = "" if self.qos == "guaranteed" else f"-{self.qos}"
        path = Path("kubepods.slice")
        if middle:
            path /= f"kubepods{middle}.slice"
        return path / f"kubepods{middle}-pod{self.uid.replace('-', '_')}.slice"


class Running:
    """A container that was started: its first process, as the runtime reports it, and its output so far."""

    def __init__(self, name: str, runtime: Sequence[str], scope: Cgroup, process: subprocess.Popen[str]) -> None:
        self.id, self.runtime, self.scope, self.process = name, runtime, scope, process
        self.lines: list[str] = []
        self.changed = threading.Condition()
        self.ended = False
        self.reader = threading.Thread(target=self.read_output, name=f"output of {name}", daemon=True)
        self.reader.start()

    def read_output(self) -> None:
        """Read the output as it comes, so that it never blocks the container."""
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self.changed:
                    self.lines.append(line.rstrip("\n"))
                    self.changed.notify_all()
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    @property
    def output(self) -> str:
        """Return its output so far."""
        return "\n".join(self.lines)

    def wait_for(self, text: str, seconds: float = SECONDS) -> str:
        """Return the first line that holds *text*, waiting for it."""
        with self.changed:
            found = self.changed.wait_for(
                lambda: next((line for line in self.lines if text in line), None) or self.ended, seconds
            )
            assert isinstance(found, str), f"{self.id} did not print {text!r} but:\n{self.output}"
            return found

    def wait(self, seconds: float = SECONDS) -> int:
        """Return the exit status of its first process (of the runtime, if the container was never made)."""
        status = self.process.wait(seconds)
        self.reader.join(seconds)
        return status

    @functools.cached_property
    def pid(self) -> int:
        """Return the host's pid of its first process, which may write before the runtime knows of it."""
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                return int(json.loads(self.command("state"))["pid"])
            except AssertionError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def command(self, *arguments: str) -> str:
        """Call the runtime with a command, its options, this container's name, and the other arguments; return its output."""
        split = next((at for at, each in enumerate(arguments[1:], 1) if not each.startswith("--")), len(arguments))
        done = subprocess.run(
            [*self.runtime, *arguments[:split], self.id, *arguments[split:]],
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"{' '.join(done.args)}: {done.stderr.strip()}"
        return done.stdout

    def kill(self, name: str = "TERM") -> None:
        """Signal its first process, as ``StopContainer`` does."""
        self.command("kill", name)

    def delete(self) -> None:
        """Kill what is left of it, and have the runtime forget it."""
        argv = [*self.runtime, "delete", "--force", self.id]
        subprocess.run(argv, capture_output=True, check=False, timeout=SECONDS)

    def execute(self, *command: str) -> str:
        """Run a command in it, as ``kubectl exec`` does, and return its output."""
        return self.command("exec", *command)

    def update_cpus(self, cpus: CpuSet) -> None:
        """Change its cpuset, as ``UpdateContainerResources`` does."""
        self.command("update", f"--cpuset-cpus={cpus}")


def runtime_argv(runtime: Runtime, *, systemd: bool) -> list[str]:
    """Return the command of a runtime that asks systemd for cgroups, or makes them itself."""
    if systemd:
        return [runtime, "--systemd-cgroup"]
    return [runtime, "--cgroup-manager=cgroupfs"] if runtime == "crun" else [runtime]


def unit_state(scope: Cgroup) -> str:
    """Return the state of this cgroup's systemd unit."""
    shown = subprocess.run(
        ["systemctl", "show", "--property=ActiveState", "--value", scope.path.name],
        capture_output=True,
        text=True,
        check=True,
    )
    return shown.stdout.strip()


class Kubelet:
    """The node agent, which can admit, start and stop a pod, and reconcile.

    With *systemd*, slices and scopes are systemd units (the kubelet's ``cgroupDriver: systemd``).

    A pod's entries in the state file appear before its containers exist and stay after they are gone, until the next
    :meth:`reconcile`: the real one removes them up to ten seconds late.
    """

    def __init__(self, directory: Path, numa: Mapping[int, CpuSet], *, reserved: CpuSet, systemd: bool = False) -> None:
        self.directory = directory
        self.numa = dict(numa)
        self.reserved = reserved
        self.systemd = systemd
        self.default = CpuSet(cpu for cpus in self.numa.values() for cpu in cpus)
        self.entries: dict[str, dict[str, CpuSet]] = {}
        self.memory: dict[str, dict[str, tuple[CpuSet, int]]] = {}
        self.pods: dict[str, Pod] = {}
        self.running: dict[str, dict[str, Running]] = {}
        self.cgroup = Cgroup(ROOT / "kubepods.slice")
        self.scratch = directory.parent / "containers"

    @property
    def cpu_state(self) -> Path:
        """Return the CPU Manager's checkpoint."""
        return self.directory / "cpu_manager_state"

    @property
    def memory_state(self) -> Path:
        """Return the Memory Manager's checkpoint."""
        return self.directory / "memory_manager_state"

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True)
        self.scratch.mkdir()
        # The containers' files, and the upper layers of their roots, must not be on the lower layer.
        subprocess.run(["mount", "-t", "tmpfs", "containers", str(self.scratch)], check=True)
        Cgroup(ROOT).delegate()
        if self.systemd:
            subprocess.run(["systemctl", "start", "kubepods.slice"], check=True)
        else:
            self.cgroup.path.mkdir()
            self.cgroup.delegate()
        self.write_cpu_state()
        self.write_memory_state()
        return self

    def __exit__(self, *_: object) -> None:
        for uid in list(self.running):
            self.stop(uid, grace=0)
        if self.systemd:
            subprocess.run(["systemctl", "stop", "kubepods.slice"], check=True)
        self.cgroup.remove()
        subprocess.run(["umount", "--lazy", str(self.scratch)], check=True)

    # -- the state files

    def admit(self, pod: Pod) -> None:
        """Give *pod* its CPUs: for each container, write first the shared pool without them, then the entry with them.

        Between the two writes they are in neither set (``policy_static.go``: ``SetDefaultCPUSet``, ``SetCPUSet``).
        """
        for container in pod.containers:
            if not container.cpus:
                continue
            available = self.default - self.reserved
            assert container.cpus <= available, f"{pod.uid} wants {container.cpus}, available are {available}"
            self.default -= container.cpus
            self.write_cpu_state()
            self.entries.setdefault(pod.uid, {})[container.name] = container.cpus
            self.write_cpu_state()
            self.memory.setdefault(pod.uid, {})[container.name] = (
                container.mems or CpuSet(self.numa),
                container.memory,
            )
            self.write_memory_state()
        self.pods[pod.uid] = pod

    def resize(self, uid: str, cpus: CpuSet, name: str = "main", *, applied: bool = True) -> None:
        """Give a running container of Guaranteed *uid* other CPUs (``InPlacePodVerticalScalingExclusiveCPUs``).

        The checkpoint is written first; the container's cpuset follows at once if *applied*, else by :meth:`apply_cpus`: the real
        one applies it when it reconciles. CPUs that move are in neither set for a moment.
        """
        before = self.entries[uid][name]
        assert cpus - before <= self.default - self.reserved
        self.default -= cpus
        self.entries[uid][name] = before & cpus or cpus
        self.write_cpu_state()
        self.entries[uid][name] = cpus
        self.default |= before - cpus
        self.write_cpu_state()
        if applied:
            self.apply_cpus(uid, name)

    def apply_cpus(self, uid: str, name: str = "main") -> None:
        """Write the cpuset of a container as the checkpoint has it."""
        self.running[uid][name].update_cpus(self.entries[uid][name])

    def reconcile(self) -> None:
        """Do what the real one does every ten seconds: remove the entries of ended pods, resize containers of the pool."""
        for uid in [uid for uid in self.entries if uid not in self.running]:
            self.take_back(uid)
        self.resize_pool()

    def take_back(self, uid: str) -> None:
        """Remove the entries of a pod, and give its CPUs back to the pool (``removeStaleState``).

        The real one does so even while the containers of the pod run, if it was static or its deletion was forced.
        """
        for cpus in self.entries.pop(uid).values():
            self.default |= cpus
            self.write_cpu_state()
        self.memory.pop(uid)
        self.write_memory_state()

    def write_cpu_state(self) -> None:
        """Write the CPU Manager's checkpoint, version 2."""
        entries = {uid: {name: str(cpus) for name, cpus in pod.items()} for uid, pod in self.entries.items()}
        state: dict[str, Any] = {"policyName": "static", "defaultCpuSet": str(self.default)}
        if entries:
            state["entries"] = entries
        state["checksum"] = cpu_checksum("static", str(self.default), entries)
        replace(self.cpu_state, json.dumps(state, separators=(",", ":")))

    def write_memory_state(self) -> None:
        """Write the Memory Manager's checkpoint; its checksum is 0, because only the kubelet checks it."""
        total = 64 << 30
        reserved = {
            numa_node: sum(
                size // len(nodes) for pod in self.memory.values() for nodes, size in pod.values() if numa_node in nodes
            )
            for numa_node in self.numa
        }
        machine = {
            str(numa_node): {
                "numberOfAssignments": sum(
                    numa_node in nodes for pod in self.memory.values() for nodes, _ in pod.values()
                ),
                "memoryMap": {
                    "memory": {
                        "total": total,
                        "systemReserved": 1 << 30,
                        "allocatable": total - (1 << 30),
                        "reserved": reserved[numa_node],
                        "free": total - (1 << 30) - reserved[numa_node],
                    }
                },
                "cells": [numa_node],
            }
            for numa_node in self.numa
        }
        entries = {
            uid: {
                name: [{"numaAffinity": list(nodes), "type": "memory", "size": size}]
                for name, (nodes, size) in pod.items()
            }
            for uid, pod in self.memory.items()
        }
        state = {"policyName": "Static", "machineState": machine, **({"entries": entries} if entries else {})}
        replace(self.memory_state, json.dumps({**state, "checksum": 0}, separators=(",", ":")))

    # -- the pods

    def run(self, pod: Pod) -> dict[str, Running]:
        """Admit *pod*, shrink the pool's containers and start it."""
        self.admit(pod)
        self.resize_pool()
        return self.start(pod)

    def resize_pool(self) -> None:
        """Give the containers of the shared pool its present CPUs."""
        for uid, containers in self.running.items():
            for container in self.pods[uid].containers:
                if not container.cpus and containers[container.name].process.poll() is None:
                    containers[container.name].update_cpus(self.default)

    def start(self, pod: Pod) -> dict[str, Running]:
        """Start an admitted pod: its sandbox, which holds the namespaces, then its containers."""
        self.pods[pod.uid] = pod
        path = ROOT
        for part in () if self.systemd else pod.cgroup_path.parts:
            path /= part
            if not path.exists():
                path.mkdir()
                Cgroup(path).delegate()
        running = self.running.setdefault(pod.uid, {})
        sleep = (
            'ln -s "$(command -v sleep)" /run/pause; echo pause; exec /run/pause infinity'  # its name is pause in /proc
        )
        pause = Container(("sh", "-c", sleep), name="POD", cgroupfs="none")
        running["POD"] = self.start_container(pod, pause, None)
        running["POD"].wait_for("pause")
        sandbox = running["POD"].pid
        for container in pod.containers:
            running[container.name] = self.start_container(pod, container, sandbox)
        return running

    def restart(self, uid: str, name: str = "main") -> Running:
        """Start a container that has ended again in its pod, as with ``restartPolicy: Always``."""
        [container] = [each for each in self.pods[uid].containers if each.name == name]
        ended = self.running[uid][name]
        ended.wait()
        ended.delete()
        self.running[uid][name] = self.start_container(self.pods[uid], container, self.running[uid]["POD"].pid)
        return self.running[uid][name]

    def start_container(self, pod: Pod, container: Container, sandbox: int | None) -> Running:
        """Make a container's bundle and run it; *sandbox* is the process whose namespaces it joins."""
        # 64 hexadecimal digits, as containerd's: readers of a cgroup's path recognise a container by them.
        name = hashlib.sha256(f"{pod.uid}/{container.name}".encode()).hexdigest()
        scope = Cgroup(ROOT / pod.cgroup_path / f"cri-containerd-{name}.scope")
        bundle = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.scratch))
        for directory in ("root", "upper", "work"):
            (bundle / directory).mkdir()
        if not pod.host_users:
            os.chown(bundle / "upper", pod.first_id, pod.first_id)
            for each in (bundle, *bundle.parents):  # the runtime looks for the root as the pod's root
                each.chmod(stat.S_IMODE(each.stat().st_mode) | 0o111)
        layers = f"lowerdir={container.image or '/'},upperdir={bundle / 'upper'},workdir={bundle / 'work'}"
        subprocess.run(["mount", "-t", "overlay", "-o", layers, name, str(bundle / "root")], check=True)
        cpus = CpuSet() if sandbox is None else container.cpus or self.default
        cgroup = f"{pod.cgroup_path.name}:cri-containerd:{name}" if self.systemd else str(scope)
        config = oci_config(pod, container, sandbox, bundle / "root", cgroup, cpus)
        (bundle / "config.json").write_text(json.dumps(config))
        runtime = runtime_argv(pod.runtime if sandbox else SANDBOX_RUNTIME, systemd=self.systemd)
        moved = " ".join(f"{3 + index}<&{number}" for index, number in enumerate(container.descriptors))
        inherit = ("bash", "-c", f'exec {moved}; exec "$@"', "bash") if moved else ()
        preserve = (f"--preserve-fds={len(container.descriptors)}",) if moved else ()
        process = subprocess.Popen(
            [*inherit, *runtime, "run", *preserve, "--bundle", str(bundle), name],
            pass_fds=container.descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        return Running(name, runtime, scope, process)

    def stop(self, uid: str, grace: float = SECONDS) -> dict[str, int]:
        """End a pod: SIGTERM, after *grace* SIGKILL, then its cgroups. Return each container's exit status.

        The state file keeps its entries until :meth:`reconcile`.
        """
        running = self.running.pop(uid)
        end = time.monotonic() + grace
        alive = {name: container for name, container in running.items() if container.process.poll() is None}
        for name, container in alive.items():
            if name != "POD" and grace:
                with contextlib.suppress(AssertionError):  # it may end at this very moment
                    container.kill()
        for name, container in alive.items():
            if name != "POD":
                with contextlib.suppress(subprocess.TimeoutExpired):
                    container.process.wait(max(0, end - time.monotonic()))
        for container in running.values():
            container.delete()
        statuses = {name: container.wait() for name, container in running.items()}
        slice_ = self.pods[uid].cgroup_path
        if self.systemd:
            subprocess.run(["systemctl", "stop", slice_.name], check=True)
        Cgroup(ROOT / slice_).remove()
        return {name: status for name, status in statuses.items() if name != "POD"}


def replace(path: Path, text: str) -> None:
    """Write a checkpoint as the kubelet does: a temporary file in the same directory, renamed over it (``util/store``)."""
    fd, name = tempfile.mkstemp(prefix=f".{path.name}", dir=path.parent)
    with os.fdopen(fd, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    Path(name).replace(path)


def cpu_checksum(policy: str, default: str, entries: Mapping[str, Mapping[str, str]]) -> int:
    """Return the checksum of a CPU Manager checkpoint: FNV-1a of the text that go-spew makes of the structure."""
    pods = " ".join(
        f"{uid}:map[{' '.join(f'{name}:{cpus}' for name, cpus in sorted(containers.items()))}]"
        for uid, containers in sorted(entries.items())
    )
    text = (
        f"(*state.CPUManagerCheckpoint){{PolicyName:(string){policy} DefaultCPUSet:(string){default} "
        f"Entries:(map[string]map[string]string)map[{pods}] Checksum:(checksum.Checksum)0}}"
    )
    value = 0x811C9DC5
    for byte in text.encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value


def oci_config(
    pod: Pod, container: Container, sandbox: int | None, root: Path, cgroup: str, cpus: CpuSet
) -> dict[str, Any]:
    """Return the bundle's ``config.json`` (OCI runtime specification 1.0), shaped as containerd's."""
    privileged = container.privileged
    default = () if container.drop_all else DEFAULT_CAPABILITIES
    bounding = ALL_CAPABILITIES if privileged else (*default, *container.capabilities)
    project = {"PYTHONPATH": "/project"} if container.image is None else {}
    kept = [] if container.uid else list(bounding)
    cgroupfs = container.cgroupfs or ("rw" if privileged else "ro")
    resources: dict[str, Any] = {
        "memory": {"limit": container.memory},
        "hugepageLimits": [{"pageSize": size, "limit": limit} for size, limit in container.hugepages.items()],
        "devices": [{"allow": privileged, "access": "rwm"}],
    }
    if cpus:
        resources["cpu"] = {"cpus": str(cpus), **({"mems": str(container.mems)} if container.mems else {})}
    devices = [device(path) for path in container.devices]
    if not privileged:
        resources["devices"] += [
            {"allow": True, "type": found["type"], "major": found["major"], "minor": found["minor"], "access": "rwm"}
            for found in devices
        ]
    return {
        "ociVersion": "1.0.2",
        "root": {"path": str(root), "readonly": container.read_only_root},
        "hostname": pod.uid[:60],
        "process": {
            "user": {"uid": container.uid, "gid": container.uid},
            "args": list(container.command),
            "env": [
                f"{name}={value}"
                for name, value in {
                    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
                    **project,
                    **container.environment,
                }.items()
            ],
            "cwd": "/",
            "noNewPrivileges": not container.allow_privilege_escalation,
            "oomScoreAdj": OOM_SCORE_ADJ[pod.qos],
            "capabilities": {
                "bounding": list(bounding),
                **({"effective": kept, "permitted": kept} if kept else {}),
            },
        },
        "mounts": list(mounts(pod, container, cgroupfs)),
        "linux": {
            "cgroupsPath": cgroup,
            "resources": resources,
            "devices": devices,
            "namespaces": namespaces(pod, container, sandbox),
            **({} if pod.host_users else {"uidMappings": pod.id_mappings, "gidMappings": pod.id_mappings}),
            **({"seccomp": seccomp(container.forbidden)} if container.forbidden else {}),
        },
    }


def device(path: str) -> dict[str, Any]:
    """Return the description of one of the host's device nodes."""
    found = os.stat(path)  # noqa: PTH116 - the description takes numbers
    return {
        "path": path,
        "type": "b" if stat.S_ISBLK(found.st_mode) else "c",
        "major": os.major(found.st_rdev),
        "minor": os.minor(found.st_rdev),
        "fileMode": 0o666,
    }


def seccomp(forbidden: Sequence[str]) -> dict[str, Any]:
    """Return a profile that allows everything but *forbidden*."""
    rule = {"names": list(forbidden), "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM}
    return {"defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64"], "syscalls": [rule]}


def namespaces(pod: Pod, container: Container, sandbox: int | None) -> list[dict[str, str]]:
    """Return a container's namespaces: the pod's for network, IPC and host name, its own for mounts and processes."""
    out = [{"type": "mount"}]
    for kind in ("network", "ipc", "uts", *(() if pod.host_users else ("user",))):
        proc = {"network": "net"}.get(kind, kind)
        out.append({"type": kind, **({} if sandbox is None else {"path": f"/proc/{sandbox}/ns/{proc}"})})
    if not pod.host_pid:
        shared = pod.share_processes and sandbox is not None
        out.append({"type": "pid", **({"path": f"/proc/{sandbox}/ns/pid"} if shared else {})})
    if (container.cgroup_namespace or ("host" if container.privileged else "private")) == "private":
        out.append({"type": "cgroup"})
    return out


def mounts(pod: Pod, container: Container, cgroupfs: str) -> list[dict[str, Any]]:
    """Return a container's mounts. In a user namespace the owners of the pod's volumes are mapped as its users are."""
    quiet = ["nosuid", "noexec", "nodev"]
    sys_mode = "rw" if container.privileged else "ro"
    out: list[dict[str, Any]] = [{"destination": "/proc", "type": "proc", "source": "proc", "options": quiet}]
    if container.privileged:
        out.append({"destination": "/dev", "type": "bind", "source": "/dev", "options": ["rbind", "rw"]})
    else:
        out += [
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": ["newinstance", "mode=0620"]},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": [*quiet, "mode=1777"]},  # noqa: S108
        ]
    out.append({"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": [*quiet, sys_mode]})
    if cgroupfs != "none":
        out.append(
            {
                "destination": "/sys/fs/cgroup",
                "type": "cgroup",
                "source": "cgroup",
                "options": [*quiet, "relatime", cgroupfs],
            }
        )
    if container.image is None:
        out += [
            {"destination": "/run", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=755"]},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=1777"]},  # noqa: S108
            {"destination": "/project", "type": "bind", "source": str(PROJECT), "options": ["rbind", "ro"]},
        ]
    mapped = {} if pod.host_users else {"uidMappings": pod.id_mappings, "gidMappings": pod.id_mappings}
    out += [
        {"destination": destination, "type": "bind", "source": str(source), "options": ["rbind", mode], **mapped}
        for source, destination, mode in container.mounts
    ]
    return out
