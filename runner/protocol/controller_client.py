"""The node's controller as its clients see it: a question, an answer, and the descriptors that travel with it.

JSON-RPC 2.0 over a Unix stream socket, a message a line, one connection for each call. With the answer to
``registerCgroup`` come descriptors of control files that the controller has opened: whoever holds one may write to it
whatever his own rights are, so a pod needs neither privilege nor a mount of the host's cgroups
(``Documentation/admin-guide/cgroup-v2.rst``, "Delegation Containment"; the opener's credentials count since Linux 5.16).
"""

from __future__ import annotations

import array
import errno
import json
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

import attrs
import trio

from runner.cpuset import CpuSet
from runner.errors import HostError
from runner.kernel.cgroup import Cgroup
from runner.kernel.files import Descriptor
from runner.kernel.sockets import reachable

LONGEST_ANSWER = 1 << 16
_MOST_DESCRIPTORS = 16
_NOBODY = {errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.EAGAIN, errno.ENOTCONN}
"""The last two are a queue of connections that is full: it is there, and has no time yet."""
BUSY = -32005
"""The code of the controller that has as many connections or requests as it can take."""


class ControllerError(HostError):
    """The controller refused; *code* is its JSON-RPC error code."""

    def __init__(self, sentence: str, code: int) -> None:
        super().__init__(sentence)
        self.code = code


class ControllerAbsentError(HostError):
    """Nobody answers at the controller's socket, or no longer; it may come back."""


@attrs.frozen
class CgroupFds:
    """Descriptors of four control files, open for writing, by which processes and threads change their cgroup.

    Their order is that of the controller's message.
    """

    float_procs: Descriptor
    """``cgroup.procs`` of float."""
    instance_threads: Descriptor
    """``cgroup.threads`` of the instance's cgroup."""
    pod_procs: Descriptor
    """``cgroup.procs`` of the pod's own cgroup."""
    float_threads: Descriptor
    """``cgroup.threads`` of float."""


@attrs.frozen
class Registration:
    """The answer to ``registerCgroup``."""

    instance: PurePosixPath
    """The instance's cgroup, in the controller's mount of the hierarchy."""
    float_cgroup: PurePosixPath
    cpus: CpuSet
    """The CPUs of the instance's cgroup as the controller has read them back."""
    cgroup_fds: CgroupFds


async def register(path: PurePosixPath, uuid: str, cpus: CpuSet, pod: Cgroup, held: ExitStack) -> Registration:
    """Register the instance *uuid* on *cpus*; *held* closes its descriptors, whatever the answer is.

    *pod* is the group this process is in. Of a controller that sends no descriptors, the groups are entered by their
    paths; of one that names the instance's group alone, float is its sibling. May take the controller's patience with
    the kubelet, 12 s. Raises :class:`ControllerError`, :class:`ControllerAbsentError`, or
    :exc:`~runner.errors.HostError` for an answer that is not understood.
    """
    received = _Received(held)
    result = await _call(path, "registerCgroup", {"uuid": uuid, "cpuset": str(cpus)}, received)
    instance = PurePosixPath(_text(result, "cgroup_path"))
    float_cgroup = PurePosixPath(_text(result, "float_path", str(instance.parent / "float")))
    said = _text(result, "cpuset", str(cpus))
    try:
        granted = CpuSet.parse(said)
    except ValueError as error:
        raise HostError(f"cannot understand the controller: it grants CPUs {said!r}") from error
    match received.descriptors:
        case [float_procs, instance_threads, pod_procs, float_threads]:
            cgroup_fds = CgroupFds(float_procs, instance_threads, pod_procs, float_threads)
        # None at all, or the two of a controller that trusts anybody and does not know where we are at home.
        case [] | [_, _]:
            cgroup_fds = open_cgroup_fds(Cgroup(Path(float_cgroup)), Cgroup(Path(instance)), pod, held)
        case several:
            raise HostError(f"cannot understand the controller: it sends {len(several)} descriptors instead of 4")
    return Registration(instance, float_cgroup, granted, cgroup_fds)


