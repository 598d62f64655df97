"""The decisions behind a registration (pure): which peer may act for which instance, and on which CPUs.

A request names an instance. Whether its sender may act for that instance is never taken from the request: the kernel names
the process that connected, and its cgroup names the pod. Once the process has moved to float, its PID namespace names the
pod instead: the anchor that stayed in the pod's cgroup has the same one.
"""

from __future__ import annotations

from collections.abc import Iterable

from runner.base.cpuset import CpuSet
from runner.base.errors import RefusedError
from runner.base.values import frozen
from runner.kernel.peers import INIT_PID_NAMESPACE, Peer
from runner.kubelet.pod_cgroups import ContainerCgroup
from runner.kubelet.state import CpuState

IDENTITY = "identity"
CPUSET = "cpuset"
FROZEN = "frozen"
CONFLICT = "conflict"
BUSY = "busy"
HOST = "host"


class RequestRefusedError(RefusedError):
    """The refusal of a request: *reason* for programs, *sentence* and *remedy* for people, and the *values* that were compared.

    The cause of a refusal that is not *lasting* may pass within seconds: the request is tried again.
    """

    def __init__(self, reason: str, sentence: str, *, lasting: bool, remedy: str = "", **values: str | float) -> None:
        super().__init__(sentence, remedy=remedy)
        self.reason = reason
        self.lasting = lasting
        self.values = values


@frozen
class ContainerProcess:
    """A process found in a container's cgroup: the *container*, the exact *cgroup*, and its PID namespace."""

    container: ContainerCgroup
    cgroup: str
    pid_namespace: int | None
    container_id: int = 0
    """The id of the container's own cgroup: the kernel numbers cgroups in the order in which they are made."""


@frozen
class ContainerIdentity:
    """The container of a peer, and the *cgroup* to which its processes return."""

    container: ContainerCgroup
    cgroup: str


def check_init_process(peer: Peer, own_namespace: int) -> None:
    """Check that *peer* is the init process of a container. Raises :class:`RequestRefusedError` otherwise.

    *own_namespace* is the controller's PID namespace. Only the init process of a container may act: a shell in the
    container is in the same pod but must not tear its instance down. A pod that shares its PID namespace with the host, or
    among its containers, has no init process of its own, and the runtime could not end a process that has left the
    container's cgroup either.
    """
    if peer.pid_namespace in (INIT_PID_NAMESPACE, own_namespace):
        raise RequestRefusedError(
            IDENTITY,
            f"cannot identify process {peer.pid}: it is in the host's PID namespace",
            remedy="an instance's pod must not set hostPID",
            lasting=True,
        )
    if peer.inner_pid != 1:
        raise RequestRefusedError(
            IDENTITY,
            f"cannot identify process {peer.pid}: it is process {peer.inner_pid} of its container's PID namespace, and only "
            "process 1 may act for an instance",
            remedy="its pod must not set shareProcessNamespace",
            lasting=True,
        )


