"""Refusals as data: a program that reads them needs no sentence of ours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, TypedDict

from runner.base.errors import Problem

FORMAT: Final = 1
"""The number of this format, as ``version``: it grows when a field goes or gets another meaning."""


class ProblemDocument(TypedDict):
    """One reason."""

    document: str
    """The document that it is about, as it was named; empty where none is."""
    path: str
    """Where in it, such as ``disk[0].path``; empty where no value of it is the cause."""
    found: object
    """The value there as it is written, ``null`` where there is none."""
    message: str
    remedy: str
    """What to write or do instead; empty where there is no more to say."""


def problem_documents(source: str, problems: Iterable[Problem], written: Mapping[str, object]) -> list[ProblemDocument]:
    """Return *problems* as plain values; *written* is the document *source*, as far as it could be read."""
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
