"""Sentences on a pod that is planned on a node."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from runner.base.cpuset import CpuSet
from runner.facts.hardware import Hardware
from runner.kubelet.pod import CPU, EPHEMERAL_STORAGE, ContainerKind, Pod
from runner.node_plan.admission import UNSUPPORTED, Admission, Kubelet, KubeletConfiguration, SimulatedNode
from runner.node_plan.allocatable import format_amount, node_allocatable
from runner.node_plan.cpu_manager import exclusive_cpus_of_pod, without_shared_cpus
from runner.node_plan.device_manager import peak_devices
from runner.node_plan.manifests import Manifest
from runner.node_plan.memory_manager import requested_memory, without_shared_memory
from runner.node_plan.quirks import FROM_SOURCE_MINOR, Quirk
from runner.node_plan.topology_manager import Policy

OWN_RESOURCES = (
    "for exclusive CPUs leave spec.resources out, and give every container whole CPUs and memory with requests equal to"
    " limits"
)
"""The remedy for a pod whose pod-level resources keep it in the shared pool."""
OWN_CONTAINER = (
    "give the instance's container whole CPUs and memory with requests equal to limits, beside spec.resources"
)
"""The remedy for a pod with pod-level resources on a kubelet with the gate ``PodLevelResourceManagers``."""
PERMUTATION = 77e-9
"""Seconds that kubelet 1.36.2 takes for one combination of hints, on a machine of 2 cores; 255^4 of them take 325 s."""
SLOW = 10.0
"""Seconds of merging from which on a plan reports it: the kubelet admits no other pod meanwhile."""


def kubelet_faults(before: SimulatedNode, admission: Admission) -> Iterator[str]:
    """Yield the faults of the kubelet in *admission* to the node *before*."""
    after, uid = admission.node, admission.pod.pod_uid
    # single-numa-node leaves out all hints but those of one NUMA node before it combines them.
    policy = after.kubelet.topology_manager.policy
    merged = 0 if policy is Policy.SINGLE_NUMA_NODE else sum(step.merged.permutations for step in admission.steps)
    seconds = merged * PERMUTATION
    if seconds >= SLOW:
        yield (
            f"the kubelet merges {merged} combinations of hints for it, some {format_seconds(seconds)} in which it admits no"
            " other pod (kubernetes#131738); fewer kinds of resources in the pod, or topologyManagerPolicy none, make them few"
        )
    manager = after.kubelet.cpu_manager
    if not admission.admitted or manager is None:
        return
    cpus = after.cpus.assigned_to(uid)
    if reserved := cpus & manager.reserved:
        yield (
            f"reserved CPUs {reserved} are given to it: this kubelet takes a core or socket of another size than the average for"
            f" free ({Quirk.WHOLE_UNITS_UNCHECKED.value}), so the node's own processes run there too; give the CPUs of whole"
            " cores to the system, and leave no sibling offline"
        )
    for other, theirs in after.cpus.assigned().items():
        if other != uid and (shared := cpus & theirs):
            yield (
                f"CPUs {shared} are exclusive to it and to {other} at once: this kubelet takes a core or socket of another size"
                f" than the average for free ({Quirk.WHOLE_UNITS_UNCHECKED.value})"
            )
    if not after.shared_pool and before.shared_pool:
        yield (
            "it takes the last CPUs of the shared pool (defaultCpuSet): containers without exclusive CPUs get no cpuset then, and"
            " run on all CPUs, also on those of instances; reserve a CPU without strict-cpu-reservation, or ask for less"
        )
    if after.restart_refusal and not before.restart_refusal:
        yield f"after it the next start of this kubelet fails: {after.restart_refusal}"


def format_seconds(seconds: float) -> str:
    """Write *seconds* for people: ``40 s``, ``5 minutes``, ``3 hours``, ``40 days``."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def pod_notes(
    manifest: Manifest, admission: Admission, hardware: Hardware, configuration: KubeletConfiguration
) -> Iterator[str]:
    """Yield notes on the pod of *manifest*, admitted or not, that the manifest alone does not show."""
    yield from _unknown_devices(admission.node, admission.pod)
    yield from _too_big(admission.pod, hardware, configuration)
    yield from _of_other_kinds(admission.pod, admission)
    yield from _of_shutdown(manifest, configuration)


