"""A host as cadvisor describes it to the kubelet (``MachineInfo``), which is not always as the kernel does.

Modelled on ``utils/sysinfo/sysinfo.go`` of cadvisor (``getCoresInfo``, ``addCacheInfo``, ``getCPUTopology``) and
``pkg/kubelet/cm/cpumanager/topology/topology.go``.
"""

from __future__ import annotations

from collections import Counter

import attrs

from runner.facts.hardware import Cpu, Hardware, NumaNode


def machine_info(hardware: Hardware) -> Hardware:
    """Return *hardware* with the cores, caches and NUMA nodes that the kubelet sees; applied twice it changes nothing more.

    * The CPUs with one ``core_id`` within a package and NUMA node are one core, whatever the lists of siblings say. The two differ on
      AMD's family 15h, and where ids repeat within a package. In a record without ``core_id`` the siblings are one core.
    * An L3 cache that all CPUs of a NUMA node share, and no others, belongs to the NUMA node, and the cores have none.
    * A kernel without NUMA has one NUMA node for each package, without memory, huge pages and distances.
    """
    numa_nodes = hardware.numa_nodes
    cpus = hardware.cpus
    if not hardware.numa:
        numa_nodes = tuple(NumaNode(package, 0, ()) for package in sorted(hardware.sockets))
        cpus = tuple(attrs.evolve(cpu, numa_node=cpu.socket) for cpu in cpus)
    cores: dict[tuple[int, int, int], list[Cpu]] = {}
    for cpu in cpus:
        name = cpu.core if cpu.core_id is None else cpu.core_id
        cores.setdefault((cpu.numa_node, cpu.socket, name), []).append(cpu)
    in_numa_node = Counter(numa_node for numa_node, _, _ in cores)
    sharing = Counter(cpu.l3 for cpu in cpus)
    seen = []
    for (numa_node, _, _), threads in cores.items():
        first = threads[0]
        of_numa_node = sharing[first.l3] == in_numa_node[numa_node] * len(threads)
        l3 = None if of_numa_node else first.l3
        seen += [attrs.evolve(cpu, core=first.cpu, l3=l3) for cpu in threads]
    return attrs.evolve(
        hardware,
        cpus=tuple(sorted(seen, key=lambda cpu: cpu.cpu)),
        numa_nodes=numa_nodes,
        memory=hardware.total_memory,
        numa=True,
    )
