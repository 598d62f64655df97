"""The JSON that a running instance answers with on its control socket, and leaves at its end, as types.

See :mod:`runner.facts.documents`. Sizes are bytes, times seconds. Each answer has the number of the protocol besides, ``version``.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from runner.facts.documents import CpuList, PodDocument
from runner.placement.backends import Backend, GuaranteeKind
from runner.spec.instance import NetworkMode
from runner.spec.refusals import ProblemDocument


class EndDocument(TypedDict):
    """The end of an instance: the termination log, one line of at most 4096 bytes."""

    version: Literal[1]
    status: int
    """The exit status."""
    outcome: str
    """Its name."""
    detail: str
    """The sentence, cut where it is long."""
    faults: list[str]
    """What could not be released."""
    problems: list[ProblemDocument]
    """Why it was refused, or its start failed, as many as there is room for. Nothing of ``cloud_init`` is shown in ``found``."""


class StatusPlacementDocument(TypedDict):
    """The placement of the vCPUs, read from the kernel for this answer."""

    backend: Backend
    guarantee: GuaranteeKind
    guarantee_reason: str
    """Why it is not ``enforced``; empty where it is."""
    cpus: CpuList
    """The CPUs of the vCPUs."""
    pins: list[int | None]
    """The CPU of each vCPU; ``null`` for one that shares the others' CPUs, because its own is offline."""
    float_cpus: CpuList
    """The CPUs of all other threads."""
    misplaced: list[str]
    """What is not in its place; empty where every thread is."""


class StatusNetworkDocument(TypedDict):
    """A network of the guest's."""

    mode: NetworkMode
    mac: str
    addresses: list[str]
    """The addresses that the guest gets by DHCP, as far as the runner gives them."""


class ResetsDocument(TypedDict):
    """Resets of the guest."""

    total: int
    last_minute: int


class DiskDocument(TypedDict):
    """A disk of the guest's."""

    name: str
    path: str
    format: str
    size: int | None
    """``null`` where QEMU does not answer."""
    read_only: bool
    ephemeral: bool
    serial: str | None
    attached: bool
    """It was attached while the guest ran."""
    released: bool
    """The guest has released it, and it can be detached."""


class ChangeDocument(TypedDict):
    """A change that is in progress."""

    what: str
    seconds: float


class RunnerDocument(TypedDict):
    """The runner, PID 1."""

    version: str
    """The version of the program."""
    generation: int
    """How often it was renewed."""
    digest: str
    """The digest of the program that ``ctl upgrade`` brought, or else of the image; empty where there is no image of ours."""
    outcome: Literal["renewed", "fell_back", "resumed"] | None
    """What came of the last renewal."""
    reason: str


class StatusQemuDocument(TypedDict):
    """QEMU."""

    version: str
    generation: int
    """How often it was updated."""
    error: str
    """Why it does not answer; empty where it does. What only QEMU knows is missing or old then."""


class StatusDocument(TypedDict):
    """The state of an instance."""

    name: str
    pod: PodDocument
    guest: str
    """QEMU's ``RunState``, such as ``running`` or ``paused``; ``unknown`` where QEMU does not answer."""
    uptime: float | None
    """``null`` before the guest runs."""
    ready: bool
    not_ready: str
    """Why it is not ready; empty where it is."""
    accelerator: str
    """``kvm``, or ``tcg`` where the guest is emulated."""
    cpu_model: str
    vcpus: int
    most_vcpus: int | None
    """The largest number of vCPUs that it may have; ``null`` where none can be plugged."""
    memory: int
    placement: StatusPlacementDocument
    agent: Literal["none", "connected", "absent"]
    """The guest agent; ``none`` where the guest has no channel for it."""
    networks: list[StatusNetworkDocument]
    restarts: dict[str, int]
    """Children that were started again, by role."""
    console_log: str
    console_bytes: int
    console_silent: str
    """What is said of a console on which nothing was written; else empty."""
    resets: ResetsDocument
    disks: list[DiskDocument]
    free_slots: int
    """The number of disks that can still be attached."""
    change: ChangeDocument | None
    runner: RunnerDocument
    qemu: StatusQemuDocument


class RunnerAnswer(TypedDict):
    """The runner after ``ctl upgrade``."""

    runner: RunnerDocument


class DisksAnswer(TypedDict):
    """The disks of the guest, those of the start first."""

    disks: list[DiskDocument]


class VcpuDocument(TypedDict):
    """A vCPU."""

    vcpu: int
    thread: int
    cpu: int
    plugged_later: bool


class VcpusAnswer(TypedDict):
    """The vCPUs of the guest."""

    vcpus: list[VcpuDocument]
    unused: CpuList
    """The CPUs of the container that no vCPU has."""
    most: int
    """The largest number of vCPUs that it may have."""
    pause_ms: NotRequired[float]
    """Milliseconds for which the guest was stopped, after a change of their number."""


class QemuCheckAnswer(TypedDict):
    """The reasons against another QEMU that is to take over."""

    running: str
    """The version of the QEMU that has the guest."""
    program: str
    program_version: str
    """Empty where it was not even asked."""
    machine: str
    """The type of the guest's machine."""
    refused: list[str]
    """Why it could not; empty where it could."""


QemuUpdateAnswer = TypedDict("QemuUpdateAnswer", {"from": str, "to": str, "pid": int, "pause_ms": int})
"""What came of an update of QEMU: both versions, the process that has the guest now, and for how long the guest did not run."""


class NothingAnswer(TypedDict):
    """It is done, and there is no more to say."""
