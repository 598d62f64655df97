"""The command ``run``: one instance, from its spec to the exit status and the termination log."""

from __future__ import annotations

import argparse
import os
from pathlib import Path, PurePosixPath

from runner.base.arguments import LOG_FORMATS, argument_type
from runner.cli.options import DEFAULT_SPEC, STATUS_HELP, TERMINATION_LOG, add_spec
from runner.instance.parts.state_directory import discard_signs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to *parser*."""
    parser.epilog = (
        f"{STATUS_HELP}\n\n"
        "example: env --block-signal=TERM,INT,HUP instance-runner run /etc/instance/spec.toml --http :9441"
    )
    add_spec(parser, nargs="?", default=DEFAULT_SPEC)
    add = parser.add_argument
    add("--not-pid1", action="store_true", help="run although this is not PID 1 (development): become a subreaper")
    add(
        "--termination-log",
        type=Path,
        metavar="FILE",
        help=f"write how it ended there, as one JSON line (default: {TERMINATION_LOG} if it exists)",
    )
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="the least level that is logged (default: info)",
    )
    add(
        "--log-format",
        choices=LOG_FORMATS,
        default="text",
        help="events on standard error and the console on standard output as they are, or each line of both as a JSON object "
        "(default: text)",
    )
    add(
        "--http",
        type=argument_type(_address),
        metavar="ADDRESS:PORT",
        help="answer /healthz, /readyz and /metrics there; :PORT is every address, also the one where a guest in mode private "
        "finds its gateway (default: nowhere)",
    )


def _address(text: str) -> tuple[str, int]:
    from runner.protocol.http import parse_address  # here, because few instances serve probes

    return parse_address(text)


def main(arguments: argparse.Namespace) -> int:
    """Run the instance and return its exit status; signs left by a killed run must not be mistaken for this one's meanwhile."""
    # Resolved once: a link's target could change, and its directory is removed at the end, not the link.
    state_directory = PurePosixPath(os.path.realpath(arguments.state_dir))
    discard_signs(state_directory)
    from runner.cli.run_instance import run  # here, because importing it takes much longer than everything before

    return run(arguments, state_directory)
