"""Descriptors that another program has opened: inherited through exec, or sent over a Unix socket by an agent of the host.

Inherited ones follow sd_listen_fds(3): ``LISTEN_FDS`` of them from number 3 on, with the names in ``LISTEN_FDNAMES``, for
the process ``LISTEN_PID``. An agent, to which this process connects, sends for each descriptor one line of JSON with the
descriptor in the ancillary data of its first byte (``SCM_RIGHTS``, unix(7))::

    {"name": "disk0", "kind": "block"}

and closes the connection when it has sent all. It receives nothing.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import socket
import stat
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import PurePosixPath

import attrs
import trio

from runner.base.errors import RefusedError
from runner.base.events import InstanceEvent
from runner.base.values import frozen
from runner.facts.descriptor import DESCRIPTOR_NAME, DescriptorFact, DescriptorKind
from runner.kernel.character_devices import IFF_MULTI_QUEUE, IFF_NO_PI, IFF_TAP, TUNGETIFF
from runner.kernel.fd_passing import TooManyFdsError, TruncatedFdsError, receive_with_fds
from runner.kernel.files import Descriptor, owned
from runner.kernel.line_reader import LineFramer
from runner.kernel.peers import credentials

log = logging.getLogger(__name__)

FIRST = 3
"""``SD_LISTEN_FDS_START``."""
MOST = 64
"""Descriptors that an instance takes."""
MOST_BYTES = 1 << 16
"""Bytes of text that an agent may send."""
SENT_WITHIN = 10.0
"""Seconds from the connection to an agent until the agent closes it."""

_KINDS = frozenset({"tap", "macvtap", "vhost-net", "socket", "file", "block"})
_MISC, _TUN_MINOR, _VHOST_NET_MINOR = 10, 200, 238  # Documentation/admin-guide/devices.txt
_VHOST_GET_FEATURES = 0x8008AF00
_SIOCGIFHWADDR = 0x8927
_IFREQ = struct.Struct("16sH22x")


@frozen
class InheritedFd:
    """A descriptor that another program has opened; its user may close it, else the end of :func:`inherited_fds` does."""

    descriptor: Descriptor
    declared: str | None
    """The kind that the agent declares; ``None`` for one inherited through exec."""

    def probe(self) -> DescriptorFact:
        """Return the kernel's facts about it, and what its sender calls it."""
        return attrs.evolve(probe_descriptor(self.descriptor.number), declared=self.declared)


_Take = Callable[[str, int, str | None], None]
"""Owns a descriptor, and then refuses or keeps it: its name, its number, and the kind that an agent declares."""


@asynccontextmanager
async def inherited_fds(
    environment: Mapping[str, str], agent: PurePosixPath | None
) -> AsyncIterator[Mapping[str, InheritedFd]]:
    """Hold every descriptor that other programs have opened for this one, by name; at the end none is open.

    Raises :exc:`~runner.base.errors.RefusedError` for a breach of the conventions, and closes everything.
    """
    with ExitStack() as stack:
        inherited: dict[str, InheritedFd] = {}

        def take(name: str, number: int, declared: str | None) -> None:
            # Owned before anything is checked, so that a refused one is closed too.
            descriptor = stack.enter_context(owned(number))
            os.set_inheritable(number, False)
            if re.fullmatch(DESCRIPTOR_NAME, name, re.ASCII) is None:
                raise RefusedError(
                    f"cannot take over a descriptor called {name!r}",
                    remedy="use letters, digits, '.', '_', '@' and '-'",
                )
            if name in inherited:
                raise RefusedError(
                    f"cannot take over two descriptors called {name!r}", remedy="give each a name of its own"
                )
            inherited[name] = InheritedFd(descriptor, declared)

        _take_inherited(environment, take)
        if agent is not None:
            with trio.move_on_after(SENT_WITHIN) as timeout:
                await _take_sent(agent, take)
            if timeout.cancelled_caught:
                raise RefusedError(
                    f"cannot take over the descriptors of {str(agent)!r}: the agent has not closed within {SENT_WITHIN:g} s",
                    remedy="let it close when it has sent all",
                )
        for name, each in inherited.items():
            log.info(InstanceEvent.DESCRIPTOR_INHERITED, name, probe_descriptor(each.descriptor.number).description)
        yield inherited


