"""Refusals as data, so that programs need not parse sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, TypedDict

from runner.base.errors import Problem

FORMAT: Final = 1
"""The number of this format, as ``version``: it grows when a field is removed or changes its meaning."""


class ProblemDocument(TypedDict):
    """One reason."""

    document: str
    """The name of the document that it is about; empty if it is about none."""
    path: str
    """The path in it, such as ``disk[0].path``; empty if no value of it is the cause."""
    found: object
    """The value there as written, ``null`` if there is none."""
    message: str
    remedy: str
    """The text to write or the step to take instead; empty if there is no more to say."""


def problem_documents(source: str, problems: Iterable[Problem], written: Mapping[str, object]) -> list[ProblemDocument]:
    """Return *problems* as plain values; *written* is the document *source*, as far as it was readable."""
    return [_document(source, problem, written) for problem in problems]


def _document(source: str, problem: Problem, written: Mapping[str, object]) -> ProblemDocument:
    return {
        "document": source,
        "path": problem.path,
        "found": _value_at(written, problem.path),
        "message": problem.message,
        "remedy": problem.remedy,
    }


def _value_at(written: object, path: str) -> object:
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        try:
            written = written[int(index)] if index else written[name]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return None
    return written if path else None
