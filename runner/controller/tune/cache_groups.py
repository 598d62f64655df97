"""Ways of the L3 caches and memory bandwidth for the instances that request them (pure).

Ways are assigned from the highest downwards, and CPUs in no group have the ways below the lowest assigned one: a CPU may require that the
ways of a group are adjacent (``Documentation/filesystems/resctrl.rst``, "Cache Bit Masks"). At least half of each cache stays with CPUs in
no group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.controller.tune.disturbances import Unset
from runner.controller.tune.tuner_messages import Tuning
from runner.kernel.resctrl import CacheCapabilities, CacheGroup
from runner.kubelet.pod_cgroups import instance_group, instance_uid

_PERCENT = 100
"""The highest value of a group's ``MB`` if the kernel takes percentages: a new group begins with the highest value (``rdtgroup_init_mba``).
On AMD it is 2048 (``__rdt_get_mem_config_amd``), with ``mba_MBps`` 4294967295."""


@frozen
class CacheRequest:
    """The request of pod *pod_uid*'s instance on *cpus*."""

    pod_uid: str
    cpus: CpuSet
    tuning: Tuning

    @property
    def group(self) -> str:
        """The name of its group."""
        return instance_group(self.pod_uid)

    def unset(self, what: str, remedy: str = "") -> Unset:
        """Return the failure to give the instance *what*, which ends with the reason."""
        return Unset("cache", self.group, f"cannot give instance {self.pod_uid!r} {what}", remedy)


@frozen
class CachePlan:
    """The desired groups, the groups to be removed, and the requests that cannot be met."""

    groups: Mapping[str, CacheGroup] = attrs.field(factory=dict)
    removed: tuple[str, ...] = ()
    lowest_given: Mapping[int, int] = attrs.field(factory=dict)
    """L3 cache → the lowest assigned way; only caches with assigned ways."""
    unmet: tuple[Unset, ...] = ()
    """The requests that are not met in full."""
    present: Mapping[str, CacheGroup] = attrs.field(factory=dict)
    """All groups found in the kernel; empty if it has no resctrl."""


def plan_cache_groups(
    requests: tuple[CacheRequest, ...],
    groups: Mapping[str, CacheGroup],
    capabilities: CacheCapabilities,
    caches: Mapping[int, CpuSet],
) -> CachePlan:
    """Return the groups for *requests*; each request keeps the ways that its group has now.

    *caches* are the CPUs of each L3 cache. Parts of a request that the CPUs do not support are left out of its group.
    """
    ours = [name for name in groups if instance_uid(name) is not None]
    foreign = sorted(name for name in groups if name and name not in ours)
    if foreign:
        reason = f"other programs have groups in resctrl ({', '.join(foreign)}); remove them"
        refused = (request.unset(f"cache or memory bandwidth: {reason}") for request in requests)
        return CachePlan(removed=tuple(ours), unmet=tuple(refused), present=groups)
    unmet: list[Unset] = []
    given = _kept_ways(requests, groups, capabilities, caches)
    planned = {}
    for request in requests:
        values: dict[str, dict[int, str]] = {}
        touched = [cache for cache, cpus in caches.items() if not cpus.isdisjoint(request.cpus)]
        ways, reasons = request.tuning.cache_ways, [*_ways_errors(request, capabilities)]
        no_limit = [*_bandwidth_errors(request, capabilities, groups)]
        unmet += (Unset("cache", request.group, reason) for reason in (*reasons, *no_limit))
        if ways is not None and not reasons:
            for cache in touched:
                if mask := given[cache].get(request.group) or _free_ways(ways, capabilities.all_ways, given[cache]):
                    given[cache][request.group] = mask
                    values.setdefault("L3", {})[cache] = f"{mask:x}"
                else:
                    unmet.append(request.unset(f"{ways} ways of L3 cache {cache}: other instances have them"))
        if request.tuning.memory_bandwidth is not None and not no_limit:
            values["MB"] = dict.fromkeys(touched, str(_bandwidth(request.tuning.memory_bandwidth, capabilities)))
        if values:
            planned[request.group] = CacheGroup(request.cpus, values)
    lowest = {
        cache: min((mask & -mask).bit_length() - 1 for mask in masks.values())
        for cache, masks in given.items()
        if masks
    }
    removed = tuple(name for name in ours if name not in planned)
    return CachePlan(planned, removed, lowest, tuple(unmet), groups)


