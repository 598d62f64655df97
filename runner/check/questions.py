"""Questions about kernel, CPUs and devices: each reads what one check needs, and calls its judgement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, explain
from runner.check import cpu_owners, device_rights, kernel_settings, programs
from runner.check.context import CheckContext, CheckedHost
from runner.check.cpu_owners import CpuNeighbour, Init
from runner.check.finding import Check, Finding, Place
from runner.kernel.cgroup import Cgroup
from runner.kernel.character_devices import why_not_opened
from runner.kernel.files import cpu_limits
from runner.kernel.memory import read_lockable, try_mbind
from runner.kernel.procfs import Procfs
from runner.kernel.settings import (
    read_cgroup_mounts,
    read_choice,
    read_cpus,
    read_interrupts,
    read_line,
    read_pci_devices,
    read_quiet_cpus,
    read_swaps,
)

SIGTERM = 15

Question = Callable[[CheckedHost, CheckContext], Iterable[Finding]]
"""Reads what one check needs, and judges it. May raise :exc:`HostError`, :exc:`OSError` or :exc:`ValueError`."""


def answers(host: CheckedHost, context: CheckContext) -> Iterator[Finding]:
    """Yield the findings of each question; where the kernel refuses to answer, that is the finding."""
    for check, question in (*KERNEL_QUESTIONS, *_cpu_questions(context), *_device_questions(context)):
        try:
            yield from tuple(question(host, context))
        except (HostError, OSError, ValueError) as error:
            yield check.unknown(f"cannot read what it takes: {explain(error)}")


def _cgroups(host: CheckedHost, context: CheckContext) -> Iterator[Finding]:
    mounts = read_cgroup_mounts(host.roots.proc)
    offered: list[str] = []
    if mounts.unified is not None:
        offered = read_line(host.root / mounts.unified[1:] / "cgroup.controllers").split()
    yield kernel_settings.judge_cgroups(context.place, mounts.unified, offered, mounts.legacy)


def _kernel(host: CheckedHost, _: CheckContext) -> Iterator[Finding]:
    yield kernel_settings.judge_kernel(read_line(host.roots.proc / "sys/kernel/osrelease"))


def _clock(host: CheckedHost, _: CheckContext) -> Iterator[Finding]:
    current = host.roots.sys / "devices/system/clocksource/clocksource0/current_clocksource"
    yield kernel_settings.judge_clock(read_line(current))


def _swap(host: CheckedHost, context: CheckContext) -> Iterator[Finding]:
    limit = read_line(host.roots.cgroup / context.cgroup[1:] / "memory.swap.max")
    yield kernel_settings.judge_swap(read_swaps(host.roots.proc), limit)


def _transparent_hugepages(host: CheckedHost, _: CheckContext) -> Iterator[Finding]:
    shmem = read_choice(host.roots.sys / "kernel/mm/transparent_hugepage/shmem_enabled")
    yield kernel_settings.judge_transparent_hugepages(shmem)


def _hugepages(_: CheckedHost, context: CheckContext) -> Iterator[Finding]:
    near = context.hardware.online if context.place is Place.NODE else context.cpus
    if context.hugepage_size is not None and context.backend is not None:
        near = CpuSet()  # the plan has found enough of them where they are wanted
    yield kernel_settings.judge_hugepages(context.hardware, near, context.hugepage_size)


def _numa_balancing(host: CheckedHost, context: CheckContext) -> Iterator[Finding]:
    value = read_line(host.roots.proc / "sys/kernel/numa_balancing")
    yield kernel_settings.judge_numa_balancing(value, len(context.hardware.numa_nodes))


def _aio(host: CheckedHost, _: CheckContext) -> Iterator[Finding]:
    yield kernel_settings.judge_aio(Procfs(host.roots.proc).aio_free())


def _isolated(host: CheckedHost, context: CheckContext) -> Iterator[Finding]:
    cpu = host.roots.sys / "devices/system/cpu"
    isolated = read_cpus(cpu / "isolated") if (cpu / "isolated").exists() else None
    yield kernel_settings.judge_isolated(isolated, read_quiet_cpus(host.roots.proc, cpu), context.shared_pool)


def _pci(host: CheckedHost, context: CheckContext) -> Iterator[Finding]:
    yield kernel_settings.judge_pci(tuple(read_pci_devices(host.roots.sys)), len(context.hardware.numa_nodes))


KERNEL_QUESTIONS: tuple[tuple[Check, Question], ...] = (
    (kernel_settings.CGROUPS, _cgroups),
    (kernel_settings.KERNEL, _kernel),
    (kernel_settings.CLOCK, _clock),
    (kernel_settings.SWAP, _swap),
    (kernel_settings.TRANSPARENT_HUGEPAGES, _transparent_hugepages),
    (kernel_settings.HUGEPAGES, _hugepages),
    (kernel_settings.NUMA_BALANCING, _numa_balancing),
    (kernel_settings.AIO, _aio),
    (kernel_settings.ISOLATED, _isolated),
    (kernel_settings.PCI, _pci),
)


def _cpu_questions(context: CheckContext) -> Iterator[tuple[Check, Question]]:
    if context.place is Place.NODE:
        yield from _node_cpu_questions(context)
        return
    yield cpu_owners.OWN, _own_cpus
    yield cpu_owners.TIME, _cpu_time
    if context.hardware.online <= context.cpus:  # then none of them is exclusive, as own-cpus has reported
        for check in (cpu_owners.CORES, cpu_owners.INTERRUPTS):
            yield check, partial(_unknown, check, "no CPUs are set apart for the vCPUs")
    else:
        yield cpu_owners.CORES, partial(_cores, context.cpus, CpuSet(), "the vCPUs")
        yield cpu_owners.INTERRUPTS, partial(_interrupts, context.cpus)
    if context.place is not Place.MACHINE:
        yield cpu_owners.PID_NAMESPACE, _pid_1


def _node_cpu_questions(context: CheckContext) -> Iterator[tuple[Check, Question]]:
    pool, assigned = context.shared_pool, programs.assigned_by(context.kubelet)
    exclusive = cpu_owners.exclusive_of(assigned)
    if pool is None or not exclusive:
        why = "which CPUs are exclusive is not known here" if pool is None else "no pod has CPUs of its own now"
        for check in (cpu_owners.CORES, cpu_owners.INTERRUPTS, cpu_owners.NEIGHBOURS):
            yield check, partial(_unknown, check, why)
        return
    for pod_uid, cpus in assigned.items():
        yield cpu_owners.CORES, partial(_cores, cpus, exclusive - cpus, f"pod {pod_uid}")
    yield cpu_owners.INTERRUPTS, partial(_interrupts, exclusive)
    yield cpu_owners.NEIGHBOURS, partial(_neighbours, exclusive, pool)


def _unknown(check: Check, why: str, _: CheckedHost, __: CheckContext) -> Iterator[Finding]:
    yield check.unknown(why)


def _own_cpus(_: CheckedHost, context: CheckContext) -> Iterator[Finding]:
    online = context.hardware.online
    yield cpu_owners.judge_own_cpus(context.pod, context.allowed, online, asks_for_less=context.asks_for_less)


def _cores(cpus: CpuSet, others: CpuSet, owner: str, _: CheckedHost, context: CheckContext) -> Iterator[Finding]:
    return cpu_owners.judge_cores(cpus, context.hardware, others, owner)


def _interrupts(cpus: CpuSet, host: CheckedHost, context: CheckContext) -> Iterator[Finding]:
    yield cpu_owners.judge_interrupts(tuple(read_interrupts(host.roots.proc)), cpus, context.hardware.online)


def _cpu_time(host: CheckedHost, context: CheckContext) -> Iterator[Finding]:
    if context.backend == "controller":
        yield cpu_owners.TIME.ok("the controller moves the vCPUs out of the pod's cgroup, where no cpu.max limits them")
        return
    group = host.roots.cgroup / context.cgroup[1:]
    if not (group / "cgroup.controllers").exists():
        yield cpu_owners.TIME.unknown(
            "no cgroup v2 can be seen here, so whether cpu.max limits it is not known", "run check on the node"
        )
        return
    limit = min(cpu_limits(PurePosixPath(host.roots.cgroup), context.cgroup), default=None)
    throttled = _throttled(read_line(group / "cpu.stat"))
    yield cpu_owners.judge_cpu_time(context.place, limit, context.vcpus, throttled, asks_for_less=context.asks_for_less)


def _pid_1(host: CheckedHost, context: CheckContext) -> Iterator[Finding]:
    shared = context.in_initial_pid_namespace
    return cpu_owners.judge_init(context.place, _init(Procfs(host.roots.proc)), in_initial_pid_namespace=shared)


def _neighbours(exclusive: CpuSet, pool: CpuSet, host: CheckedHost, _: CheckContext) -> Iterator[Finding]:
    yield cpu_owners.judge_neighbours(tuple(_populated_groups(host.roots.cgroup)), exclusive, pool)


def _throttled(stat: str) -> int:
    return next((int(line.split()[1]) for line in stat.splitlines() if line.startswith("nr_throttled ")), 0)


def _populated_groups(mount: Path) -> Iterator[CpuNeighbour]:
    """Yield the populated cgroups below *mount* that are not the kubelet's; one without cpuset has its parent's CPUs."""
    root = Cgroup(mount)
    for name in root.children():
        group = root.child(name)
        if "kube" in name or (group.path / "float").is_dir() or not group.populated():
            continue
        limited = (group.path / "cpuset.cpus.effective").exists()
        yield CpuNeighbour(name, group.effective_cpus() if limited else root.effective_cpus())


def _init(procfs: Procfs) -> Init:
    status = procfs.status("1")

    def has_sigterm(field: str) -> bool:
        return bool(int(status[field], 16) >> (SIGTERM - 1) & 1)

    return Init(
        ours=procfs.status()["Pid"] == "1",
        name=status["Name"],
        blocks_sigterm=has_sigterm("SigBlk"),
        handles_sigterm=has_sigterm("SigCgt"),
    )


def _device_questions(context: CheckContext) -> Iterator[tuple[Check, Question]]:
    yield device_rights.TUN, partial(_device, device_rights.TUN, "net/tun")
    yield device_rights.VHOST_NET, partial(_device, device_rights.VHOST_NET, "vhost-net")
    if context.place is not Place.NODE:  # a pod has rights of its own
        yield device_rights.MEMLOCK, _memlock
        yield device_rights.MBIND, _mbind
    if context.place is Place.POD:
        yield device_rights.SECCOMP, _seccomp


def _device(check: Check, name: str, host: CheckedHost, context: CheckContext) -> Iterator[Finding]:
    path = host.roots.dev / name
    yield device_rights.judge_device(check, context.place, str(path), why_not_opened(path))


def _memlock(_: CheckedHost, context: CheckContext) -> Iterator[Finding]:
    yield device_rights.judge_memlock(read_lockable(Procfs().machine_capabilities()), context.lockable)


def _seccomp(host: CheckedHost, _: CheckContext) -> Iterator[Finding]:
    yield device_rights.judge_seccomp(may_make_root=Procfs(host.roots.proc).may_make_root())


def _mbind(_: CheckedHost, context: CheckContext) -> Iterator[Finding]:
    [numa_node, *_rest] = CpuSet.parse(Procfs().status()["Mems_allowed_list"])  # of this process, which tries it
    yield device_rights.judge_mbind(try_mbind(numa_node), len(context.hardware.numa_nodes))
