"""What a runner carries over to the program that renews it: one class for each holder of the nest.

See :mod:`runner.kernel.carried`. Imported when a runner is renewed, and not before. Times are the kernel's (CLOCK_MONOTONIC):
the clock of the event loop begins anew with each program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.instance.change.hotplug import AttachedDisk
from runner.instance.watch.signs_of_life import Silence
from runner.kernel.carried import CarriedFd, CarriedLogFile, CarriedOutput, CarriedProcess
from runner.placement.backends import Placement
from runner.placement.threads import CgroupPaths, Receipt
from runner.plan.instance import InstancePlan
from runner.protocol.carried import CarriedMonitor
from runner.protocol.qmp import VcpuThread


@frozen
class CarriedOutputs:
    """What this process writes, and how: its command line says so."""

    log_level: str
    log_format: Literal["text", "json"]
    termination_log: CarriedFd | None
    stdout: CarriedOutput
    stderr: CarriedOutput
    console_line: bytes
    """What of the guest's console was not shown as JSON yet, because it is no whole line."""


@frozen
class CarriedRun:
    """What is done: the plan, without cloud-init's documents, and the rest of the command line."""

    plan: InstancePlan
    http: tuple[str, int] | None
    pid1: bool


@frozen
class CarriedCounters:
    """What has happened since the start."""

    restarts: Mapping[str, int]
    renewals: Mapping[str, int]
    swept: int
    console: int
    orphans: int
    faults: tuple[str, ...]
    qemu_updates: Mapping[str, int] = attrs.field(factory=dict)
    resets: int = 0


@frozen
class CarriedChild:
    """A child that is started again whenever it ends."""

    process: CarriedProcess
    born: float
    """When it was started, on the monotonic clock."""
    pause: float
    """Seconds before it is started again the next time."""
    down: bool
    """Whether its end was logged, and it is to be started again."""


@frozen
class CarriedCgroups:
    """The cgroups that this process has entered, and the descriptors by which threads change theirs."""

    cgroups: CgroupPaths
    float_procs: CarriedFd
    instance_threads: CarriedFd
    pod_procs: CarriedFd
    float_threads: CarriedFd
    confined: frozenset[int]
    """The tids of the vCPU threads."""
    memory_events: CarriedFd | None = None


@frozen
class CarriedMask:
    """This process's CPU mask before it was pinned off the vCPUs' CPUs."""

    before: CpuSet


@frozen
class CarriedControllers:
    """The controllers of the container's cgroup before the tree in it was made."""

    before: frozenset[str]


@frozen
class CarriedSeal:
    """Why the vCPUs' CPUs are not sealed; empty if they are."""

    reason: str


@frozen
class CarriedConsole:
    """The guest's serial console."""

    line: CarriedFd
    listener: CarriedFd
    log: CarriedLogFile
    replay: bytes
    """The last output, which a client receives first."""
    received: bytes
    """What was read of the guest's output and not passed on yet."""
    ended: bool


@frozen
class CarriedQemuFds:
    """Copies of QEMU's descriptors, which the next QEMU gets as well: :class:`~runner.plan.argv.qemu.QemuFds`."""

    console: CarriedFd
    agent: CarriedFd | None
    ram: tuple[CarriedFd, ...]
    files: Mapping[str, CarriedFd]
    taps: tuple[tuple[CarriedFd, ...], ...]
    """Of each network."""


@frozen
class CarriedQemu:
    """QEMU, and what its events have said."""

    process: CarriedProcess
    monitor: CarriedMonitor
    agent_listens: bool
    unplugged: tuple[str, ...]
    """Devices that the guest has released."""
    fds: CarriedQemuFds | None = attrs.field(default=None)
    """``None`` where it cannot be updated."""
    updates: int = attrs.field(default=0)
    """How often another QEMU has taken its place."""
    suspended: bool = attrs.field(default=False)


@frozen
class CarriedThreads:
    """QEMU's threads by role, and the receipt of where all threads are."""

    vcpus: tuple[VcpuThread, ...]
    iothreads: frozenset[int]
    receipt: Receipt
    placement: Placement | None = attrs.field(default=None)
    """Where the CPUs have changed while the guest runs; ``None``: the plan's."""
    unplugged: bool = attrs.field(default=False)
    """Whether the guest has released a vCPU."""


@frozen
class CarriedControl:
    """The sockets for ``ctl``, and the disks that were attached by it."""

    control: CarriedFd
    qmp: CarriedFd
    disks: tuple[AttachedDisk, ...] = ()


@frozen
class CarriedReadiness:
    """What is known of the guest's state."""

    since: float
    """When the guest began to run, on the monotonic clock."""
    waits_for: str
    panic: str
    searching: bool
    """Whether the pattern of its sign is still looked for on the console."""
    searches_left: float
    line: bytes
    """The line of the console that has begun."""
    console_written: bool
    silence: Silence | None
    halted: str = ""


@frozen
class CarriedForeignTime:
    """The time of other tasks on the vCPUs' CPUs, by vCPU: see :class:`~runner.instance.watch.foreign_time.ForeignTime`."""

    threads: Mapping[int, tuple[int, int, int]]
    """Pid, tid and CPU."""
    before: Mapping[int, int]
    highest: Mapping[int, int]


@frozen
class CarriedProbes:
    """The listening sockets for probes and metrics."""

    listeners: tuple[CarriedFd, ...]
    foreign: CarriedForeignTime | None = attrs.field(default=None)
