"""How long the tests that attack attack: bounded and always the same in `tests/run`, longer and random in `tests/run soak`."""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

FACTOR = int(os.environ.get("RUNNER_SOAK") or 0)
"""How many times as much as in `tests/run` is tried; 0 in `tests/run` itself."""

SEED = int(os.environ.get("RUNNER_SEED") or (secrets.randbelow(1 << 32) if FACTOR else 20260))
"""The seed of everything random; pytest's header names it, and ``RUNNER_SEED`` repeats a run."""


def chance() -> random.Random:
    """Return a source of random numbers that begins with :data:`SEED`."""
    return random.Random(SEED)  # noqa: S311 - no secret


def times(number: int) -> int:
    """Return how often to try what `tests/run` tries *number* times."""
    return number * max(FACTOR, 1)


def some(cases: Sequence[T], number: int) -> Sequence[T]:
    """Return *number* of *cases*; all of them in `tests/run soak`."""
    return cases if FACTOR else chance().sample(cases, number)
