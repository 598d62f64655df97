"""Checks of the CPUs: their owners, other work that may run on them, and whether the first process can be the runner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from runner.base.cpuset import CpuSet
from runner.base.judgement import Judgement
from runner.base.table import some
from runner.base.values import frozen
from runner.check.checks import OFF_NODE, CheckContext, Init, Place, check, for_each
from runner.facts.hardware import Hardware
from runner.facts.host import PodQos
from runner.kernel.cgroup import Cgroup
from runner.kernel.host_settings import HostSettings, InterruptLine
from runner.kernel.kernel_facts import read_line
from runner.kernel.limits import cpu_limits
from runner.kubelet.state import CpuState
from runner.placement.pins import place
from runner.plan.host_checks import CPU_TIME, OWN_CPUS, shared_cpus, too_little_time


@check("own-cpus", "a pod that asks for 20 CPUs has 20 CPUs only if no other pod is given any of them", *OFF_NODE)
def own_cpus(context: CheckContext) -> Iterator[Judgement]:
    """Judge the CPUs of this process."""
    yield judge_own_cpus(context.pod, context.allowed, context.hardware.online, asks_for_less=context.asks_for_less)


def judge_own_cpus(pod: PodQos | None, allowed: CpuSet, online: CpuSet, *, asks_for_less: bool) -> Judgement:
    """Judge whether the *allowed* CPUs belong to this pod, or container, alone.

    *asks_for_less* is true if the spec names a placement that needs no exclusive CPUs, so that ``run`` starts without them.
    """
    reason = shared_cpus(pod, allowed, online)
    if reason is not None:
        return own_cpus.warning(reason, OWN_CPUS) if asks_for_less else own_cpus.error(reason, OWN_CPUS)
    if pod is not None and pod.has_claimed(allowed):
        return own_cpus.ok(f"a resource claim gives the container CPUs '{pod.claimed}' of '{online}'")
    if pod is not None and pod.qos == "guaranteed":
        return own_cpus.ok(f"the pod is Guaranteed ({pod.evidence}) and may use CPUs '{allowed}' of '{online}'")
    if pod is not None:
        return own_cpus.unknown(
            f"the pod's QoS class cannot be seen ({pod.evidence}), and it may use CPUs '{allowed}' of '{online}'",
            "kubectl get pod NAME -o jsonpath='{.status.qosClass}' must say Guaranteed",
        )
    if online <= allowed:
        return own_cpus.warning(
            f"every CPU of the machine may be used ('{allowed}'): nothing keeps other processes off the vCPUs' CPUs",
            "start every container with CPUs of its own, as `docker run --cpuset-cpus=2-5`",
        )
    return own_cpus.unknown(
        f"CPUs '{allowed}' of '{online}' may be used, and nothing here says whether they were given to others too",
        "compare with `docker inspect -f '{{.HostConfig.CpusetCpus}}'` of the other containers",
    )


def exclusive_here(context: CheckContext) -> Mapping[str, CpuSet] | str:
    """Return owner → its exclusive CPUs, as far as visible from here, or the reason why none are known."""
    if context.place is not Place.NODE:
        # If every CPU may be used, none is exclusive, as own-cpus has reported.
        every = context.hardware.online <= context.cpus
        return "no CPUs are set apart for the vCPUs" if every else {"the vCPUs": context.cpus}
    if context.shared_pool is None or not isinstance(context.kubelet, CpuState):
        return "which CPUs are exclusive is not known here"
    pods = {f"pod {pod_uid}": cpus for pod_uid, cpus in context.kubelet.assigned().items()}
    return pods if any(pods.values()) else "no pod has CPUs of its own now"


@check("cores", "threads of one core slow each other, and memory of another NUMA node is slower by half")
def cores(context: CheckContext) -> Iterator[Judgement]:
    """Judge the CPUs of each owner."""
    owners = exclusive_here(context)
    if isinstance(owners, str):
        yield cores.unknown(owners)
        return
    for owner, cpus in owners.items():
        yield from judge_cores(cpus, context.hardware, CpuSet.union(owners.values()) - cpus, owner)


def judge_cores(cpus: CpuSet, hardware: Hardware, others: CpuSet, owner: str) -> Iterator[Judgement]:
    """Judge the distribution of the *cpus* of *owner* over cores and NUMA nodes; *others* are the exclusive CPUs of other pods."""
    cpus &= hardware.online
    if not cpus:
        yield cores.unknown(f"{owner}: none of its CPUs is online", "see whether its pod is still there")
        return
    findings = place(len(cpus), cpus, hardware, others=others).findings
    for finding in findings:
        yield cores.warning(f"{owner}: {finding.found}", finding.remedy or "name CPUs of one kind in cpu.cpus")
    if not findings:
        yield cores.ok(f"{owner}: CPUs '{cpus}' are whole cores of one NUMA node")


@check("cpu-time", "a vCPU that is throttled stands still for up to a tenth of a second at a time", *OFF_NODE)
def cpu_time(context: CheckContext) -> Iterator[Judgement]:
    """Judge the CPU time limits of this cgroup and its ancestors."""
    if context.backend == "controller":
        yield cpu_time.ok("the controller moves the vCPUs out of the pod's cgroup, where no cpu.max limits them")
        return
    group = context.roots.cgroup / context.cgroup[1:]
    if not (group / "cgroup.controllers").exists():
        yield cpu_time.unknown(
            "no cgroup v2 can be seen here, so whether cpu.max limits it is not known", "run check on the node"
        )
        return
    limit = min(cpu_limits(PurePosixPath(context.roots.cgroup), context.cgroup), default=None)
    lines = read_line(group / "cpu.stat").splitlines()
    throttled = next((int(line.split()[1]) for line in lines if line.startswith("nr_throttled ")), 0)
    yield judge_cpu_time(context.place, limit, context.vcpus, throttled, asks_for_less=context.asks_for_less)


def judge_cpu_time(place: Place, limit: float | None, vcpus: int, throttled: int, *, asks_for_less: bool) -> Judgement:
    """Judge ``cpu.max``: *limit* CPUs for *vcpus*, ``None`` without a limit; *throttled* is ``nr_throttled`` of ``cpu.stat``."""
    reason = too_little_time(limit, vcpus)
    if reason is not None:
        fatal = place is Place.POD and not asks_for_less
        return cpu_time.error(reason, CPU_TIME) if fatal else cpu_time.warning(reason, CPU_TIME)
    if throttled:
        return cpu_time.warning(f"cpu.max has stopped this container {throttled} times already", CPU_TIME)
    if limit is None:
        return cpu_time.ok("no cpu.max limits it")
    return cpu_time.ok(f"cpu.max gives the time of {limit:g} CPUs to {vcpus}")


@check("interrupts", "an interrupt on a vCPU's CPU stops the guest for as long as its handler runs")
def interrupts(context: CheckContext) -> Iterator[Judgement]:
    """Judge the CPUs to which interrupts are delivered."""
    owners = exclusive_here(context)
    if isinstance(owners, str):
        yield interrupts.unknown(owners)
        return
    read = tuple(HostSettings(context.host.root).interrupts())
    yield judge_interrupts(read, CpuSet.union(owners.values()), context.hardware.online)


def judge_interrupts(found: Sequence[InterruptLine], cpus: CpuSet, online: CpuSet) -> Judgement:
    """Judge the interrupts that are delivered to exclusive *cpus*."""
    delivered = [each for each in found if not each.effective.isdisjoint(cpus)]
    if not found:
        return interrupts.unknown("/proc/irq shows none", "run check on the node")
    if not delivered:
        return interrupts.ok(f"none is delivered to CPUs '{cpus}'")
    move = for_each(
        [str(each.number) for each in delivered],
        f"echo {online - cpus} > /proc/irq/$i/smp_affinity_list",
        "cd /proc/irq && ls -d [0-9]*",
    )
    return interrupts.warning(
        f"{len(delivered)} may be delivered to CPUs '{cpus}': {some(map(str, delivered), 6)}",
        f"the node's controller moves them (--move-interrupts), or: {move}, and for "
        f"irqbalance IRQBALANCE_BANNED_CPULIST={cpus}, and where the kernel refuses boot with `isolcpus=managed_irq,{cpus}`",
    )


@frozen
class CpuNeighbour:
    """A populated cgroup that belongs neither to the kubelet nor to the controller, and the CPUs that its members may use."""

    name: str
    cpus: CpuSet


@check("neighbours", "processes that the kubelet did not start run on its exclusive CPUs, too", Place.NODE)
def neighbours(context: CheckContext) -> Iterator[Judgement]:
    """Judge the cgroups with processes, and their CPUs."""
    owners, pool = exclusive_here(context), context.shared_pool
    if isinstance(owners, str) or pool is None:
        yield neighbours.unknown(str(owners))
        return
    yield judge_neighbours(tuple(_populated_groups(context.roots.cgroup)), CpuSet.union(owners.values()), pool)


def _populated_groups(mount: Path) -> Iterator[CpuNeighbour]:
    """Yield the populated cgroups below *mount* that are not the kubelet's; one without cpuset has its parent's CPUs."""
    root = Cgroup(mount)
    for name in root.children():
        group = root.child(name)
        if "kube" in name or (group.path / "float").is_dir() or not group.populated():
            continue
        limited = (group.path / "cpuset.cpus.effective").exists()
        yield CpuNeighbour(name, group.effective_cpus() if limited else root.effective_cpus())


def judge_neighbours(groups: Sequence[CpuNeighbour], exclusive: CpuSet, shared_pool: CpuSet) -> Judgement:
    """Judge whether processes in other cgroups may run on *exclusive* CPUs of the node."""
    overlapping = [each.name for each in groups if not each.cpus.isdisjoint(exclusive)]
    if not overlapping:
        return neighbours.ok(f"nothing but pods may run on CPUs '{exclusive}'")
    return neighbours.warning(
        f"{some(overlapping, 6)} may run on exclusive CPUs '{exclusive}'",
        for_each(
            overlapping,
            f"systemctl set-property --runtime $i AllowedCPUs={shared_pool}",
            "cd /sys/fs/cgroup && ls -d *.slice *.scope | grep -v kube",
        )
        + ", and for good reservedSystemCPUs",
    )


@check(
    "pid-namespace",
    "only PID 1 adopts every orphan, and when it ends the kernel ends every process with it",
    Place.POD,
    Place.CONTAINER,
)
def pid_namespace(context: CheckContext) -> Iterator[Judgement]:
    """Judge the first process of this PID namespace."""
    yield judge_pid_namespace(context.place, context.init)


def judge_pid_namespace(place: Place, init: Init) -> Judgement:
    """Judge whether process 1 of a container or pod can be the runner."""
    if init.of_others:
        return pid_namespace.error(
            f"the PID namespace is {init.of_others}, so run would not be PID 1",
            'remove "hostPID" and "shareProcessNamespace" from the pod\'s manifest',
        )
    if init.ours:
        return pid_namespace.ok("this is PID 1 of a PID namespace of its own")
    found = f"the PID namespace is this {place.value}'s own; its PID 1 is {init.name!r}"
    return pid_namespace.ok(found) if init.name == "instance-runner" else pid_namespace.unknown(found)


@check(
    "signals",
    "the kernel drops a SIGTERM that PID 1 does not handle yet, as in the first 0.1 s of a Python program",
    Place.POD,
    Place.CONTAINER,
)
def signals(context: CheckContext) -> Iterator[Judgement]:
    """Judge how the first process of this PID namespace handles SIGTERM; skipped if it cannot be the runner."""
    if not context.init.of_others:
        yield judge_signals(context.init)


def judge_signals(init: Init) -> Judgement:
    """Judge whether a SIGTERM can get lost."""
    remedy = 'ENTRYPOINT ["env", "--block-signal=TERM,INT,HUP", "instance-runner"]'
    if init.ours:
        if init.blocks_sigterm:
            return signals.ok("SIGTERM was blocked before Python started")
        return signals.warning("SIGTERM was not blocked before Python started", remedy)
    if init.blocks_sigterm:
        return signals.ok(f"PID 1 ({init.name!r}) blocks SIGTERM")
    state = "handles SIGTERM" if init.handles_sigterm else "does not handle SIGTERM"
    return signals.unknown(f"PID 1 ({init.name!r}) {state}; how it was started can no longer be seen", remedy)
