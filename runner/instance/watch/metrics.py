"""The metrics of an instance; imported at the first request for them, with the library that writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from typing import get_args

import trio
from prometheus_client.metrics_core import Metric

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError
from runner.facts.roots import Roots
from runner.instance.supervisor import Phase, QemuUpdateOutcome, RenewalOutcome, Supervisor
from runner.instance.watch.foreign_time import ForeignTime
from runner.kernel.cgroup import Cgroup
from runner.kernel.procfs import LinkTraffic
from runner.kernel.waiting import shortages
from runner.placement.children import RESTARTS
from runner.placement.threads import Receipt
from runner.plan.instance import InstancePlan
from runner.plan.networks import BridgedPlan, MacvtapPlan
from runner.protocol.exposition import Samples, counter, gauge


def instance_metrics(
    supervisor: Supervisor, plan: InstancePlan, receipt: Receipt | None, foreign: ForeignTime | None
) -> Iterator[Metric]:
    """Yield the metrics of the instance of *plan*; those of threads and memory only with *receipt*, while the guest runs."""
    yield from _state(supervisor, plan)
    yield from _counters(supervisor)
    yield from _networks(supervisor, plan)
    if receipt is not None:
        strays = len(receipt.violations())
        enforced = receipt.guarantee == "enforced"
        yield _gauge("guarantee_enforced", "1 while the kernel keeps all others off the vCPUs' CPUs.", [((), enforced)])
        yield _gauge("placement_holds", "1 while every thread is in its place.", [((), not strays)])
        yield _gauge("placement_strays", "Threads that are not in their places.", [((), strays)])
        offline = len(supervisor.guest_state.offline)
        yield _gauge("cpus_offline", "CPUs of vCPUs that the machine has taken offline.", [((), offline)])
        yield from _vcpus(supervisor, receipt, {} if foreign is None else foreign.read())
        charged = _charged(supervisor, receipt)
        yield _gauge("memory_charged_bytes", "What the pod's cgroup is charged for.", charged, "kind")


def _gauge(name: str, text: str, samples: Samples, *labels: str) -> Metric:
    return gauge(f"instance_runner_{name}", text, samples, labels)


def _counter(name: str, text: str, samples: Samples, *labels: str) -> Metric:
    return counter(f"instance_runner_{name}", text, samples, labels)


def _version() -> Iterator[str]:
    """Yield this program's version; none where it was renewed by a directory without the metadata of its package."""
    with suppress(metadata.PackageNotFoundError):
        yield metadata.version("instance-runner")


def _state(supervisor: Supervisor, plan: InstancePlan) -> Iterator[Metric]:
    pod, state = plan.pod, supervisor.guest_state
    # Prometheus gives its targets the labels instance, job, namespace, pod, node and container (the Prometheus operator's
    # PodMonitor) and renames ours of the same names to exported_…: so `name`, as in KubeVirt's kubevirt_vmi_info and in
    # cAdvisor, and `pod_name`, `pod_namespace`, as in NVIDIA's dcgm-exporter (--use-old-namespace): the variables' names.
    identity = {"name": plan.name, "pod_name": pod.name, "pod_namespace": pod.namespace, "node_name": pod.node}
    identity["placement"] = plan.placement.backend
    yield _gauge("info", "The instance's names and placement.", [(tuple(identity.values()), 1)], *identity)
    yield _gauge("build_info", "The runner's version.", [((each,), 1) for each in _version()], "version")
    yield _gauge("emulated", "1 while the guest is emulated in software.", [((), plan.machine.accel == "tcg")])
    phases = [((phase,), state.phase == phase) for phase in get_args(Phase)]
    yield _gauge("guest_state", "1 for the state that the guest is in.", phases, "state")
    uptime = [] if state.since is None else [((), trio.current_time() - state.since)]
    yield _gauge("guest_uptime_seconds", "How long the guest has run.", uptime)
    state.ask_qemu()  # the answer is for the next scrape: this one must not wait
    ready = [] if state.phase != "running" else [((), not state.unready)]
    yield _gauge("guest_ready", "1 while the guest is ready, but for threads that are not in their places.", ready)
    reasons = [((name,), bool(sentence)) for name, sentence in state.reasons()]
    yield _gauge("guest_unready", "1 for each reason why the guest is not ready.", reasons, "reason")


