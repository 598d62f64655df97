"""What the functions of a plan collect on the way: why it cannot be made, and what is second best about it."""

from __future__ import annotations

from typing import NamedTuple

from runner.errors import Problem


class Remark(NamedTuple):
    """What is second best about a plan that can be made; *remedy* is empty if nothing can be done about it.

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
