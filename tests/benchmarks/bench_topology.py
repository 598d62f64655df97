"""How long the decisions of `runner.kubelet` take, compared with the kubelet's algorithm.

Usage: python tests/benchmarks/bench_topology.py [--json]

The plain enumeration runs on a size that it can finish, and what it would need for the big one is extrapolated from the
number of permutations, as the output shows.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from runner.base.cpuset import CpuSet
from runner.facts.hardware import Cpu, Hardware, HugepagePool, NumaNode
from runner.kubelet.numa_masks import Places, everything, having, of_size
from runner.kubelet.pod import Container, Pod
from runner.node_plan.admission import Kubelet, KubeletConfiguration
from runner.node_plan.configuration import parse_kubelet_configuration
from runner.node_plan.cpu_assignment import CpuTopology, take_distributed
from runner.node_plan.manifests import parse_manifests
from runner.node_plan.node_plan import States, plan_node, start_node
from runner.node_plan.report.svg import picture_svg
from runner.node_plan.report.text import node_lines
from runner.node_plan.topology_manager import Hint, HintList, Policy, ProviderHints, TopologyManager
from runner.spec.yaml import parse_yaml

HOSTS = Path(__file__).parents[1] / "data/hosts"
GIB = 1 << 30


def milliseconds(work: Callable[[], object], runs: int) -> dict[str, float]:
    """Run *work* once to warm caches, then *runs* times; give the median and the worst."""
    work()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1000)
    return {"median_ms": round(statistics.median(times), 3), "worst_ms": round(max(times), 3)}


def resource(numa_nodes: int, fewest: int, avoid: int) -> HintList:
    """All masks as hints; preferred those of *fewest* NUMA nodes but for NUMA node *avoid*."""
    masks = everything(numa_nodes) & ~1
    return HintList(Places(tuple(range(numa_nodes))), masks, of_size(numa_nodes, fewest) & ~having(numa_nodes, avoid))


def agreeing(numa_nodes: int, resources: int) -> list[ProviderHints]:
    return [{"r": resource(numa_nodes, 2, each)} for each in range(resources)]


def contradictory(numa_nodes: int, resources: int) -> list[ProviderHints]:
    """Make hints that agree nowhere, so that every AND that can be reached must be known."""
    return [{"r": resource(numa_nodes, 1 + each, each)} for each in range(resources)]


def enumerate_plainly(factors: list[list[Hint]], default: int) -> int:
    """Go through all permutations as the kubelet does, with the least work for each, and return their number."""
    permutations = 0
    best: tuple[bool, int] | None = None
    for permutation in itertools.product(*factors):
        permutations += 1
        mask = default
        agreed = True
        for hint in permutation:
            assert hint.mask is not None
            mask &= hint.mask
            agreed = agreed and hint.preferred and hint.mask == permutation[0].mask
        if mask and (best is None or (agreed, -mask.bit_count()) > best):
            best = agreed, -mask.bit_count()
    return permutations


def merges() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for numa_nodes, runs in ((8, 200), (16, 5)):
        manager = TopologyManager(tuple(range(numa_nodes)), Policy.BEST_EFFORT)
        for name, make in (("agreeing", agreeing), ("contradictory", contradictory)):
            providers = make(numa_nodes, 4)
            key = f"exact merge, {numa_nodes} NUMA nodes, 4 resources, {2**numa_nodes - 1} hints each, {name}"
            results[key] = milliseconds(functools.partial(manager.merge, providers), runs)
    factors = [list(resource(8, 1 + each, each)) for each in range(2)]
    start = time.perf_counter()
    permutations = enumerate_plainly(factors, 255)
    seconds = time.perf_counter() - start
    results["plain enumeration in Python, 8 NUMA nodes, 2 resources"] = {
        "permutations": permutations,
        "seconds": round(seconds, 3),
        "extrapolated_seconds_for_4_resources": round(seconds / permutations * 255**4),
    }
    return results


def wide_host() -> Hardware:
    """512 CPUs on 16 NUMA nodes that all have CPUs, siblings n and n+256."""
    cpus = tuple(
        Cpu(core + 256 * thread, core, core // 128, core // 128, core // 16, core // 8)
        for thread in range(2)
        for core in range(256)
    )
    nodes = tuple(
        NumaNode(
            here,
            96 * GIB,
            tuple(10 if here == there else 12 if here // 8 == there // 8 else 32 for there in range(16)),
            (HugepagePool(GIB, 64, 64),),
        )
        for here in range(16)
    )
    return Hardware(cpus, nodes)


def configuration(policy: str, scope: str, options: dict[str, str]) -> KubeletConfiguration:
    return KubeletConfiguration(
        cpu_manager_policy="static",
        cpu_manager_policy_options=options,
        reserved_cpus=CpuSet.parse("0,256"),
        memory_manager_policy="Static",
        reserved_memory={0: {"memory": 4 * GIB}},
        topology_manager_policy=policy,
        topology_manager_scope=scope,
        topology_manager_policy_options={"max-allowable-numa-nodes": "16"},
    )


def admissions() -> dict[str, Any]:
    hosts = {
        "16 NUMA nodes with CPUs": wide_host(),
        "8 NUMA nodes with CPUs, 8 of CXL memory": Hardware.from_json(
            (HOSTS / "epyc-9754-2s-nps4-cxl.json").read_text()
        ),
    }
    instance = Container("gpu-instance", 40_000, {"memory": 8 * GIB, "hugepages-1Gi": 80 * GIB})
    small = Container("small", 8_000, {"memory": 2 * GIB, "hugepages-1Gi": 16 * GIB})
    results = {}
    for where, hardware in hosts.items():
        for policy in ("restricted", "single-numa-node", "best-effort"):
            kubelet = Kubelet.configured(hardware, configuration(policy, "pod", {"full-pcpus-only": "true"}))
            node = kubelet.empty_node
            for number in range(6):
                node = node.admit(Pod(f"p{number}", (small,))).node
            pod = Pod("instance", (instance,))
            key = f"admission, 512 CPUs, {where}, {policy}: {node.admit(pod).outcome.value}"
            results[key] = milliseconds(functools.partial(node.admit, pod), 10)
    return results


CONFIGURATION = b"""
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cpuManagerPolicy: static
memoryManagerPolicy: Static
reservedSystemCPUs: 0,256
evictionHard: {memory.available: 4Gi}
reservedMemory: [{numaNode: 0, limits: {memory: 4Gi}}]
topologyManagerPolicy: restricted
topologyManagerPolicyOptions: {max-allowable-numa-nodes: "16"}
"""
POD = b"""
kind: Pod
spec: {containers: [{name: vm, resources: {limits: {cpu: 40, memory: 100Gi}}}]}
"""


def node_plans() -> dict[str, Any]:
    """Measure all that `plan --node` does once its files are read, but for printing."""
    hardware = Hardware.from_json((HOSTS / "epyc-9754-2s-nps4-cxl.json").read_text())

    def plan(pods: int) -> None:
        (document,) = parse_yaml("kubelet.yaml", CONFIGURATION)
        configured, _ = parse_kubelet_configuration(document, hardware, 36)
        manifests, _ = parse_manifests(parse_yaml("pods.yaml", b"---".join([POD] * pods)), pod_level_resources=True)
        node = plan_node(hardware, configured, start_node(hardware, configured, {}, States()), manifests)
        "\n".join(node_lines(node, width=120, colour=True))
        picture_svg(node)

    return {
        f"plan --node, 512 CPUs, {pods} pods, text and SVG": milliseconds(functools.partial(plan, pods), 5)
        for pods in (1, 10)
    }


def distributions() -> dict[str, Any]:
    topology = CpuTopology.of(wide_host())
    everything_free = CpuSet(topology.all)
    return {
        f"distribute {count} CPUs across 16 free NUMA nodes of 32": milliseconds(
            functools.partial(take_distributed, topology, everything_free, count), 5
        )
        for count in (40, 200)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    results = {**merges(), **admissions(), **distributions(), **node_plans()}
    if arguments.json:
        print(json.dumps(results, indent=1))
        return
    for name, figures in results.items():
        print(f"{name}: " + ", ".join(f"{key.replace('_', ' ')} {value:,}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
