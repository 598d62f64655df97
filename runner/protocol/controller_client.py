"""The client of the node's controller, and of other sockets that speak its protocol.

JSON-RPC 2.0 over a Unix stream socket, one message a line, one connection for each call. With the response to
``registerCgroup`` come descriptors of control files that the controller has opened. A process that holds one may write to
it whatever its own rights are, so a pod needs neither privilege nor a mount of the host's cgroups
(``Documentation/admin-guide/cgroup-v2.rst``, "Delegation Containment"; the opener's credentials count since Linux 5.16).
"""

from __future__ import annotations

import errno
import json
import random
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path, PurePosixPath

import attrs
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError
from runner.base.values import frozen
from runner.kernel.cgroup import Cgroup
from runner.kernel.cgroup_fds import CgroupFds, open_cgroup_fds
from runner.kernel.fd_passing import receive_with_fds, send_with_fds
from runner.kernel.files import Descriptor
from runner.kernel.line_reader import LineFramer, OverlongError, receive_line
from runner.kernel.sockets import reachable

LONGEST_RESPONSE = 1 << 16
"""Bytes of a response, without its line end."""
LONGEST_LIST = 1 << 20
"""Bytes of a node's list of instances, which may be a thousand."""
_MOST_FDS = 16
"""Descriptors that may come with one response."""
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED}
_BUSY = {errno.EAGAIN, errno.ECONNRESET, errno.EPIPE}
"""EAGAIN: the queue of connections is full; the server runs, and cannot accept yet. The others: the connection was closed in favour of
another one, or the server has just ended."""
CONNECTED_WITHIN = 2.0
"""Seconds for a place in the queue of connections."""
_ATTEMPTS_APART = (0.001, 0.005)
"""Seconds between two attempts, random, so that runners that start together do not collide again."""
_METHOD_NOT_FOUND, _INVALID_PARAMS = -32601, -32602
PROTOCOL = 3
"""1: without ``sealCgroup`` and ``unsealCgroup``; 2: one float for all instances, and no domain for each."""
REPORT_SOCKET = "reports.sock"
"""The name of the socket for reports, beside that of the controller."""
BUSY = -32005
"""The error code of a server that has reached its limit of connections or requests."""


class ControllerError(HostError):
    """The controller refused; *code* is its JSON-RPC error code, *data* further values."""

    def __init__(self, sentence: str, code: int, data: Mapping[str, object] | None = None, *, remedy: str = "") -> None:
        super().__init__(sentence, remedy=remedy)
        self.code = code
        self.data = data or {}


class CpusHeldError(ControllerError):
    """Another instance still runs on the CPUs that are assigned to this one: wait for its end, at most *within* seconds.

    *cgroup_events* is a descriptor of its cgroup's file (:func:`runner.kernel.cgroup_events.emptied`).
    """

    def __init__(self, refusal: ControllerError, within: float, cgroup_events: Descriptor) -> None:
        super().__init__(refusal.message, refusal.code, refusal.data, remedy=refusal.remedy)
        self.within = within
        self.cgroup_events = cgroup_events


class ControllerAbsentError(HostError):
    """No process answers at the controller's socket, or it is busy; a later attempt may succeed."""


class ControllerBusyError(ControllerAbsentError):
    """The controller has reached its limit of requests; it may answer within milliseconds."""


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
    held: ExitStack,
    need: MemoryNeed | None = None,
) -> Registration:
    """Register the instance of the pod *pod_uid* on *cpus*; *held* closes the descriptors, also when this raises.

    *pod* is the cgroup of this process. If the controller sends no descriptors, the cgroups are opened by their paths; if it names only the
    vCPUs' cgroup, float is its sibling. May take 12 s, in which the controller waits for the kubelet. Raises :class:`CpusHeldError`,
    :class:`ControllerError`, :class:`ControllerAbsentError`, or :exc:`~runner.base.errors.HostError` for a response that is not understood.
    """
    received = _ReceivedFds(held)
    params: dict[str, object] = {"uuid": pod_uid, "cpuset": str(cpus)}
    ours = {**params, "protocol": PROTOCOL, **attrs.asdict(need or MemoryNeed())}
    try:
        try:
            result = await _call(path, "registerCgroup", ours, received)
        except ControllerError as error:
            if error.code != _INVALID_PARAMS:
                raise
            result = await _call(path, "registerCgroup", params, received)  # with the article's methods only
    except ControllerError as error:
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
            cgroup_fds = open_cgroup_fds(Cgroup(Path(float_cgroup)), Cgroup(Path(instance)), pod, held)
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
    with ExitStack() as held:
        await _call(path, "deregisterCgroup", {"uuid": pod_uid}, _ReceivedFds(held))


