"""The rules that must hold for a running instance, judged from an observation of it.

A broken rule is an error, even if not everything could be observed: one violation suffices. If no violation was observed, but not
everything could be, the result is unknown. The places of threads are defined by :mod:`runner.placement.threads`, which the start and
``/readyz`` use, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import assert_never

from runner.base.cpuset import CpuSet
from runner.base.judgement import Judgement, Level
from runner.base.subject import Subject, worst
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


@frozen
class JudgedInstance:
    """An instance with the judgements of every rule about it."""

    observation: InstanceObservation
    judgements: tuple[Judgement, ...]


@frozen
class InspectionReport:
    """An observation with all judgements."""

    seen_from: Viewpoint
    instances: tuple[JudgedInstance, ...]
    kubelet: tuple[Judgement, ...]

    @property
    def verdict(self) -> Level:
        """The worst level of all."""
        return worst((*(judgement for each in self.instances for judgement in each.judgements), *self.kubelet))


def judge(observation: Observation) -> InspectionReport:
    """Return *observation* with the judgements of every rule."""
    rules = (vcpus_alone, cpus_exclusive, memory_local, memory_charged)
    instances = (
        JudgedInstance(each, tuple(judgement for rule in rules for judgement in rule(each)))
        for each in observation.instances
    )
    return InspectionReport(observation.seen_from, tuple(instances), tuple(as_the_kubelet_says(observation.kubelet)))


NO_VCPU_THREAD = "there is no vCPU thread: the instance starts, or has ended"

VCPUS = Subject("vcpus", "a vCPU that shares its CPU stands still while another thread runs there")


def vcpus_alone(instance: InstanceObservation) -> Iterator[Judgement]:
    """Judge that every vCPU thread is alone on one CPU of the instance, in the instance's cgroup."""
    if not instance.vcpu_threads and not instance.rules.pins:
        yield VCPUS.unknown(NO_VCPU_THREAD)
        return
    violations = tuple(each for each in _violations(instance) if _is_about_vcpus(each))
    yield from _errors(VCPUS, violations)
    if not violations:
        yield VCPUS.ok(f"vCPU threads: {len(instance.vcpu_threads)}, each alone on one of the CPUs '{instance.cpus}'")


EXCLUSIVE = Subject("exclusive", "what else may run on the instance's CPUs takes time from its vCPUs")


def cpus_exclusive(instance: InstanceObservation) -> Iterator[Judgement]:
    """Judge that only the vCPUs may run on the instance's CPUs, and that its threads are in their cgroups.

    Threads in float must have all of float's CPUs.

    Threads that may run there without competing (:meth:`~runner.placement.threads.ThreadRules.exempts`) are counted in the finding.
    """
    violations = tuple(each for each in _violations(instance) if not _is_about_vcpus(each))
    yield from _errors(EXCLUSIVE, violations)
    if not violations and not instance.vcpu_threads:
        yield EXCLUSIVE.unknown(NO_VCPU_THREAD)
    elif not violations:
        yield EXCLUSIVE.unknown(instance.hidden) if instance.hidden else EXCLUSIVE.ok(_exemptions(instance))


def _violations(instance: InstanceObservation) -> tuple[Violation, ...]:
    return instance.rules.violations((*instance.threads, *instance.others))


def _errors(subject: Subject, violations: Iterable[Violation]) -> Iterator[Judgement]:
    """Judge *violations*, of each kind one after the other, with the remedy of that kind."""
    for remedy, of_kind in groupby(sorted(violations, key=_remedy), _remedy):
        yield from (subject.error(found, remedy) for found in sentences(of_kind))


def _remedy(violation: Violation) -> str:
    match violation:
        case MissingVcpu():
            return "inspect again, as vCPUs come and go while the machine changes; if it stays so, start the instance again"
        case SharedCpu() | MisplacedVcpu():
            return (
                "keep off what sets masks of others' threads here (taskset, numad, tuned), and start the instance again"
            )
        case Intruder():
            return (
                "give it other CPUs: `taskset -apc CPUS PID`, for a service AllowedCPUs=; in the pod itself the runner moves it "
                "within a second where it has cgroups"
            )
        case WrongCgroup():
            return "keep off what moves threads between cgroups here, and start the instance again"
        case NarrowMask(thread, float_cpus):
            return f"taskset -apc {float_cpus} {thread.thread.pid}"
        case _ as never:
            assert_never(never)


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


