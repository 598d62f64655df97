"""Reads what the judgements need, and puts the question to all of them; what cannot be read is said, not guessed.

Every file is read below :attr:`Here.root`, so that the tree of another machine can be judged as well. Three things are
really tried, each on something of our own that is gone a moment later: mbind(2) of a page, a virtual machine without
vCPUs, a question to the controller.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath

import attrs
import trio
import trio.to_thread

from runner.check import cpu_owners, device_rights, kernel_settings, programs
from runner.check.cpu_owners import CpuNeighbour, Init
from runner.check.finding import Check, CheckReport, Finding, Level, Place, place_of
from runner.check.programs import Program
from runner.controller.kubelet_files import CpuAssignments, Frozen, KubeletFiles, settled
from runner.controller.online_cpus import read_online_cpus
from runner.cpuset import CpuSet
from runner.errors import HostError, RunnerError, SpecError, explain
from runner.facts.hardware import Hardware
from runner.facts.host import Kvm, PodQos
from runner.instance.discover import SYSTEM_DIRECTORIES, find_virtiofsd, read_host_facts, read_pod
from runner.instance.supervisor import Faults, StopRequest, Supervisor, capture, open_supervisor
from runner.kernel.cgroup import Cgroup
from runner.kernel.character_devices import look_at_device, read_kvm, try_kvm
from runner.kernel.files import cpu_limits, find_program, look
from runner.kernel.memory import read_lockable, try_mbind
from runner.kernel.peers import INIT_PID_NAMESPACE
from runner.kernel.processes import Command, dying_with_us
from runner.kernel.procfs import Procfs
from runner.kernel.settings import (
    pid_namespace,
    read_cgroup_mounts,
    read_choice,
    read_cpus,
    read_interrupts,
    read_line,
    read_pci_devices,
    read_swaps,
)
from runner.kernel.sysfs import read_hardware
from runner.kubelet.state_files import parse_memory_manager_state
from runner.plan.argv.qemu import SANDBOX
from runner.plan.host_checks import ASKING_FOR_LESS, VFIO_MEMLOCK_OVERHEAD, bytes_to_lock
from runner.plan.instance import InstancePlan, plan_instance
from runner.protocol.controller_client import read_status
from runner.spec.instance import CpuSpec, InstanceSpec, parse_instance

SIGTERM = 15
SPEC = Check("spec", "run refuses what the plan refuses, and says what is second best about it")
CHANGE_SPEC = "change the spec, or what it stands on"
"""The remedy for what the plan names no other for."""

PATIENCE = 20.0
"""Seconds that whoever is asked may take to answer: a person waits, and a busy machine is no broken one."""

PAUSE, READINGS = 0.1, 20
"""Seconds between two readings of the kubelet's state, and after how many it is given up."""


@attrs.frozen
class Here:
    """Where to look."""

    root: Path
    kubelet: Path
    """The kubelet's ``--root-dir``."""
    socket: PurePosixPath | None
    """Where the controller listens; ``None``: where a spec says, or would if it were one."""
    state_directory: PurePosixPath
    environment: Mapping[str, str]

    @property
    def proc(self) -> Path:
        """Where procfs is mounted."""
        return self.root / "proc"

    @property
    def sys(self) -> Path:
        """Where sysfs is mounted."""
        return self.root / "sys"

    @property
    def dev(self) -> Path:
        """Where the device nodes are."""
        return self.root / "dev"

    @property
    def cgroups(self) -> Path:
        """Where cgroup v2 is to be mounted."""
        return self.root / "sys/fs/cgroup"


@attrs.frozen
class Seen:
    """What several judgements need, read once; taken from what was asked where a spec was given."""

    place: Place
    pod: PodQos | None
    sees_everything: bool
    hardware: Hardware
    allowed: CpuSet
    cgroup: str
    hugepages: int | None
    """The size in bytes of those the spec asks for."""
    to_lock: int | None
    """Bytes that QEMU may have to lock, 0 if none; ``None`` if that is not known, because the plan has failed."""
    cpus: CpuSet
    """The CPUs that are to be the vCPUs': without a plan all that may be used."""
    vcpus: int
    """How many the spec asks for; without one, as many as there are CPUs set apart for them, or one."""
    placement: str
    """What the spec asks for, or would if there were one."""
    backend: str | None
    """What the plan gives it."""
    socket: PurePosixPath
    kubelet: CpuAssignments | Frozen | None


