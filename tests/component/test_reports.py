"""What an instance reports, and to which controller: the runner's side of tests/component/controller/test_reports.py."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from runner.base.cpuset import CpuSet
from runner.controller.serve.socket_file import listening
from runner.instance.guest_state import GuestState
from runner.instance.supervisor import Supervisor, open_supervisor
from runner.instance.watch.figures import Figures
from runner.instance.watch.reports import Pauses, report
from runner.placement.backends import ControllerPlacement
from runner.placement.children import RESTARTS
from runner.protocol import instance_metrics
from runner.protocol.controller_client import REPORT_SOCKET
from tests.support.fake_host import FakeHost
from tests.support.fake_node import B, Node, connected, controlled
from tests.support.fake_node import Client as Peer

AT_ONCE = Pauses(change=0, first=0.001, longest=0.01)


@attrs.define
class Receiver:
    """A controller that keeps what is reported; *client* is the connection of the last report."""

    listener: trio.socket.SocketType
    client: Peer | None = None

    async def connection(self) -> Peer:
        """Return the next connection."""
        accepted, _ = await self.listener.accept()
        if self.client is not None:
            self.client.connection.close()
        self.client = Peer(accepted)
        return self.client

    async def report(self) -> dict[str, Any]:
        """Return the next report on the last connection."""
        assert self.client is not None
        request = json.loads(await self.client.line())
        assert (request["method"], request["params"]["uuid"]) == ("reportInstance", B)
        return instance_metrics.as_json(instance_metrics.parse_report(request["params"]["report"]))

    async def want(self) -> dict[str, Any]:
        """Answer the last report, and return the next one."""
        assert self.client is not None
        await self.client.send(b'{"jsonrpc": "2.0", "result": {}, "id": 1}\n')
        return await self.report()


@contextlib.contextmanager
def receiving(directory: Path) -> Iterator[Receiver]:
    with listening(directory / REPORT_SOCKET) as listener:
        receiver = Receiver(trio.socket.from_stdlib_socket(listener))
        try:
            yield receiver
        finally:
            if receiver.client is not None:
                receiver.client.connection.close()


def placement(directory: Path) -> ControllerPlacement:
    return ControllerPlacement(CpuSet([1]), (1,), PurePosixPath(directory / "controller.sock"), B)


async def test_changes_are_reported_and_figures_when_they_are_wanted(fake_host: FakeHost, tmp_path: Path) -> None:
    plan = fake_host.plan(grace=4)

    async def meanwhile(host: Supervisor) -> None:
        with receiving(tmp_path) as receiver:
            async with host.background_task(partial(report, Figures(host, plan), placement(tmp_path), AT_ONCE)):
                host.guest_state.registered.set()
                await receiver.connection()
                first = await receiver.report()
                while first["guest_state"] != {"running": 1}:  # each change comes by a connection of its own
                    await receiver.connection()
                    first = await receiver.report()
                assert "vcpus" not in first, "it is not asked for what takes reading"
                assert first["qemu_info"] == {"version": "7.2.0"}
                wanted = await receiver.want()
                assert wanted["vcpus"] == 1
                assert wanted["vcpu_cpu_seconds_total"] >= 0
                anchor = next(process for process in host.processes if process.role == "anchor")
                anchor.send_signal(signal.SIGKILL)
                await receiver.connection()
                assert (await receiver.report())["child_restarts_total"] == {"anchor": 1}
        fake_host.stop.ask("test")

    await fake_host.run(plan, meanwhile=meanwhile)


async def test_nothing_is_reported_before_the_registration_and_all_again_after_the_controllers_end(
    fake_host: FakeHost, tmp_path: Path
) -> None:
    async with open_supervisor(fake_host.stop, fake_host.faults) as host:
        figures = Figures(host, fake_host.plan())
        async with host.background_task(partial(report, figures, placement(tmp_path), AT_ONCE)):
            with receiving(tmp_path) as receiver:
                await trio.testing.wait_all_tasks_blocked(0.05)
                host.guest_state.registered.set()
                await receiver.connection()
                assert (await receiver.report())["guest_state"] == {"starting": 1}
            with receiving(tmp_path) as receiver:
                await receiver.connection()
                assert (await receiver.report())["guest_state"] == {"starting": 1}
                assert receiver.client is not None
                await receiver.client.send(b'{"jsonrpc": "2.0", "error": {"code": -32001, "message": "no"}, "id": 1}\n')
                await receiver.connection()
                assert await receiver.report()
    assert "the controller takes no report: no" in fake_host.logged()


async def test_an_instance_reports_also_to_a_controller_that_was_started_again(
    fake_host: FakeHost, tmp_path: Path
) -> None:
    """Also to one that is started again."""
    node = Node.new(tmp_path)
    node.become(B)
    at = attrs.evolve(placement(tmp_path), socket=PurePosixPath(node.socket))
    async with open_supervisor(fake_host.stop, fake_host.faults) as host:
        host.guest_state.registered.set()
        async with host.background_task(partial(report, Figures(host, fake_host.plan()), at, AT_ONCE)):
            for _ in range(2):
                async with controlled(node) as controller, connected(node.socket) as client:
                    await client.result("registerCgroup", uuid=B, cpuset="14-17")
                    while controller.reports.to_json(B) is None:
                        await trio.sleep(0.01)
                    text = (await controller.endpoints().respond("/metrics")).text
                    assert f'instance_runner_guest_state{{pod_uid="{B}",state="starting"}} 1.0' in text
                    assert f'instance_runner_console_bytes_total{{pod_uid="{B}"}} 0.0' in text


async def test_the_table_has_the_values_that_there_are() -> None:
    await trio.lowlevel.checkpoint()
    assert tuple(RESTARTS) == instance_metrics.RESTARTED_ROLES
    assert [name for name, _ in GuestState().reasons()] == list(instance_metrics.UNREADY)


@pytest.mark.parametrize(("failures", "average"), [(0, 1), (3, 8), (5, 30), (5000, 30)])
def test_pauses_are_random_and_bounded(failures: int, average: float) -> None:
    found = {Pauses().after(failures) for _ in range(50)}
    assert len(found) > 40
    assert 0.5 * average <= min(found) <= max(found) <= 1.5 * average
