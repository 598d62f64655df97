"""The report of a node's plan: text for operators, plain values (JSON) for programs."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import assert_never

from runner.base.cpuset import CpuSet
from runner.base.errors import escaped
from runner.base.subject import FORMAT
from runner.facts.hardware import Hardware
from runner.kubelet.pod import CPU, ContainerKind, format_bytes
from runner.kubelet.state import Block
from runner.node_plan.admission import Outcome, SimulatedNode
from runner.node_plan.allocatable import format_amount
from runner.node_plan.device_manager import Devices
from runner.node_plan.explanation import Explanation
from runner.node_plan.general_filter import PODS, Insufficient, NodeAllocatable, total_requests
from runner.node_plan.node_plan import ContainerPlan, Fit, NodePlan, PodPlan, WhatIf
from runner.node_plan.quirks import FROM_SOURCE_MINOR
from runner.node_plan.report.node_json import (
    ContainerDocument,
    FitDocument,
    HintDocument,
    MemoryBlockDocument,
    NodeDocument,
    OutcomesDocument,
    PinningDocument,
    PlannedPodDocument,
    StateDocument,
)
from runner.node_plan.report.picture import approximate, picture_lines, reserved_of
from runner.node_plan.topology_manager import Hint
from runner.placement.pins import Pinning

INDENT = " " * 12
GIB = 1 << 30


def hardware_line(hardware: Hardware) -> str:
    """Describe *hardware* in one line."""
    memory = hardware.total_memory
    pages = sum(pool.size * pool.total for node in hardware.numa_nodes for pool in node.hugepages)
    counts = (
        _count(len(hardware.sockets), "socket"),
        _count(len(hardware.cores), "core"),
        _count(len(hardware.cpus), "CPU"),
        _count(len(hardware.numa_nodes), "NUMA node"),
    )
    offline = f", offline CPUs {hardware.offline}" if hardware.offline else ""
    huge = f" ({approximate(pages)} of it in hugepages)" if pages else ""
    return f"{', '.join(counts)}, {approximate(memory)} memory{huge}{offline}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def node_lines(plan: NodePlan, *, width: int, colour: bool) -> Iterator[str]:
    """Yield the whole plan for an operator: the node, each pod's answer and its reasons, the remaining resources, the picture."""
    yield from _wrapped("host", hardware_line(plan.hardware), width)
    yield from _wrapped("kubelet", kubelet_line(plan), width)
    yield from _wrapped("reserved", _reserved(plan), width)
    yield from _wrapped("allocatable", _allocatable(plan.before.allocatable), width)
    yield from _wrapped("before", _before(plan.before), width)
    yield from _wrapped("requested", _requested(plan), width)
    for note in plan.notes:
        yield from _wrapped("note", note, width)
    for pod in plan.pods:
        yield ""
        yield from _pod_lines(pod, width)
    if plan.if_live:
        yield ""
        yield from _if_live(plan, plan.if_live, width)
    if plan.fit:
        yield ""
        yield from _wrapped("instance", _fit(plan.fit), width)
        if plan.fit.placement is not None:
            yield from _finding_lines(plan.fit.placement, width)
    yield ""
    yield from _wrapped("remains" if plan.pods else "free", _remains(plan), width)
    yield from _wrapped("unrequested", _allocatable(_unrequested(plan.after)), width)
    if plan.what_if:
        yield ""
        yield from table_lines(plan, width)
    yield ""
    yield from picture_lines(plan, width=width, colour=colour)


