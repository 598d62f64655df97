"""The plan of the CPUs: the placement back end, the CPU of each vCPU, and the topology that the guest sees."""

from __future__ import annotations

from runner.base.cpuset import CpuSet
from runner.base.errors import RefusedError
from runner.facts.host import HostFacts
from runner.placement.backends import (
    AffinityPlacement,
    Backend,
    ControllerPlacement,
    CpuTuning,
    DelegatedPlacement,
    Placement,
)
from runner.placement.guest_topology import GuestTopology, flat, guest_topology, unbound
from runner.placement.pins import PinPolicy, choose_cpus, place
from runner.plan.host_checks import ASKING_FOR_LESS, CPU_TIME, OWN_CPUS, shared_cpus, too_little_time
from runner.plan.machine import VcpuHotplugPlan
from runner.plan.memory import PAGE_SIZE
from runner.plan.problems import Problems
from runner.plan.resolve import usable_cpus
from runner.spec.instance import CpuSpec, InstanceSpec
from runner.spec.rules import format_size

_MASK_REMEDY = "see CPUAffinity= in the systemd unit or system.conf of what started it, and taskset"


def choose_backend(cpu: CpuSpec, facts: HostFacts, problems: Problems) -> Backend:
    """Return the placement back end: the one in the spec, or the best one that works."""
    errors: dict[Backend, tuple[str | None, str]] = {
        "controller": (facts.controller_error, facts.controller_remedy),
        "delegated": (facts.delegation_error, ""),
        "affinity": (None, ""),
    }
    if cpu.placement == "auto":
        backend = next(name for name, (reason, _) in errors.items() if reason is None)
    else:
        backend = cpu.placement
        reason, remedy = errors[backend]
        if reason is not None:
            problems.refuse("cpu.placement", f"{backend!r} cannot be used: {reason}", remedy)
    if cpu.exclusive == "enforced" and backend != "controller":
        problems.refuse(
            "cpu.exclusive",
            f'"enforced" cannot be had with placement {backend!r}',
            "only the controller of the Kubernetes node makes isolated partitions",
        )
    if backend == "affinity" and facts.pod is None and cpu.placement == "auto":
        problems.remark(
            "cpu.placement",
            "placement 'affinity' is second best: processes of others may run on the vCPUs' CPUs",
            "examples/cpus.md, 'Whose CPUs', has the others, and `instance-runner check` what they lack here",
        )
    elif backend == "affinity":
        unusable = {
            name: f"{reason}; {remedy}" if remedy else reason for name, (reason, remedy) in errors.items() if reason
        }
        why = "".join(f"; no {name!r}: {reason}" for name, reason in unusable.items() if cpu.placement == "auto")
        problems.remark(
            "cpu.placement",
            "placement 'affinity' is second best: nothing but CPU masks keeps the vCPUs' CPUs free, and processes "
            f"of others may run there{why}",
        )
    return backend


def plan_placement(
    cpu: CpuSpec, vcpus: int, backend: Backend, facts: HostFacts, problems: Problems, *, growing: bool = False
) -> Placement | None:
    """Decide the CPU of each of *vcpus* vCPUs; ``None`` if impossible. *growing* is true if more may be plugged later."""
    _refuse_shared_cpus(cpu, vcpus, backend, facts, problems)
    allowed = usable_cpus(backend, facts)
    masked = _remark_mask(backend, facts, problems)
    if cpu.cpus is not None and not cpu.cpus <= allowed:
        problems.refuse(
            "cpu.cpus",
            f"'{cpu.cpus - allowed}' of '{cpu.cpus}' may not be used by this process, which has '{allowed}'{masked}",
        )
        return None
    if vcpus > len(allowed):
        problems.refuse(
            "cpu.count",
            f"asks for {vcpus} vCPUs, but this process may use {len(allowed)} CPUs ('{allowed}'){masked}",
            _MASK_REMEDY if masked else "one CPU for each vCPU",
        )
        return None
    if backend == "controller" and vcpus < len(allowed) and not growing:
        problems.refuse(
            "cpu.count",
            f"asks for {vcpus} vCPUs, but the container has {len(allowed)} CPUs ('{allowed}'), and placement \"controller\" needs a "
            "vCPU for each",
            "give the container as many CPUs as vCPUs, whole ones with requests equal to limits",
        )
        return None
    pins = _choose_pins(cpu, vcpus, allowed, facts, problems)
    return None if pins is None else _placement(backend, pins, cpu, facts, problems)


def _placement(
    backend: Backend, pins: tuple[int, ...], cpu: CpuSpec, facts: HostFacts, problems: Problems
) -> Placement:
    allowed, tuning = usable_cpus(backend, facts), CpuTuning(cpu.latency, cpu.cache_ways, cpu.memory_bandwidth)
    if backend == "controller":
        uid, enforced = facts.container_uid or "", cpu.exclusive == "enforced"
        return ControllerPlacement(allowed, pins, cpu.controller, uid, enforced, sweep=cpu.sweep, tuning=tuning)
    if tuning != CpuTuning():
        problems.remark(
            "cpu.placement",
            f"cpu.latency, cpu.cache_ways and cpu.memory_bandwidth have no effect with placement {backend!r}: only the node's "
            "controller can change the machine's settings",
        )
    cpus = CpuSet(pins)
    rest = allowed - cpus
    if not rest:
        problems.remark(
            "cpu.count",
            f"all CPUs this process may use ('{allowed}') belong to vCPUs: QEMU's own threads, dnsmasq, virtiofsd and this "
            "program share them",
            "give it more CPUs than vCPUs",
        )
    if backend == "delegated":
        return DelegatedPlacement(cpus, pins, rest or allowed, shared=not rest, sweep=cpu.sweep and bool(rest))
    return AffinityPlacement(cpus, pins, rest or allowed, shared=not rest)


