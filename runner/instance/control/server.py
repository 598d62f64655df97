"""The runner's own control socket: JSON-RPC 2.0, one message a line, for root of this container only.

It is ``control.sock`` in the state directory. The kernel names the process that connects (:mod:`runner.kernel.peers`). A client that
disconnects during its change does not stop the change.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import PurePosixPath
from typing import NoReturn

import trio

from runner.base.errors import Problem, RefusedError, RunnerError, SpecError, explain, problems_of
from runner.base.events import InstanceEvent
from runner.base.tasks import capture, first_of
from runner.base.values import frozen
from runner.instance.change.disk_hotplug import disks_of
from runner.instance.change.running_instance import RunningInstance
from runner.instance.change.vcpus import vcpus_of
from runner.instance.control.method_table import METHODS, PROTOCOL
from runner.instance.control.status import read_status, runner_document
from runner.instance.control_json import DiskDocument, DisksAnswer, NothingAnswer, RunnerAnswer
from runner.instance.parts.qemu import EXITS_WITHIN
from runner.kernel.peers import Peer, PeerError, Peers
from runner.kernel.shared_directories import followed, shared_directories
from runner.kernel.sockets import Socket
from runner.protocol.jsonrpc import BUSY, INVALID_PARAMS, METHOD_NOT_FOUND, RpcError, RpcResult
from runner.protocol.qmp import ExecInterruptedError, SilentError
from runner.protocol.unix_server import Identify, SocketLimits, UnixServer
from runner.spec.instance import DiskSpec
from runner.spec.refusals import problem_documents
from runner.spec.rules import size as size_rule
from runner.spec.rules import structure

log = logging.getLogger(__name__)

Answer = Mapping[str, object]
"""The result of a method without the number of the protocol."""
Params = Mapping[str, object]

REFUSED = -32000
"""The error code for a valid request that cannot be carried out."""
NOT_ALLOWED = -32001
"""The error code for a client that has no permission."""
PROGRAM_ELSEWHERE = "put the program elsewhere"
LIMITS = SocketLimits(connections=8, newcomers=0, connections_per_peer=8, in_flight=8, first_byte=30.0, idle=30.0)
"""A client of this socket is a person's command or a script: few, and patient."""

_SIZE = size_rule(1 << 20)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


async def serve(running: RunningInstance, listener: Socket) -> None:
    """Serve the *running* instance to the clients that connect to *listener*, until cancelled."""
    async with trio.open_nursery() as nursery:
        methods = ControlMethods(running, Peers(running.supervisor.roots.proc), nursery)
        await UnixServer(methods, LIMITS).accept(listener)