def _wrapped(label: str, text: str, width: int) -> Iterator[str]:
    yield from textwrap.wrap(
        escaped(text),
        max(width, 60),
        initial_indent=f"{label:<12}",
        subsequent_indent=INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def kubelet_line(plan: NodePlan) -> str:
    """Describe the version and the policies of the kubelet of *plan* in one line."""
    configuration = plan.configuration
    options = {**configuration.cpu_manager_policy_options, **configuration.topology_manager_policy_options}
    listed = "".join(f", {name}={value}" for name, value in sorted(options.items()))
    compared = ", from source and not run" if configuration.minor >= FROM_SOURCE_MINOR else ""
    return (
        f"1.{configuration.minor}{compared}: CPU Manager {configuration.cpu_manager_policy}, Memory Manager"
        f" {configuration.memory_manager_policy}, Topology Manager {configuration.topology_manager_policy}"
        f" (scope {configuration.topology_manager_scope}){listed}"
    )


def _reserved(plan: NodePlan) -> str:
    cpus = reserved_of(plan)
    listed = [f"CPUs {cpus}"] if cpus else []
    listed += [
        f"{format_bytes(amount)} {resource} on NUMA node {numa_node}"
        for numa_node, resources in sorted(plan.configuration.reserved_memory.items())
        for resource, amount in sorted(resources.items())
    ]
    return ", ".join(listed) or "nothing"


def _allocatable(allocatable: NodeAllocatable | None) -> str:
    if allocatable is None:
        return "not compared"
    return f"{_amounts(allocatable.resources) or 'nothing'}, {_count(max(0, allocatable.pods), 'pod')}"


def _amounts(amounts: Mapping[str, int]) -> str:
    return ", ".join(
        f"{approximate(amount)} {resource}" if resource != CPU and amount >= GIB else format_amount(resource, amount)
        for resource, amount in amounts.items()
        if amount > 0
    )


def _unrequested(node: SimulatedNode) -> NodeAllocatable | None:
    return node.allocatable and node.allocatable.unrequested(node.active.values())


def _requested(plan: NodePlan) -> str:
    """Describe the known part of the pods that were on the node before."""
    active = plan.before.active.values()
    known = f"{_amounts(total_requests(active)) or 'nothing'} by {_count(len(active), 'pod') if active else 'any pod'}"
    match plan.known:
        case "all":
            return known
        case "exclusive":
            return f"{known} of the state files; other pods are in none, and their requests count as well: --running"
        case "none":
            return "nothing is known of other pods, whose requests count as well: --running"
        case _:
            assert_never(plan.known)


def _if_live(plan: NodePlan, live: NodePlan, width: int) -> Iterator[str]:
    """Yield the answers that differ if the unclear pods of *plan* are still running."""
    yield from _wrapped("if live", f"{', '.join(sorted(plan.unclear))} running without exclusive CPUs:", width)
    answers = {pod.manifest.pod.pod_uid: _answer(pod) for pod in plan.pods}
    for pod in live.pods:
        if answers.get(pod.manifest.pod.pod_uid) != _answer(pod):
            yield from _wrapped("", f"{pod.manifest.name}: {_decision(pod)}", width)
            for container in pod.containers:
                yield from _container_lines(container, width)


def _decision(pod: PodPlan) -> str:
    admission = pod.explanation.admission
    if admission.admitted:
        return "admitted"
    if admission.outcome is Outcome.REJECTED:
        return f"rejected: {admission.reason}: {admission.message}"
    return f"the kubelet {admission.outcome.value}: {admission.message}"


def _before(node: SimulatedNode) -> str:
    given = [
        f"{pod_uid}/{name} has {cpus}"
        for pod_uid, containers in sorted(node.cpus.assignments.items())
        for name, cpus in sorted(containers.items())
    ]
    given += [f"{pod_uid} has {cpus}" for pod_uid, cpus in sorted(node.cpus.pod_assignments.items())]
    given += [f"unknown pods have {node.cpus.unattributed}"] if node.cpus.unattributed else []
    return "; ".join(given) or "no container has exclusive CPUs"


def _remains(plan: NodePlan) -> str:
    node = plan.after
    if node.kubelet.cpu_manager is None:
        return "the kubelet makes no CPU exclusive with cpuManagerPolicy none"
    most = max((len(node.available & cpus) for cpus in plan.machine.cpus_of_numa_node.values()), default=0)
    return (
        f"shared pool {node.shared_pool or 'empty'}; {_count(len(node.available), 'CPU')} of it can still be given,"
        f" at most {most} on one NUMA node"
    )


def _pod_lines(pod: PodPlan, width: int) -> Iterator[str]:
    explanation = pod.explanation
    yield from _wrapped("pod", f"{pod.manifest.name} ({pod.manifest.qos.value}): {_decision(pod)}", width)
    if pod.whole_cpus or pod.whole_memory:
        parts = [
            f"exclusive CPUs {pod.whole_cpus}" if pod.whole_cpus else "the shared pool",
            *map(_block, pod.whole_memory),
        ]
        yield from _wrapped("  whole", "; ".join(parts), width)
    for container in pod.containers:
        yield from _container_lines(container, width)
    for fault in pod.faults:
        yield from _wrapped("  fault", fault, width)
    for reason in pod.manifest.why:
        yield from _wrapped("  QoS", f"not Guaranteed: {reason}", width)
    yield from _why_lines(explanation, width)
    for note in pod.notes:
        yield from _wrapped("  note", note, width)


def _why_lines(explanation: Explanation, width: int) -> Iterator[str]:
    several = len(explanation.admission.pod.containers) > 1
    for merge in explanation.merges:
        if any(each.hints is not None or each.fits_nowhere for each in merge.asked):
            prefix = f"{merge.container}: " if merge.container and len(explanation.merges) > 1 else ""
            for number, asked in enumerate(merge.asked):
                yield from _wrapped("" if number else "  why", f"{'' if number else prefix}{asked}", width)
            yield from _wrapped("", f"so {merge.why}", width)
    for shortage in explanation.shortages:
        prefix = f"{shortage.container}: " if shortage.container and several else ""
        yield from _wrapped("  missing", f"{prefix}{shortage}", width)
    for missing in explanation.admission.insufficient:
        yield from _wrapped("  missing", _too_little_left(missing), width)
    for number, other in enumerate(explanation.alternatives):
        cpus = " and ".join(f"{name} {each}" for name, each in other.cpus.items())
        given = f"admitted, {cpus}" if cpus else other.outcome.value + (f": {other.reason}" if other.reason else "")
        yield from _wrapped(
            "" if number else "  otherwise", f"topologyManagerPolicy {other.policy.value}: {given}", width
        )


def _too_little_left(missing: Insufficient) -> str:
    if missing.resource == PODS:
        return f"the node takes {_count(missing.capacity, 'pod')}, and has {missing.used}"
    asked, used, capacity, more = (
        format_amount(missing.resource, amount)
        for amount in (missing.requested, missing.used, missing.capacity, missing.missing)
    )
    return f"{asked} requested; the node has {capacity} for pods, others request {used}, {more} too much"


def _container_lines(container: ContainerPlan, width: int) -> Iterator[str]:
    kind = container.container.kind
    parts = [f"exclusive CPUs {container.cpus}" if container.cpus else "the shared pool"]
    if container.pod_cpus:
        # An init container has them alone: it ends before the next one starts.
        parts = [f"the pod's {'' if kind is ContainerKind.INIT else 'shared '}CPUs {container.pod_cpus}"]
    shared = "the pod's " if container.shares_memory else ""
    parts += [f"{shared}{_block(block)}" for block in container.memory if block.size]
    parts += [_devices(resource, places) for resource, places in container.devices.items()]
    if container.affinity is not None and (container.cpus or container.memory or container.devices):
        parts.append(f"affinity {_affinity(container.affinity)}")
    name = container.container.name + ("" if kind is ContainerKind.APP else f" ({kind.value})")
    yield from _wrapped("  gets", f"{name}: {'; '.join(parts)}", width)
    if container.placement:
        yield from _placement_lines(container.placement, width)


def _placement_lines(placement: Pinning, width: int) -> Iterator[str]:
    pins = ", ".join(runs_of(placement.pins))
    yield from _wrapped(
        "  vCPUs", f"{placement.policy.value}, {_count(placement.threads, 'thread')} a core: {pins}", width
    )
    yield from _finding_lines(placement, width)


def _finding_lines(placement: Pinning, width: int) -> Iterator[str]:
    for finding in placement.findings:
        yield from _wrapped(f"  {finding.level.value}", str(finding), width)


def runs_of(pins: Sequence[int]) -> Iterator[str]:
    """Yield the CPU of each vCPU; neighbours with equal steps are one run, such as ``0,2..38→1-20``."""
    for stride in (1, 2, 4, 8):
        runs = [_runs(pins, start, stride) for start in range(stride)]
        if sum(map(len, runs)) <= min(2 * stride, len(pins) - 1):
            yield from itertools.chain.from_iterable(runs)
            return
    yield from (f"{vcpu}→{cpu}" for vcpu, cpu in enumerate(pins))


def _runs(pins: Sequence[int], start: int, stride: int) -> list[str]:
    """Break every *stride*-th vCPU from *start* into runs on ascending neighbour CPUs."""
    runs: list[tuple[int, int]] = []
    vcpus = range(start, len(pins), stride)
    for vcpu in vcpus:
        if runs and pins[vcpu] == pins[vcpu - stride] + 1:
            runs[-1] = (runs[-1][0], vcpu)
        else:
            runs.append((vcpu, vcpu))
    return [
        f"{first}→{pins[first]}" if first == last else f"{_series(first, last, stride)}→{pins[first]}-{pins[last]}"
        for first, last in runs
    ]


def _series(first: int, last: int, stride: int) -> str:
    if stride == 1:
        return f"{first}-{last}"
    series = range(first, last + 1, stride)
    return ",".join(map(str, series)) if len(series) <= 3 else f"{first},{first + stride}..{last}"  # noqa: PLR2004 - shorter


def _block(block: Block) -> str:
    where = ",".join(map(str, block.numa_nodes))
    return f"{format_bytes(block.size)} {block.resource} on NUMA node{'s' if len(block.numa_nodes) > 1 else ''} {where}"


def _devices(resource: str, places: Mapping[int | None, int]) -> str:
    spread = " and ".join(
        f"{count} on NUMA node {place}" if place is not None else f"{count} of no NUMA node"
        for place, count in places.items()
    )
    return f"{resource}: {spread or 'none'}"


def _affinity(hint: Hint) -> str:
    return str(hint) if hint.preferred or hint.mask is None else f"{hint}, not preferred"


def _fit(fit: Fit) -> str:
    where = f" in container {fit.container!r} of pod {fit.pod!r}" if fit.container else ""
    if fit.placement is None:
        return f"{_count(fit.vcpus, 'vCPU')} do not fit{where}: {fit.error}"
    return f"{_count(fit.vcpus, 'vCPU')} fit{where}: vCPU→CPU {', '.join(runs_of(fit.placement.pins))}"


# --- what if ----------------------------------------------------------------------------------------------------------


def table_lines(plan: NodePlan, width: int) -> Iterator[str]:
    """Yield a table of the plan and its alternatives: a row for each configuration, a column for each pod.

    Where that is wider than *width*, each configuration has a block of rows instead.
    """
    heads = [*(escaped(pod.manifest.name) for pod in plan.pods), "shared pool"]
    rows = [
        (escaped(each.name), _answers(each, len(heads)))
        for other in (WhatIf("as it is", plan), *plan.what_if)
        for each in _readings(other)
    ]
    full = [answers for _, answers in rows if len(answers) == len(heads)]
    widths = [max(len(row[column]) for row in (heads, *full)) for column in range(len(heads))]
    first = max(len(name) for name, _ in rows)
    if first + sum(widths) + 2 * len(widths) <= width:
        for name, answers in [("what if", heads), *rows]:
            cells = zip([name, *answers], [first, *widths], strict=False)
            yield "  ".join(f"{cell:<{size}}" for cell, size in cells).rstrip()
        return
    for name, answers in rows:
        yield f"what if     {name}"
        if len(answers) == 1:
            yield from _wrapped("", answers[0], width)
        else:
            for head, answer in zip(heads, answers, strict=True):
                yield from _wrapped("", f"{head}: {answer}", width)


def _readings(other: WhatIf) -> Iterator[WhatIf]:
    """Yield *other*, and once more with its unclear pods still running if that changes an answer."""
    yield other
    if other.plan and other.plan.if_live:
        yield WhatIf(f"{other.name}, if live", other.plan.if_live)


def _answers(other: WhatIf, columns: int) -> list[str]:
    """Return the answer to each pod and the shared pool after them, or only the reason why the kubelet would not start."""
    if other.plan is None:
        return [f"the kubelet would not start: {other.refusal}"]
    answers = [_answer(pod) for pod in other.plan.pods]
    answers += ["not asked"] * (columns - 1 - len(answers))
    return [*answers, str(other.plan.after.shared_pool) or "all CPUs"]


def _answer(pod: PodPlan) -> str:
    admission = pod.explanation.admission
    if not admission.admitted:
        return admission.reason or admission.outcome.value
    spread = sorted({node for container in pod.containers for block in container.memory for node in block.numa_nodes})
    where = f" (memory on {','.join(map(str, spread))})" if spread else ""
    return (str(pod.cpus) or "shared pool") + where


# --- JSON -------------------------------------------------------------------------------------------------------------


def node_json(plan: NodePlan) -> NodeDocument:
    """Return *plan* as plain values; CPU sets in their text form, memory in bytes."""
    return {
        "version": FORMAT,
        "fits": plan.fits,
        "host": {
            "cpus": str(plan.machine.online),
            "numa_nodes": {str(node): str(cpus) for node, cpus in plan.machine.cpus_of_numa_node.items()},
        },
        "kubelet": {
            "minor": plan.configuration.minor,
            "cpu_manager_policy": plan.configuration.cpu_manager_policy,
            "cpu_manager_policy_options": dict(plan.configuration.cpu_manager_policy_options),
            "memory_manager_policy": plan.configuration.memory_manager_policy,
            "topology_manager_policy": plan.configuration.topology_manager_policy,
            "topology_manager_scope": plan.configuration.topology_manager_scope,
            "topology_manager_policy_options": dict(plan.configuration.topology_manager_policy_options),
            "reserved_cpus": str(reserved_of(plan)),
        },
        "notes": list(plan.notes),
        "known_pods": plan.known,
        "before": _state_json(plan.before),
        "pods": [_pod_json(pod) for pod in plan.pods],
        "unclear_pods": sorted(plan.unclear),
        "if_live": _plan_json(plan.if_live),
        "instance": _fit_json(plan.fit) if plan.fit else None,
        "after": _state_json(plan.after),
        "what_if": [
            {
                "name": other.name,
                "refusal": other.refusal or None,
                "pods": [_pod_json(pod) for pod in other.plan.pods] if other.plan else [],
                "after": _state_json(other.plan.after) if other.plan else None,
                "if_live": _plan_json(other.plan.if_live) if other.plan else None,
            }
            for other in plan.what_if
        ],
    }


def _plan_json(plan: NodePlan | None) -> OutcomesDocument | None:
    return None if plan is None else {"pods": [_pod_json(pod) for pod in plan.pods], "after": _state_json(plan.after)}


def _state_json(node: SimulatedNode) -> StateDocument:
    plugins = node.kubelet.device_manager
    return {
        "shared_pool": str(node.shared_pool),
        "available": str(node.available),
        "exclusive": {
            pod_uid: {name: str(cpus) for name, cpus in sorted(containers.items())}
            for pod_uid, containers in sorted(node.cpus.assignments.items())
        },
        "exclusive_pods": {pod_uid: str(cpus) for pod_uid, cpus in sorted(node.cpus.pod_assignments.items())},
        "memory_free": {
            str(numa_node): {resource: table.free for resource, table in sorted(memory.tables.items())}
            for numa_node, memory in sorted(node.memory.numa_nodes.items())
        },
        "allocatable": _allocatable_json(node.allocatable),
        "unrequested": _allocatable_json(_unrequested(node)),
        "devices_free": _devices_json({resource: plugins.free(node.devices, resource) for resource in plugins.devices}),
    }


def _allocatable_json(allocatable: NodeAllocatable | None) -> dict[str, int] | None:
    """Return *allocatable* in thousandths of CPUs, bytes, and pods."""
    return None if allocatable is None else {**allocatable.resources, PODS: allocatable.pods}


def _devices_json(devices: Devices) -> dict[str, dict[str, int]]:
    """Return *devices* with NUMA nodes as text, ``""`` for none."""
    return {
        resource: {"" if place is None else str(place): count for place, count in places.items()}
        for resource, places in sorted(devices.items())
    }


def _pod_json(pod: PodPlan) -> PlannedPodDocument:
    explanation = pod.explanation
    admission = explanation.admission
    return {
        "name": pod.manifest.name,
        "uid": pod.manifest.pod.pod_uid,
        "source": pod.manifest.source,
        "qos": pod.manifest.qos.value,
        "not_guaranteed_because": list(pod.manifest.why),
        "outcome": admission.outcome.value,
        "reason": admission.reason,
        "message": admission.message,
        "pod_cpus": str(pod.whole_cpus),
        "pod_memory": _memory_json(pod.whole_memory),
        "containers": [_container_json(container) for container in pod.containers],
        "merges": [
            {
                "container": merge.container,
                "asked": [
                    {"provider": each.provider, "resource": each.resource, "says": str(each)} for each in merge.asked
                ],
                "chosen": _hint_json(merge.chosen),
                "admitted": merge.admitted,
                "permutations": merge.permutations,
                "why": merge.why,
            }
            for merge in explanation.merges
        ],
        "missing": [
            {
                "container": each.container,
                "resource": each.resource,
                "wanted": each.wanted,
                "free": each.free,
                "numa_nodes": list(each.numa_nodes),
            }
            for each in explanation.shortages
        ],
        "insufficient": [
            {"resource": each.resource, "requested": each.requested, "used": each.used, "capacity": each.capacity}
            for each in admission.insufficient
        ],
        "preempted": [each.pod_uid for each in admission.preempted],
        "otherwise": [
            {
                "topology_manager_policy": each.policy.value,
                "outcome": each.outcome.value,
                "reason": each.reason,
                "cpus": _cpus_json(each.cpus),
            }
            for each in explanation.alternatives
        ],
        "faults": list(pod.faults),
        "notes": list(pod.notes),
    }


def _cpus_json(cpus: Mapping[str, CpuSet]) -> dict[str, str]:
    return {name: str(each) for name, each in cpus.items()}


def _container_json(container: ContainerPlan) -> ContainerDocument:
    return {
        "name": container.container.name,
        "kind": container.container.kind.value,
        "cpus": str(container.cpus),
        "pod_cpus": str(container.pod_cpus),
        "memory": _memory_json(container.memory),
        "shares_memory": container.shares_memory,
        "devices": _devices_json(container.devices),
        "affinity": None if container.affinity is None else _hint_json(container.affinity),
        "placement": _placement_json(container.placement),
    }


def _memory_json(memory: Iterable[Block]) -> list[MemoryBlockDocument]:
    return [{"resource": block.resource, "bytes": block.size, "numa_nodes": list(block.numa_nodes)} for block in memory]


def _placement_json(placement: Pinning | None) -> PinningDocument | None:
    if placement is None:
        return None
    return {
        "policy": placement.policy.value,
        "threads": placement.threads,
        "pins": list(placement.pins),
        "judgements": [each.to_json() for each in placement.findings],
    }


def _hint_json(hint: Hint) -> HintDocument:
    return {"numa_nodes": None if hint.numa_nodes is None else list(hint.numa_nodes), "preferred": hint.preferred}


def _fit_json(fit: Fit) -> FitDocument:
    return {
        "vcpus": fit.vcpus,
        "pod": fit.pod,
        "container": fit.container,
        "reason": fit.error or None,
        "placement": _placement_json(fit.placement),
    }
