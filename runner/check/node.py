"""Checks of the node's services: the kubelet's managers from their state files, and the controller from its own answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.base.errors import in_shell
from runner.base.judgement import Judgement
from runner.check.checks import CheckContext, CheckedHost, KubeletState, Place, check
from runner.kernel.kubelet_files import OTHER_ROOT, Frozen, attempt, is_registered
from runner.kubelet.claims import DRIVER_SOCKETS
from runner.kubelet.state_files import KubeletFiles, parse_memory_state

PROTOCOLS = (3,)
"""The newest comes last; a controller with an earlier one has no domain for each instance."""


STATIC = (
    "set `cpuManagerPolicy: static` and `reservedSystemCPUs` in the kubelet's configuration, drain the node, "
    "rm {0}, systemctl restart kubelet; or install a DRA driver for CPUs"
)


def kubelet_files(host: CheckedHost) -> KubeletFiles:
    """Return the paths of the kubelet's files."""
    return KubeletFiles(host.kubelet, host.root / "var/run/cdi")


@check(
    "cpu-manager",
    "a pod has CPUs of its own by the kubelet's static policy, or by claims from a DRA driver for CPUs",
    Place.NODE,
)
def cpu_manager(context: CheckContext) -> Iterator[Judgement]:
    """Judge the kubelet's state, and whether a DRA driver is registered."""
    files = kubelet_files(context.host)
    reason = "" if context.kubelet is not None else why_unreadable(files.cpu_state)
    has_driver = is_registered(files.plugins, DRIVER_SOCKETS)
    yield judge_cpu_manager(str(files.cpu_state), context.kubelet or Frozen(reason), reason, has_driver=has_driver)


def why_unreadable(path: Path) -> str:
    """Return the reason why *path* cannot be read, as strerror(3) words it; empty if it can."""
    try:
        path.read_bytes()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def judge_cpu_manager(path: str, state: KubeletState, reason: str, *, has_driver: bool = False) -> Judgement:
    """Judge ``cpu_manager_state``, whose content is *state*; *reason* is why it cannot be read, empty if it can.

    *has_driver* is true if a DRA driver for CPUs is registered with the kubelet; it needs another policy than ``static``.
    """
    if reason:
        return cpu_manager.unknown(f"cannot read {path}: {reason}", _readable(reason))
    if isinstance(state, Frozen):
        return cpu_manager.error(
            state.reason, f"wait for the kubelet to write it again, or: rm {in_shell(path)}, systemctl restart kubelet"
        )
    if state.policy != "static" and (has_driver or state.exclusive()):
        return cpu_manager.ok(
            f"policy {state.policy!r}, and a DRA driver gives CPUs by resource claims: shared pool '{state.shared_pool}', "
            f"exclusive '{state.exclusive()}'"
        )
    if state.policy != "static":
        return cpu_manager.error(f"the CPU Manager's policy is {state.policy!r}", STATIC.format(in_shell(path)))
    if len(state.shared_pool) < 2:  # noqa: PLR2004 - one CPU for everything
        return cpu_manager.warning(
            f"the shared pool is '{state.shared_pool}', and every process without exclusive CPUs shares it",
            "name two CPUs or more in `reservedSystemCPUs` of the kubelet's configuration",
        )
    return cpu_manager.ok(f"static; shared pool '{state.shared_pool}', exclusive '{state.exclusive()}'")


def _readable(reason: str) -> str:
    """Return the way to read a state file that cannot be read for *reason*."""
    return OTHER_ROOT if "No such file or directory" in reason else "run check on the node, as root"


@check("memory-manager", "only the kubelet's Static policy keeps guest RAM on the NUMA nodes of its CPUs", Place.NODE)
def memory_manager(context: CheckContext) -> Iterator[Judgement]:
    """Judge the manager's state."""
    state = attempt(kubelet_files(context.host).memory_state, parse_memory_state)
    if isinstance(state, Frozen):
        yield judge_memory_manager("", {}, state.reason)
        return
    numa_nodes = ((number, node.tables.get("memory")) for number, node in state.numa_nodes.items())
    yield judge_memory_manager(
        state.policy, {number: table.system_reserved for number, table in numa_nodes if table}, ""
    )


def judge_memory_manager(policy: str, reserved: Mapping[int, int], reason: str) -> Judgement:
    """Judge ``memory_manager_state``: its policy, and NUMA node → *reserved* bytes; *reason* is why it cannot be read."""
    if reason:
        return memory_manager.unknown(f"cannot read its state: {reason}", _readable(reason))
    if policy != "Static":
        return memory_manager.warning(
            f"the Memory Manager's policy is {policy!r}",
            "set `memoryManagerPolicy: Static` and `reservedMemory` in the kubelet's configuration, drain the node, "
            "rm memory_manager_state in the kubelet's directory, systemctl restart kubelet",
        )
    shown = ", ".join(f"{size >> 20} MiB on NUMA node {node}" for node, size in sorted(reserved.items()))
    return memory_manager.ok(f"Static; reserved for the system: {shown or 'nothing'}")


