# ruff: noqa: N999 - each command's module has its name
"""The command ``try``: a first guest with a shell on this terminal, in namespaces of its own."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from runner.cli.options import STATUS_HELP

DEMO_GUEST = Path("/usr/share/instance-runner/demo")
"""Where the image has it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give *parser* what this command takes."""
    parser.epilog = (
        f"{STATUS_HELP}\n\n"
        "examples:\n"
        "  instance-runner try                                  in the image: docker run -it --rm --privileged gpu-instance try\n"
        "  instance-runner try --guest .cache/quickstart/guest  as examples/quickstart/run does, which makes the guest"
    )
    parser.add_argument(
        "--guest",
        type=Path,
        default=DEMO_GUEST,
        metavar="DIR",
        help="where vmlinuz and initrd of the demo guest are, as examples/quickstart/make-guest makes them (default: %(default)s)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Run the demo guest until its shell is left, and return the exit status of ``run``."""
    from runner.cli.first_guest import run_first_guest  # here, because it imports much more than a parser needs

    return run_first_guest(Path(os.path.abspath(arguments.guest)))  # noqa: PTH100 - a link stays what it is
