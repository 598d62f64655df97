"""The memory guard on a real kernel: a pod that hoards memory in float is ended before the kernel ends another pod's guest.

Runs on any machine with root, cgroup v2 with cpuset and four CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.node.minimal_pods import A, B, Machine, Pod, missing, result, until

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing")

GUEST = 512
"""MiB of an honest guest: more than all of the tree may have, so that the kernel would choose its process."""
HIGH = 192 << 20
"""The default ``memory.high`` below 256 MiB."""


@contextmanager
def pods_in_float(machine: Machine) -> Iterator[tuple[Pod, Pod]]:
    """Run a controller, and move an honest pod with a guest and a hostile one to float; at the end no process was killed."""
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    with machine.controller("--memory-max", "256M", "--pod-memory-min", "64M"):
        a.execute("guest", GUEST)
        for pod in (a, b):
            pod.execute("anchor")
            result(pod.call(machine.socket, "registerCgroup", uuid=pod.uid, cpuset=str(pod.scope.cpus())))
            assert pod.execute("write", 0, 0) == 2
        assert int(a.scope.read("memory.current")) > GUEST << 20, "its own pod is charged for the guest"
        yield a, b
        assert a.execute("self") == 1, "the process of the honest guest lives"
        assert {end["pod_uid"] for end in machine.ask("getStatus")["memory_ends"]} == {B}
        events = dict(line.split() for line in machine.root.read("memory.events").splitlines())
        assert (events["oom"], events["oom_kill"]) == ("0", "0")


def in_use(machine: Machine) -> int:
    return int(machine.root.read("memory.current"))


def ends(machine: Machine) -> int:
    """Return how often processes were ended; at most the last 16 times are known."""
    return len(machine.ask("getStatus")["memory_ends"])


@pytest.mark.parametrize(
    ("kind", "mebibytes", "processes"),
    [("anonymous", 400, 1), ("anonymous", 8, 60), ("memfd", 400, 1), ("tmpfs", 400, 1)],
)
def test_a_hoarder_is_ended_and_an_honest_guest_lives(
    machine: Machine, kind: str, mebibytes: int, processes: int
) -> None:
    with pods_in_float(machine) as (_, b):
        b.execute("hoard", kind, mebibytes, processes)
        until(lambda: ends(machine))
        until(lambda: in_use(machine) < HIGH)


@pytest.mark.gate
def test_a_pod_that_hoards_again_is_ended_as_a_whole(machine: Machine) -> None:
    """Its anchor in its own cgroup too."""
    with pods_in_float(machine) as (_, b):
        b.execute("hoard", "anonymous", 400, 1)
        until(lambda: ends(machine))
        until(lambda: in_use(machine) < HIGH)
        assert b.execute("self") == 1, "at first only what is large is ended"
        b.execute("hoard", "anonymous", 400, 1)
        until(lambda: not b.scope.populated())
        until(lambda: not machine.pod_float(B).populated())