@check(
    "topology-manager",
    "it decides whether CPUs, memory and devices of a pod lie on the same NUMA nodes",
    Place.NODE,
)
def topology_manager(_: CheckContext) -> Iterator[Judgement]:
    """Report that it cannot be judged, because its policy is in no state file."""
    yield topology_manager.unknown(
        "its policy is only in the kubelet's configuration", "grep topologyManager /var/lib/kubelet/config.yaml"
    )


@check("controller", "it keeps every other thread off the exclusive CPUs; without it only CPU masks do")
def controller(context: CheckContext) -> Iterator[Judgement]:
    """Judge the controller's status."""
    return judge_controller(context.place, str(context.socket), context.controller, context.asked.placement)


def judge_controller(
    place: Place, path: str, answer: Mapping[str, object] | str | None, placement: str
) -> Iterator[Judgement]:
    """Judge the controller at the socket *path* for an instance of *placement*.

    *answer* is its status, or why it does not answer, or ``None`` where not even the socket's directory exists. In the last case ``auto``
    chooses another back end; if the directory exists, it chooses the controller, and would wait for it in vain.
    """
    directory = path.rpartition("/")[0]
    if answer is None:
        remedy = {
            Place.NODE: "deploy the DaemonSet of instance-cgroup-controller on this node",
            Place.POD: f"mount the node's {directory} into the pod (hostPath), and run the controller on its node",
        }.get(place, f"start instance-cgroup-controller on this machine, and give the container {directory}")
        yield controller.warning(f"there is no {directory}, where its socket would be", remedy)
        return
    needed = placement == "controller" or (placement == "auto" and place in {Place.NODE, Place.POD})
    bad = controller.error if needed else controller.warning
    if isinstance(answer, str):
        yield bad(answer, "restart instance-cgroup-controller on the node, and read its log")
        return
    refusal = _refusal(answer)
    if refusal is not None:
        yield bad(*refusal)
        return
    problems = tuple(_problems(answer))
    yield from problems
    if not problems:
        partitions = answer.get("partitions", "the controller is older than partitions")
        guarantee = "enforced" if partitions == "enforced" else f"arranged ({partitions})"
        float_cpus = answer.get("float_cpuset")
        yield controller.ok(f"it answers at {path}; float has CPUs '{float_cpus}', guarantee {guarantee}")


def _refusal(answer: Mapping[str, object]) -> tuple[str, str] | None:
    """Return the reason why a controller with this status would register no instance, and the remedy; ``None`` if it would."""
    if answer.get("protocol") not in PROTOCOLS:
        return (
            f"it speaks protocol {answer.get('protocol')!r}, this program {PROTOCOLS[-1]}",
            "install both from one release",
        )
    if answer.get("frozen"):
        return f"it registers no instance now: {answer['frozen']}", "fix what it reports: it tries again by itself"
    if answer.get("kubelet") and answer.get("policy") == "none" and not answer.get("claims"):
        return "it reports that the kubelet gives no exclusive CPUs", STATIC.format("cpu_manager_state")
    return None


def _problems(answer: Mapping[str, object]) -> Iterator[Judgement]:
    """Yield the problems that a working controller reports: its faults, and instances whose CPUs the kernel could not seal."""
    remedies = answer.get("remedies")
    for fault in map(str, _listed(answer, "faults")):
        remedy = remedies.get(fault) if isinstance(remedies, Mapping) else None
        yield controller.warning(fault, remedy or "fix what it names: the controller tries again by itself")
    if answer.get("trusting"):
        yield controller.warning(
            "it trusts any process about which instance it is (--insecure-trust-peer)",
            "remove --insecure-trust-peer from its arguments",
        )
    if answer.get("partitions") == "enforced":  # otherwise the same reason holds for all instances
        for each in _listed(answer, "arranged"):
            yield controller.warning(
                f"the guarantee of instance {each['uuid']} is arranged, not enforced: {each['reason']}",
                "fix what the reason names: the kernel is asked again every 30 s",
            )


def _listed(answer: Mapping[str, object], name: str) -> list[Any]:
    entries = answer.get(name)
    return entries if isinstance(entries, list) else []


@check(
    "disturbances",
    "interrupts and the kernel's work queues take time from vCPUs, too, and deep idle states wake up late",
    Place.NODE,
)
def disturbances(context: CheckContext) -> Iterator[Judgement]:
    """Judge the settings that the controller could not change."""
    return judge_disturbances(context.controller)


def judge_disturbances(answer: Mapping[str, object] | str | None) -> Iterator[Judgement]:
    """Judge the controller's report about the machine's settings that disturb the instances' CPUs."""
    reasons = answer.get("disturbances") if isinstance(answer, Mapping) else None
    if not isinstance(reasons, list):
        yield disturbances.unknown(
            "no controller says what else disturbs the instances' CPUs", "install a controller of this release"
        )
        return
    for reason in reasons:
        yield disturbances.warning(str(reason), "change what it names, or accept it; instances run all the same")
    if not reasons:
        yield disturbances.ok("the controller could change every setting that instances need")
