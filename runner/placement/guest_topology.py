"""The topology that the guest sees: ``-smp``, NUMA nodes, their memory and distances.

Everything follows from the CPU that each vCPU is pinned to. QEMU numbers vCPUs by socket, then die, then core, then thread, all
of them equally big, so it can only show what is regular. Where the instance's part of the host is not, the guest sees
fewer levels, and never sees CPUs together that are apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

import attrs

from runner.cpuset import CpuSet
from runner.errors import RefusedError
from runner.facts.hardware import Hardware
from runner.placement.pins import threads_per_core

NEAREST_REMOTE = 11
"""The least distance to another NUMA node: Linux discards an ACPI SLIT with less (``slit_valid``)."""
FARTHEST = 254
"""255 means unreachable in an ACPI SLIT."""
LOCAL = 10


@attrs.frozen
class GuestNumaNode:
    """One NUMA node of the guest; its number is its place in :attr:`GuestTopology.numa_nodes`."""

    vcpus: CpuSet
    memory: int
    """Bytes."""
    host: int
    """The host's NUMA node that its vCPUs are pinned to; of a flat guest, the first of them."""
    bound: tuple[int, ...]
    """The host's NUMA nodes that its memory comes from, the nearest first; empty where it may come from any."""
    distances: tuple[int, ...]
    """To each NUMA node of the guest by number; 10 is local."""


@attrs.frozen
class GuestTopology:
    """What the guest sees: *sockets* of *dies* (which share an L3 cache) of *cores* of *threads*, and NUMA nodes."""

    sockets: int
    dies: int
    cores: int
    threads: int
    numa_nodes: tuple[GuestNumaNode, ...]

    @property
    def vcpus(self) -> int:
        """How many vCPUs there are."""
        return self.sockets * self.dies * self.cores * self.threads


