"""CPUs by resource claims on a real kernel: the kubelet's and the driver's files, and the kubelet's API, are made up.

Runs on any machine with root, cgroup v2 with cpuset and four CPUs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from tests.node.cgroups import until
from tests.node.minimal_pods import A, B, Machine, missing, reason, result
from tests.support.fake_claims import FakeClaim, put_claims
from tests.support.fake_pod_resources import FakePodResources, serving

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing")


@contextmanager
def answering(path: Path, api: FakePodResources) -> Iterator[None]:
    """Serve *api* at *path* by a thread of its own."""
    begun, ended = threading.Event(), trio.Event()
    tokens: list[trio.lowlevel.TrioToken] = []

    async def serve() -> None:
        async with serving(path, api):
            tokens.append(trio.lowlevel.current_trio_token())
            begun.set()
            await ended.wait()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        trio.from_thread.run_sync(ended.set, trio_token=tokens[0])
        thread.join()


def test_instances_get_the_cpus_of_their_claims(machine: Machine) -> None:
    cdi, api = machine.kubelet.parent / "cdi", FakePodResources()
    policy = {"policyName": "none", "defaultCpuSet": "", "checksum": 0}
    (machine.kubelet / "cpu_manager_state").write_text(json.dumps(policy))
    claims = [FakeClaim("a0", str(machine.a), A), FakeClaim("b0", str(machine.b), B)]
    api.containers = [claim.container(f"default/{claim.uid}") for claim in claims]
    put_claims(machine.kubelet, cdi, claims)
    ours, other = machine.pod(A, machine.a), machine.pod(B, machine.b)
    with machine.controller("--cdi-dir", str(cdi), bystander=False):  # while the kubelet does not answer yet
        assert reason(ours.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a))) == "frozen"
        with answering(machine.kubelet / "pod-resources/kubelet.sock", api):
            until(lambda: machine.ask("getStatus")["frozen"] is None)
            machine.watch_float()
            until(lambda: machine.float_cgroup.effective_cpus() == machine.all - machine.a - machine.b)
            # The CPUs of another pod's claim are refused, and those of its own are given.
            assert reason(other.call(machine.socket, "registerCgroup", uuid=B, cpuset=str(machine.a))) == "cpuset"
            found = result(ours.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a)))
            assert found["cpuset"] == str(machine.a)
            assert machine.instance(A).effective_cpus() == machine.a
            # A claim that is taken back returns its CPUs to float, but not those of an instance.
            put_claims(machine.kubelet, cdi, claims[:1])
            until(lambda: machine.float_cgroup.effective_cpus() == machine.all - machine.a)
        # Without a change of the files nobody needs the kubelet.
        assert result(ours.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a)))
