"""The host tuner's request and reply, one line of JSON each (pure).

The request has the CPUs of each instance and its :class:`Tuning`: low latency, ways of the L3 cache, memory bandwidth, power of
devices. :mod:`runner.controller.tune.tuner_process` passes it on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Literal, Self, get_args

import attrs

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.facts.pci import ADDRESS
from runner.kubelet.pod_cgroups import INSTANCE_NAME

Latency = Literal["default", "low"]
MOST_WAYS = 32
"""``cbm_mask`` has at most 32 bits (``arch/x86/kernel/cpu/resctrl``)."""
MOST_DEVICES = 256
"""As many as a guest has PCI buses."""
_KEYS = ("latency", "cache_ways", "memory_bandwidth", "devices")


@frozen
class Tuning:
    """The tuning request of an instance; by default empty."""

    latency: Latency = "default"
    """``low``: its CPUs wake up at once and keep their highest frequency."""
    cache_ways: int | None = None
    """Number of exclusive ways in each L3 cache of its CPUs."""
    memory_bandwidth: int | None = None
    """The share of the memory bandwidth, in percent, that its CPUs may use."""
    devices: tuple[str, ...] = ()
    """PCI devices whose power must stay on, by address."""

    @classmethod
    def parse(cls, value: object) -> Self:
        """Parse the JSON *value*; missing fields have their defaults. Raises ``ValueError``."""
        if not isinstance(value, dict) or not set(value) <= set(_KEYS):
            raise ValueError(f"{value!r} is no object with {', '.join(_KEYS)}")
        latency = value.get("latency", "default")
        if latency not in get_args(Latency):
            raise ValueError(f"latency {latency!r} is neither 'default' nor 'low'")
        ways, bandwidth = value.get("cache_ways"), value.get("memory_bandwidth")
        return cls(
            latency,
            _number("cache_ways", ways, MOST_WAYS),
            _number("memory_bandwidth", bandwidth, 100),
            _addresses(value.get("devices", [])),
        )

    def to_json(self) -> str:
        """Return the text that :meth:`parse` reads."""
        return json.dumps(attrs.asdict(self))


@frozen
class TunedInstance:
    """An instance: its CPUs and its tuning request."""

    cpus: CpuSet
    tuning: Tuning


def format_instances(instances: Mapping[str, TunedInstance]) -> bytes:
    """Return *instances* as a line that :func:`parse_instances` reads."""
    return json.dumps(
        {pod_uid: {"cpus": str(each.cpus), "tuning": attrs.asdict(each.tuning)} for pod_uid, each in instances.items()}
    ).encode()


def parse_instances(line: bytes) -> dict[str, TunedInstance]:
    """Return the instances in *line*, by the UIDs of their pods. Raises ``ValueError``, ``RecursionError``."""
    document = json.loads(line)
    if not isinstance(document, dict):
        raise ValueError("it is no object")  # noqa: TRY004 - of a message, as all that is wrong with it
    return {_pod_uid(pod_uid): _instance(value) for pod_uid, value in document.items()}


def _pod_uid(text: str) -> str:
    if not INSTANCE_NAME.fullmatch(text):
        raise ValueError(f"{text!r:.100} is no UID of a pod")
    return text


def _instance(value: object) -> TunedInstance:
    match value:
        case {"cpus": str(cpus), "tuning": tuning, **others} if not others:
            return TunedInstance(CpuSet.parse(cpus), Tuning.parse(tuning))
        case _:
            raise ValueError(f"{value!r:.200} is no instance with its CPUs and its tuning")


@frozen
class Tuned:
    """The failures of a pass over the machine's settings."""

    reasons: tuple[str, ...] = ()
    """The reasons why instances' CPUs are still disturbed."""
    settings: Mapping[str, int] = attrs.field(factory=dict)
    """:data:`~runner.controller.tune.disturbances.UnsetKind` → number of settings that could not be changed."""
    missing: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    """Pod UID → the unavailable parts of its tuning, with reasons; only pods that have any."""
    made: bool = True
    """Whether the pass was made; otherwise nothing is available, for a single reason."""

    @classmethod
    def not_made(cls, reason: str) -> Self:
        """Return the failures of a pass that was not made, for *reason*."""
        return cls((f"the machine's settings stay as they are: {reason}",), {"all": 1}, made=False)

    def to_json(self) -> bytes:
        """Return the line that :meth:`parse` reads."""
        return json.dumps(attrs.asdict(self)).encode()

    @classmethod
    def parse(cls, line: bytes) -> Self:
        """Return the value of :meth:`to_json`."""
        document = json.loads(line)
        missing = {pod_uid: tuple(reasons) for pod_uid, reasons in document["missing"].items()}
        return cls(tuple(document["reasons"]), document["settings"], missing, document["made"])


def _addresses(value: object) -> tuple[str, ...]:
    """Return the PCI addresses in *value*, validated because they become parts of a path. Raises ``ValueError``."""
    if (
        not isinstance(value, list | tuple)
        or len(value) > MOST_DEVICES
        or not all(isinstance(each, str) and re.fullmatch(ADDRESS, each, re.ASCII) for each in value)
    ):
        raise ValueError(f"devices {value!r:.200} are no list of at most {MOST_DEVICES} PCI addresses")
    return tuple(value)


def _number(name: str, value: object, most: int) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"{name} {value!r} is no number from 1 to {most}")
    return value