@frozen
class ControlMethods:
    """Serves requests about a running machine."""

    running: RunningInstance
    peers: Peers
    nursery: trio.Nursery
    """For tasks that continue although their client no longer waits."""

    def admit(self, identify: Identify) -> int:
        """Return the number of the client's process. Raises :exc:`RpcError` unless it is root's, in our PID namespace."""
        return allowed_peer(self.peers, identify).pid

    def busy(self, reason: str) -> RpcError:
        """Return the error for a client that exceeds a limit."""
        return RpcError(BUSY, f"cannot take more: {reason}", remedy="wait for them")

    async def call(self, identify: Identify, method: str, params: Mapping[str, object] | list[object]) -> RpcResult:
        """Carry out the client's request. Raises :exc:`RpcError`."""
        allowed_peer(self.peers, identify)  # checked each time: it may have ended and passed its connection on
        act = partial(_call, self.running, method, _checked(method, params))
        if not METHODS[method].waits_for_qemu:
            return RpcResult({"version": PROTOCOL, **await act()})
        with self.running.supervisor.changes.awaited():
            return RpcResult({"version": PROTOCOL, **await self._waited_for(act)})

    async def _waited_for(self, change: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return the result of *change*. Raises :exc:`RpcError`; if the error is that QEMU is silent, the change continues.

        It is not cancelled, because QEMU will execute the received commands as soon as it continues, unnoticed by this program.
        """
        ended, outcome, silence = trio.Event(), list[Callable[[], Answer]](), list[SilentError]()

        async def make() -> None:
            outcome.append(await capture(change))
            ended.set()
            if silence:
                try:
                    outcome[0]()
                except Exception as error:  # noqa: BLE001 - whatever it is, no client learns of it
                    log.warning(InstanceEvent.CHANGE_FAILED, explain(error))

        async def silent() -> None:
            silence.append(await self.running.machine.monitor.silent(self.running.supervisor.timeouts.qemu_silent))

        self.nursery.start_soon(make)
        await first_of(ended.wait, silent)
        if not outcome:
            goes_on = f"{explain(silence[0])}; and the change goes on when it does"
            raise RpcError(REFUSED, goes_on, remedy="see `ctl status`")
        return outcome[0]()


def allowed_peer(peers: Peers, identify: Identify) -> Peer:
    """Return the client. Raises :exc:`RpcError` unless it is root's, in our PID namespace."""
    try:
        peer = identify()
    except PeerError as error:
        raise RpcError(
            NOT_ALLOWED,
            "cannot see the client: its PID namespace is not the instance's",
            remedy="ask from inside its container",
        ) from error
    if peer.user_id != 0 or peer.pid_namespace != peers.own_namespace():
        raise RpcError(
            NOT_ALLOWED,
            f"cannot serve process {peer.pid} of user {peer.user_id}: only root in the instance's own PID namespace may ask",
            remedy="use `kubectl exec`",
        )
    return peer


def _checked(method: str, params: Mapping[str, object] | list[object]) -> Params:
    """Return *params*. Raises :exc:`RpcError` for parameters that *method* does not accept, and for an unknown method."""
    if method not in METHODS:
        raise RpcError(METHOD_NOT_FOUND, f"Method not found: {method!r}")
    if isinstance(params, list):
        raise RpcError(INVALID_PARAMS, "Invalid params: they are given by name")
    known = METHODS[method]
    if not known.keys_of_disk and (unknown := next((name for name in params if name not in known.params), None)):
        takes = ", ".join(known.params) or "none"
        raise RpcError(INVALID_PARAMS, f"Invalid params: {unknown!r} is unknown", remedy=f"{method} takes {takes}")
    return params


async def _call(running: RunningInstance, method: str, params: Params) -> Answer:
    try:
        if METHODS[method].needs_qemu:
            await running.qemu_answers()
        return await ACTIONS[method](running, params)
    except RunnerError as error:
        failure = error
    ends = ""
    if isinstance(failure, ExecInterruptedError):  # QEMU has hung up; the reason is known in a moment
        with trio.move_on_after(EXITS_WITHIN):
            ends = f"; {await running.supervisor.changes.stopping()}"
    problems = problem_documents("", problems_of(failure), {"disk": params})
    raise RpcError(REFUSED, f"{explain(failure)}{ends}", {"problems": problems}) from failure


async def _runner(running: RunningInstance, _params: Params) -> RunnerAnswer:
    await trio.lowlevel.checkpoint()
    return {"runner": runner_document(running)}


async def _listed(running: RunningInstance, _params: Params) -> DisksAnswer:
    return {"disks": await disks_of(running).listed()}


async def _attach(running: RunningInstance, params: Params) -> DiskDocument:
    disk = _disk(params)
    for path in (*disk.backing, *(() if disk.fd is not None else (disk.file,))):
        _refuse_path_in_share(running, path, "cannot attach the disk", "keep it elsewhere")
        _refuse_links(running, path)
    return await disks_of(running).attach(disk)


async def _detach(running: RunningInstance, params: Params) -> NothingAnswer:
    await disks_of(running).detach(_name(params, "name"))
    return {}


async def _upgrade(running: RunningInstance, params: Params) -> NoReturn:
    from runner.instance.renewal.upgrade import upgrade  # here, because few runners are renewed

    directory, digest = _real_path(params, "from"), _digest(params)
    _refuse_path_in_share(running, directory, "cannot renew the runner", PROGRAM_ELSEWHERE)
    await upgrade(running.supervisor, directory, digest)


def _refuse_path_in_share(running: RunningInstance, path: PurePosixPath, what: str, remedy: str) -> None:
    """Raise :exc:`~runner.base.errors.RefusedError`, beginning with *what*, if the guest may change the files at or below *path*."""
    for share in running.plan.shares:
        if not share.read_only:
            directories = shared_directories((share.path,), running.supervisor.roots)
            if directories.holding(path) is not None or directories.lies_below(path):
                raise RefusedError(
                    f"{what}: the guest may change {str(path)!r} by the share {share.tag!r}", remedy=remedy
                )


def _refuse_links(running: RunningInstance, path: PurePosixPath) -> None:
    """Raise :exc:`~runner.base.errors.RefusedError` if *path* leads through a link of QEMU's user, which the guest may control."""
    if running.plan.machine.user.may_control(followed(path).link_owners):
        raise RefusedError(
            f"cannot attach the disk: {str(path)!r} leads through a symbolic link of a user as which QEMU runs, here or in another pod",
            remedy="name the file itself",
        )


async def _update_qemu(running: RunningInstance, params: Params, *, only_check: bool) -> Answer:
    # Here, because few instances have their QEMU updated.
    from runner.instance.change.qemu_update import QemuProgram, check, update

    program = QemuProgram(
        path=None if params.get("qemu") is None else _real_path(params, "qemu"),
        digest=None if params.get("digest") is None else _digest(params),
    )
    started = (program.path or running.plan.machine.program, *(share.program.path for share in running.plan.shares))
    for each in started:
        _refuse_path_in_share(running, each, "cannot update QEMU", PROGRAM_ELSEWHERE)
    no_way_back = params.get("no_way_back", False)
    if not isinstance(no_way_back, bool):
        raise RpcError(INVALID_PARAMS, "Invalid params: 'no_way_back' must be true or false")
    return await (check if only_check else update)(running, program, no_way_back=no_way_back)


def _disk(params: Params) -> DiskSpec:
    problems: list[Problem] = []
    disk = structure(DiskSpec, params, "disk", problems)
    if disk is not None and disk.fd is not None:
        problems.append(Problem("disk.fd", "descriptors are handed over at the start alone", "name a path"))
    elif disk is not None and disk.path is None:
        problems.append(Problem("disk.path", "is missing", "it takes an absolute path"))
    if disk is None or problems:
        raise SpecError("ctl", problems)
    return disk


def _name(params: Params, key: str) -> str:
    value = params.get(key)
    if not isinstance(value, str):
        raise RpcError(INVALID_PARAMS, f"Invalid params: {key!r} must be a string")
    return value


def _real_path(params: Params, key: str) -> PurePosixPath:
    """Return the path *key*; links are followed once, so that the checked file is the executed one."""
    given = PurePosixPath(_name(params, key))
    if not given.is_absolute():
        raise RpcError(INVALID_PARAMS, f"Invalid params: {key!r} must be an absolute path")
    return PurePosixPath(os.path.realpath(given))


def _digest(params: Params) -> str:
    digest = _name(params, "digest")
    if _DIGEST.fullmatch(digest) is None:
        raise RpcError(INVALID_PARAMS, "Invalid params: 'digest' must be sha256: and 64 hexadecimal digits")
    return digest


def _size(params: Params) -> int | None:
    value = params.get("size")
    if value is None:
        return None
    try:
        return _SIZE.parse(value)
    except ValueError as error:
        raise RpcError(INVALID_PARAMS, f"Invalid params: size: {error}", remedy=f"it takes {_SIZE.allowed}") from error


def _count(params: Params) -> int:
    value = params.get("count")
    if not isinstance(value, int) or isinstance(value, bool):
        raise RpcError(INVALID_PARAMS, "Invalid params: 'count' must be a whole number")
    return value


ACTIONS: Mapping[str, Callable[[RunningInstance, Params], Awaitable[Answer]]] = {
    "status": lambda running, _: read_status(running),
    "runner": _runner,
    "upgrade": _upgrade,
    "qemu.check": partial(_update_qemu, only_check=True),
    "qemu.update": partial(_update_qemu, only_check=False),
    "cpu.list": lambda running, _: vcpus_of(running).listed(),
    "cpu.set": lambda running, params: vcpus_of(running).set(_count(params)),
    "disk.list": _listed,
    "disk.attach": _attach,
    "disk.detach": _detach,
    "disk.grow": lambda running, params: disks_of(running).grow(_name(params, "name"), _size(params)),
}
"""The function of each of :data:`~runner.instance.control.method_table.METHODS`."""
