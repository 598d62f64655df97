"""The JSON of ``check``, as a type (see :mod:`runner.facts.documents`)."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from runner.base.judgement import Level
from runner.check.checks import Place
from runner.facts.documents import JudgementDocument


class CheckDocument(TypedDict):
    """The judgements on whether this node, pod or machine is fit for instances."""

    version: Literal[2]
    place: Annotated[str, Place]
    """Where it was checked, which decides what could be read."""
    verdict: Annotated[str, Level]
    """The worst level of all."""
    judgements: list[JudgementDocument]