async def check_here(here: Here, document: tuple[str, bytes] | None) -> CheckReport:
    """Return what every check that means something here finds; *document* is a spec's name and text.

    Raises :exc:`~runner.errors.HostError` where not even CPUs and NUMA nodes can be read.
    """
    prefix = () if os.getpid() == 1 else dying_with_us()
    async with open_supervisor(StopRequest(), Faults(), prefix) as supervisor:
        result = await capture(partial(_check, here, supervisor, document))
    return result()


async def _check(here: Here, host: Supervisor, document: tuple[str, bytes] | None) -> CheckReport:
    spec, plan, said = await _planned(here, host, document)
    seen = await _see(here, spec, plan)
    findings = [*_judged(_kernel(here, seen)), *_judged(_cpus(here, seen)), *_judged(_rights(here, seen))]
    findings.append(await _kvm(here))
    if seen.place is not Place.NODE:  # the programs that count are those in the container's image
        findings += await _programs(host)
    findings += await _services(here, seen)
    # The plan decides by some of the same judgements: what they have said already is not said again.
    findings += [each for each in said if not any(_says(other, each) for other in findings)]
    return CheckReport(seen.place, tuple(findings))


def _says(finding: Finding, other: Finding) -> bool:
    """Tell whether *finding* says what *other* says, and says it no less loudly."""
    order = list(Level)
    return finding.found in other.found and order.index(finding.level) >= order.index(other.level) > 0


async def _planned(
    here: Here, host: Supervisor, document: tuple[str, bytes] | None
) -> tuple[InstanceSpec | None, InstancePlan | None, list[Finding]]:
    """Make the plan that ``run`` would make; what it refuses is fatal, its remarks are warnings."""
    if document is None:
        return None, None, []
    source, text = document
    spec = None
    try:
        spec = parse_instance(source, text, here.environment)
        plan = plan_instance(source, spec, await read_host_facts(spec, host, here.state_directory, handing_over=False))
    except SpecError as error:
        return spec, None, [SPEC.fatal(each.statement, each.remedy or CHANGE_SPEC) for each in error.problems]
    except RunnerError as error:
        return spec, None, [SPEC.fatal(explain(error), CHANGE_SPEC)]
    remarks = [SPEC.warning(remark.message, remark.remedy or CHANGE_SPEC) for remark in plan.remarks]
    placed = f"{source}: {plan.machine.vcpus} vCPUs on CPUs '{plan.placement.cpus}', placement {plan.placement.backend}"
    return spec, plan, [SPEC.ok(placed), *remarks]


async def _see(here: Here, spec: InstanceSpec | None, plan: InstancePlan | None) -> Seen:
    procfs = Procfs(here.proc)
    asked = CpuSpec() if spec is None else spec.cpu
    pod = read_pod(procfs, here.environment)
    sees_everything = pid_namespace(here.proc) == INIT_PID_NAMESPACE
    place = place_of(sees_everything=sees_everything, has_kubelet=here.kubelet.is_dir(), in_pod=pod is not None)
    allowed = CpuSet.parse(procfs.status()["Cpus_allowed_list"])
    wanted = len(allowed) if asked.count == "all" else asked.count
    vcpus = wanted if plan is None else plan.machine.vcpus
    hardware = read_hardware(here.root)
    return Seen(
        place=place,
        pod=pod,
        sees_everything=sees_everything,
        hardware=hardware,
        allowed=allowed,
        cgroup=procfs.cgroup(),
        hugepages=None if spec is None else spec.memory.page_size,
        to_lock=plan.machine.lockable if plan is not None else _to_lock(here, procfs, spec),
        cpus=allowed if plan is None else plan.placement.cpus,
        vcpus=len(allowed) if spec is None and not hardware.online <= allowed else vcpus,
        placement=asked.placement,
        backend=None if plan is None else plan.placement.backend,
        socket=here.socket or asked.controller,
        kubelet=await _kubelet(here) if place is Place.NODE else None,
    )


def _to_lock(here: Here, procfs: Procfs, spec: InstanceSpec | None) -> int | None:
    """Return the bytes that may have to be locked where there is no plan; without a spec, a guest with devices has all RAM."""
    if spec is None:
        return procfs.memory_total() + VFIO_MEMLOCK_OVERHEAD if (here.dev / "vfio").is_dir() else 0
    if not spec.memory.lock and not spec.device:
        return 0
    vcpus, size = spec.cpu.count, spec.memory.size
    return None if vcpus == "all" or size == "limits" else bytes_to_lock(spec, vcpus, size)


