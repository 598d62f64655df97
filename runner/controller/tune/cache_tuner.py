"""The groups of resctrl in the kernel: reading them, and applying the plan of :mod:`runner.controller.tune.cache_groups`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, explain
from runner.base.values import frozen
from runner.controller.tune.cache_groups import CachePlan, CacheRequest, plan_cache_groups
from runner.controller.tune.disturbances import Record, Setting, Unset, WaysBelow
from runner.kernel.hardware_reader import read_hardware
from runner.kernel.resctrl import CacheGroup, Resctrl

RESCTRL = "sys/fs/resctrl"


@frozen
class CacheTuner:
    """*resctrl* of the machine whose root directory is *root*."""

    root: Path
    resctrl: Resctrl

    def plan(self, requests: tuple[CacheRequest, ...]) -> CachePlan:
        """Return the groups for *requests*; none if resctrl cannot be used."""
        if not self.resctrl.mounted():
            remedy = f"put `resctrl /{RESCTRL} resctrl defaults 0 0` into the node's /etc/fstab"
            what = "cache or memory bandwidth: resctrl is not mounted"
            return CachePlan(unmet=tuple(each.unset(what, remedy) for each in requests))
        try:
            groups = self.resctrl.groups()
            return plan_cache_groups(requests, groups, self.resctrl.capabilities(), self._caches() if requests else {})
        except HostError as error:
            return CachePlan(unmet=(Unset("cache", RESCTRL, explain(error)),))

    def _caches(self) -> Mapping[int, CpuSet]:
        found: dict[int, set[int]] = {}
        for cpu in read_hardware(self.root).cpus:
            if cpu.l3 is not None:
                found.setdefault(cpu.l3, set()).add(cpu.cpu)
        return {cache: CpuSet(cpus) for cache, cpus in found.items()}

    def shared(self, plan: CachePlan, records: Mapping[str, Record]) -> Iterator[Setting]:
        """Yield, as a setting of each cache, the ways of CPUs in no group: those below the assigned ones."""
        for cache, current in plan.present[""].values.get("L3", {}).items() if plan.present else ():
            path, first = f"{RESCTRL}/schemata:{cache}", plan.lowest_given.get(cache)
            if first is not None or path in records:
                yield Setting(path, "cache", f"{int(current, 16):x}", WaysBelow(first))

    def share(self, setting: Setting, value: str) -> None:
        """Write *value* to a setting of :meth:`shared`. Raises :class:`HostError`."""
        self.resctrl.write("", "schemata", f"L3:{setting.path.rpartition(':')[2]}={value}")

    def apply(self, plan: CachePlan, *, creating: bool) -> list[Unset]:
        """Remove groups, and with *creating* make them; return what the kernel has refused."""
        steps = [(name, partial(self.resctrl.remove, name)) for name in plan.removed]
        for name, group in plan.groups.items() if creating else ():
            has = plan.present.get(name)
            if has is None or has.cpus != group.cpus or not _contains(has.values, group.values):
                steps.append((name, partial(self._make, name, group)))
        unset = []
        for name, step in steps:
            try:
                step()
            except HostError as error:
                unset.append(Unset("cache", name, explain(error)))
        return unset

    def _make(self, name: str, group: CacheGroup) -> None:
        self.resctrl.create(name)
        for resource, values in group.values.items():
            line = ";".join(f"{domain}={value}" for domain, value in sorted(values.items()))
            self.resctrl.write(name, "schemata", f"{resource}:{line}")
        self.resctrl.write(name, "cpus_list", str(group.cpus))


def _contains(has: Mapping[str, Mapping[int, str]], wanted: Mapping[str, Mapping[int, str]]) -> bool:
    return all(
        int(has.get(resource, {}).get(domain, "0"), 16) == int(value, 16)
        for resource, values in wanted.items()
        for domain, value in values.items()
    )
