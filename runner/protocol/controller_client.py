"""The client of the node's controller, and the constants of its protocol.

With the response to ``registerCgroup`` come descriptors of control files that the controller has opened. A process that holds one may
write to it whatever its own rights are, so a pod needs neither privilege nor a mount of the host's cgroups
(``Documentation/admin-guide/cgroup-v2.rst``, "Delegation Containment"; the opener's credentials count since Linux 5.16).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

import attrs

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError
from runner.base.values import frozen
from runner.kernel.cgroup import Cgroup
from runner.kernel.cgroup_fds import CgroupFds, open_cgroup_fds
from runner.kernel.files import Descriptor
from runner.protocol.jsonrpc import INVALID_PARAMS, METHOD_NOT_FOUND
from runner.protocol.jsonrpc_client import CallRefusedError, ReceivedFds, ask

_SERVER = "the controller"
PROTOCOL = 3
"""1: without ``sealCgroup`` and ``unsealCgroup``; 2: one float for all instances, and no domain for each."""
REPORT_SOCKET = "reports.sock"
"""The name of the socket for reports, beside that of the controller."""


class CpusHeldError(CallRefusedError):
    """Another instance still runs on the CPUs that are assigned to this one: wait for its end, at most *within* seconds.

    *cgroup_events* is a descriptor of its cgroup's file (:func:`runner.kernel.cgroup_events.emptied`).
    """

    def __init__(self, refusal: CallRefusedError, within: float, cgroup_events: Descriptor) -> None:
        super().__init__(refusal.message, refusal.code, refusal.data, remedy=refusal.remedy)
        self.within = within
        self.cgroup_events = cgroup_events


@frozen
class MemoryNeed:
    """The instance's memory, as reported to the controller."""

    overhead: int = 0
    """Bytes that it needs besides the guest's memory; 0 if unknown."""
    charged: bool = False
    """Whether the guest's memory is charged to the pod, so that the instance gets the rest of the pod's limit."""


@frozen
class Registration:
    """The answer to ``registerCgroup``."""

    instance: PurePosixPath
    """The cgroup of the vCPUs, in the controller's mount of the hierarchy."""
    float_cgroup: PurePosixPath
    """The cgroup of all other threads."""
    cpus: CpuSet
    """The CPUs of the instance's cgroup, as read back by the controller."""
    cgroup_fds: CgroupFds
    protocol: int | None = None
    """The controller's protocol version; ``None`` if the controller implements only the article's protocol."""

    def below_tree(self, cgroup: PurePosixPath) -> str:
        """Return the last two components of the path of one of both cgroups: ``instance-<pod uid>/float``."""
        return "/".join(cgroup.parts[-2:])


async def register(
    path: PurePosixPath,
    pod_uid: str,
    cpus: CpuSet,
    pod: Cgroup,
    stack: ExitStack,
    need: MemoryNeed | None = None,
) -> Registration:
    """Register the instance of the pod *pod_uid* on *cpus*; *stack* closes the descriptors, also when this raises.

    *pod* is the cgroup of this process. If the controller sends no descriptors, the cgroups are opened by their paths; if it names only the
    vCPUs' cgroup, float is its sibling. May take 12 s, in which the controller waits for the kubelet. Raises :class:`CpusHeldError`,
    :class:`CallRefusedError`, :class:`ServerAbsentError`, or :exc:`~runner.base.errors.HostError` for a response that is not understood.
    """
    received = ReceivedFds(stack)
    params: dict[str, object] = {"uuid": pod_uid, "cpuset": str(cpus)}
    ours = {**params, "protocol": PROTOCOL, **attrs.asdict(need or MemoryNeed())}
    try:
        try:
            result = await ask(_SERVER, path, "registerCgroup", ours, received)
        except CallRefusedError as error:
            if error.code != INVALID_PARAMS:
                raise
            result = await ask(_SERVER, path, "registerCgroup", params, received)  # with the article's methods only
    except CallRefusedError as error:
        match error.data.get("within"), received.descriptors:
            case int() | float() as within, [cgroup_events]:
                raise CpusHeldError(error, within, cgroup_events) from None
        raise
    instance = PurePosixPath(_text(result, "cgroup_path"))
    float_cgroup = PurePosixPath(_text(result, "float_path", str(instance.parent / "float")))
    cpuset = _text(result, "cpuset", str(cpus))
    protocol = _check_shape(result, instance, float_cgroup)
    try:
        granted = CpuSet.parse(cpuset)
    except ValueError as error:
        raise HostError(f"cannot understand the controller: it grants CPUs {cpuset!r}") from error
    match received.descriptors:
        case [float_procs, instance_threads, pod_procs, float_threads, *more] if len(more) <= 1:
            cgroup_fds = CgroupFds(float_procs, instance_threads, pod_procs, float_threads, *more)
        # None at all, or two, from a controller that trusts every peer and does not know the container's cgroup.
        case [] | [_, _]:
            cgroup_fds = open_cgroup_fds(Cgroup(Path(float_cgroup)), Cgroup(Path(instance)), pod, stack)
        case several:
            raise HostError(f"cannot understand the controller: it sends {len(several)} descriptors instead of 5")
    return Registration(instance, float_cgroup, granted, cgroup_fds, protocol)


