"""Judgements about what an instance depends on: QEMU and the other programs, the kubelet, the controller (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.check.finding import Check, Finding, Place
from runner.facts.host import Virtiofsd
from runner.facts.packages import install
from runner.kernel.kubelet_files import OTHER_ROOT, Frozen
from runner.kubelet.state import CpuState
from runner.plan.host_checks import too_old

QEMU = Check("qemu", "it runs the virtual machine")
VIRTIOFSD = Check("virtiofsd", "each [[share]] is served by one")
DNSMASQ = Check("dnsmasq", "each [[network]] has one: it gives the guest its address")
SLEEP = Check("sleep", "it is the anchor that keeps the pod's cgroup from being removed")
TRIAL_GUEST = Check("trial-guest", "where the accelerator runs no guest, an instance starts and its guest stays silent")
CPU_MANAGER = Check(
    "cpu-manager", "a pod has CPUs of its own by the kubelet's static policy, or by claims from a DRA driver for CPUs"
)
MEMORY_MANAGER = Check(
    "memory-manager", "only the kubelet's Static policy keeps guest RAM on the NUMA nodes of its CPUs"
)
TOPOLOGY_MANAGER = Check(
    "topology-manager", "it decides whether CPUs, memory and devices of a pod lie on the same NUMA nodes"
)
CONTROLLER = Check("controller", "it keeps every other thread off the exclusive CPUs; without it only CPU masks do")
DISTURBANCES = Check(
    "disturbances",
    "interrupts and the kernel's work queues take time from vCPUs, too, and deep idle states wake up late",
)

PROTOCOLS = (3,)
"""The newest comes last; a controller of an earlier one has no domain for each instance."""

KubeletState = CpuState | Frozen
"""What ``cpu_manager_state`` holds, or why it does not settle."""

STATIC = (
    "set `cpuManagerPolicy: static` and `reservedSystemCPUs` in the kubelet's configuration, drain the node, "
    "rm {0}, systemctl restart kubelet; or install a DRA driver for CPUs"
)


@frozen
class Program:
    """A program that was looked for and tried: its first lines of *output*, or the *error* that makes it unusable."""

    path: PurePosixPath | None
    output: str = ""
    error: str | None = None


def qemu_error(output: str) -> str | None:
    """Return what is wrong with a QEMU whose ``--version`` prints *output*; ``None`` if nothing is."""
    match = re.match(r"QEMU emulator version (\d[\d.]*)", output)
    return too_old(match[1]) if match else f"it prints {output!r} when asked for its version"


def dnsmasq_error(output: str) -> str | None:
    """Return what is wrong with a dnsmasq whose ``--version`` prints *output*, its compile-time options; ``None`` if nothing is."""
    return "it was built without DHCP" if re.search(r"\bno-DHCP\b", output) else None


def judge_program(check: Check, name: str, program: Program, os_release: str) -> Finding:
    """Judge a program that was looked for as *name*; *os_release* is the text of os-release(5)."""
    bad = check.fatal if check in {QEMU, SLEEP} else check.warning
    remedy = install(name, os_release)
    if program.path is None:
        return bad(f"cannot find the program {name!r} in PATH", remedy)
    if program.error is not None:
        return bad(f"{program.path}: {program.error}", remedy)
    version = re.search(r"version (\S+)", program.output)
    return check.ok(f"{program.path} {version[1]}" if version else str(program.path))


def judge_virtiofsd(found: Virtiofsd | None, reason: str, os_release: str) -> Finding:
    """Judge the virtiofsd that a share would get; *reason* is why there is none."""
    if found is None:
        return VIRTIOFSD.warning(f"cannot use virtiofsd: {reason}", install("virtiofsd", os_release))
    version = ".".join(map(str, found.version))
    kind = "in Rust" if found.rust else "in C"
    return VIRTIOFSD.ok(f"{found.path} {version} ({kind}){'' if found.read_only else '; it cannot share read-only'}")


def judge_trial_guest(accel: str, error: str | None, seconds: float) -> Finding:
    """Judge what came of a trial guest: *error* is why it did not run to its end, ``None`` if it did within *seconds*."""
    if error is None:
        return TRIAL_GUEST.ok(f"a trial guest ran under {accel.upper()} to its end in {seconds:.1f} s")
    if accel == "kvm":
        return TRIAL_GUEST.fatal(
            f"KVM runs no guest here: {error}", 'set cpu.accel = "tcg", or "tried" for KVM where it works'
        )
    return TRIAL_GUEST.fatal(f"QEMU emulates no guest here: {error}", "install the packages of QEMU and SeaBIOS again")


def judge_cpu_manager(path: str, state: KubeletState, reason: str, *, has_driver: bool = False) -> Finding:
    """Judge ``cpu_manager_state``, which has been read into *state*; *reason* is why it cannot be read, empty if it can.

    *has_driver* tells whether a DRA driver for CPUs is registered with the kubelet, which needs another policy than ``static``.
    """
    if reason:
        return CPU_MANAGER.unknown(f"cannot read {path}: {reason}", _readable(reason))
    if isinstance(state, Frozen):
        return CPU_MANAGER.fatal(
            state.reason, f"wait for the kubelet to write it again, or: rm {path}, systemctl restart kubelet"
        )
    if state.policy != "static" and (has_driver or state.exclusive()):
        return CPU_MANAGER.ok(
            f"policy {state.policy!r}, and a DRA driver gives CPUs by resource claims: shared pool '{state.shared_pool}', "
            f"exclusive '{state.exclusive()}'"
        )
    if state.policy != "static":
        return CPU_MANAGER.fatal(f"the CPU Manager's policy is {state.policy!r}", STATIC.format(path))
    if len(state.shared_pool) < 2:  # noqa: PLR2004 - one CPU for everything
        return CPU_MANAGER.warning(
            f"the shared pool is '{state.shared_pool}', and every process without exclusive CPUs shares it",
            "name two CPUs or more in `reservedSystemCPUs` of the kubelet's configuration",
        )
    return CPU_MANAGER.ok(f"static; shared pool '{state.shared_pool}', exclusive '{state.exclusive()}'")


def _readable(reason: str) -> str:
    """Return how a state file that cannot be read for *reason* can be read."""
    return OTHER_ROOT if "No such file or directory" in reason else "run check on the node, as root"


def judge_memory_manager(policy: str, reserved: Mapping[int, int], reason: str) -> Finding:
    """Judge ``memory_manager_state``: its policy, and NUMA node → *reserved* bytes; *reason* is why it cannot be read."""
    if reason:
        return MEMORY_MANAGER.unknown(f"cannot read its state: {reason}", _readable(reason))
    if policy != "Static":
        return MEMORY_MANAGER.warning(
            f"the Memory Manager's policy is {policy!r}",
            "set `memoryManagerPolicy: Static` and `reservedMemory` in the kubelet's configuration, drain the node, "
            "rm memory_manager_state in the kubelet's directory, systemctl restart kubelet",
        )
    shown = ", ".join(f"{size >> 20} MiB on NUMA node {node}" for node, size in sorted(reserved.items()))
    return MEMORY_MANAGER.ok(f"Static; reserved for the system: {shown or 'nothing'}")


def judge_topology_manager() -> Finding:
    """Return that the policy cannot be judged, because it is in no state file."""
    return TOPOLOGY_MANAGER.unknown(
        "its policy is only in the kubelet's configuration", "grep topologyManager /var/lib/kubelet/config.yaml"
    )


def judge_controller(place: Place, path: str, answer: Mapping[str, object] | str | None, placement: str) -> Finding:
    """Judge the controller at the socket *path* for an instance of *placement*.

    *answer* is its status, or why it does not answer, or ``None`` where not even the socket's directory exists. Then
    ``auto`` chooses another back end; where the directory exists, it chooses the controller, and waits for it in vain.
    """
    directory = path.rpartition("/")[0]
    if answer is None:
        remedy = {
            Place.NODE: "deploy the DaemonSet of instance-cgroup-controller on this node",
            Place.POD: f"mount the node's {directory} into the pod (hostPath), and run the controller on its node",
        }.get(place, f"start instance-cgroup-controller on this machine, and give the container {directory}")
        return CONTROLLER.warning(f"there is no {directory}, where its socket would be", remedy)
    needed = placement == "controller" or (placement == "auto" and place in {Place.NODE, Place.POD})
    bad = CONTROLLER.fatal if needed else CONTROLLER.warning
    if isinstance(answer, str):
        return bad(answer, "restart instance-cgroup-controller on the node, and read its log")
    refusal = _refusal(answer)
    if refusal is not None:
        return bad(*refusal)
    faults = answer.get("faults")
    if isinstance(faults, list) and faults:
        found = f"it reports {len(faults)} faults: {faults[0]}"
        return CONTROLLER.warning(found, "fix what it reports; its log has the others")
    if answer.get("trusting"):
        found = "it trusts any process about which instance it is (--insecure-trust-peer)"
        return CONTROLLER.warning(found, "remove --insecure-trust-peer from its arguments")
    return _judge_guarantee(path, answer)


def _judge_guarantee(path: str, answer: Mapping[str, object]) -> Finding:
    """Judge whether the kernel keeps others off instances' CPUs: in general, and where it has refused one."""
    exclusive, arranged = answer.get("partitions", "the controller is older than partitions"), answer.get("arranged")
    if exclusive == "enforced" and isinstance(arranged, list) and arranged:
        reasons = "; ".join(f"{each['uuid']}: {each['reason']}" for each in arranged)
        found = f"the guarantee of {len(arranged)} instances is arranged, not enforced: {reasons}"
        return CONTROLLER.warning(found, "fix what the reason names; the kernel is asked again every 30 s")
    guarantee = "enforced" if exclusive == "enforced" else f"arranged ({exclusive})"
    return CONTROLLER.ok(f"it answers at {path}; float has CPUs '{answer.get('float_cpuset')}'; guarantee {guarantee}")


