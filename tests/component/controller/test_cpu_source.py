"""What the controller learns of the kubelet's PodResources API, and that it needs it nowhere else."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from runner.controller import cpu_source
from runner.controller.loop import Intervals
from runner.kubelet.pod_resources import GET_ALLOCATABLE
from tests.support.fake_node import ENTRIES, SHARED, B, Node, connected, controlled
from tests.support.fake_pod_resources import RATE_LIMIT, FakePodResources, serving

QUICK = Intervals(pause=0.005, readings=3, least=0.01, frozen=0.05)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node.new(tmp_path)


# --- reserved CPUs ----------------------------------------------------------------------------------------------------


async def test_strictly_reserved_cpus_are_learned_from_the_kubelet(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    node.become(B)
    node.put_state("4-11", ENTRIES)
    api = FakePodResources(allocatable=(0, 1, *range(4, 20)))
    async with serving(node.pod_resources, api), controlled(node) as controller, connected(node.socket) as client:
        assert not controller.loop.frozen()
        assert str(node.float_cgroup.cpus()) == "4-11"
        assert await client.result("registerCgroup", uuid=B, cpuset="14-17")
        node.put_state("5-11", {**ENTRIES, "x": {"web": "4"}})
        await controller.until(lambda: str(node.float_cgroup.cpus()) == "5-11")
    assert api.calls == [GET_ALLOCATABLE]
    assert caplog.messages.count("reserved CPUs read cpus=2-3") == 1


async def test_float_has_the_learned_cpus_when_all_others_are_given_away(node: Node) -> None:
    node.put_state("", {**ENTRIES, "x": {"web": "4-11"}})
    async with serving(node.pod_resources, FakePodResources(allocatable=(0, 1, *range(4, 20)))), controlled(node):
        assert str(node.float_cgroup.cpus()) == "2-3"


@pytest.mark.parametrize(
    ("api", "reason"),
    [
        (FakePodResources(silent=True), "has not answered within 0.05 s"),
        (FakePodResources(status=RATE_LIMIT), "it answered with the status 8: rejected by rate limit"),
        (FakePodResources(), "says that no pod may have CPUs of its own"),
        (FakePodResources(answer=b"\xff"), "the kubelet's PodResources API: a number in it has no end"),
        # All CPUs of the node are allocatable, so that there is another reason for those in neither set.
        (FakePodResources(allocatable=tuple(range(20))), "say so with --reserved-cpus"),
    ],
    ids=["silent", "rate-limit", "starting", "garbage", "none-reserved"],
)
async def test_as_long_as_the_kubelet_does_not_tell_decisions_are_frozen(
    node: Node, api: FakePodResources, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_source, "ANSWER_WITHIN", 0.05)
    node.put_state("4-11", ENTRIES)
    async with serving(node.pod_resources, api), controlled(node, intervals=QUICK) as controller:
        assert "CPUs 2-3 are neither in the shared pool nor any pod's" in controller.loop.frozen()
        assert controller.loop.frozen().endswith(reason)
    good = FakePodResources(allocatable=(0, 1, *range(4, 20)))
    async with serving(node.pod_resources, good), controlled(node, intervals=QUICK) as controller:
        assert not controller.loop.frozen()


async def test_a_kubelet_that_answers_later_is_asked_again(node: Node) -> None:
    node.put_state("4-11", ENTRIES)
    async with controlled(node, intervals=QUICK) as controller:
        assert controller.loop.frozen()
        async with serving(node.pod_resources, FakePodResources(allocatable=(0, 1, *range(4, 20)))):
            await controller.until(lambda: not controller.loop.frozen())


async def test_a_node_whose_files_suffice_asks_nothing(node: Node) -> None:
    """And so it is no fault that the API is not there."""
    node.become(B)
    api = FakePodResources(allocatable=(0,))
    async with serving(node.pod_resources, api), controlled(node) as controller, connected(node.socket) as client:
        assert await client.result("registerCgroup", uuid=B, cpuset="14-17")
        node.put_state("3-11", {**ENTRIES, "x": {"web": "2"}})
        await controller.until(lambda: str(node.float_cgroup.cpus()) == "3-11")
        node.put_state(SHARED, ENTRIES)
        await controller.until(lambda: str(node.float_cgroup.cpus()) == SHARED)
    assert api.calls == []


def test_the_client_is_not_imported_before_it_is_needed() -> None:
    code = "import runner.controller.main, sys; print({'h2', 'runner.protocol.grpc'} & {*sys.modules})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "set()\n"
