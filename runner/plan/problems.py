"""Problems, which make a plan impossible, and remarks, which do not; the functions of a plan collect them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import attrs

from runner.base.errors import Problem
from runner.spec.instance import EnvironmentSpec, declaring


class Remark(NamedTuple):
    """A disadvantage of a plan that is possible; *remedy* is empty if there is none.

    A named tuple, because an attrs class costs PID 1 a quarter of a millisecond more.
    """

    message: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class Problems:
    """Collects problems and remarks, in the order they are found."""

    def __init__(self) -> None:
        self.found: list[Problem] = []
        self.remarks: list[Remark] = []

    def refuse(self, path: str, message: str, remedy: str = "") -> None:
        """Add a problem with the value at *path*."""
        self.found.append(Problem(path, message, remedy))

    def explained(self, environment: EnvironmentSpec) -> Iterator[Problem]:
        """Yield the problems found; one whose value has a ``${NAME}`` says that the document declares no variables."""
        for problem in self.found:
            names = () if environment.allow else tuple(re.findall(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}", problem.message))
            remedy = "; ".join(filter(None, (declaring(names) if names else "", problem.remedy)))
            yield attrs.evolve(problem, remedy=remedy)

    def remark(self, message: str, remedy: str = "") -> None:
        """Add a remark."""
        self.remarks.append(Remark(message, remedy))
