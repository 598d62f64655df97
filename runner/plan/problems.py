"""Problems, which make a plan impossible, and remarks, which do not; the functions of a plan collect them."""

from __future__ import annotations

from typing import NamedTuple

from runner.errors import Problem


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

    def remark(self, message: str, remedy: str = "") -> None:
        """Add a remark."""
        self.remarks.append(Remark(message, remedy))
