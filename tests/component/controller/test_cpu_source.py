"""What the controller learns of the kubelet's PodResources API, and that it needs it nowhere else."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio.testing

from runner.controller.serve.timeouts import Timeouts
from runner.controller.tree.cpu_source import CpuSource
from runner.controller.tree.loop import Intervals
from runner.kernel.kubelet_files import Frozen
from runner.kubelet.pod_resources import GET_ALLOCATABLE, LIST
from tests.support.fake_claims import FakeClaim, put_claims
from tests.support.fake_node import ENTRIES, SHARED, B, C, Client, Controller, Node, Parts, connected, controlled
from tests.support.fake_node import QUICK as QUICK_TIMEOUTS
from tests.support.fake_pod_resources import OK, RATE_LIMIT, FakeContainer, FakePodResources, serving

QUICK = Intervals(pause=0.005, readings=3, least=0.01, polled=0.05)


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
        assert not controller.loop.frozen_because
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
    node: Node, api: FakePodResources, reason: str
) -> None:
    # The others answer, also on a machine where that takes longer.
    impatient = partial(CpuSource, answer_within=0.05) if api.silent else CpuSource
    node.put_state("4-11", ENTRIES)
    async with (
        serving(node.pod_resources, api),
        controlled(node, intervals=QUICK, parts=Parts(source=impatient)) as controller,
    ):
        assert "CPUs 2-3 are neither in the shared pool nor any pod's" in controller.loop.frozen_because
        assert controller.loop.frozen_because.endswith(reason)
    good = FakePodResources(allocatable=(0, 1, *range(4, 20)))
    async with serving(node.pod_resources, good), controlled(node, intervals=QUICK) as controller:
        assert not controller.loop.frozen_because


async def test_a_kubelet_that_answers_later_is_asked_again(node: Node) -> None:
    node.put_state("4-11", ENTRIES)
    async with controlled(node, intervals=QUICK) as controller:
        assert controller.loop.frozen_because
        async with serving(node.pod_resources, FakePodResources(allocatable=(0, 1, *range(4, 20)))):
            await controller.until(lambda: not controller.loop.frozen_because)


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


# --- CPUs by resource claims ------------------------------------------------------------------------------------------

OF_B, OF_C = FakeClaim("b0", "14-17", B), FakeClaim("c0", "18-19", C)


@attrs.frozen
class ClaimsNode:
    """A node under policy none, whose kubelet and DRA driver give CPUs by claims."""

    node: Node
    api: FakePodResources = attrs.field(factory=FakePodResources)

    def put(self, *claims: FakeClaim, listed: bool = True) -> None:
        """Give pods the CPUs of *claims*, to a container in each; the kubelet's API lists them if *listed*."""
        put_claims(self.node.kubelet, self.node.cdi, claims)
        self.api.containers = [claim.container(f"default/{pod}") for claim in claims for pod in claim.pods if listed]

    @asynccontextmanager
    async def controlled(self, *, answering: bool = True, **options: Any) -> AsyncIterator[tuple[Controller, Client]]:
        options = {"intervals": QUICK, **options}
        async with AsyncExitStack() as held:
            if answering:
                await held.enter_async_context(serving(self.node.pod_resources, self.api))
            controller = await held.enter_async_context(controlled(self.node, **options))
            yield controller, await held.enter_async_context(connected(self.node.socket))

    def float(self) -> str:
        return str(self.node.float_cgroup.cpus())


@pytest.fixture
def claims(node: Node) -> ClaimsNode:
    node.put_state("", {}, policy="none")
    node.become(B)
    return ClaimsNode(node)


async def quiet(controller: Controller) -> None:
    """Wait until nothing calls for another pass: each new watch does, and what it reports wakes a task."""
    await trio.testing.wait_all_tasks_blocked()
    while controller.loop._pass_requested.is_set():
        await controller.loop.next_pass()
        await trio.testing.wait_all_tasks_blocked()


