"""The command ``check``: prints whether this node, pod or machine is fit for instances, and the remedies."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import trio

from runner.base.errors import Status
from runner.base.judgement import Level
from runner.base.subject import judgement_lines, rank
from runner.check.checker import CheckReport, check_host
from runner.check.checks import CheckedHost
from runner.cli.options import absolute_path, add_json, add_spec, read_spec, source_of
from runner.facts.roots import KUBELET_DIRECTORY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to *parser*."""
    parser.epilog = (
        f"exit status: 0, or {Status.FINDINGS.value} when something keeps an instance from starting; warnings do not.\n\n"
        "examples:\n"
        "  instance-runner check\n"
        "  instance-runner check --try-guest\n"
        "  instance-runner check /etc/instance/spec.toml --json"
    )
    add_spec(parser, nargs="?", otherwise="default: the host alone is checked")
    add_json(parser, "the judgements")
    parser.add_argument(
        "--try-guest",
        action="store_true",
        help="boot a trial guest of 200 bytes, too, under KVM if it can be used; it may take 10 s",
    )
    parser.add_argument(
        "--kubelet-dir",
        type=Path,
        default=Path(KUBELET_DIRECTORY),
        metavar="DIR",
        help="the kubelet's --root-dir (default: %(default)s)",
    )
    parser.add_argument(
        "--socket",
        type=absolute_path,
        metavar="PATH",
        help="where the controller listens (default: the spec's cpu.controller)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Print the judgements; return ``FINDINGS`` if one of them keeps an instance from starting."""
    document = None if arguments.spec is None else (source_of(arguments.spec), read_spec(arguments.spec))
    environment, wants_guest = dict(os.environ), arguments.try_guest
    host = CheckedHost(
        Path("/"), arguments.kubelet_dir, arguments.socket, arguments.state_dir, environment, wants_guest
    )
    report = trio.run(check_host, host, document)
    if arguments.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print("\n".join(report_lines(report, colour=colour)))
    return Status.FINDINGS if report.verdict is Level.ERROR else 0


def report_lines(report: CheckReport, *, colour: bool) -> Iterator[str]:
    """Yield *report* for an operator, the worst judgement last, next to the prompt."""
    yield from judgement_lines(sorted(report.judgements, key=rank), colour=colour)
    count = Counter(each.level for each in report.judgements)
    yield f"{report.place.value}: " + ", ".join(
        f"{count[level]} {level.value}" for level in reversed(Level) if count[level]
    )
