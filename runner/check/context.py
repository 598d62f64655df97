"""What the checks are about: the host they read, and the facts that several of them need (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.check.finding import Place
from runner.check.programs import KubeletState, shared_pool_of
from runner.facts.hardware import Hardware
from runner.facts.host import PodQos
from runner.facts.roots import Roots
from runner.plan.host_checks import ASKING_FOR_LESS


@frozen
class CheckedHost:
    """Where the checks read, and what the command line says."""

    root: Path
    kubelet: Path
    """The kubelet's ``--root-dir``."""
    socket: PurePosixPath | None
    """Where the controller listens; ``None``: the spec's ``cpu.controller``, or its default."""
    state_directory: PurePosixPath
    environment: Mapping[str, str]
    try_guest: bool = False
    """Whether a trial guest is booted, too."""

    @property
    def roots(self) -> Roots:
        """The mount points below *root*."""
        return Roots.below(self.root)


@frozen
class CheckContext:
    """Facts that several judgements need, read once; where a spec was given, those of its instance."""

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
    """The CPUs for the vCPUs: without a plan all that may be used."""
    vcpus: int
    """The spec's count; without a spec, as many as there are CPUs set apart for them, or one."""
    placement: str
    """The spec's ``cpu.placement``, or its default."""
    backend: str | None
    """The plan's placement back end."""
    socket: PurePosixPath
    kubelet: KubeletState | None

    @property
    def asks_for_less(self) -> bool:
        """Return whether the spec asks for a placement that needs no exclusive CPUs."""
        return self.placement in ASKING_FOR_LESS

    @property
    def shared_pool(self) -> CpuSet | None:
        """The kubelet's shared pool, ``None`` where it is not known."""
        return shared_pool_of(self.kubelet)