def guest_topology(
    pins: Sequence[int], hardware: Hardware, memory: int, *, page_size: int, memory_nodes: CpuSet, siblings: bool = True
) -> GuestTopology:
    """Return the topology of a guest whose vCPU *i* is pinned to CPU ``pins[i]`` of *hardware*.

    Guest cores have threads where they are whole host cores, and the guest's CPU model can show *siblings*. Each of the
    host's NUMA nodes that gives CPUs is one of the guest's, in the same order, with its part of *memory* bytes: in
    proportion to its vCPUs, in whole pages of *page_size*, from itself, or from the nearest of the host's
    *memory_nodes* where it has no memory (or not enough). Memory is bound to nothing where the host has it nowhere else:
    that the pod may use one NUMA node only is not enough, because QEMU does not stay in the pod's cgroup.
    Raises :class:`RefusedError` when there is not a page for each of them.
    """
    numa_node_of = [hardware.by_cpu[cpu].numa_node for cpu in pins]
    hosts = sorted(set(numa_node_of))
    vcpus = [CpuSet(vcpu for vcpu, numa_node in enumerate(numa_node_of) if numa_node == host) for host in hosts]
    shares = divided(memory, [len(each) for each in vcpus], page_size)
    sources = _sources(dict(zip(hosts, shares, strict=True)), hardware, memory_nodes)
    distances = [[_distance(hardware, here, there, sources) for there in hosts] for here in hosts]
    everywhere = {node.id for node in hardware.numa_nodes if node.memory}
    numa_nodes = tuple(
        GuestNumaNode(
            vcpus[index],
            shares[index],
            host,
            () if everywhere <= set(sources[host]) else sources[host],
            tuple(distances[index]),
        )
        for index, host in enumerate(hosts)
    )
    socket, die = _sizes(pins, hardware)
    threads = threads_per_core(pins, hardware) if siblings else 1
    return GuestTopology(len(pins) // socket, socket // die, die // threads, threads, numa_nodes)


def flat(topology: GuestTopology) -> GuestTopology:
    """Return a guest of as many cores in one socket and one NUMA node, with memory from where *topology* has it."""
    numa_nodes = topology.numa_nodes
    everything = CpuSet(range(topology.vcpus))
    bound = [each.bound for each in numa_nodes]
    # What may come from anywhere must not be forced to where the rest is bound.
    sources = tuple(dict.fromkeys(source for each in bound for source in each)) if all(bound) else ()
    one = GuestNumaNode(everything, sum(each.memory for each in numa_nodes), numa_nodes[0].host, sources, (LOCAL,))
    return GuestTopology(1, 1, topology.vcpus, 1, (one,))


def unbound(topology: GuestTopology) -> GuestTopology:
    """Return *topology* with memory from anywhere."""
    return attrs.evolve(topology, numa_nodes=tuple(attrs.evolve(each, bound=()) for each in topology.numa_nodes))


def divided(memory: int, weights: Sequence[int], page_size: int) -> tuple[int, ...]:
    """Divide *memory* bytes in proportion to *weights*, in whole pages: by largest remainders, and at least one for each.

    The rest that is no whole page goes to the last, so that every part begins at a page.
    Raises :class:`RefusedError` when there are more parts than pages.
    """
    pages, rest = divmod(memory, page_size)
    if pages < len(weights):
        raise RefusedError(
            f"cannot divide {memory} bytes of memory among {len(weights)} NUMA nodes in pages of {page_size} bytes",
            remedy="give the guest more memory",
        )
    total = sum(weights)
    parts = [pages * weight // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda index: (-(pages * weights[index] % total), index))
    for index in by_remainder[: pages - sum(parts)]:
        parts[index] += 1
    for index, part in enumerate(parts):
        if part == 0:
            parts[parts.index(max(parts))] -= 1
            parts[index] = 1
    sizes = [part * page_size for part in parts]
    sizes[-1] += rest
    return tuple(sizes)


def _sources(shares: Mapping[int, int], hardware: Hardware, memory_nodes: CpuSet) -> dict[int, tuple[int, ...]]:
    """Return for each NUMA node of *shares* the NUMA nodes that its bytes come from, the nearest first.

    Each takes from the nearest that has memory; only what does not fit there is taken from what the others left over.
    """
    left = {node.id: node.memory for node in hardware.numa_nodes if node.memory and node.id in memory_nodes}
    sources: dict[int, list[int]] = {host: [] for host in shares}
    missing = dict(shares)
    nearest = {host: sorted(left, key=lambda other: (hardware.distance(host, other), other)) for host in shares}
    for reach in range(len(left)):
        for host in shares:
            source = nearest[host][reach]
            taken = min(left[source], missing[host])
            if taken:
                sources[host].append(source)
                left[source] -= taken
                missing[host] -= taken
    return {host: tuple(found) for host, found in sources.items()}


def _distance(hardware: Hardware, here: int, there: int, sources: Mapping[int, Sequence[int]]) -> int:
    """Return the distance from the CPUs of *here* to the memory of *there*, local being 10."""
    if here == there:
        return LOCAL
    memory = sources[there][0] if sources[there] else there
    scaled = round(hardware.distance(here, memory) * LOCAL / (hardware.distance(here, here) or LOCAL))
    return min(max(scaled, NEAREST_REMOTE), FARTHEST)


def _sizes(pins: Sequence[int], hardware: Hardware) -> tuple[int, int]:
    """Return the number of vCPUs of a guest socket and of a guest die.

    A socket is what one host socket gives, if all give equally much; otherwise there is one. A die is what one L3
    cache gives, if all give equally much. Otherwise the guest sees one L3 cache for all CPUs that a NUMA node
    gives, or for the largest equal parts of them when NUMA nodes give unequally: a cache that spans NUMA nodes makes Linux
    warn of a broken topology (``topology_sane``).
    """
    cpus = [hardware.by_cpu[cpu] for cpu in pins]
    sockets = list(_runs(cpu.socket for cpu in cpus))
    socket = _equal(sockets) or len(pins)
    caches = list(_runs((cpu.numa_node, cpu.socket, cpu.l3) for cpu in cpus))
    numa_nodes = _runs(cpu.numa_node for cpu in cpus)
    die = _equal(caches) or math.gcd(socket, *(length for _, length in numa_nodes))
    return socket, die


def _runs(labels: Iterator[Hashable]) -> Iterator[tuple[Hashable, int]]:
    """Yield each label with its number of consecutive occurrences."""
    for label, run in itertools.groupby(labels):
        yield label, sum(1 for _ in run)


def _equal(runs: Sequence[tuple[Hashable, int]]) -> int:
    """Return the length of *runs* if all are equally long and no label occurs twice, else 0."""
    lengths = {length for _, length in runs}
    return lengths.pop() if len(lengths) == 1 and len(dict(runs)) == len(runs) else 0
