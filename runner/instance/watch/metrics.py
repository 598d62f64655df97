"""The metrics of an instance; imported at the first request for them.

Their names are in :mod:`runner.protocol.instance_metrics`. The instance's own endpoint has all of them; the controller gets sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError
from runner.base.values import short_text, whole_number
from runner.base.version import VERSION
from runner.instance.guest_state import RunningQemu
from runner.instance.supervisor import Supervisor
from runner.instance.watch.foreign_time import ForeignTime
from runner.kernel.cgroup import Cgroup
from runner.kernel.procfs import LinkTraffic
from runner.kernel.small_files import read_image_digest
from runner.kernel.waiting import shortages
from runner.placement.threads import Receipt
from runner.plan.instance import InstancePlan
from runner.plan.network_plan import BridgedPlan, MacvtapPlan
from runner.protocol.instance_metrics import PHASES, QEMU_UPDATE_OUTCOMES, RENEWAL_OUTCOMES, RESTARTED_ROLES, Samples
from runner.protocol.qmp import QmpError

DISKS_WITHIN = 0.5
"""Seconds that QEMU may take to answer about its disks; a silent QEMU must not delay a scrape."""

_DISK_COUNTERS = {
    "disk_read_bytes_total": ("rd_bytes", 1),
    "disk_reads_total": ("rd_operations", 1),
    "disk_read_seconds_total": ("rd_total_time_ns", 1e-9),
    "disk_written_bytes_total": ("wr_bytes", 1),
    "disk_writes_total": ("wr_operations", 1),
    "disk_write_seconds_total": ("wr_total_time_ns", 1e-9),
    "disk_flushes_total": ("flush_operations", 1),
    "disk_flush_seconds_total": ("flush_total_time_ns", 1e-9),
}
"""Family → the key of ``BlockDeviceStats`` (``qapi/block-core.json``), and its unit."""

NamedSamples = tuple[str, Samples]
"""The name of a family, and its samples."""


def state_samples(supervisor: Supervisor, plan: InstancePlan) -> Iterator[NamedSamples]:
    """Yield the samples of the instance of *plan* that need no reading of its threads and no question to QEMU."""
    yield from _state(supervisor, plan)
    yield from _counters(supervisor)


async def all_samples(
    supervisor: Supervisor, plan: InstancePlan, receipt: Receipt | None, foreign: ForeignTime | None
) -> list[NamedSamples]:
    """Return all samples; those of threads, disks and memory only with *receipt*, while the guest runs."""
    samples = [*state_samples(supervisor, plan), *_networks(supervisor, plan)]
    if receipt is not None:
        samples += _placement(supervisor, receipt, foreign)
        if (machine := supervisor.guest_state.machine) is not None:
            samples += await _disks(supervisor, plan, machine)
    return samples


def _state(supervisor: Supervisor, plan: InstancePlan) -> Iterator[NamedSamples]:
    pod, state = plan.pod, supervisor.guest_state
    # Prometheus gives its targets the labels instance, job, namespace, pod, node and container (the Prometheus operator's
    # PodMonitor) and renames ours of the same names to exported_…: so `name`, as in KubeVirt's kubevirt_vmi_info and in
    # cAdvisor, and `pod_name`, `pod_namespace`, as in NVIDIA's dcgm-exporter (--use-old-namespace): the variables' names.
    yield "info", [((plan.name, pod.name, pod.namespace, pod.node, plan.placement.backend), 1)]
    yield "build_info", [((VERSION, supervisor.renewal.digest or read_image_digest()), 1)]
    if state.machine is not None:
        yield "qemu_info", [((state.machine.monitor.version,), 1)]
        yield "qemu_generation", [((), state.machine.updates)]
    yield "generation", [((), supervisor.renewal.generation)]
    yield "emulated", [((), plan.machine.accel == "tcg")]
    yield "guest_state", [((phase,), state.phase == phase) for phase in PHASES]
    yield "guest_uptime_seconds", [] if state.since is None else [((), trio.current_time() - state.since)]
    yield "guest_ready", [] if state.phase != "running" else [((), not state.unready)]
    yield "guest_unready", [((name,), bool(sentence)) for name, sentence in state.reasons()]


def _counters(supervisor: Supervisor) -> Iterator[NamedSamples]:
    counters, orphans, faults = supervisor.counters, supervisor.processes.orphans, supervisor.faults
    yield "console_bytes_total", [((), counters.console)]
    yield "guest_resets_total", [((), counters.resets)]
    # From the start, with 0: Prometheus sees no increase in a series that begins with 1.
    yield "child_restarts_total", [((role,), counters.restarts[role]) for role in RESTARTED_ROLES]
    yield "orphans_reaped_total", [((), orphans)]
    yield "swept_total", [((), counters.swept)]
    yield "renewals_total", [((outcome,), counters.renewals[outcome]) for outcome in RENEWAL_OUTCOMES]
    yield "qemu_updates_total", [((outcome,), counters.qemu_updates[outcome]) for outcome in QEMU_UPDATE_OUTCOMES]
    yield "shortages_total", [((), shortages.count)]
    yield "release_faults_total", [((), len(faults.sentences))]


def _placement(supervisor: Supervisor, receipt: Receipt, foreign: ForeignTime | None) -> Iterator[NamedSamples]:
    strays = len(receipt.violations())
    yield "guarantee_enforced", [((), receipt.guarantee == "enforced")]
    yield "placement_holds", [((), not strays)]
    yield "placement_strays", [((), strays)]
    yield "cpus_offline", [((), len(supervisor.guest_state.offline))]
    yield from _vcpus(supervisor, receipt, {} if foreign is None else foreign.read(supervisor.procfs))
    yield "memory_charged_bytes", _charged(supervisor, receipt)


def _vcpus(supervisor: Supervisor, receipt: Receipt, foreign: Mapping[int, float]) -> Iterator[NamedSamples]:
    yield "vcpus", [((), len(receipt.rules.pins))]
    ran: dict[tuple[object, ...], float] = {}
    waited: dict[tuple[object, ...], float] = {}
    involuntary: dict[tuple[object, ...], float] = {}
    stolen: dict[tuple[object, ...], float] = {}
    steal = supervisor.procfs.steal()
    pins = {vcpu: cpu for vcpu, cpu in enumerate(receipt.rules.pins) if cpu is not None}
    for each in receipt.threads:
        if each.vcpu is None or (times := supervisor.procfs.times(each.thread.pid, each.thread.tid)) is None:
            continue
        vcpu = (each.vcpu, each.thread.cpus)
        involuntary[vcpu] = times.involuntary
        if times.ran is not None and times.waited is not None:
            ran[vcpu], waited[vcpu] = times.ran, times.waited
        if (cpu := pins.get(each.vcpu)) in steal:
            stolen[vcpu] = steal[cpu]
    taken = {(vcpu, CpuSet([pins[vcpu]])): seconds for vcpu, seconds in sorted(foreign.items()) if vcpu in pins}
    yield "vcpu_cpu_seconds_total", ran.items()
    yield "vcpu_run_delay_seconds_total", waited.items()
    yield "vcpu_involuntary_switches_total", involuntary.items()
    yield "vcpu_steal_seconds_total", stolen.items()
    yield "vcpu_foreign_seconds_total", taken.items()


def _networks(supervisor: Supervisor, plan: InstancePlan) -> Iterator[NamedSamples]:
    """Yield the guest's received and sent traffic; for passt and inherited descriptors the kernel has no counters here."""
    links = supervisor.procfs.links()
    received, sent = dict[str, LinkTraffic](), dict[str, LinkTraffic]()
    for index, network in enumerate(plan.networks):
        match network:
            case BridgedPlan(tap=tap) if tap in links:  # the tap sends what the guest receives
                sent[str(index)], received[str(index)] = links[tap]
            case MacvtapPlan(link=link) if link in links:
                received[str(index)], sent[str(index)] = links[link]
    for way, traffic in (("receive", received), ("transmit", sent)):
        for unit in ("bytes", "packets", "dropped"):
            yield f"network_{way}_{unit}_total", [((each,), getattr(traffic[each], unit)) for each in traffic]


async def _disks(supervisor: Supervisor, plan: InstancePlan, machine: RunningQemu) -> list[NamedSamples]:
    """Return the guest's disk statistics, by the name of each disk; nothing while QEMU does not answer.

    Each name makes new series, so names that QEMU makes up are dropped: only those of *plan* and of disks that may be attached count.
    """
    disks = plan.machine.disks
    names = {disk.name for disk in disks} | {f"disk{len(disks) + number}" for number in range(plan.machine.slots)}

    def parse(reply: Any) -> list[NamedSamples]:
        # A virtio device is a child of the bus device that has the name: /machine/peripheral/disk0/virtio-backend.
        stats = {
            short_text(each["qdev"]).removeprefix("/machine/peripheral/").partition("/")[0]: each["stats"]
            for each in reply
            if each.get("qdev")
        }
        return [
            (
                name,
                [
                    ((disk,), whole_number(each[key]) * unit)
                    for disk, each in stats.items()
                    if disk in names and key in each
                ],
            )
            for name, (key, unit) in _DISK_COUNTERS.items()
        ]

    monitor = machine.monitor
    # Clients of the metrics, which any host of the network may be, must not queue commands for a QEMU that does not answer.
    if supervisor.guest_state.qemu_silent or monitor.owed_for > DISKS_WITHIN:
        return []
    try:
        return await monitor.within(DISKS_WITHIN, lambda: monitor.query("query-blockstats", parse))
    except QmpError:
        return []


def _charged(supervisor: Supervisor, receipt: Receipt) -> Samples:
    cgroups = receipt.rules.cgroups
    path = supervisor.procfs.cgroup() if cgroups is None else cgroups.pod
    try:
        charge = Cgroup(supervisor.roots.cgroup).at(path).charge()
    except (HostError, ValueError):  # cgroup v2, or the pod's part of it, is not mounted here
        return ()
    return ((("memory",), charge.memory), (("hugetlb",), charge.hugetlb))
