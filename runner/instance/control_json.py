"""The types of the JSON with which an instance answers requests on its control socket, and of its termination log.

See :mod:`runner.facts.json_types`. Sizes are bytes, times seconds. Each answer has the number of the protocol besides, ``version``.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from runner.facts.json_types import CpuList, PodDocument
from runner.placement.backends import Backend, GuaranteeKind
from runner.spec.instance import NetworkMode
from runner.spec.refusals import ProblemDocument


class EndDocument(TypedDict):
    """The end of an instance: the termination log, one line of at most 4096 bytes."""

    version: Literal[1]
    status: int
    """The exit status."""
    outcome: str
    """The name of the exit status."""
    detail: str
    """The error's sentence, shortened if it is long."""
    faults: list[str]
    """Resources that could not be released."""
    problems: list[ProblemDocument]
    """The problems for which it was refused or its start failed, as many as fit. Values of ``cloud_init`` are never shown in ``found``."""


class StatusPlacementDocument(TypedDict):
    """The placement of the vCPUs, read from the kernel for this answer."""

    backend: Backend
    guarantee: GuaranteeKind
    guarantee_reason: str
    """The reason why it is not ``enforced``; empty if it is."""
    cpus: CpuList
    """The CPUs of the vCPUs."""
    pins: list[int | None]
    """The CPU of each vCPU; ``null`` for one that shares the others' CPUs, because its own is offline."""
    float_cpus: CpuList
    """The CPUs of all other threads."""
    misplaced: list[str]
    """Descriptions of the misplaced threads; empty if there are none."""


class StatusNetworkDocument(TypedDict):
    """A network of the guest's."""

    mode: NetworkMode
    mac: str
    addresses: list[str]
    """The guest's DHCP addresses, if the runner assigns them."""


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
    """Whether it was attached while the guest ran."""
    released: bool
    """Whether the guest has released it, so that it can be detached."""


class ChangeDocument(TypedDict):
    """A change that is in progress."""

    what: str
    seconds: float


class RunnerDocument(TypedDict):
    """The runner, PID 1."""

    version: str
    """The version of the program."""
    generation: int
    """Number of renewals."""
    digest: str
    """The digest of the program that ``ctl upgrade`` brought, or else of the image; empty where there is no image of ours."""
    outcome: Literal["renewed", "fell_back", "resumed"] | None
    """The outcome of the last renewal."""
    reason: str


class StatusQemuDocument(TypedDict):
    """QEMU."""

    version: str
    generation: int
    """Number of updates."""
    error: str
    """The reason why it does not answer; empty if it does. Values that only QEMU knows are then missing or out of date."""


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
    """The reason why it is not ready; empty if it is."""
    accelerator: str
    """``kvm``, or ``tcg`` where the guest is emulated."""
    cpu_model: str
    vcpus: int
    most_vcpus: int | None
    """The largest possible number of vCPUs; ``null`` if none can be plugged."""
    memory: int
    placement: StatusPlacementDocument
    agent: Literal["none", "connected", "absent"]
    """The guest agent; ``none`` where the guest has no channel for it."""
    networks: list[StatusNetworkDocument]
    restarts: dict[str, int]
    """Number of restarts of children, by role."""
    console_log: str
    console_bytes: int
    console_silent: str
    """A remark about a console without any output; otherwise empty."""
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
    """The CPUs of the container that no vCPU uses."""
    most: int
    """The largest possible number of vCPUs."""
    pause_ms: NotRequired[float]
    """Milliseconds for which the guest was stopped, after a change of their number."""


class QemuCheckAnswer(TypedDict):
    """The reasons why another QEMU cannot take over."""

    running: str
    """The version of the QEMU that has the guest."""
    program: str
    program_version: str
    """Its version; empty if the program was not executed."""
    machine: str
    """The type of the guest's machine."""
    refused: list[str]
    """The reasons why it cannot take over; empty if it can."""


QemuUpdateAnswer = TypedDict("QemuUpdateAnswer", {"from": str, "to": str, "pid": int, "pause_ms": int})
"""The result of an update of QEMU: both versions, the process that has the guest now, and the pause of the guest."""


class NothingAnswer(TypedDict):
    """An answer without further content: the request was carried out."""
