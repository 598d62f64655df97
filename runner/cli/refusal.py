"""What a command refuses, as data: a program that reads it needs no sentence of ours."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from runner.base.errors import Problem, RunnerError, SpecError, problems_of
from runner.base.judgement import Judgement, Level
from runner.base.judging import FORMAT
from runner.spec.rules import parse_document


def print_refusal(error: RunnerError, arguments: argparse.Namespace) -> None:
    """Print what ended the command with *arguments*, for one that was to print JSON."""
    source = error.source if isinstance(error, SpecError) else ""
    named = getattr(arguments, "spec", None) or []
    written: Mapping[str, object] = {}
    if source in ([named] if isinstance(named, str) else named):
        with contextlib.suppress(RunnerError, OSError):  # that one has been the problem
            written = parse_document(source, Path(source).read_bytes())
    judgements = [problem_json(source, problem, written) for problem in problems_of(error)]
    print(json.dumps({"version": FORMAT, "judgements": judgements}, indent=1))


def problem_json(source: str, problem: Problem, written: Mapping[str, object]) -> dict[str, object]:
    """Return *problem* of the document *source* as plain values: a judgement of the value at a path, empty where none is the cause.

    ``written`` is the value as it stands in the document, ``null`` where there is none.
    """
    judgement = Judgement(problem.path, Level.ERROR, problem.message, remedy=problem.remedy)
    return {"document": source, **judgement.to_json(), "written": _value_at(written, problem.path)}


def _value_at(written: object, path: str) -> object:
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        try:
            written = written[int(index)] if index else written[name]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return None
    return written if path else None