LOCAL = Subject("local", "memory of another NUMA node is slower by half")


def memory_local(instance: InstanceObservation) -> Iterator[Judgement]:
    """Judge that the guest's RAM, as far as QEMU has mapped it, is on the NUMA nodes that it is bound to.

    These are the NUMA nodes of the instance's CPUs, unless they have no memory that the pod may use. RAM that is bound
    to nothing is judged by the CPUs.
    """
    memory = instance.memory
    if isinstance(memory, Unknown):
        yield LOCAL.unknown(memory.reason)
        return
    wanted = memory.bound or instance.numa_nodes
    if not wanted:
        yield LOCAL.unknown("the NUMA nodes of its CPUs cannot be seen")
        return
    where = {node: memory.small.get(node, 0) + memory.huge.get(node, 0) for node in {*memory.small, *memory.huge}}
    mapped = ", ".join(f"{_size(where[node])} on NUMA node {node}" for node in sorted(where) if where[node])
    bound = f"it is bound to '{memory.bound}', " if memory.bound else ""
    found = f"{mapped or 'nothing'} of the guest's RAM is mapped; {bound}its CPUs are on '{instance.numa_nodes}'"
    remote = memory.remote_bytes or any(size and node not in wanted for node, size in where.items())
    if not remote:
        yield LOCAL.ok(found)
    elif memory.bound:
        yield LOCAL.error(
            found, "keep off what moves memory of others (migratepages, numad), and start the instance again"
        )
    else:
        yield LOCAL.error(found, "set memory.bind = true, and start the instance again")


CHARGED = Subject(
    "charged", "memory that is charged to another cgroup counts against the limit of that cgroup, and not of the pod"
)


def memory_charged(instance: InstanceObservation) -> Iterator[Judgement]:
    """Judge that the guest's RAM is charged to the pod: the charge of its cgroup must be at least the mapped bytes."""
    memory, charge = instance.memory, instance.charge
    if isinstance(memory, Unknown):
        yield CHARGED.unknown(memory.reason)
    elif isinstance(charge, Unknown):
        yield CHARGED.unknown(charge.reason)
    elif missing := tuple(_uncharged(memory, charge)):
        yield from (
            CHARGED.error(each, "start the instance again: memory stays charged where it is") for each in missing
        )
    else:
        amount = charge.amount
        yield CHARGED.ok(
            f"the pod's cgroup is charged {_size(amount.memory)} of memory and {_size(amount.hugetlb)} of huge pages"
        )


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


KUBELET = Subject("kubelet", "the kubelet gives CPUs to pods by its own state alone, whatever runs there")


def as_the_kubelet_says(observed: KubeletObservation | Unknown) -> Iterator[Judgement]:
    """Judge that float has the kubelet's shared pool, and each instance only CPUs that the kubelet has assigned to its pod.

    Float must have no CPU of an instance whose threads outlive its pod, unless no other CPU is left.
    """
    if isinstance(observed, Unknown):
        yield KUBELET.unknown(observed.reason)
    elif not observed.shared_pool:
        yield KUBELET.unknown(
            "the kubelet's shared pool is empty: float has reserved CPUs, which its file does not name"
        )
    elif violations := tuple(_unlike_the_kubelet(observed)):
        remedy = "`instance-runner check` on the node, and the log of its controller, say why that does not follow the kubelet"
        yield from (KUBELET.error(each, remedy) for each in violations)
    else:
        yield KUBELET.ok(f"float has '{observed.float_cpus}', the kubelet's shared pool")


def _unlike_the_kubelet(observed: KubeletObservation) -> Iterator[str]:
    if not observed.is_followed:
        yield f"float has '{observed.float_cpus}', but the kubelet's shared pool is '{observed.wanted}'"
    for name, cpus in observed.instances.items() if observed.given is not None else ():
        given = (observed.given or {}).get(name, CpuSet())
        if not cpus <= given:
            yield f"instance {name} has '{cpus}', but the kubelet gives its pod '{given}'"


def _size(size: int) -> str:
    """Return *size* bytes in MiB; any size above zero is shown as at least 0.1 MiB."""
    return f"{max(size / (1 << 20), 0.1 if size else 0):.4g} MiB"
