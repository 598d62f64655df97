"""The command ``console``: a terminal on the guest's serial console, through the runner's socket."""

from __future__ import annotations

import argparse
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

from runner.cli.options import add_state_dir
from runner.errors import HostError, UsageError
from runner.kernel.sockets import CONSOLE_SOCKET, Socket, connected

TYPED_AHEAD = 1 << 16
"""Bytes kept for a guest that does not read; what is typed beyond is dropped, and the bell rings."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give *parser* what this command takes."""
    parser.epilog = "example: kubectl exec -it POD -- instance-runner console"
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--read-only", action="store_true", help="type nothing")
    mode.add_argument(
        "--steal", action="store_true", help="write in the place of whoever does; that one goes on reading"
    )
    parser.add_argument(
        "--detach-key", default="ctrl-]", metavar="KEY", help="what ends it, the guest runs on (default: %(default)s)"
    )
    add_state_dir(parser)


def main(arguments: argparse.Namespace) -> int:
    """Attach to the console until the detach key is typed or the instance ends."""
    request = AttachRequest(write=not arguments.read_only, steal=arguments.steal)
    return attach(Path(arguments.state_dir), request, arguments.detach_key)


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
    """What whoever attaches asks for."""

    write: bool
    steal: bool


def attach(directory: Path, wish: AttachRequest, key: str) -> int:
    """Be a terminal of the instance whose state is in *directory*, until *key* is typed or the instance ends."""
    byte = parse_key(key)
    with connected(directory, CONSOLE_SOCKET) as line:
        line.sendall(json.dumps(attrs.asdict(wish)).encode() + b"\n")
        told, said = _attach_reply(line)
        if "error" in told:
            raise HostError(f"cannot attach to the console: {told['error']}")
        if not told.get("writes"):
            _tell("reading only" + (": somebody else writes; --steal takes over" if wish.write else ""))
        _tell(f"attached; {key.capitalize()} detaches")
        with _raw(sys.stdin.fileno()):
            _write(said)
            ended = _carry(line, byte)
        _tell("the instance has ended" if ended else "detached")
    return 0


def _tell(words: str) -> None:
    sys.stderr.write(f"[{words}]\n")
    sys.stderr.flush()


def _attach_reply(line: Socket) -> tuple[dict[str, object], bytes]:
    """Return the runner's answer, and what the guest said before, as far as that has come."""
    received = b""
    while b"\n" not in received:
        data = line.recv(1 << 16)
        if not data:
            raise HostError("cannot attach to the console: the runner hung up")
        received += data
    first, _, rest = received.partition(b"\n")
    told: dict[str, object] = json.loads(first)
    return told, rest


@contextmanager
def _raw(terminal: int) -> Iterator[None]:
    """Have every key go to the guest, ``Ctrl-C`` too; the terminal is as it was afterwards, also after SIGTERM and SIGHUP."""
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
    """Carry bytes both ways; tell whether it was the instance that ended."""
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
                if not typed:  # nobody types; what the guest says is shown all the same
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
    """Return what has come, ``None`` if nothing will."""
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
    except ConnectionError:  # its end is read, too
        return len(data)


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]
