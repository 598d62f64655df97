"""A running instance, driven by random operations beside its model; every invariant is checked after each of them.

The operations are those of everyone who may reach a running instance: an operator with `ctl` and `console`, whatever kills
its children, a stranger at its sockets, and the guest. QEMU and the daemons are fakes; the runner is the real one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
import pytest
import trio

from runner.base.errors import RunnerError, Status, explain
from runner.cli.instance_requests import ask_instance
from runner.instance.parts.qemu import GuestEnd
from runner.instance.supervisor import Supervisor
from tests.support.fake_host import FakeHost
from tests.support.frames import frames
from tests.support.json_schemas import fitting_answer
from tests.support.soak import SEED, chance, times

pytestmark = pytest.mark.soak

SLOTS = 3
MIB = 1 << 20


@attrs.define
class Model:
    """What the instance must have after the operations so far."""

    disks: dict[str, int] = attrs.field(factory=dict)
    """The size of each disk that was attached."""
    deaths: dict[str, int] = attrs.field(factory=lambda: {"anchor": 0, "dnsmasq": 0})
    operations: list[str] = attrs.field(factory=list)


@attrs.frozen
class Driver:
    """Does one operation after another on the instance of *fake_host*, and on the model."""

    fake_host: FakeHost
    host: Supervisor
    source: random.Random
    model: Model = attrs.field(factory=Model)

    @property
    def state(self) -> Path:
        return self.fake_host.root / "state"

    async def step(self) -> None:
        """Do a random operation and check everything."""
        operations: list[Callable[[], Awaitable[None]]] = [
            self.attach,
            self.attach,
            self.detach,
            self.grow,
            self.refused_request,
            self.console,
            self.frames_at_the_control_socket,
            self.hang_up,
            self.kill_a_child,
            self.exhaust_a_name,
        ]
        operation = self.source.choice(operations)
        self.model.operations.append(operation.__name__)
        await operation()
        await self.check()

    async def check(self) -> None:
        """Compare the instance with the model."""
        assert self.fake_host.faults.sentences == []
        status: Any = await self.ask("status", {})
        assert status["guest"] == "running"
        assert {disk["name"]: disk["size"] for disk in status["disks"]} == self.model.disks
        assert status["free_slots"] == SLOTS - len(self.model.disks)
        last = (self.fake_host.records("qemu", "hotplug") or [{"device_add": [], "blockdev-add": [], "add-fd": []}])[-1]
        assert sorted(last["device_add"]) == sorted(self.model.disks)
        assert {node.partition("-")[0] for node in last["blockdev-add"]} == set(self.model.disks)
        assert len(last["add-fd"]) >= len(self.model.disks)
        assert self.model.disks or not last["add-fd"]
        roles = sorted(process.role for process in self.host.processes)
        # A killed child may still be waiting for its restart.
        assert set(roles) <= {"anchor", "dnsmasq", "qemu"}
        assert {"qemu", "anchor"} <= set(roles)
        receipt = json.loads((self.state / "receipt.json").read_text())
        assert [each["role"] for each in receipt["threads"]].count("vcpu") == 1
        for role, number in self.model.deaths.items():
            assert self.host.counters.restarts[role] == number

    async def ask(self, method: str, params: dict[str, object]) -> object:
        with trio.fail_after(60):
            return fitting_answer(method, await ask_instance(PurePosixPath(self.state), method, params))

    async def attach(self) -> None:
        path = self.fake_host.root / f"disk{self.source.randrange(8)}"
        path.touch()
        os.truncate(path, MIB)
        params: dict[str, object] = {"path": str(path)}
        if self.source.random() < 0.3:
            params["iothread"] = True
        if self.source.random() < 0.3:
            params["ephemeral"] = True
        if len(self.model.disks) == SLOTS:
            with pytest.raises(RunnerError, match="all 3 slots are taken"):
                await self.ask("disk.attach", params)
            return
        disk: Any = await self.ask("disk.attach", params)
        assert disk["name"] not in self.model.disks
        self.model.disks[disk["name"]] = MIB

    async def detach(self) -> None:
        name = self.any_disk()
        if name not in self.model.disks:
            with pytest.raises(RunnerError, match="cannot find the disk"):
                await self.ask("disk.detach", {"name": name})
            return
        await self.ask("disk.detach", {"name": name})
        del self.model.disks[name]

    async def grow(self) -> None:
        name, size = self.any_disk(), MIB * self.source.choice([1, 2, 3, 4])
        refusal = ""
        try:
            await self.ask("disk.grow", {"name": name, "size": f"{size // MIB}MiB"})
        except RunnerError as error:
            refusal = explain(error)
        if refusal:
            assert any(each in refusal for each in ("cannot find the disk", "a disk never shrinks", "it is ephemeral"))
            return
        assert size > self.model.disks[name]
        self.model.disks[name] = size

    def any_disk(self) -> str:
        return self.source.choice([*self.model.disks, "disk9", "../disk", "\n"])

    async def refused_request(self) -> None:
        """Send requests that change nothing."""
        requests: list[tuple[str, dict[str, object]]] = [
            ("cpu.set", {"count": 2}),
            ("nothing", {}),
            ("disk.attach", {"path": "relative"}),
            ("disk.attach", {"path": str(self.fake_host.root / "missing")}),
            ("disk.attach", {"path": str(self.fake_host.root), "serial": "x\n"}),
            ("disk.attach", {"unknown": 1}),
            ("disk.grow", {"name": "disk0", "size": -1}),
            ("disk.detach", {"name": 7}),
        ]
        with pytest.raises(RunnerError):
            await self.ask(*self.source.choice(requests))

    async def console(self) -> None:
        """Attach to the console, perhaps type, and leave in one of several ways."""
        with trio.socket.socket(socket.AF_UNIX) as client:
            await client.connect(str(self.state / "console.sock"))
            requests: list[object] = [{"write": True, "steal": True}, {"write": True}, {}, [], None]
            request = self.source.choice(requests)
            line = b"\xff" * 300 if request is None else json.dumps(request).encode() + b"\n"
            await client.send(line)
            if isinstance(request, dict):
                assert b'"writes"' in await client.recv(1 << 16)
                with trio.move_on_after(0.01):
                    await client.send(os.urandom(100))

    async def frames_at_the_control_socket(self) -> None:
        """Send broken messages; each is answered or the connection ended."""
        with trio.socket.socket(socket.AF_UNIX) as client:
            await client.connect(str(self.state / "control.sock"))
            source = frames(self.source.randrange(1 << 30))
            try:
                await client.send(
                    b"".join(next(source) for _ in range(20)) + b'{"jsonrpc":"2.0","method":"","id":"e"}\n'
                )
                answers = b""
                with trio.fail_after(60):
                    while b'"id":"e"' not in answers:
                        answers += await client.recv(1 << 16)
                        assert answers
            except (BrokenPipeError, ConnectionResetError):
                return

    async def hang_up(self) -> None:
        """Ask for a status and hang up before the answer."""
        with trio.socket.socket(socket.AF_UNIX) as client:
            await client.connect(str(self.state / "control.sock"))
            await client.send(b'{"jsonrpc":"2.0","method":"status","id":1}\n' * self.source.randrange(1, 9))

    async def kill_a_child(self) -> None:
        """Kill an anchor or dnsmasq, and wait until another one runs."""
        role = self.source.choice(["anchor", "dnsmasq"])
        if role == "dnsmasq" and self.model.deaths[role] >= 2:
            return
        victim = next(process for process in self.host.processes if process.role == role)
        number = len([process for process in self.host.processes if process.role == role])
        announced = self.host.restarted.next
        victim.send_signal(self.source.choice([signal.SIGKILL, signal.SIGABRT]))
        with trio.fail_after(60):
            await victim.wait()
            await announced.wait()
        self.model.deaths[role] += 1
        assert len([process for process in self.host.processes if process.role == role]) == number

    async def exhaust_a_name(self) -> None:
        """Connect to the control socket more often than one client may."""
        clients = [trio.socket.socket(socket.AF_UNIX) for _ in range(12)]
        for client in clients:
            with client:
                await client.connect(str(self.state / "control.sock"))


async def test_random_operations_leave_what_the_model_says_and_nothing_at_the_end(fake_host: FakeHost) -> None:
    plan = fake_host.plan(f"[hotplug]\ndisks = {SLOTS}\n[[network]]\n", qemu={"console": "echo"}, grace=4)
    before = {*fake_host.snapshot().processes}, fake_host.snapshot().descriptors, fake_host.snapshot().links
    source = chance()
    drivers: list[Driver] = []

    async def drive(host: Supervisor) -> None:
        try:
            while not fake_host.guest_runs():
                await trio.sleep(0.005)
            drivers.append(Driver(fake_host, host, source))
            for _ in range(times(60)):
                await drivers[0].step()
        except BaseException:
            print(f"RUNNER_SEED={SEED}", drivers[0].model)
            raise
        finally:
            fake_host.stop.ask("test")

    ended = await fake_host.run(plan, meanwhile=drive)
    assert isinstance(ended, GuestEnd)
    assert ended.status is Status.STOPPED
    assert len(drivers[0].model.operations) == times(60)
    after = fake_host.snapshot()
    assert ({*after.processes}, after.descriptors, after.links) == before
    assert fake_host.faults.sentences == []
