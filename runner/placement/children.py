"""The children of the runner: the role of their threads, their cgroup, and the consequence of their death."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from runner.base.errors import Status
from runner.base.values import frozen


class Role(enum.StrEnum):
    """The purpose of a thread in an instance."""

    RUNNER = "runner"
    """This program, PID 1 of the container, and its short-lived children."""
    ANCHOR = "anchor"
    """``sleep infinity``, which keeps the pod's own cgroup populated."""
    DNSMASQ = "dnsmasq"
    VIRTIOFSD = "virtiofsd"
    PASST = "passt"
    EMULATOR = "emulator"
    """A thread of QEMU that is neither a vCPU nor an iothread."""
    IOTHREAD = "iothread"
    """A thread of QEMU that serves a disk."""
    VCPU = "vcpu"
    SANDBOX = "sandbox"
    """The ``pause`` process of a pod, which sleeps until the pod ends."""
    OTHER = "other"
    """Any other thread."""


@frozen
class Restart:
    """Start it again: first after *first* seconds, then after twice as long each time, up to *longest*."""

    first: float
    longest: float
    forgiven: float = 10.0
    """Seconds of life after which earlier deaths are no longer counted."""


@frozen
class EndInstance:
    """The guest cannot live without it: power down and exit with *status*."""

    status: Status


@frozen
class Child:
    """A program that the runner starts for as long as the guest lives."""

    role: Role
    """The role of its threads; for QEMU, of those that are neither vCPUs nor iothreads."""
    death: Restart | EndInstance
    """The consequence of its death."""
    in_pods_cgroup: bool = False
    """Whether it stays in the pod's own cgroup instead of float."""


CHILDREN: Mapping[str, Child] = {
    # Restarted at once: the pod's cgroup must not stay empty.
    "anchor": Child(Role.ANCHOR, Restart(first=0.0, longest=5.0), in_pods_cgroup=True),
    "dnsmasq": Child(Role.DNSMASQ, Restart(first=0.1, longest=10.0)),  # the guest keeps its address meanwhile
    "virtiofsd": Child(Role.VIRTIOFSD, EndInstance(Status.SERVICE_DIED)),  # QEMU cannot reconnect
    "passt": Child(Role.PASST, EndInstance(Status.SERVICE_DIED)),  # the same
    "qemu": Child(Role.EMULATOR, EndInstance(Status.MACHINE_DIED)),
}
"""Children by their name in messages, metrics and the state of a renewal, which for daemons is also the name of program and process."""

RESTARTS = {name: child.death for name, child in CHILDREN.items() if isinstance(child.death, Restart)}
FATAL = {name: child.death.status for name, child in CHILDREN.items() if isinstance(child.death, EndInstance)}
IN_PODS_CGROUP = frozenset(child.role for child in CHILDREN.values() if child.in_pods_cgroup)
DAEMONS = {name: child.role for name, child in CHILDREN.items() if name == child.role and not child.in_pods_cgroup}
"""The daemons that are recognised by the name of their process → their roles."""


def role_of_child(name: str) -> Role:
    """Return the role of the threads of the child *name*, this program's own for one that is not in the table."""
    return CHILDREN[name].role if name in CHILDREN else Role.RUNNER
