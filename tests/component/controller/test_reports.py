"""The reports of instances on a fake node: who may make them, what the controller's metrics have of them, and what they cost."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing

from runner.controller.serve.report_methods import LIMITS
from runner.controller.serve.reports import ReportIntervals, Reports
from runner.protocol.controller_client import REPORT_SOCKET
from runner.protocol.instance_metrics import FAMILIES, Samples, reported
from tests.support.exposition import figures
from tests.support.fake_node import A, B, Client, Controller, Node, connected, controlled
from tests.support.reporting_instances import answer_reports, put_instances

OFTEN = ReportIntervals(fetch=60, least=0, texts=0)
"""No time passes in vain, and a report that comes is waited for."""
DIGEST = "sha256:" + 64 * "a"
STATE: list[tuple[str, Samples]] = [
    ("info", [(("web", "web-1", "prod", "node-1", "controller"), 1)]),
    ("build_info", [(("1.2.3", DIGEST), 1)]),
    ("guest_ready", [((), 1)]),
    ("guest_state", [(("starting",), 0), (("running",), 1), (("stopping",), 0)]),
    ("guest_unready", [((name,), name == "panicked") for name in ("panicked", "silent")]),
]
DELAYS: list[tuple[str, Samples]] = [("vcpu_run_delay_seconds_total", [((0, "14"), 1.5), ((1, "15"), 2.25)])]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node.new(tmp_path)


def request(uid: str, samples: Iterable[tuple[str, Samples]] = STATE) -> bytes:
    return line({"uuid": uid, "report": reported(samples)})


def line(params: object, method: str = "reportInstance") -> bytes:
    return (
        json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}, separators=(",", ":")).encode()
        + b"\n"
    )


@contextlib.asynccontextmanager
async def registered(node: Node, controller: Controller, uid: str = B, cpus: str = "14-17") -> AsyncIterator[Client]:
    """Register *uid* as this process, and hold its connection for reports."""
    node.become(uid)
    async with connected(node.socket) as client:
        await client.result("registerCgroup", uuid=uid, cpuset=cpus)
    controller.loop.observe()
    async with connected(node.socket.with_name(REPORT_SOCKET)) as client:
        yield client


async def metrics(controller: Controller) -> dict[str, float]:
    return figures((await controller.endpoints().respond("/metrics")).text, "instance_")


async def scraped(controller: Controller, client: Client, answer: bytes) -> dict[str, float]:
    """Return the metrics, for which the instance at *client* is asked, and answers."""
    found: dict[str, float] = {}

    async def scrape() -> None:
        found.update(await metrics(controller))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(scrape)
        assert json.loads(await client.line())["result"] == {}
        await client.send(answer)
    return found


async def taken(controller: Controller, client: Client, message: bytes, uid: str = B) -> None:
    """Send a report, and wait until it was taken."""
    await client.send(message)
    while controller.reports.to_json(uid) is None:
        await trio.testing.wait_all_tasks_blocked()


async def test_the_controllers_metrics_have_what_an_instance_reports(node: Node) -> None:
    """Numbers by the uid that was proved; names bear that the instance has said them; parts are summed up."""
    async with controlled(node, report_intervals=OFTEN) as controller, registered(node, controller) as client:
        before = await metrics(controller)
        assert before[f'cgroup_controller_instance_enforced{{pod_uid="{B}"}}'] == 0
        assert not any(name.startswith("runner_") for name in before)
        await taken(controller, client, request(B))
        found = await scraped(controller, client, request(B, [*STATE, *DELAYS]))
        names = f'pod_uid="{B}",reported_name="web",reported_node_name="node-1",reported_pod_name="web-1",reported_pod_namespace="prod"'
        assert found[f'runner_info{{placement="controller",{names}}}'] == 1
        assert found[f'runner_build_info{{pod_uid="{B}",reported_digest="{DIGEST}",reported_version="1.2.3"}}'] == 1
        assert found[f'runner_guest_state{{pod_uid="{B}",state="running"}}'] == 1
        assert found[f'runner_guest_unready{{pod_uid="{B}",reason="panicked"}}'] == 1
        assert found[f'runner_vcpu_run_delay_seconds_total{{pod_uid="{B}"}}'] == 3.75
        assert 0 <= found[f'cgroup_controller_instance_report_age_seconds{{pod_uid="{B}"}}'] < 30
        async with connected(node.socket) as rpc:
            [listed] = await rpc.instances()
        assert listed["reported"]["guest_state"] == {"running": 1}
        assert listed["reported"]["guest_unready"] == {"panicked": 1}
        assert listed["reported"]["info"]["pod_name"] == "web-1"
        assert listed["reported"]["seconds_ago"] >= 0


async def test_a_change_takes_the_place_of_the_report_before(node: Node) -> None:
    async with controlled(node, report_intervals=OFTEN) as controller, registered(node, controller) as client:
        await taken(controller, client, request(B))
        async with connected(node.socket.with_name(REPORT_SOCKET)) as other:
            await other.send(request(B, [("guest_ready", [((), 0)])]))
            assert json.loads(await client.line())["result"] == {}, "the one before is answered"
            found = await scraped(controller, other, request(B, [("guest_ready", [((), 0)])]))
    assert found[f'runner_guest_ready{{pod_uid="{B}"}}'] == 0


async def test_an_instance_cannot_report_for_another_or_before_it_is_registered(node: Node) -> None:
    async with controlled(node) as controller, registered(node, controller) as client:
        refused = await client.refusal("reportInstance", uuid=A, report={})
        assert (refused["reason"], A in str(refused["message"])) == ("identity", True)
        node.become(B, inner=7)
        async with connected(node.socket.with_name(REPORT_SOCKET)) as shell:
            assert (await shell.refusal("reportInstance", uuid=B, report={}))["reason"] == "identity", "a shell in it"
        node.become(A)
        async with connected(node.socket.with_name(REPORT_SOCKET)) as early:
            refused = await early.refusal("reportInstance", uuid=A, report={})
            assert (refused["reason"], "not registered" in str(refused["message"])) == ("conflict", True)
        assert (await client.refusal("registerCgroup", uuid=B, cpuset="14-17"))["code"] == -32601
        assert controller.reports.latest({A, B}) == {}


async def test_one_that_was_deregistered_is_told_of_no_more(node: Node) -> None:
    async with controlled(node, report_intervals=OFTEN) as controller, registered(node, controller) as client:
        await taken(controller, client, request(B))
        async with connected(node.socket) as rpc:
            assert await rpc.result("deregisterCgroup", uuid=B) == {"removed": True}
        assert not any("pod_uid" in name for name in await metrics(controller))
        assert json.loads(await client.line())["result"] == {}, "its call was answered"
        await client.send(request(B))
        assert json.loads(await client.line())["error"]["data"]["reason"] == "conflict"


@pytest.mark.parametrize(
    ("report", "why"),
    [
        ([], "must be an object"),
        ({"guest_ready": [["running", 1]]}, "0 labels"),
        ({"guest_ready": 1}, "must be a list"),
        ({"guest_ready": [["1"]]}, "not a number"),
        ({"guest_ready": [[True]]}, "not a number"),
        ({"guest_ready": [[10**400]]}, "not a number"),
        ({"guest_state": [["a state of its own", 1]]}, "'state' cannot be"),
        ({"build_info": [["1", ""], ["2", ""]]}, "of one sample"),
        ({"build_info": [["1\n", "", 1]]}, "'version' cannot be"),
        ({"build_info": [["x" * 254, "", 1]]}, "'version' cannot be"),
        ({"build_info": [["1", DIGEST + "0", 1]]}, "'digest' cannot be"),
        ({"vcpu_cpu_seconds_total": [["0", "14", 1]]}, "0 labels"),
    ],
)
async def test_a_report_has_numbers_by_known_names_alone(node: Node, report: object, why: str) -> None:
    async with controlled(node) as controller, registered(node, controller) as client:
        refused = await client.refusal("reportInstance", uuid=B, report=report)
        assert why in str(refused["message"])
        assert controller.reports.latest({B}) == {}


async def test_families_of_a_newer_instance_are_left_out(node: Node) -> None:
    async with controlled(node, report_intervals=OFTEN) as controller, registered(node, controller) as client:
        await taken(controller, client, line({"uuid": B, "report": {"later": [[1]], "guest_ready": [[1]]}}))
        assert set(controller.reports.latest({B})[B]) == {"guest_ready"}


async def test_one_that_floods_is_heard_twice_a_second(node: Node, autojump_clock: trio.testing.MockClock) -> None:
    del autojump_clock
    async with controlled(node, limit=3600) as controller, registered(node, controller) as client:
        await taken(controller, client, request(B))
        took = list[float]()
        async with connected(node.socket.with_name(REPORT_SOCKET)) as other:
            for each in (other, client) * 3:  # each takes the place of the other
                await each.send(request(B))
                await (client if each is other else other).line()
                took.append(trio.current_time())
    assert [later - before for before, later in itertools.pairwise(took)] == pytest.approx([0.5] * 5)


async def test_a_report_that_waits_for_its_turn_is_answered_when_its_instance_has_gone(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Else its connection would stay for ever, one of those that all instances share."""
    del autojump_clock
    reports = Reports()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(reports.take, B, {}, lambda: {B})
                await trio.testing.wait_all_tasks_blocked()
            await reports.fetch([])


