"""Garbage where the kubelet keeps its state: decisions freeze, and no cpuset is one that the file does not say."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from tests.support.fake_node import B, Node, connected, controlled
from tests.support.soak import SEED, chance, times

PIECES = [
    b"",
    b"\x00",
    b"\xff",
    b'"',
    b"}",
    b"{",
    b",",
    b"-",
    b"9",
    b"0-19",
    b"null",
    b"[" * 500,
    b"2-11",
    b"static",
    b"none",
]


def damaged(good: bytes, source: random.Random) -> bytes:
    """Return *good* after one to three accidents: torn, overwritten, inserted into, repeated, or whole."""
    text = good
    for _ in range(source.randrange(4)):
        place = source.randrange(len(text) + 1)
        match source.randrange(4):
            case 0:
                text = text[:place]
            case 1:
                text = text[:place] + source.choice(PIECES) + text[place:]
            case 2:
                text = text[:place] + source.choice(PIECES) + text[place + source.randrange(1, 12) :]
            case _:
                text = text[:place] + text
    return text


def shared_pool(text: bytes) -> CpuSet | None:
    """Return what Python's own parser reads as the shared pool, or ``None`` if that is nothing."""
    try:
        document = json.loads(text)
        return CpuSet.parse(document["defaultCpuSet"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


@pytest.mark.soak
async def test_a_damaged_state_is_never_a_wrong_cpuset(tmp_path: Path) -> None:
    node, source = Node.new(tmp_path), chance()
    state = node.kubelet / "cpu_manager_state"
    good = state.read_bytes()
    frozen = acted = 0
    node.become(B)
    async with controlled(node, limit=math.inf) as controller, connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        node.instance(B).populate(True)
        before = node.float_cgroup.cpus()
        for number in range(times(60)):
            text = damaged(good, source)
            state.write_bytes(text)
            for _ in range(2):  # the second pass began after the file was written
                controller.loop.request_pass()
                await controller.loop.next_pass()
            now = node.float_cgroup.cpus()
            if controller.loop.frozen_because:
                frozen += 1
                assert now == before, f"seed {SEED}, text {number}: {text!r}"
            else:
                acted += 1
                assert now == shared_pool(text), f"seed {SEED}, text {number}: {text!r}"
            assert node.instance(B).cpus() == CpuSet.parse("14-17"), f"seed {SEED}, text {number}: {text!r}"
            assert now.isdisjoint(node.instance(B).cpus()), f"seed {SEED}, text {number}: {text!r}"
            before = now
    assert frozen > times(20)
    assert acted > times(6)
