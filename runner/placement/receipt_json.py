"""The types of ``receipt.json``, the file with the place of every thread of an instance (see :mod:`runner.facts.json_types`)."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from runner.facts.json_types import CpuList, PodDocument
from runner.placement.backends import Backend, GuaranteeKind
from runner.placement.children import Role


class ThreadDocument(TypedDict):
    """A thread, as the kernel shows it."""

    role: Annotated[str, Role]
    vcpu: int | None
    """The index of a vCPU's thread, if known."""
    name: str
    pid: int
    tid: int
    cgroup: str
    """The path from the root of the cgroup hierarchy as the reader sees it."""
    allowed_cpus: CpuList
    allowed_mems: CpuList
    """NUMA nodes."""
    running_on: int
    """The CPU on which it last ran."""


class PlacedThreadDocument(TypedDict):
    """A thread, as logged at the start."""

    role: Annotated[str, Role]
    vcpu: int | None
    """The index of a vCPU's thread."""
    tid: int
    name: str
    allowed_cpus: CpuList
    running_on: int | None
    """The CPU on which it last ran; ``null`` if it has not run since it was moved."""


class CgroupsDocument(TypedDict):
    """The cgroups of an instance."""

    pod: str
    """The container's own cgroup, in which the anchors stay."""
    floating: str
    """The cgroup of all threads but the vCPUs."""
    instance: str
    """The cgroup of the vCPUs."""


class PlacedDocument(TypedDict):
    """The places of an instance's threads."""

    version: Literal[1]
    backend: Backend
    instance_cpus: CpuList
    """The CPUs of the vCPUs."""
    float_cpus: CpuList
    """The CPUs of all other threads."""
    shared: bool
    """Whether all threads are on the same CPUs, because there are no others."""
    guarantee: GuaranteeKind
    guarantee_reason: str
    """The reason why it is not ``enforced``; empty if it is."""
    cgroups: CgroupsDocument | None
    """``null`` with placement ``affinity``."""
    threads: list[ThreadDocument]


class ReceiptDocument(PlacedDocument):
    """``receipt.json``: every thread, read back from the kernel when the guest was started, and after each change."""

    instance: str
    """The instance's name."""
    pod: PodDocument
    generation: int
    """Number of the runner's renewals."""
    qemu_generation: int
    """Number of QEMU's updates."""