async def _kubelet(here: Here) -> CpuAssignments | Frozen | None:
    path = KubeletFiles(here.kubelet).cpu_state
    if not os.access(path, os.R_OK):
        return None
    machine = read_online_cpus(here.sys)
    # Under strict-cpu-reservation the reserved CPUs are in no set, and nothing here says which they are.
    return await settled(path, machine, machine.online, pause=PAUSE, readings=READINGS)


def _judged(questions: Iterable[tuple[Check, Callable[[], Iterable[Finding]]]]) -> Iterator[Finding]:
    """Ask each question; where the kernel refuses to answer, that is the finding."""
    for check, ask in questions:
        try:
            yield from tuple(ask())
        except (HostError, OSError, ValueError) as error:
            yield check.unknown(f"cannot read what it takes: {explain(error)}")


def _kernel(here: Here, seen: Seen) -> Iterator[tuple[Check, Callable[[], Iterable[Finding]]]]:
    numa_nodes = len(seen.hardware.numa_nodes)
    system = here.sys / "devices/system"
    huge = here.sys / "kernel/mm/transparent_hugepage"

    def cgroups() -> Iterator[Finding]:
        mounts = read_cgroup_mounts(here.proc)
        offered = (
            () if mounts.unified is None else read_line(here.root / mounts.unified[1:] / "cgroup.controllers").split()
        )
        yield kernel_settings.judge_cgroups(seen.place, mounts.unified, offered, mounts.legacy)

    yield kernel_settings.CGROUPS, cgroups
    yield kernel_settings.KERNEL, lambda: [kernel_settings.judge_kernel(read_line(here.proc / "sys/kernel/osrelease"))]
    yield (
        kernel_settings.CLOCK,
        lambda: [kernel_settings.judge_clock(read_line(system / "clocksource/clocksource0/current_clocksource"))],
    )
    swap_limit = here.cgroups / seen.cgroup[1:] / "memory.swap.max"
    yield kernel_settings.SWAP, lambda: [kernel_settings.judge_swap(read_swaps(here.proc), read_line(swap_limit))]
    yield (
        kernel_settings.TRANSPARENT_HUGEPAGES,
        lambda: [kernel_settings.judge_transparent_hugepages(read_choice(huge / "shmem_enabled"))],
    )
    near = seen.hardware.online if seen.place is Place.NODE else seen.cpus
    if seen.hugepages is not None and seen.backend is not None:
        near = CpuSet()  # the plan has found enough of them where they are wanted
    yield kernel_settings.HUGEPAGES, lambda: [kernel_settings.judge_hugepages(seen.hardware, near, seen.hugepages)]
    balancing = here.proc / "sys/kernel/numa_balancing"
    yield (
        kernel_settings.NUMA_BALANCING,
        lambda: [kernel_settings.judge_numa_balancing(read_line(balancing), numa_nodes)],
    )
    pool = programs.shared_pool_of(seen.kubelet)
    yield (
        kernel_settings.ISOLATED,
        lambda: [
            kernel_settings.judge_isolated(_isolated(system), read_cpus(system / "cpu/nohz_full"), pool),
        ],
    )
    yield kernel_settings.PCI, lambda: [kernel_settings.judge_pci(tuple(read_pci_devices(here.sys)), numa_nodes)]


def _isolated(system: Path) -> CpuSet | None:
    path = system / "cpu/isolated"
    return read_cpus(path) if path.exists() else None


def _cpus(here: Here, seen: Seen) -> Iterator[tuple[Check, Callable[[], Iterable[Finding]]]]:
    online = seen.hardware.online
    if seen.place is Place.NODE:
        pool, assigned = programs.shared_pool_of(seen.kubelet), _assigned(seen.kubelet)
        exclusive = cpu_owners.exclusive_of(assigned)
        if pool is None or not exclusive:
            why = "which CPUs are exclusive is not known here" if pool is None else "no pod has CPUs of its own now"
            for check in (cpu_owners.CORES, cpu_owners.INTERRUPTS, cpu_owners.NEIGHBOURS):
                yield check, partial(_unknown, check, why)
            return
        for uid, own in assigned.items():
            yield cpu_owners.CORES, partial(cpu_owners.judge_cores, own, seen.hardware, exclusive - own, f"pod {uid}")
        yield (
            cpu_owners.INTERRUPTS,
            lambda: [cpu_owners.judge_interrupts(tuple(read_interrupts(here.proc)), exclusive, online)],
        )
        yield (
            cpu_owners.NEIGHBOURS,
            lambda: [cpu_owners.judge_neighbours(tuple(_neighbours(here.cgroups)), exclusive, pool)],
        )
        return
    less = seen.placement in ASKING_FOR_LESS
    yield cpu_owners.OWN, lambda: [cpu_owners.judge_own_cpus(seen.pod, seen.allowed, online, asked_for_less=less)]
    own = seen.cpus
    yield cpu_owners.TIME, partial(_cpu_time, here, seen)
    if online <= own:  # then none of them is anybody's own, and that was said
        for check in (cpu_owners.CORES, cpu_owners.INTERRUPTS):
            yield check, partial(_unknown, check, "no CPUs are set apart for the vCPUs")
    else:
        yield cpu_owners.CORES, lambda: cpu_owners.judge_cores(own, seen.hardware, CpuSet(), "the vCPUs")
        yield (
            cpu_owners.INTERRUPTS,
            lambda: [cpu_owners.judge_interrupts(tuple(read_interrupts(here.proc)), own, online)],
        )
    if seen.place is not Place.MACHINE:
        yield (
            cpu_owners.PID_NAMESPACE,
            lambda: cpu_owners.judge_init(seen.place, _init(Procfs(here.proc)), sees_everything=seen.sees_everything),
        )


def _cpu_time(here: Here, seen: Seen) -> Iterator[Finding]:
    if seen.backend == "controller":
        yield cpu_owners.TIME.ok(
            "the controller takes the vCPUs out of the pod's cgroup, and so from under its cpu.max"
        )
        return
    group = here.cgroups / seen.cgroup[1:]
    if not (group / "cgroup.controllers").exists():
        yield cpu_owners.TIME.unknown(
            "no cgroup v2 can be seen here, which would say whether cpu.max limits it", "ask on the node"
        )
        return
    limit = min(cpu_limits(PurePosixPath(here.cgroups), seen.cgroup), default=None)
    less = seen.placement in ASKING_FOR_LESS
    throttled = _throttled(read_line(group / "cpu.stat"))
    yield cpu_owners.judge_cpu_time(seen.place, limit, seen.vcpus, throttled, asked_for_less=less)


def _unknown(check: Check, why: str) -> list[Finding]:
    return [check.unknown(why)]


def _assigned(state: CpuAssignments | Frozen | None) -> Mapping[str, CpuSet]:
    return state.assigned() if isinstance(state, CpuAssignments) else {}


def _throttled(stat: str) -> int:
    return next((int(line.split()[1]) for line in stat.splitlines() if line.startswith("nr_throttled ")), 0)


def _neighbours(mount: Path) -> Iterator[CpuNeighbour]:
    """Yield the populated groups below the root that are not the kubelet's; a group without cpuset has its parent's CPUs."""
    root = Cgroup(mount)
    for name in root.children():
        group = root.child(name)
        if "kube" in name or (group.path / "float").is_dir() or not group.populated():
            continue
        limited = (group.path / "cpuset.cpus.effective").exists()
        yield CpuNeighbour(name, group.effective_cpus() if limited else root.effective_cpus())


def _init(procfs: Procfs) -> Init:
    status = procfs.status("1")

    def has_sigterm(field: str) -> bool:
        return bool(int(status[field], 16) >> (SIGTERM - 1) & 1)

    return Init(
        ours=procfs.status()["Pid"] == "1",
        name=status["Name"],
        blocks_sigterm=has_sigterm("SigBlk"),
        handles_sigterm=has_sigterm("SigCgt"),
    )


def _rights(here: Here, seen: Seen) -> Iterator[tuple[Check, Callable[[], Iterable[Finding]]]]:
    for check, name in ((device_rights.TUN, "net/tun"), (device_rights.VHOST_NET, "vhost-net")):
        yield check, partial(_device, check, seen.place, here.dev / name)
    if seen.place is Place.NODE:  # a pod's rights are its own
        return
    yield (
        device_rights.MEMLOCK,
        lambda: [device_rights.judge_memlock(read_lockable(Procfs().capabilities()), seen.to_lock)],
    )
    yield device_rights.MBIND, partial(_mbind, seen)


def _mbind(seen: Seen) -> list[Finding]:
    [numa_node, *_] = CpuSet.parse(Procfs().status()["Mems_allowed_list"])  # ours, for it is tried here
    return [device_rights.judge_mbind(try_mbind(numa_node), len(seen.hardware.numa_nodes))]


def _device(check: Check, place: Place, path: Path) -> list[Finding]:
    return [device_rights.judge_device(check, place, str(path), look_at_device(path))]


async def _kvm(here: Here) -> Finding:
    device = here.dev / "kvm"
    state = read_kvm(device)
    trial: str | None = f"it has not answered for {PATIENCE:g} s"
    if state.error is None:
        # In a thread, which is left alone if the kernel never comes back from it.
        with trio.move_on_after(PATIENCE):
            trial = await trio.to_thread.run_sync(try_kvm, device, abandon_on_cancel=True)
    return device_rights.judge_kvm(Kvm(state.error, state.gid, state.mode, trial))


