"""The kubelet's Memory Manager with the ``Static`` policy: the NUMA nodes on which a container's memory is booked.

Modelled on ``pkg/kubelet/cm/memorymanager/policy_static.go`` of Kubernetes 1.33 to 1.36.3. To *book* is to count memory
as reserved; the kubelet only writes ``cpuset.mems``. Amounts are bytes, masks are those of
:mod:`runner.kubelet.numa_masks`.

One bug of the kubelet, which is reproduced, changes only the books: a merged affinity may be one NUMA node of a group,
and the kubelet books on it alone. Memory that is released later is subtracted from the first NUMA node of the group with
a reservation, which may be another pod's. Some memory then stays reserved for no pod until the state file is removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from runner.base.values import frozen
from runner.facts.hardware import Hardware, HugepagePool, hugepages_resource
from runner.kubelet.numa_masks import (
    Places,
    containing,
    everything,
    family_of,
    lowest,
    mask_of,
    narrowest,
    numa_nodes_of,
    of_size,
    reaching,
    within,
)
from runner.kubelet.pod import HUGEPAGES_PREFIX, MEMORY, Container, ContainerKind, Pod, format_bytes, peak
from runner.kubelet.state import Block, MemoryState, MemoryTable, NumaMemory, without_pod
from runner.node_plan.quirks import AllocationError, EmptyPodSharedPoolError, KubeletConfigError
from runner.node_plan.topology_manager import Hint, HintList, ProviderHints


@frozen
class MemoryManager:
    """The ``Static`` policy as configured on one host (``staticPolicy``); its methods decide from a :class:`MemoryState`."""

    hardware_memory: Mapping[int, int]
    """NUMA node → bytes."""
    hugepages: Mapping[int, tuple[HugepagePool, ...]]
    """By NUMA node."""
    reserved: Mapping[int, Mapping[str, int]]
    """``reservedMemory``: NUMA node → resource → bytes."""

    @classmethod
    def configured(cls, hardware: Hardware, reserved: Mapping[int, Mapping[str, int]]) -> MemoryManager:
        """Check the reservation (``NewPolicyStatic``); :class:`KubeletConfigError` in the kubelet's words.

        That the reservation equals Node Allocatable's is checked before, by :func:`check_reservation`.
        """
        if sum(resources.get(MEMORY, 0) for resources in reserved.values()) <= 0:
            raise KubeletConfigError("[memorymanager] you should specify the system reserved memory")
        return cls(
            {node.id: node.memory for node in hardware.numa_nodes},
            {node.id: node.hugepages for node in hardware.numa_nodes},
            reserved,
        )

    @property
    def initial(self) -> MemoryState:
        """The state of an empty node (``getDefaultMachineState``)."""
        return MemoryState("Static", {numa_node: self._empty(numa_node) for numa_node in sorted(self.hardware_memory)})

    def _empty(self, numa_node: int) -> NumaMemory:
        reserved = self.reserved.get(numa_node, {})
        tables = {}
        in_hugepages = 0
        for pool in self.hugepages[numa_node]:
            resource = hugepages_resource(pool.size)
            total = pool.size * pool.total
            kept = reserved.get(resource, 0)
            tables[resource] = MemoryTable.empty(total, kept, max(0, total - kept))
            in_hugepages += total
        memory = self.hardware_memory[numa_node]
        kept = reserved.get(MEMORY, 0)
        # The kubelet's unsigned arithmetic would make a huge number of a negative one.
        tables[MEMORY] = MemoryTable.empty(memory, kept, max(0, memory - kept - in_hugepages))
        return NumaMemory(0, tables, (numa_node,))

    def describes_this_machine(self, state: MemoryState) -> bool:
        """Tell whether *state* has the NUMA nodes and the sizes of pages of this machine, and no others."""
        own = self.initial.numa_nodes
        booked = {each for uid in state.assignments for given in state.booked_for(uid).values() for each in given}
        return (
            {each: memory.tables.keys() for each, memory in state.numa_nodes.items()}
            == {each: memory.tables.keys() for each, memory in own.items()}
            and all(own.keys() >= set(memory.cells) for memory in state.numa_nodes.values())
            and all(own.keys() >= set(block.numa_nodes) for block in booked)
        )

    def validate(self, state: MemoryState) -> None:
        """Check a state read back from disk (``validateState``); :class:`KubeletConfigError` in the kubelet's words.

        The free memory of one NUMA node of a group depends on the order of pods, so only the sum of the group is compared.
        """
        expected = dict(self.initial.numa_nodes)
        for pod_uid in sorted(state.assignments):
            for name, blocks in state.booked_for(pod_uid).items():
                for block in blocks:
                    if not expected.keys() >= set(block.numa_nodes):
                        raise KubeletConfigError(
                            f"[memorymanager] (pod: {pod_uid}, container: {name})"
                            " the memory assignment uses the NUMA that does not exist"
                        )
                    _book(expected, block)
        rebuilt = attrs.evolve(state, numa_nodes=expected)
        if state.numa_nodes.keys() != expected.keys() or any(
            _outline(state, numa_node) != _outline(rebuilt, numa_node) for numa_node in expected
        ):
            raise KubeletConfigError("[memorymanager] the expected machine state is different from the real one")

    # Hints.

    def hints(self, state: MemoryState, pod: Pod, container: Container) -> ProviderHints:
        """Return the hints for *container* (``GetTopologyHints``); ``None`` if nothing is booked for it."""
        if not _booked(pod):
            return None
        requests = requested_memory(pod, container)
        blocks = state.assignments.get(pod.pod_uid, {}).get(container.name)
        if blocks is not None:
            return _hints_again(blocks, requests)
        return self._named_hints(state, pod, requests)

    def pod_hints(self, state: MemoryState, pod: Pod) -> ProviderHints:
        """Return the hints for all containers of *pod* together (``GetPodTopologyHints``)."""
        if not _booked(pod):
            return None
        requests = peak_memory(pod)
        if pod.pod_level_managed and without_shared_memory(pod):
            return dict.fromkeys(requests, HintList())
        if not requests:
            return None
        for container in pod.containers:
            blocks = state.assignments.get(pod.pod_uid, {}).get(container.name)
            if blocks is not None:
                return _hints_again(blocks, requests)
        return self._named_hints(state, pod, requests)

    def _named_hints(self, state: MemoryState, pod: Pod, requests: Mapping[str, int]) -> dict[str, HintList]:
        listed = self.numa_hints(state, pod, requests)
        # Where nothing fits there is no hint list at all, not an empty one: Quirk.EMPTY_MEMORY_HINTS.
        return dict.fromkeys(requests, listed) if len(listed) else {}

    def numa_hints(self, state: MemoryState, pod: Pod, requests: Mapping[str, int]) -> HintList:
        """Return a hint for every set of NUMA nodes that can satisfy all *requests* (``calculateHints``).

        The hints are the same for each resource. A hint is preferred if an empty host would need as many NUMA nodes.
        """
        places = Places(tuple(sorted(state.numa_nodes)))
        fitting = _groupable(state, places)
        possible = everything(len(places))
        for resource, amount in requests.items():
            tables = [_table(state, each, resource) for each in places.numa_nodes]
            enough = reaching([table.free for table in tables], amount)
            # Memory of init containers can be used again only on exactly their set of NUMA nodes.
            enough |= family_of(
                places.place(mask)
                for mask, again in state.reusable_by(pod, resource).items()
                if state.free(mask, resource) + again >= amount
            )
            fitting &= enough
            possible &= reaching([table.allocatable for table in tables], amount)
        fewest = lowest(narrowest(len(places), possible)).bit_count() if possible & ~1 else len(places)
        return HintList(places, fitting, fitting & of_size(len(places), fewest))

    # Booking.

    def allocate(self, state: MemoryState, pod: Pod, container: Container, affinity: Hint) -> MemoryState:
        """Book the memory of *container* on the NUMA nodes of *affinity*, or on more if it must be (``Allocate``).

        *affinity* without a mask is no preference. Raises :class:`AllocationError` in the kubelet's words.

        A container of a pod with pod-level resources may have nothing to book. The kubelet still looks for NUMA nodes: it
        finds none where *affinity* has no mask, and refuses a mask of several with other pods' memory on one of them.
        """
        if not _booked(pod):
            return state
        requests = requested_memory(pod, container)
        containers = state.assignments.get(pod.pod_uid, {})
        blocks = containers.get(container.name)
        if blocks is not None:
            return attrs.evolve(state, reusable=_reusable_after(state, pod, container, blocks))
        mask = self._mask_for(state, pod, requests, affinity)
        numa_nodes = numa_nodes_of(mask)
        blocks = tuple(Block(numa_nodes, resource, amount) for resource, amount in requests.items())
        booked = dict(state.numa_nodes)
        for block in blocks:
            again = state.reusable_by(pod, block.resource).get(mask, 0)
            _book(booked, attrs.evolve(block, size=max(0, block.size - again)))
        # The blocks of an init container shrink by the bytes that later containers use again, so that the sum is right.
        given = {**_init_blocks_used_again(pod, container, containers, blocks), container.name: blocks}
        return attrs.evolve(
            state,
            numa_nodes=booked,
            assignments={**state.assignments, pod.pod_uid: given},
            reusable=_reusable_after(state, pod, container, blocks),
        )

    def allocate_pod(self, state: MemoryState, pod: Pod, affinity: Hint) -> MemoryState:
        """Book the memory of *pod* as a whole, and divide it among its containers (``AllocatePod``).

        Nothing is booked for the containers: their blocks are parts of the pod's. As with CPUs, a pod that is admitted a
        second time is booked again. Raises :class:`AllocationError` in the kubelet's words.
        """
        if not _booked(pod):
            return state
        requests = peak_memory(pod)
        if problem := without_shared_memory(pod):
            raise EmptyPodSharedPoolError(problem)
        numa_nodes = numa_nodes_of(self._mask_for(state, pod, requests, affinity))
        booked = dict(state.numa_nodes)
        for block in _blocks(numa_nodes, requests):
            _book(booked, block)
        divided = {name: _blocks(numa_nodes, part) for name, part in _divided(pod, requests).items()}
        return attrs.evolve(
            state,
            numa_nodes=booked,
            assignments={**state.assignments, pod.pod_uid: divided},
            pod_assignments={**state.pod_assignments, pod.pod_uid: _blocks(numa_nodes, requests)},
        )

    def _mask_for(self, state: MemoryState, pod: Pod, requests: Mapping[str, int], affinity: Hint) -> int:
        mask, preferred = affinity.mask, affinity.preferred
        if mask is None:
            # Without requests no resource has a hint.
            best = _best(self.numa_hints(state, pod, requests)) if requests else None
            if best is None:
                raise AllocationError(
                    "[memorymanager] failed to get the default NUMA affinity,"
                    " no NUMA nodes with enough memory is available"
                )
            if preferred and not best.preferred:
                raise AllocationError("[memorymanager] failed to find the default preferred hint")
            mask, preferred = best.mask or 0, best.preferred
        if any(state.free(mask, resource) < amount for resource, amount in requests.items()):
            best = _best(self.numa_hints(state, pod, requests), mask)
            if best is None:
                raise AllocationError("[memorymanager] failed to find NUMA nodes to extend the current topology hint")
            if preferred and not best.preferred:
                raise AllocationError("[memorymanager] failed to find the extended preferred hint")
            mask = best.mask or 0
        if mask.bit_count() > 1 and not _group_free(state, mask):
            raise AllocationError("[memorymanager] preferred hint violates NUMA node allocation")
        return mask

    def without(self, state: MemoryState, pod_uid: str) -> MemoryState:
        """Release the memory booked for pod *pod_uid* (``RemoveContainer`` for each container)."""
        booked = dict(state.numa_nodes)
        for blocks in state.booked_for(pod_uid).values():
            for block in blocks:
                _take_back(booked, block)
        return attrs.evolve(
            state,
            numa_nodes=booked,
            assignments=without_pod(pod_uid, state.assignments),
            pod_assignments=without_pod(pod_uid, state.pod_assignments),
        )


def peak_memory(pod: Pod) -> dict[str, int]:
    """Return the peak of each resource that an app container of *pod* asks for (``getPodRequestedResources``).

    It is the pod-level request where the managers take notice of it.
    """
    if pod.pod_level_managed:
        return {name: amount for name, amount in pod.pod_level_requests.items() if _is_memory(name) and amount}
    apps = [container for container in pod.containers if container.kind is ContainerKind.APP]
    resources = dict.fromkeys(resource for container in apps for resource in container.memory)
    return {resource: _peak_of(pod, resource) for resource in resources}


def _peak_of(pod: Pod, resource: str) -> int:
    return peak(pod, lambda container: container.memory.get(resource, 0))


def requested_memory(pod: Pod, container: Container | None) -> Mapping[str, int]:
    """Return the bytes by resource to book for *container* of *pod* (``getContainerRequestedResources``), or the pod (``None``).

    In a pod with pod-level resources it is nothing for a container without requests that equal its limits.
    """
    if not _booked(pod):
        return {}
    if container is None:
        return peak_memory(pod)
    return {} if pod.pod_level_managed and not container.guaranteed else container.memory


def _is_memory(resource: str) -> bool:
    return resource == MEMORY or resource.startswith(HUGEPAGES_PREFIX)


def _booked(pod: Pod) -> bool:
    return pod.guaranteed and (not pod.pod_level_resources or pod.pod_level_managed)


def without_shared_memory(pod: Pod) -> str:
    """Return the kubelet's words if nothing is left for containers without own memory (``validatePodScopeResources``).

    A resource of which the other containers have all is enough, such as huge pages. Of several the kubelet names any.
    """
    total = peak_memory(pod)
    taken = dict.fromkeys(total, 0)
    shared = False

    def exhausted() -> str | None:
        return next((resource for resource, amount in total.items() if taken[resource] >= amount), None)

    for container in pod.containers:
        requests = requested_memory(pod, container)
        if container.kind is ContainerKind.INIT:
            if not requests and (resource := exhausted()):
                return f"pod rejected, pod has shared init containers but no {resource} available for them"
            continue
        shared = shared or not requests
        for resource, amount in requests.items():
            taken[resource] = taken.get(resource, 0) + amount
    if shared and (resource := exhausted()):
        return (
            f"pod rejected, sum of exclusive container {resource} requests equals pod budget, leaving no memory for shared"
            " containers"
        )
    return ""


def _divided(pod: Pod, total: Mapping[str, int]) -> dict[str, Mapping[str, int]]:
    """Divide *total* among the containers of *pod* (``AllocatePod``): their requests, and the rest for all others together."""
    given: dict[str, Mapping[str, int]] = {}
    left = dict(total)
    for container in pod.containers:
        requests = requested_memory(pod, container)
        if requests:
            given[container.name] = requests
            if container.kind is not ContainerKind.INIT:
                left = {resource: amount - requests.get(resource, 0) for resource, amount in left.items()}
        elif container.kind is ContainerKind.INIT:
            given[container.name] = left
    return {container.name: given.get(container.name, left) for container in pod.containers}


def _blocks(numa_nodes: tuple[int, ...], amounts: Mapping[str, int]) -> tuple[Block, ...]:
    return tuple(Block(numa_nodes, resource, amount) for resource, amount in amounts.items() if amount)


def _hints_again(blocks: Iterable[Block], requests: Mapping[str, int]) -> ProviderHints:
    """Return hints for memory that is booked already (``regenerateHints``); ``None`` if the request has changed."""
    if {block.resource: block.size for block in blocks} != dict(requests):
        return None
    return {block.resource: HintList.of([Hint(mask_of(block.numa_nodes), preferred=True)]) for block in blocks}


_NOTHING = MemoryTable.empty(0, 0, 0)


def _table(state: MemoryState, numa_node: int, resource: str) -> MemoryTable:
    return state.numa_nodes[numa_node].tables.get(resource, _NOTHING)


def _outline(state: MemoryState, numa_node: int) -> object:
    """Return the part of a NUMA node's state that a restarted kubelet compares (``areMachineStatesEqual``)."""
    memory = state.numa_nodes[numa_node]
    group = [state.numa_nodes[each] for each in memory.cells if each in state.numa_nodes]
    return (
        memory.assignments,
        sorted(memory.cells),
        {
            resource: (
                table.total,
                table.system_reserved,
                table.allocatable,
                sum(each.tables[resource].free for each in group if resource in each.tables),
                sum(each.tables[resource].reserved for each in group if resource in each.tables),
            )
            for resource, table in memory.tables.items()
        },
    )


def _groupable(state: MemoryState, places: Places) -> int:
    """Return the family of masks that may be booked on without conflict with existing groups of NUMA nodes."""
    used = mask_of(numa_node for numa_node, memory in state.numa_nodes.items() if memory.assignments)
    alone = {1 << numa_node for numa_node, memory in state.numa_nodes.items() if len(memory.cells) == 1}
    groups = {mask_of(memory.cells) for memory in state.numa_nodes.values() if len(memory.cells) > 1}
    again = family_of(places.place(mask) for mask in alone | {mask for mask in groups if _group_free(state, mask)})
    return (within(len(places), ~places.place(used)) | again) & ~1


def _group_free(state: MemoryState, mask: int) -> bool:
    """Tell whether *mask*, of several NUMA nodes, has only unused ones and ones of exactly this group."""
    numa_nodes = numa_nodes_of(mask)
    return all(state.numa_nodes[each].cells == numa_nodes for each in numa_nodes if state.numa_nodes[each].assignments)


def _best(hints: HintList, containing_mask: int = 0) -> Hint | None:
    """Return the best of *hints* that contain a mask (``findBestHint``): preferred first, then the narrowest."""
    count = len(hints.places)
    wide_enough = containing(count, hints.places.place(containing_mask))
    for masks, preferred in ((hints.preferred, True), (hints.masks, False)):
        found = narrowest(count, masks & wide_enough)
        if found:
            return Hint(hints.places.number(lowest(found)), preferred)
    return None


def _book(numa_nodes: dict[int, NumaMemory], block: Block) -> None:
    """Reserve *block* on its NUMA nodes, in ascending order as much as is free on each (``updateMachineState``)."""
    missing = block.size
    for each in block.numa_nodes:
        memory = numa_nodes[each]
        tables = memory.tables
        table = tables.get(block.resource, _NOTHING)
        taken = min(missing, max(0, table.free))
        if taken:
            tables = {**tables, block.resource: table.moved(taken)}
            missing -= taken
        numa_nodes[each] = NumaMemory(memory.assignments + 1, tables, block.numa_nodes)


def _take_back(numa_nodes: dict[int, NumaMemory], block: Block) -> None:
    missing = block.size
    for each in block.numa_nodes:
        memory = numa_nodes[each]
        tables = memory.tables
        table = tables.get(block.resource, _NOTHING)
        given = min(missing, table.reserved)
        if given:
            tables = {**tables, block.resource: table.moved(-given)}
            missing -= given
        assignments = memory.assignments - 1
        numa_nodes[each] = NumaMemory(assignments, tables, memory.cells if assignments else (each,))


def _reusable_after(
    state: MemoryState, pod: Pod, container: Container, blocks: Iterable[Block]
) -> Mapping[str, Mapping[tuple[int, str], int]]:
    """Return the memory that *pod* may use again after *container* has got its *blocks* (``updatePodReusableMemory``)."""
    reusable = dict(state.reusable.get(pod.pod_uid, {}))
    for block in blocks:
        place = mask_of(block.numa_nodes), block.resource
        if container.kind is ContainerKind.INIT:
            reusable[place] = max(reusable.get(place, 0), block.size)
        elif place in reusable:
            reusable[place] = max(0, reusable[place] - block.size)
    return {pod.pod_uid: reusable}


