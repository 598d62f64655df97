"""The control socket of a running instance."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, cast

import attrs
import pytest
import trio

from runner.base.errors import HostError, RunnerError, Status, explain
from runner.cli.ctl import answer_lines
from runner.cli.instance_requests import ask_instance
from runner.cli.refusal import print_refusal
from runner.facts.host import User
from runner.instance.change.disk_hotplug import DiskHotplug, refuse_elsewhere
from runner.instance.change.running_instance import AttachedDisk
from runner.instance.control.method_table import METHODS
from runner.instance.control.server import ACTIONS, ControlMethods
from runner.instance.gate import Changes, Kind
from runner.instance.parts.qemu import GuestEnd
from runner.instance.timeouts import InstanceTimeouts
from runner.kernel.files import opened
from runner.kernel.peers import Peer, Peers
from runner.plan.disks import DiskPlan
from runner.plan.instance import InstancePlan
from runner.protocol.jsonrpc import RpcError
from runner.protocol.jsonrpc_client import CallRefusedError
from runner.spec.instance import DiskSpec
from tests.support.fake_host import FakeHost, hotplug_of
from tests.support.json_schemas import fitting, fitting_answer
from tests.support.sweep import FAULT_INJECTOR


async def while_a_guest_runs(fake_host: FakeHost, plan: InstancePlan, act: Callable[[], Awaitable[None]]) -> None:
    """Run *plan* and, while its guest runs, *act*; then stop it, and check that nothing is left."""
    before = fake_host.snapshot()
    ended = await fake_host.run(plan, meanwhile=lambda _: fake_host.act_while_it_runs(act))
    assert isinstance(ended, GuestEnd)
    assert ended.status is Status.STOPPED
    assert fake_host.snapshot() == before


@pytest.mark.parametrize("lacking", ["runner.instance.control.server", "runner.protocol.guest_agent"])
async def test_a_failed_import_does_not_end_the_guest(
    fake_host: FakeHost, import_anew: Callable[[str], None], lacking: str
) -> None:
    plan = fake_host.plan(qemu={"agent": "answers", "at_powerdown": "shutdown"})
    import_anew(lacking)

    async def act() -> None:
        while "the guest agent is there" not in fake_host.logged():
            await trio.sleep(0.005)
        FAULT_INJECTOR.begin(1, only=frozenset({"import"}))
        if lacking == "runner.instance.control.server":
            with pytest.raises(RunnerError, match="Method not found"):  # asked a second before it could be answered
                await ask_instance(plan.state_directory, "nothing", {})

    try:
        await while_a_guest_runs(fake_host, plan, act)
    finally:
        FAULT_INJECTOR.end()
    message = {
        "runner.instance.control.server": "cannot be served yet",
        "runner.protocol.guest_agent": "the guest agent is not asked",
    }
    assert f"{message[lacking]}: Too many open files" in fake_host.logged()


async def test_the_path_may_be_longer_than_an_address(fake_host: FakeHost) -> None:
    plan = fake_host.plan()
    alias = fake_host.root / ("x" * 120)

    async def act() -> None:
        alias.symlink_to(plan.state_directory)
        with pytest.raises(RunnerError, match="Method not found"):
            await ask_instance(PurePosixPath(alias), "nothing", {})
        alias.unlink()

    await while_a_guest_runs(fake_host, plan, act)


async def test_no_descriptor_is_attached_later(fake_host: FakeHost) -> None:
    plan = fake_host.plan()
    refusals = []

    async def act() -> None:
        for params in ({"path": "/dev/null", "fd": "data"}, {"fd": "data"}, {"serial": "data"}):
            with pytest.raises(RunnerError) as refused:
                await ask_instance(plan.state_directory, "disk.attach", params)
            refusals.append(explain(refused.value))

    await while_a_guest_runs(fake_host, plan, act)
    assert ["disk.fd: descriptors are handed over" in refusal for refusal in refusals] == [True, True, False]
    assert "disk.path: is missing" in refusals[2]


async def test_what_is_refused_is_data_for_a_program(fake_host: FakeHost, capsys: pytest.CaptureFixture[str]) -> None:
    plan = fake_host.plan()
    found: list[list[tuple[object, ...]]] = []

    async def act() -> None:
        for method, params in (
            ("disk.attach", {"path": "/d", "cache": "fast", "serail": "a"}),
            ("cpu.set", {"count": 8}),
        ):
            with pytest.raises(CallRefusedError) as refused:
                await ask_instance(plan.state_directory, method, params)
            print_refusal(refused.value, argparse.Namespace())
            problems = fitting("refusal", json.loads(capsys.readouterr().out))["problems"]
            found.append([(each["path"], each["found"], bool(each["remedy"])) for each in problems])

    await while_a_guest_runs(fake_host, plan, act)
    assert found[0] == [("disk.serail", "a", True), ("disk.cache", "fast", True)]
    assert [problem[:2] for problem in found[1]] == [("", None)]


@pytest.mark.parametrize(
    ("method", "params", "words"),
    [
        ("status", {"quick": True}, "'quick' is unknown; status takes none"),
        ("disk.grow", {"name": "disk0", "sise": "1GiB"}, "'sise' is unknown; disk.grow takes name, size"),
        ("qemu.check", {"no_way_back": "yes"}, "'no_way_back' must be true or false"),
        ("nothing", {}, "Method not found: 'nothing'"),
    ],
)
async def test_an_unknown_parameter_is_refused(
    fake_host: FakeHost, method: str, params: dict[str, object], words: str
) -> None:
    plan = fake_host.plan()

    async def act() -> None:
        with pytest.raises(CallRefusedError, match=re.escape(words)):
            await ask_instance(plan.state_directory, method, params)

    await while_a_guest_runs(fake_host, plan, act)


async def test_a_disk_that_the_guest_may_change_is_refused_with_its_own_remedy(fake_host: FakeHost) -> None:
    plan = fake_host.plan(fake_host.share())
    disk = fake_host.root / "share" / "disk"

    async def act() -> None:
        with pytest.raises(RunnerError) as refused:
            await ask_instance(plan.state_directory, "disk.attach", {"path": str(disk)})
        assert explain(refused.value).endswith(f"the guest may change '{disk}' by the share 'share'; keep it elsewhere")

    await while_a_guest_runs(fake_host, plan, act)


async def test_a_disk_by_a_link_of_qemus_user_is_refused(fake_host: FakeHost) -> None:
    """The guest may have taken QEMU over, and have put it into a volume where all may write."""
    plan = fake_host.plan()
    plan = attrs.evolve(plan, machine=attrs.evolve(plan.machine, user=User("qemu", 64055, 64055)))
    disk = fake_host.root / "link"
    disk.symlink_to("/etc/shadow")
    os.lchown(disk, 64055, -1)
    peers = Peers(Path("/proc"))
    peer = Peer(os.getpid(), 1, peers.own_namespace(), nested=False, user_id=0, cgroup="/")

    async def silent(_: float) -> None:
        await trio.sleep_forever()

    machine = SimpleNamespace(monitor=SimpleNamespace(silent=silent))
    supervisor = SimpleNamespace(timeouts=InstanceTimeouts(), changes=Changes(fake_host.stop))
    status: Any = SimpleNamespace(
        machine=machine, plan=plan, qemu_answers=trio.lowlevel.checkpoint, supervisor=supervisor
    )
    refused = "leads through a symbolic link of a user as which QEMU runs, here or in another pod"
    async with trio.open_nursery() as nursery:
        with pytest.raises(RpcError, match=refused):
            await ControlMethods(status, peers, nursery).call(lambda: peer, "disk.attach", {"path": str(disk)})


def test_a_link_that_comes_after_the_look_is_refused(tmp_path: Path) -> None:
    """What was opened is judged, and not what has been put in its place again."""
    (tmp_path / "disk").symlink_to("/etc/shadow")
    os.lchown(tmp_path / "disk", 64055, -1)
    path, qemu = PurePosixPath(tmp_path / "disk"), User("qemu", 64055, 64055)
    with opened(path) as fd:
        with pytest.raises(HostError, match="it led to '/etc/shadow' for a moment"):
            refuse_elsewhere(path, fd, qemu)
        refuse_elsewhere(path, fd, User("root", 0, 0))
        (tmp_path / "disk").unlink()
        (tmp_path / "disk").touch()
        with pytest.raises(HostError, match="it led to '/etc/shadow' for a moment"):
            refuse_elsewhere(path, fd, qemu)
    with opened(path) as fd:
        refuse_elsewhere(path, fd, qemu)


@contextlib.contextmanager
def small_state_directory(plan: InstancePlan) -> Iterator[Path]:
    """Mount a file system of 256 KiB where *plan* has its state."""
    directory = Path(plan.state_directory)
    directory.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=0700", "soak", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)


def fill(directory: Path) -> None:
    with (directory / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


NOTHING: dict[str, list[object]] = {"add-fd": [], "blockdev-add": [], "object-add": [], "device_add": []}


async def told_when(fake_host: FakeHost, plan: InstancePlan, happens: Callable[[], None]) -> str:
    """Attach a disk, have *happens* happen while it is being detached, and return what the one who has asked for it is told."""
    (fake_host.root / "disk").write_bytes(bytes(1 << 20))
    await ask_instance(plan.state_directory, "disk.attach", {"path": str(fake_host.root / "disk")})
    message = ""

    async def detach() -> None:
        nonlocal message
        with pytest.raises(RunnerError) as error:
            await ask_instance(plan.state_directory, "disk.detach", {"name": "disk0"})
        message = explain(error.value)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(detach)
        while "device_del" not in fake_host.commands():
            await trio.sleep(0.005)
        happens()
    return message


def kill_qemu(fake_host: FakeHost) -> None:
    os.kill(fake_host.records("qemu", "command")[-1]["pid"], signal.SIGKILL)


@pytest.mark.parametrize(
    ("happens", "message", "status"),
    [
        (kill_qemu, "the instance ends: QEMU was killed by SIGKILL", Status.MACHINE_DIED),
        (lambda host: host.stop.ask("test"), "the instance was asked to stop (test)", Status.STOPPED),
    ],
    ids=["QEMU is killed", "asked to stop"],
)
async def test_the_end_of_the_instance_ends_a_change_at_once_and_says_why(
    fake_host: FakeHost, happens: Callable[[FakeHost], None], message: str, status: Status
) -> None:
    plan = fake_host.plan("[hotplug]\ndisks = 1\n", qemu={"unplugs": False}, grace=2)
    sentences = list[str]()

    async def act() -> None:
        sentences.append(await told_when(fake_host, plan, lambda: happens(fake_host)))

    ended = await fake_host.run(plan, meanwhile=lambda _: fake_host.act_while_it_runs(act, stop=False))
    assert isinstance(ended, GuestEnd)
    assert ended.status is status
    later = "the guest may release the disk 'disk0' later; detach it again"
    assert sentences == [f"cannot change a disk: {message}; {later}"]


async def test_a_change_is_not_waited_for_when_qemu_is_silent_and_goes_on_with_it(
    fake_host: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    plan = fake_host.plan()
    (fake_host.root / "disk").write_bytes(bytes(4096))
    ours, theirs = socket.socketpair()
    sent = []
    with ours, theirs:
        disks = hotplug_of(plan, ours)
        peers = Peers(Path("/proc"))
        peer = Peer(os.getpid(), 1, peers.own_namespace(), nested=False, user_id=0, cgroup="/")
        async with trio.open_nursery() as nursery:
            supervisor = SimpleNamespace(timeouts=InstanceTimeouts(qemu_silent=0.1), changes=disks._changes)
            status: Any = SimpleNamespace(
                machine=disks._machine,
                receipts=SimpleNamespace(verify=trio.lowlevel.checkpoint),
                active=SimpleNamespace(in_pod_cgroup=contextlib.nullcontext),
                attached={},
                plan=plan,
                qemu_answers=trio.lowlevel.checkpoint,
                supervisor=supervisor,
            )
            methods = ControlMethods(status, peers, nursery)
            with pytest.raises(
                RpcError, match=r"QEMU does not answer: it has owed a reply for 0 s, .*; and the change goes on"
            ):
                await methods.call(lambda: peer, "disk.attach", {"path": str(fake_host.root / "disk")})
            assert disks._changes.making(Kind.DISK)
            reading = trio.socket.from_stdlib_socket(theirs)
            theirs.setblocking(False)
            await reading.recv(1 << 16)
            await reading.send(b'{"return": [], "id": "1"}\n')
            sent.append(json.loads(await reading.recv(1 << 16))["execute"])
            theirs.close()
            while "a change that no client waits for any longer has failed: cannot talk to QEMU" not in caplog.text:
                await trio.sleep(0.005)
            nursery.cancel_scope.cancel()
    assert sent == ["add-fd"]
    assert disks._changes.current is None


async def test_an_overtaken_attachment_leaves_no_descriptor_in_qemu(fake_host: FakeHost) -> None:
    (fake_host.root / "disk").write_bytes(bytes(4096))
    plan = fake_host.plan("[hotplug]\ndisks = 1\n")
    replies: dict[str, dict[str, object]] = {
        "query-fdsets": {"return": [{"fdset-id": 4}]},
        "remove-fd": {"return": {}},
    }
    async with hotplug_with_replies(plan, replies) as (disks, sent), trio.open_nursery() as nursery:
        nursery.start_soon(disks.attach, DiskSpec(path=PurePosixPath(fake_host.root / "disk")))
        while "add-fd" not in [command for command, _ in sent]:
            await trio.sleep(0.005)
        nursery.cancel_scope.cancel()
    assert sent == [
        ("query-fdsets", {}),
        ("add-fd", {"fdset-id": 5, "opaque": "disk0"}),
        ("remove-fd", {"fdset-id": 5}),
    ]


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        ("Device disk0 is already in the process of unplug", "the guest has not released it within 0.1 s"),
        ("Hot-unplug failed: guest is busy (power indicator blinking)", "Hot-unplug failed: guest is busy"),
    ],
)
async def test_only_a_release_that_was_begun_is_waited_for(fake_host: FakeHost, refusal: str, message: str) -> None:
    plan = fake_host.plan("[hotplug]\ndisks = 1\n")
    replies = {"device_del": {"error": {"class": "GenericError", "desc": refusal}}}
    async with hotplug_with_replies(plan, replies) as (disks, sent):
        disks._released_within = 0.1
        disks._attached["disk0"] = AttachedDisk(cast("DiskPlan", SimpleNamespace(name="disk0")), 0, ())
        with pytest.raises(RunnerError, match=re.escape(message)):
            await disks.detach("disk0")
    assert sent == [("device_del", {"id": "disk0"})]
    assert "disk0" in disks._attached


@contextlib.asynccontextmanager
async def hotplug_with_replies(
    plan: InstancePlan, replies: Mapping[str, Mapping[str, object]]
) -> AsyncIterator[tuple[DiskHotplug, list[tuple[str, object]]]]:
    """Yield the disks of a QEMU that gives *replies* to these commands, and what it is sent: other commands get none in time."""
    sent = list[tuple[str, object]]()

    async def serve(end: trio.socket.SocketType) -> None:
        while data := await end.recv(1 << 16):
            for line in data.splitlines():
                request = json.loads(line)
                sent.append((request["execute"], request.get("arguments", {})))
                if request["execute"] in replies:
                    await end.send(json.dumps({**replies[request["execute"]], "id": request["id"]}).encode() + b"\n")

    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with ours, theirs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, trio.socket.from_stdlib_socket(theirs))
            yield hotplug_of(plan, ours), sent
            nursery.cancel_scope.cancel()


async def test_the_operator_and_the_one_who_waits_learn_what_is_in_progress(fake_host: FakeHost) -> None:
    plan = fake_host.plan("[hotplug]\ndisks = 1\n", qemu={"unplugs": False}, grace=2)
    shown = dict[str, object]()

    async def look() -> None:
        status = await ask_instance(plan.state_directory, "status", {})
        assert isinstance(status, dict)
        shown.update(status)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            while (
                "a change waits kind=disk before=\"the disk 'disk0' is being detached (for 0 s)\""
                not in fake_host.logged()
            ):
                await trio.sleep(0.005)
            fake_host.stop.ask("test")

    async def other() -> None:
        with pytest.raises(RunnerError, match=r"cannot change a disk now: the instance was asked to stop \(test\)"):
            await ask_instance(plan.state_directory, "disk.grow", {"name": "disk0", "size": "2MiB"})

    async def act() -> None:
        async with trio.open_nursery() as nursery:
            await told_when(fake_host, plan, lambda: nursery.start_soon(look))

    ended = await fake_host.run(plan, meanwhile=lambda _: fake_host.act_while_it_runs(act))
    assert isinstance(ended, GuestEnd)
    assert ended.status is Status.STOPPED
    assert shown["change"] == {"what": "the disk 'disk0' is being detached", "seconds": pytest.approx(0, abs=20)}
    [line] = [line for line in answer_lines(shown) if line.startswith("in progress")]
    assert re.fullmatch(r"in progress +the disk 'disk0' is being detached, for \d+ s", line)


async def test_while_the_guest_powers_down_the_operator_learns_who_asked_for_it(fake_host: FakeHost) -> None:
    plan = fake_host.plan("[hotplug]\ndisks = 1\n", qemu={"at_powerdown": None}, grace=2)
    shown = list[object]()

    async def act() -> None:
        fake_host.stop.ask("test")
        while not any(shown):  # the change in progress, none until the guest is asked to power down
            status = await ask_instance(plan.state_directory, "status", {})
            assert isinstance(status, dict)
            shown.append(status["change"])
        with pytest.raises(RunnerError, match=r"cannot change a disk now: the instance was asked to stop \(test\)"):
            await ask_instance(plan.state_directory, "disk.detach", {"name": "disk0"})

    ended = await fake_host.run(plan, meanwhile=lambda _: fake_host.act_while_it_runs(act))
    assert isinstance(ended, GuestEnd)
    assert shown[-1] == {"what": "the instance was asked to stop (test)", "seconds": pytest.approx(0, abs=20)}


def held(fake_host: FakeHost) -> dict[str, list[object]]:
    """Return what the fake QEMU has of disks that were attached."""
    last = fake_host.records("qemu", "hotplug")[-1]
    return {command: last[command] for command in NOTHING}


@pytest.mark.parametrize("unplugs", [True, False])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_a_full_state_directory_refuses_a_disk_with_the_reason_and_nothing_stays(
    fake_host: FakeHost, when: str, *, unplugs: bool
) -> None:
    """A disk that the guest does not release stays only if the directory became full when the guest had it."""
    fake_host.timeouts = InstanceTimeouts(disk_released=0.2)
    fills = str(fake_host.root / "state") if when == "meanwhile" else None
    plan = fake_host.plan("[hotplug]\ndisks = 2\n", qemu={"unplugs": unplugs, "fills": fills}, grace=2)
    (fake_host.root / "disk").write_bytes(bytes(1 << 20))
    params = {"path": str(fake_host.root / "disk"), "iothread": True}
    stays = when == "meanwhile" and not unplugs

    async def act() -> None:
        receipt = directory / "receipt.json"
        before = receipt.read_bytes()
        if when == "before":
            fill(directory)
        with pytest.raises(RunnerError, match=r"receipt\.json': No space left on device") as refused:
            await ask_instance(plan.state_directory, "disk.attach", params)
        assert ("the disk is still attached" in explain(refused.value)) is stays
        assert held(fake_host)["device_add"] == (["disk0"] if stays else [])
        assert held(fake_host) == NOTHING or stays
        listed = fitting_answer("disk.list", await ask_instance(plan.state_directory, "disk.list", {}))["disks"]
        assert isinstance(listed, list)
        assert [each["name"] for each in listed] == (["disk0"] if stays else [])
        assert receipt.read_bytes() == before or when == "meanwhile"
        (directory / "filler").unlink()
        if when == "before":
            assert fitting_answer("disk.attach", await ask_instance(plan.state_directory, "disk.attach", params))

    with small_state_directory(plan) as directory:
        try:
            await while_a_guest_runs(fake_host, plan, act)
        finally:
            for each in directory.iterdir():
                each.unlink()


async def test_a_disk_that_was_detached_is_said_to_be_so_though_the_receipt_cannot_be_written(
    fake_host: FakeHost,
) -> None:
    plan = fake_host.plan("[hotplug]\ndisks = 1\n", grace=2)
    (fake_host.root / "disk").write_bytes(bytes(1 << 20))

    async def act() -> None:
        await ask_instance(plan.state_directory, "disk.attach", {"path": str(fake_host.root / "disk")})
        fill(directory)
        for method, params, done in (
            ("disk.grow", {"name": "disk0", "size": "2MiB"}, "the disk 'disk0' has 2MiB, but cannot write"),
            ("disk.detach", {"name": "disk0"}, "the disk 'disk0' is detached, but cannot write"),
        ):
            with pytest.raises(RunnerError, match=done):
                await ask_instance(plan.state_directory, method, params)
        assert held(fake_host) == NOTHING
        assert await ask_instance(plan.state_directory, "disk.list", {}) == {"version": 1, "disks": []}
        (directory / "filler").unlink()

    with small_state_directory(plan) as directory:
        try:
            await while_a_guest_runs(fake_host, plan, act)
        finally:
            for each in directory.iterdir():
                each.unlink()


def test_each_method_of_the_table_does_something() -> None:
    assert ACTIONS.keys() == METHODS.keys()