def judge_disturbances(answer: Mapping[str, object] | str | None) -> Iterator[Finding]:
    """Judge what the controller says of the machine's settings that it cannot keep off the instances' CPUs."""
    reasons = answer.get("disturbances") if isinstance(answer, Mapping) else None
    if not isinstance(reasons, list):
        yield DISTURBANCES.unknown(
            "no controller says what else disturbs the instances' CPUs", "install a controller of this release"
        )
        return
    for reason in reasons:
        yield DISTURBANCES.warning(str(reason), "change what it names, or accept it; instances run all the same")
    if not reasons:
        yield DISTURBANCES.ok("the controller could change every setting that instances need")


def _refusal(answer: Mapping[str, object]) -> tuple[str, str] | None:
    """Return why a controller of this status would register no instance, and the remedy; ``None`` if it would."""
    if answer.get("protocol") not in PROTOCOLS:
        return (
            f"it speaks protocol {answer.get('protocol')!r}, this program {PROTOCOLS[-1]}",
            "install both from one release",
        )
    if answer.get("frozen"):
        return f"it registers no instance now: {answer['frozen']}", "fix what it reports; it tries again by itself"
    if answer.get("kubelet") and answer.get("policy") == "none" and not answer.get("claims"):
        return "it reports that the kubelet gives no exclusive CPUs", STATIC.format("cpu_manager_state")
    return None


def shared_pool_of(state: KubeletState | None) -> CpuSet | None:
    """Return the shared pool, ``None`` where it is not known, or no pod has CPUs of its own."""
    return (
        state.shared_pool if isinstance(state, CpuState) and (state.policy == "static" or state.exclusive()) else None
    )


def assigned_by(state: KubeletState | None) -> Mapping[str, CpuSet]:
    """Return pod UID → the pod's exclusive CPUs, empty where they are not known."""
    return state.assigned() if isinstance(state, CpuState) else {}
