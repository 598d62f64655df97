"""The host tuner, which keeps the machine's settings as the instances need them: read, decide, record, write, restore.

It writes through the root directory of the node's first process: a container's own /proc/irq and /sys are mounted for reading only. That
needs user 0 and CAP_SYS_PTRACE (proc_pid_root(5)), with which its process could do anything on the node, so it reads no data from pods. It
needs neither CAP_SYS_ADMIN nor further directories of the node in the manifest.

Instances run without these settings: a refusal by the kernel is logged once and reported.
"""

from __future__ import annotations

import errno
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

import attrs

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, explain
from runner.base.events import ControllerEvent
from runner.base.values import frozen
from runner.controller.tune.cache_groups import CacheRequest
from runner.controller.tune.cache_tuner import RESCTRL, CacheTuner
from runner.controller.tune.disturbances import (
    Added,
    AwayFrom,
    Fixed,
    ManagedInterrupt,
    Record,
    Setting,
    SettingChange,
    SettingKind,
    Unset,
    decide,
    format_records,
    parse_records,
    sentences,
    settled,
)
from runner.controller.tune.irqbalance import Irqbalance, find_irqbalance
from runner.controller.tune.tuner_messages import Tuned, TunedInstance
from runner.kernel.files import discard, publish
from runner.kernel.hardware_reader import read_online_cpus
from runner.kernel.host_settings import (
    DEFAULT_AFFINITY,
    INTERRUPTS,
    WORK_QUEUES,
    HostSettings,
    SettingError,
    d3cold_path,
    latency_path,
)
from runner.kernel.leases import read_at_once
from runner.kernel.procfs import Procfs
from runner.kubelet.pod_cgroups import instance_group

log = logging.getLogger(__name__)

LOW_LATENCY = "2"
"""Highest exit latency of an idle state in µs: C1 takes 1 or 2, C1E 4 to 10 (``drivers/idle/intel_idle.c``). ``n/a`` would keep the CPU
from idling at all, which takes the siblings' share of the core's clock."""
PERFORMANCE = "performance"
_FORBIDDEN_CACHE = "cache: --no-cache-groups forbids it"
_IRQBALANCE = "irqbalance"
_REFUSED = {errno.EIO, errno.EPERM}
"""The kernel's errors for an interrupt that it manages, or that belongs to one CPU (``write_irq_affinity``; EPERM since 6.13)."""
_D3COLD = PurePosixPath(d3cold_path("")).name
_VFIO = "vfio-"
"""The beginning of the names of handlers of passed-through devices (``vfio_pci_intrs.c``)."""


@frozen
class TuningOptions:
    """The kinds of settings that may be changed for instances."""

    interrupts: bool = True
    work_queues: bool = True
    latency: bool = True
    caches: bool = True


@frozen
class _RefusedChange:
    """A value that could not be written to the setting *path*."""

    path: str
    why: Unset | ManagedInterrupt | None
    """``None`` for an interrupt that is delivered to the wanted CPUs nevertheless."""


