"""Reads what the judgements need and calls all of them; what cannot be read is a finding of its own, not a guess.

Every file is read below :attr:`CheckedHost.root`, so that a recorded tree of another machine can be judged as well. Three
things are tried for real, each on an object of our own that is gone a moment later: mbind(2) of one page, a virtual machine
without vCPUs, a request to the controller; and where it is asked for a guest, which takes more than a moment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePosixPath

import attrs
import trio
import trio.to_thread

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, RunnerError, SpecError, explain
from runner.base.tasks import capture
from runner.check import device_rights, programs
from runner.check.context import CheckContext, CheckedHost
from runner.check.finding import Check, CheckReport, Finding, Level, Place, place_of
from runner.check.program_trials import try_programs
from runner.check.questions import answers
from runner.facts.host import Kvm
from runner.facts.roots import Roots
from runner.host.discover import SYSTEM_DIRECTORIES, read_host_facts, read_pod
from runner.host.trial_guest import try_guest
from runner.inspect.cpu_state import settled_cpu_state
from runner.kernel.character_devices import probe_kvm, try_kvm
from runner.kernel.files import find_program, probe_file
from runner.kernel.kubelet_files import Frozen, attempt, is_registered
from runner.kernel.peers import INIT_PID_NAMESPACE
from runner.kernel.processes import Processes, dying_with_us, open_processes
from runner.kernel.procfs import Procfs
from runner.kernel.settings import pid_namespace
from runner.kernel.sysfs import read_hardware, read_online_cpus
from runner.kubelet.claims import DRIVER_SOCKETS
from runner.kubelet.state import CpuState
from runner.kubelet.state_files import KubeletFiles, parse_memory_state
from runner.plan.host_checks import VFIO_MEMLOCK_OVERHEAD, bytes_to_lock
from runner.plan.instance import InstancePlan, plan_instance
from runner.protocol.controller_client import read_status
from runner.spec.instance import CpuSpec, InstanceSpec, parse_instance

SPEC = Check("spec", "run refuses what the plan refuses, and warns of the same second-best choices")
CHANGE_SPEC = "change the spec, or what it stands on"
"""The remedy where the plan names no other."""

TIMEOUT = 20.0
"""Seconds that the kernel or the controller may take to answer: a busy machine is slow, not broken."""

PAUSE, READINGS = 0.1, 20
"""Seconds between two readings of the kubelet's state, and the number of readings after which it counts as frozen."""


async def check_host(host: CheckedHost, document: tuple[str, bytes] | None) -> CheckReport:
    """Return the findings of every check that applies here; *document* is a spec's name and text.

    Raises :exc:`~runner.base.errors.HostError` where not even CPUs and NUMA nodes can be read.
    """
    prefix = () if os.getpid() == 1 else dying_with_us()
    async with open_processes(prefix) as processes:
        result = await capture(partial(_check, host, processes, document))
    return result()


async def _check(host: CheckedHost, processes: Processes, document: tuple[str, bytes] | None) -> CheckReport:
    spec, plan, of_the_plan = await _plan(host, processes, document)
    context = await _read_context(host, spec, plan)
    findings = list(answers(host, context))
    kvm = await _kvm(host)
    findings.append(device_rights.judge_kvm(kvm))
    if context.place is not Place.NODE:  # the programs that count are those in the container's image
        findings += await try_programs(processes)
    if host.try_guest:
        findings.append(await _trial_guest(processes, CpuSpec() if spec is None else spec.cpu, kvm))
    findings += await _services(host, context)
    # The plan decides by some of the same judgements: a finding is reported once.
    findings += [each for each in of_the_plan if not any(_covers(other, each) for other in findings)]
    return CheckReport(context.place, tuple(findings))


def _covers(finding: Finding, other: Finding) -> bool:
    """Tell whether *finding* reports what *other* reports, at no lower level."""
    order = list(Level)
    return finding.found in other.found and order.index(finding.level) >= order.index(other.level) > 0


async def _plan(
    host: CheckedHost, processes: Processes, document: tuple[str, bytes] | None
) -> tuple[InstanceSpec | None, InstancePlan | None, list[Finding]]:
    """Make the plan that ``run`` would make; what it refuses is fatal, its remarks are warnings."""
    if document is None:
        return None, None, []
    source, text = document
    spec = None
    try:
        spec = parse_instance(source, text, host.environment)
        facts = await read_host_facts(spec, processes, Roots(), host.state_directory, None)
        plan = plan_instance(source, spec, facts)
    except SpecError as error:
        return spec, None, [SPEC.fatal(each.statement, each.remedy or CHANGE_SPEC) for each in error.problems]
    except RunnerError as error:
        return spec, None, [SPEC.fatal(explain(error), CHANGE_SPEC)]
    remarks = [SPEC.warning(remark.message, remark.remedy or CHANGE_SPEC) for remark in plan.remarks]
    placed = f"{source}: {plan.machine.vcpus} vCPUs on CPUs '{plan.placement.cpus}', placement {plan.placement.backend}"
    return spec, plan, [SPEC.ok(placed), *remarks]


async def _read_context(host: CheckedHost, spec: InstanceSpec | None, plan: InstancePlan | None) -> CheckContext:
    procfs = Procfs(host.roots.proc)
    asked = CpuSpec() if spec is None else spec.cpu
    pod = read_pod(procfs, host.environment)
    initial = pid_namespace(host.roots.proc) == INIT_PID_NAMESPACE
    place = place_of(in_initial_pid_namespace=initial, has_kubelet=host.kubelet.is_dir(), in_pod=pod is not None)
    allowed = CpuSet.parse(procfs.status()["Cpus_allowed_list"])
    wanted = len(allowed) if asked.count == "all" else asked.count
    vcpus = wanted if plan is None else plan.machine.vcpus
    hardware = read_hardware(host.root)
    return CheckContext(
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
        placement=asked.placement,
        backend=None if plan is None else plan.placement.backend,
        socket=host.socket or asked.controller,
        kubelet=await _kubelet(host) if place is Place.NODE else None,
    )


def _lockable(host: CheckedHost, procfs: Procfs, spec: InstanceSpec | None) -> int | None:
    """Return the bytes that may have to be locked where there is no plan; without a spec, for a guest with devices and all RAM."""
    if spec is None:
        return procfs.memory_total() + VFIO_MEMLOCK_OVERHEAD if (host.roots.dev / "vfio").is_dir() else 0
    if not spec.memory.lock and not spec.device:
        return 0
    vcpus, size = spec.cpu.count, spec.memory.size
    return None if vcpus == "all" or size == "limits" else bytes_to_lock(spec, max(vcpus, spec.hotplug.cpus or 0), size)


def _kubelet_files(host: CheckedHost) -> KubeletFiles:
    return KubeletFiles(host.kubelet, host.root / "var/run/cdi")


async def _kubelet(host: CheckedHost) -> CpuState | Frozen | None:
    files = _kubelet_files(host)
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


async def _trial_guest(processes: Processes, asked: CpuSpec, kvm: Kvm) -> Finding:
    """Boot the trial guest as an instance would be accelerated that has *asked* for it."""
    qemu = find_program("qemu-system-x86_64", SYSTEM_DIRECTORIES)
    if qemu is None:
        return programs.TRIAL_GUEST.unknown("no QEMU was found to boot it with")
    usable = asked.accel != "tcg" and kvm.error is None and kvm.trial is None
    trial = await try_guest(processes, qemu, "kvm" if usable else "tcg", asked.model)
    return programs.judge_trial_guest(trial.accel, trial.error, trial.seconds)


async def _services(host: CheckedHost, context: CheckContext) -> list[Finding]:
    answer = await ask_controller(context.socket)
    findings = [programs.judge_controller(context.place, str(context.socket), answer, context.placement)]
    if context.place is Place.NODE:
        files = _kubelet_files(host)
        reason = "" if context.kubelet is not None else why_unreadable(files.cpu_state)
        driver = is_registered(files.plugins, DRIVER_SOCKETS)
        state = context.kubelet or Frozen(reason)
        findings.append(programs.judge_cpu_manager(str(files.cpu_state), state, reason, has_driver=driver))
        findings.append(_memory_manager(files.memory_state))
        findings.append(programs.judge_topology_manager())
        findings += programs.judge_disturbances(answer)
    return findings


def why_unreadable(path: Path) -> str:
    """Return why *path* cannot be read, as strerror(3) words it; empty if it can."""
    try:
        path.read_bytes()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _memory_manager(path: Path) -> Finding:
    state = attempt(path, parse_memory_state)
    if isinstance(state, Frozen):
        return programs.judge_memory_manager("", {}, state.reason)
    reserved = {
        number: node.tables["memory"].system_reserved
        for number, node in state.numa_nodes.items()
        if "memory" in node.tables
    }
    return programs.judge_memory_manager(state.policy, reserved, "")


async def ask_controller(path: PurePosixPath) -> Mapping[str, object] | str | None:
    """Return the status that the controller at *path* answers, why it does not, or ``None`` if not even the directory exists."""
    with trio.move_on_after(TIMEOUT):
        try:
            return await read_status(path)
        except HostError as error:
            return None if probe_file(path.parent).kind == "missing" else explain(error)
    return f"it has not answered for {TIMEOUT:g} s"
