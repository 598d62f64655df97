"""Judgements about the CPUs: whose they are, and who else may run on them (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from runner.check.finding import Check, Finding, Place
from runner.cpuset import CpuSet
from runner.facts.hardware import Hardware
from runner.facts.host import PodQos
from runner.kernel.settings import Interrupt
from runner.placement.pins import place
from runner.plan.host_checks import CPU_TIME, OWN_CPUS, shared_cpus, too_little_time

OWN = Check("own-cpus", "who asks for 20 CPUs gets 20 CPUs only if the kubelet gives them to nobody else")
CORES = Check("cores", "threads of one core slow each other, and memory of another NUMA node is slower by half")
TIME = Check("cpu-time", "a vCPU that is throttled stands still for up to a tenth of a second at a time")
INTERRUPTS = Check("interrupts", "an interrupt on a vCPU's CPU stops the guest for as long as it is worked on")
NEIGHBOURS = Check(
    "neighbours", "what the kubelet did not start does not know of its exclusive CPUs, and runs there too"
)
PID_NAMESPACE = Check("pid-namespace", "only PID 1 is told of every orphan and takes everything with it when it ends")
SIGNALS = Check(
    "signals", "the kernel drops a SIGTERM that PID 1 does not handle yet, as in the first 0.1 s of a Python program"
)

SHOWN = 6
"""How many of many are named."""

UNIFY = 'remove "hostPID" and "shareProcessNamespace" from the pod\'s manifest'
BLOCKING = 'ENTRYPOINT ["env", "--block-signal=TERM,INT,HUP", "instance-runner"]'


@attrs.frozen
class Init:
    """Process 1 as we see it, which may be ourselves."""

    ours: bool
    name: str
    blocks_sigterm: bool
    handles_sigterm: bool


@attrs.frozen
class CpuNeighbour:
    """A populated cgroup that is neither the kubelet's nor ours, and the CPUs its members may use."""

    name: str
    cpus: CpuSet


def judge_own_cpus(pod: PodQos | None, allowed: CpuSet, online: CpuSet, *, asked_for_less: bool) -> Finding:
    """Judge whether the *allowed* CPUs belong to this pod, or container, alone.

    *asked_for_less* is whether the spec says placement ``affinity``, with which ``run`` starts all the same.
    """
    reason = shared_cpus(pod, allowed, online)
    if reason is not None:
        return OWN.warning(reason, OWN_CPUS) if asked_for_less else OWN.fatal(reason, OWN_CPUS)
    if pod is not None and pod.qos == "guaranteed":
        return OWN.ok(f"the pod is Guaranteed ({pod.evidence}) and may use CPUs '{allowed}' of '{online}'")
    if pod is not None:
        return OWN.unknown(
            f"the pod's QoS class cannot be seen ({pod.evidence}); it may use CPUs '{allowed}' of '{online}'",
            "kubectl get pod NAME -o jsonpath='{.status.qosClass}' must say Guaranteed",
        )
    if online <= allowed:
        return OWN.warning(
            f"every CPU of the machine may be used ('{allowed}'): nothing keeps others off the vCPUs' CPUs",
            "start every container with a set of its own, as `docker run --cpuset-cpus=2-5`",
        )
    return OWN.unknown(
        f"CPUs '{allowed}' of '{online}' may be used; nothing here says whether they were given to others too",
        "compare with `docker inspect -f '{{.HostConfig.CpusetCpus}}'` of the other containers",
    )


def judge_cores(cpus: CpuSet, hardware: Hardware, others: CpuSet, whose: str) -> Iterator[Finding]:
    """Judge how *cpus*, which are *whose*, lie on cores and NUMA nodes; *others* are exclusive CPUs of others."""
    cpus &= hardware.online
    findings = place(len(cpus), cpus, hardware, others=others).findings if cpus else ()
    for finding in findings:
        found, _, remedy = finding.message.partition(";")
        yield CORES.warning(f"{whose}: {found}", remedy.strip() or "name CPUs of one kind in cpu.cpus")
    if not findings:
        yield CORES.ok(f"{whose}: CPUs '{cpus}' are whole cores of one NUMA node")


def judge_cpu_time(
    place: Place, cpu_time: float | None, vcpus: int, throttled: int, *, asked_for_less: bool
) -> Finding:
    """Judge ``cpu.max`` (see :class:`~runner.facts.host.HostFacts`); *throttled* is ``nr_throttled`` of ``cpu.stat``."""
    reason = too_little_time(cpu_time, vcpus)
    if reason is not None:
        fatal = place is Place.POD and not asked_for_less
        return TIME.fatal(reason, CPU_TIME) if fatal else TIME.warning(reason, CPU_TIME)
    if throttled:
        return TIME.warning(f"cpu.max has stopped this container {throttled} times already", CPU_TIME)
    if cpu_time is None:
        return TIME.ok("no cpu.max limits it")
    return TIME.ok(f"cpu.max gives the time of {cpu_time:g} CPUs to {vcpus}")


def judge_interrupts(interrupts: Sequence[Interrupt], cpus: CpuSet, online: CpuSet) -> Finding:
    """Judge which interrupts are delivered to exclusive *cpus*."""
    there = [interrupt for interrupt in interrupts if not interrupt.cpus.isdisjoint(cpus)]
    if not interrupts:
        return INTERRUPTS.unknown("/proc/irq shows none", "ask on the node")
    if not there:
        return INTERRUPTS.ok(f"none is delivered to CPUs '{cpus}'")
    named = ", ".join(f"{interrupt.number} ({interrupt.name})" for interrupt in there[:SHOWN])
    more = f" and {len(there) - SHOWN} more" if len(there) > SHOWN else ""
    rest = online - cpus
    return INTERRUPTS.warning(
        f"{len(there)} may be delivered to CPUs '{cpus}': {named}{more}",
        f"on the node: echo {rest} > /proc/irq/{there[0].number}/smp_affinity_list, and for irqbalance IRQBALANCE_BANNED_CPULIST={cpus}",
    )


def judge_neighbours(neighbours: Sequence[CpuNeighbour], exclusive: CpuSet, shared_pool: CpuSet) -> Finding:
    """Judge whether slices of the system may run on *exclusive* CPUs of the node."""
    there = [each for each in neighbours if not each.cpus.isdisjoint(exclusive)]
    if not there:
        return NEIGHBOURS.ok(f"nothing but pods may run on CPUs '{exclusive}'")
    return NEIGHBOURS.warning(
        f"{', '.join(each.name for each in there)} may run on exclusive CPUs '{exclusive}'",
        f"systemctl set-property --runtime {there[0].name} AllowedCPUs={shared_pool}; reservedSystemCPUs for good",
    )


def judge_init(place: Place, init: Init, *, sees_everything: bool) -> Iterator[Finding]:
    """Judge process 1 of a container or pod: whether it can be the runner, and whether SIGTERM can get lost."""
    if sees_everything or init.name == "pause":
        what = "the machine's own" if sees_everything else "shared with the pod's other containers"
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
        state = "listens to SIGTERM" if init.handles_sigterm else "does not listen to SIGTERM"
        yield SIGNALS.unknown(f"PID 1 ({init.name!r}) {state}; how it was started cannot be seen any more", BLOCKING)


def exclusive_of(assigned: Mapping[str, CpuSet]) -> CpuSet:
    """Return all CPUs that pods have for themselves."""
    return CpuSet(cpu for cpus in assigned.values() for cpu in cpus)
