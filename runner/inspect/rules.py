"""What must be true of a running instance, judged from an observation of it.

A rule that does not hold is ``violated``, also where not everything could be observed: one violation suffices. Where no
violation was observed, but not everything could be, it is ``unknown``. Where threads may be is not decided here but by
:mod:`runner.placement.threads`, which the start and ``/readyz`` judge by, too.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import assert_never

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.inspect.observation import (
    GuestMemory,
    InstanceObservation,
    KubeletObservation,
    Observation,
    PodCharge,
    Unknown,
    Viewpoint,
)
from runner.placement.children import Role
from runner.placement.threads import (
    Intruder,
    MisplacedVcpu,
    MissingVcpu,
    NarrowMask,
    ObservedThread,
    SharedCpu,
    Violation,
    WrongCgroup,
    sentences,
)


class RuleResult(enum.Enum):
    """How a rule was judged."""

    OK = "ok"
    VIOLATED = "violated"
    UNKNOWN = "unknown"


@frozen
class RuleVerdict:
    """A rule, how it was judged, and the sentences that say why."""

    rule: str
    result: RuleResult
    reasons: tuple[str, ...]


@frozen
class JudgedInstance:
    """An instance with the verdict of each rule about it."""

    observation: InstanceObservation
    verdicts: tuple[RuleVerdict, ...]


@frozen
class InspectionReport:
    """An observation with all verdicts."""

    seen_from: Viewpoint
    instances: tuple[JudgedInstance, ...]
    kubelet: RuleVerdict

    @property
    def verdicts(self) -> tuple[RuleVerdict, ...]:
        """Every verdict."""
        return (*(verdict for each in self.instances for verdict in each.verdicts), self.kubelet)

    @property
    def violated(self) -> bool:
        """Return whether any rule is violated; one that cannot be judged is not."""
        return any(verdict.result is RuleResult.VIOLATED for verdict in self.verdicts)


def judge(observation: Observation) -> InspectionReport:
    """Return *observation* with the verdict of every rule."""
    rules = (vcpus_alone, cpus_exclusive, memory_local, memory_charged)
    instances = (JudgedInstance(each, tuple(rule(each) for rule in rules)) for each in observation.instances)
    return InspectionReport(observation.seen_from, tuple(instances), as_the_kubelet_says(observation.kubelet))


NO_VCPU_THREAD = "there is no vCPU thread: the instance starts, or has ended"


def vcpus_alone(instance: InstanceObservation) -> RuleVerdict:
    """Judge that every vCPU thread has one CPU of the instance's to itself, in the instance's cgroup."""
    if not instance.vcpu_threads and not instance.rules.pins:
        return RuleVerdict("vcpus", RuleResult.UNKNOWN, (NO_VCPU_THREAD,))
    violations = tuple(sentences(each for each in _violations(instance) if _is_about_vcpus(each)))
    if violations:
        return RuleVerdict("vcpus", RuleResult.VIOLATED, violations)
    reason = f"vCPU threads: {len(instance.vcpu_threads)}, each alone on one of the CPUs '{instance.cpus}'"
    return RuleVerdict("vcpus", RuleResult.OK, (reason,))


def cpus_exclusive(instance: InstanceObservation) -> RuleVerdict:
    """Judge that nothing but the vCPUs may run on the instance's CPUs, and that its threads are in their cgroups.

    Those in float are to have all of float's CPUs.

    What may run there without competing (:meth:`~runner.placement.threads.ThreadRules.exempts`) is counted in the reasons.
    """
    violations = tuple(sentences(each for each in _violations(instance) if not _is_about_vcpus(each)))
    if violations:
        return RuleVerdict("exclusive", RuleResult.VIOLATED, violations)
    if not instance.vcpu_threads:
        return RuleVerdict("exclusive", RuleResult.UNKNOWN, (NO_VCPU_THREAD,))
    if instance.hidden:
        return RuleVerdict("exclusive", RuleResult.UNKNOWN, (instance.hidden,))
    return RuleVerdict("exclusive", RuleResult.OK, (_exemptions(instance),))


def _violations(instance: InstanceObservation) -> tuple[Violation, ...]:
    return instance.rules.violations((*instance.threads, *instance.others))


def _is_about_vcpus(violation: Violation) -> bool:
    match violation:
        case MissingVcpu() | SharedCpu() | MisplacedVcpu():
            return True
        case Intruder() | NarrowMask():
            return False
        case WrongCgroup(thread):
            return thread.role is Role.VCPU
        case _ as never:
            assert_never(never)


def _exemptions(instance: InstanceObservation) -> str:
    kinds = Counter(
        map(_kind, (each for each in (*instance.threads, *instance.others) if each.thread.cpus & instance.cpus))
    )
    return (
        f"only sleepers (anchors: {kinds[Role.ANCHOR]}, pod sandboxes: {kinds[Role.SANDBOX]}) and kernel threads (bound "
        f"to one CPU: {kinds['bound']}, others, in no cgroup: {kinds['unbound']}) may run there besides the vCPUs"
    )


def _kind(each: ObservedThread) -> str:
    if not each.kernel:
        return each.role
    return "bound" if len(each.thread.cpus) == 1 else "unbound"


def memory_local(instance: InstanceObservation) -> RuleVerdict:
    """Judge that the guest's RAM lies on the NUMA nodes it is bound to, as far as QEMU has mapped it.

    These are the NUMA nodes of the instance's CPUs, unless they have no memory that the pod may use. RAM that is bound
    to nothing is judged by the CPUs.
    """
    memory = instance.memory
    if isinstance(memory, Unknown):
        return RuleVerdict("local", RuleResult.UNKNOWN, (memory.reason,))
    wanted = memory.bound or instance.numa_nodes
    if not wanted:
        return RuleVerdict("local", RuleResult.UNKNOWN, ("the NUMA nodes of its CPUs cannot be seen",))
    where = {node: memory.small.get(node, 0) + memory.huge.get(node, 0) for node in {*memory.small, *memory.huge}}
    mapped = ", ".join(f"{_size(where[node])} on NUMA node {node}" for node in sorted(where) if where[node])
    bound = f"it is bound to '{memory.bound}', " if memory.bound else ""
    sentence = f"{mapped or 'nothing'} of the guest's RAM is mapped; {bound}its CPUs are on '{instance.numa_nodes}'"
    remote = memory.remote_bytes or any(size and node not in wanted for node, size in where.items())
    return RuleVerdict("local", RuleResult.VIOLATED if remote else RuleResult.OK, (sentence,))


def memory_charged(instance: InstanceObservation) -> RuleVerdict:
    """Judge that the guest's RAM is charged to the pod: its cgroup is charged at least the bytes that are mapped."""
    memory, charge = instance.memory, instance.charge
    if isinstance(memory, Unknown):
        return RuleVerdict("charged", RuleResult.UNKNOWN, (memory.reason,))
    if isinstance(charge, Unknown):
        return RuleVerdict("charged", RuleResult.UNKNOWN, (charge.reason,))
    missing = tuple(_uncharged(memory, charge))
    if missing:
        return RuleVerdict("charged", RuleResult.VIOLATED, missing)
    reason = f"the pod's cgroup is charged {_size(charge.amount.memory)} of memory and {_size(charge.amount.hugetlb)} of huge pages"
    return RuleVerdict("charged", RuleResult.OK, (reason,))