async def _programs(host: Supervisor) -> list[Finding]:
    """Ask every program an instance starts, all at once."""
    findings: list[Finding] = []

    async def judged(check: Check, name: str, package: str, find: Callable[[], Awaitable[Program]]) -> None:
        findings.append(programs.judge_program(check, name, package, await find()))

    async def virtiofsd() -> None:
        findings.append(programs.judge_virtiofsd(*await find_virtiofsd(host)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(judged, programs.QEMU, "qemu-system-x86_64", "qemu-system-x86", partial(_qemu, host))
        nursery.start_soon(judged, programs.DNSMASQ, "dnsmasq", "dnsmasq-base", partial(_dnsmasq, host))
        nursery.start_soon(virtiofsd)
    sleep = find_program("sleep", SYSTEM_DIRECTORIES)
    findings.append(programs.judge_program(programs.SLEEP, "sleep", "coreutils", Program(sleep)))
    return sorted(findings, key=lambda finding: finding.check)


async def _qemu(host: Supervisor) -> Program:
    qemu = await _asked(host, "qemu-system-x86_64", "--version")
    reason = qemu.error
    if qemu.path is not None and reason is None:
        reason = programs.qemu_error(qemu.said)
    if qemu.path is not None and reason is None:
        # Both are left out of some builds: the sandbox every guest runs in, the device every share is.
        parts = ("-sandbox", SANDBOX, "-machine", "none", "-device", "vhost-user-fs-pci,help")
        reason = (await _asked(host, "qemu-system-x86_64", *parts)).error
    return attrs.evolve(qemu, error=reason)


async def _dnsmasq(host: Supervisor) -> Program:
    dnsmasq = await _asked(host, "dnsmasq", "--version")
    return attrs.evolve(dnsmasq, error=dnsmasq.error or programs.dnsmasq_error(dnsmasq.said))


async def _asked(host: Supervisor, name: str, *arguments: str) -> Program:
    """Find a program and run it with *arguments*; what it says first, and why it did not end well."""
    path = find_program(name, SYSTEM_DIRECTORIES)
    if path is None:
        return Program(None)
    command = Command(name, (str(path), *arguments), level=logging.DEBUG)
    status: int | None = None
    try:
        async with host.processes.daemon(command, 0) as process:
            with trio.move_on_after(PATIENCE):
                status = await process.wait()
    except HostError as error:
        return Program(path, error=explain(error))
    if status is None:
        return Program(path, error=f"has not answered for {PATIENCE:g} s")
    if status != 0:
        return Program(path, error=f"{process.how_it_ended()} when asked for {' '.join(arguments)}")
    return Program(path, " ".join(list(process.last_words)[:2]))


async def _services(here: Here, seen: Seen) -> list[Finding]:
    answer = await ask_controller(seen.socket)
    findings = [programs.judge_controller(seen.place, str(seen.socket), answer, seen.placement)]
    if seen.place is Place.NODE:
        files = KubeletFiles(here.kubelet)
        reason = "" if seen.kubelet is not None else why_unreadable(files.cpu_state)
        findings.append(programs.judge_cpu_manager(str(files.cpu_state), seen.kubelet or Frozen(reason), reason))
        findings.append(_memory_manager(files.memory_state))
        findings.append(programs.judge_topology_manager())
    return findings


def why_unreadable(path: Path) -> str:
    """Return why *path* cannot be read, in the kernel's words."""
    try:
        path.read_bytes()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _memory_manager(path: Path) -> Finding:
    try:
        checkpoint = parse_memory_manager_state(path.read_text(), str(path))
    except (OSError, ValueError, RunnerError) as error:
        return programs.judge_memory_manager("", {}, f"{path}: {explain(error)}")
    reserved = {
        number: node.tables["memory"].system_reserved
        for number, node in checkpoint.state.numa_nodes.items()
        if "memory" in node.tables
    }
    return programs.judge_memory_manager(checkpoint.policy, reserved, "")


async def ask_controller(path: PurePosixPath) -> Mapping[str, object] | str | None:
    """Return what the controller at *path* says of itself, why it does not, or ``None`` if there is no place for it."""
    with trio.move_on_after(PATIENCE):
        try:
            return await read_status(path)
        except HostError as error:
            return None if look(path.parent).kind == "missing" else explain(error)
    return f"it has not answered for {PATIENCE:g} s"