async def test_an_instance_gets_the_cpus_of_its_claim_and_float_all_that_are_in_none(claims: ClaimsNode) -> None:
    claims.put(OF_B, OF_C)
    async with claims.controlled() as (controller, client):
        assert claims.float() == "0-13"
        assert await client.result("registerCgroup", uuid=B, cpuset="14-17")
        assert str(claims.node.instance(B).cpus()) == "14-17"
        status = await client.result("getStatus")
        assert isinstance(status, dict)
        assert (status["policy"], status["claims"], status["shared_pool"]) == ("none", True, "0-13")
        claims.put(OF_B)
        await controller.until(lambda: claims.float() == "0-13,18-19")
        claims.put(OF_B, FakeClaim("x0", "2-3", "x"))
        await controller.until(lambda: claims.float() == "0-1,4-13,18-19")
    assert set(claims.api.calls) == {LIST}


async def test_nothing_is_asked_while_nothing_changes(claims: ClaimsNode) -> None:
    claims.put(OF_B)
    async with claims.controlled() as (controller, client):
        for _ in range(3):
            assert await client.result("registerCgroup", uuid=B, cpuset="14-17")
            controller.loop.request_pass()
            await controller.loop.next_pass()
    assert claims.api.calls == [LIST]


async def test_a_decision_rests_on_what_the_files_hold_now(claims: ClaimsNode) -> None:
    claims.put(OF_B)
    async with claims.controlled() as (controller, client):
        claims.put(OF_B, OF_C)
        now = controller.loop.confirmed_state()
        assert isinstance(now, Frozen)
        assert now.reason == f"{claims.node.kubelet / 'dra_manager_state'} is changing"
        await controller.until(lambda: claims.float() == "0-13")
        assert await client.result("registerCgroup", uuid=B, cpuset="14-17")


async def test_a_pod_gets_no_cpus_of_another_pods_claim(claims: ClaimsNode) -> None:
    claims.put(OF_B, OF_C)
    claims.node.scope(B).write("cpuset.cpus", "18-19")
    async with claims.controlled(timeouts=QUICK_TIMEOUTS) as (_, client):
        for cpuset in ("18-19", "14-19", "14-15", "0-1"):
            refused = await client.refusal("registerCgroup", uuid=B, cpuset=cpuset)
            assert refused["reason"] == "cpuset"
            assert "the node's resource claims give it '14-17'" in str(refused["message"])
            assert "cpuManagerPolicy" not in str(refused["message"])


async def test_the_containers_cpuset_must_agree_with_its_claims(claims: ClaimsNode) -> None:
    """The driver makes it so when the container is created; the runner of a container that is stale waits for it."""
    claims.put(OF_B)
    claims.node.scope(B).write("cpuset.cpus", "0-13")
    async with (
        claims.controlled(timeouts=Timeouts(agreement=20)) as (controller, client),
        trio.open_nursery() as nursery,
    ):

        async def correct() -> None:
            await controller.loop.next_pass()
            claims.node.scope(B).write("cpuset.cpus", "14-17")

        nursery.start_soon(correct)
        assert await client.result("registerCgroup", uuid=B, cpuset="14-17")


async def test_a_container_of_several_claims_has_them_together(claims: ClaimsNode) -> None:
    one, two = FakeClaim("one", "14-15", B), FakeClaim("two", "16-17", B)
    claims.put(one, two)
    claims.api.containers = [FakeContainer("default/b", "instance", cdi_devices=(one.device, two.device))]
    async with claims.controlled() as (_, client):
        assert "give it '14-17'" in str((await client.refusal("registerCgroup", uuid=B, cpuset="14-15"))["message"])
        assert await client.result("registerCgroup", uuid=B, cpuset="14-17")


async def test_a_pod_without_a_claim_is_told_what_it_needs(claims: ClaimsNode) -> None:
    claims.put(OF_C)
    async with claims.controlled(timeouts=QUICK_TIMEOUTS) as (_, client):
        message = str((await client.refusal("registerCgroup", uuid=B, cpuset="14-17"))["message"])
    assert "the node's resource claims give it nothing" in message
    assert message.endswith("name a claim for CPUs in resources.claims of the container, which must be running")


