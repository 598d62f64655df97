"""The runner's own control socket: JSON-RPC 2.0, a message a line, for root of this container and nobody else.

``control.sock`` in the state directory. Who connects is known by the kernel's word (:mod:`runner.kernel.peers`). Whoever
goes away while a change is being made does not stop it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import trio

from runner.errors import Problem, RunnerError, SpecError, explain
from runner.instance.control.hotplug import DiskHotplug
from runner.kernel.peers import PeerError, Peers, boot_time
from runner.kernel.sockets import Socket, accepted
from runner.protocol.jsonrpc import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    Framer,
    OverlongError,
    RpcError,
    RpcResult,
    answer,
    format_error,
)
from runner.spec.instance import DiskSpec
from runner.spec.rules import size as size_rule
from runner.spec.rules import structure

log = logging.getLogger(__name__)

REFUSED = -32000
"""The code of everything that is understood and cannot be done."""
NOBODY = -32001
"""The code for who may not ask."""
LONGEST_MESSAGE = 64 << 10
MOST_CLIENTS = 8
SILENT_FOR = 30.0
"""Seconds a client may say nothing, or not read its answer."""

_PEERS = Peers(Path("/proc"))
_SIZE = size_rule(1 << 20)


async def accept(listener: Socket, disks: DiskHotplug) -> None:
    """Accept connections to *listener* for ever."""
    accepting = trio.socket.from_stdlib_socket(listener)
    async with trio.open_nursery() as clients:
        while True:
            connection = await accepted(accepting)
            if len(clients.child_tasks) < MOST_CLIENTS:
                clients.start_soon(_converse, connection, boot_time(), disks)
            else:
                connection.close()


async def _converse(connection: trio.socket.SocketType, accepted_at: float, disks: DiskHotplug) -> None:
    """Answer who has connected until he goes; never raises but for cancellation."""
    with connection:
        try:
            await _exchange(connection, accepted_at, disks)
        except RpcError as error:
            with contextlib.suppress(OSError), trio.move_on_after(SILENT_FOR):
                await connection.send(format_error(error))
        except OSError as error:
            log.debug("a client of the control socket was lost: %s", explain(error))
        except Exception:
            log.exception("a client of the control socket was lost by a fault of this program")


def _check(connection: trio.socket.SocketType, accepted_at: float) -> None:
    try:
        peer = _PEERS.identify(connection, accepted_at)
    except PeerError as error:
        raise RpcError(
            NOBODY, "cannot see who asks: his PID namespace is not the instance's; ask from inside its container"
        ) from error
    if peer.uid != 0 or peer.pid_namespace != _PEERS.own_namespace():
        raise RpcError(
            NOBODY,
            f"cannot serve process {peer.pid} of user {peer.uid}: only root in the instance's own PID namespace may ask; "
            "use `kubectl exec`",
        )


async def _exchange(connection: trio.socket.SocketType, accepted_at: float, disks: DiskHotplug) -> None:
    framer = Framer(LONGEST_MESSAGE)

    async def call(method: str, params: Mapping[str, object] | list[object]) -> RpcResult:
        return RpcResult(await _call(disks, method, params))

    while True:
        data = b""
        with trio.move_on_after(SILENT_FOR):
            data = await connection.recv(LONGEST_MESSAGE)
        _check(connection, accepted_at)  # only now, because who is sent away before he has spoken does not listen
        try:
            messages = list(framer.feed(data) if data else framer.flush())
        except OverlongError:
            raise RpcError(INVALID_REQUEST, f"Invalid Request: a message may have {LONGEST_MESSAGE} bytes") from None
        for message in messages:
            reply = await answer(message, call)
            line = b"" if reply is None else reply.line
            with trio.move_on_after(SILENT_FOR):
                while line:
                    line = line[await connection.send(line) :]
            if line:
                return
        if not data:
            return


async def _call(disks: DiskHotplug, method: str, params: Mapping[str, object] | list[object]) -> object:
    if isinstance(params, list):
        raise RpcError(INVALID_PARAMS, "Invalid params: they are given by name")
    try:
        match method:
            case "status":
                return await disks.status()
            case "disk.list":
                return await disks.listed()
            case "disk.attach":
                return await disks.attach(_disk(params))
            case "disk.detach":
                await disks.detach(_name(params, "name"))
                return {}
            case "disk.grow":
                return await disks.grow(_name(params, "name"), _size(params))
            case "cpu.set":
                _refuse_cpus()
    except RunnerError as error:
        raise RpcError(REFUSED, explain(error)) from error
    raise RpcError(METHOD_NOT_FOUND, f"Method not found: {method!r}")


def _disk(params: Mapping[str, object]) -> DiskSpec:
    problems: list[Problem] = []
    disk = structure(DiskSpec, params, "disk", problems)
    if disk is not None and disk.fd is not None:
        problems.append(Problem("disk.fd", "descriptors are handed over at the start alone", "name a path"))
    elif disk is not None and disk.path is None:
        problems.append(Problem("disk.path", "is missing", "it takes an absolute path"))
    if disk is None or problems:
        raise SpecError("ctl", problems)
    return disk


def _name(params: Mapping[str, object], key: str) -> str:
    value = params.get(key)
    if not isinstance(value, str):
        raise RpcError(INVALID_PARAMS, f"Invalid params: {key!r} must be a string")
    return value


def _size(params: Mapping[str, object]) -> int | None:
    value = params.get("size")
    if value is None:
        return None
    try:
        size = _SIZE.parse(value)
    except ValueError as error:
        raise RpcError(INVALID_PARAMS, f"Invalid params: size: {error}; it takes {_SIZE.allowed}") from error
    assert isinstance(size, int)  # noqa: S101 - a rule of ours
    return size


def _refuse_cpus() -> NoReturn:
    raise RpcError(
        REFUSED,
        "cannot change the number of vCPUs while the guest runs: each has a CPU of its own, and the kubelet gives a pod its "
        "exclusive CPUs once, at its start; change cpu.count and the pod's requests, and start it again",
    )