def _uncharged(memory: GuestMemory, charge: PodCharge) -> Iterator[str]:
    pairs: Iterable[tuple[str, Mapping[int, int], int]] = (
        ("memory", memory.small, charge.amount.memory),
        ("huge pages", memory.huge, charge.amount.hugetlb),
    )
    for kind, mapped, charged in pairs:
        size = sum(mapped.values())
        if size > charged:
            yield (
                f"{_size(size)} of the guest's RAM is mapped, but '{charge.cgroup}' is charged only {_size(charged)} of "
                f"{kind}: at least {_size(size - charged)} was first touched in another cgroup"
            )


def as_the_kubelet_says(observed: KubeletObservation | Unknown) -> RuleVerdict:
    """Judge that float has the kubelet's shared pool, and each instance only CPUs that the kubelet gives its pod.

    Float has no CPU of an instance whose threads outlive its pod, unless no other CPU is left.
    """
    if isinstance(observed, Unknown):
        return RuleVerdict("kubelet", RuleResult.UNKNOWN, (observed.reason,))
    if not observed.shared_pool:
        reason = "the kubelet's shared pool is empty: float has reserved CPUs, which its file does not name"
        return RuleVerdict("kubelet", RuleResult.UNKNOWN, (reason,))
    violations = tuple(_unlike_the_kubelet(observed))
    if violations:
        return RuleVerdict("kubelet", RuleResult.VIOLATED, violations)
    return RuleVerdict("kubelet", RuleResult.OK, (f"float has '{observed.float_cpus}', the kubelet's shared pool",))


def _unlike_the_kubelet(observed: KubeletObservation) -> Iterator[str]:
    if not observed.is_followed:
        yield f"float has '{observed.float_cpus}', but the kubelet's shared pool is '{observed.wanted}'"
    for name, cpus in observed.instances.items() if observed.given is not None else ():
        given = (observed.given or {}).get(name, CpuSet())
        if not cpus <= given:
            yield f"instance {name} has '{cpus}', but the kubelet gives its pod '{given}'"


def _size(size: int) -> str:
    """Return *size* bytes in MiB; more than nothing is at least 0.1 MiB."""
    return f"{max(size / (1 << 20), 0.1 if size else 0):.4g} MiB"
