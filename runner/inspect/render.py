"""The report of ``inspect`` for people, for machines, and as lines for the comparison of two reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from runner.base.judgement import Judgement, Level
from runner.base.subject import FORMAT, judgement_lines, worst
from runner.base.table import aligned, duration
from runner.inspect.cpu_settings import CpuSettings
from runner.inspect.observation import GuestMemory, PodCharge
from runner.inspect.report_json import InspectDocument, InspectedDocument, SettingsDocument
from runner.inspect.rules import CHARGED, EXCLUSIVE, KUBELET, LOCAL, VCPUS, InspectionReport, JudgedInstance
from runner.placement.threads import UNNAMED, ObservedThread

HEAD = ("ROLE", "TID", "NAME", "ALLOWED_CPUS", "RUNNING_ON", "NUMA_NODE", "CGROUP")
LIST_HEAD = ("INSTANCE", "POD", "UUID", "CPUS", "UPTIME", "VERDICT")
WIDTH = max(len(each.name) for each in (VCPUS, EXCLUSIVE, LOCAL, CHARGED, KUBELET))
"""Characters of the column of the rules' names."""
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
"""The parts of an instance's report that are shown to people."""


def report_lines(report: InspectionReport) -> Iterator[str]:
    """Yield the table of each instance with its judgements, then those of the node; a list of the instances comes first."""
    if report.seen_from == "node" and report.instances:
        yield from aligned([LIST_HEAD, *map(_list_row, report.instances)])
        yield ""
    for each in report.instances:
        instance = each.observation
        on = f" on NUMA node '{instance.numa_nodes}'" if instance.numa_nodes else ""
        title = instance_title(instance.name, instance.pod, instance.pod_uid)
        yield f"{title}: CPUs '{instance.cpus}'{on}, placement {instance.backend}, {instance.guarantee}"
        yield from aligned([HEAD, *(_row(thread, instance.numa_node_of) for thread in instance.threads)])
        yield from judgement_lines(each.judgements, width=WIDTH)
        if instance.settings is not None:
            yield f"{'':7}  {'settings':{WIDTH}}  {instance.settings.line()}"
        if instance.reported is not None:
            yield f"{'':7}  {'reported':{WIDTH}}  {reported_line(instance.reported)}"
        yield ""
    if report.seen_from == "node" and not report.instances:
        yield "no instance is placed by the controller here; others are inspected in their containers"
    yield from judgement_lines(report.kubelet, width=WIDTH)


def reported_line(reported: Mapping[str, object]) -> str:
    """Return an instance's report of its state in one line; machines get all of it."""
    return " ".join(f"{name}={_value(reported[name])}" for name in STATE if name in reported)


def _value(value: object) -> str:
    if isinstance(value, dict):  # numbers by label value, without zeros, or texts
        return ",".join(f"{key}:{_number(each)}" for key, each in value.items() if each) or "none"
    return _number(value)


def _number(value: object) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def instance_title(name: str, pod: str, pod_uid: str) -> str:
    """Return the title of the instance *name* for people; *pod* and *pod_uid* are empty if unknown."""
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
    return (name, instance.pod or "-", instance.pod_uid, str(instance.cpus), uptime, _summary(each.judgements))


def _summary(judgements: Sequence[Judgement]) -> str:
    """Return the worst level of *judgements*, with the subjects that have it unless it is ``ok``."""
    level = worst(judgements)
    rules = dict.fromkeys(each.subject for each in judgements if each.level is level)
    return level.value if level is Level.OK else f"{level.value}: {', '.join(rules)}"


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


def state_lines(report: InspectionReport) -> Iterator[str]:
    """Yield a line for each thread and judgement, without the CPU on which a thread last ran, which changes all the time."""
    for each in report.instances:
        name = (each.observation.pod_uid or each.observation.name)[:8]
        for observed in each.observation.threads:
            thread = observed.thread
            yield f"{name} {observed.title} {thread.tid} {thread.name!r} may run on '{thread.cpus}' in '{thread.cgroup}'"
        yield from (f"{name} {line}" for line in map(_state_line, each.judgements))
    yield from map(_state_line, report.kubelet)


def _state_line(judgement: Judgement) -> str:
    line = f"{judgement.subject} {judgement.level.value}"
    return line if judgement.level is Level.OK else f"{line}: {judgement.found}"


def report_json(report: InspectionReport) -> InspectDocument:
    """Return *report* as plain values; CPU sets in the kernel's list format, sizes in bytes."""
    return {
        "version": FORMAT,
        "seen_from": report.seen_from,
        "verdict": report.verdict.value,
        "instances": [_instance_json(each) for each in report.instances],
        "judgements": [each.to_json() for each in report.kubelet],
    }


def _instance_json(each: JudgedInstance) -> InspectedDocument:
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
        "threads": [
            {**each.to_json(), "numa_node": instance.numa_node_of.get(each.thread.running_on)}
            for each in instance.threads
        ],
        "judgements": [judgement.to_json() for judgement in each.judgements],
        "memory": {
            "small_pages": {str(node): size for node, size in sorted(memory.small.items())},
            "huge_pages": {str(node): size for node, size in sorted(memory.huge.items())},
        }
        if isinstance(memory, GuestMemory)
        else None,
        "charge": {"cgroup": charge.cgroup, "memory": charge.amount.memory, "hugetlb": charge.amount.hugetlb}
        if isinstance(charge, PodCharge)
        else None,
        "settings": None if instance.settings is None else _settings_json(instance.settings),
        "reported": instance.reported,
    }


def _settings_json(settings: CpuSettings) -> SettingsDocument:
    return {
        "interrupts": list(settings.interrupts),
        "work_queues": str(settings.work_queues),
        "resume_latencies_us": list(settings.resume_latencies),
        "governors": list(settings.governors),
    }
