"""What a runner carries over, captured while a guest runs; and a renewal that cannot even begin, or is refused."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn, cast

import pytest
import trio
import trio.testing

from runner.base.errors import HostError, RefusedError, Status, explain
from runner.instance.gate import Kind
from runner.instance.parts.qemu import GuestEnd
from runner.instance.renewal import first_stage, upgrade
from runner.instance.renewal.first_stage import FirstStage, RenewalDocument
from runner.instance.renewal.names import NAMES
from runner.instance.renewal.upgrade import _become, _document, resume_after_fault, running_program, state_of
from runner.instance.supervisor import Supervisor
from runner.instance.watch.receipts import PlacedThreads
from runner.kernel.execution import claim_inherited, identity, sealed_memory
from runner.placement.threads import CgroupPaths
from tests.support.fake_host import FakeHost

SPEC = "[[network]]\n[display]\nvnc = true\n"


async def run(fake_host: FakeHost, act: Callable[[Supervisor], Awaitable[None]]) -> None:
    """Do *act* while a guest with everything runs; afterwards everything is as before."""
    plan = fake_host.plan(SPEC + fake_host.share(), grace=2)
    before = fake_host.snapshot()

    async def meanwhile(supervisor: Supervisor) -> None:
        with trio.fail_after(60):
            while supervisor.renewal.resume_after_fault is None:
                await trio.testing.wait_all_tasks_blocked()
        await act(supervisor)
        fake_host.stop.ask("test")

    ended = await fake_host.run(plan, meanwhile=meanwhile)
    assert isinstance(ended, GuestEnd)
    assert ended.status is Status.STOPPED
    assert fake_host.faults.sentences == []
    assert fake_host.snapshot() == before


def inheritable() -> list[int]:
    """Return the descriptors beyond the standard streams that a program executed now would inherit."""
    numbers = [int(entry.name) for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    return [number for number in numbers if number > 2 and os.get_inheritable(number)]


async def test_no_client_is_told_to_attach_again_when_the_state_cannot_be_written(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would leave a console that goes on."""
    told = list[str]()

    async def act(supervisor: Supervisor) -> None:
        await trio.lowlevel.checkpoint()
        supervisor.renewal.leaving.append(lambda: told.append("attach again"))
        with monkeypatch.context() as patched:
            patched.setattr(upgrade, "sealed_memory", full)
            with pytest.raises(HostError, match="injected"):
                upgrade._execute(supervisor, [running_program("")], "upgrade", "")

    def full(_name: str, _content: bytes) -> NoReturn:
        raise HostError("injected")

    await run(fake_host, act)
    assert told == []


async def test_what_is_held_is_written_and_read(fake_host: FakeHost) -> None:
    async def act(supervisor: Supervisor) -> None:
        await trio.lowlevel.checkpoint()
        document = json.loads(json.dumps(_document(supervisor, [running_program("")], "upgrade")))
        found, held = state_of(document), {name: read() for name, read in supervisor.held.read.items()}
        live = {"termination log", "silence"}
        assert found.keys() == held.keys()
        plain = {
            name
            for name, each in held.items()
            if isinstance(each, bool | int | bytes | str | CgroupPaths | PlacedThreads)
        }
        assert {name: found[name] for name in plain - live} == {name: held[name] for name in plain - live}
        names = {
            "anchor:0",
            "anchor:1",
            "dnsmasq:0",
            "up:dnsmasq:0",
            "share:share",
            "state directory",
            "vnc.sock",
            "qmp.sock",
        }
        assert names < found.keys()
        assert {each.partition(":")[0] for each in found} <= NAMES.keys()
        [qemu] = [process for process in supervisor.processes if process.role == "qemu"]
        assert found["qemu"].pid == qemu.pid
        claim_inherited(document["descriptors"])  # each is what it was

    await run(fake_host, act)


async def test_a_fault_beside_another_renewal_waits_for_its_turn(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of an upgrade or an earlier fault, which may fail, as here."""

    async def act(supervisor: Supervisor) -> None:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        async with trio.open_nursery() as nursery, supervisor.changes.begin(Kind.DISK, "a disk is being attached"):
            for number in (1, 2):
                nursery.start_soon(resume_after_fault, supervisor, ValueError(number))
                await trio.lowlevel.checkpoint()
        assert fake_host.logged().count("cannot execute '/nowhere/python': No such file or directory") == 2
        assert len(supervisor.renewal.own_faults) == 2

    await run(fake_host, act)


async def test_an_exec_that_fails_changes_nothing(fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(supervisor: Supervisor) -> None:
        before = inheritable()
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(HostError) as caught:
            await _become(supervisor, Kind.RENEWAL, [running_program("")], "upgrade", 5)
        assert explain(caught.value) == "cannot execute '/nowhere/python': No such file or directory"
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
        assert inheritable() == before
        assert supervisor.changes.current is None

    await run(fake_host, act)


async def test_a_renewal_waits_for_what_is_half_done_and_gives_up(fake_host: FakeHost) -> None:
    async def act(supervisor: Supervisor) -> None:
        async with supervisor.changes.begin(Kind.DISK, "something is half done"):
            with pytest.raises(RefusedError, match=r"now: something is half done \(for 0 s\); ask again later"):
                await _become(supervisor, Kind.RENEWAL, [], "upgrade", 0.1)
        supervisor.stop.ask("test")
        with pytest.raises(RefusedError, match=r"now: the instance was asked to stop \(test\)"):
            await _become(supervisor, Kind.RENEWAL, [], "upgrade", 5)

    await run(fake_host, act)


async def test_a_fault_is_survived_twice_at_most(fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here no exec succeeds, which counts as well."""

    async def act(supervisor: Supervisor) -> None:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        for _ in range(3):
            await resume_after_fault(supervisor, ValueError("injected"))
        assert fake_host.logged().count("the runner cannot continue after a fault of its own: cannot execute") == 2
        assert "the runner has survived 2 faults of its own in 600 s, and not this one" in fake_host.logged()

    await run(fake_host, act)


def test_the_bytecode_of_the_program_that_runs_is_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its interpreter was told by PYTHONPYCACHEPREFIX; that of the next program ignores the environment."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(first_stage, "import_module", lambda name: (name, sys.pycache_prefix))
    for prefix in ("/elsewhere", None):
        monkeypatch.setattr(sys, "pycache_prefix", prefix)
        document = {"programs": [running_program("")], "entry": "runner.elsewhere"}
        monkeypatch.setattr(sys, "pycache_prefix", "/another")
        stage = FirstStage(0, cast("RenewalDocument", document), 0, "")
        assert stage.import_program() == ("runner.elsewhere", prefix)


def test_the_state_is_sealed_and_descriptors_are_told_apart() -> None:
    with sealed_memory("state", b"content") as fd, sealed_memory("state", b"another") as other:
        assert os.pread(fd, 99, 0) == b"content"
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        os.set_inheritable(fd, True)
        claim_inherited({str(fd): identity(fd)})
        assert not os.get_inheritable(fd)
        with pytest.raises(HostError, match="it is of another file"):
            claim_inherited({str(fd): identity(other)})
    with pytest.raises(HostError, match=f"cannot take over descriptor {fd}"):
        claim_inherited({str(fd): [0, 0, 0]})