async def test_a_node_with_a_driver_and_no_claims_yet_is_no_node_without_exclusive_cpus(claims: ClaimsNode) -> None:
    plugins = claims.node.kubelet / "plugins_registry"
    plugins.mkdir()
    (plugins / "dra.cpu-reg.sock").touch()
    async with claims.controlled(timeouts=QUICK_TIMEOUTS) as (_, client):
        message = str((await client.refusal("registerCgroup", uuid=B, cpuset="14-17"))["message"])
        assert "name a claim for CPUs" in message
        assert "cpuManagerPolicy" not in message
        (plugins / "dra.cpu-reg.sock").rename(plugins / "gpu.example.com-reg.sock")
        message = str((await client.refusal("registerCgroup", uuid=B, cpuset="14-17"))["message"])
        assert "set cpuManagerPolicy: static, or install such a driver" in message
    assert claims.api.calls == []


async def test_cpus_of_a_claim_that_is_being_prepared_are_no_floats(claims: ClaimsNode) -> None:
    """The driver has chosen them, and the kubelet does not know yet: it is asked when it does."""
    claims.put(FakeClaim("b0", "14-17", B, prepared=False), listed=False)
    async with claims.controlled(timeouts=QUICK_TIMEOUTS) as (controller, client):
        assert claims.float() == "0-13,18-19"
        assert (await client.refusal("registerCgroup", uuid=B, cpuset="14-17"))["reason"] == "cpuset"
        claims.put(OF_B)
        await controller.until(
            lambda: not isinstance(state := controller.loop.state, Frozen) and bool(state.assigned())
        )
        assert await client.result("registerCgroup", uuid=B, cpuset="14-17")


async def test_float_leaves_the_cpus_as_soon_as_the_driver_has_chosen_them(claims: ClaimsNode) -> None:
    """The kubelet's file names the claim already, and does not change again before the container is created."""
    unprepared = FakeClaim("b0", "14-17", B, prepared=False)
    claims.put(unprepared)
    specification = next(claims.node.cdi.iterdir())
    specification.rename(claims.node.path / "aside")
    async with claims.controlled() as (controller, _):
        assert claims.float() == "0-19"
        await quiet(controller)
        (claims.node.path / "aside").rename(specification)
        await controller.until(lambda: claims.float() == "0-13,18-19")
    assert claims.api.calls == [LIST]


async def test_a_kubelet_that_lists_a_container_later_is_asked_again(claims: ClaimsNode) -> None:
    """After its start it knows its claims before it knows its pods. No file changes then."""
    claims.put(OF_B, listed=False)
    async with claims.controlled(parts=Parts(source=partial(CpuSource, asked_again=0.5))) as (controller, client):
        assert claims.float() == "0-13,18-19"
        claims.api.containers = [OF_B.container("default/b")]
        await controller.until(
            lambda: not isinstance(state := controller.loop.state, Frozen) and bool(state.assigned())
        )
        assert await client.result("registerCgroup", uuid=B, cpuset="14-17")
        before = len(claims.api.calls)
        controller.loop.request_pass()
        await controller.loop.next_pass()
        assert len(claims.api.calls) == before


async def test_while_the_kubelet_does_not_answer_decisions_are_frozen_and_what_runs_stays(claims: ClaimsNode) -> None:
    claims.put(OF_B)
    async with claims.controlled(timeouts=QUICK_TIMEOUTS) as (controller, client):
        assert await client.result("registerCgroup", uuid=B, cpuset="14-17")
        claims.node.instance(B).populate(True)
        before = claims.node.snapshot()
        claims.api.status = RATE_LIMIT
        claims.put(OF_C)
        await controller.until(lambda: bool(controller.loop.frozen_because))
        assert controller.loop.frozen_because == (
            "cannot tell which containers have the CPUs of resource claims: cannot call /v1.PodResourcesLister/List: it "
            "answered with the status 8: rejected by rate limit"
        )
        assert (await client.refusal("registerCgroup", uuid=B, cpuset="14-17"))["reason"] == "frozen"
        assert claims.node.snapshot() == before
        claims.api.status = OK
        await controller.until(lambda: not controller.loop.frozen_because)
        assert claims.float() == "0-13", "the instance that still runs has its CPUs, although its claim is gone"
        assert str(claims.node.instance(B).cpus()) == "14-17"


