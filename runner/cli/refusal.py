"""The refusal of a command that was to print JSON, as JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Mapping
from typing import Literal, TypedDict, cast

from runner.base.errors import RunnerError, SpecError, problems_of
from runner.cli.options import read_spec_file
from runner.protocol.jsonrpc_client import CallRefusedError
from runner.spec.document_parser import parse_document
from runner.spec.refusals import FORMAT, ProblemDocument, problem_documents


class RefusalDocument(TypedDict):
    """The reasons why a command failed: on standard output if it was to print JSON."""

    version: Literal[1]
    problems: list[ProblemDocument]


def print_refusal(error: RunnerError, arguments: argparse.Namespace | None = None) -> None:
    """Print the error that ended the command with *arguments*, ``None`` if they could not be parsed."""
    document: RefusalDocument = {"version": FORMAT, "problems": _problems(error, arguments)}
    print(json.dumps(document, indent=1))


def _problems(error: RunnerError, arguments: argparse.Namespace | None) -> list[ProblemDocument]:
    """Return the problems of *error*: those reported by an instance, or those of the document named in *arguments*."""
    if isinstance(error, CallRefusedError) and "problems" in error.data:
        return cast("list[ProblemDocument]", error.data["problems"])
    source = error.source if isinstance(error, SpecError) else ""
    named = getattr(arguments, "spec", None) or []
    written: Mapping[str, object] = {}
    if source in ([named] if isinstance(named, str) else named):
        with contextlib.suppress(RunnerError):  # reading it was the problem
            written = parse_document(source, read_spec_file(source))
    return problem_documents(source, problems_of(error), written)