async def test_one_that_owes_a_report_delays_a_scrape_once(node: Node, autojump_clock: trio.testing.MockClock) -> None:
    del autojump_clock
    async with controlled(node, limit=3600) as controller, registered(node, controller) as client:
        await taken(controller, client, request(B))
        for expected in (1, 0):
            before = trio.current_time()
            assert (await metrics(controller))[f'runner_guest_ready{{pod_uid="{B}"}}'] == 1, "the latest"
            assert trio.current_time() - before == pytest.approx(expected)


async def test_a_peer_has_few_connections_and_one_message_of_4_kib(node: Node) -> None:
    async with controlled(node, report_intervals=OFTEN) as controller, registered(node, controller) as client:
        await client.send(b'{"x": "' + b"x" * 5000)
        assert b"4096 bytes" in await client.line()
        async with contextlib.AsyncExitStack() as held:
            path = node.socket.with_name(REPORT_SOCKET)
            for _ in range(LIMITS.connections_per_peer):
                each = await held.enter_async_context(connected(path))
                await taken(controller, each, request(B))
                await trio.testing.wait_all_tasks_blocked()
            over = await held.enter_async_context(connected(path))
            assert b"cannot take more" in await over.line()
        assert B in controller.reports.latest({B})


async def test_texts_that_change_make_no_new_series_for_a_minute(node: Node) -> None:
    kept = ReportIntervals(fetch=60, least=0, texts=3600)
    async with controlled(node, report_intervals=kept) as controller, registered(node, controller) as client:
        await taken(controller, client, request(B, [("build_info", [(("1.0", ""), 1)])]))
        for version in ("1.1", "1.2"):
            found = await scraped(controller, client, request(B, [("build_info", [((version, ""), 1)])]))
            assert [name for name in found if name.startswith("runner_build_info")] == [
                f'runner_build_info{{pod_uid="{B}",reported_digest="",reported_version="1.0"}}'
            ]