def _counters(supervisor: Supervisor) -> Iterator[Metric]:
    counters, orphans, faults = supervisor.counters, supervisor.processes.orphans, supervisor.faults
    # From the start, with 0: Prometheus sees no increase in a series that begins with 1.
    restarts = [((role,), counters.restarts[role]) for role in sorted(RESTARTS)]
    console = [((), counters.console)]
    yield _counter("console_bytes_total", "Bytes that the guest has written to its console.", console)
    yield _counter("guest_resets_total", "Resets of the guest.", [((), counters.resets)])
    yield _counter("child_restarts_total", "Children that ended and were started again.", restarts, "role")
    yield _counter("orphans_reaped_total", "Orphans of other processes that were reaped.", [((), orphans)])
    yield _counter("swept_total", "Threads of others moved off the vCPUs' CPUs.", [((), counters.swept)])
    renewals = [((outcome,), counters.renewals[outcome]) for outcome in get_args(RenewalOutcome)]
    yield _counter("renewals_total", "Renewals of the runner under the guest that runs.", renewals, "outcome")
    updates = [((outcome,), counters.qemu_updates[outcome]) for outcome in get_args(QemuUpdateOutcome)]
    yield _counter("qemu_updates_total", "Updates of QEMU under the guest that runs.", updates, "outcome")
    short = [((), shortages.count)]
    yield _counter("shortages_total", "Calls that were made again as the kernel was short of something.", short)
    yield _counter("release_faults_total", "What could not be released.", [((), len(faults.sentences))])


def _vcpus(supervisor: Supervisor, receipt: Receipt, foreign: Mapping[int, float]) -> Iterator[Metric]:
    yield _gauge("vcpus", "vCPUs that the guest has.", [((), len(receipt.rules.pins))])
    ran: dict[tuple[object, ...], float] = {}
    waited: dict[tuple[object, ...], float] = {}
    involuntary: dict[tuple[object, ...], float] = {}
    stolen: dict[tuple[object, ...], float] = {}
    steal, pins = (
        supervisor.procfs.steal(),
        {vcpu: cpu for vcpu, cpu in enumerate(receipt.rules.pins) if cpu is not None},
    )
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
    if receipt.rules.shared:
        absent = " Absent: the vCPUs have no CPUs of their own."
    else:
        absent = "" if foreign else " Absent: the kernel has no /proc/schedstat (CONFIG_SCHEDSTATS)."
    for name, text, values in (
        ("cpu_seconds", "Time the vCPU has run.", ran),
        ("run_delay_seconds", "Time it waited for its CPU; the guest sees it stolen.", waited),
        ("involuntary_switches", "Times something else took its CPU.", involuntary),
        ("steal_seconds", "Time a hypervisor below this host took from its CPU.", stolen),
        ("foreign_seconds", "Time other tasks, also the kernel's, ran on its CPU since it was pinned." + absent, taken),
    ):
        yield _counter(f"vcpu_{name}_total", text, values.items(), "vcpu", "cpu")


def _networks(supervisor: Supervisor, plan: InstancePlan) -> Iterator[Metric]:
    """Yield what the guest has received and sent; of passt and inherited descriptors the kernel has no counters here."""
    links = supervisor.procfs.links()
    received, sent = dict[str, LinkTraffic](), dict[str, LinkTraffic]()
    for index, network in enumerate(plan.networks):
        match network:
            case BridgedPlan(tap=tap) if tap in links:  # what the guest receives, its tap sends
                sent[str(index)], received[str(index)] = links[tap]
            case MacvtapPlan(link=link) if link in links:
                received[str(index)], sent[str(index)] = links[link]
    yield _counter("network_receive_bytes_total", "Bytes the guest has received.", _each(received, "bytes"), "network")
    yield _counter("network_receive_packets_total", "Packets of these.", _each(received, "packets"), "network")
    yield _counter("network_receive_dropped_total", "Packets to it, lost.", _each(received, "dropped"), "network")
    yield _counter("network_transmit_bytes_total", "Bytes the guest has sent.", _each(sent, "bytes"), "network")
    yield _counter("network_transmit_packets_total", "Packets of these.", _each(sent, "packets"), "network")
    yield _counter("network_transmit_dropped_total", "Packets of it, lost.", _each(sent, "dropped"), "network")


def _each(traffic: Mapping[str, LinkTraffic], unit: str) -> Samples:
    return [((network,), getattr(each, unit)) for network, each in traffic.items()]


def _charged(supervisor: Supervisor, receipt: Receipt) -> Samples:
    cgroups = receipt.rules.cgroups
    path = supervisor.procfs.cgroup() if cgroups is None else cgroups.pod
    try:
        charge = Cgroup(Roots().cgroup).at(path).charge()
    except (HostError, ValueError):  # no cgroup v2 is mounted here, or not the pod's
        return ()
    return ((("memory",), charge.memory), (("hugetlb",), charge.hugetlb))