async def seal(path: PurePosixPath, pod_uid: str) -> str:
    """Ask the controller to make the instance's cgroup an isolated partition; return the reason if it fails, otherwise an empty string.

    Raises like :func:`register`.
    """
    with ExitStack() as held:
        try:
            result = await _call(path, "sealCgroup", {"uuid": pod_uid}, _ReceivedFds(held))
        except ControllerError as error:
            if error.code == _METHOD_NOT_FOUND:
                return "the controller is older than partitions; update it"
            raise
    return "" if _text(result, "guarantee") == "enforced" else _text(result, "reason")


async def unseal(path: PurePosixPath, pod_uid: str) -> None:
    """Ask the controller to end the partition of the instance's cgroup; a missing one is fine. Raises like :func:`register`."""
    with ExitStack() as held:
        await _call(path, "unsealCgroup", {"uuid": pod_uid}, _ReceivedFds(held))


async def tune(path: PurePosixPath, pod_uid: str, tuning: Mapping[str, object]) -> tuple[str, ...]:
    """Request *tuning* for the registered instance, and return the parts of it that are not available, with reasons.

    Raises like :func:`register`.
    """
    with ExitStack() as held:
        try:
            result = await _call(path, "tuneInstance", {"uuid": pod_uid, "tuning": tuning}, _ReceivedFds(held))
        except ControllerError as error:
            if error.code == _METHOD_NOT_FOUND:
                raise HostError("the controller is older than tuning", remedy="update it") from None
            raise
    match result:
        case {"missing": [*reasons]}:
            return tuple(map(str, reasons))
    raise HostError(f"cannot understand the controller: it answered 'tuneInstance' with {result!r}")


async def read_status(path: PurePosixPath) -> Mapping[str, object]:
    """Return the controller's own state (``getStatus``). Raises like :func:`register`."""
    with ExitStack() as held:
        result = await _call(path, "getStatus", {}, _ReceivedFds(held))
    if not isinstance(result, dict):
        raise HostError(f"cannot understand the controller: its status is {result!r}")
    return result


@frozen
class _ReceivedFds:
    """Descriptors that were received; *held* closes them."""

    held: ExitStack
    descriptors: list[Descriptor] = attrs.field(factory=list)

    def take(self, number: int) -> None:
        """Own the open descriptor *number*."""
        self.descriptors.append(Descriptor(number))
        self.held.callback(self.descriptors[-1].close)


async def ask(server: str, path: PurePosixPath, method: str, params: Mapping[str, object]) -> object:
    """Call *method* of the server at *path*, and return its result; *server* names it in errors, such as ``"the instance"``.

    Raises like :func:`register`.
    """
    with ExitStack() as held:
        return await _call(path, method, params, _ReceivedFds(held), server)


async def _call(
    path: PurePosixPath,
    method: str,
    params: Mapping[str, object],
    received: _ReceivedFds,
    server: str = "the controller",
) -> object:
    """Return the result of a call; descriptors that come with it go to *received*."""
    async with connected(path, server) as connection:
        return await connection.call(method, params, received)


