"""The type of the JSON of ``check`` (see :mod:`runner.facts.documents`)."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from runner.base.judgement import Level
from runner.check.checks import Place
from runner.facts.documents import JudgementDocument


class CheckDocument(TypedDict):
    """The judgements on whether this node, pod or machine is fit for instances."""

    version: Literal[2]
    place: Annotated[str, Place]
    """The place of the check, which determines what was readable."""
    verdict: Annotated[str, Level]
    """The worst level of all."""
    judgements: list[JudgementDocument]
