"""The report of ``inspect --trace`` for people and for machines."""

from __future__ import annotations

from collections.abc import Iterator

from runner.base.subject import FORMAT, judgement_lines
from runner.base.table import aligned
from runner.inspect.cpu_time import CpuAccount, InstanceTrace, TaskTime, TraceReport
from runner.inspect.render import instance_title
from runner.inspect.report_json import AccountDocument, TaskDocument, TracedDocument, TraceDocument

HEAD = ("CPU", "TASK", "NAME", "PID", "TID", "NANOSECONDS", "SHARE", "CGROUP")


def trace_lines(report: TraceReport) -> Iterator[str]:
    """Yield the table of each instance with its judgements."""
    if report.fallback:
        yield f"no switch can be recorded, so these are sums: {report.fallback}"
        yield ""
    for instance in report.instances:
        yield (
            f"{instance_title(instance.name, instance.pod, instance.pod_uid)}: CPUs '{instance.cpus}', {instance.guarantee}, "
            f"{report.nanoseconds / 1e9:.3f} s by {report.source}"
        )
        rows = (row for account in instance.accounts for row in _rows(account, report.nanoseconds))
        yield from aligned([HEAD, *rows])
        yield from judgement_lines(report.judgements(instance))
        yield ""
    if not report.instances:
        yield "no instance is placed by the controller here; others are inspected in their containers"
    else:
        yield "Interrupts are no tasks: their time counts as the time of the task that they interrupt, or as idle time."


def _rows(account: CpuAccount, window: int) -> Iterator[tuple[str, ...]]:
    cpu = str(account.cpu)

    def row(task: str, nanoseconds: int, what: TaskTime | None = None) -> tuple[str, ...]:
        share = f"{100 * nanoseconds / window:.4f}%"
        if what is None:
            return (cpu, task, "", "", "", str(nanoseconds), share, "")
        return (cpu, task, what.name, str(what.pid), str(what.tid), str(nanoseconds), share, what.cgroup or "?")

    if account.vcpu is not None:
        yield row(f"vcpu {account.vcpu}", account.vcpu_nanoseconds)
    yield row("idle", account.idle_nanoseconds)
    yield from (row("kernel", task.nanoseconds, task) for task in account.kernel)
    if account.others is None:
        yield row("others", account.other_nanoseconds)
    else:
        yield from (row("other kernel" if task.kernel else "other", task.nanoseconds, task) for task in account.others)
    if account.unknown_nanoseconds:
        yield row("unknown", account.unknown_nanoseconds)


def trace_json(report: TraceReport) -> TraceDocument:
    """Return *report* as plain values."""
    return {
        "version": FORMAT,
        "seen_from": report.seen_from,
        "verdict": report.verdict.value,
        "nanoseconds": report.nanoseconds,
        "source": report.source,
        "fallback": report.fallback or None,
        "instances": [_instance_json(report, each) for each in report.instances],
    }


def _instance_json(report: TraceReport, instance: InstanceTrace) -> TracedDocument:
    return {
        "name": instance.name,
        "pod": instance.pod,
        "pod_uid": instance.pod_uid,
        "backend": instance.backend,
        "guarantee": instance.guarantee.kind,
        "cpus": str(instance.cpus),
        "accounts": [_account_json(each) for each in instance.accounts],
        "judgements": [each.to_json() for each in report.judgements(instance)],
    }


def _account_json(account: CpuAccount) -> AccountDocument:
    return {
        "cpu": account.cpu,
        "vcpu": account.vcpu,
        "vcpu_ns": account.vcpu_nanoseconds,
        "idle_ns": account.idle_nanoseconds,
        "kernel": [_task_json(task) for task in account.kernel],
        "others": None if account.others is None else [_task_json(task) for task in account.others],
        "other_ns": account.other_nanoseconds,
        "unknown_ns": account.unknown_nanoseconds,
        "lost_events": account.lost_events,
    }


def _task_json(task: TaskTime) -> TaskDocument:
    return {
        "name": task.name,
        "pid": task.pid,
        "tid": task.tid,
        "cgroup": task.cgroup or None,
        "kernel": task.kernel,
        "ns": task.nanoseconds,
    }
