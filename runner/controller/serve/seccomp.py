"""The check for pods without seccomp: in user namespaces that their processes make, these are root, and may write their cgroups' files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

import attrs

from runner.base.events import ControllerEvent
from runner.base.rate_limit import LogRateLimit
from runner.controller.serve import identity
from runner.controller.serve.identity import RequestRefusedError
from runner.controller.tree.tree import Tree
from runner.kernel.cgroup import CgroupError, LeasedError
from runner.kernel.peers import Peer
from runner.kernel.procfs import Procfs

log = logging.getLogger(__name__)

_MOST_JUDGED = 4
"""Threads of a pod whose seccomp mode is read: those with the lowest numbers, which mostly are its PID 1's."""
_REASON = "its process has no seccomp profile and may make user namespaces, in which it can write the limits and CPUs of its cgroups"
_REMEDY = (
    "set seccompProfile: RuntimeDefault for the pod, seccompDefault: true for the kubelet, or user.max_user_namespaces to 0 on "
    "the node"
)


@attrs.define(eq=False)
class SeccompCheck:
    """Checks by *procfs* whether processes in *tree*, and those that register, may become root of a user namespace.

    With *required*, such a registration is refused.
    """

    tree: Tree
    procfs: Procfs
    log_limit: LogRateLimit
    required: bool
    cached_for: float = 10.0
    """Seconds for which a result is cached: a status can have 700 KB, 20 ms each, any process may ask for it (``getStatus``), and any
    container's PID 1 cause a reading (``registerCgroup``)."""
    _found: dict[str | tuple[int, int], tuple[float, bool]] = attrs.field(factory=dict)
    """Pod UID, or process and PID namespace → time of the reading, and its result."""

    def check(self, peer: Peer, pod_uid: str) -> None:
        """Check *peer*, which registers *pod_uid*; log that it may become root, or with *required* raise :class:`RequestRefusedError`."""
        if not self._may_make_root((peer.pid, peer.pid_namespace), lambda: [peer.pid]):
            return
        if self.required:
            sentence = f"cannot register instance {pod_uid!r}: {_REASON}"
            raise RequestRefusedError(identity.HOST, sentence, lasting=True, remedy=_REMEDY)
        why = f"{_REASON}; {_REMEDY}"
        self.log_limit.log(log.warning, ControllerEvent.INSTANCE_WITHOUT_SECCOMP, pod_uid, why, peer=pod_uid)

    def without(self, pod_uids: Collection[str]) -> frozenset[str]:
        """Return the pods of *pod_uids* without seccomp, judged by their first processes in the tree."""
        return frozenset(filter(self._is_without, pod_uids))

    def _is_without(self, pod_uid: str) -> bool:
        """Tell whether *pod_uid* has no seccomp; one that hides its threads by a lease counts as such, because it owns the file."""
        try:
            return self._may_make_root(pod_uid, lambda: sorted(self.tree.float_of(pod_uid).threads())[:_MOST_JUDGED])
        except LeasedError:
            return True
        except CgroupError:  # it has been removed
            return False

    def _may_make_root(self, who: str | tuple[int, int], threads: Callable[[], list[int]]) -> bool:
        now = time.monotonic()
        self._found = {each: found for each, found in self._found.items() if now - found[0] < self.cached_for}
        if who not in self._found:
            if not (pids := threads()):
                return False
            self._found[who] = now, any(map(self.procfs.may_make_root, pids))
        return self._found[who][1]
