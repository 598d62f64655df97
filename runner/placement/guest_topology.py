"""The topology that the guest sees: ``-smp``, NUMA nodes, their memory and distances.

It is derived from the CPU that each vCPU is pinned to. QEMU numbers vCPUs by socket, then die, then core, then thread,
and all units of one kind have the same size, so it can show only a regular topology. Where the CPUs of the instance are
irregular, the guest sees fewer levels, but never a common cache or socket for CPUs that do not share one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

import attrs

from runner.base.cpuset import CpuSet
from runner.base.errors import RefusedError
from runner.base.values import frozen
from runner.facts.hardware import Hardware
from runner.placement.pins import threads_per_core

NEAREST_REMOTE = 11
"""The least distance to another NUMA node: Linux discards an ACPI SLIT with a smaller one (``slit_valid``)."""
FARTHEST = 254
"""The largest distance; 255 means unreachable in an ACPI SLIT."""
LOCAL = 10
"""The distance of a NUMA node to itself."""


@frozen
class GuestNumaNode:
    """One NUMA node of the guest; its number is its index in :attr:`GuestTopology.numa_nodes`."""

    vcpus: CpuSet
    """The indexes of its vCPUs."""
    memory: int
    """Bytes."""
    host: int
    """The host's NUMA node that its vCPUs are pinned to; for a flat guest, the first of them."""
    bound: tuple[int, ...]
    """The host's NUMA nodes that its memory is bound to, nearest first; empty if it may come from any."""
    distances: tuple[int, ...]
    """The distance to each NUMA node of the guest, by its number; 10 is local."""


@frozen
class GuestTopology:
    """The topology that the guest sees."""

    sockets: int
    dies: int
    """Dies in each socket; the CPUs of one die share an L3 cache."""
    cores: int
    """Cores in each die."""
    threads: int
    """Threads in each core."""
    numa_nodes: tuple[GuestNumaNode, ...]

    @property
    def vcpus(self) -> int:
        """The number of vCPUs."""
        return self.sockets * self.dies * self.cores * self.threads


def guest_topology(
    pins: Sequence[int], hardware: Hardware, memory: int, *, page_size: int, memory_nodes: CpuSet, siblings: bool = True
) -> GuestTopology:
    """Return the topology of a guest whose vCPU *i* is pinned to CPU ``pins[i]`` of *hardware*.

    Guest cores have several threads if each is a whole host core and the guest's CPU model can show *siblings*. Each of the host's NUMA
    nodes that vCPUs are pinned to becomes one of the guest's, in the same order. The *memory* bytes are divided among them in proportion to
    their vCPUs, in whole pages of *page_size* bytes. Memory is bound to the host's NUMA node itself, or to the nearest of *memory_nodes* if
    that has none (or not enough). It is not bound if that would be all of the host's NUMA nodes with memory. *memory_nodes*, those of the
    pod, may be fewer, because QEMU leaves the pod's cgroup. Raises :class:`RefusedError` if there are fewer pages than NUMA nodes.
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
    """Return one socket and one NUMA node with a core for each vCPU of *topology*, and memory from the same host NUMA nodes."""
    numa_nodes = topology.numa_nodes
    everything = CpuSet(range(topology.vcpus))
    bound = [each.bound for each in numa_nodes]
    # If one part may come from any NUMA node, binding the whole would restrict it.
    sources = tuple(dict.fromkeys(source for each in bound for source in each)) if all(bound) else ()
    one = GuestNumaNode(everything, sum(each.memory for each in numa_nodes), numa_nodes[0].host, sources, (LOCAL,))
    return GuestTopology(1, 1, topology.vcpus, 1, (one,))


def unbound(topology: GuestTopology) -> GuestTopology:
    """Return *topology* with memory that is bound to no NUMA node."""
    return attrs.evolve(topology, numa_nodes=tuple(attrs.evolve(each, bound=()) for each in topology.numa_nodes))


def divided(memory: int, weights: Sequence[int], page_size: int) -> tuple[int, ...]:
    """Divide *memory* bytes in proportion to *weights*, in whole pages, at least one for each part.

    Pages left over after rounding down go to the parts with the largest remainders. The bytes that are less than a page
    go to the last part, so that every part begins at a page boundary.
    Raises :class:`RefusedError` if there are more parts than pages.
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
    """Return for each NUMA node of *shares* (NUMA node → bytes) the NUMA nodes that its bytes come from, nearest first.

    Each takes first from the nearest NUMA node with memory, and the bytes that do not fit there from the next ones.
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

    Guest sockets are the host sockets if as many vCPUs are pinned to each of them; otherwise there is one. Guest dies
    are the host's L3 caches if as many vCPUs are pinned to each of them. Otherwise a die has the vCPUs of one NUMA node,
    or, if these numbers differ, their greatest common divisor: Linux warns of a broken topology when a cache spans NUMA
    nodes (``topology_sane``).
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
