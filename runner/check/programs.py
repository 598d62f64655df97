"""Judgements about the programs and services an instance leans on: QEMU and its like, kubelet, controller (pure)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

import attrs

from runner.check.finding import Check, Finding, Place
from runner.cpuset import CpuSet
from runner.facts.host import Virtiofsd
from runner.kernel.kubelet_files import Frozen
from runner.kubelet.state import CpuState
from runner.plan.host_checks import too_old

QEMU = Check("qemu", "it is the machine")
VIRTIOFSD = Check("virtiofsd", "each [[share]] takes one")
DNSMASQ = Check("dnsmasq", "each [[network]] takes one: it gives the guest its address")
SLEEP = Check("sleep", "it is the anchor that keeps the pod's cgroup from being removed")
CPU_MANAGER = Check("cpu-manager", "only the kubelet's static policy gives a pod CPUs of its own")
MEMORY_MANAGER = Check(
    "memory-manager", "only the kubelet's Static policy keeps guest RAM on the NUMA nodes of its CPUs"
)
TOPOLOGY_MANAGER = Check(
    "topology-manager", "it decides whether CPUs, memory and devices of a pod lie on the same NUMA nodes"
)
CONTROLLER = Check(
    "controller", "it keeps everything but the vCPUs off the exclusive CPUs; without it only CPU masks do"
)

PROTOCOL = 1

STATIC = (
    "set `cpuManagerPolicy: static` and `reservedSystemCPUs` in the kubelet's configuration, drain the node, "
    "rm {0}, systemctl restart kubelet"
)


@attrs.frozen
class Program:
    """A program that was looked for, and what it said when asked: *reason* is why it is of no use."""

    path: PurePosixPath | None
    said: str = ""
    error: str | None = None


def qemu_error(said: str) -> str | None:
    """Return what is wrong with a QEMU that says *said* when asked for its version."""
    match = re.match(r"QEMU emulator version (\d[\d.]*)", said)
    return too_old(match[1]) if match else f"it says {said!r} when asked for its version"


def dnsmasq_error(said: str) -> str | None:
    """Return what is wrong with a dnsmasq that says *said*: its version and what it was built with."""
    return "it was built without DHCP" if re.search(r"\bno-DHCP\b", said) else None


def judge_program(check: Check, name: str, package: str, program: Program) -> Finding:
    """Judge a program that was looked for as *name* and comes in *package*."""
    bad = check.fatal if check in {QEMU, SLEEP} else check.warning
    install = f"apt-get install {package}"
    if program.path is None:
        return bad(f"cannot find the program {name!r} in PATH", install)
    if program.error is not None:
        return bad(f"{program.path}: {program.error}", install)
    version = re.search(r"version (\S+)", program.said)
    return check.ok(f"{program.path} {version[1]}" if version else str(program.path))


def judge_virtiofsd(found: Virtiofsd | None, reason: str) -> Finding:
    """Judge the virtiofsd that a share would get; *reason* is why there is none."""
    if found is None:
        return VIRTIOFSD.warning(f"cannot use virtiofsd: {reason}", "apt-get install virtiofsd")
    version = ".".join(map(str, found.version))
    kind = "in Rust" if found.rust else "in C"
    return VIRTIOFSD.ok(f"{found.path} {version} ({kind}){'' if found.read_only else '; it cannot share read-only'}")


def judge_cpu_manager(path: str, state: CpuState | Frozen, reason: str) -> Finding:
    """Judge what ``cpu_manager_state`` says; *reason* is why it is not there or not to be read, if so."""
    if reason:
        return CPU_MANAGER.unknown(f"cannot read {path}: {reason}", "ask on the node, as root")
    if isinstance(state, Frozen):
        return CPU_MANAGER.fatal(
            state.reason, f"wait for the kubelet to write it again, or: rm {path}, systemctl restart kubelet"
        )
    if state.policy != "static":
        return CPU_MANAGER.fatal(f"the CPU Manager's policy is {state.policy!r}", STATIC.format(path))
    if len(state.shared_pool) < 2:  # noqa: PLR2004 - one CPU for everything
        return CPU_MANAGER.warning(
            f"the shared pool is '{state.shared_pool}', and everything that has no CPUs of its own shares it",
            "name two CPUs or more in `reservedSystemCPUs` of the kubelet's configuration",
        )
    return CPU_MANAGER.ok(f"static; shared pool '{state.shared_pool}', exclusive '{state.exclusive()}'")


def judge_memory_manager(policy: str, reserved: Mapping[int, int], reason: str) -> Finding:
    """Judge ``memory_manager_state``: its policy and the bytes reserved by NUMA node; *reason* as above."""
    if reason:
        return MEMORY_MANAGER.unknown(f"cannot read its state: {reason}", "ask on the node, as root")
    if policy != "Static":
        return MEMORY_MANAGER.warning(
            f"the Memory Manager's policy is {policy!r}",
            "set `memoryManagerPolicy: Static` and `reservedMemory` in the kubelet's configuration, drain the node, "
            "rm memory_manager_state in the kubelet's directory, systemctl restart kubelet",
        )
    told = ", ".join(f"{size >> 20} MiB on NUMA node {node}" for node, size in sorted(reserved.items()))
    return MEMORY_MANAGER.ok(f"Static; reserved for the system: {told or 'nothing'}")


def judge_topology_manager() -> Finding:
    """Say that the policy stands in no state file."""
    return TOPOLOGY_MANAGER.unknown(
        "its policy stands in the kubelet's configuration only", "grep topologyManager /var/lib/kubelet/config.yaml"
    )


def judge_controller(place: Place, path: str, answer: Mapping[str, object] | str | None, placement: str) -> Finding:
    """Judge the controller at the socket *path* for an instance of *placement*.

    *answer* is what it says of itself, or why it does not, or ``None`` where not even the socket's directory is. Then
    ``auto`` does without; where the directory is, it takes the controller, and waits for it in vain.
    """
    directory = path.rpartition("/")[0]
    if answer is None:
        remedy = {
            Place.NODE: "deploy the DaemonSet of instance-cgroup-controller on this node",
            Place.POD: f"mount the node's {directory} into the pod (hostPath), and run the controller on its node",
        }.get(place, f"start instance-cgroup-controller on this machine, and give the container {directory}")
        return CONTROLLER.warning(f"there is no {directory}, where its socket would be", remedy)
    refusing = _refusing(answer)
    if refusing is not None:
        needed = placement == "controller" or (placement == "auto" and place in {Place.NODE, Place.POD})
        return CONTROLLER.fatal(*refusing) if needed else CONTROLLER.warning(*refusing)
    assert not isinstance(answer, str)  # noqa: S101 - that is refusing
    faults = answer.get("faults")
    if isinstance(faults, list) and faults:
        found = f"it reports {len(faults)} faults: {faults[0]}"
        return CONTROLLER.warning(found, "mend what it says; its log has the others")
    if answer.get("trusting"):
        found = "it believes any process that it is who it says (--insecure-trust-peer)"
        return CONTROLLER.warning(found, "remove --insecure-trust-peer from its arguments")
    return CONTROLLER.ok(f"it answers at {path}; float has CPUs '{answer.get('float_cpuset')}'")


def _refusing(answer: Mapping[str, object] | str) -> tuple[str, str] | None:
    """Return why the controller would register no instance now, and the remedy."""
    if isinstance(answer, str):
        return answer, "restart instance-cgroup-controller on the node, and see its log"
    if answer.get("protocol") != PROTOCOL:
        return (
            f"it speaks protocol {answer.get('protocol')!r}, this program {PROTOCOL}",
            "install both from one release",
        )
    if answer.get("frozen"):
        return f"it registers nobody now: {answer['frozen']}", "mend what it says; it looks again by itself"
    if answer.get("kubelet") and answer.get("policy") == "none":
        return "it says that the kubelet gives no exclusive CPUs", STATIC.format("cpu_manager_state")
    return None


def shared_pool_of(state: CpuState | Frozen | None) -> CpuSet | None:
    """Return the shared pool, ``None`` where it is not known."""
    return state.shared_pool if isinstance(state, CpuState) and state.policy == "static" else None