@attrs.define(eq=False)
class HostTuner:
    """The settings of the machine *host*, whose sysfs is *sys*; *store* is the file of the records."""

    procfs: Procfs
    sys: Path
    host: HostSettings
    caches: CacheTuner
    store: PurePosixPath
    options: TuningOptions
    _stale: str = ""
    """The reason why the records could not follow the settings in the last pass; empty if they did."""

    def tune(self, instances: Mapping[str, TunedInstance]) -> Tuned:
        """Adapt the settings to *instances*, by pod UID. Raises :class:`HostError`, ``OSError`` and ``ValueError``."""
        machine = read_online_cpus(self.sys)
        occupied = CpuSet.union(each.cpus for each in instances.values())
        records = self._records()
        irqbalance = find_irqbalance(self.procfs)
        requests = _cache_requests(instances)
        cache_plan = self.caches.plan(requests if self.options.caches else ())
        found = [
            *self._host_errors(occupied),
            *(each.unset(_FORBIDDEN_CACHE) for each in requests if not self.options.caches),
            *cache_plan.unmet,
            *self._interrupts(occupied if self.options.interrupts else CpuSet(), machine.online),
            *self._work_queues(occupied if self.options.work_queues else CpuSet(), machine.online, records),
            *self._latencies(instances, machine.present, records),
            *self._device_power(instances, records),
            *self._irqbalance(irqbalance, occupied if self.options.interrupts else CpuSet()),
            *self.caches.shared(cache_plan, records),
        ]
        settings = [each for each in found if isinstance(each, Setting)]
        unset = [each for each in found if isinstance(each, Unset)]
        paths = {setting.path for setting in settings}
        lasting = [
            path
            for path in records
            if path not in paths
            and (irqbalance is not None if path == _IRQBALANCE else (self.host.root / path).exists())
        ]
        decision, recorded, recordable = decide(settings, records, lasting), records, True
        if decision.unrecorded:
            try:
                self._publish(decision.records)
                recorded = decision.records
            except HostError as error:  # nothing is changed that could not be restored
                recordable = False
                reason = f"the machine's settings stay as they are: {explain(error)}"
                unset.append(Unset("all", str(self.store), reason))
                decision = decide(settings, records, lasting, recordable=recordable)
        refusals = [*filter(None, (self._write(change, irqbalance) for change in decision.changes))]
        managed = [each.why for each in refusals if isinstance(each.why, ManagedInterrupt)]
        unset += [each.why for each in refusals if isinstance(each.why, Unset)]
        unset += self.caches.apply(cache_plan, creating=recordable)
        refused = [each.path for each in refusals]
        self._follow_up(recorded, settled(decision, refused, late=[_IRQBALANCE]))
        kinds = Counter[str]([each.kind for each in unset] + ["interrupt"] * len(managed))
        return Tuned(tuple(sentences(unset, managed, occupied)), kinds, self._unset_by_pod(instances, unset))

    def _unset_by_pod(
        self, instances: Mapping[str, TunedInstance], unset: list[Unset]
    ) -> Mapping[str, tuple[str, ...]]:
        """Return pod UID → its own part of *unset*, for pods that have one."""
        found = {}
        for pod_uid, instance in instances.items() if unset else ():
            own = {pod_uid, instance_group(pod_uid), RESCTRL, *map(d3cold_path, instance.tuning.devices)}
            own |= {path(cpu) for cpu in instance.cpus for path in (latency_path, self.host.governor)}
            if reasons := tuple(str(each) for each in unset if each.path in own):
                found[pod_uid] = reasons
        return found

    def _host_errors(self, occupied: CpuSet) -> Iterator[Unset]:
        if occupied and (error := self.host.error()):
            yield Unset("all", "", error, remedy="run it with hostPID, as user 0 and with CAP_SYS_PTRACE")

    def _interrupts(self, occupied: CpuSet, online: CpuSet) -> Iterator[Setting]:
        default = self.host.cpus(DEFAULT_AFFINITY)
        if default is None:
            return
        # It comes first, because new interrupts begin with it.
        yield Setting(DEFAULT_AFFINITY, "interrupt", str(default), AwayFrom(occupied, online))
        numa_nodes: dict[int, CpuSet] = {}
        for line in self.host.interrupts():
            if line.numa_node not in numa_nodes:
                path = f"sys/devices/system/node/node{line.numa_node}/cpulist"
                numa_nodes[line.numa_node] = self.host.cpus(path) or CpuSet()
            # A device's own vectors go to its NUMA node, where its instance's vCPUs are, but to the shared CPUs. The interrupt does not
            # show which instance has the device, and on a vCPU's CPU the handler would stop the guest. Hardware with posted interrupts
            # delivers them to the vCPU regardless of this setting (intel_ir_set_affinity).
            rule = AwayFrom(occupied, online, numa_nodes[line.numa_node], prefer_near=line.handlers.startswith(_VFIO))
            yield Setting(line.path, "interrupt", str(line.cpus), rule, line.handlers, DEFAULT_AFFINITY, placed=True)

    def _work_queues(self, occupied: CpuSet, online: CpuSet, records: Mapping[str, Record]) -> Iterator[Setting]:
        cpus = self.host.work_queue_cpus()
        if cpus is not None:
            # CPUs of others' partitions are left out of the written value, which would include them again (workqueue_set_unbound_cpumask).
            touched = bool(occupied) or WORK_QUEUES in records
            avoided = occupied | self.host.isolated_work_queue_cpus() if touched else CpuSet()
            yield Setting(WORK_QUEUES, "work_queue", str(cpus), AwayFrom(avoided, online))

    def _latencies(
        self, instances: Mapping[str, TunedInstance], present: CpuSet, records: Mapping[str, Record]
    ) -> Iterator[Setting | Unset]:
        low = {
            cpu: pod_uid
            for pod_uid, each in instances.items()
            if each.tuning.latency == "low" and self.options.latency
            for cpu in each.cpus
        }
        refused = {each for each in instances if instances[each].tuning.latency == "low"} - {*low.values()}
        for pod_uid in sorted(refused):
            reason = f"cannot give instance {pod_uid!r} low latency: --no-low-latency forbids it"
            yield Unset("latency", pod_uid, reason)
        wanted: dict[str, tuple[SettingKind, str | None]] = {}
        for cpu in present:
            kinds: tuple[tuple[SettingKind, str, str], ...] = (
                ("latency", latency_path(cpu), LOW_LATENCY),
                ("governor", self.host.governor(cpu), PERFORMANCE),
            )
            for kind, path, value in kinds:
                if cpu in low:  # or another CPU of the same frequency policy
                    wanted[path] = kind, value
                elif path in records:
                    wanted.setdefault(path, (kind, None))
        for path, (kind, target) in wanted.items():
            current = self.host.text(path)
            if current is not None:
                yield Setting(path, kind, current, Fixed(target))
            elif target is not None and kind == "latency":  # a machine may have no driver for frequencies
                yield Unset(kind, path, f"cannot read /{path}: the kernel has none (CONFIG_PM)")

    def _device_power(self, instances: Mapping[str, TunedInstance], records: Mapping[str, Record]) -> Iterator[Setting]:
        """Yield the power settings of instances' devices: after D3cold some GPUs answer all reads with ones.

        A pod may name any device, so only devices bound to a passthrough driver count.
        """
        held = {
            d3cold_path(each)
            for instance in instances.values()
            for each in instance.tuning.devices
            if self.host.has_vfio_driver(each)
        }
        for path in sorted(held | {path for path in records if path.endswith(_D3COLD)}):
            current = self.host.text(path)
            if current is not None:  # without power management there is no such setting, and no device loses its power
                yield Setting(path, "power", current, Fixed("0" if path in held else None))

    def _irqbalance(self, irqbalance: Irqbalance | None, occupied: CpuSet) -> Iterator[Setting | Unset]:
        if irqbalance is None:
            return
        try:
            banned = irqbalance.banned()
        except HostError as error:
            if occupied:
                yield Unset("irqbalance", _IRQBALANCE, f"it may move interrupts back: {explain(error)}")
            return
        owner = str(irqbalance.pid)
        yield Setting(_IRQBALANCE, "irqbalance", str(banned), Added(occupied), owner)

    def _write(self, change: SettingChange, irqbalance: Irqbalance | None) -> _RefusedChange | None:
        """Write a value; return the refusal if it is not in force, which it also is if the former value was never changed."""
        setting = change.setting
        try:
            if setting.kind == "irqbalance" and irqbalance is not None:
                irqbalance.ban(CpuSet.parse(change.value))
            elif setting.kind == "cache":
                self.caches.share(setting, change.value)
            else:
                self.host.write(setting.path, change.value)
        except HostError as error:
            number = error.errno if isinstance(error, SettingError) else None
            if number is not None and change.value == setting.current:
                return None  # restored a value that had never been changed
            if number in _REFUSED and setting.kind == "interrupt" and setting.path != DEFAULT_AFFINITY:
                return _RefusedChange(setting.path, self._managed(change))
            return _RefusedChange(setting.path, Unset(setting.kind, setting.path, explain(error)))
        log.debug(ControllerEvent.SETTING_WRITTEN, f"/{setting.path}", change.value, setting.current)
        return None

    def _managed(self, change: SettingChange) -> ManagedInterrupt | None:
        """Return the interrupt that refuses *change*; ``None`` if it is delivered to the wanted CPUs nevertheless."""
        number = change.setting.path.split("/")[-2]
        effective = self.host.cpus(f"{INTERRUPTS}/{number}/effective_affinity_list")
        # When an interrupt is set up, the kernel chooses one of several CPUs for good; it must not be an instance's.
        if effective is not None and effective <= CpuSet.parse(change.value):
            return None
        return ManagedInterrupt(number, change.setting.owner)

    # -- records -----------------------------------------------------------------------------------------------------

    def _records(self) -> Mapping[str, Record]:
        try:
            return parse_records(read_at_once(self.store).decode(), self._boot())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            log.error(ControllerEvent.SETTINGS_RECORDS_LOST, self.store, explain(error))  # noqa: TRY400
            discard(self.store)
            return {}

    def _publish(self, records: Mapping[str, Record]) -> None:
        """Write the records to a directory that no pod reaches. Raises :class:`HostError`."""
        with suppress(OSError):  # in that case the records cannot be written either
            Path(self.store.parent).mkdir(mode=0o700, parents=True, exist_ok=True)
        publish(self.store, format_records(records, self._boot()).encode())

    def _boot(self) -> str:
        return self.procfs.setting("kernel/random/boot_id")

    def _follow_up(self, recorded: Mapping[str, Record], left: Mapping[str, Record]) -> None:
        """Write the records that remain after the settings were written. If that fails, *recorded* stays valid."""
        error = ""
        if left != recorded:
            try:
                self._publish(left)
            except HostError as failure:
                error = explain(failure)
        if error and error != self._stale:
            log.warning(ControllerEvent.SETTINGS_RECORDS_STALE, self.store, error)
        self._stale = error


def _cache_requests(instances: Mapping[str, TunedInstance]) -> tuple[CacheRequest, ...]:
    return tuple(
        CacheRequest(pod_uid, each.cpus, each.tuning)
        for pod_uid, each in instances.items()
        if each.tuning.cache_ways is not None or each.tuning.memory_bandwidth is not None
    )
