"""The class of a check, the place where it runs, and the facts that several checks need.

Each check is in one place: its name, the reason why its result matters, the function that reads its facts, and below that its judgement.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath

from runner.base.cpuset import CpuSet
from runner.base.judgement import Judgement
from runner.base.subject import Subject
from runner.base.values import frozen
from runner.facts.hardware import Hardware
from runner.facts.host import Kvm, PodQos
from runner.facts.roots import Roots
from runner.kernel.child_processes import Processes
from runner.kernel.kubelet_files import Frozen
from runner.kernel.procfs import Procfs
from runner.kubelet.state import CpuState
from runner.plan.host_checks import ASKING_FOR_LESS
from runner.spec.instance import CpuSpec

TIMEOUT = 20.0
"""Seconds that the kernel, a program or the controller may take to answer: a busy machine is slow, not broken."""

SIGTERM = 15
MOST_NAMED = 16
"""Most names in a remedy's command: a machine may have a thousand interrupts, a line of 4 KB."""

KubeletState = CpuState | Frozen
"""The content of ``cpu_manager_state``, or the reason why it does not settle."""


class Place(enum.Enum):
    """The place where the checks run, which determines what is readable and what must exist."""

    NODE = "node"
    """A Kubernetes node: every process and the kubelet's files are visible."""
    POD = "pod"
    """A container of a Kubernetes pod."""
    CONTAINER = "container"
    """A container without Kubernetes around it."""
    MACHINE = "machine"
    """No container, and no kubelet."""


OFF_NODE = (Place.POD, Place.CONTAINER, Place.MACHINE)
"""The places in which an instance may be started."""


def place_of(*, in_initial_pid_namespace: bool, has_kubelet: bool, in_pod: bool) -> Place:
    """Return the place in which this process runs.

    A pod with ``hostPID`` is *in_initial_pid_namespace*: if it also has the kubelet's directory, as the controller's pod does, it counts as
    the node.
    """
    if in_initial_pid_namespace and has_kubelet:
        return Place.NODE
    if in_pod:
        return Place.POD
    return Place.MACHINE if in_initial_pid_namespace else Place.CONTAINER


def for_each(names: Sequence[str], command: str, listing: str) -> str:
    """Return the shell *command* for each of *names*, to which it refers as ``$i``.

    For more than :data:`MOST_NAMED` names the command *listing* prints them, possibly with others of their kind.
    """
    if len(names) == 1:
        return command.replace("$i", names[0])
    named = " ".join(names) if len(names) <= MOST_NAMED else f"$({listing})"
    return f"for i in {named}; do {command}; done"


@frozen
class CheckedHost:
    """The machine that the checks read, and the options of the command line."""

    root: Path
    kubelet: Path
    """The kubelet's ``--root-dir``."""
    socket: PurePosixPath | None
    """The controller's socket; ``None``: the spec's ``cpu.controller``, or its default."""
    state_directory: PurePosixPath
    environment: Mapping[str, str]
    try_guest: bool = False
    """Whether a trial guest is booted as well."""

    @property
    def roots(self) -> Roots:
        """The mount points below *root*."""
        return Roots.below(self.root)


@frozen
class Init:
    """Process 1 of this PID namespace, which may be this process."""

    ours: bool
    name: str
    blocks_sigterm: bool
    handles_sigterm: bool
    of_machine: bool
    """Whether the namespace is the machine's own."""

    @property
    def of_others(self) -> str:
        """Return the owner of the namespace, if its process 1 cannot be the runner; empty if it can."""
        if self.of_machine:
            return "the machine's own"
        return "shared with the pod's other containers" if self.name == "pause" else ""


@frozen
class CheckContext:
    """Facts that several checks need, read once; with a spec, those of its instance."""

    host: CheckedHost
    processes: Processes
    """Starts the programs that are tried."""
    place: Place
    pod: PodQos | None
    in_initial_pid_namespace: bool
    hardware: Hardware
    allowed: CpuSet
    cgroup: str
    hugepage_size: int | None
    """Bytes; ``None`` unless the spec asks for hugepages."""
    lockable: int | None
    """Bytes that QEMU may have to lock, 0 if none; ``None`` if unknown, because the plan has failed."""
    cpus: CpuSet
    """The CPUs for the vCPUs; without a plan all usable CPUs."""
    vcpus: int
    """The spec's count; without a spec, the number of CPUs set apart for vCPUs, or one."""
    asked: CpuSpec
    """The spec's ``[cpu]``, or its defaults."""
    backend: str | None
    """The plan's placement back end."""
    kvm: Kvm
    socket: PurePosixPath
    """The controller's socket."""
    controller: Mapping[str, object] | str | None
    """Its status, the reason why it does not answer, or ``None`` if not even the directory of its socket exists."""
    kubelet: KubeletState | None
    """``None`` except on a node, and if the file cannot be read."""

    @property
    def roots(self) -> Roots:
        """The mount points of the machine."""
        return self.host.roots

    @cached_property
    def init(self) -> Init:
        """The first process of this PID namespace."""
        procfs = Procfs(self.roots.proc)
        status = procfs.status("1")
        blocks, handles = (bool(int(status[field], 16) >> (SIGTERM - 1) & 1) for field in ("SigBlk", "SigCgt"))
        return Init(procfs.status()["Pid"] == "1", status["Name"], blocks, handles, self.in_initial_pid_namespace)

    @property
    def asks_for_less(self) -> bool:
        """Return whether the spec names a placement that needs no exclusive CPUs, so that ``run`` starts without them."""
        return self.asked.placement in ASKING_FOR_LESS

    @property
    def shared_pool(self) -> CpuSet | None:
        """The kubelet's shared pool, ``None`` if it is unknown, or no pod has exclusive CPUs."""
        state = self.kubelet
        has_exclusive = isinstance(state, CpuState) and (state.policy == "static" or state.exclusive())
        return state.shared_pool if isinstance(state, CpuState) and has_exclusive else None


Question = Callable[[CheckContext], Iterable[Judgement] | Awaitable[Iterable[Judgement]]]
"""Reads the facts of a check, and judges them. May raise :exc:`HostError`, :exc:`OSError` or :exc:`ValueError`."""


@frozen
class Check(Subject):
    """A subject with the function that reads and judges it, and the places in which the check is made."""

    ask: Question
    places: tuple[Place, ...]


def check(name: str, why: str, *places: Place) -> Callable[[Question], Check]:
    """Make the decorated function a check with this *name*: in *places*, or everywhere if none are given.

    Example::

        @check("clocksource", "a guest under KVM reads its clock without a VM exit only while the host's clock is the TSC")
        def clock(context: CheckContext) -> Iterator[Judgement]:
            yield judge_clock(read_line(…))
    """
    return lambda ask: Check(name, why, ask, places or tuple(Place))
