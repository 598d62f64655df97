"""The JSON of ``receipt.json``, as types (see :mod:`runner.facts.documents`)."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from runner.facts.documents import CpuList, PodDocument
from runner.placement.backends import Backend, GuaranteeKind
from runner.placement.children import Role


class ThreadDocument(TypedDict):
    """A thread, as the kernel shows it."""

    role: Annotated[str, Role]
    vcpu: int | None
    """The index of a vCPU's thread, where it is known."""
    name: str
    pid: int
    tid: int
    cgroup: str
    """From the root of the cgroup hierarchy that the reader sees."""
    allowed_cpus: CpuList
    allowed_mems: CpuList
    """NUMA nodes."""
    running_on: int
    """The CPU on which it ran last."""


class PlacedThreadDocument(TypedDict):
    """A thread, as the log has it at the start."""

    role: Annotated[str, Role]
    vcpu: int | None
    """The index of a vCPU's thread."""
    tid: int
    name: str
    allowed_cpus: CpuList
    running_on: int | None
    """The CPU on which it ran last; ``null`` if it has not run since it was moved."""


class CgroupsDocument(TypedDict):
    """The cgroups of an instance."""

    pod: str
    """The container's own, in which the anchors stay."""
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
    """All threads are on the same CPUs, because there are no others."""
    guarantee: GuaranteeKind
    guarantee_reason: str
    """Why it is not ``enforced``; empty where it is."""
    cgroups: CgroupsDocument | None
    """``null`` with placement ``affinity``."""
    threads: list[ThreadDocument]


class ReceiptDocument(PlacedDocument):
    """``receipt.json``: every thread, read back from the kernel when the guest was started, and after each change."""

    instance: str
    """The instance's name."""
    pod: PodDocument
    generation: int
    """How often the runner was renewed."""
    qemu_generation: int
    """How often QEMU was updated."""
