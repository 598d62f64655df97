"""A report for people, for machines, and as lines that two reports are compared by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runner.base.table import aligned, duration
from runner.inspect.observation import GuestMemory, PodCharge
from runner.inspect.rules import InspectionReport, JudgedInstance, RuleResult, RuleVerdict
from runner.placement.threads import UNNAMED, ObservedThread

HEAD = ("ROLE", "TID", "NAME", "ALLOWED_CPUS", "RUNNING_ON", "NUMA_NODE", "CGROUP")
LIST_HEAD = ("INSTANCE", "POD", "UUID", "CPUS", "UPTIME", "VERDICT")
SHOWN = 12
"""Reasons of one verdict that people are shown; machines get all."""
STATE = (
    "seconds_ago",
    "guest_state",
    "guest_ready",
    "guest_unready",
    "emulated",
    "build_info",
    "qemu_info",
    "generation",
    "child_restarts_total",
    "guest_resets_total",
)
"""What people are shown of a report."""
FORMAT = 1


def report_lines(report: InspectionReport) -> Iterator[str]:
    """Yield the table of each instance with its verdicts, then the verdict about the node, which begins with a list of them."""
    if report.seen_from == "node" and report.instances:
        yield from aligned([LIST_HEAD, *map(_list_row, report.instances)])
        yield ""
    for each in report.instances:
        instance = each.observation
        on = f" on NUMA node '{instance.numa_nodes}'" if instance.numa_nodes else ""
        title = instance_title(instance.name, instance.pod, instance.pod_uid)
        yield f"{title}: CPUs '{instance.cpus}'{on}, placement {instance.backend}, {instance.guarantee}"
        yield from aligned([HEAD, *(_row(thread, instance.numa_node_of) for thread in instance.threads)])
        yield from verdict_lines(each.verdicts)
        if instance.settings is not None:
            yield f"{'':8}  {'settings':9}  {instance.settings.line()}"
        if instance.reported is not None:
            yield f"{'':8}  {'reported':9}  {reported_line(instance.reported)}"
        yield ""
    if report.seen_from == "node" and not report.instances:
        yield "no instance is placed by the controller here; others are inspected in their containers"
    yield from verdict_lines((report.kubelet,))


def reported_line(reported: Mapping[str, object]) -> str:
    """Return what an instance has reported of its state, in one line; machines get all of it."""
    return " ".join(f"{name}={_value(reported[name])}" for name in STATE if name in reported)


def _value(value: object) -> str:
    if isinstance(value, dict):  # by the values of a label, of which zeros are left out, or texts
        return ",".join(f"{key}:{_number(each)}" for key, each in value.items() if each) or "none"
    return _number(value)


def _number(value: object) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def instance_title(name: str, pod: str, pod_uid: str) -> str:
    """Return how people are shown the instance *name*; *pod* and *pod_uid* are empty where they are not known."""
    names = [name if name == UNNAMED else f"instance {name}"]
    if pod:
        names.append(f"pod {pod}")
    if pod_uid not in {"", name}:
        names.append(pod_uid)
    return ", ".join(names)


def _list_row(each: JudgedInstance) -> tuple[str, ...]:
    instance = each.observation
    name = "-" if instance.name == instance.pod_uid else instance.name
    uptime = "-" if instance.uptime is None else duration(instance.uptime)
    return (name, instance.pod or "-", instance.pod_uid, str(instance.cpus), uptime, _summary(each.verdicts))


def _summary(verdicts: Sequence[RuleVerdict]) -> str:
    """Return the worst result of *verdicts*, with the rules that have it unless it is ``ok``."""
    for result in (RuleResult.VIOLATED, RuleResult.UNKNOWN):
        if rules := [verdict.rule for verdict in verdicts if verdict.result is result]:
            return f"{result.value}: {', '.join(rules)}"
    return RuleResult.OK.value


def _row(each: ObservedThread, numa_node_of: Mapping[int, int]) -> tuple[str, ...]:
    thread = each.thread
    numa_node = numa_node_of.get(thread.running_on, "?")
    return (
        each.title,
        str(thread.tid),
        thread.name,
        str(thread.cpus),
        str(thread.running_on),
        str(numa_node),
        thread.cgroup,
    )


def verdict_lines(verdicts: tuple[RuleVerdict, ...]) -> Iterator[str]:
    """Yield the reasons of each of *verdicts*, after its result and its rule."""
    for verdict in verdicts:
        head = f"{verdict.result.value:8}  {verdict.rule:9}  "
        for reason in verdict.reasons[:SHOWN]:
            yield head + reason
            head = " " * len(head)
        if len(verdict.reasons) > SHOWN:
            yield f"{head}and {len(verdict.reasons) - SHOWN} more; --json names all"


def state_lines(report: InspectionReport) -> Iterator[str]:
    """Yield a line for each thread and verdict, without the CPU a thread ran on last, which changes all the time."""
    for each in report.instances:
        name = (each.observation.pod_uid or each.observation.name)[:8]
        for observed in each.observation.threads:
            thread = observed.thread
            yield f"{name} {observed.title} {thread.tid} {thread.name!r} may run on '{thread.cpus}' in '{thread.cgroup}'"
        yield from (f"{name} {line}" for line in map(_verdict_line, each.verdicts))
    yield _verdict_line(report.kubelet)


def _verdict_line(verdict: RuleVerdict) -> str:
    line = f"{verdict.rule} {verdict.result.value}"
    return line if verdict.result is RuleResult.OK else f"{line}: {'; '.join(verdict.reasons)}"


def report_json(report: InspectionReport) -> dict[str, Any]:
    """Return *report* as plain values; CPU sets in the kernel's list format, sizes in bytes."""
    return {
        "version": FORMAT,
        "seen_from": report.seen_from,
        "violated": report.violated,
        "instances": [_instance_json(each) for each in report.instances],
        "verdicts": [verdict_json(report.kubelet)],
    }


def _instance_json(each: JudgedInstance) -> dict[str, Any]:
    instance = each.observation
    memory, charge = instance.memory, instance.charge
    return {
        "name": instance.name,
        "pod": instance.pod,
        "pod_uid": instance.pod_uid,
        "uptime": None if instance.uptime is None else round(instance.uptime, 1),
        "backend": instance.backend,
        "guarantee": instance.guarantee.kind,
        "guarantee_reason": instance.guarantee.reason or None,
        "cpus": str(instance.cpus),
        "numa_nodes": str(instance.numa_nodes),
        "threads": [_thread_json(thread, instance.numa_node_of) for thread in instance.threads],
        "verdicts": [verdict_json(verdict) for verdict in each.verdicts],
        "memory": {
            "small_pages": {str(node): size for node, size in sorted(memory.small.items())},
            "huge_pages": {str(node): size for node, size in sorted(memory.huge.items())},
        }
        if isinstance(memory, GuestMemory)
        else None,
        "charge": {"cgroup": charge.cgroup, "memory": charge.amount.memory, "hugetlb": charge.amount.hugetlb}
        if isinstance(charge, PodCharge)
        else None,
        "settings": None if instance.settings is None else instance.settings.to_json(),
        "reported": instance.reported,
    }


def _thread_json(each: ObservedThread, numa_node_of: Mapping[int, int]) -> dict[str, Any]:
    return {**each.to_json(), "numa_node": numa_node_of.get(each.thread.running_on)}


def verdict_json(verdict: RuleVerdict) -> dict[str, Any]:
    """Return *verdict* as plain values."""
    return {"rule": verdict.rule, "result": verdict.result.value, "reasons": list(verdict.reasons)}
