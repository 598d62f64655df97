"""The command ``logs``: prints the output of the guest's serial console, recorded and as it arrives."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runner.base.errors import HostError, NoInstanceError
from runner.cli.console_client import AttachRequest, attached, received, write_output
from runner.cli.options import add_state_dir
from runner.protocol.terminal_escapes import TerminalModes, TerminalOutput, without_questions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to *parser*."""
    parser.description = (
        f"{parser.description} Without --follow that is the content of console.log, also after the instance has ended. "
        "`console --read-only` shows the same on a terminal that can be detached."
    )
    parser.epilog = "example: kubectl exec POD -- instance-runner logs --follow"
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="print the last 8 KiB, then what the guest writes until the instance ends, or Ctrl-C",
    )
    add_state_dir(parser)


def main(arguments: argparse.Namespace) -> int:
    """Print the console's log, or follow the console."""
    directory = Path(arguments.state_dir)
    if arguments.follow:
        _follow(directory)
    else:
        _print_kept(directory)
    return 0


@contextmanager
def _shown() -> Iterator[Callable[[bytes], None]]:
    """Yield the function that writes output; for a terminal without sequences that it replies to, and with its modes restored."""
    if not os.isatty(sys.stdout.fileno()):
        yield write_output
        return
    output, modes = TerminalOutput(), TerminalModes()

    def write(data: bytes) -> None:
        drawn = without_questions(data, output)
        modes.feed(drawn)
        write_output(drawn)

    try:
        yield write
    finally:
        with suppress(OSError):  # it was closed
            write_output(modes.reset())


def _follow(directory: Path) -> None:
    """Print the console's output until the instance ends. Raises :exc:`~runner.base.errors.HostError` if there is no instance."""
    with _shown() as write, attached(directory, AttachRequest(write=False, steal=False)) as (line, _reply, earlier):
        write(earlier)
        while data := received(line):
            write(data)


def _print_kept(directory: Path) -> None:
    """Print the console's log, the older part first. Raises :exc:`~runner.base.errors.NoInstanceError` if there is no log."""
    files = [file for file in (directory / "console.log.1", directory / "console.log") if file.exists()]
    if not files:
        raise NoInstanceError(
            f"cannot find console.log in {str(directory)!r}: no instance has run there, or console.log of its spec names another file",
            remedy="name its --state-dir, read that file, or say --follow",
        )
    with _shown() as write:
        for file in files:
            for piece in _pieces(file):
                write(piece)


def _pieces(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as log:
            while piece := log.read(1 << 16):
                yield piece
    except OSError as error:
        raise HostError(f"cannot read {str(file)!r}") from error
