"""The kubelet's Device Manager: the hints for device resources, and the number of free devices on each NUMA node.

Modelled on ``pkg/kubelet/cm/devicemanager/{manager,topology_hints}.go``. Devices are only counted: the device plugin
chooses among those of one NUMA node. Where an affinity allows several NUMA nodes, the lowest is counted as used first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import attrs

from runner.base.values import frozen
from runner.kubelet.numa_masks import Places, containing, mask_of, of_size, reaching
from runner.kubelet.pod import Container, ContainerKind, Pod, peak
from runner.kubelet.state import without_pod
from runner.node_plan.quirks import AllocationError, Quirk
from runner.node_plan.topology_manager import HintList, ProviderHints

Devices = Mapping[str, Mapping[int | None, int]]
"""Resource → NUMA node (``None`` where the plugin names none) → number of devices."""


@frozen
class DeviceState:
    """The state of the Device Manager."""

    assignments: Mapping[str, Mapping[str, Devices]] = attrs.field(factory=dict)
    """Pod UID → container → its devices, those that it uses again after an init container included."""
    held: Mapping[str, Devices] = attrs.field(factory=dict)
    """Pod UID → devices of all its containers; a device that several of them use one after the other counts once."""
    reusable: Mapping[str, Devices] = attrs.field(factory=dict)
    """Pod UID → devices of its init containers that later containers may use again."""


@frozen
class DeviceManager:
    """The devices that plugins have registered on one host."""

    numa_nodes: tuple[int, ...]
    """All NUMA nodes of the host."""
    devices: Devices = attrs.field(factory=dict)
    quirks: frozenset[Quirk] = frozenset(Quirk)

    def free(self, state: DeviceState, resource: str) -> Counter[int | None]:
        """Return the number of free devices of *resource* by NUMA node."""
        free = Counter(self.devices.get(resource, {}))
        for held in state.held.values():
            free.subtract(held.get(resource, {}))
        return free

    def hints(self, state: DeviceState, pod: Pod, container: Container) -> ProviderHints:
        """Return the hints for *container* (``GetTopologyHints``)."""
        given = state.assignments.get(pod.pod_uid, {}).get(container.name, {})
        reusable = state.reusable.get(pod.pod_uid, {})
        return {
            resource: self._hints(resource, count, Counter(given[resource]), {})
            if resource in given
            else self._hints(resource, count, self.free(state, resource), reusable.get(resource, {}))
            for resource, count in container.devices.items()
            if resource in self.devices
        }

    def pod_hints(self, state: DeviceState, pod: Pod) -> ProviderHints:
        """Return the hints for all containers of *pod* together (``GetPodTopologyHints``)."""
        return {
            resource: self._hints(resource, count, self.free(state, resource), {})
            for resource, count in peak_devices(pod).items()
            if resource in self.devices
        }

    def _hints(
        self, resource: str, count: int, free: Counter[int | None], reusable: Mapping[int | None, int]
    ) -> HintList | None:
        """Return a hint for every set of NUMA nodes with *count* devices (``generateDeviceTopologyHints``).

        The sets are those of the NUMA nodes that have devices of *resource* (``deviceNUMANodes``), free or not, or with
        :attr:`Quirk.DEVICE_HINTS_EVERYWHERE` of all NUMA nodes.
        """
        everything = self.devices[resource]
        with_devices = {each for each, number in everything.items() if number}
        if with_devices <= {None}:
            return None
        if free.total() + sum(reusable.values()) < count:
            return HintList()
        everywhere = Quirk.DEVICE_HINTS_EVERYWHERE in self.quirks
        places = Places(tuple(each for each in self.numa_nodes if everywhere or each in with_devices))
        required = places.place(mask_of(numa_node for numa_node in reusable if numa_node is not None))
        usable = [max(0, free[each]) + reusable.get(each, 0) for each in places.numa_nodes]
        fitting = reaching(usable, count) & containing(len(places), required) & ~1
        return HintList(places, fitting, fitting & of_size(len(places), self._narrowest(everything, count)))

    def _narrowest(self, everything: Mapping[int | None, int], count: int) -> int:
        total = 0
        sizes = sorted((everything.get(each, 0) for each in self.numa_nodes), reverse=True)
        for number, size in enumerate(sizes, start=1):
            total += size
            if total >= count:
                return number
        return len(sizes)

    def allocate(self, state: DeviceState, pod: Pod, container: Container, affinity: int | None) -> DeviceState:
        """Give *container* its devices, those on the NUMA nodes of *affinity* first (``Allocate``).

        Resources that no plugin registered are left out. Raises :class:`AllocationError` in the kubelet's words.
        """
        containers = state.assignments.get(pod.pod_uid, {})
        if not container.devices or container.name in containers:
            return state
        own: dict[str, Mapping[int | None, int]] = {}
        held = dict(state.held.get(pod.pod_uid, {}))
        reusable = {resource: Counter(places) for resource, places in state.reusable.get(pod.pod_uid, {}).items()}
        for resource, count in container.devices.items():
            if resource in self.devices:
                again = reusable.setdefault(resource, Counter())
                used_again = self._choose(again, count, None)
                new = self._choose_free(state, resource, count - used_again.total(), affinity)
                own[resource] = used_again + new
                held[resource] = Counter(held.get(resource, {})) + new
                if container.kind is ContainerKind.INIT:
                    again += new
                else:
                    again -= used_again
        return DeviceState(
            {**state.assignments, pod.pod_uid: {**containers, container.name: own}},
            {**state.held, pod.pod_uid: held},
            {pod.pod_uid: reusable},
        )

    def _choose_free(self, state: DeviceState, resource: str, count: int, affinity: int | None) -> Counter[int | None]:
        free = self.free(state, resource)
        if count and free.total() < count:
            raise AllocationError(
                f"requested number of devices unavailable for {resource}. Requested: {count}, Available: {free.total()}"
            )
        return self._choose(free, count, affinity)

    @staticmethod
    def _choose(among: Counter[int | None], count: int, affinity: int | None) -> Counter[int | None]:
        """Choose at most *count*, those on the NUMA nodes of *affinity* first and those without a NUMA node last."""

        def order(numa_node: int | None) -> tuple[bool, bool, int]:
            if numa_node is None:
                return True, True, 0
            return affinity is not None and not affinity >> numa_node & 1, False, numa_node

        chosen: Counter[int | None] = Counter()
        for numa_node in sorted(among, key=order):
            chosen[numa_node] = min(among[numa_node], count - chosen.total())
        return +chosen

    def without(self, state: DeviceState, pod_uid: str) -> DeviceState:
        """Take back the devices of pod *pod_uid*."""
        return attrs.evolve(
            state, assignments=without_pod(pod_uid, state.assignments), held=without_pod(pod_uid, state.held)
        )


def peak_devices(pod: Pod) -> dict[str, int]:
    """Return the largest number of devices of each resource that *pod* has at one time (``getPodDeviceRequest``)."""
    resources = dict.fromkeys(resource for container in pod.containers for resource in container.devices)
    return {resource: _peak_of(pod, resource) for resource in resources}


def _peak_of(pod: Pod, resource: str) -> int:
    return peak(pod, lambda container: container.devices.get(resource, 0))
