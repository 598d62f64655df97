"""What an instance may ask for beside its CPUs: only what has a meaning."""

from __future__ import annotations

import json

import pytest

from runner.controller.tuning import Tuning


def test_what_is_written_is_read() -> None:
    asked = Tuning("low", 4, 50)
    assert Tuning.parse(json.loads(asked.to_json())) == asked
    assert Tuning.parse({}) == Tuning("default", None, None)


@pytest.mark.parametrize(
    "value",
    [
        *(None, [], "low", {"latency": "lowest"}, {"latency": []}, {"cache": 2}, {"cache_ways": 0}, {"cache_ways": 33}),
        *({"cache_ways": "2"}, {"cache_ways": True}, {"memory_bandwidth": 0}, {"memory_bandwidth": 101}),
    ],
)
def test_nonsense_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        Tuning.parse(value)
