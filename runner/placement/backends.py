"""The three back ends that keep a guest's vCPUs alone on their CPUs, as a closed union of frozen values.

Code that must treat them differently uses ``match`` and ends with ``assert_never``, so that mypy names every place
that a fourth one would have to change.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import ClassVar, Literal

import attrs

from runner.cpuset import CpuSet

Backend = Literal["controller", "delegated", "affinity"]


@attrs.frozen
class ControllerPlacement:
    """The node's controller made float and the instance's cgroup; this process enters them by descriptors.

    Everything but the vCPUs runs on the node's shared CPUs, which the kubelet may change at any time.
    """

    cpus: CpuSet
    """The vCPUs' own CPUs: all exclusive CPUs of the container."""
    pins: tuple[int, ...]
    """The CPU of each vCPU, by vCPU index; as many as vCPUs, all different."""
    socket: PurePosixPath
    """The controller's Unix socket."""
    pod_uid: str
    """The pod's UID, by which the controller knows this container."""
    sweep: bool = False
    """Processes that others start in the container are moved to float."""

    backend: ClassVar[Literal["controller"]] = "controller"
    shared: ClassVar[bool] = False
    """No CPU is left for anything else, so everything else runs on the vCPUs' CPUs too."""


@attrs.frozen
class DelegatedPlacement:
    """The same two cgroups, made by this process in the container's own cgroup."""

    cpus: CpuSet
    """The vCPUs' own CPUs."""
    pins: tuple[int, ...]
    """The CPU of each vCPU, by vCPU index; as many as vCPUs, all different."""
    float_cpus: CpuSet
    """The CPUs of everything else."""
    shared: bool
    """No CPU is left for anything else, so everything else runs on the vCPUs' CPUs too."""
    sweep: bool = False
    """Processes that others start in the container are moved to float."""

    backend: ClassVar[Literal["delegated"]] = "delegated"


@attrs.frozen
class AffinityPlacement:
    """CPU masks alone: they do not keep other processes off the vCPUs' CPUs."""

    cpus: CpuSet
    """The vCPUs' own CPUs."""
    pins: tuple[int, ...]
    """The CPU of each vCPU, by vCPU index; as many as vCPUs, all different."""
    float_cpus: CpuSet
    """The CPUs of everything else."""
    shared: bool
    """No CPU is left for anything else, so everything else runs on the vCPUs' CPUs too."""

    backend: ClassVar[Literal["affinity"]] = "affinity"
    sweep: ClassVar[bool] = False
    """There is no cgroup to move processes of others to."""


Placement = ControllerPlacement | DelegatedPlacement | AffinityPlacement
