"""The options and the parser that both command lines share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from runner.base.errors import UsageError
from runner.base.version import VERSION

T = TypeVar("T")

LOG_FORMATS = ("text", "json")
"""The formats of log lines."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the indented lines of descriptions and epilogs, wraps the others, and breaks no path or option at a hyphen."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        import textwrap  # here, as in argparse: only --help needs it

        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = super()._fill_text(text, width, indent).split("\n")
        return "\n".join(
            "\n".join([line] if line[:1] in {"", " "} else self._split_lines(line, width)) for line in lines
        )


class CommandLine(argparse.ArgumentParser):
    """A parser that names the nearest word instead of all of them, as Python 3.14 can (``suggest_on_error``).

    So do the parsers of its commands. Each refuses itself what it does not know: it prints its own usage and raises
    :exc:`~runner.base.errors.UsageError`.
    """

    _given: Sequence[str] = ()

    def parse_known_args(  # type: ignore[override]  # as argparse itself calls it
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does, but refuse unknown arguments here, so that none are ever left over."""
        self._given = sys.argv[1:] if args is None else args
        known, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(*self._unknown(rest))
        return known, rest

    def error(self, message: str, remedy: str = "") -> NoReturn:
        """Raise *message* and *remedy*. Where a command is missing, name the unknown option before it, or else the commands."""
        commands = next((each for each in self._actions if isinstance(each, argparse._SubParsersAction)), None)  # noqa: SLF001
        if commands is not None and message.endswith(f": {commands.metavar}"):
            options = [name for action in self._actions for name in action.option_strings]
            wrong = [each for each in self._given if each.startswith("-") and not _begins(each, options)]
            choices = f"name a {commands.metavar}: {', '.join(commands.choices)}"
            message, remedy = self._unknown(wrong) if wrong else (choices, "")
        self.print_usage(sys.stderr)
        raise UsageError(message, remedy=remedy)

    def _unknown(self, words: Sequence[str]) -> tuple[str, str]:
        """Return the message and the remedy for *words*, which no argument takes."""
        word = next((each for each in words if each.startswith("-")), None)
        if word is None:
            return f"cannot take {' '.join(words)!r}: it is one argument too many", ""
        import difflib  # here, because only a command line with a mistake needs it

        options = [name for action in self._actions for name in action.option_strings]
        near = difflib.get_close_matches(word.partition("=")[0], options, 1)
        return f"unknown option {word!r}", f"did you mean {near[0]!r}?" if near else f"see `{self.prog} --help`"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError:
            import difflib  # here, because only a command line with a mistake needs it

            near = difflib.get_close_matches(str(value), map(str, action.choices or ()), 1)
            if near:
                self.error(str(argparse.ArgumentError(action, f"unknown {value!r}")), f"did you mean {near[0]!r}?")
            raise


def _begins(word: str, options: Sequence[str]) -> bool:
    """Tell whether *word* is one of *options* or an abbreviation of one."""
    return any(option.startswith(word.partition("=")[0]) for option in options)


class _Version(argparse.Action):
    """Prints the version and reports a failed write, which argparse's own action does not."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        sys.stdout.write(f"{parser.prog} {VERSION}\n")
        parser.exit()


def sentence(purpose: str) -> str:
    """Return the one-line *purpose* of a command as the description in its own help."""
    return f"{purpose[0].upper()}{purpose[1:]}."


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
