"""The memory guard on a real kernel: a pod that hoards memory in float is ended before the kernel ends another pod's guest.

Runs on any machine with root, cgroup v2 with cpuset and four CPUs.
"""

from __future__ import annotations

import pytest

from tests.node.minimal_pods import A, B, Machine, Pod, missing, result, until

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing")

GUEST = 512
"""MiB of an honest guest: more than all of the tree may have, so that the kernel would choose its process."""
LIMITS = ("--memory-max", "256M", "--pod-memory-min", "64M")


def in_float(machine: Machine, pod: Pod) -> None:
    """Register *pod* and move its process to float; its anchor stays."""
    pod.execute("anchor")
    result(pod.call(machine.socket, "registerCgroup", uuid=pod.uid, cpuset=str(pod.scope.cpus())))
    assert pod.execute("write", 0, 0) == 2


def events(machine: Machine) -> dict[str, int]:
    rows = (line.split() for line in machine.root.read("memory.events").splitlines())
    return {name: int(number) for name, number in rows}


@pytest.mark.parametrize(
    ("kind", "mebibytes", "processes"),
    [("anonymous", 400, 1), ("anonymous", 8, 60), ("memfd", 400, 1), ("tmpfs", 400, 1)],
)
def test_a_hoarder_is_ended_and_an_honest_guest_lives(
    machine: Machine, kind: str, mebibytes: int, processes: int
) -> None:
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    with machine.controller(*LIMITS):
        a.execute("guest", GUEST)  # charged to its own pod
        in_float(machine, a)
        in_float(machine, b)
        hoarder = b.execute("hoard", kind, mebibytes, processes)
        until(lambda: "memory short" in machine.log.read_text() or events(machine)["oom_kill"])
        until(lambda: int(machine.root.read("memory.current")) < 192 << 20)
        assert a.execute("self") == 1 or a.execute("self"), "the honest guest lives"
        assert events(machine)["oom_kill"] == 0
        assert f"uuid={A}" not in machine.log.read_text().split("memory short")[1]
        print(hoarder, events(machine))
