"""The kubelet's CPU Manager with the static policy: its hints for a container, and the CPUs that it assigns.

Modelled on ``pkg/kubelet/cm/cpumanager/policy_static.go`` of Kubernetes 1.33 to 1.36.3. Docstrings name the Go function
that is modelled.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Self

import attrs

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.kubelet.numa_masks import Places, containing, mask_of, numa_nodes_of, of_size, reaching, touching
from runner.kubelet.pod import CPU, Container, ContainerKind, Pod, peak
from runner.kubelet.state import CpuState, without_pod
from runner.node_plan.cpu_assignment import CpuTopology, ceil_div, take_distributed, take_packed
from runner.node_plan.quirks import AllocationError, EmptyPodSharedPoolError, KubeletConfigError, Quirk, parse_bool
from runner.node_plan.topology_manager import HintList, ProviderHints


class SMTAlignmentError(AllocationError):
    """A request that cannot be satisfied with whole cores (``full-pcpus-only``)."""

    reason = "SMTAlignmentError"


@frozen
class CpuPolicyOptions:
    """``cpuManagerPolicyOptions``; each attribute is the option of the same name with hyphens.

    Feature gates, which may hide an option, are checked by :mod:`runner.node_plan.configuration`.
    """

    full_pcpus_only: bool = False
    distribute_cpus_across_numa: bool = False
    align_by_socket: bool = False
    distribute_cpus_across_cores: bool = False
    strict_cpu_reservation: bool = False
    prefer_align_cpus_by_uncorecache: bool = False

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Self:
        """Read the options as the kubelet's configuration spells them (``NewStaticPolicyOptions``).

        Raises :class:`KubeletConfigError` in the kubelet's words for an option that is unknown, not a boolean, or
        excluded by another one.
        """
        known = {field.name.replace("_", "-"): field.name for field in attrs.fields(cls)}
        chosen = {}
        for name, value in options.items():
            if name not in known:
                raise KubeletConfigError(f'unknown CPU Manager Policy option: "{name}"')
            chosen[known[name]] = parse_bool(name, value)
        parsed = cls(**chosen)
        for one, other in _EXCLUSIVE:
            if getattr(parsed, known[one]) and getattr(parsed, known[other]):
                raise KubeletConfigError(f"static policy options {one} and {other} can not be used at the same time")
        return parsed


_EXCLUSIVE = (
    ("full-pcpus-only", "distribute-cpus-across-cores"),
    ("distribute-cpus-across-numa", "distribute-cpus-across-cores"),
    ("prefer-align-cpus-by-uncorecache", "distribute-cpus-across-cores"),
    ("prefer-align-cpus-by-uncorecache", "distribute-cpus-across-numa"),
)


@frozen
class CpuManager:
    """The static policy as configured on one host (``staticPolicy``); its methods decide from a :class:`CpuState`."""

    topology: CpuTopology
    options: CpuPolicyOptions
    reserved: CpuSet
    quirks: frozenset[Quirk] = frozenset(Quirk)

    @classmethod
    def configured(
        cls,
        topology: CpuTopology,
        options: CpuPolicyOptions,
        *,
        reserved_cpus: CpuSet,
        reserved_millicpus: int,
        quirks: frozenset[Quirk] = frozenset(Quirk),
    ) -> Self:
        """Decide which CPUs are reserved (``NewStaticPolicy``).

        *reserved_cpus* is ``reservedSystemCPUs``; where it is empty, *reserved_millicpus* (``kubeReserved`` and
        ``systemReserved`` together) are rounded up to CPUs and chosen as a container's would be.
        Raises :class:`KubeletConfigError` in the kubelet's words if it would not start.
        """
        count = len(reserved_cpus) or ceil_div(reserved_millicpus, 1000)
        if count == 0:
            raise KubeletConfigError(
                "[cpumanager] the static policy requires systemreserved.cpu + kubereserved.cpu to be greater than zero"
            )
        if options.align_by_socket and len(topology.sockets) > len(topology.numa_nodes):
            raise KubeletConfigError(
                "Align by socket is not compatible with hardware where number of sockets are more than number of NUMA"
            )
        manager = cls(topology, options, reserved_cpus, quirks)
        reserved = reserved_cpus
        if not reserved_cpus:
            # The kubelet ignores the error; the check below finds that the set is too small.
            with contextlib.suppress(AllocationError):
                reserved = manager.take(CpuSet(topology.all), count)
        if len(reserved) != count:
            raise KubeletConfigError(
                f"[cpumanager] unable to reserve the required amount of CPUs (size of {reserved} did not equal {count})"
            )
        for cpu in reserved:
            if cpu not in topology.all:
                raise KubeletConfigError(
                    "[cpumanager] unable to build the reserved physical CPUs from the reserved set:"
                    f" unknown CPU ID: {cpu}"
                )
        return attrs.evolve(manager, reserved=reserved)

    @property
    def reserved_cores(self) -> CpuSet:
        """The reserved CPUs and all their siblings (``reservedPhysicalCPUs``)."""
        cores = {self.topology.core_of[cpu] for cpu in self.reserved}
        return CpuSet.union(self.topology.cores[core] for core in cores)

    @property
    def initial(self) -> CpuState:
        """The state of an empty node: all CPUs are in the shared pool, without the reserved with ``strict-cpu-reservation``."""
        everything = CpuSet(self.topology.all)
        return CpuState("static", everything - self.reserved if self.options.strict_cpu_reservation else everything)

    def available(self, state: CpuState) -> CpuSet:
        """Return the CPUs that can be assigned exclusively (``GetAvailableCPUs``)."""
        return state.shared_pool - self.reserved

    def restored(self, state: CpuState) -> CpuState:
        """Return the *state* that a running kubelet has; a file without any CPU is that of an empty node.

        Raises :class:`KubeletConfigError` in the kubelet's words if *state* is one of another machine, which has CPUs that
        this one lacks or lacks some of this one's. The latter can also mean that the file was read between two writes.
        """
        known = state.shared_pool | state.exclusive()
        if not known:
            return self.initial
        if known | self.reserved != CpuSet(self.topology.all):
            self.validate(state)
        return state

    def validate(self, state: CpuState) -> None:
        """Check a state read back from disk (``validateState``); :class:`KubeletConfigError` in the kubelet's words."""
        pool = state.shared_pool
        if not pool and (state.assignments or state.pod_assignments):
            raise KubeletConfigError("default cpuset cannot be empty")
        expected = CpuSet(self.topology.all)
        if self.options.strict_cpu_reservation:
            expected -= self.reserved
            if not pool.isdisjoint(self.reserved):
                raise KubeletConfigError(
                    f'some of strictly reserved cpus: "{pool & self.reserved}" are present in defaultCpuSet: "{pool}"'
                )
        elif not self.reserved <= pool:
            raise KubeletConfigError(f'not all reserved cpus: "{self.reserved}" are present in defaultCpuSet: "{pool}"')
        for pod_uid, containers in state.assignments.items():
            for name, cpus in containers.items():
                if not cpus.isdisjoint(pool):
                    raise KubeletConfigError(
                        f'pod: {pod_uid}, container: {name} cpuset: "{cpus}" overlaps with default cpuset "{pool}"'
                    )
        known = pool | state.exclusive()
        if known != expected:
            raise KubeletConfigError(
                f'current set of available CPUs "{expected}" doesn\'t match with CPUs in state "{known}"'
            )

    def take(self, available: CpuSet, count: int, *, numa_nodes: int = 0) -> CpuSet:
        """Take *count* of the *available* CPUs by the configured options (``takeByTopology``).

        They are distributed across *numa_nodes* or more, which is the number that the Topology Manager has chosen.
        """
        options = self.options
        spread = options.distribute_cpus_across_cores
        if options.distribute_cpus_across_numa:
            group = self.topology.cpus_per_core if options.full_pcpus_only else 1
            fewest = 0 if Quirk.HINT_SHRUNK in self.quirks else numa_nodes
            return take_distributed(
                self.topology, available, count, group=group, spread=spread, fewest=fewest, quirks=self.quirks
            )
        uncore = options.prefer_align_cpus_by_uncorecache
        return take_packed(self.topology, available, count, spread=spread, prefer_uncore=uncore, quirks=self.quirks)

    # Hints.

    def hints(self, state: CpuState, pod: Pod, container: Container) -> ProviderHints:
        """Return the hints for *container* (``GetTopologyHints``); ``None`` if it gets no exclusive CPUs."""
        count = exclusive_cpus(pod, container)
        if count == 0:
            return None
        assigned = state.assignments.get(pod.pod_uid, {}).get(container.name)
        if assigned is not None:
            listed = self.numa_hints(assigned, count) if len(assigned) == count else HintList()
        else:
            listed = self.numa_hints(self.available(state), count, state.reusable.get(pod.pod_uid, CpuSet()))
        return {"cpu": listed}

    def pod_hints(self, state: CpuState, pod: Pod) -> ProviderHints:
        """Return the hints for all containers of *pod* together (``GetPodTopologyHints``)."""
        count = exclusive_cpus_of_pod(pod)
        if count == 0:
            return None
        if pod.pod_level_managed and without_shared_cpus(pod):
            return {"cpu": HintList()}
        assigned = CpuSet()
        for container in pod.containers:
            cpus = state.assignments.get(pod.pod_uid, {}).get(container.name)
            if cpus is not None:
                if len(cpus) != exclusive_cpus(pod, container):
                    return {"cpu": HintList()}
                assigned |= cpus
        if len(assigned) == count:
            return {"cpu": self.numa_hints(assigned, count)}
        reusable = state.reusable.get(pod.pod_uid, CpuSet()) | assigned
        return {"cpu": self.numa_hints(self.available(state), count, reusable)}

    def numa_hints(self, available: CpuSet, count: int, reusable: CpuSet = CpuSet()) -> HintList:  # noqa: B008  (immutable)
        """Return a hint for every set of NUMA nodes with *count* CPUs (``generateCPUTopologyHints``).

        The sets must contain all *reusable* CPUs, which are counted in addition to *available*. A hint is preferred if an
        empty host would need as many NUMA nodes, so a busy host may have no preferred hint.
        """
        numa_node_of = self.topology.numa_node_of
        places = Places(tuple(self.topology.numa_nodes))
        free = Counter(numa_node_of[cpu] for cpu in available)
        required = places.place(mask_of({numa_node_of[cpu] for cpu in reusable}))
        fitting = reaching([free[each] for each in places.numa_nodes], count - len(reusable))
        fitting &= containing(len(places), required) & ~1
        fewest = self._narrowest_on_empty_host(count)
        preferred = fitting & of_size(len(places), fewest)
        if self.options.align_by_socket:
            preferred |= fitting & self._aligned_to_sockets(places, fewest)
        return HintList(places, fitting, preferred)

    def _narrowest_on_empty_host(self, count: int) -> int:
        total = 0
        sizes = sorted(map(len, self.topology.numa_nodes.values()), reverse=True)
        for number, size in enumerate(sizes, start=1):
            total += size
            if total >= count:
                return number
        return len(sizes)

    def _aligned_to_sockets(self, places: Places, fewest: int) -> int:
        """Return the family of masks on as many sockets as *fewest* NUMA nodes need (``isHintSocketAligned``)."""
        topology = self.topology
        per_socket = len(topology.numa_nodes) // len(topology.sockets)
        if per_socket == 0:
            return 0
        sockets = [
            places.place(mask_of({topology.numa_node_of[cpu] for cpu in cpus})) for cpus in topology.sockets.values()
        ]
        return touching(len(places), sockets, ceil_div(fewest, per_socket))

    # Assignment.

    def allocate(self, state: CpuState, pod: Pod, container: Container, affinity: int | None) -> CpuState:
        """Assign exclusive CPUs to *container*, as many as possible on the NUMA nodes of *affinity* (``Allocate``).

        Raises :class:`AllocationError` in the kubelet's words.
        """
        count = exclusive_cpus(pod, container)
        if count == 0:
            return state
        if self.options.full_pcpus_only:
            self._check_whole_cores(state, count)
        containers = state.assignments.get(pod.pod_uid, {})
        cpus = containers.get(container.name)
        if cpus is None:
            cpus = self._choose(state, count, affinity, state.reusable.get(pod.pod_uid, CpuSet()))
        # Only the pod that was admitted last may use the CPUs of its init containers again.
        reusable = state.reusable.get(pod.pod_uid, CpuSet())
        reusable = reusable | cpus if container.kind is ContainerKind.INIT else reusable - cpus
        return attrs.evolve(
            state,
            shared_pool=state.shared_pool - cpus,
            assignments={**state.assignments, pod.pod_uid: {**containers, container.name: cpus}},
            reusable={pod.pod_uid: reusable},
        )

    def allocate_pod(self, state: CpuState, pod: Pod, affinity: int | None) -> CpuState:
        """Assign CPUs to *pod* as a whole, and divide them among its containers (``AllocatePod``).

        The kubelet does not look for an earlier assignment: a pod that it admits a second time, after a restart, gets other CPUs, and its
        former ones belong to no set from then on. Only the sum is checked for whole cores, so containers of one pod may share a core.
        Raises :class:`AllocationError` in the kubelet's words.
        """
        count = exclusive_cpus_of_pod(pod)
        if count == 0:
            return state
        if problem := without_shared_cpus(pod):
            raise EmptyPodSharedPoolError(problem)
        if self.options.full_pcpus_only:
            self._check_whole_cores(state, count)
        cpus = self._choose(state, count, affinity, CpuSet())
        return attrs.evolve(
            state,
            shared_pool=state.shared_pool - cpus,
            assignments={**state.assignments, pod.pod_uid: self._divided(pod, cpus)},
            pod_assignments={**state.pod_assignments, pod.pod_uid: cpus},
        )

    def _divided(self, pod: Pod, cpus: CpuSet) -> dict[str, CpuSet]:
        """Divide *cpus* among the containers of *pod*: exclusive ones, and the rest for all others together.

        An init container has all CPUs that the sidecars before it leave: it ends before the next container starts.
        """
        given: dict[str, CpuSet] = {}
        left = cpus
        for container in pod.containers:
            count = exclusive_cpus(pod, container)
            if count:
                given[container.name] = self.take(left, count)
                if container.kind is not ContainerKind.INIT:
                    left -= given[container.name]
            elif container.kind is ContainerKind.INIT:
                given[container.name] = left
        return {container.name: given.get(container.name, left) for container in pod.containers}

    def _check_whole_cores(self, state: CpuState, count: int) -> None:
        per_core = self.topology.cpus_per_core
        if count % per_core:
            raise SMTAlignmentError(
                f"SMT Alignment Error: requested {count} cpus not multiple cpus per core = {per_core}"
            )
        # This count excludes the siblings of reserved CPUs; the assignment that follows may take them.
        free = len(state.shared_pool - self.reserved_cores)
        if count > free:
            raise SMTAlignmentError(
                f"SMT Alignment Error: not enough free physical CPUs: available physical CPUs = {free},"
                f" requested CPUs = {count}, CPUs per core = {per_core}"
            )

    def _choose(self, state: CpuState, count: int, affinity: int | None, reusable: CpuSet) -> CpuSet:
        """Take as many CPUs as possible on the NUMA nodes of *affinity*, then the remaining anywhere (``allocateCPUs``)."""
        pool = self.available(state) | reusable
        aligned = CpuSet()
        if affinity is not None:
            here = pool & self._aligned(affinity)
            aligned = self.take(here, min(count, len(here)), numa_nodes=affinity.bit_count())
        return aligned | self.take(pool - aligned, count - len(aligned))

    def _aligned(self, affinity: int) -> CpuSet:
        topology = self.topology
        if self.options.align_by_socket:
            cpus = {cpu for each in numa_nodes_of(affinity) for cpu in topology.numa_nodes.get(each, ())}
            sockets = {topology.socket_of[cpu] for cpu in cpus}
            return CpuSet.union(topology.sockets[socket] for socket in sockets)
        return CpuSet.union(topology.numa_nodes.get(each, ()) for each in numa_nodes_of(affinity))

    def without(self, state: CpuState, pod_uid: str) -> CpuState:
        """Take back the CPUs of pod *pod_uid* (``RemoveContainer`` for each container).

        Those of a pod as a whole come back with its last container.
        """
        released = state.pod_assignments.get(pod_uid, state.assigned_to(pod_uid))
        return attrs.evolve(
            state,
            shared_pool=state.shared_pool | released,
            assignments=without_pod(pod_uid, state.assignments),
            pod_assignments=without_pod(pod_uid, state.pod_assignments),
        )


