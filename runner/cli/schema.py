"""The command ``schema``: prints the JSON Schema of a spec, made from the schema that checks specs."""

from __future__ import annotations

import argparse
import json

from runner.spec.json_schema import spec_schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give *parser* what this command takes."""
    parser.epilog = (
        "examples:\n"
        "  instance-runner schema > instance.schema.json\n"
        "  sed -i '1i #:schema ./instance.schema.json' spec.toml    for editors, and for: taplo check spec.toml\n"
        "  taplo check --schema file://$PWD/instance.schema.json spec.toml"
    )


def main(_arguments: argparse.Namespace) -> int:
    """Print the schema."""
    print(json.dumps(spec_schema(), indent=1))
    return 0