def _init_blocks_used_again(
    pod: Pod, container: Container, containers: Mapping[str, tuple[Block, ...]], blocks: Iterable[Block]
) -> dict[str, tuple[Block, ...]]:
    """Shrink the blocks of earlier init containers by the bytes that *blocks* use again (``updateInitContainersMemoryBlocks``)."""
    shrunk = dict(containers)
    for used in blocks:
        left = used.size
        for earlier in pod.init_containers:
            if not left or earlier.name == container.name:
                break
            if earlier.kind is ContainerKind.SIDECAR or earlier.name not in shrunk:
                continue
            kept = []
            for block in shrunk[earlier.name]:
                same = (block.resource, block.numa_nodes) == (used.resource, used.numa_nodes)
                taken = min(left, block.size) if same else 0
                left -= taken
                kept.append(attrs.evolve(block, size=block.size - taken) if taken else block)
            shrunk[earlier.name] = tuple(kept)
    return shrunk


def check_reservation(reserved: Mapping[int, Mapping[str, int]], node_allocatable: Mapping[str, int]) -> None:
    """Check that the reservations of all NUMA nodes add up to that of Node Allocatable (``validateReservedMemory``).

    *node_allocatable* is kubeReserved, systemReserved and the hard eviction threshold together, in bytes by resource.
    Raises :class:`KubeletConfigError` in the kubelet's words.
    """
    totals: dict[str, int] = {}
    for resources in reserved.values():
        for resource, amount in resources.items():
            totals[resource] = totals.get(resource, 0) + amount
    for resource in sorted({*totals, *node_allocatable}):
        total, expected = format_bytes(totals.get(resource, 0)), format_bytes(node_allocatable.get(resource, 0))
        if total != expected:
            raise KubeletConfigError(
                f'the total amount "{total}" of type "{resource}" is not equal to the value "{expected}"'
                " determined by Node Allocatable feature"
            )
