"""What an instance may ask for beside its CPUs: only what has a meaning."""

from __future__ import annotations

import json

import attrs
import pytest

from runner.controller.tune.tuner_messages import Tuning
from runner.placement.backends import CpuTuning

GPUS = ["0000:41:00.0"]


def test_what_is_written_is_read() -> None:
    asked = Tuning("low", 4, 50, ("0000:41:00.0", "0001:ff:1f.7"))
    assert Tuning.parse(json.loads(asked.to_json())) == asked
    assert Tuning.parse({}) == Tuning("default", None, None)


def test_what_the_runner_asks_for_is_understood() -> None:
    """The two programs share no class: the runner's is part of its plan, and the controller reads what any pod sends."""
    assert Tuning.parse(attrs.asdict(CpuTuning("low", 4, 50))) == Tuning("low", 4, 50)
    assert Tuning.parse(attrs.asdict(CpuTuning())) == Tuning()
    assert Tuning.parse(attrs.asdict(CpuTuning(devices=("0000:41:00.0",)))) == Tuning(devices=("0000:41:00.0",))


@pytest.mark.parametrize(
    "value",
    [
        *(None, [], "low", {"latency": "lowest"}, {"latency": []}, {"cache": 2}, {"cache_ways": 0}, {"cache_ways": 33}),
        *(
            {"devices": each}
            for each in (None, "0000:41:00.0", ["../0000:41:00.0"], ["0000:41:00.0\n"], [7], GPUS * 257)
        ),
        *({"cache_ways": "2"}, {"cache_ways": True}, {"memory_bandwidth": 0}, {"memory_bandwidth": 101}),
    ],
)
def test_nonsense_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        Tuning.parse(value)
