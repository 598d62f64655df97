"""Judgements about the CPUs: which pod owns them, and what else may run on them (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.check.finding import Check, Finding, Place
from runner.facts.hardware import Hardware
from runner.facts.host import PodQos
from runner.kernel.settings import Interrupt
from runner.placement.pins import place
from runner.plan.host_checks import CPU_TIME, OWN_CPUS, shared_cpus, too_little_time

OWN = Check("own-cpus", "a pod that asks for 20 CPUs has 20 CPUs only if no other pod is given any of them")
CORES = Check("cores", "threads of one core slow each other, and memory of another NUMA node is slower by half")
TIME = Check("cpu-time", "a vCPU that is throttled stands still for up to a tenth of a second at a time")
INTERRUPTS = Check("interrupts", "an interrupt on a vCPU's CPU stops the guest for as long as its handler runs")
NEIGHBOURS = Check("neighbours", "processes that the kubelet did not start run on its exclusive CPUs, too")
PID_NAMESPACE = Check(
    "pid-namespace", "only PID 1 adopts every orphan, and when it ends the kernel ends every process with it"
)
SIGNALS = Check(
    "signals", "the kernel drops a SIGTERM that PID 1 does not handle yet, as in the first 0.1 s of a Python program"
)

SHOWN = 6
"""How many interrupts a finding names."""

UNIFY = 'remove "hostPID" and "shareProcessNamespace" from the pod\'s manifest'
BLOCKING = 'ENTRYPOINT ["env", "--block-signal=TERM,INT,HUP", "instance-runner"]'


@frozen
class Init:
    """Process 1 of this PID namespace, which may be this process."""

    ours: bool
    name: str
    blocks_sigterm: bool
    handles_sigterm: bool


@frozen
class CpuNeighbour:
    """A populated cgroup that belongs neither to the kubelet nor to the controller, and the CPUs its members may use."""

    name: str
    cpus: CpuSet


def judge_own_cpus(pod: PodQos | None, allowed: CpuSet, online: CpuSet, *, asks_for_less: bool) -> Finding:
    """Judge whether the *allowed* CPUs belong to this pod, or container, alone.

    *asks_for_less* is whether the spec names a placement that needs no exclusive CPUs: ``run`` then starts without them.
    """
    reason = shared_cpus(pod, allowed, online)
    if reason is not None:
        return OWN.warning(reason, OWN_CPUS) if asks_for_less else OWN.fatal(reason, OWN_CPUS)
    if pod is not None and pod.has_claimed(allowed):
        return OWN.ok(f"a resource claim gives the container CPUs '{pod.claimed}' of '{online}'")
    if pod is not None and pod.qos == "guaranteed":
        return OWN.ok(f"the pod is Guaranteed ({pod.evidence}) and may use CPUs '{allowed}' of '{online}'")
    if pod is not None:
        return OWN.unknown(
            f"the pod's QoS class cannot be seen ({pod.evidence}); it may use CPUs '{allowed}' of '{online}'",
            "kubectl get pod NAME -o jsonpath='{.status.qosClass}' must say Guaranteed",
        )
    if online <= allowed:
        return OWN.warning(
            f"every CPU of the machine may be used ('{allowed}'): nothing keeps other processes off the vCPUs' CPUs",
            "start every container with CPUs of its own, as `docker run --cpuset-cpus=2-5`",
        )
    return OWN.unknown(
        f"CPUs '{allowed}' of '{online}' may be used; nothing here says whether they were given to others too",
        "compare with `docker inspect -f '{{.HostConfig.CpusetCpus}}'` of the other containers",
    )


def judge_cores(cpus: CpuSet, hardware: Hardware, others: CpuSet, owner: str) -> Iterator[Finding]:
    """Judge how the *cpus* of *owner* lie on cores and NUMA nodes; *others* are the exclusive CPUs of other pods."""
    cpus &= hardware.online
    findings = place(len(cpus), cpus, hardware, others=others).findings if cpus else ()
    for finding in findings:
        found, _, remedy = finding.message.partition(";")
        yield CORES.warning(f"{owner}: {found}", remedy.strip() or "name CPUs of one kind in cpu.cpus")
    if not findings:
        yield CORES.ok(f"{owner}: CPUs '{cpus}' are whole cores of one NUMA node")


def judge_cpu_time(place: Place, cpu_time: float | None, vcpus: int, throttled: int, *, asks_for_less: bool) -> Finding:
    """Judge ``cpu.max``: *cpu_time* CPUs for *vcpus*, ``None`` without a limit; *throttled* is ``nr_throttled`` of ``cpu.stat``."""
    reason = too_little_time(cpu_time, vcpus)
    if reason is not None:
        fatal = place is Place.POD and not asks_for_less
        return TIME.fatal(reason, CPU_TIME) if fatal else TIME.warning(reason, CPU_TIME)
    if throttled:
        return TIME.warning(f"cpu.max has stopped this container {throttled} times already", CPU_TIME)
    if cpu_time is None:
        return TIME.ok("no cpu.max limits it")
    return TIME.ok(f"cpu.max gives the time of {cpu_time:g} CPUs to {vcpus}")


def judge_interrupts(interrupts: Sequence[Interrupt], cpus: CpuSet, online: CpuSet) -> Finding:
    """Judge which interrupts are delivered to exclusive *cpus*."""
    delivered = [interrupt for interrupt in interrupts if not interrupt.cpus.isdisjoint(cpus)]
    if not interrupts:
        return INTERRUPTS.unknown("/proc/irq shows none", "run check on the node")
    if not delivered:
        return INTERRUPTS.ok(f"none is delivered to CPUs '{cpus}'")
    named = ", ".join(f"{interrupt.number} ({interrupt.name})" for interrupt in delivered[:SHOWN])
    more = f" and {len(delivered) - SHOWN} more" if len(delivered) > SHOWN else ""
    number, rest = delivered[0].number, online - cpus
    return INTERRUPTS.warning(
        f"{len(delivered)} may be delivered to CPUs '{cpus}': {named}{more}",
        f"the node's controller moves them (--move-interrupts), or: echo {rest} > /proc/irq/{number}/smp_affinity_list, and for "
        f"irqbalance IRQBALANCE_BANNED_CPULIST={cpus}; where the kernel refuses, boot with `isolcpus=managed_irq,{cpus}`",
    )


def judge_neighbours(neighbours: Sequence[CpuNeighbour], exclusive: CpuSet, shared_pool: CpuSet) -> Finding:
    """Judge whether processes in other cgroups may run on *exclusive* CPUs of the node."""
    overlapping = [each for each in neighbours if not each.cpus.isdisjoint(exclusive)]
    if not overlapping:
        return NEIGHBOURS.ok(f"nothing but pods may run on CPUs '{exclusive}'")
    return NEIGHBOURS.warning(
        f"{', '.join(each.name for each in overlapping)} may run on exclusive CPUs '{exclusive}'",
        f"systemctl set-property --runtime {overlapping[0].name} AllowedCPUs={shared_pool}; permanently: reservedSystemCPUs",
    )


def judge_init(place: Place, init: Init, *, in_initial_pid_namespace: bool) -> Iterator[Finding]:
    """Judge process 1 of a container or pod: whether it can be the runner, and whether SIGTERM can get lost."""
    if in_initial_pid_namespace or init.name == "pause":
        what = "the machine's own" if in_initial_pid_namespace else "shared with the pod's other containers"
        yield PID_NAMESPACE.fatal(f"the PID namespace is {what}, so run would not be PID 1", UNIFY)
        return
    if init.ours:
        yield PID_NAMESPACE.ok("this is PID 1 of a PID namespace of its own")
        if init.blocks_sigterm:
            yield SIGNALS.ok("SIGTERM was blocked before Python started")
        else:
            yield SIGNALS.warning("SIGTERM was not blocked before Python started", BLOCKING)
        return
    yield (PID_NAMESPACE.ok if init.name == "instance-runner" else PID_NAMESPACE.unknown)(
        f"the PID namespace is this {place.value}'s own; its PID 1 is {init.name!r}"
    )
    if init.blocks_sigterm:
        yield SIGNALS.ok(f"PID 1 ({init.name!r}) blocks SIGTERM")
    else:
        state = "handles SIGTERM" if init.handles_sigterm else "does not handle SIGTERM"
        yield SIGNALS.unknown(f"PID 1 ({init.name!r}) {state}; how it was started can no longer be seen", BLOCKING)


def exclusive_of(assigned: Mapping[str, CpuSet]) -> CpuSet:
    """Return all CPUs that are exclusive to a pod."""
    return CpuSet(cpu for cpus in assigned.values() for cpu in cpus)
