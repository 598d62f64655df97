"""The kubelet gives the container of a running instance other CPUs: the controller with a fake hierarchy."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Literal

import pytest

from runner.base.cpuset import CpuSet
from runner.controller.serve.timeouts import Timeouts
from runner.controller.tree.cgroup_writer import CgroupWriter, obey
from tests.support.fake_node import LONG, QUICK, A, B, C, Client, Controller, Node, connected, controlled, in_a_thread

OTHERS = {A: {"instance": "0-1,12-13"}, C: {"instance": "18-19"}}


class Writer:
    """The cgroup writer's end: it does what the controller asks for, in a thread, unless it is to fail."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked: list[str] = []
        self.failing: Literal["refuses", "ends it"] | None = None

    def obey(self, message: bytes) -> bytes:
        name, _, cpus = message.decode().partition(" ")
        self.asked.append(cpus)
        partition = self.root / name / "cpuset.cpus.partition"
        if not cpus:
            partition.write_text("")  # a write to an ordinary file leaves what is behind it
        number = errno.EPERM if self.failing == "refuses" else obey(self.root, message)
        if self.failing == "ends it" and cpus:
            partition.write_text("isolated invalid (of the test)\n")
        return b"%d" % number


@contextmanager
def writing(root: Path) -> Iterator[tuple[CgroupWriter, Writer]]:
    """Hold a cgroup writer below *root*, and its end."""
    writer = Writer(root)
    with in_a_thread(writer.obey) as connection:
        yield CgroupWriter(connection), writer


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node.new(tmp_path)
    node.become(B)
    return node


def resize(node: Node, cpus: str, shared: str, *, more: dict[str, str] | None = None, applied: bool = True) -> None:
    """Give B's container other CPUs as a kubelet does, the state first."""
    node.put_state(shared, {**OTHERS, B: {"instance": cpus, **(more or {})}})
    if applied:
        node.scope(B).write("cpuset.cpus", cpus)


@asynccontextmanager
async def running(
    node: Node, *, sealed: bool = True, timeouts: Timeouts = LONG
) -> AsyncIterator[tuple[Controller, Client, Writer]]:
    """Hold a controller and the instance B on 14-17, whose threads run."""
    with writing(node.root.path) as (ours, writer):
        async with (
            controlled(node, partition_writer=ours, timeouts=timeouts) as controller,
            connected(node.socket) as client,
        ):
            await client.result("registerCgroup", uuid=B, cpuset="14-17")
            node.instance(B).put_threads({11, 12})
            if sealed:
                assert await client.result("sealCgroup", uuid=B) == {"guarantee": "enforced"}
            yield controller, client, writer


def holds(node: Node, cpus: str, *, sealed: bool) -> bool:
    group = node.instance(B)
    own = CpuSet.parse(cpus)
    exclusive = own if sealed else CpuSet()
    return (
        group.cpus() == own
        and group.effective_cpus() == own
        and group.exclusive_cpus() == exclusive
        and group.partition() == ("isolated" if sealed else "member")
        and node.root.exclusive_cpus() == exclusive
    )


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize(
    ("cpus", "shared"), [("14-17", "2-11"), ("11,14-17", "2-10"), ("14-15", "2-11,16-17"), ("11,14", "2-10,15-17")]
)
async def test_a_populated_instance_follows_its_container(node: Node, cpus: str, shared: str, *, sealed: bool) -> None:
    async with running(node, sealed=sealed) as (controller, _, writer):
        resize(node, cpus, shared)
        await controller.eventually(lambda: holds(node, cpus, sealed=sealed))
        await controller.eventually(lambda: node.float_cgroup.cpus() == CpuSet.parse(shared))
        assert writer.asked == ([""] if sealed else []) + ([cpus] if sealed and "11" in cpus.split(",") else [])
        assert controller.loop.counters.repairs == 0


