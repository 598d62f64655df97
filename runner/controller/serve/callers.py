"""The processes that send requests: the container of each, and the check whether it may act for an instance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import TypeVar
from weakref import WeakValueDictionary

import attrs
import trio

from runner.base.errors import HostError, explained
from runner.base.values import frozen
from runner.controller.metrics import ControllerCounters
from runner.controller.serve import identity
from runner.controller.serve.identity import (
    ContainerIdentity,
    ContainerProcess,
    RequestRefusedError,
    check_container,
    check_init_process,
    identify_container,
)
from runner.controller.tree.pods import MemberProcess, PodCgroups
from runner.controller.tree.tree import Tree
from runner.kernel.device_filter import cgroup_id
from runner.kernel.peers import Peer, PeerError, Peers
from runner.kubelet.pod_cgroups import ContainerCgroup
from runner.protocol.jsonrpc import BUSY, RpcError
from runner.protocol.unix_server import Identify

T = TypeVar("T")

MOST_PROCESSES = 4096
"""Processes of a pod that are examined for a request; in a larger pod the anchor may not be among them."""
BETWEEN_CHECKPOINTS = 64
"""Processes that are examined, 0.05 ms each, before other requests have their turn."""


@frozen
class RpcRequest:
    """A request, as the client has sent it."""

    identify: Identify
    arguments: Mapping[str, object]
    pod_uid: str = ""
    """The instance that it is about; empty if it is about none."""


@frozen
class Callers:
    """The requesting processes of *peers*, their containers among *pods*, and the instances in *tree*.

    With :attr:`~runner.controller.tree.pods.PodCgroups.trusting` every peer may act for every instance.
    """

    peers: Peers
    pods: PodCgroups
    tree: Tree
    _looks: WeakValueDictionary[int, trio.Lock] = attrs.field(factory=WeakValueDictionary)
    """PID namespace → lock: of one container's requests, one at a time examines the pod's processes."""

    def key(self, identify: Identify) -> int:
        """Return the PID namespace of the peer's container, or the process itself if it is one of the node's own.

        All peers of namespaces that were made inside of containers count as one: none of them may act for an instance.
        Raises :class:`PeerError`.
        """
        peer, own_namespace = identify(), self.peers.own_namespace()
        if peer.nested:
            return own_namespace
        return peer.pid if peer.pid_namespace == own_namespace else peer.pid_namespace

    def pod_of(self, identify: Identify) -> str | None:
        """Return the only pod that the peer may learn about, empty if there is none; ``None`` if it may learn about all."""
        if self.pods.trusting or (peer := identify()).pid_namespace == self.peers.own_namespace():
            return None
        container = self.pods.container(peer.cgroup)
        return container.owner if container is not None else ""

    async def authorize(self, request: RpcRequest) -> ContainerIdentity | None:
        """Check that the peer may act for the instance, as :meth:`check_owner` does, and return its container as :meth:`identified` does.

        Raises :class:`RequestRefusedError` unless it may.
        """
        caller = await self.identified(request)
        self.check_owner(request, caller)
        return caller

    def check_owner(self, request: RpcRequest, caller: ContainerIdentity | None) -> None:
        """Check that the peer still lives, and that *caller*, its container, has the CPUs of the instance."""
        self.peer(request.identify)
        group = self.tree.vcpus_of(request.pod_uid)
        if caller is not None and self.pods.kubelet and not self.pods.trusting and group.exists():
            # Not the effective CPUs: a pod has none of its own while its instance is sealed.
            scope = self.pods.mount.at(caller.container.path).cpus()
            check_container(caller, scope, group.cpus(), request.pod_uid)

    def check_registered(self, what: str, pod_uid: str) -> None:
        """Check that instance *pod_uid* is registered, which the request *what* requires."""
        if not self.tree.vcpus_of(pod_uid).exists():
            raise RequestRefusedError(
                identity.CONFLICT,
                f"cannot {what} instance {pod_uid!r}: it is not registered",
                lasting=True,
                remedy="register it first",
            )

    async def identified(self, request: RpcRequest) -> ContainerIdentity | None:
        """Return the peer's container, if it may act for the instance; ``None`` if every peer may and this one has none.

        The result is valid as long as the peer lives (:meth:`peer`): the init process of a container cannot leave its PID namespace, and
        the path of a container's cgroup names its pod for good.
        """
        peer = self.peer(request.identify)
        await trio.lowlevel.checkpoint()
        if peer is None:
            return None
        own = self.pods.container(peer.cgroup)
        if self.pods.trusting:
            return None if own is None else ContainerIdentity(own, peer.cgroup)
        own_namespace = self.peers.own_namespace()
        check_init_process(peer, own_namespace)  # first, because processes are examined only for such a peer
        witnesses = () if own is not None else await self._witnesses(peer, request.pod_uid)
        return identify_container(peer, own, witnesses, request.pod_uid, own_namespace)

    def peer(self, identify: Identify) -> Peer | None:
        """Return the process that connected and still lives; ``None`` if it cannot be identified and every peer may act.

        Raises :class:`RequestRefusedError`.
        """
        try:
            return identify()
        except PeerError as error:
            if self.pods.trusting:
                return None
            sentence, remedy = explained(error)
            raise RequestRefusedError(identity.IDENTITY, sentence, lasting=True, remedy=remedy) from error

    async def _witnesses(self, peer: Peer, pod_uid: str) -> tuple[ContainerProcess, ...]:
        """Return, for each container of *pod_uid* that has one, a process in the peer's PID namespace."""
        found: dict[ContainerCgroup, ContainerProcess] = {}

        def examine(process: MemberProcess) -> None:
            container = process.container
            if container not in found and self._is_witness(process, peer):
                made_as = cgroup_id(self.pods.mount.at(container.path).path)
                if made_as is not None:  # otherwise it has just been removed
                    found[container] = ContainerProcess(container, process.cgroup, peer.pid_namespace, made_as)

        await self.examine_each(self.pods.processes(pod_uid), peer, examine)
        return tuple(found.values())

    def _is_witness(self, process: MemberProcess, peer: Peer) -> bool:
        """Tell whether *process* is still in the peer's PID namespace, and in its cgroup.

        It may have ended since it was listed, and the peer may have reused its number for a process in a cgroup of its own.
        """
        if self.peers.namespace(process.pid) != peer.pid_namespace:
            return False
        try:
            return self.pods.procfs.cgroup(process.pid) == process.cgroup
        except HostError:  # it has ended
            return False

    async def examine_each(self, processes: Iterable[T], peer: Peer | None, examine: Callable[[T], None]) -> None:
        """Call *examine* with each of *processes*, at most :data:`MOST_PROCESSES`, one request of the peer's container at a time."""
        async with self._looks.setdefault(0 if peer is None else peer.pid_namespace, trio.Lock()):
            for number, process in enumerate(islice(processes, MOST_PROCESSES)):
                if number % BETWEEN_CHECKPOINTS == 0:
                    await trio.lowlevel.checkpoint()
                examine(process)


def busy_error(counters: ControllerCounters, reason: str) -> RpcError:
    """Return the error for a request beyond a limit, and count it."""
    counters.refusals[identity.BUSY] += 1
    return RpcError(BUSY, f"cannot take more: {reason}", {"reason": identity.BUSY}, remedy="wait for them")
