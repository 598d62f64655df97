"""What an instance may ask for beyond its CPUs: short wake-ups, ways of the L3 cache, memory bandwidth, power of devices (pure)."""

from __future__ import annotations

import json
import re
from typing import Literal, Self, get_args

import attrs

from runner.base.values import frozen

LatencyChoice = Literal["default", "low"]
MOST_WAYS = 32
"""``cbm_mask`` has at most 32 bits (``arch/x86/kernel/cpu/resctrl``)."""
MOST_DEVICES = 256
"""A guest has as many PCI buses."""
_KEYS = ("latency", "cache_ways", "memory_bandwidth", "devices")
_ADDRESS = re.compile(r"[0-9a-f]{4,6}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)


@frozen
class Tuning:
    """What an instance asks for; by default nothing."""

    latency: LatencyChoice = "default"
    """``low``: its CPUs wake up at once and keep their highest frequency."""
    cache_ways: int | None = None
    """Ways of each L3 cache of its CPUs that nothing else fills."""
    memory_bandwidth: int | None = None
    """Percent of the memory bandwidth that its CPUs may use."""
    devices: tuple[str, ...] = ()
    """PCI devices that are not to lose their power, by address."""

    @classmethod
    def parse(cls, value: object) -> Self:
        """Return what the JSON *value* asks for; what is left out is the default. Raises ``ValueError``."""
        if not isinstance(value, dict) or not set(value) <= set(_KEYS):
            raise ValueError(f"{value!r} is no object with {', '.join(_KEYS)}")
        latency = value.get("latency", "default")
        if latency not in get_args(LatencyChoice):
            raise ValueError(f"latency {latency!r} is neither 'default' nor 'low'")
        ways, bandwidth = value.get("cache_ways"), value.get("memory_bandwidth")
        return cls(
            latency,
            _number("cache_ways", ways, MOST_WAYS),
            _number("memory_bandwidth", bandwidth, 100),
            _addresses(value.get("devices", [])),
        )

    def to_json(self) -> str:
        """Return the text of which :meth:`parse` reads the value."""
        return json.dumps(attrs.asdict(self))


def _addresses(value: object) -> tuple[str, ...]:
    """Return the PCI addresses in *value*: they become parts of a path. Raises ``ValueError``."""
    if (
        not isinstance(value, list | tuple)
        or len(value) > MOST_DEVICES
        or not all(isinstance(each, str) and _ADDRESS.fullmatch(each) for each in value)
    ):
        raise ValueError(f"devices {value!r:.200} are no list of at most {MOST_DEVICES} PCI addresses")
    return tuple(value)


def _number(name: str, value: object, most: int) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"{name} {value!r} is no number from 1 to {most}")
    return value
