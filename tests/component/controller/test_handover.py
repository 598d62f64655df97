"""A new instance whose CPUs an old one still uses: which pod it waits for, and until when; the runner with a real controller."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path, PurePosixPath

import attrs
import pytest
import trio
import trio.testing

from runner.base.cpuset import CpuSet
from runner.controller.serve.registrations import MOST_WAITING
from runner.controller.serve.timeouts import Timeouts
from runner.controller.tree.loop import Intervals
from runner.instance.gate import StopRequest, StopRequestedError
from runner.instance.parts.cgroups.controller import registration_of
from runner.instance.supervisor import Faults, Supervisor, open_supervisor
from runner.instance.timeouts import InstanceTimeouts
from runner.placement.backends import ControllerPlacement
from runner.protocol.controller_client import Registration
from runner.protocol.jsonrpc_client import CallRefusedError
from tests.support.exposition import figures
from tests.support.fake_node import (
    ENTRIES,
    HOST_NAMESPACE,
    QUICK,
    A,
    B,
    C,
    Controller,
    Node,
    connected,
    controlled,
    scope_path,
)

OURS = "14-17"
"""The CPUs of B, which the kubelet gives to A, and then to C."""
LONG = Timeouts(agreement=3600, emptying=3600, handover=3600)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node.new(tmp_path)


def give(node: Node, pod: str, cpus: str = OURS) -> None:
    """Have the kubelet forget all other pods and give *cpus* to *pod*, whose first process this one becomes."""
    node.put_state(str(CpuSet.parse("0-19") - CpuSet.parse(cpus)), {pod: {"instance": cpus}})
    node.scope(pod).write("cpuset.cpus", cpus)
    node.become(pod)


async def run_instance(node: Node, pod: str) -> None:
    """Register the instance of *pod*, which runs from now on."""
    node.become(pod)
    async with connected(node.socket) as connection:
        await connection.result("registerCgroup", uuid=pod, cpuset=ENTRIES[pod]["instance"])
    node.instance(pod).populate(True)


@contextlib.asynccontextmanager
async def handing_over(
    node: Node, timeouts: Timeouts = LONG, most_waiting: int = MOST_WAITING
) -> AsyncIterator[Controller]:
    """Run a controller under which B still runs on the CPUs that the kubelet has given to A."""
    async with controlled(node, timeouts=timeouts, most_waiting=most_waiting) as controller:
        await run_instance(node, B)
        give(node, A)
        await controller.until(lambda: str(node.float_cgroup.cpus()) == "0-13,18-19")
        yield controller


# -- the controller --------------------------------------------------------------------------------------------------


async def test_a_newcomer_learns_at_once_whom_it_waits_for(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with handing_over(node) as controller, connected(node.socket) as connection:
        refused = await connection.refusal("registerCgroup", uuid=A, cpuset=OURS)
        assert (refused["reason"], refused["holder"], refused["within"]) == ("conflict", B, 3600)
        assert f"instance '{B}' still runs on '14-17'" in str(refused["message"])
        assert f"instance waits for the end of another uuid={A} cpus=14-17 holder={B}" in caplog.messages
        assert controller.loop.counters.refusals.total() == 0
        assert controller.server.in_flight == 0
        # What a process of the node sees, and what the newcomer does.
        node.put_process(os.getpid(), "/", inner=1, namespace=HOST_NAMESPACE)
        status = await connection.result("getStatus")
        assert isinstance(status, dict)
        assert status["handovers"] == [{"uuid": A, "holder": B, "cpuset": "14-17"}]
        instances = await connection.instances()
        assert [(item["uuid"], item["awaited_by"]) for item in instances] == [(B, [A])]
        for pod, seen in ((A, 1), (B, 0), (C, 0)):
            node.become(pod)
            status = await connection.result("getStatus")
            assert isinstance(status, dict)
            assert len(status["handovers"]) == seen, pod
        metrics = (await controller.endpoints().respond("/metrics")).text
        assert figures(metrics, "instance_cgroup_controller_")["handover_cpus"] == 4


async def test_the_answer_carries_a_descriptor_that_reports_the_end(node: Node) -> None:
    async with handing_over(node), connected(node.socket) as connection:
        await connection.send(
            b'{"jsonrpc":"2.0","method":"registerCgroup","params":["%s","14-17"],"id":1}\n' % A.encode()
        )
        _, fds = await connection.receive_fds()
        [events] = fds
        try:
            assert Path(f"/proc/self/fd/{events}").readlink() == node.instance(B).path / "cgroup.events"
            assert os.pread(events, 100, 0).startswith(b"populated 1")
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(events, b"x")
        finally:
            os.close(events)


async def test_what_waits_takes_no_place_of_a_registration(node: Node) -> None:
    async with handing_over(node, most_waiting=0), connected(node.socket) as connection:
        for _ in range(20):
            assert (await connection.refusal("registerCgroup", uuid=A, cpuset=OURS))["reason"] == "conflict"


async def test_float_gets_none_of_the_cpus_and_the_old_instance_keeps_them(node: Node) -> None:
    async with handing_over(node) as controller, connected(node.socket) as connection:
        for _ in range(3):
            await connection.refusal("registerCgroup", uuid=A, cpuset=OURS)
            controller.loop.request_pass()
            await controller.loop.next_pass()
            assert str(node.instance(B).cpus()) == OURS
            assert node.float_cgroup.cpus().isdisjoint(CpuSet.parse(OURS))
            assert not node.instance(A).exists()
        node.instance(B).populate(False)
        # The pass of the registration itself removes the old one: nothing is waited for.
        assert await connection.result("registerCgroup", uuid=A, cpuset=OURS)
        assert not node.instance(B).exists()
        assert str(node.instance(A).cpus()) == OURS


async def test_after_the_time_of_a_handover_the_old_instance_has_floats_cpus(node: Node) -> None:
    """Its time began under the controller before. Nothing of it is ended, and it gets no further CPUs of its own."""
    taken_since = "user.instance-runner.cpus-taken-since"
    for handover in (3600.0, 0.0):
        intervals = Intervals(pause=0.005, readings=10, least=0.01, handover=handover)
        async with controlled(node, timeouts=LONG, intervals=intervals) as controller:
            if handover:
                await run_instance(node, B)
                give(node, A)
            async with connected(node.socket) as connection:
                if handover:
                    assert (await connection.refusal("registerCgroup", uuid=A, cpuset=OURS))["reason"] == "conflict"
                    assert node.domain(B).attribute(taken_since)
                    assert str(node.instance(B).cpus()) == OURS
                else:
                    assert await connection.result("registerCgroup", uuid=A, cpuset=OURS)
                    assert str(node.instance(A).cpus()) == OURS
                    assert node.instance(B).cpus() == node.float_cgroup.cpus() == CpuSet.parse("0-13,18-19")
                    assert (node.domain(B).path / "cgroup.kill").read_text() == ""
                    assert node.domain(B).read("pids.max") != "0"
                    give(node, B)
                    await controller.until(lambda: not node.domain(B).attribute(taken_since))


async def test_a_third_pod_waits_for_the_second(node: Node) -> None:
    """Also for two old ones at once: first for the one, then for the other."""
    async with controlled(node, timeouts=LONG) as controller, connected(node.socket) as connection:
        await run_instance(node, A)
        await run_instance(node, B)
        both = "12-13,14-17"
        give(node, C, both)
        await controller.until(lambda: str(node.float_cgroup.cpus()) == "2-11,18-19")  # A still runs on 0-1,12-13
        refused = await connection.refusal("registerCgroup", uuid=C, cpuset=both)
        assert refused["holder"] == A
        assert f"instance '{A}' still runs on '12-13' and instance '{B}' still runs on '14-17'" in str(
            refused["message"]
        )
        node.instance(A).populate(False)
        assert (await connection.refusal("registerCgroup", uuid=C, cpuset=both))["holder"] == B
        node.instance(B).populate(False)
        assert await connection.result("registerCgroup", uuid=C, cpuset=both)
        node.instance(C).populate(True)
        give(node, A)
        await controller.until(lambda: str(node.float_cgroup.cpus()) == "0-11,18-19")
        assert (await connection.refusal("registerCgroup", uuid=A, cpuset=OURS))["holder"] == C


async def test_without_a_kubelet_nothing_says_that_the_other_one_ends(node: Node) -> None:
    async with controlled(node, own_cpus="4-15", trusting=True, timeouts=QUICK), connected(node.socket) as connection:
        await connection.result("registerCgroup", uuid="one", cpuset="4-7")
        node.instance("one").populate(True)
        refused = await connection.refusal("registerCgroup", uuid="two", cpuset="7-8")
        assert (refused["holder"], "within" in refused) == ("one", False)


# -- the runner ------------------------------------------------------------------------------------------------------


@attrs.frozen
class Newcomer:
    """The runner of a pod that registers, as far as that."""

    supervisor: Supervisor
    placement: ControllerPlacement

    async def register(self) -> Registration:
        with ExitStack() as held:
            found = await registration_of(self.supervisor, self.placement, scope_path(self.placement.pod_uid), held)
            assert held.pop_all() is not None
            return found


OFTEN = InstanceTimeouts(controller_asked=0.01, holder_asked=0.05)
"""A file of the fake hierarchy reports nothing (``tests/node`` has the kernel's own), so that the runner must ask."""


@contextlib.asynccontextmanager
async def newcomer(node: Node, pod: str = A) -> AsyncIterator[Newcomer]:
    placement = ControllerPlacement(CpuSet.parse(OURS), (14, 15, 16, 17), PurePosixPath(node.socket), pod)
    async with open_supervisor(StopRequest(), Faults(), timeouts=OFTEN) as supervisor:
        yield Newcomer(supervisor, placement)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    caplog.set_level(logging.INFO)
    return lambda words: [message for message in caplog.messages if words in message]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await trio.sleep(0.005)


async def test_the_runner_waits_and_gets_the_cpus(node: Node, logged: Callable[[str], list[str]]) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # names only
    async with handing_over(node) as controller, newcomer(node) as runner, trio.open_nursery() as nursery:

        async def end_the_old_one() -> None:
            await until(lambda: logged("waiting for up to 3600 s"))
            await until(lambda: controller.loop.counters.requests["registerCgroup"] > 5)
            assert not node.instance(A).exists()
            assert len(logged("waiting for up to")) == 1
            node.instance(B).populate(False)

        nursery.start_soon(end_the_old_one)
        registration = await runner.register()
        assert str(registration.cpus) == OURS
        fds = registration.cgroup_fds
        assert fds.memory_events is not None
        for descriptor in (fds.float_procs, fds.instance_threads, fds.pod_procs, fds.float_threads, fds.memory_events):
            descriptor.close()
    assert f"instance '{B}' still runs on '14-17'" in logged("waiting for up to")[0]
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208  # names only


async def test_at_the_end_of_the_bound_it_fails_with_the_holder_and_the_remedy(node: Node) -> None:
    async with handing_over(node, Timeouts(handover=0.2)), newcomer(node) as runner:
        with pytest.raises(CallRefusedError, match=r"waited 0.2 s: .*" + B) as failed:
            await runner.register()
        assert f"crictl ps --label io.kubernetes.pod.uid={B}" in str(failed.value)
        assert str(node.instance(B).cpus()) == OURS


async def test_a_bound_of_nothing_is_a_refusal(node: Node) -> None:
    async with handing_over(node, Timeouts(handover=0)), newcomer(node) as runner:
        with pytest.raises(CallRefusedError, match=r"waited 0 s: .*" + B):
            await runner.register()


async def test_a_request_to_stop_ends_the_wait_at_once(node: Node, logged: Callable[[str], list[str]]) -> None:
    async with handing_over(node), newcomer(node) as runner, trio.open_nursery() as nursery:

        async def stop() -> None:
            await until(lambda: logged("waiting for up to"))
            await trio.testing.wait_all_tasks_blocked()
            runner.supervisor.stop.ask("SIGTERM")

        nursery.start_soon(stop)
        with trio.fail_after(60), pytest.raises(StopRequestedError):
            await runner.register()
        node.instance(B).populate(False)
    assert not node.instance(A).exists()


async def test_the_wait_goes_on_while_the_controller_is_replaced(
    node: Node, logged: Callable[[str], list[str]]
) -> None:
    found: list[Registration] = []
    async with newcomer(node) as runner, trio.open_nursery() as nursery:

        async def register() -> None:
            found.append(await runner.register())

        async with handing_over(node):
            nursery.start_soon(register)
            await until(lambda: logged("waiting for up to"))
        await until(lambda: logged("waiting for the controller"))
        async with controlled(node, timeouts=LONG) as controller:
            await until(lambda: controller.loop.counters.requests["registerCgroup"] > 3)
            assert not found
            assert len(logged("waiting for up to")) == 1
            node.instance(B).populate(False)
            await until(lambda: found)
            assert str(node.instance(A).cpus()) == OURS
            assert controller.server.in_flight == 0


async def test_of_two_newcomers_the_one_that_the_kubelet_forgets_is_refused(
    node: Node, logged: Callable[[str], list[str]]
) -> None:
    """The second pod is removed while it waits, and its CPUs are given to a third."""
    timeouts = Timeouts(agreement=0.2, handover=3600)
    async with handing_over(node, timeouts), newcomer(node) as second, trio.open_nursery() as nursery:
        refused: list[str] = []

        async def register() -> None:
            with pytest.raises(CallRefusedError) as failed:
                await second.register()
            refused.append(str(failed.value))

        nursery.start_soon(register)
        await until(lambda: logged("waiting for up to"))
        give(node, C)
        node.become(A)
        await until(lambda: refused)
        assert "the kubelet's state has nothing" in refused[0]
        node.become(C)
        async with newcomer(node, C) as third, trio.open_nursery() as last:
            last.start_soon(third.register)
            await until(lambda: len(logged("waiting for up to")) == 2)
            node.instance(B).populate(False)
            await until(node.instance(C).exists)
        assert not node.instance(A).exists()


async def test_each_pass_wakes_those_that_wait_for_the_kubelet(node: Node) -> None:
    """A stale cpuset that is put right is an event, as is a change of the kubelet's state: nothing is read in between."""
    node.become(B)
    node.scope(B).write("cpuset.cpus", "2-11")
    async with controlled(node, timeouts=LONG) as controller, connected(node.socket) as connection:
        waiting = partial(connection.result, "registerCgroup", uuid=B, cpuset=OURS)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waiting)
            await until(lambda: controller.server.in_flight)
            await trio.testing.wait_all_tasks_blocked(0.1)
            before = controller.loop.counters.passes.total()
            await trio.testing.wait_all_tasks_blocked(0.1)
            assert controller.loop.counters.passes.total() == before
            node.scope(B).write("cpuset.cpus", OURS)
        assert node.instance(B).exists()
