"""Who may have what: the decisions behind a registration (pure).

A message says which instance it is about. Whether its sender may speak for that instance is never taken from the
message: the kernel names the process that connected, its cgroup names the pod, and once the process has moved to
float, its PID namespace does, which it shares with the anchor that stayed behind in the pod's cgroup.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from runner.cpuset import CpuSet
from runner.errors import RefusedError
from runner.kernel.peers import INIT_PID_NAMESPACE, Peer
from runner.kubelet.pod_cgroups import ContainerCgroup

IDENTITY = "identity"
CPUSET = "cpuset"
FROZEN = "frozen"
CONFLICT = "conflict"
BUSY = "busy"
HOST = "host"


class RequestRefusedError(RefusedError):
    """A request is refused: *reason* for machines, *values* that were compared, the sentence for people.

    What is not *lasting* may heal by itself within seconds and is worth another look.
    """

    def __init__(self, reason: str, sentence: str, *, lasting: bool, **values: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.lasting = lasting
        self.values = values


@attrs.frozen
class ContainerProcess:
    """A process found in a container's cgroup: the *container*, the exact *cgroup*, and its PID namespace."""

    container: ContainerCgroup
    cgroup: str
    pid_namespace: int | None


@attrs.frozen
class ContainerIdentity:
    """Where a peer belongs: its *container*, and the *cgroup* its processes go back to."""

    container: ContainerCgroup
    cgroup: str


def identify_container(
    peer: Peer, own: ContainerCgroup | None, residents: Iterable[ContainerProcess], uid: str, own_namespace: int
) -> ContainerIdentity:
    """Return the container of instance *uid* if *peer* is its init process. Raises :class:`RequestRefusedError` otherwise.

    *own* is the container that the peer's own cgroup names, ``None`` if it is in none (any more); *residents* are
    the processes in the cgroups of the pod *uid*. *own_namespace* is the controller's.

    Only the init process of a PID namespace may speak: a shell in the container is in the same pod but must not tear
    its instance down. A pod that shares its PID namespace with the host, or among its containers, has no init of its
    own to speak for it, and the runtime could not end what has left the container's cgroup either.
    """
    if peer.pid_namespace in (INIT_PID_NAMESPACE, own_namespace):
        raise RequestRefusedError(
            IDENTITY,
            f"cannot identify process {peer.pid}: it is in the host's PID namespace; "
            "an instance's pod must not set hostPID",
            lasting=True,
        )
    if peer.inner_pid != 1:
        raise RequestRefusedError(
            IDENTITY,
            f"cannot identify process {peer.pid}: it is process {peer.inner_pid} of its PID namespace; only process 1 "
            "speaks for an instance, and its pod must not set shareProcessNamespace",
            lasting=True,
        )
    home = None
    if own is not None:
        home = ContainerIdentity(own, peer.cgroup)
    else:
        for resident in residents:
            if resident.pid_namespace == peer.pid_namespace:
                home = ContainerIdentity(resident.container, resident.cgroup)
                break
    if home is None and peer.cgroup.startswith("/.."):
        raise RequestRefusedError(
            IDENTITY,
            f"cannot identify process {peer.pid}: its cgroup {peer.cgroup!r} is outside this program's cgroup "
            "namespace; run the controller in the host's (a privileged container is)",
            lasting=True,
        )
    if home is None:
        raise RequestRefusedError(
            IDENTITY,
            f"cannot identify process {peer.pid}: it is in {peer.cgroup!r} and shares its PID namespace with no "
            f"process in the cgroup of {uid!r}; keep the anchor running in the pod's cgroup",
            lasting=True,
        )
    if home.container.owner != uid:
        raise RequestRefusedError(
            IDENTITY,
            f"cannot act for instance {uid!r}: process {peer.pid} belongs to {home.container.owner!r}",
            lasting=True,
        )
    return home


def check_container(home: ContainerIdentity, scope: CpuSet, held: CpuSet, uid: str) -> None:
    """Check that the container that asks to end instance *uid* is the one that has its CPUs.

    A sidecar is in the same pod, and init of its own PID namespace, but its *scope* has none of the CPUs that the
    instance has *held*. Raises :class:`RequestRefusedError`.
    """
    if scope.isdisjoint(held):
        raise RequestRefusedError(
            IDENTITY,
            f"cannot act for instance {uid!r}: its CPUs '{held}' are another container's of the pod; "
            f"{home.container.path} has '{scope}'",
            lasting=True,
        )


def check_agreement(asked: CpuSet, choices: Iterable[CpuSet], scope: CpuSet, uid: str) -> None:
    """Check that *asked* is what the kubelet's state and the container's ``cpuset.cpus`` (*scope*) both say.

    Raises :class:`RequestRefusedError`, a lasting one only if those two agree with each other: a container may start with a
    stale cpuset that the kubelet corrects within seconds (kubernetes#138731), and its entry may be seen late.
    """
    choices = tuple(choices)
    if asked in choices and asked == scope:
        return
    said = " or ".join(f"'{cpus}'" for cpus in choices) or "nothing"
    raise RequestRefusedError(
        CPUSET,
        f"cannot register instance {uid!r} with CPUs '{asked}': the kubelet's state says {said}, the container's "
        f"cpuset.cpus '{scope}'",
        lasting=scope in choices,
        requested=str(asked),
        kubelet=" or ".join(map(str, choices)),
        scope=str(scope),
    )