async def test_a_controller_that_was_started_again_has_the_reports_that_come(node: Node) -> None:
    """The instance's own program connects again: tests/component/test_reports.py."""
    async with controlled(node, report_intervals=OFTEN) as controller, registered(node, controller) as client:
        await taken(controller, client, request(B))
    node.pod(B).put_threads([os.getpid()])
    async with controlled(node, report_intervals=OFTEN) as controller:
        assert not any(name.startswith("runner_") for name in await metrics(controller))
        async with connected(node.socket.with_name(REPORT_SOCKET)) as client:
            await taken(controller, client, request(B))
            assert f'runner_guest_ready{{pod_uid="{B}"}}' in await scraped(controller, client, request(B))


@pytest.fixture
def many_files() -> Iterator[None]:
    """Let this process have as many files open as the controller lets itself at its start."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_files")
async def test_the_metrics_have_300_instances_also_after_the_controllers_restart(node: Node) -> None:
    uids = put_instances(node, 300)
    limits = attrs.evolve(LIMITS, connections_per_peer=LIMITS.connections, in_flight=LIMITS.connections)
    found: dict[str, float] = {}
    for _ in range(2):
        async with (
            controlled(node, trusting=True, report_intervals=OFTEN, report_limits=limits, limit=600) as controller,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(answer_reports, node.socket.with_name(REPORT_SOCKET), uids)
            while len(controller.reports.latest(uids)) < len(uids):
                await trio.sleep(0.01)
            found = await metrics(controller)
            nursery.cancel_scope.cancel()
    assert sum(name.startswith("runner_guest_ready{") for name in found) == len(uids)
    per_instance = sum(name.startswith("runner_") for name in found) / len(uids)
    assert per_instance < 80, "lines for each instance, whatever it has"


def test_a_report_of_the_largest_machine_has_less_than_4_kib() -> None:
    """With 240 vCPUs, 32 disks and 16 networks, names as long as Kubernetes has them, and every number as long as it gets."""

    def values(family: str) -> Samples:
        labels = FAMILIES[family].labels
        if any(each.text for each in labels):
            return [(tuple("x" * each.longest if each.text else each.values[-1] for each in labels), 1)]
        if any(each.is_part for each in labels):
            return [((number,) * len(labels), 123456789012.123) for number in range(240)]
        [values] = [each.values for each in labels] or [()]
        return [((each,), 1234567890123.123) for each in values] or [((), 1234567890123.123)]

    assert len(request("x" * 64, [(each, values(each)) for each in FAMILIES])) <= LIMITS.message
