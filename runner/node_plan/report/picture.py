"""The picture of a node as text: NUMA nodes, their cores, and the owner of each CPU."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence

from runner.base.cpuset import CpuSet
from runner.base.errors import escaped
from runner.base.values import frozen
from runner.facts.hardware import Hardware
from runner.kubelet.pod import ContainerKind
from runner.kubelet.state import MemoryTable
from runner.node_plan.node_plan import NodePlan

RESERVED, SHARED = "#", "."
"""Signs of reserved CPUs, which no pod gets, and of CPUs in the shared pool."""
MORE = "+"
"""Sign of all owners after the last letter of the alphabet."""
GIB = 1 << 30

DIM = "\N{ESCAPE}[2m"
BOLD = "\N{ESCAPE}[1;3{}m"
PLAIN = "\N{ESCAPE}[0m"
COLOURS = (2, 6, 3, 5, 4, 1)
"""Terminal colours in turn: green, cyan, yellow, magenta, blue, red."""


@frozen
class Owner:
    """The exclusive CPUs of one container or pod.

    *sign* stands in the picture, *name* in the legend. *planned* distinguishes pods of the plan from those of the state files.
    """

    sign: str
    name: str
    cpus: CpuSet
    planned: bool = True


def owners_of(plan: NodePlan) -> tuple[Owner, ...]:
    """Return the owners of exclusive CPUs after *plan*: its pods as A, B, …, those of the state files as a, b, …."""
    planned = {pod.manifest.pod.pod_uid for pod in plan.pods}
    signs = itertools.chain(string.ascii_uppercase, itertools.repeat(MORE))
    owners = []
    for pod in plan.pods:
        if pod.whole_cpus:
            names = {each.container.name: _named(each.container.name, each.container.kind) for each in pod.containers}
            held = plan.after.cpus.assignments.get(pod.manifest.pod.pod_uid, {})
            owners += [
                Owner(next(signs), escaped(name), cpus)
                for name, cpus in _parts(pod.manifest.name, pod.whole_cpus, {names[name]: held[name] for name in names})
            ]
            continue
        several = sum(1 for container in pod.containers if container.cpus) > 1
        for container in pod.containers:
            cpus = plan.after.cpus.assignments.get(pod.manifest.pod.pod_uid, {}).get(container.container.name)
            if cpus:
                name = f"{pod.manifest.name}/{container.container.name}" if several else pod.manifest.name
                owners.append(Owner(next(signs), escaped(_named(name, container.container.kind)), cpus))
    signs = itertools.chain(string.ascii_lowercase, itertools.repeat(MORE))
    state = plan.after.cpus
    for pod_uid, containers in sorted(state.assignments.items()):
        if pod_uid not in planned | state.pod_assignments.keys():
            owners += [
                Owner(next(signs), escaped(f"{pod_uid}/{name}"), cpus, planned=False)
                for name, cpus in sorted(containers.items())
            ]
    for pod_uid in sorted(state.pod_assignments.keys() - planned):
        owners += [
            Owner(next(signs), escaped(name), cpus, planned=False)
            for name, cpus in _parts(pod_uid, state.pod_assignments[pod_uid], state.assignments.get(pod_uid, {}))
        ]
    if state.unattributed:
        owners.append(Owner(next(signs), "unknown pods", state.unattributed, planned=False))
    return tuple(owners)


def _named(name: str, kind: ContainerKind) -> str:
    return name if kind is ContainerKind.APP else f"{name} ({kind.value})"


def _parts(pod: str, whole: CpuSet, held: Mapping[str, CpuSet]) -> Iterator[tuple[str, CpuSet]]:
    """Yield the parts of the CPUs that *pod* has as a *whole*, with the containers that run on each of them.

    *held* are the CPUs by container. An init container has CPUs of later ones as well: the largest part comes first, so that
    smaller ones are drawn over it. CPUs of no container come last.
    """
    parts: dict[CpuSet, list[str]] = {}
    for name, cpus in held.items():
        parts.setdefault(cpus, []).append(name)
    for cpus, names in sorted(parts.items(), key=lambda item: (-len(item[0]), list(item[0]))):
        if cpus:
            yield (pod if len(parts) == 1 and len(names) == 1 else f"{pod}/{', '.join(names)}"), cpus
    if rest := whole - CpuSet.union(held.values()):
        yield f"{pod} (no container)" if held else pod, rest


def reserved_of(plan: NodePlan) -> CpuSet:
    """Return the CPUs that the kubelet keeps from pods."""
    manager = plan.after.kubelet.cpu_manager
    return manager.reserved if manager else CpuSet()


def cores_by_cache(hardware: Hardware, numa_node: int) -> list[list[CpuSet]]:
    """Return the cores of *numa_node* as sets of siblings, grouped by the L3 cache that they share."""
    cpus = hardware.cpus_of_numa_node[numa_node]
    groups: dict[tuple[int, int], list[CpuSet]] = {}
    for core in sorted({hardware.by_cpu[cpu].core for cpu in cpus}):
        facts = hardware.by_cpu[core]
        groups.setdefault((facts.die, -1 if facts.l3 is None else facts.l3), []).append(hardware.cores[core])
    return [groups[key] for key in sorted(groups)]


def approximate(amount: int) -> str:
    """Write *amount* bytes in GiB, rounded down to a tenth, so that no more is shown as free than is."""
    return f"{amount * 10 // GIB / 10:g}Gi"


def memory_of(plan: NodePlan, numa_node: int) -> Iterator[str]:
    """Yield for each resource that the Memory Manager knows on *numa_node* how much of it is free."""
    if numa_node not in plan.after.memory.numa_nodes:
        yield f"memory {approximate(next(node.memory for node in plan.machine.numa_nodes if node.id == numa_node))}"
    for resource, table in tables_of(plan, numa_node):
        yield free_words(resource, table)


def tables_of(plan: NodePlan, numa_node: int) -> list[tuple[str, MemoryTable]]:
    """Return the resources that the Memory Manager knows on *numa_node*, with their tables, memory first."""
    state = plan.after.memory.numa_nodes.get(numa_node)
    tables = {} if state is None else state.tables
    ordered = sorted(tables.items(), key=lambda item: (item[0] != "memory", item[0]))
    return [(resource, table) for resource, table in ordered if table.total]


def free_words(resource: str, table: MemoryTable) -> str:
    """Return how much of *resource* is free."""
    return f"{resource} {approximate(table.free)} of {approximate(table.allocatable)} free"


def devices_of(plan: NodePlan, numa_node: int) -> Iterator[str]:
    """Yield for each device resource of *numa_node* how many devices are free."""
    manager = plan.after.kubelet.device_manager
    for resource in sorted(manager.devices):
        here = manager.devices[resource].get(numa_node)
        if here:
            yield f"{resource} {manager.free(plan.after.devices, resource)[numa_node]} of {here} free"


def title_of(numa_node: int, hardware: Hardware) -> str:
    """Return the title of *numa_node*, with its sockets."""
    sockets = sorted({hardware.by_cpu[cpu].socket for cpu in hardware.cpus_of_numa_node[numa_node]})
    return f"NUMA node {numa_node}" + (f" (socket {','.join(map(str, sockets))})" if sockets else "")


def facts_of(plan: NodePlan, numa_node: int) -> list[str]:
    """Return the resources of *numa_node* and their free amounts, one string for each resource."""
    return [cpus_words(plan, numa_node), *memory_of(plan, numa_node), *devices_of(plan, numa_node)]


def cpus_words(plan: NodePlan, numa_node: int) -> str:
    """Return how many CPUs *numa_node* has, and how many of them are free."""
    cpus = plan.machine.cpus_of_numa_node[numa_node]
    free = f"{len(plan.after.available & cpus)} of {len(cpus)} CPUs free" if cpus else "no CPUs"
    if cpus and plan.after.kubelet.cpu_manager is None:
        free = f"{len(cpus)} CPUs"
    return free


def joined(facts: Iterable[str], columns: int) -> list[str]:
    """Join *facts* by commas to lines of at most *columns*, without breaking a fact."""
    lines: list[str] = []
    for fact in facts:
        if lines and len(lines[-1]) + 2 + len(fact) <= columns:
            lines[-1] += f", {fact}"
        else:
            lines.append(fact)
    return lines


def picture_lines(plan: NodePlan, *, width: int, colour: bool) -> Iterator[str]:
    """Draw *plan*: one column for each core, one row for each of its threads, a gap between L3 caches.

    Cores that do not fit into *width* columns continue below. With *colour* each owner has a colour beside its sign.
    """
    owners = owners_of(plan)
    signs = dict.fromkeys(reserved_of(plan), RESERVED)
    signs |= {cpu: owner.sign for owner in owners for cpu in owner.cpus}
    paints = _paints(owners) if colour else {}
    for node in plan.machine.numa_nodes:
        first, *rest = facts_of(plan, node.id)
        title, *more = joined([f"{title_of(node.id, plan.machine)}: {first}", *rest], width)
        yield title
        yield from (f"{' ' * LABEL}{line}" for line in more)
        yield from _rows(cores_by_cache(plan.machine, node.id), signs, paints, width)
    yield from legend_lines(owners, reserved_of(plan), paints)


def legend_lines(owners: Iterable[Owner], reserved: CpuSet, paints: Mapping[str, str]) -> Iterator[str]:
    """Yield the meaning of each sign."""
    yield f"{_painted(RESERVED, paints)} reserved {reserved or 'nothing'}   {SHARED} shared pool"
    for owner in owners:
        yield f"{_painted(owner.sign, paints)} {owner.name}{'' if owner.planned else ' (there before)'}  {owner.cpus}"


def _paints(owners: Iterable[Owner]) -> dict[str, str]:
    colours = itertools.cycle(COLOURS)
    return {RESERVED: DIM} | {owner.sign: BOLD.format(next(colours)) for owner in owners}


def _painted(text: str, paints: Mapping[str, str]) -> str:
    return "".join(
        f"{paints[sign]}{''.join(run)}{PLAIN}" if sign in paints else "".join(run)
        for sign, run in itertools.groupby(text)
    )


def _rows(
    groups: Sequence[Sequence[CpuSet]], signs: Mapping[int, str], paints: Mapping[str, str], width: int
) -> Iterator[str]:
    threads = max((len(core) for group in groups for core in group), default=0)
    for line in lines_of(groups, max(width - LABEL, 8), gap=1):
        for thread in range(threads):
            cells = []
            cpus = []
            for group in line:
                members = [list(core)[thread] if thread < len(core) else None for core in group]
                cpus += [cpu for cpu in members if cpu is not None]
                cells.append("".join(" " if cpu is None else signs.get(cpu, SHARED) for cpu in members))
            if cpus:
                yield f"{row_label(cpus):>{LABEL - 2}}  {_painted(' '.join(cells).rstrip(), paints)}"


LABEL = 13
"""Columns before the cores: the CPUs of a row, such as ``1008-1023``."""


def row_label(cpus: Sequence[int]) -> str:
    """Return the CPUs of a row in short: as a range, or with two dots if there are others between them."""
    spelled = str(CpuSet(cpus))
    return spelled if "," not in spelled else f"{min(cpus)}..{max(cpus)}"


def lines_of(groups: Sequence[Sequence[CpuSet]], width: int, *, gap: int) -> Iterator[list[Sequence[CpuSet]]]:
    """Break *groups* of cores, *gap* columns apart, into lines: between groups where that is possible, else within one."""
    line: list[Sequence[CpuSet]] = []
    used = 0
    for whole in groups:
        for start in range(0, len(whole), width):
            group = whole[start : start + width]
            if line and used + gap + len(group) > width:
                yield line
                line, used = [], 0
            used += len(group) + (gap if line else 0)
            line.append(group)
    if line:
        yield line
