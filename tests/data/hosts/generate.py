"""Writes the recorded hosts beside it. None is a dump of one machine: each follows what such machines report.

Usage: python tests/data/hosts/generate.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from runner.base.cpuset import CpuSet
from runner.facts.hardware import Cpu, Hardware, HugepagePool, NumaNode

HERE = Path(__file__).parent
MIB, GIB = 1 << 20, 1 << 30


def symmetric(
    cores: int,
    threads: int,
    *,
    cores_per_socket: int,
    cores_per_numa_node: int,
    cores_per_l3: int,
    adjacent: bool = False,
    max_khz: int | None = None,
    numa_node_ids: Callable[[int], int] = lambda index: index,
) -> tuple[Cpu, ...]:
    """Build CPUs numbered as firmware does: all first threads, then all second ones, or *adjacent* siblings."""
    cpus: list[Cpu] = []
    for core in range(cores):
        first = core * threads if adjacent else core
        socket = core // cores_per_socket
        socket_start = socket * cores_per_socket
        cpus.extend(
            Cpu(
                cpu=first + thread * (1 if adjacent else cores),
                core=first,
                socket=socket,
                die=socket_start * threads if adjacent else socket_start,
                numa_node=numa_node_ids(core // cores_per_numa_node),
                l3=core // cores_per_l3,
                max_khz=max_khz,
            )
            for thread in range(threads)
        )
    return tuple(sorted(cpus, key=lambda cpu: cpu.cpu))


def numa_nodes(
    ids: Iterable[int],
    memory: Callable[[int], int],
    distance: Callable[[int, int], int],
    hugepages: Callable[[int], tuple[HugepagePool, ...]] = lambda _: (HugepagePool(2 * MIB, 0, 0),),
) -> tuple[NumaNode, ...]:
    ids = list(ids)
    return tuple(
        NumaNode(
            node, memory(node), tuple(10 if node == other else distance(node, other) for other in ids), hugepages(node)
        )
        for node in ids
    )


def epyc_7543(numa_nodes_per_socket: int) -> Hardware:
    """Two AMD EPYC 7543 (32 cores, 8 L3 caches each), 128 CPUs, siblings n and n+64, 1 TiB."""
    count = 2 * numa_nodes_per_socket

    def distance(here: int, there: int) -> int:
        return 12 if here // numa_nodes_per_socket == there // numa_nodes_per_socket else 32

    def hugepages(_: int) -> tuple[HugepagePool, ...]:
        return HugepagePool(2 * MIB, 0, 0), HugepagePool(GIB, 384 // count, 384 // count)

    return Hardware(
        symmetric(64, 2, cores_per_socket=32, cores_per_numa_node=64 // count, cores_per_l3=4, max_khz=3_737_890),
        # The kernel keeps some of the first NUMA node for itself before it counts.
        numa_nodes(
            range(count), lambda node: 1024 // count * GIB - (700 if node == 0 else 90) * MIB, distance, hugepages
        ),
    )


def xeon_8_sockets() -> Hardware:
    """Eight Intel Xeon Platinum 8280L (28 cores), 448 CPUs; a hypercube, each socket has three links."""

    def distance(here: int, there: int) -> int:
        return 21 if (here ^ there).bit_count() == 1 else 31

    return Hardware(
        symmetric(224, 2, cores_per_socket=28, cores_per_numa_node=28, cores_per_l3=28, max_khz=4_000_000),
        numa_nodes(range(8), lambda node: 768 * GIB - (1100 if node == 0 else 130) * MIB, distance),
    )


def sapphire_rapids_snc4() -> Hardware:
    """Two Intel Xeon Platinum 8468 (48 cores) with sub-NUMA clustering: four NUMA nodes a socket, one L3 a socket."""

    def hugepages(node: int) -> tuple[HugepagePool, ...]:
        return HugepagePool(2 * MIB, 1024, 1024 if node else 768), HugepagePool(GIB, 32, 32)

    return Hardware(
        symmetric(96, 2, cores_per_socket=48, cores_per_numa_node=12, cores_per_l3=48, max_khz=3_800_000),
        numa_nodes(
            range(8),
            lambda node: 128 * GIB - (620 if node == 0 else 60) * MIB,
            lambda here, there: 12 if here // 4 == there // 4 else 21,
            hugepages,
        ),
    )


def raptor_lake_desktop() -> Hardware:
    """Intel Core i9-13900K: 8 performance cores with two threads (two of them faster), 16 efficiency cores without."""
    fast = [
        Cpu(cpu, cpu & ~1, 0, 0, 0, 0, 5_800_000 if cpu in range(8, 12) else 5_500_000, 1024, "performance")
        for cpu in range(16)
    ]
    slow = [Cpu(cpu, cpu, 0, 0, 0, 0, 4_300_000, 623, "efficiency") for cpu in range(16, 32)]
    return Hardware((*fast, *slow), numa_nodes([0], lambda _: 64 * GIB - 1300 * MIB, lambda *_: 10))


def laptop() -> Hardware:
    """AMD Ryzen 7 PRO 7840U, 8 cores; SMT switched off at run time, so that every second CPU is offline."""
    cpus = symmetric(8, 2, cores_per_socket=8, cores_per_numa_node=8, cores_per_l3=8, adjacent=True, max_khz=5_132_000)
    online = tuple(cpu for cpu in cpus if cpu.cpu == cpu.core)
    pools = (HugepagePool(2 * MIB, 0, 0), HugepagePool(GIB, 0, 0))
    return Hardware(
        online, numa_nodes([0], lambda _: 30 * GIB, lambda *_: 10, lambda _: pools), CpuSet(range(1, 16, 2))
    )


def small_vm() -> Hardware:
    """Virtual machine with 8 vCPUs, each its own core: no frequencies, one L3 cache."""
    cpus = symmetric(8, 1, cores_per_socket=8, cores_per_numa_node=8, cores_per_l3=8)
    return Hardware(cpus, numa_nodes([0], lambda _: 16 * GIB - 300 * MIB, lambda *_: 10))


def bergamo_cxl() -> Hardware:
    """Two AMD EPYC 9754 (128 cores) in NPS4, 512 CPUs on 8 NUMA nodes, and 8 NUMA nodes of CXL memory without CPUs."""

    def distance(here: int, there: int) -> int:
        sockets = here % 8 // 4, there % 8 // 4
        far = 0 if sockets[0] == sockets[1] else 20
        expanders = (here >= 8) + (there >= 8)
        return (12, 50, 70)[expanders] + far

    def hugepages(node: int) -> tuple[HugepagePool, ...]:
        pages = 64 if node < 8 else 0
        return HugepagePool(2 * MIB, 0, 0), HugepagePool(GIB, pages, pages)

    return Hardware(
        symmetric(256, 2, cores_per_socket=128, cores_per_numa_node=32, cores_per_l3=8, max_khz=3_100_000),
        numa_nodes(range(16), lambda node: (192 if node < 8 else 256) * GIB - 64 * MIB, distance, hugepages),
    )


def power9() -> Hardware:
    """Two IBM POWER9 with four threads a core: NUMA nodes 0 and 8, as this firmware numbers them."""
    pools = (HugepagePool(2 * MIB, 0, 0), HugepagePool(GIB, 0, 0))
    cpus = symmetric(
        32,
        4,
        cores_per_socket=16,
        cores_per_numa_node=16,
        cores_per_l3=1,
        adjacent=True,
        max_khz=3_800_000,
        numa_node_ids=lambda index: 8 * index,
    )
    return Hardware(cpus, numa_nodes([0, 8], lambda _: 256 * GIB, lambda *_: 40, lambda _: pools))


HOSTS: dict[str, Callable[[], Hardware]] = {
    "epyc-7543-2s-nps1": lambda: epyc_7543(1),
    "epyc-7543-2s-nps2": lambda: epyc_7543(2),
    "epyc-7543-2s-nps4": lambda: epyc_7543(4),
    "xeon-8280l-8s": xeon_8_sockets,
    "xeon-8468-2s-snc4": sapphire_rapids_snc4,
    "core-i9-13900k": raptor_lake_desktop,
    "ryzen-7840u-nosmt": laptop,
    "vm-8": small_vm,
    "epyc-9754-2s-nps4-cxl": bergamo_cxl,
    "power9-2s": power9,
}


if __name__ == "__main__":
    for name, host in HOSTS.items():
        (HERE / f"{name}.json").write_text(host().to_json())