def _take_inherited(environment: Mapping[str, str], take: _Take) -> None:
    """Take the descriptors of sd_listen_fds_with_names(3); if one is refused, close the others as well."""
    if not environment.get("LISTEN_FDS"):
        return
    if environment.get("LISTEN_PID") != str(os.getpid()):
        log.warning(InstanceEvent.DESCRIPTORS_IGNORED, environment.get("LISTEN_PID"), os.getpid())
        return
    text, names = environment["LISTEN_FDS"], environment.get("LISTEN_FDNAMES", "")
    if re.fullmatch("[0-9]{1,3}", text, re.ASCII) is None or int(text) > MOST:
        raise RefusedError(f"cannot use LISTEN_FDS {text!r}: it takes a number up to {MOST}")
    waiting: list[int] = []
    try:
        for number in range(FIRST, FIRST + int(text)):
            if not _inherited(number):
                raise RefusedError(f"cannot use LISTEN_FDS {text!r}: descriptor {number} is not open")
            waiting.append(number)
        if len(listed := names.split(":")) != len(waiting):
            raise RefusedError(
                f"cannot use LISTEN_FDNAMES {names!r}: it names {len(listed)} descriptors, and LISTEN_FDS says {text}"
            )
        for name in listed:
            take(name, waiting.pop(0), None)
    finally:
        for number in waiting:
            _close(number)


def _inherited(number: int) -> bool:
    """Tell whether the descriptor was inherited through exec; this process opens its own descriptors with close-on-exec."""
    try:
        return os.get_inheritable(number)
    except OSError:
        return False


def _close(number: int) -> None:
    try:
        os.close(number)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise


async def _take_sent(agent: PurePosixPath, take: _Take) -> None:
    where = repr(str(agent))
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            await connection.connect(str(agent))
        except OSError as error:
            raise RefusedError(f"cannot reach the agent {where} that hands over descriptors") from error
        _, user_id = credentials(connection)
        if user_id not in {0, os.geteuid()}:
            raise RefusedError(f"cannot trust the agent {where}: it runs as user {user_id}, neither root nor ours")
        await _take_from(connection, where, take)


async def _take_from(connection: trio.socket.SocketType, where: str, take: _Take) -> None:
    """Take each line with its descriptor; descriptors whose line has not come are closed when anything is wrong."""
    framer, size, taken = LineFramer(MOST_BYTES), 0, 0
    waiting: list[int] = []
    try:
        while True:
            data = await _receive(connection, where, MOST - taken - len(waiting), waiting)
            size += len(data)
            if size > MOST_BYTES:
                raise _too_much(where)
            if not data:
                break
            framer.feed(data)
            for line in framer.step(MOST + 1):  # the one beyond finds no descriptor
                name, kind = _parsed(line, where)
                if not waiting:
                    raise RefusedError(f"cannot take over {name!r} of {where}: no descriptor came with it")
                taken += 1
                take(name, waiting.pop(0), kind)
        if framer or waiting:
            what = "half a line" if framer else "a descriptor without a line"
            raise RefusedError(f"cannot take over the descriptors of {where}: the agent closed after {what}")
    finally:
        for number in waiting:
            os.close(number)


async def _receive(connection: trio.socket.SocketType, where: str, most: int, waiting: list[int]) -> bytes:
    try:
        return await receive_with_fds(connection, 1 << 12, most, waiting.append)
    except TooManyFdsError as error:
        raise _too_much(where) from error
    except TruncatedFdsError as error:
        raise RefusedError(
            f"cannot take over the descriptors of {where}: the kernel had no room for all of them"
        ) from error
    except OSError as error:
        raise RefusedError(f"cannot receive from the agent {where}") from error


