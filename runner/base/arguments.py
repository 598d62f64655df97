"""What both command lines take."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

LOG_FORMATS = ("text", "json")
"""How log lines may be written."""


class CommandLine(argparse.ArgumentParser):
    """A parser that names the nearest word instead of all of them, as Python 3.14 can (``suggest_on_error``)."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            import difflib  # here, because only a command line with a mistake needs it

            near = difflib.get_close_matches(str(value), map(str, action.choices or ()), 1)
            if near:
                raise argparse.ArgumentError(action, f"unknown {value!r}; did you mean {near[0]!r}?") from error
            raise


class _Version(argparse.Action):
    """Prints the version; importing what reads it takes as long as a whole parser, so that it is done only here."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata

        sys.stdout.write(f"{parser.prog} {metadata.version('instance-runner')}\n")
        parser.exit()


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add ``--version`` to *parser*."""
    parser.add_argument(
        "--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help="show program's version number and exit"
    )


def argument_type(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return *parse* as an argparse type: the user reads the message of its ``ValueError``, not the name of a function."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed
