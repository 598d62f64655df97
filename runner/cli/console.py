"""The command ``console``: a terminal on the guest's serial console, through the runner's socket."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runner.base.errors import UsageError
from runner.cli.console_client import AttachRequest, attached, received, write_output
from runner.cli.options import add_state_dir
from runner.kernel.sockets import Socket
from runner.protocol.terminal_escapes import TerminalModes, without_questions

TYPED_AHEAD = 1 << 16
"""Bytes kept while the guest does not read; input beyond them is dropped, and the terminal's bell rings."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to *parser*."""
    parser.epilog = "example: kubectl exec -it POD -- instance-runner console"
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--read-only", action="store_true", help="show the output, and type nothing")
    mode.add_argument(
        "--steal", action="store_true", help="take over from the terminal that writes, which becomes read-only"
    )
    parser.add_argument(
        "--detach-key",
        default="ctrl-]",
        metavar="KEY",
        help="the key that detaches the terminal; the guest runs on (default: %(default)s)",
    )
    add_state_dir(parser)


def main(arguments: argparse.Namespace) -> int:
    """Attach to the console until the detach key is typed or the instance ends."""
    request = AttachRequest(write=not arguments.read_only, steal=arguments.steal)
    return attach(Path(arguments.state_dir), request, arguments.detach_key)


def parse_key(text: str) -> bytes:
    """Return the byte that a terminal sends for ``ctrl-X``.

    Raises :exc:`~runner.base.errors.UsageError` for any other *text*.
    """
    prefix, _, letter = text.lower().partition("-")
    if prefix == "ctrl" and len(letter) == 1 and letter in "abcdefghijklmnopqrstuvwxyz@[\\]^_":
        return bytes([ord(letter.upper()) & 0x1F])
    raise UsageError(
        f"cannot detach with {text!r}: it is no key like ctrl-] or ctrl-a", remedy="name one with --detach-key"
    )


def attach(directory: Path, request: AttachRequest, key: str) -> int:
    """Connect this terminal to the instance whose state is in *directory*, until *key* is typed or the instance ends.

    Raises :exc:`~runner.base.errors.HostError` when no runner listens there, or it refuses.
    """
    byte = parse_key(key)
    with attached(directory, request) as (line, reply, output):
        if not reply.get("writes"):
            _notify("reading only" + (": another terminal writes; --steal takes over" if request.write else ""))
        _notify(f"attached; {key.capitalize()} detaches")
        modes = TerminalModes()
        with _raw(sys.stdin.fileno(), modes):
            _show(without_questions(output), modes)
            ended = _copy_both_ways(line, byte, modes)
        _notify("the instance has ended" if ended else "detached")
    return 0


def _notify(message: str) -> None:
    sys.stderr.write(f"[{message}]\n")
    sys.stderr.flush()


def _show(output: bytes, modes: TerminalModes) -> None:
    modes.feed(output)
    write_output(output)


@contextmanager
def _raw(terminal: int, modes: TerminalModes) -> Iterator[None]:
    """Send every key to the guest, ``Ctrl-C`` too; restore the terminal afterwards, also on SIGTERM and SIGHUP.

    *modes* are the terminal modes that the guest has changed by then: an editor's screen, the mouse, a hidden cursor.
    """
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
        if os.isatty(sys.stdout.fileno()):
            with suppress(OSError):  # it was closed
                write_output(modes.reset())
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        sys.stderr.write("\n")


def _copy_both_ways(line: Socket, key: bytes, modes: TerminalModes) -> bool:
    """Copy input and output until *key* is typed (return false) or the instance ends (return true)."""
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
                if not typed:  # end of the input; the guest's output is still shown
                    poll.unregister(keyboard)
                if len(waiting) + len(before) > TYPED_AHEAD:
                    write_output(b"\a")
                    before = b""
                waiting += before
            elif events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                data = received(line)
                if data is None:
                    return True
                _show(data, modes)
        if waiting:
            waiting = waiting[_sent(line, waiting) :]


def _sent(line: Socket, data: bytes) -> int:
    try:
        return line.send(data)
    except BlockingIOError:
        return 0
    except ConnectionError:  # reading reports the end, too
        return len(data)
