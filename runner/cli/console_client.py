"""The client of the guest's serial console that ``console`` and ``logs`` use: its connection to the runner's socket."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs

from runner.base.errors import HostError
from runner.base.values import frozen
from runner.cli.unanswered import ANSWERED_WITHIN, unanswered
from runner.kernel.line_reader import LineFramer, OverlongError
from runner.kernel.sockets import CONSOLE_SOCKET, Socket, connected, unbounded

LONGEST_REPLY = 1 << 12
"""Bytes of the runner's reply, without its line end."""


@frozen
class AttachRequest:
    """The request of an attaching terminal: whether it wants to write, and to take that over from another client."""

    write: bool
    steal: bool


@contextmanager
def attached(
    directory: Path, request: AttachRequest, within: float = ANSWERED_WITHIN
) -> Iterator[tuple[Socket, Mapping[str, object], bytes]]:
    """Hold a connection to the console of the instance whose state is in *directory*.

    Yields it with the runner's reply, and the guest's earlier output as far as it has arrived. Raises
    :exc:`~runner.base.errors.HostError` when no runner listens there, it refuses, or does not answer *within* so many seconds.
    """
    with ExitStack() as stack:
        try:
            line = stack.enter_context(connected(directory, CONSOLE_SOCKET, within))
            line.sendall(json.dumps(attrs.asdict(request)).encode() + b"\n")
            reply, output = _attach_reply(line)
        except BlockingIOError:
            raise unanswered(within) from None
        except ConnectionError as error:  # the request was not read: too many connections, or the runner has ended
            raise HostError("cannot attach to the console: the runner closed the connection") from error
        if "error" in reply:
            raise HostError(f"cannot attach to the console: {reply['error']}")
        unbounded(line)
        yield line, reply, output


def _attach_reply(line: Socket) -> tuple[dict[str, object], bytes]:
    """Return the runner's reply, and the guest's earlier output as far as it has arrived."""
    framer = LineFramer(LONGEST_REPLY)
    try:
        while (first := framer.next_line()) is None:
            data = line.recv(1 << 16)
            if not data:
                raise HostError("cannot attach to the console: the runner closed the connection")
            framer.feed(data)
        reply = dict(json.loads(first))
    except (OverlongError, RecursionError, TypeError, ValueError) as error:
        raise HostError("cannot attach to the console: the runner's reply is not understood") from error
    return reply, framer.take_rest()


def received(line: Socket) -> bytes | None:
    """Return the bytes that have arrived, ``None`` at the end of the stream."""
    try:
        return line.recv(1 << 16) or None
    except BlockingIOError:
        return b""
    except ConnectionError:
        return None


def write_output(data: bytes) -> None:
    """Write all of *data* to standard output, past its buffer."""
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]
