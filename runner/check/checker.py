"""Reads the facts that several checks need, and makes every check that applies here; an unreadable fact becomes a judgement.

Every file is read below :attr:`CheckedHost.root`, so that a recorded tree of another machine can be judged as well. Three things are tried
for real, each on a short-lived object of our own: mbind(2) of one page, a virtual machine without vCPUs, and a request to the controller;
on request also a trial guest, which takes longer.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Mapping
from functools import partial
from pathlib import PurePosixPath
from typing import Annotated, Literal, TypedDict

import attrs
import trio
import trio.to_thread

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, RunnerError, SpecError, explain
from runner.base.judgement import Judgement, Level
from runner.base.subject import FORMAT, Subject, rank, worst
from runner.base.tasks import capture
from runner.base.values import frozen
from runner.check import cpus, devices, kernel, node, programs
from runner.check.checks import TIMEOUT, Check, CheckContext, CheckedHost, KubeletState, Place, place_of
from runner.facts.host import Kvm
from runner.facts.json_types import JudgementDocument
from runner.facts.roots import Roots
from runner.host.facts_reader import read_host_facts
from runner.host.own_pod import read_pod
from runner.inspect.cpu_state import settled_cpu_state
from runner.kernel.character_devices import probe_kvm, try_kvm
from runner.kernel.child_processes import Processes, dying_with_us, open_processes
from runner.kernel.file_prober import probe_file
from runner.kernel.hardware_reader import read_hardware, read_online_cpus
from runner.kernel.kernel_facts import pid_namespace
from runner.kernel.peers import INIT_PID_NAMESPACE
from runner.kernel.procfs import Procfs
from runner.plan.host_checks import VFIO_MEMLOCK_OVERHEAD, bytes_to_lock
from runner.plan.instance import InstancePlan, plan_instance
from runner.protocol.controller_client import read_status
from runner.spec.instance import CpuSpec, InstanceSpec, parse_instance
from runner.spec.rules import counted

CHECKS = tuple(
    each
    for topic in (kernel, cpus, devices, programs, node)
    for each in vars(topic).values()
    if isinstance(each, Check)
)
"""Every check, by topic, and within a topic in the order of the source."""
SPEC = Subject("spec", "run makes the same plan, and refuses what it refuses")
CHANGE_SPEC = "change the spec, or what it stands on"
"""The remedy if the plan names no other."""

PAUSE, READINGS = 0.1, 20
"""Seconds between two readings of the kubelet's state, and the number of readings after which it counts as frozen."""


class CheckDocument(TypedDict):
    """The JSON of ``check``: the judgements on whether this node, pod or machine is fit for instances."""

    version: Literal[2]
    place: Annotated[str, Place]
    """The place of the check, which determines what was readable."""
    verdict: Annotated[str, Level]
    """The worst level of all."""
    judgements: list[JudgementDocument]


@frozen
class CheckReport:
    """All judgements, in the order of the checks."""

    place: Place
    judgements: tuple[Judgement, ...]

    @property
    def verdict(self) -> Level:
        """The worst level of all."""
        return worst(self.judgements)

    def to_json(self) -> CheckDocument:
        """Return it as plain values."""
        return {
            "version": FORMAT,
            "place": self.place.value,
            "verdict": self.verdict.value,
            "judgements": [each.to_json() for each in self.judgements],
        }


async def check_host(host: CheckedHost, document: tuple[str, bytes] | None) -> CheckReport:
    """Return the judgements of every check that applies here; *document* is a spec's name and text.

    Raises :exc:`~runner.base.errors.HostError` where not even CPUs and NUMA nodes can be read.
    """
    prefix = () if os.getpid() == 1 else dying_with_us()
    async with open_processes(prefix) as processes:
        result = await capture(partial(_check, host, processes, document))
    return result()


async def _check(host: CheckedHost, processes: Processes, document: tuple[str, bytes] | None) -> CheckReport:
    spec, plan, of_the_plan = await _plan(host, processes, document)
    context = await _read_context(host, processes, spec, plan)
    found: dict[Check, tuple[Judgement, ...]] = {each: () for each in CHECKS if context.place in each.places}

    async def judge(check: Check) -> None:
        found[check] = await _judgements(check, context)

    async with trio.open_nursery() as nursery:
        for check in found:
            nursery.start_soon(judge, check)
    judgements = [judgement for each in found.values() for judgement in each]
    # The plan decides by some of the same judgements: each is reported once.
    judgements += [each for each in of_the_plan if not any(_covers(other, each) for other in judgements)]
    return CheckReport(context.place, tuple(judgements))


async def _judgements(check: Check, context: CheckContext) -> tuple[Judgement, ...]:
    """Make *check*; if the kernel refuses to answer, the refusal becomes the judgement."""
    try:
        answer = check.ask(context)
        return tuple(await answer if isinstance(answer, Awaitable) else answer)
    except (HostError, OSError, ValueError) as error:
        return (check.unknown(f"cannot read what it takes: {explain(error)}"),)


