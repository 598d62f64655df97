"""What an instance may ask for beyond its CPUs: short wake-ups, ways of the L3 cache, memory bandwidth (pure)."""

from __future__ import annotations

import json
from typing import Literal, Self, get_args

import attrs

from runner.base.values import frozen

LatencyChoice = Literal["default", "low"]
MOST_WAYS = 32
"""``cbm_mask`` has at most 32 bits (``arch/x86/kernel/cpu/resctrl``)."""
_KEYS = ("latency", "cache_ways", "memory_bandwidth")


@frozen
class Tuning:
    """What an instance asks for; by default nothing."""

    latency: LatencyChoice = "default"
    """``low``: its CPUs wake up at once and keep their highest frequency."""
    cache_ways: int | None = None
    """Ways of each L3 cache of its CPUs that nothing else fills."""
    memory_bandwidth: int | None = None
    """Percent of the memory bandwidth that its CPUs may use."""

    @classmethod
    def parse(cls, value: object) -> Self:
        """Return what the JSON *value* asks for; what is left out is the default. Raises ``ValueError``."""
        if not isinstance(value, dict) or not set(value) <= set(_KEYS):
            raise ValueError(f"{value!r} is no object with {', '.join(_KEYS)}")
        latency = value.get("latency", "default")
        if latency not in get_args(LatencyChoice):
            raise ValueError(f"latency {latency!r} is neither 'default' nor 'low'")
        ways, bandwidth = value.get("cache_ways"), value.get("memory_bandwidth")
        return cls(latency, _number("cache_ways", ways, MOST_WAYS), _number("memory_bandwidth", bandwidth, 100))

    def to_json(self) -> str:
        """Return the text of which :meth:`parse` reads the value."""
        return json.dumps(attrs.asdict(self))


def _number(name: str, value: object, most: int) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"{name} {value!r} is no number from 1 to {most}")
    return value