@frozen
class ControllerConnection:
    """A connection to a *server*, for successive calls."""

    _connection: trio.socket.SocketType
    _server: str

    async def call(self, method: str, params: Mapping[str, object], received: _ReceivedFds | None = None) -> object:
        """Return the result of *method*; descriptors sent with it go to *received*, or are closed by the kernel without it.

        Raises :class:`ControllerError`, :class:`ControllerBusyError`, :exc:`~runner.base.errors.HostError` for a response
        that is not understood, and ``OSError``.
        """
        request = {"jsonrpc": "2.0", "method": method, "params": params, "id": 1}
        await send_with_fds(self._connection, json.dumps(request, separators=(",", ":")).encode() + b"\n")
        longest = LONGEST_LIST if method == "listInstances" else LONGEST_RESPONSE
        response = await _response(self._connection, received, self._server, longest)
        return _result(method, response, self._server)


@asynccontextmanager
async def connected(path: PurePosixPath, server: str = "the controller") -> AsyncIterator[ControllerConnection]:
    """Hold a connection to *server* at *path*; an ``OSError`` of the block counts as one of this connection.

    Raises :class:`ControllerAbsentError`, or :exc:`~runner.base.errors.HostError`.
    """
    with (
        _explained(path, server),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as connecting,
    ):
        with reachable(path) as address:
            await _connect(connecting, address)
        yield ControllerConnection(trio.socket.from_stdlib_socket(connecting), server)


@contextmanager
def _explained(path: PurePosixPath, server: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _BUSY:
            raise ControllerBusyError(f"cannot reach {server} at {str(path)!r}") from error
        if error.errno in _ABSENT:
            raise ControllerAbsentError(f"cannot reach {server} at {str(path)!r}") from error
        raise HostError(f"cannot talk to {server} at {str(path)!r}") from error


async def _connect(connection: socket.socket, address: str) -> None:
    """Connect the non-blocking *connection*; wait :data:`CONNECTED_WITHIN` for a place in the server's queue.

    A full queue causes EAGAIN at once (``unix_stream_connect`` of ``net/unix/af_unix.c``), and no event reports a free place. Even if
    another process fills the queue endlessly, a place is free every few attempts, for microseconds.
    """
    deadline = trio.current_time() + CONNECTED_WITHIN
    while True:
        try:
            connection.connect(address)
        except BlockingIOError:
            if trio.current_time() >= deadline:
                raise
        else:
            return
        await trio.sleep(random.uniform(*_ATTEMPTS_APART))  # noqa: S311 - no secret


async def _response(
    connection: trio.socket.SocketType, received: _ReceivedFds | None, server: str, longest: int
) -> bytes:
    async def receive(size: int) -> bytes:
        if received is None:
            return await connection.recv(size)
        return await receive_with_fds(connection, size, _MOST_FDS - len(received.descriptors), received.take)

    try:
        line = await receive_line(receive, LineFramer(longest), chunk=LONGEST_RESPONSE)
    except OverlongError:
        raise HostError(f"cannot understand {server}: its answer is longer than {longest} bytes") from None
    if line is None:
        raise ConnectionResetError(errno.ECONNRESET, "it hung up before it had answered")
    return line


def _result(method: str, response: bytes, server: str) -> object:
    try:
        document = json.loads(response)
    except (ValueError, RecursionError) as error:
        raise HostError(f"cannot understand {server}: it answered {method!r} with {response[:200]!r}") from error
    match document:
        case {"error": {"code": int(code), "message": str(message)} as error}:
            given = error.get("data")
            data = given if isinstance(given, dict) else {}
            remedy = str(data.get("remedy", ""))
            sentence = message.removesuffix(f"; {remedy}")
            if code == BUSY:
                raise ControllerBusyError(sentence, remedy=remedy)
            raise ControllerError(sentence, code, data, remedy=remedy)
        case {"result": result}:
            return result
    raise HostError(f"cannot understand {server}: it answered {method!r} with {response[:200]!r}")


def _text(result: object, key: str, default: str | None = None) -> str:
    value = result.get(key, default) if isinstance(result, dict) else None
    if not isinstance(value, str):
        raise HostError(f"cannot understand the controller: its answer has no {key!r}")
    return value