def _check_shape(result: object, instance: PurePosixPath, float_cgroup: PurePosixPath) -> int | None:
    """Check that both cgroups are in one domain, and return the controller's protocol, ``None`` if it names none.

    Raises :exc:`~runner.base.errors.HostError`.
    """
    if instance.parent != float_cgroup.parent:
        raise HostError(
            f"cannot understand the controller: it names {str(instance)!r} and {str(float_cgroup)!r}, which have no parent "
            "in common"
        )
    protocol = result.get("protocol") if isinstance(result, dict) else None
    if protocol is not None and (not isinstance(protocol, int) or protocol < PROTOCOL):
        raise HostError(
            f"cannot use the controller: it is older than this program (protocol {protocol} instead of {PROTOCOL})",
            remedy="update the controller of this node first",
        )
    return protocol


async def deregister(path: PurePosixPath, pod_uid: str) -> None:
    """Ask the controller to remove the instance's cgroup; a missing one is fine. Raises like :func:`register`."""
    await ask(_SERVER, path, "deregisterCgroup", {"uuid": pod_uid})


async def seal(path: PurePosixPath, pod_uid: str) -> str:
    """Ask the controller to make the instance's cgroup an isolated partition; return the reason if it fails, otherwise an empty string.

    Raises like :func:`register`.
    """
    try:
        result = await ask(_SERVER, path, "sealCgroup", {"uuid": pod_uid})
    except CallRefusedError as error:
        if error.code == METHOD_NOT_FOUND:
            return "the controller is older than partitions; update it"
        raise
    return "" if _text(result, "guarantee") == "enforced" else _text(result, "reason")


async def unseal(path: PurePosixPath, pod_uid: str) -> None:
    """Ask the controller to end the partition of the instance's cgroup; a missing one is fine. Raises like :func:`register`."""
    await ask(_SERVER, path, "unsealCgroup", {"uuid": pod_uid})


async def tune(path: PurePosixPath, pod_uid: str, tuning: Mapping[str, object]) -> tuple[str, ...]:
    """Request *tuning* for the registered instance, and return the parts of it that are not available, with reasons.

    Raises like :func:`register`.
    """
    try:
        result = await ask(_SERVER, path, "tuneInstance", {"uuid": pod_uid, "tuning": tuning})
    except CallRefusedError as error:
        if error.code == METHOD_NOT_FOUND:
            raise HostError("the controller is older than tuning", remedy="update it") from None
        raise
    match result:
        case {"missing": [*reasons]}:
            return tuple(map(str, reasons))
    raise HostError(f"cannot understand the controller: it answered 'tuneInstance' with {result!r}")


async def read_status(path: PurePosixPath) -> Mapping[str, object]:
    """Return the controller's own state (``getStatus``). Raises like :func:`register`."""
    result = await ask(_SERVER, path, "getStatus", {})
    if not isinstance(result, dict):
        raise HostError(f"cannot understand the controller: its status is {result!r}")
    return result


def _text(result: object, key: str, default: str | None = None) -> str:
    value = result.get(key, default) if isinstance(result, dict) else None
    if not isinstance(value, str):
        raise HostError(f"cannot understand the controller: its answer has no {key!r}")
    return value
