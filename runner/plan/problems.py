"""Problems, which make a plan impossible, and remarks, which do not; the functions of a plan collect them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import attrs

from runner.base.errors import Problem
from runner.base.judgement import Judgement, Level
from runner.spec.variables import EnvironmentSpec, declaring


class Reason(NamedTuple):
    """A reason why a value is refused, whatever its path is."""

    message: str
    remedy: str = ""


class Problems:
    """Collects problems and remarks, in the order they are found."""

    def __init__(self) -> None:
        self.found: list[Problem] = []
        self.remarks: list[Judgement] = []

    def refuse(self, path: str, message: str, remedy: str = "") -> None:
        """Add a problem with the value at *path*."""
        self.found.append(Problem(path, message, remedy))

    def explained(self, environment: EnvironmentSpec) -> Iterator[Problem]:
        """Yield the problems found; for a value with ``${NAME}``, add that the document declares no variables."""
        for problem in self.found:
            names = () if environment.allow else tuple(re.findall(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}", problem.message))
            remedy = "; ".join(filter(None, (declaring(names) if names else "", problem.remedy)))
            yield attrs.evolve(problem, remedy=remedy)

    def remark(self, path: str, found: str, remedy: str = "") -> None:
        """Add a disadvantage of the value at *path*, or of the plan for it."""
        self.remarks.append(Judgement(path, Level.WARNING, found, "", remedy))