async def test_a_restarted_kubelet_is_not_asked_for_what_is_known(claims: ClaimsNode) -> None:
    """Its socket is away meanwhile; an instance can register nevertheless, because no file has changed."""
    claims.put(OF_B)
    async with claims.controlled() as (controller, client):
        assert not controller.loop.frozen_because
        claims.node.pod_resources.rename(claims.node.pod_resources.with_name("away"))
        assert await client.result("registerCgroup", uuid=B, cpuset="14-17")
        controller.loop.request_pass()
        await controller.loop.next_pass()
        assert not controller.loop.frozen_because
        claims.node.pod_resources.with_name("away").rename(claims.node.pod_resources)


async def test_a_controller_that_starts_again_finds_the_same(claims: ClaimsNode) -> None:
    claims.put(OF_B, OF_C)
    async with claims.controlled() as (_, client):
        assert await client.result("registerCgroup", uuid=B, cpuset="14-17")
        claims.node.instance(B).populate(True)
    before = claims.node.snapshot()
    async with claims.controlled(answering=False) as (controller, _):
        assert "cannot tell which containers" in controller.loop.frozen_because
        assert claims.node.snapshot() == before
    async with claims.controlled() as (_, client):
        assert await client.result("registerCgroup", uuid=B, cpuset="14-17")
        assert claims.node.snapshot() == before


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("kubelet/dra_manager_state", "{", "it is not JSON"),
        ("cdi/dra.k8s.io-cpu_claim-b0.json", "{}", "kind: must be a string, found None"),
        (
            "cdi/dra.k8s.io-cpu_claim-x0.json",
            '{"kind":"dra.k8s.io/cpu","devices":[{}]}',
            "devices[0].containerEdits.env: must have one variable",
        ),
    ],
)
async def test_a_file_that_cannot_be_used_freezes_decisions(
    claims: ClaimsNode, name: str, text: str, reason: str
) -> None:
    claims.put(OF_B)
    async with claims.controlled(timeouts=QUICK_TIMEOUTS) as (controller, client):
        path = claims.node.path / name
        path.write_text(text)
        await controller.until(lambda: bool(controller.loop.frozen_because))
        assert controller.loop.frozen_because.startswith(f"cannot use {path}: {reason}")
        refused = await client.refusal("registerCgroup", uuid=B, cpuset="14-17")
        assert (refused["reason"], claims.float()) == ("frozen", "0-13,18-19")


async def test_two_claims_of_the_same_cpus_freeze_decisions_until_one_is_gone(claims: ClaimsNode) -> None:
    claims.put(OF_B)
    async with claims.controlled() as (controller, client):
        claims.put(OF_B, FakeClaim("c0", "17-18", C))
        await controller.until(lambda: bool(controller.loop.frozen_because))
        assert (
            controller.loop.frozen_because
            == f"cannot use {claims.node.cdi}: CPUs 17 of the claim c0 are given away twice"
        )
        claims.put(OF_B)
        await controller.until(lambda: not controller.loop.frozen_because)
        assert await client.result("registerCgroup", uuid=B, cpuset="14-17")


async def test_a_node_that_is_given_the_static_policy_has_no_claims_any_more(claims: ClaimsNode) -> None:
    claims.put(OF_B, listed=False)
    async with claims.controlled() as (controller, client):
        assert controller.loop.source is not None
        assert controller.loop.source.awaits_containers
        claims.node.put_state(SHARED, ENTRIES)
        await controller.until(lambda: claims.float() == SHARED)
        assert not controller.loop.source.awaits_containers
        status = await client.result("getStatus")
        assert isinstance(status, dict)
        assert (status["policy"], status["claims"]) == ("static", False)


async def test_files_of_other_drivers_are_not_read(claims: ClaimsNode) -> None:
    claims.put(OF_B)
    (claims.node.cdi / "nvidia.com-gpu.json").write_text("{")
    (claims.node.cdi / "dra.k8s.io-cpu_claim-b0.json.tmp").write_text("{")
    async with claims.controlled() as (controller, _):
        assert not controller.loop.frozen_because
        assert claims.float() == "0-13,18-19"


async def test_claims_count_for_nothing_under_the_static_policy(claims: ClaimsNode) -> None:
    claims.put(FakeClaim("b0", "2-3", B))
    claims.node.put_state(SHARED, ENTRIES)
    async with claims.controlled() as (_, client):
        assert claims.float() == SHARED
        assert await client.result("registerCgroup", uuid=B, cpuset="14-17")
    assert claims.api.calls == []
