"""The processes that ask: the container of each, and whether it may act for an instance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import TypeVar
from weakref import WeakValueDictionary

import attrs
import trio

from runner.base.errors import HostError, explain
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
from runner.protocol.controller_client import BUSY
from runner.protocol.jsonrpc import RpcError
from runner.protocol.unix_server import Identify

T = TypeVar("T")

MOST_PROCESSES = 4096
"""Processes of a pod that are looked at for a request; one that has more finds its anchor among the first, or not."""
BETWEEN_CHECKPOINTS = 64
"""Processes that are looked at, 0.05 ms each, before other requests have their turn."""


@frozen
class RpcRequest:
    """A request, as the client has sent it."""

    identify: Identify
    arguments: Mapping[str, object]
    pod_uid: str = ""
    """The instance that it is for; empty for one that is for none."""


@frozen
class Callers:
    """The processes of *peers* that ask, the containers of *pods* that they are in, and the instances in *tree*.

    With :attr:`~runner.controller.tree.pods.PodCgroups.trusting` every peer may act for every instance.
    """

    peers: Peers
    pods: PodCgroups
    tree: Tree
    _looks: WeakValueDictionary[int, trio.Lock] = attrs.field(factory=WeakValueDictionary)
    """By PID namespace: of one container's requests, one at a time looks at the pod's processes."""

    def key(self, identify: Identify) -> int:
        """Return the peer's container, by its PID namespace, or the process itself if it is one of the node's own.

        All peers of namespaces that were made inside of containers count as one: none of them may act for an instance.
        Raises :class:`PeerError`.
        """
        peer, own_namespace = identify(), self.peers.own_namespace()
        if peer.nested:
            return own_namespace
        return peer.pid if peer.pid_namespace == own_namespace else peer.pid_namespace

    def pod_of(self, identify: Identify) -> str | None:
        """Return the pod of which alone the peer may learn, none if that is empty; ``None``: it may learn of all."""
        if self.pods.trusting or (peer := identify()).pid_namespace == self.peers.own_namespace():
            return None
        container = self.pods.container(peer.cgroup)
        return container.owner if container is not None else ""

    async def owner(self, request: RpcRequest) -> ContainerIdentity | None:
        """Return the peer's container as :meth:`identified` does, if it is the one that has the instance's CPUs."""
        caller = await self.identified(request)
        self.check_owner(request, caller)
        return caller

    def check_owner(self, request: RpcRequest, caller: ContainerIdentity | None) -> None:
        """Check that the peer lives still, and that *caller*, its container, has the CPUs of the instance."""
        self.peer(request.identify)
        group = self.tree.vcpus_of(request.pod_uid)
        if caller is not None and self.pods.kubelet and not self.pods.trusting and group.exists():
            # Not the CPUs in effect: a pod has none of its own while its instance is sealed.
            scope = self.pods.mount.at(caller.container.path).cpus()
            check_container(caller, scope, group.cpus(), request.pod_uid)

    def check_registered(self, what: str, pod_uid: str) -> None:
        """Check that there is an instance *pod_uid*, without which the peer cannot do *what* it asks for."""
        if not self.tree.vcpus_of(pod_uid).exists():
            raise RequestRefusedError(
                identity.CONFLICT,
                f"cannot {what} instance {pod_uid!r}: it is not registered; register it first",
                lasting=True,
            )

    async def identified(self, request: RpcRequest) -> ContainerIdentity | None:
        """Return the peer's container, if it may act for the instance; ``None`` if every peer may and this one has none.

        It stays true as long as the peer lives (:meth:`peer`): the init process of a container cannot leave its PID
        namespace, and the path of a container's cgroup names its pod for good.
        """
        peer = self.peer(request.identify)
        await trio.lowlevel.checkpoint()
        if peer is None:
            return None
        own = self.pods.container(peer.cgroup)
        if self.pods.trusting:
            return None if own is None else ContainerIdentity(own, peer.cgroup)
        own_namespace = self.peers.own_namespace()
        check_init_process(peer, own_namespace)  # first, because only for such a peer processes are looked at
        witnesses = () if own is not None else await self._witnesses(peer, request.pod_uid)
        return identify_container(peer, own, witnesses, request.pod_uid, own_namespace)

    def peer(self, identify: Identify) -> Peer | None:
        """Return the process that connected, which lives still; ``None`` if it cannot be identified and every peer may act.

        Raises :class:`RequestRefusedError`.
        """
        try:
            return identify()
        except PeerError as error:
            if self.pods.trusting:
                return None
            raise RequestRefusedError(identity.IDENTITY, explain(error), lasting=True) from error

    async def _witnesses(self, peer: Peer, pod_uid: str) -> tuple[ContainerProcess, ...]:
        """Return a process in the peer's PID namespace of each container of *pod_uid* that has one."""
        found: dict[ContainerCgroup, ContainerProcess] = {}

        def look(process: MemberProcess) -> None:
            container = process.container
            if container not in found and self._is_witness(process, peer):
                made_as = cgroup_id(self.pods.mount.at(container.path).path)
                if made_as is not None:  # else it has just been removed
                    found[container] = ContainerProcess(container, process.cgroup, peer.pid_namespace, made_as)

        await self.look_at_each(self.pods.processes(pod_uid), peer, look)
        return tuple(found.values())

    def _is_witness(self, process: MemberProcess, peer: Peer) -> bool:
        """Tell whether *process* is in the peer's PID namespace, and in its cgroup still.

        It may have ended since it was read there, and the peer may have given its number to another one, in a cgroup of its own.
        """
        if self.peers.namespace(process.pid) != peer.pid_namespace:
            return False
        try:
            return self.pods.procfs.cgroup(process.pid) == process.cgroup
        except HostError:  # it has ended
            return False

    async def look_at_each(self, processes: Iterable[T], peer: Peer | None, look: Callable[[T], None]) -> None:
        """Call *look* with each of *processes*, at most :data:`MOST_PROCESSES`, when other requests of the peer's container do not."""
        async with self._looks.setdefault(0 if peer is None else peer.pid_namespace, trio.Lock()):
            for number, process in enumerate(islice(processes, MOST_PROCESSES)):
                if number % BETWEEN_CHECKPOINTS == 0:
                    await trio.lowlevel.checkpoint()
                look(process)


def busy_error(counters: ControllerCounters, reason: str) -> RpcError:
    """Return the error for what would be more than is taken at a time, and count it."""
    counters.refusals[identity.BUSY] += 1
    return RpcError(BUSY, f"cannot take more: {reason}; wait for them", {"reason": identity.BUSY})