def identify_container(
    peer: Peer, own: ContainerCgroup | None, processes: Iterable[ContainerProcess], pod_uid: str, own_namespace: int
) -> ContainerIdentity:
    """Return the container of instance *pod_uid* if *peer* is its init process. Raises :class:`RequestRefusedError` otherwise.

    *own* is the container that the peer's own cgroup names, ``None`` if it is in none or has left it; *processes* are some
    of those in the cgroups of the pod *pod_uid*. *own_namespace* is the controller's PID namespace.

    Several containers may have processes in the peer's PID namespace (``kubectl debug --target``). The oldest of them
    has the namespace's first process: all others could join the namespace only once it existed.
    """
    check_init_process(peer, own_namespace)
    found = None
    if own is not None:
        found = ContainerIdentity(own, peer.cgroup)
    else:
        sharing = [process for process in processes if process.pid_namespace == peer.pid_namespace]
        if sharing:
            first = min(sharing, key=lambda process: process.container_id)
            found = ContainerIdentity(first.container, first.cgroup)
    if found is None and peer.cgroup.startswith("/.."):
        raise RequestRefusedError(
            IDENTITY,
            f"cannot identify process {peer.pid}: its cgroup {peer.cgroup!r} is outside this program's cgroup namespace",
            remedy="run the controller in the host's (a privileged container is)",
            lasting=True,
        )
    if found is None and ".slice:" in peer.cgroup:  # systemd's slice:prefix:name, misread as a path
        raise RequestRefusedError(
            IDENTITY,
            f"cannot identify process {peer.pid}: its cgroup {peer.cgroup!r} is in no pod's: the container runtime takes a "
            "name for systemd for a path",
            remedy="give both the same cgroup driver (SystemdCgroup = true, or cgroupDriver: cgroupfs)",
            lasting=True,
        )
    if found is None and (above := peer.cgroup.partition("/kubepods")[0]) not in {"", peer.cgroup}:
        raise RequestRefusedError(
            IDENTITY,
            f"cannot identify process {peer.pid}: its kubelet's pods are in {above!r}, whose owner could make any path in it",
            remedy="give that kubelet a cgroup namespace of its own (docker run --cgroupns=private), and the controller",
            lasting=True,
        )
    if found is None:
        raise RequestRefusedError(
            IDENTITY,
            f"cannot identify process {peer.pid}: it is in {peer.cgroup!r} and shares its PID namespace with no "
            f"process in the cgroup of {pod_uid!r}",
            remedy="keep the anchor running in the pod's cgroup",
            lasting=True,
        )
    if found.container.owner != pod_uid:
        raise RequestRefusedError(
            IDENTITY,
            f"cannot act for instance {pod_uid!r}: process {peer.pid} belongs to {found.container.owner!r}",
            lasting=True,
        )
    return found


def check_container(caller: ContainerIdentity, scope: CpuSet, held: CpuSet, pod_uid: str) -> None:
    """Check that the container that requests the end of instance *pod_uid* is the one that has its CPUs.

    A sidecar is in the same pod, and the init process of its own PID namespace, but its *scope* has none of the CPUs that
    the instance has *held*. Raises :class:`RequestRefusedError`.
    """
    if scope.isdisjoint(held):
        raise RequestRefusedError(
            IDENTITY,
            f"cannot act for instance {pod_uid!r}: its CPUs '{held}' are another container's of the pod, and "
            f"{caller.container.path} has '{scope}'",
            lasting=True,
        )


def check_agreement(asked: CpuSet, state: CpuState, scope: CpuSet, pod_uid: str) -> None:
    """Check that *asked* equals the CPUs of one of the pod's containers in *state*, and the container's ``cpuset.cpus`` (*scope*).

    Raises :class:`RequestRefusedError`, a lasting one only if state and cpuset agree: a container may start with a stale cpuset that the
    kubelet corrects within seconds (kubernetes#138731), and its entry may appear late.
    """
    choices = state.choices(pod_uid)
    if asked in choices and asked == scope:
        return
    by_claims = state.policy == "none"
    recorded = " or ".join(f"'{cpus}'" for cpus in choices) or "nothing"
    has = f"the node's resource claims give it {recorded}" if by_claims else f"the kubelet's state has {recorded}"
    remedy = ""
    if not choices:
        remedy = (
            "name a claim for CPUs in resources.claims of the container, which must be running"
            if by_claims
            else "ask for whole CPUs in a Guaranteed pod (with spec.resources also the kubelet's gate PodLevelResourceManagers)"
        )
    raise RequestRefusedError(
        CPUSET,
        f"cannot register instance {pod_uid!r} with CPUs '{asked}': {has}, the container's cpuset.cpus '{scope}'",
        lasting=scope in choices,
        remedy=remedy,
        requested=str(asked),
        kubelet=" or ".join(map(str, choices)),
        scope=str(scope),
    )