def _too_much(where: str) -> RefusedError:
    return RefusedError(
        f"cannot take over the descriptors of {where}: more than {MOST} of them or {MOST_BYTES >> 10} KiB of text"
    )


def _parsed(line: bytes, where: str) -> tuple[str, str]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    match message:
        case {"name": str(name), "kind": str(kind), **more} if not more and kind in _KINDS:
            return name, kind
    shown = line[:100].decode(errors="replace")
    raise RefusedError(
        f"cannot understand the agent {where}: it sent {shown!r}",
        remedy=f'it takes {{"name": "disk0", "kind": "block"}}, and as a kind one of {", ".join(sorted(_KINDS))}',
    )


def probe_descriptor(number: int) -> DescriptorFact:
    """Return the kernel's facts about the open descriptor *number*."""
    status = os.fstat(number)
    writable = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    if stat.S_ISREG(status.st_mode):
        return DescriptorFact("file", f"a file of {status.st_size} bytes", writable, status.st_size)
    if stat.S_ISBLK(status.st_mode):
        size = os.lseek(number, 0, os.SEEK_END)
        return DescriptorFact("block", f"a block device of {size} bytes", writable, size)
    if stat.S_ISSOCK(status.st_mode):
        return _probe_socket(number)
    if stat.S_ISCHR(status.st_mode):
        return _probe_character_device(number, status.st_rdev, writable=writable)
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe"}
    return DescriptorFact("other", kinds.get(stat.S_IFMT(status.st_mode), "something else"), writable)


def _probe_socket(number: int) -> DescriptorFact:
    view = socket.socket(fileno=number)
    try:
        if view.type != socket.SOCK_STREAM:
            return DescriptorFact("other", "a socket of datagrams or packets", writable=True)
        view.getpeername()
    except OSError:
        return DescriptorFact("other", "a socket that is not connected", writable=True)
    finally:
        view.detach()
    return DescriptorFact("socket", "a connected stream socket", writable=True)


def _probe_character_device(number: int, device: int, *, writable: bool) -> DescriptorFact:
    major, minor = os.major(device), os.minor(device)
    if (major, minor) == (_MISC, _VHOST_NET_MINOR):
        fcntl.ioctl(number, _VHOST_GET_FEATURES, bytes(8))
        return DescriptorFact("vhost-net", "a vhost-net", writable)
    tun = (major, minor) == (_MISC, _TUN_MINOR)
    if not tun and major != _macvtap_major():
        return DescriptorFact("other", f"the character device {major}:{minor}", writable)
    try:
        name, flags = _IFREQ.unpack(fcntl.ioctl(number, TUNGETIFF, bytes(_IFREQ.size)))
    except OSError:
        return DescriptorFact("other", "a /dev/net/tun that is no interface's yet (TUNSETIFF)", writable)
    interface = os.fsdecode(name.rstrip(b"\0"))
    what = f"the {'tap' if tun else 'macvtap'} {interface!r}"
    if not flags & IFF_TAP:
        return DescriptorFact("other", f"the tun {interface!r}, which carries packets and no frames", writable)
    if not flags & IFF_NO_PI:
        return DescriptorFact("other", f"{what}, opened without IFF_NO_PI", writable)
    mac = fcntl.ioctl(number, _SIOCGIFHWADDR, bytes(_IFREQ.size))[18:24].hex(":")
    kind: DescriptorKind = "tap" if tun else "macvtap"
    return DescriptorFact(kind, what, writable, interface=interface, mac=mac, multi_queue=bool(flags & IFF_MULTI_QUEUE))


def _macvtap_major() -> int | None:
    with open("/proc/devices") as file:  # noqa: PTH123 - as files.py does
        numbers = (line.split() for line in file if line.strip().endswith(" macvtap"))
        return next((int(number) for number, _ in numbers), None)
