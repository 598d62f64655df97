"""What both command lines take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LOG_FORMATS = ("text", "json")
"""How log lines may be written."""


def argument_type(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return *parse* as an argparse type: the user reads the message of its ``ValueError``, not the name of a function."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed
