"""``nsdelegate``, which another program takes from the cgroups' mount; ``tests/node/test_controller_tree.py`` has the kernel's part."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runner.controller.tree.cgroup_writer import CgroupWriter, obey
from tests.support.fake_node import B, Node, connected, controlled, in_a_thread

LINE = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw{}\n"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node.new(tmp_path)


def mount(node: Node, *options: str) -> None:
    file = node.proc / "self/mountinfo"
    temporary = file.with_name("new")
    temporary.write_text(LINE.format("".join(f",{option}" for option in options)))
    temporary.rename(file)


@contextmanager
def writing(answer: Callable[[bytes], int]) -> Iterator[CgroupWriter]:
    with in_a_thread(lambda message: b"%d" % answer(message)) as connection:
        yield CgroupWriter(connection)


async def test_it_comes_back_with_what_was_seen_beside_it(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    def add(message: bytes) -> int:
        asked.append(message)
        mount(node, "favordynmods", *message.decode().split(","))
        return 0

    mount(node, "favordynmods")
    with writing(add) as writer:
        async with controlled(node, partition_writer=writer, counted_every=0.01) as controller:
            await controller.eventually(lambda: controller.loop.counters.repairs == 1)
            assert asked == [b"nsdelegate"]
            mount(node, "nsdelegate", "memory_recursiveprot", "favordynmods")
            seen = controller.loop._mount_options
            await controller.eventually(lambda: "memory_recursiveprot" in seen.known)
            mount(node)
            await controller.eventually(lambda: controller.loop.counters.repairs == 2)
            assert asked[1:] == [b"memory_recursiveprot,nsdelegate"]
            assert not controller.loop.faults
    assert (
        "mount options removed by others, added again mount=/sys/fs/cgroup options=favordynmods,nsdelegate"
        in caplog.messages
    )


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (0, ""),  # in another cgroup namespace than the first
        (errno.EPERM, " (cannot mount cgroup v2 with nsdelegate: Operation not permitted)"),
    ],
)
async def test_where_it_cannot_be_added_that_is_a_fault(node: Node, number: int, why: str) -> None:
    node.become(B)  # first: it exchanges /proc/self
    mount(node, "memory_recursiveprot")
    with writing(lambda _: number) as writer:
        async with (
            controlled(node, partition_writer=writer, counted_every=0.01) as controller,
            connected(node.socket) as client,
        ):
            await controller.eventually(lambda: bool(controller.loop.faults))
            status = await client.result("getStatus")
            assert isinstance(status, dict)
            sentence = f"cgroup v2 is mounted without nsdelegate, so a pod may open its cgroup files again{why}"
            remedy = "mount -o remount,nsdelegate /sys/fs/cgroup, as root on the node"
            assert (status["faults"], status["remedies"]) == ([sentence], {sentence: remedy})
            assert controller.loop.error == "", "the node is ready"
            await client.result("registerCgroup", uuid=B, cpuset="14-17")
            mount(node, "nsdelegate")
            await controller.eventually(lambda: not controller.loop.faults)
            assert controller.loop.counters.repairs == 0


@pytest.mark.parametrize(
    "message", [b"memory_recursiveprot", b"nsdelegate,favordynmods", b"nsdelegate 4", b"nsdelegate,", b",nsdelegate"]
)
def test_the_writer_adds_no_other_options(tmp_path: Path, message: bytes) -> None:
    assert obey(tmp_path, message) == errno.EINVAL


def test_the_writer_answers_where_nothing_is_mounted(tmp_path: Path) -> None:
    assert obey(tmp_path, b"nsdelegate", tmp_path) == errno.ENOENT