def _bandwidth_errors(
    request: CacheRequest, capabilities: CacheCapabilities, groups: Mapping[str, CacheGroup]
) -> Iterator[str]:
    if request.tuning.memory_bandwidth is None:
        return
    what = f"cannot limit the memory bandwidth of instance {request.pod_uid!r}"
    most = max((int(value) for group in groups.values() for value in group.values.get("MB", {}).values()), default=0)
    if not capabilities.least_bandwidth:
        yield f"{what}: this machine's CPUs cannot"
    elif most > _PERCENT:
        yield (
            f"{what} to {request.tuning.memory_bandwidth} percent: resctrl has no percent here, its schemata have up to {most} "
            "(AMD: eighths of a GB/s; mount option mba_MBps: MB/s); leave cpu.memory_bandwidth out"
        )


def _ways_errors(request: CacheRequest, capabilities: CacheCapabilities) -> Iterator[str]:
    ways, most = request.tuning.cache_ways, capabilities.all_ways.bit_count() // 2
    if ways is None:
        return
    if capabilities.code_and_data:
        yield (
            f"cannot give instance {request.pod_uid!r} ways of the L3 cache: resctrl has separate ones for code and data; mount "
            "it without the option cdp"
        )
    elif not capabilities.all_ways:
        yield f"cannot give instance {request.pod_uid!r} ways of the L3 cache: this machine's CPUs cannot"
    elif not capabilities.fewest_ways <= ways <= most:
        yield (
            f"cannot give instance {request.pod_uid!r} {ways} ways of the L3 cache: it may have from "
            f"{capabilities.fewest_ways} to {most} of {capabilities.all_ways.bit_count()}"
        )


def _kept_ways(
    requests: tuple[CacheRequest, ...],
    groups: Mapping[str, CacheGroup],
    capabilities: CacheCapabilities,
    caches: Mapping[int, CpuSet],
) -> dict[int, dict[str, int]]:
    """Return cache → group → its present ways, for groups that have as many as requested, and share none."""
    kept: dict[int, dict[str, int]] = {cache: {} for cache in caches}
    shared = _shared_ways(capabilities.all_ways)
    for request in requests:
        group = groups.get(request.group)
        for cache, text in group.values.get("L3", {}).items() if group is not None else ():
            mask, others = int(text, 16), sum(kept.get(cache, {}).values())
            touched = cache in caches and not caches[cache].isdisjoint(request.cpus)
            alone = not mask & others and not mask & (1 << shared) - 1
            if touched and mask.bit_count() == request.tuning.cache_ways and alone:
                kept[cache][request.group] = mask
    return kept


def _free_ways(ways: int, all_ways: int, given: Mapping[str, int]) -> int:
    """Return the highest *ways* adjacent ways that are in no group; 0 if less than half of the cache would remain."""
    taken = sum(given.values())
    for first in range(all_ways.bit_length() - ways, _shared_ways(all_ways) - 1, -1):
        mask = (1 << ways) - 1 << first
        if not mask & taken:
            return mask
    return 0


def _shared_ways(all_ways: int) -> int:
    return all_ways.bit_count() - all_ways.bit_count() // 2


def _bandwidth(percent: int, capabilities: CacheCapabilities) -> int:
    step = capabilities.bandwidth_step
    return min(max(-(-percent // step) * step, capabilities.least_bandwidth), _PERCENT)