async def test_a_runner_registers_the_cpus_that_its_container_has_got(node: Node) -> None:
    async with running(node) as (controller, client, _):
        resize(node, "11,14-17", "2-10")
        answer = await client.result("registerCgroup", uuid=B, cpuset="11,14-17")
        assert isinstance(answer, dict)
        assert answer["cpuset"] == "11,14-17"
        assert holds(node, "11,14-17", sealed=True)
        refusal = await client.refusal("registerCgroup", uuid=B, cpuset="14-17")
        assert refusal["reason"] == "cpuset", "the kubelet says otherwise"
        assert holds(node, "11,14-17", sealed=True)
        assert not controller.loop.frozen_because


async def test_a_runner_registers_its_cpus_also_where_its_container_is_ambiguous(node: Node) -> None:
    """The entry of an init container that has ended has some of them as well, and one that the instance must not keep."""
    async with running(node) as (controller, client, _):
        resize(node, "11,14-15", "2-9,16-17", more={"init": "10,14-15"})
        await controller.eventually(lambda: holds(node, "10-11,14-15", sealed=True))
        await client.result("registerCgroup", uuid=B, cpuset="11,14-15")
        assert holds(node, "11,14-15", sealed=True)


async def test_another_container_of_the_pod_cannot_register_its_cpus_for_the_instance(node: Node) -> None:
    async with running(node, timeouts=QUICK) as (_, client, _):
        resize(node, "14-17", "2-9", more={"side": "10-11"}, applied=False)
        node.scope(B).write("cpuset.cpus", "10-11")
        refusal = await client.refusal("registerCgroup", uuid=B, cpuset="10-11")
        assert refusal["reason"] == "conflict"
        assert holds(node, "14-17", sealed=True)


async def test_cpus_of_a_container_beside_it_are_not_the_instances(node: Node) -> None:
    """Which container was resized is not recorded: it is the one that keeps some of the instance's CPUs."""
    async with running(node) as (controller, _, _):
        resize(node, "14-15", "2-9,16-17", more={"side": "10-11"})
        await controller.eventually(lambda: holds(node, "14-15", sealed=True))


@pytest.mark.parametrize("how", ["refuses", "ends it"])
async def test_where_a_partition_is_not_extended_it_stays_as_it_was(
    node: Node, caplog: pytest.LogCaptureFixture, how: Literal["refuses", "ends it"]
) -> None:
    """The writer may have ended, a file may be leased; the kernel ends a partition that it does not extend."""
    async with running(node) as (controller, client, writer):
        writer.failing = how
        group = node.instance(B)
        resize(node, "11,14-17", "2-10")
        await controller.eventually(lambda: "cannot extend the isolated partition" in caplog.text)
        assert (group.partition(), str(group.exclusive_cpus()), str(group.cpus())) == ("isolated", "14-17", "11,14-17")
        assert node.float_cgroup.cpus() == CpuSet.parse("2-10")
        assert not controller.loop.error, "the node is ready"
        refusal = await client.refusal("registerCgroup", uuid=B, cpuset="11,14-17")
        assert "14-17" in str(refusal["message"])
        writer.failing = None
        controller.loop.request_pass()
        await controller.eventually(lambda: holds(node, "11,14-17", sealed=True))


async def test_a_controller_that_ends_in_the_middle_is_continued_by_the_next(node: Node) -> None:
    async with running(node):
        pass
    resize(node, "11,14-15", "2-10,16-17")
    group = node.instance(B)
    for half_done in (
        (),
        (("cpuset.cpus.exclusive", "14-15"),),
        (("cpuset.cpus.exclusive", "14-15"), ("cpuset.cpus", "14-15")),
        (("cpuset.cpus.exclusive", "14-15"), ("cpuset.cpus", "11,14-15")),
    ):
        for file, cpus in (("cpuset.cpus", "14-17"), ("cpuset.cpus.exclusive", "14-17"), *half_done):
            (group.path / file).write_text(f"{cpus}\n")
        (node.root.path / "cpuset.cpus.exclusive").write_text("14-17\n")
        with writing(node.root.path) as (ours, _):
            async with controlled(node, partition_writer=ours):
                assert holds(node, "11,14-15", sealed=True)
