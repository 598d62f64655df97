"""The command ``console``: a terminal on the guest's serial line, through the runner's socket."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from runner.errors import HostError, UsageError
from runner.kernel.lines import LineFramer, OverlongError
from runner.kernel.sockets import CONSOLE_SOCKET, Socket, connected

TYPED_AHEAD = 1 << 16
"""Bytes kept for a guest that does not read; input beyond is dropped, and the terminal's bell rings."""
LONGEST_REPLY = 1 << 12
"""Bytes of the runner's reply, without its line end."""


def parse_key(text: str) -> bytes:
    """Return the byte that ``ctrl-X`` is, as a terminal sends it.

    Raises :exc:`~runner.errors.UsageError` for what is no such key.
    """
    prefix, _, letter = text.lower().partition("-")
    if prefix == "ctrl" and len(letter) == 1 and letter in "abcdefghijklmnopqrstuvwxyz@[\\]^_":
        return bytes([ord(letter.upper()) & 0x1F])
    raise UsageError(f"cannot detach with {text!r}: it is no key like ctrl-] or ctrl-a; name one with --detach-key")


@attrs.frozen
class AttachRequest:
    """What a client of the console asks for."""

    write: bool
    steal: bool


def attach(directory: Path, request: AttachRequest, key: str) -> int:
    """Connect this terminal with the instance whose state is in *directory*, until *key* is typed or the instance ends.

    Returns the exit status. Raises :exc:`~runner.errors.RunnerError`.
    """
    byte = parse_key(key)
    with connected(directory, CONSOLE_SOCKET) as line:
        line.sendall(json.dumps(attrs.asdict(request)).encode() + b"\n")
        reply, output = _attach_reply(line)
        if "error" in reply:
            raise HostError(f"cannot attach to the console: {reply['error']}")
        if not reply.get("writes"):
            _print_status("reading only" + (": another client writes; --steal takes over" if request.write else ""))
        _print_status(f"attached; {key.capitalize()} detaches")
        with _raw(sys.stdin.fileno()):
            _write(output)
            ended = _carry(line, byte)
        _print_status("the instance has ended" if ended else "detached")
    return 0


def _print_status(text: str) -> None:
    sys.stderr.write(f"[{text}]\n")
    sys.stderr.flush()


def _attach_reply(line: Socket) -> tuple[dict[str, object], bytes]:
    """Return the runner's reply, and the guest's earlier output as far as it has come."""
    framer = LineFramer(LONGEST_REPLY)
    try:
        while (first := framer.next_line()) is None:
            data = line.recv(1 << 16)
            if not data:
                raise HostError("cannot attach to the console: the runner hung up")
            framer.feed(data)
        reply = json.loads(first)
    except (OverlongError, ValueError) as error:
        raise HostError("cannot attach to the console: the runner's reply is not understood") from error
    return reply, framer.take_rest()


@contextmanager
def _raw(terminal: int) -> Iterator[None]:
    """Send every key to the guest, ``Ctrl-C`` too; restore the terminal at the end, also after SIGTERM and SIGHUP."""
    if not os.isatty(terminal):
        yield
        return
    before = termios.tcgetattr(terminal)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    try:
        tty.setraw(terminal)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        sys.stderr.write("\n")


def _carry(line: Socket, key: bytes) -> bool:
    """Carry bytes both ways; return whether the instance ended rather than the user detached."""
    line.setblocking(False)
    keyboard = sys.stdin.fileno()
    waiting = b""
    poll = select.poll()
    poll.register(keyboard, select.POLLIN)
    while True:
        poll.register(line, select.POLLIN | (select.POLLOUT if waiting else 0))
        for number, events in poll.poll():
            if number == keyboard:
                typed = os.read(keyboard, 1 << 12)
                before, detached, _ = typed.partition(key)
                if detached:
                    _sent(line, waiting + before)
                    return False
                if not typed:  # no more input; the guest's output is still shown
                    poll.unregister(keyboard)
                if len(waiting) + len(before) > TYPED_AHEAD:
                    _write(b"\a")
                    before = b""
                waiting += before
            elif events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                data = _received(line)
                if data is None:
                    return True
                _write(data)
        if waiting:
            waiting = waiting[_sent(line, waiting) :]


def _received(line: Socket) -> bytes | None:
    """Return the bytes that have come, ``None`` if none will."""
    try:
        return line.recv(1 << 16) or None
    except BlockingIOError:
        return b""
    except ConnectionError:
        return None


def _sent(line: Socket, data: bytes) -> int:
    try:
        return line.send(data)
    except BlockingIOError:
        return 0
    except ConnectionError:  # the next read returns its end
        return len(data)


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]