def _of_other_kinds(pod: Pod, admission: Admission) -> Iterator[str]:
    """Yield other factors, besides the managers and the compared resources, that decide about *pod*."""
    kubelet = admission.node.kubelet
    seen = kubelet.seen_by_managers(pod)
    if seen.pod_level_managed:
        yield from _of_pod_level(seen, admission)
    elif seen.pod_level_resources:
        yield (
            "it has pod-level resources (spec.resources): the static CPU and Memory Managers assign nothing to such a pod,"
            " whatever its containers request (the feature gate PodLevelResourceManagers, alpha in 1.36, is off by"
            f" default); {OWN_RESOURCES}"
        )
    if admission.preempted:
        yield f"it is critical, and the kubelet ends {', '.join(each.pod_uid for each in admission.preempted)} for it"
    if pod.requests.get(EPHEMERAL_STORAGE):
        yield "the node's ephemeral storage is not known here: it is taken as enough"
    if admission.reason == UNSUPPORTED:
        yield "an API server with this gate off, too, removes spec.resources before the kubelet sees the pod"


def notes_of_another_start(before: SimulatedNode, pod: Pod) -> Iterator[str]:
    """Yield a note if *pod* already runs on the node *before*, where it has exclusive CPUs or memory."""
    if pod.pod_uid in {*before.cpus.assigned(), *before.memory.assignments, *before.memory.pod_assignments}:
        yield (
            "it has been admitted before, by the state files: this is what a kubelet that starts again decides about it; one"
            " that runs on leaves it as it is"
        )


def _of_shutdown(manifest: Manifest, configuration: KubeletConfiguration) -> Iterator[str]:
    """Yield a note if a shutdown of the node leaves the pod of *manifest* less time than it requests."""
    priority = manifest.pod.priority or 0
    graces = [seconds for lowest, seconds in configuration.shutdown_graces if lowest <= priority]
    if not configuration.shutdown_graces:
        return
    # A priority below all of them belongs to the lowest (groupByPriority).
    seconds = graces[-1] if graces else configuration.shutdown_graces[0][1]
    if seconds < manifest.grace:
        yield (
            f"when the node shuts down the kubelet gives it {seconds:g} s, not the {manifest.grace} s of its"
            " terminationGracePeriodSeconds, and then kills it, a guest with unwritten data as well: raise shutdownGracePeriod,"
            " of which shutdownGracePeriodCriticalPods is taken, or shutdownGracePeriodByPodPriority"
        )


def _of_pod_level(pod: Pod, admission: Admission) -> Iterator[str]:
    """Yield the effects of the gate ``PodLevelResourceManagers`` on *pod*, whose pod-level resources the managers see."""
    kubelet = admission.node.kubelet
    together = kubelet.manages_as_whole(pod)
    if together and not exclusive_cpus_of_pod(pod) and kubelet.cpu_manager and pod.guaranteed:
        yield (
            f"its pod-level request (spec.resources) is {format_amount(CPU, pod.pod_level_requests.get(CPU, 0))}, which is not"
            " a whole number: with topologyManagerScope pod none of its containers gets exclusive CPUs, whatever they request"
        )
    if together and pod.guaranteed:
        yield from _exhausted(pod, kubelet)
    if not together and not admission.admitted and (rejected := _nothing_to_book(pod, admission)):
        yield (
            f"container {rejected!r} has no memory of its own, since it lacks requests of CPU and memory that equal limits:"
            " this kubelet's Memory Manager rejects its pod where the Topology Manager names no NUMA nodes for it (policies"
            " none and single-numa-node), or one on which memory is booked already; use topologyManagerScope pod with another"
            " policy than none, or give each container such requests"
        )
    if together and any(container.devices for container in pod.containers):
        yield "its devices are assigned when its containers start, not at its admission: too few do not reject it"
    unused = admission.node.cpus.pod_assignments.get(pod.pod_uid, CpuSet())
    lasting = [each.name for each in pod.containers if each.kind is not ContainerKind.INIT]
    unused -= CpuSet.union(admission.cpus.get(name, ()) for name in lasting)
    if admission.admitted and unused:
        yield (
            f"CPUs {unused} are the pod's and no container's: each container has its own, and spec.resources has more than they"
            " have together"
        )
    if together and admission.admitted and kubelet.minor < FROM_SOURCE_MINOR:  # kubernetes#141041 keeps its CPUs
        yield from _after_restart(admission)