def exclusive_cpus(pod: Pod, container: Container) -> int:
    """Return the number of exclusive CPUs for *container* (``guaranteedCPUs``): 0 unless Guaranteed with whole CPUs.

    In a pod with pod-level resources the container itself must have requests that equal its limits.
    """
    managed = not pod.pod_level_resources or (pod.pod_level_managed and container.guaranteed)
    if not pod.guaranteed or not managed or container.millicpus % 1000:
        return 0
    return container.millicpus // 1000


def exclusive_cpus_of_pod(pod: Pod) -> int:
    """Return the largest number of exclusive CPUs that *pod* uses at one time (``podGuaranteedCPUs``).

    It is the pod-level request where the managers take notice of it: 0 unless it is of whole CPUs, whatever the containers
    request.
    """
    if pod.pod_level_managed:
        millicpus = pod.pod_level_requests.get(CPU, 0)
        return millicpus // 1000 if pod.guaranteed and millicpus % 1000 == 0 else 0
    return peak(pod, lambda container: exclusive_cpus(pod, container))


def without_shared_cpus(pod: Pod) -> str:
    """Return the kubelet's words if no CPUs are left for containers without exclusive ones (``validatePodScopeResources``)."""
    total = exclusive_cpus_of_pod(pod)
    taken = 0
    shared = False
    for container in pod.containers:
        count = exclusive_cpus(pod, container)
        if container.kind is ContainerKind.INIT:
            if count == 0 and taken >= total:
                return "pod rejected, pod has shared init containers but no cpus available for them"
        else:
            taken += count
            shared = shared or count == 0
    if shared and taken >= total:
        return "pod rejected, sum of exclusive container cpu requests equals pod budget, leaving no cpus for shared containers"
    return ""
