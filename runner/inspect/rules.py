"""What must be true of a running instance, judged from a sighting of it.

A rule that does not hold is ``violated``, also where not everything could be seen: what was seen suffices. Where
nothing speaks against a rule but not all of it could be seen, it is ``unknown``.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import attrs

from runner.cpuset import CpuSet
from runner.facts.memory import MemoryCharge
from runner.inspect.observation import (
    ANCHOR,
    SANDBOX,
    VCPU,
    GuestMemory,
    InstanceObservation,
    KubeletObservation,
    Observation,
    ObservedThread,
    Unknown,
)


class RuleResult(enum.Enum):
    """How a rule was judged."""

    OK = "ok"
    VIOLATED = "violated"
    UNKNOWN = "unknown"


@attrs.frozen
class RuleVerdict:
    """A rule, how it was judged, and the sentences that say why."""

    rule: str
    result: RuleResult
    reasons: tuple[str, ...]


@attrs.frozen
class JudgedInstance:
    """An instance with the verdict of each rule about it."""

    sighting: InstanceObservation
    verdicts: tuple[RuleVerdict, ...]


@attrs.frozen
class InspectionReport:
    """A sighting with all verdicts."""

    seen_from: str
    instances: tuple[JudgedInstance, ...]
    kubelet: RuleVerdict

    @property
    def verdicts(self) -> tuple[RuleVerdict, ...]:
        """Every verdict."""
        return (*(verdict for each in self.instances for verdict in each.verdicts), self.kubelet)

    @property
    def violated(self) -> bool:
        """Whether any rule is violated; one that cannot be judged is not."""
        return any(verdict.result is RuleResult.VIOLATED for verdict in self.verdicts)


def judge(sighting: Observation) -> InspectionReport:
    """Return *sighting* with the verdict of every rule."""
    rules = (vcpus_alone, cpus_exclusive, memory_local, memory_charged)
    instances = (JudgedInstance(each, tuple(rule(each) for rule in rules)) for each in sighting.instances)
    return InspectionReport(sighting.seen_from, tuple(instances), as_the_kubelet_says(sighting.kubelet))


def vcpus_alone(instance: InstanceObservation) -> RuleVerdict:
    """Judge that every vCPU thread has one CPU of the instance's to itself, in the instance's cgroup."""
    if not instance.vcpu_threads and not instance.vcpus:
        return RuleVerdict("vcpus", RuleResult.UNKNOWN, ("there is no vCPU thread: the instance starts, or has ended",))
    violations = tuple(_misplaced(instance))
    if violations:
        return RuleVerdict("vcpus", RuleResult.VIOLATED, violations)
    said = f"vCPU threads: {len(instance.vcpu_threads)}, each alone on one of the CPUs '{instance.cpus}'"
    return RuleVerdict("vcpus", RuleResult.OK, (said,))


def _misplaced(instance: InstanceObservation) -> Iterator[str]:
    threads = instance.vcpu_threads
    indices = {each.vcpu for each in threads if each.vcpu is not None}
    # The node's controller gives an instance as many CPUs as it has vCPUs, whichever of them are to be seen.
    given = len(instance.cpus) if instance.backend == "controller" else 0
    number = instance.vcpus or max(given, max(indices, default=-1) + 1)
    yield from (f"vCPU {index} has no thread" for index in range(number) if index not in indices)
    for each in threads:
        thread = each.thread
        if len(thread.cpus) != 1 or not thread.cpus <= instance.cpus:
            yield f"{_named(each)} may run on '{thread.cpus}' instead of one CPU of '{instance.cpus}'"
        if instance.cgroup and not thread.cgroup.endswith(instance.cgroup):
            yield f"{_named(each)} is in the cgroup '{thread.cgroup}' instead of '{instance.cgroup}'"
    for cpu, times in Counter(min(each.thread.cpus) for each in threads if len(each.thread.cpus) == 1).items():
        if times > 1:
            yield f"{times} vCPU threads share CPU {cpu}"


def cpus_exclusive(instance: InstanceObservation) -> RuleVerdict:
    """Judge that nothing but the vCPUs may run on the instance's CPUs.

    Exempt, and counted in the reasons, is what does not compete for them: the anchor and pods' ``pause`` processes,
    which sleep for ever, and the kernel's own threads, of which those bound to one CPU serve that CPU, and the others
    are kept off it by no cpuset (``Documentation/admin-guide/kernel-parameters.rst``: ``isolcpus=``, ``nohz_full=``).
    A kernel thread in a cgroup works for whoever is in that, such as ``vhost-`` before Linux 6.4, and counts like any.
    """
    rest = (each for each in instance.threads if each.role != VCPU)
    there = [each for each in (*rest, *instance.others) if not each.thread.cpus.isdisjoint(instance.cpus)]
    violations = tuple(_intruders([each for each in there if not _exempt(each)], instance.cpus))
    if violations:
        return RuleVerdict("exclusive", RuleResult.VIOLATED, violations)
    if not instance.vcpu_threads:
        return RuleVerdict(
            "exclusive", RuleResult.UNKNOWN, ("there is no vCPU thread: the instance starts, or has ended",)
        )
    if instance.hidden:
        return RuleVerdict("exclusive", RuleResult.UNKNOWN, (instance.hidden,))
    return RuleVerdict("exclusive", RuleResult.OK, (_exemptions(there),))


def _exempt(each: ObservedThread) -> bool:
    return (each.kernel and each.thread.cgroup in {"", "/"}) or each.role in {ANCHOR, SANDBOX}


def _intruders(threads: Iterable[ObservedThread], cpus: CpuSet) -> Iterator[str]:
    """Yield a sentence for each process (of whose threads the first one is named)."""
    processes: dict[int, list[ObservedThread]] = {}
    for each in threads:
        processes.setdefault(each.thread.pid, []).append(each)
    for of_process in processes.values():
        first = of_process[0]
        taken = CpuSet(cpu for each in of_process for cpu in each.thread.cpus & cpus)
        more = "" if len(of_process) == 1 else f" and {len(of_process) - 1} more of process {first.thread.pid}"
        yield f"{_named(first)}{more} in the cgroup '{first.thread.cgroup}' may run on '{taken}'"


def _exemptions(threads: Iterable[ObservedThread]) -> str:
    kinds = Counter(
        each.role if not each.kernel else ("bound" if len(each.thread.cpus) == 1 else "unbound") for each in threads
    )
    return (
        f"only sleepers (anchors: {kinds[ANCHOR]}, pod sandboxes: {kinds[SANDBOX]}) and kernel threads (bound to one CPU: "
        f"{kinds['bound']}, others, in no cgroup: {kinds['unbound']}) may run there besides the vCPUs"
    )


def memory_local(instance: InstanceObservation) -> RuleVerdict:
    """Judge that the guest's RAM lies on the NUMA nodes it is bound to, as far as QEMU has mapped it.

    They are those of the instance's CPUs, unless these have no memory that the pod may use. What is bound to nothing
    is judged by the CPUs.
    """
    memory = instance.memory
    if isinstance(memory, Unknown):
        return RuleVerdict("local", RuleResult.UNKNOWN, (memory.reason,))
    wanted = memory.bound or instance.numa_nodes
    if not wanted:
        return RuleVerdict("local", RuleResult.UNKNOWN, ("the NUMA nodes of its CPUs cannot be seen",))
    where = {node: memory.small.get(node, 0) + memory.huge.get(node, 0) for node in {*memory.small, *memory.huge}}
    said = ", ".join(f"{_size(where[node])} on NUMA node {node}" for node in sorted(where) if where[node])
    bound = f"it is bound to '{memory.bound}', " if memory.bound else ""
    sentence = f"{said or 'nothing'} of the guest's RAM is mapped; {bound}its CPUs are on '{instance.numa_nodes}'"
    away = memory.remote_bytes or any(size and node not in wanted for node, size in where.items())
    return RuleVerdict("local", RuleResult.VIOLATED if away else RuleResult.OK, (sentence,))


def memory_charged(instance: InstanceObservation) -> RuleVerdict:
    """Judge that the guest's RAM is charged to the pod: its cgroup's charge must hold at least what is mapped."""
    memory, charge = instance.memory, instance.charge
    if isinstance(memory, Unknown):
        return RuleVerdict("charged", RuleResult.UNKNOWN, (memory.reason,))
    if isinstance(charge, Unknown):
        return RuleVerdict("charged", RuleResult.UNKNOWN, (charge.reason,))
    missing = tuple(_uncharged(memory, charge, instance.pod_cgroup))
    if missing:
        return RuleVerdict("charged", RuleResult.VIOLATED, missing)
    said = f"the pod's cgroup is charged {_size(charge.memory)} of memory and {_size(charge.hugetlb)} of huge pages"
    return RuleVerdict("charged", RuleResult.OK, (said,))


def _uncharged(memory: GuestMemory, charge: MemoryCharge, cgroup: str) -> Iterator[str]:
    pairs: Iterable[tuple[str, Mapping[int, int], int]] = (
        ("memory", memory.small, charge.memory),
        ("huge pages", memory.huge, charge.hugetlb),
    )
    for kind, mapped, charged in pairs:
        size = sum(mapped.values())
        if size > charged:
            yield (
                f"{_size(size)} of the guest's RAM is mapped, but '{cgroup}' is charged only {_size(charged)} of "
                f"{kind}: at least {_size(size - charged)} was first touched in another cgroup"
            )


def as_the_kubelet_says(seen: KubeletObservation | Unknown) -> RuleVerdict:
    """Judge that float has the kubelet's shared pool, and each instance nothing but what the kubelet gives its pod.

    Float keeps off the CPUs of an instance whose threads outlive its pod, unless it would have none left.
    """
    if isinstance(seen, Unknown):
        return RuleVerdict("kubelet", RuleResult.UNKNOWN, (seen.reason,))
    if not seen.shared_pool:
        reason = "the kubelet's shared pool is empty: float has reserved CPUs, which its file does not name"
        return RuleVerdict("kubelet", RuleResult.UNKNOWN, (reason,))
    violations = tuple(_unlike_the_kubelet(seen))
    if violations:
        return RuleVerdict("kubelet", RuleResult.VIOLATED, violations)
    return RuleVerdict("kubelet", RuleResult.OK, (f"float has '{seen.float_cpus}', the kubelet's shared pool",))


def _unlike_the_kubelet(seen: KubeletObservation) -> Iterator[str]:
    pool = seen.shared_pool & seen.online
    held = CpuSet(cpu for cpus in seen.instances.values() for cpu in cpus)
    wanted = pool - held or pool
    if seen.float_cpus != wanted:
        yield f"float has '{seen.float_cpus}', but the kubelet's shared pool is '{wanted}'"
    for name, cpus in seen.instances.items() if seen.given is not None else ():
        given = (seen.given or {}).get(name, CpuSet())
        if not cpus <= given:
            yield f"instance {name} has '{cpus}', but the kubelet gives its pod '{given}'"


def _named(each: ObservedThread) -> str:
    return f"{each.title} (thread {each.thread.tid}, {each.thread.name!r})"


def _size(size: int) -> str:
    """Return *size* in MiB, a little of it as 0.1 MiB rather than nothing."""
    return f"{max(size / (1 << 20), 0.1 if size else 0):.4g} MiB"
