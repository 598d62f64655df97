"""The groups of resctrl in the kernel: reading them, and applying the plan of :mod:`runner.controller.tune.cache_groups`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, explain
from runner.base.values import frozen
from runner.controller.tune.cache_groups import CachePlan, CacheRequest, plan_cache_groups
from runner.controller.tune.disturbances import Record, Setting, Unset, WaysBelow
from runner.kernel.hardware_reader import read_hardware
from runner.kernel.resctrl import Resctrl

RESCTRL = "sys/fs/resctrl"


@frozen
class CacheTuner:
    """*resctrl* of the machine whose root directory is *root*."""

    root: Path
    resctrl: Resctrl

    def plan(self, requests: tuple[CacheRequest, ...], unset: list[Unset]) -> CachePlan | None:
        """Return the groups for *requests*; ``None`` if there can be none. Requests that cannot be met are added to *unset*."""
        if not self.resctrl.mounted():
            unset += [
                Unset(
                    "cache",
                    each.group,
                    f"cannot give instance {each.pod_uid!r} cache or memory bandwidth: resctrl is not mounted",
                    remedy=f"put `resctrl /{RESCTRL} resctrl defaults 0 0` into the node's /etc/fstab",
                )
                for each in requests
            ]
            return None
        try:
            groups = self.resctrl.groups()
            plan = plan_cache_groups(requests, groups, self.resctrl.capabilities(), self._caches() if requests else {})
        except HostError as error:
            unset.append(Unset("cache", RESCTRL, explain(error)))
            return None
        unset += [Unset("cache", group, reason) for group, reason in plan.errors]
        return plan

    def _caches(self) -> Mapping[int, CpuSet]:
        found: dict[int, set[int]] = {}
        for cpu in read_hardware(self.root).cpus:
            if cpu.l3 is not None:
                found.setdefault(cpu.l3, set()).add(cpu.cpu)
        return {cache: CpuSet(cpus) for cache, cpus in found.items()}

    def shared(self, plan: CachePlan | None, records: Mapping[str, Record]) -> Iterator[Setting]:
        """Yield, as a setting of each cache, the ways of CPUs in no group: those below the assigned ones."""
        if plan is None:
            return
        for cache, current in plan.present[""].values.get("L3", {}).items():
            path, first = f"{RESCTRL}/schemata:{cache}", plan.lowest_given.get(cache)
            if first is not None or path in records:
                yield Setting(path, "cache", f"{int(current, 16):x}", WaysBelow(first))

    def share(self, setting: Setting, value: str) -> None:
        """Write *value* to a setting of :meth:`shared`. Raises :class:`HostError`."""
        self.resctrl.write("", "schemata", f"L3:{setting.path.rpartition(':')[2]}={value}")

    def apply(self, plan: CachePlan | None, unset: list[Unset], *, creating: bool) -> None:
        """Remove groups, and with *creating* make them; refusals of the kernel are added to *unset*."""
        if plan is None:
            return
        for name in plan.removed:
            with _added_to(unset, name):
                self.resctrl.remove(name)
        for name, group in plan.groups.items() if creating else ():
            has = plan.present.get(name)
            if has is not None and has.cpus == group.cpus and _contains(has.values, group.values):
                continue
            with _added_to(unset, name):
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


@contextlib.contextmanager
def _added_to(unset: list[Unset], name: str) -> Iterator[None]:
    try:
        yield
    except HostError as error:
        unset.append(Unset("cache", name, explain(error)))