def _exhausted(pod: Pod, kubelet: Kubelet) -> Iterator[str]:
    """Yield the resources of *pod* that leave nothing for its containers on the pod's shared CPUs and memory."""
    problems = (
        (kubelet.cpu_manager and exclusive_cpus_of_pod(pod) and without_shared_cpus(pod)),
        (kubelet.memory_manager and without_shared_memory(pod)),
    )
    for problem in problems:
        if problem:
            yield (
                f"{problem}: raise it in spec.resources above what the containers with requests equal to limits have together;"
                " what is left over is for the other containers, and must not be nothing for any resource, such as huge pages"
            )


def _nothing_to_book(pod: Pod, admission: Admission) -> str:
    """Return the name of the container that was rejected although nothing would be booked for it; empty for none."""
    kubelet = admission.node.kubelet
    reached = next((each for each in pod.containers if each.name not in admission.memory), None)
    failed = "[memorymanager] " in admission.message and kubelet.memory_manager
    return reached.name if failed and reached and not requested_memory(pod, reached) else ""


def _after_restart(admission: Admission) -> Iterator[str]:
    """Yield the effects on the pod of a restart of the kubelet, which admits it again (``HandlePodAdditions``).

    By then the Memory Manager has forgotten its init containers (``AddContainer``).
    """
    pod, node = admission.pod, admission.node
    ended = {container.name for container in pod.containers if container.kind is ContainerKind.INIT}
    memory = {name: blocks for name, blocks in admission.memory.items() if name not in ended}
    booked = attrs.evolve(node.memory, assignments={**node.memory.assignments, pod.pod_uid: memory})
    again = attrs.evolve(node, memory=booked).admit(pod)
    if not again.admitted:
        yield (
            f"if this kubelet is restarted, it admits the pod again and rejects it ({again.reason or again.outcome.value}):"
            " 1.36 does not recognise a pod that has resources as a whole"
        )
    elif again.node.cpus.pod_assignments != node.cpus.pod_assignments:
        yield (
            "if this kubelet is restarted, it admits the pod again and gives it other CPUs"
            f" ({again.node.cpus.pod_assignments[pod.pod_uid]}); those of before are in no set then, and the restart"
            " after that fails"
        )


def _unknown_devices(node: SimulatedNode, pod: Pod) -> Iterator[str]:
    known = node.kubelet.device_manager.devices
    for resource in peak_devices(pod):
        if resource not in known:
            yield (
                f"the devices of {resource!r} on this host are not known, so any NUMA node is assumed to fit;"
                f" name them: --device {resource}=COUNT@NUMA_NODE"
            )


def _too_big(pod: Pod, hardware: Hardware, configuration: KubeletConfiguration) -> Iterator[str]:
    """Yield the requests of *pod* that exceed Node Allocatable: no scheduler binds it to such a node."""
    allocatable = node_allocatable(hardware, configuration).resources
    for resource, amount in pod.requests.items():
        if resource != EPHEMERAL_STORAGE and amount > allocatable.get(resource, 0):
            yield (
                f"it asks for {format_amount(resource, amount)}, more than the node's allocatable"
                f" {format_amount(resource, allocatable.get(resource, 0))}: no scheduler binds it to this node"
            )
