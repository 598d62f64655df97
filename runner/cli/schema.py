"""The command ``schema``: prints the JSON Schema of a spec, or of another command's output, generated from the code."""

from __future__ import annotations

import argparse
import json

from runner.spec.json_schema import spec_schema

NAMES = (
    *("spec", "plan", "node", "documents", "check", "inspect", "trace", "refusal", "status", "disks", "disk", "vcpus"),
    *("renewal", "qemu-check", "qemu-update", "done", "instances", "controller", "receipt", "end", "events"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to *parser*."""
    parser.epilog = (
        "examples:\n"
        "  instance-runner schema > instance.schema.json\n"
        "  sed -i '1i #:schema ./instance.schema.json' spec.toml    for editors, and for: taplo check spec.toml\n"
        "  taplo check --schema file://$PWD/instance.schema.json spec.toml\n"
        "  instance-runner schema status > status.schema.json      what `ctl status --json` prints"
    )
    parser.add_argument(
        "name",
        nargs="?",
        choices=NAMES,
        default="spec",
        metavar="NAME",
        help="which of %(choices)s (default: %(default)s)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Print the schema."""
    if arguments.name == "spec":
        schema = spec_schema()
    else:
        from runner.cli.json_documents import DOCUMENTS  # here, because it imports the modules of all documents

        schema = DOCUMENTS[arguments.name].schema()
    print(json.dumps(schema, indent=1))
    return 0