async def deregister(path: PurePosixPath, uuid: str) -> None:
    """Let the controller remove the instance's group; one that is not there is fine. Raises like :func:`register`."""
    with ExitStack() as held:
        await _call(path, "deregisterCgroup", {"uuid": uuid}, _Received(held))


async def read_status(path: PurePosixPath) -> Mapping[str, object]:
    """Return what the controller says of itself (``getStatus``). Raises like :func:`register`."""
    with ExitStack() as held:
        result = await _call(path, "getStatus", {}, _Received(held))
    if not isinstance(result, dict):
        raise HostError(f"cannot understand the controller: its status is {result!r}")
    return result


def open_cgroup_fds(float_cgroup: Cgroup, instance: Cgroup, pod: Cgroup, held: ExitStack) -> CgroupFds:
    """Open the control files by the cgroups' paths; *held* closes them. Raises ``CgroupError``."""
    received = _Received(held)
    procs, threads = "cgroup.procs", "cgroup.threads"
    for group, file in ((float_cgroup, procs), (instance, threads), (pod, procs), (float_cgroup, threads)):
        received.take(group.open(file))
    return CgroupFds(*received.descriptors)


@attrs.frozen
class _Received:
    """Descriptors that *held* closes."""

    held: ExitStack
    descriptors: list[Descriptor] = attrs.field(factory=list)

    def take(self, number: int) -> None:
        self.descriptors.append(Descriptor(number))
        self.held.callback(self.descriptors[-1].close)


async def ask(who: str, path: PurePosixPath, method: str, params: Mapping[str, object]) -> object:
    """Return what *who*, such as ``"the instance"``, answers at another socket of the same kind. Raises like :func:`register`."""
    with ExitStack() as held:
        return await _call(path, method, params, _Received(held), who)


async def _call(
    path: PurePosixPath, method: str, params: Mapping[str, object], received: _Received, who: str = "the controller"
) -> object:
    """Return the result of a call; descriptors that come with it go to *received*."""
    question = {"jsonrpc": "2.0", "method": method, "params": params, "id": 1}
    try:
        with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            with reachable(path) as address:
                await connection.connect(address)
            line = json.dumps(question).encode() + b"\n"
            while line:
                line = line[await connection.send(line) :]
            answer = await _answer(connection, received, who)
    except OSError as error:
        if error.errno in _NOBODY:
            raise ControllerAbsentError(f"cannot reach {who} at {str(path)!r}") from error
        raise HostError(f"cannot talk to {who} at {str(path)!r}") from error
    return _result(method, answer, who)


async def _answer(connection: trio.socket.SocketType, received: _Received, who: str) -> bytes:
    """Return the line of the answer; descriptors that come with it go to *received* at once, so that none is lost."""
    answer = b""
    space = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
    while b"\n" not in answer:
        data, ancillary, _, _ = await connection.recvmsg(LONGEST_ANSWER, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                for number in numbers:
                    received.take(number)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "it hung up before it had answered")
        answer += data
        if len(answer) > LONGEST_ANSWER:
            raise HostError(f"cannot understand {who}: its answer is longer than {LONGEST_ANSWER} bytes")
    return answer.partition(b"\n")[0]


def _result(method: str, answer: bytes, who: str) -> object:
    try:
        document = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise HostError(f"cannot understand {who}: it answered {method!r} with {answer[:200]!r}") from error
    match document:
        case {"error": {"code": int(code), "message": str(message)}}:
            raise ControllerAbsentError(message) if code == BUSY else ControllerError(message, code)
        case {"result": result}:
            return result
    raise HostError(f"cannot understand {who}: it answered {method!r} with {answer[:200]!r}")


def _text(result: object, key: str, default: str | None = None) -> str:
    value = result.get(key, default) if isinstance(result, dict) else None
    if not isinstance(value, str):
        raise HostError(f"cannot understand the controller: its answer has no {key!r}")
    return value
