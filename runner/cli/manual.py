"""The command ``manual``: prints the references generated from the code, ``examples/SPEC.md`` and ``examples/EVENTS.md``."""

from __future__ import annotations

import argparse

from runner.cli.events_table import events_markdown
from runner.cli.spec_table import spec_markdown

DOCUMENTS = {"instance-runner-spec.md": spec_markdown, "instance-runner-events.md": events_markdown}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to *parser*."""
    parser.epilog = "example: instance-runner manual instance-runner-events.md"
    parser.add_argument(
        "document",
        nargs="?",
        choices=tuple(DOCUMENTS),
        default="instance-runner-spec.md",
        metavar="DOCUMENT",
        help="which of %(choices)s (default: %(default)s)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Print the document, in Markdown."""
    print(DOCUMENTS[arguments.document](), end="")
    return 0
