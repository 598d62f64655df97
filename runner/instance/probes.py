"""Probes and metrics of an instance by HTTP; imported only where the command line asks for them.

========== =================================================================================================
/healthz   200 for as long as this program answers; the body says whether the guest starts, runs or stops
/readyz    200 while the guest runs, no stop was requested, and every thread is in its place
/metrics   text exposition format 0.0.4
========== =================================================================================================
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import get_args

import attrs
import trio

from runner.errors import HostError, explain
from runner.facts.roots import Roots
from runner.instance.supervisor import Phase, Supervisor
from runner.kernel.cgroup import Cgroup
from runner.placement.threads import Receipt, sentences
from runner.plan.instance import InstancePlan
from runner.plan.networks import BridgedPlan
from runner.protocol.http import (
    Exposition,
    HttpResponse,
    labels,
    not_found,
    ok,
    open_http_listeners,
    serve_http,
    unavailable,
)

log = logging.getLogger(__name__)

READ_AGAIN = 1.0
"""Seconds for which one reading of all threads answers every request: it is three files for each of them."""


@attrs.define
class Probes:
    """Answers requests."""

    supervisor: Supervisor
    plan: InstancePlan
    _receipt: Receipt | None = None
    _read_at: float = 0.0

    def show(self, target: str) -> HttpResponse:
        """Return the response to a request for *target*."""
        try:
            if target == "/metrics":
                return HttpResponse(ok().status, self._metrics())
            if target == "/healthz":
                return ok(self.supervisor.guest_state.phase)
            if target == "/readyz":
                return self._ready()
        except HostError as error:
            return unavailable(explain(error))
        return not_found(("/metrics", "/healthz", "/readyz"))

    def _ready(self) -> HttpResponse:
        receipt = self._now()
        if receipt is None:
            return unavailable(self.supervisor.guest_state.phase)
        violations = receipt.violations()
        return unavailable("\n".join(sentences(violations))) if violations else ok()

    def _now(self) -> Receipt | None:
        """Return where every thread is, read at most :data:`READ_AGAIN` seconds ago; ``None`` unless the guest runs."""
        read, now = self.supervisor.guest_state.read, trio.current_time()
        if read is None:
            return None
        if self._receipt is None or now - self._read_at > READ_AGAIN:
            self._receipt, self._read_at = read(), now
        return self._receipt

    def _metrics(self) -> str:
        exposition, receipt = Exposition("instance_runner"), self._now()
        self._add_state(exposition)
        self._add_counters(exposition)
        if receipt is not None:
            strays = len(receipt.violations())
            charged = self._charged(receipt)
            exposition.add("placement_holds", "gauge", "1 while every thread is in its place.", {"": not strays})
            exposition.add("placement_strays", "gauge", "Threads that are not in their places.", {"": strays})
            self._add_vcpus(exposition, receipt)
            exposition.add("memory_charged_bytes", "gauge", "What the pod's cgroup is charged for.", charged)
        return exposition.text()

    def _add_state(self, exposition: Exposition) -> None:
        plan, pod, state = self.plan, self.plan.pod, self.supervisor.guest_state
        identity = labels(
            instance=plan.name, namespace=pod.namespace, pod=pod.name, node=pod.node, placement=plan.placement.backend
        )
        phases = {labels(state=phase): state.phase == phase for phase in get_args(Phase)}
        uptime = {} if state.since is None else {"": trio.current_time() - state.since}
        exposition.add("info", "gauge", "The instance's names and placement.", {identity: 1})
        exposition.add("guest_state", "gauge", "1 for the state that the guest is in.", phases)
        exposition.add("guest_uptime_seconds", "gauge", "How long the guest has run.", uptime)

    def _add_counters(self, exposition: Exposition) -> None:
        counters, orphans, faults = self.supervisor.counters, self.supervisor.processes.orphans, self.supervisor.faults
        restarts = {labels(role=role): count for role, count in sorted(counters.restarts.items())}
        add = exposition.add
        add(
            "console_bytes_total", "counter", "Bytes that the guest has written to its console.", {"": counters.console}
        )
        add("child_restarts_total", "counter", "Children that ended and were started again.", restarts)
        add("orphans_reaped_total", "counter", "Orphans of other processes that were reaped.", {"": orphans})
        add("swept_total", "counter", "Threads of others moved off the vCPUs' CPUs.", {"": counters.swept})
        add("release_faults_total", "counter", "What could not be released.", {"": len(faults.sentences)})

    def _add_vcpus(self, exposition: Exposition, receipt: Receipt) -> None:
        ran: dict[str, float] = {}
        waited: dict[str, float] = {}
        involuntary: dict[str, float] = {}
        stolen: dict[str, float] = {}
        steal = self.supervisor.procfs.steal()
        for each in receipt.threads:
            if each.vcpu is None or (times := self.supervisor.procfs.times(each.thread.pid, each.thread.tid)) is None:
                continue
            vcpu = labels(vcpu=each.vcpu, cpu=each.thread.cpus)
            involuntary[vcpu] = times.involuntary
            if times.ran is not None and times.waited is not None:
                ran[vcpu], waited[vcpu] = times.ran, times.waited
            if (cpu := self.plan.placement.pins[each.vcpu]) in steal:
                stolen[vcpu] = steal[cpu]
        add = exposition.add
        add("vcpu_cpu_seconds_total", "counter", "Time the vCPU has run.", ran)
        add("vcpu_run_delay_seconds_total", "counter", "Time it waited for its CPU; the guest sees it stolen.", waited)
        add("vcpu_involuntary_switches_total", "counter", "Times something else took its CPU.", involuntary)
        add("vcpu_steal_seconds_total", "counter", "Time a hypervisor below this host took from its CPU.", stolen)

    def _charged(self, receipt: Receipt) -> Mapping[str, float]:
        cgroups = receipt.rules.cgroups
        path = self.supervisor.procfs.cgroup() if cgroups is None else cgroups.pod
        try:
            charge = Cgroup(Roots().cgroup).at(path).charge()
        except (HostError, ValueError):  # no cgroup v2 is mounted here, or not the pod's
            return {}
        return {labels(kind="memory"): charge.memory, labels(kind="hugetlb"): charge.hugetlb}


@asynccontextmanager
async def probes_served(supervisor: Supervisor, plan: InstancePlan, address: tuple[str, int]) -> AsyncIterator[None]:
    """Answer at *address* for as long as the block runs; see :func:`~runner.protocol.http.parse_address`."""
    listeners = await open_http_listeners(*address)
    log.info("probes and metrics are served port=%d", listeners[0].socket.getsockname()[1])
    taken = [each.pod.name for each in plan.networks if isinstance(each, BridgedPlan) and each.pod is not None]
    if taken:
        log.warning(
            "the guest has the address of %s: connections to it reach the guest, and not --http", ", ".join(taken)
        )
    async with supervisor.background_task(partial(serve_http, listeners, Probes(supervisor, plan).show)):
        yield
