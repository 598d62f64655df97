"""Options that several commands share, and reading the files that they name."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Literal

from runner.base.errors import Status, UsageError

STATUS_HELP = "exit statuses:\n" + "\n".join(f"  {status.value:3} {status.name.lower()}" for status in Status)

DEFAULT_SPEC = "/etc/instance/spec.toml"
"""The default spec of ``run`` and ``plan``: the path at which the manifests mount it."""

STATE_DIRECTORY = "/run/instance-runner"
STATE_DIRECTORY_VARIABLE = "INSTANCE_RUNNER_STATE_DIR"
"""The environment variable with another default: set in a container once, it applies to the runner and to every ``kubectl exec``."""

TERMINATION_LOG = Path("/dev/termination-log")
"""The file from which Kubernetes reads the reason of a container's end (``terminationMessagePath``)."""


def add_spec(
    parser: argparse.ArgumentParser, nargs: Literal["?", "*"], default: str | None = None, otherwise: str = ""
) -> None:
    """Add SPEC and ``--state-dir`` to *parser*; *nargs* is the number of SPECs.

    *default* is used if none is named; without a default, *otherwise* is a clause that describes what happens then.
    """
    parser.add_argument(
        "spec",
        metavar="SPEC",
        nargs=nargs,
        default=default,
        help=f"the instance's document, TOML or JSON (default: {default})"
        if default
        else f"the instance's document, TOML or JSON; - is standard input ({otherwise})",
    )
    add_state_dir(parser)


def add_state_dir(parser: argparse.ArgumentParser, *, shown: bool = True) -> None:
    """Add ``--state-dir`` to *parser*: it may stand before and after the command, and the last one counts.

    Only the program's parser has its default (:func:`default_state_directory`): a command's default would override an option before the
    command. Unless *shown*, it is omitted from the help text of a command whose parent shows it.
    """
    parser.add_argument(
        "--state-dir",
        type=absolute_path,
        default=argparse.SUPPRESS,
        metavar="DIR",
        help=f"where receipt.json and console.log are (default: ${STATE_DIRECTORY_VARIABLE}, or {STATE_DIRECTORY})"
        if shown
        else argparse.SUPPRESS,
    )


def default_state_directory() -> PurePosixPath:
    """Return the state directory that is used if the command line names none."""
    return absolute_path(os.environ.get(STATE_DIRECTORY_VARIABLE) or STATE_DIRECTORY)


class _OutputFormat(argparse.Action):
    """Stores whether the output is JSON."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        _option: str | None = None,
    ) -> None:
        namespace.json = values == "json"


def add_json(parser: argparse.ArgumentParser, output: str, *, shown: bool = True) -> None:
    """Add ``--json`` and ``-o json`` to *parser*; *output* describes what is printed. *shown* is as in :func:`add_state_dir`."""
    default = False if shown else argparse.SUPPRESS
    help_of_json = f"{output} as JSON" if shown else argparse.SUPPRESS
    parser.add_argument("--json", action="store_true", default=default, help=help_of_json)
    parser.add_argument(
        "-o",
        "--output",
        dest="json",
        action=_OutputFormat,
        choices=("text", "json"),
        default=default,
        help="the same: json, or text (the default)" if shown else argparse.SUPPRESS,
    )


def asks_for_json(words: Sequence[str]) -> bool:
    """Tell whether the command line *words*, which could not be parsed, has one of the options of :func:`add_json`."""
    return not {"--json", "-ojson", "--output=json"}.isdisjoint(words) or ("-o", "json") in pairwise(words)


def parse_pairs(words: Iterable[str], parse: Callable[[str], object], wanted: str) -> dict[str, object]:
    """Return the values, by *parse*, of words ``key=value``.

    Raises :exc:`~runner.base.errors.UsageError`, which names the *wanted* form, for any other word and for a repeated key.
    """
    values: dict[str, object] = {}
    for word in words:
        key, sign, text = word.partition("=")
        if not sign or not key or key in values:
            raise UsageError(f"cannot understand {word!r}: {wanted}")
        values[key] = parse(text)
    return values


def absolute_path(text: str) -> PurePosixPath:
    """Return *text* as a path from the root, without ``.`` and ``..``; the file need not exist."""
    return PurePosixPath(os.path.abspath(text))  # noqa: PTH100 - pure afterwards


def read_spec_file(path: str) -> bytes:
    """Return the bytes of the regular file at *path*; a FIFO or a device could block the caller.

    Raises :exc:`~runner.base.errors.UsageError`.
    """
    from runner.spec.document_parser import LARGEST_DOCUMENT  # here, because most commands read no spec

    file = Path(path)
    try:
        if file.exists() and not file.is_file():
            raise UsageError(f"cannot read the spec {path!r}: it is not a file")
        with file.open("rb") as spec:
            return spec.read(LARGEST_DOCUMENT + 1)  # a larger one is refused unparsed
    except OSError as error:
        remedy = "name a SPEC, or mount one there" if path == DEFAULT_SPEC else ""
        raise UsageError(f"cannot read the spec {path!r}: {error.strerror}", remedy=remedy) from None


def read_spec(path: str) -> bytes:
    """Return the bytes of the spec at *path*, or of standard input for ``-``. Raises :exc:`~runner.base.errors.UsageError`."""
    if path != "-":
        return read_spec_file(path)
    from runner.spec.document_parser import LARGEST_DOCUMENT

    try:
        return sys.stdin.buffer.read(LARGEST_DOCUMENT + 1)
    except OSError as error:
        raise UsageError("cannot read the spec from standard input") from error


def source_of(path: str) -> str:
    """Return the name of the spec at *path* in messages."""
    return "standard input" if path == "-" else path