def _refuse_shared_cpus(cpu: CpuSpec, vcpus: int, backend: Backend, facts: HostFacts, problems: Problems) -> None:
    """Refuse a pod that does not have its CPUs to itself all the time, unless the spec accepts that."""
    # The controller moves the vCPUs out of the pod's cgroup, where its cpu.max does not apply.
    short = None if backend == "controller" else too_little_time(facts.cpu_time, vcpus)
    shared = shared_cpus(facts.pod, facts.allowed_cpus, facts.hardware.online)
    for reason, remedy in ((shared, OWN_CPUS), (short, CPU_TIME)):
        if reason is None:
            continue
        if facts.pod is None or cpu.placement in ASKING_FOR_LESS:
            problems.remark("cpu.placement", reason, remedy)
        else:
            problems.refuse("cpu.placement", reason, f'{remedy}, or set it to "affinity" and accept shared CPUs')


def _remark_mask(backend: Backend, facts: HostFacts, problems: Problems) -> str:
    """Remark the effect of a CPU mask narrower than the cpuset; return the mask for refusals, empty if it has no effect.

    Since Linux 6.2 a process keeps its mask in every cpuset (``user_cpus_ptr``), and not every container runtime resets
    the mask that its own unit gave it.
    """
    if not facts.masked_cpus:
        return ""
    what = f"this process was started with the CPU mask '{facts.allowed_cpus - facts.masked_cpus}'"
    if backend != "affinity":
        problems.remark("cpu.cpus", f"{what} of its cpuset '{facts.allowed_cpus}', and lifts it", _MASK_REMEDY)
        return ""
    problems.remark(
        "cpu.cpus", f"'{facts.masked_cpus}' of the cpuset '{facts.allowed_cpus}' are not used: {what}", _MASK_REMEDY
    )
    return f": {what}, its cpuset has '{facts.allowed_cpus}'"


def _choose_pins(
    cpu: CpuSpec, vcpus: int, allowed: CpuSet, facts: HostFacts, problems: Problems
) -> tuple[int, ...] | None:
    policy = None if cpu.pinning == "auto" else PinPolicy(cpu.pinning)
    try:
        cpus = cpu.cpus or choose_cpus(facts.hardware, allowed, vcpus)
        placed = place(vcpus, cpus, facts.hardware, policy=policy)
    except RefusedError as error:
        problems.refuse("cpu.cpus" if cpu.cpus else "cpu.count", error.message, error.remedy)
        return None
    for finding in placed.findings:
        problems.remark("cpu.pinning", finding.found, finding.remedy)
    return placed.pins


def plan_topology(
    spec: InstanceSpec, pins: tuple[int, ...], memory: int, facts: HostFacts, problems: Problems, *, siblings: bool
) -> GuestTopology | None:
    """Decide the topology that the guest sees; *siblings* is true if its CPU model can report siblings.

    Without KVM, QEMU's model ``max`` reports an AMD CPU without siblings.
    """
    real = spec.cpu.topology == "host"
    try:
        topology = guest_topology(
            pins,
            facts.hardware,
            memory,
            page_size=spec.memory.page_size or (PAGE_SIZE if real else 1),
            memory_nodes=facts.memory_nodes,
            siblings=siblings,
        )
    except RefusedError as error:
        problems.refuse("memory.size", error.message, f'{error.remedy}, or set cpu.topology = "flat"')
        return None
    if not spec.memory.bind:
        topology = unbound(topology)
    for each in topology.numa_nodes:
        if each.bound and each.bound != (each.host,):
            where = " and ".join(map(str, each.bound))
            problems.remark(
                "cpu.topology",
                f"{format_size(each.memory)} of memory for the vCPUs on the host's NUMA node {each.host} come from {where}: "
                "it has not that much, or none that this pod may use",
            )
    return topology if real else flat(topology)


def plan_vcpu_hotplug(
    spec: InstanceSpec, vcpus: int, topology: GuestTopology, problems: Problems
) -> VcpuHotplugPlan | None:
    """Decide whether vCPUs can be plugged into a guest that starts with *vcpus* and sees *topology*.

    Each plugged vCPU is one more core. The guest is shown at its start how many threads its cores have, which of them share a cache, and
    their NUMA nodes, at a time when the pod's later CPUs are not known.
    """
    most = spec.hotplug.cpus
    if most is None:
        return None
    if most < vcpus:
        problems.refuse(
            "hotplug.cpus", f"is {most}, and the guest starts with {vcpus} vCPUs", f"set it to {vcpus} at least"
        )
    sizes = (
        (topology.sockets, "sockets"),
        (topology.dies, "L3 caches"),
        (topology.threads, "threads in each core"),
        (len(topology.numa_nodes), "NUMA nodes"),
    )
    if several := ", ".join(f"{number} {what}" for number, what in sizes if number > 1):
        problems.refuse(
            "hotplug.cpus",
            f"needs a guest with one socket of cores with one thread each, and this one sees {several}, which the vCPUs that "
            "are plugged later would falsify",
            'set cpu.topology = "flat"',
        )
    return VcpuHotplugPlan(most, alike=spec.cpu.topology == "host")
