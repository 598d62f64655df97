"""The three placement back ends, as a closed union: the ways to keep other threads off the CPUs of a guest's vCPUs.

Code that treats them differently uses ``match`` and ends with ``assert_never``, so that mypy reports every place that a
fourth back end would change.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import ClassVar, Literal

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.spec.instance import LatencyChoice

Backend = Literal["controller", "delegated", "affinity"]
GuaranteeKind = Literal["enforced", "arranged"]
"""The mechanism that keeps all other tasks off the vCPUs' CPUs: the kernel, by an isolated partition, or only the tasks' cpusets."""


@frozen
class CpuTuning:
    """The request to the node's controller besides the CPUs, from the spec's ``[cpu]`` and its devices; by default empty."""

    latency: LatencyChoice = "default"
    cache_ways: int | None = None
    memory_bandwidth: int | None = None
    devices: tuple[str, ...] = ()
    """The PCI devices that are passed through, which must not lose their power (D3cold)."""


@frozen
class ControllerPlacement:
    """The controller of the Kubernetes node creates the float and instance cgroups; this process enters them by descriptors.

    All threads but the vCPUs run on the kubelet's shared pool, which can change at any time.
    """

    cpus: CpuSet
    """The CPUs of the vCPUs: all exclusive CPUs of the container."""
    pins: tuple[int, ...]
    """The CPU of each vCPU, by vCPU index; all different."""
    socket: PurePosixPath
    """The controller's Unix socket."""
    pod_uid: str
    """The pod's UID, which names the instance cgroup; without a kubelet the container's id."""
    enforced: bool = False
    """Whether the start is refused unless the kernel keeps all others off the CPUs."""
    sweep: bool = False
    """Whether processes that other programs start in the container are moved to float."""
    tuning: CpuTuning = CpuTuning()
    """Further requests to the controller."""
    overhead: int = 0
    """Bytes that the instance needs besides the guest's memory."""

    backend: ClassVar[Literal["controller"]] = "controller"
    shared: ClassVar[bool] = False
    """Whether all other threads run on the CPUs of the vCPUs too, because there are no others."""


@frozen
class DelegatedPlacement:
    """This process creates the same two cgroups inside the container's own cgroup."""

    cpus: CpuSet
    """The CPUs of the vCPUs."""
    pins: tuple[int, ...]
    """The CPU of each vCPU, by vCPU index; all different."""
    float_cpus: CpuSet
    """The CPUs of all other threads."""
    shared: bool
    """Whether all other threads run on the CPUs of the vCPUs too, because there are no others."""
    sweep: bool = False
    """Whether processes that other programs start in the container are moved to float."""

    backend: ClassVar[Literal["delegated"]] = "delegated"


@frozen
class AffinityPlacement:
    """CPU masks alone (``sched_setaffinity``): they do not keep other pods' processes off the CPUs of the vCPUs."""

    cpus: CpuSet
    """The CPUs of the vCPUs."""
    pins: tuple[int, ...]
    """The CPU of each vCPU, by vCPU index; all different."""
    float_cpus: CpuSet
    """The CPUs of all other threads."""
    shared: bool
    """Whether all other threads run on the CPUs of the vCPUs too, because there are no others."""

    backend: ClassVar[Literal["affinity"]] = "affinity"
    sweep: ClassVar[bool] = False
    """There is no cgroup to move processes of others to."""


Placement = ControllerPlacement | DelegatedPlacement | AffinityPlacement