def _covers(judgement: Judgement, other: Judgement) -> bool:
    """Tell whether *judgement* reports the same as *other*, at no lower level."""
    return judgement.found in other.found and rank(judgement) >= rank(other) > 0


async def _plan(
    host: CheckedHost, processes: Processes, document: tuple[str, bytes] | None
) -> tuple[InstanceSpec | None, InstancePlan | None, list[Judgement]]:
    """Make the plan that ``run`` would make; its refusals become errors."""
    if document is None:
        return None, None, []
    source, text = document
    spec = None
    try:
        spec = parse_instance(source, text, host.environment)
        facts = await read_host_facts(spec, processes, Roots(), host.state_directory, None)
        plan = plan_instance(source, spec, facts)
    except SpecError as error:
        return (
            spec,
            None,
            [
                Judgement(each.path or SPEC.name, Level.ERROR, each.message, SPEC.why, each.remedy or CHANGE_SPEC)
                for each in error.problems
            ],
        )
    except RunnerError as error:
        return spec, None, [SPEC.error(explain(error), CHANGE_SPEC)]
    vcpus = counted(plan.machine.vcpus, "vCPU")
    placed = f"{source}: {vcpus} on CPUs '{plan.placement.cpus}', placement {plan.placement.backend}"
    return spec, plan, [SPEC.ok(placed), *plan.remarks]


async def _read_context(
    host: CheckedHost, processes: Processes, spec: InstanceSpec | None, plan: InstancePlan | None
) -> CheckContext:
    procfs = Procfs(host.roots.proc)
    asked = CpuSpec() if spec is None else spec.cpu
    pod = read_pod(procfs, host.environment)
    initial = pid_namespace(host.roots.proc) == INIT_PID_NAMESPACE
    place = place_of(in_initial_pid_namespace=initial, has_kubelet=host.kubelet.is_dir(), in_pod=pod is not None)
    allowed = CpuSet.parse(procfs.status()["Cpus_allowed_list"])
    wanted = len(allowed) if asked.count == "all" else asked.count
    vcpus = wanted if plan is None else plan.machine.vcpus
    hardware = read_hardware(host.root)
    socket = host.socket or asked.controller
    return CheckContext(
        host=host,
        processes=processes,
        place=place,
        pod=pod,
        in_initial_pid_namespace=initial,
        hardware=hardware,
        allowed=allowed,
        cgroup=procfs.cgroup(),
        hugepage_size=None if spec is None else spec.memory.page_size,
        lockable=plan.machine.lockable if plan is not None else _lockable(host, procfs, spec),
        cpus=allowed if plan is None else plan.placement.cpus,
        vcpus=len(allowed) if spec is None and not hardware.online <= allowed else vcpus,
        asked=asked,
        backend=None if plan is None else plan.placement.backend,
        kvm=await _kvm(host),
        socket=socket,
        controller=await ask_controller(socket),
        kubelet=await _kubelet(host) if place is Place.NODE else None,
    )


def _lockable(host: CheckedHost, procfs: Procfs, spec: InstanceSpec | None) -> int | None:
    """Return the bytes that may have to be locked if there is no plan; without a spec, for a guest with devices and all RAM."""
    if spec is None:
        return procfs.memory_total() + VFIO_MEMLOCK_OVERHEAD if (host.roots.dev / "vfio").is_dir() else 0
    if not spec.memory.lock and not spec.device:
        return 0
    vcpus, size = spec.cpu.count, spec.memory.size
    return None if vcpus == "all" or size == "limits" else bytes_to_lock(spec, max(vcpus, spec.hotplug.cpus or 0), size)


async def _kubelet(host: CheckedHost) -> KubeletState | None:
    files = node.kubelet_files(host)
    if not os.access(files.cpu_state, os.R_OK):
        return None
    return await settled_cpu_state(files, read_online_cpus(host.roots.sys), pause=PAUSE, readings=READINGS)


async def _kvm(host: CheckedHost) -> Kvm:
    device = host.roots.dev / "kvm"
    kvm = probe_kvm(device)
    trial: str | None = f"it has not answered for {TIMEOUT:g} s"
    if kvm.error is None:
        # In a thread, which is abandoned if the system call never returns.
        with trio.move_on_after(TIMEOUT):
            trial = await trio.to_thread.run_sync(try_kvm, device, abandon_on_cancel=True)
    return attrs.evolve(kvm, trial=trial)


async def ask_controller(path: PurePosixPath) -> Mapping[str, object] | str | None:
    """Return the status from the controller at *path*, the reason why it does not answer, or ``None`` without the socket's directory."""
    with trio.move_on_after(TIMEOUT):
        try:
            return await read_status(path)
        except HostError as error:
            return None if probe_file(path.parent).kind == "missing" else explain(error)
    return f"it has not answered for {TIMEOUT:g} s"
