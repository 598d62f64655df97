"""JSON by RFC 8259, for documents that others have written: more strictly than the standard library reads it."""

from __future__ import annotations

import json
import math
from collections import Counter


def parse_json(text: str) -> object:
    """Return the value of one JSON text.

    Raises ``ValueError`` for what is not JSON, NaN and infinities, numbers too large to be written again, and a key that is
    repeated in one object (receivers disagree about which counts), and ``RecursionError`` for nesting beyond reason.
    """
    value: object = json.loads(text, parse_constant=_constant, parse_float=_finite, object_pairs_hook=_unique)
    return value


def _constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document = dict(pairs)
    if len(document) != len(pairs):
        repeated = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {json.dumps(repeated[:60])} is repeated in one object")
    return document
