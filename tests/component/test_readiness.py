"""A guest is ready when it says so, in each of the ways that ``guest.ready`` names, and not after a panic or a reset."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from ipaddress import IPv4Address
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from runner.base.errors import RunnerError, Status, explain
from runner.cli.instance_requests import ask_instance
from runner.instance.guest_state import MINUTE
from runner.instance.parts.qemu import GuestEnd
from runner.instance.supervisor import Supervisor
from runner.instance.watch.console_search import search_lines
from runner.instance.watch.console_watch import LONGEST, SEARCHED_AT_MOST, SEARCHED_WITHIN, ConsoleWatch, Search
from runner.instance.watch.readiness import Readiness
from runner.plan.guest_devices import GuestPort
from runner.plan.instance import InstancePlan
from runner.protocol.guest_agent import GuestAgent
from runner.spec.readiness import ConsoleSign
from tests.support.fake_host import FakeHost
from tests.support.sweep import FAULT_INJECTOR

PANIC = b"\n[    2.345678][    T1] Kernel panic - not syncing: VFS: Unable to mount root fs on unknown-block(0,0)\r\n"
SENTENCE = (
    "the guest's kernel has panicked: [    2.345678][    T1] Kernel panic - not syncing: VFS: Unable to mount root fs"
)


async def wait_for(condition: Callable[[], object]) -> None:
    with trio.fail_after(60):
        while not condition():
            await trio.sleep(0.005)


@attrs.define
class Guest:
    """A guest that runs, with what shows whether it is ready."""

    host: Supervisor
    ready_file: Path
    console: trio.SocketStream
    port: int

    async def prints(self, text: bytes) -> None:
        """Have it print *text*; what begins with ``!`` it does instead."""
        before = self.host.counters.console
        await self.console.send_all(text)
        if not text.startswith(b"!"):
            await wait_for(lambda: self.host.counters.console >= before + len(text))

    async def readyz(self) -> tuple[int, str]:
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
            await stream.send_all(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
            head, _, body = b"".join([data async for data in stream]).decode().partition("\r\n\r\n")
        return int(head.split()[1]), body

    async def is_ready(self) -> None:
        await wait_for(self.ready_file.exists)
        assert await self.readyz() == (200, "ok\n")

    async def is_not_ready(self, reason: str) -> None:
        await wait_for(lambda: not self.ready_file.exists())
        status, text = await self.readyz()
        assert (status, reason in text) == (503, True), text


@asynccontextmanager
async def running(fake_host: FakeHost, host: Supervisor, plan: InstancePlan) -> AsyncIterator[Guest]:
    directory = Path(plan.state_directory)
    port = int(fake_host.logged().rpartition("port=")[2].split()[0])
    await wait_for(lambda: host.guest_state.phase == "running")
    async with await trio.open_unix_socket(directory / "console.sock") as console:
        await console.send_all(b'{"write": true, "steal": false}\n')
        with trio.fail_after(60):
            seen = b""
            while b"guest: runs" not in seen:
                seen += await console.receive_some()
        yield Guest(host, directory / "ready", console, port)


async def run(
    fake_host: FakeHost, plan: InstancePlan, act: Callable[[Guest], Awaitable[None]], status: Status = Status.STOPPED
) -> None:
    before = fake_host.snapshot()
    over = []

    async def meanwhile(host: Supervisor) -> None:
        try:
            async with running(fake_host, host, plan) as guest:
                await act(guest)
                over.append(True)
        finally:
            fake_host.stop.ask("test")

    with trio.fail_after(200):  # a test's clock may jump
        result = await fake_host.run(plan, meanwhile=meanwhile, http=("127.0.0.1", 0))
    assert over
    assert isinstance(result, GuestEnd), explain(result)
    assert result.status is status
    assert fake_host.faults.sentences == []
    assert fake_host.snapshot() == before


def plan_of(fake_host: FakeHost, ready: str | None, **qemu: object) -> InstancePlan:
    spec = "" if ready is None else f"[guest]\nready = '{ready}'\n"
    return fake_host.plan(spec, qemu={"console": "plays", **qemu})


async def test_without_a_sign_it_is_ready_as_soon_as_it_runs(fake_host: FakeHost) -> None:
    await run(fake_host, plan_of(fake_host, None), Guest.is_ready)


async def test_the_file_stays_the_same_while_the_guest_stays_ready(fake_host: FakeHost) -> None:
    """A probe that looks for it at the moment of any change would miss it otherwise."""

    async def act(guest: Guest) -> None:
        await guest.is_ready()
        before = guest.ready_file.stat()
        guest.host.guest_state.changes.announce()
        await trio.sleep(0.1)
        assert guest.ready_file.stat() == before

    await run(fake_host, plan_of(fake_host, None), act)


async def test_what_could_not_be_written_is_written_once_there_is_room(fake_host: FakeHost) -> None:
    plan = fake_host.plan()
    ready, receipt = (Path(plan.state_directory / name) for name in ("ready", "receipt.json"))
    in_the_way = [path.with_name(f"{path.name}.new") for path in (ready, receipt)]  # what a full volume is to it

    async def meanwhile(supervisor: Supervisor) -> None:
        await wait_for(ready.exists)
        for each in in_the_way:
            each.mkdir()
        receipt.unlink()
        supervisor.restarted.announce()
        supervisor.guest_state.panic = "of the test"
        supervisor.guest_state.changes.announce()
        await wait_for(lambda: not ready.exists())
        supervisor.guest_state.panic = ""
        supervisor.guest_state.changes.announce()
        while not {"cannot show that the guest is ready", "the receipt is from before"} <= failures(fake_host):
            await trio.sleep(0.005)
        for each in in_the_way:
            each.rmdir()
        while not (ready.exists() and receipt.exists()):
            await trio.sleep(0.005)
        fake_host.stop.ask("the test")

    assert isinstance(await fake_host.run(plan, meanwhile=meanwhile), GuestEnd)
    assert fake_host.faults.sentences == []


def failures(fake_host: FakeHost) -> set[str]:
    logged = fake_host.logged()
    return {words for words in ("cannot show that the guest is ready", "the receipt is from before") if words in logged}


async def test_a_line_of_the_console_makes_it_ready_until_it_is_reset(fake_host: FakeHost) -> None:
    async def act(guest: Guest) -> None:
        await guest.prints(b"systemd[1]: starting\r\ndebian log")
        await guest.is_not_ready("the guest has not given its sign yet: console:^debian login: $")
        await guest.prints(b"in: ")  # a prompt has no line end, and comes in pieces
        await guest.is_ready()
        await guest.prints(b"root\r\n" * 100)
        await guest.is_ready()
        await guest.prints(b"!reset")
        await guest.is_not_ready("the guest has not given its sign yet")
        await guest.prints(b"\r\ndebian login: ")
        await guest.is_ready()

    await run(fake_host, plan_of(fake_host, "console:^debian login: $"), act)
    assert fake_host.logged().count("the guest is ready") == 1


async def test_a_prompt_with_colours_is_found(fake_host: FakeHost) -> None:
    async def act(guest: Guest) -> None:
        await guest.prints(b"\r\n\x1b]3008;start=af1a\x1b\\\x1b[0m\x1b[1;32mdebian login:\x1b[0m ")
        await guest.is_ready()

    await run(fake_host, plan_of(fake_host, "console:^debian login: $"), act)


async def test_a_pattern_that_would_take_for_ever_is_given_up_and_stops_nothing_else(fake_host: FakeHost) -> None:
    async def act(guest: Guest) -> None:
        await guest.prints(b"\n" + b"a" * 60 + b"b\n")
        await guest.is_not_ready("the pattern of guest.ready takes more than 0.1 s for some lines, or more than 10% of")
        await guest.prints(b"aaa\n")
        await guest.is_not_ready("simplify it")

    await run(fake_host, plan_of(fake_host, "console:^(a+)+c"), act)
    assert "the guest cannot become ready: the pattern of guest.ready takes" in fake_host.logged()


@pytest.mark.parametrize("ready", [None, "console:login:"])
async def test_a_panic_on_the_console_ends_readiness_and_not_the_guest(fake_host: FakeHost, ready: str | None) -> None:
    async def act(guest: Guest) -> None:
        await guest.prints(b"login:")
        await guest.is_ready()
        for each in (PANIC[:40], PANIC[40:]):
            await guest.prints(each)
        await guest.is_not_ready(SENTENCE)
        await guest.prints(b"login:")
        await guest.is_not_ready(SENTENCE)
        await guest.prints(b"!reset")
        await wait_for(lambda: not guest.host.guest_state.panic)
        if ready is not None:
            await guest.is_not_ready("the guest has not given its sign yet")
            await guest.prints(b"login:")
        await guest.is_ready()

    await run(fake_host, plan_of(fake_host, ready), act)
    assert fake_host.logged().count("the guest's kernel has panicked, by its console") == 1


@pytest.mark.parametrize(
    ("falls", "rises", "reason"),
    [
        ("suspend", "wake", "the guest does not run: it is suspended"),
        (
            "break",
            "resume",
            "the guest does not run: QEMU has stopped it, because its accelerator cannot execute it any more",
        ),
        ("crash kernel", "reset", "the guest's kernel has panicked: it handles that itself, as kdump does"),
    ],
)
async def test_a_guest_that_executes_nothing_of_its_own_is_not_ready(
    fake_host: FakeHost, falls: str, rises: str, reason: str
) -> None:
    async def act(guest: Guest) -> None:
        await guest.is_ready()
        await guest.prints(f"!{falls}".encode())
        await guest.is_not_ready(reason)
        await guest.prints(f"!{rises}".encode())
        await guest.is_ready()

    await run(fake_host, plan_of(fake_host, None), act)
    assert fake_host.logged().count(reason.partition(":")[0]) == 1


async def test_a_guest_that_gets_no_address_is_not_ready_until_it_does(fake_host: FakeHost) -> None:
    mac = "52:54:00:00:00:01"
    lines = (
        f"dnsmasq-dhcp[7]: DHCPDISCOVER(vmbr0) {mac[:-1]}2 ignored",
        f"dnsmasq-dhcp[7]: DHCPACK(vmbr0) 192.168.77.2 {mac} web",
        f"dnsmasq-dhcp[7]: DHCPDECLINE(vmbr0) 192.168.77.2 {mac}",
        f"dnsmasq-dhcp[7]: DHCPDISCOVER(vmbr0) {mac[:-1]}2 ignored",  # of a machine within the guest, say
        f"dnsmasq-dhcp[7]: DHCPDISCOVER(vmbr0) {mac} no address available",
        f"dnsmasq-dhcp[7]: DHCPACK(vmbr0) 192.168.77.2 {mac} web",
    )
    plan = fake_host.plan(
        f'[[network]]\nmac = "{mac}"\n', qemu={"console": "plays"}, daemon={"dnsmasq": {"says": lines}}
    )

    async def act(guest: Guest) -> None:
        [dnsmasq] = (each for each in guest.host.processes if each.role == "dnsmasq")

        async def says(reason: str | None) -> None:
            before = fake_host.logged().count("dnsmasq-dhcp[7]")
            dnsmasq.send_signal(signal.SIGUSR1)
            await wait_for(lambda: fake_host.logged().count("dnsmasq-dhcp[7]") > before)
            await (guest.is_ready() if reason is None else guest.is_not_ready(reason))

        declined = "it has declined 192.168.77.2, which another machine of its network answers for"
        await guest.is_ready()
        for reason in (f"it asks with another MAC address than {mac}", None, declined, declined, declined, None):
            await says(reason)

    await run(fake_host, plan, act)


async def test_a_guest_that_is_reset_again_and_again_is_not_ready_until_it_gets_up(
    fake_host: FakeHost, mock_clock: MockClock
) -> None:
    mock_clock.rate = 1  # processes take their time

    async def act(guest: Guest) -> None:
        await guest.prints(b"!reset")
        await guest.prints(b"!reset")
        await wait_for(lambda: guest.host.counters.resets == 2)
        await guest.is_ready()
        await guest.prints(b"!reset")
        await guest.is_not_ready("the guest is reset again and again: it was reset 3 times in the last minute")
        shown: Any = await ask_instance(PurePosixPath(guest.ready_file.parent), "status", {})
        assert shown["resets"] == {"total": 3, "last_minute": 3}
        mock_clock.jump(MINUTE)
        await guest.is_ready()

    await run(fake_host, plan_of(fake_host, None), act)
    assert fake_host.logged().count("the guest is reset again and again: 3 resets in the last minute") == 1


async def test_a_qemu_that_is_stopped_is_noticed_when_it_is_asked_for(fake_host: FakeHost) -> None:
    """`ctl` answers within seconds what PID 1 knows alone, a change is refused, and all is well when QEMU goes on."""

    async def act(guest: Guest) -> None:
        directory = PurePosixPath(guest.ready_file.parent)
        await guest.is_ready()
        [qemu] = [process for process in guest.host.processes if process.role == "qemu"]
        os.kill(qemu.pid, signal.SIGSTOP)
        try:
            with trio.fail_after(60):
                shown: Any = await ask_instance(directory, "status", {})
                with pytest.raises(RunnerError, match="QEMU does not answer"):
                    await ask_instance(directory, "disk.list", {})
            assert (shown["guest"], shown["ready"], shown["name"]) == ("unknown", False, "instance")
            assert shown["not_ready"] == shown["qemu"]["error"]
            await guest.is_not_ready("QEMU does not answer: it has owed a reply for ")
        finally:
            os.kill(qemu.pid, signal.SIGCONT)
        await guest.is_ready()
        shown = await ask_instance(directory, "status", {})
        assert (shown["guest"], shown["ready"], shown["qemu"]["error"]) == ("running", True, "")

    await run(fake_host, plan_of(fake_host, None), act)
    assert fake_host.logged().count("nothing is known of the guest: QEMU does not answer") == 1
    assert fake_host.logged().count("QEMU answers again") == 1


async def test_a_suspended_guest_is_woken_before_it_is_to_power_down(fake_host: FakeHost) -> None:
    async def act(guest: Guest) -> None:
        await guest.prints(b"!suspend")
        await guest.is_not_ready("suspended")

    await run(fake_host, plan_of(fake_host, None, at_powerdown="shutdown"), act)
    commands = fake_host.commands()
    assert commands.index("system_wakeup") < commands.index("system_powerdown")


async def test_an_event_that_nothing_knows_is_logged(fake_host: FakeHost) -> None:
    async def act(guest: Guest) -> None:
        await guest.prints(b"!novelty!novelty")
        await wait_for(lambda: "OF_A_NEWER_QEMU" in fake_host.logged())

    await run(fake_host, plan_of(fake_host, None), act)
    assert fake_host.logged().count("QEMU reports what this program does not know") == 1


async def test_what_a_guest_quotes_of_a_panic_is_none(fake_host: FakeHost) -> None:
    async def act(guest: Guest) -> None:
        await guest.prints(
            b"\nNov 22 11:20:42 web kernel: [    1.2] Kernel panic - not syncing: of another machine\r\n"
        )
        await guest.prints(b"grep 'Kernel panic - not syncing' /var/log/kern.log\r\n")
        await guest.is_ready()

    await run(fake_host, plan_of(fake_host, None), act)
    assert "panicked" not in fake_host.logged()


async def test_a_panic_by_pvpanic_ends_readiness_with_the_instance(fake_host: FakeHost) -> None:
    async def act(guest: Guest) -> None:
        await guest.is_ready()
        with trio.CancelScope(shield=True):  # the end of the instance cancels what runs beside it
            await guest.prints(b"!panic")
            await guest.is_not_ready("stopping")

    await run(fake_host, plan_of(fake_host, None, at_quit=None), act, Status.GUEST_PANICKED)


async def test_an_agent_that_answers_makes_it_ready(fake_host: FakeHost) -> None:
    async def act(guest: Guest) -> None:
        await guest.is_not_ready("the guest has not given its sign yet: agent")
        assert fake_host.records("qemu", "agent") == []  # nothing is asked before a program has the port open
        await guest.prints(b"!agent opens")
        await guest.is_ready()
        await guest.prints(b"!agent closes")  # it may be restarted: the guest stays ready
        await guest.prints(b"!agent opens")
        await guest.is_ready()
        await guest.prints(b"!agent closes")
        await guest.prints(b"!reset")
        await guest.is_not_ready("the guest has not given its sign yet: agent")
        await guest.prints(b"!agent opens")
        await guest.is_ready()

    await run(fake_host, plan_of(fake_host, "agent", agent="answers"), act)
    commands = [record["command"] for record in fake_host.records("qemu", "agent")]
    assert commands.count("guest-shutdown") == 1  # the channel still serves the end


async def test_an_agent_that_says_nothing_does_not(fake_host: FakeHost) -> None:
    async def act(guest: Guest) -> None:
        await guest.prints(b"!agent opens")
        await wait_for(lambda: fake_host.records("qemu", "agent"))
        await guest.is_not_ready("the guest has not given its sign yet: agent")

    await run(fake_host, plan_of(fake_host, "agent", agent="deaf"), act)


def plan_of_port(fake_host: FakeHost, port: int) -> InstancePlan:
    plan = plan_of(fake_host, None)
    guest = attrs.evolve(plan.machine.guest, ready=GuestPort(IPv4Address("127.0.0.1"), port))
    return attrs.evolve(plan, machine=attrs.evolve(plan.machine, guest=guest))


def is_connected(server: socket.socket) -> bool:
    """Return whether a connection waits at *server*, and take it."""
    try:
        server.accept()[0].close()
    except BlockingIOError:
        return False
    return True


async def test_a_port_that_accepts_makes_it_ready_and_is_then_left_alone(fake_host: FakeHost) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        plan = plan_of_port(fake_host, port)

        async def act(guest: Guest) -> None:
            await guest.is_not_ready(f"the guest has not given its sign yet: port:{port}")
            server.listen()
            await guest.is_ready()
            server.setblocking(False)
            assert is_connected(server)
            assert not is_connected(server)
            await guest.prints(b"!reset")
            await wait_for(lambda: is_connected(server))
            await guest.is_ready()

        await run(fake_host, plan, act)


@pytest.mark.parametrize(
    ("ready", "imported"),
    [("agent", "runner.protocol.guest_agent"), ("console:^login: $", "runner.instance.watch.console_search")],
)
async def test_nothing_is_imported_for_a_sign_while_the_guest_runs(
    fake_host: FakeHost, import_anew: Callable[[str], None], ready: str, imported: str
) -> None:
    """An import fails where descriptors are short, and in a background task it would end the guest."""
    plan = plan_of(fake_host, ready)

    async def act(guest: Guest) -> None:
        await trio.lowlevel.checkpoint()
        import_anew(imported)
        Readiness(guest.host, plan)
        assert imported in sys.modules

    await run(fake_host, plan_of(fake_host, None), act)


async def test_an_agent_is_asked_where_nothing_can_be_imported(
    fake_host: FakeHost, import_anew: Callable[[str], None]
) -> None:
    import_anew("runner.protocol.guest_agent")

    async def act(guest: Guest) -> None:
        FAULT_INJECTOR.begin(1, only=frozenset({"import"}))
        try:
            await guest.prints(b"!agent opens")
            await wait_for(guest.ready_file.exists)
        finally:
            FAULT_INJECTOR.end()

    await run(fake_host, plan_of(fake_host, "agent", agent="answers"), act)


async def test_a_port_is_tried_again_when_descriptors_are_short(fake_host: FakeHost) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        plan = plan_of_port(fake_host, server.getsockname()[1])

        async def act(guest: Guest) -> None:
            FAULT_INJECTOR.begin(1, only=frozenset({"socket.__new__"}))
            try:
                await wait_for(lambda: FAULT_INJECTOR.count > 1)
            finally:
                FAULT_INJECTOR.end()
            server.listen()
            await guest.is_ready()

        await run(fake_host, plan, act)


async def cancel_when_blocked(scope: trio.CancelScope) -> None:
    await trio.testing.wait_all_tasks_blocked()
    scope.cancel()


async def test_an_answer_to_an_earlier_conversation_is_not_taken_for_one_of_this(nursery: trio.Nursery) -> None:
    """An agent that was too slow for the sign is asked again at the power-down, in another conversation."""
    ours, agent = socket.socketpair()
    with ours, agent:
        with trio.CancelScope() as too_slow:
            nursery.start_soon(cancel_when_blocked, too_slow)
            await GuestAgent(ours).ping()
        nursery.start_soon(GuestAgent(ours).ping)
        await trio.testing.wait_all_tasks_blocked()
        first, second = (json.loads(each)["arguments"]["id"] for each in agent.recv(1 << 16).split(b"\xff")[1:])
        agent.sendall(b'\xff{"return": %d}\n' % first)
        await trio.testing.wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 1
        agent.sendall(b'\xff{"return": %d}\n' % second)
        await trio.testing.wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 0


# -- the watch alone -------------------------------------------------------------------------------------------------


class Watched:
    """What a watch has reported."""

    def __init__(self, pattern: str | None = None, search: Search = search_lines) -> None:
        self.reports: list[str] = []
        report = self.reports.append
        self.watch = ConsoleWatch(
            report,
            lambda: report("found"),
            lambda: report("too slow"),
            search,
            None if pattern is None else ConsoleSign(pattern).compiled(),
        )


@pytest.mark.parametrize("cut", range(0, len(PANIC), 7))
@pytest.mark.parametrize("pattern", [None, "never"])
def test_a_panic_is_seen_wherever_the_output_is_cut(cut: int, pattern: str | None) -> None:
    watched = Watched(pattern)
    for each in (b"before", PANIC[:cut], PANIC[cut:]):
        watched.watch.feed(each)
    assert watched.reports == [PANIC.decode().strip()]


@pytest.mark.parametrize("line", [b"Kernel panic - not syncing: x", b"<0>[   12.5] Kernel panic - not syncing: x"])
def test_the_kernels_prefixes_are_known(line: bytes) -> None:
    watched = Watched()
    watched.watch.feed(b"x\n" + line + b"\n")
    assert watched.reports == [line.decode()]


@pytest.mark.parametrize("pattern", ["^debian login: $", r"login: \\?$", "^debian"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_prompt_is_found_however_the_output_is_cut(size: int, pattern: str) -> None:
    """A message of the kernel follows on the same line, and a busy runner reads both at once."""
    output, watched = b"\r\ndebian login: [   12.345678] random: crng init done\r\n", Watched(pattern)
    for at in range(0, len(output), size):
        watched.watch.feed(output[at : at + size])
    assert watched.reports == ["found"]


@pytest.mark.parametrize("size", [1, 7, 12, 1000])
def test_what_a_line_shows_is_found_however_the_output_is_cut(size: int) -> None:
    output, watched = b"[ *** ] 3 s\rdebian login: ", Watched("^debian login: $")
    for at in range(0, len(output), size):
        watched.watch.feed(output[at : at + size])
    assert watched.reports == ["found"]


def test_a_dollar_that_is_a_character_stays_one() -> None:
    assert [ConsoleSign(each).compiled().pattern for each in (r"cost: \$", r"\\$", "(a|b$)", "$")] == [
        r"cost: \$",
        r"\\",
        "(a|b$)",
        "",
    ]


def test_a_line_without_end_costs_a_bounded_memory() -> None:
    watched = Watched("z")
    for _ in range(100):
        watched.watch.feed(b"x" * LONGEST)
    watched.watch.feed(b"z")
    assert watched.reports == []
    assert len(watched.watch._line) == LONGEST
    watched.watch.feed(b"\nz")
    assert watched.reports == ["found"]


@pytest.mark.parametrize("end", [b"x", b"\r"])
def test_a_line_that_is_full_is_searched_once(end: bytes) -> None:
    """A menu that places its cursor has no line ends: to read such a line again for each key would use the time up."""
    searches = 0

    def search(*_: object) -> bool:
        nonlocal searches
        searches += 1
        return False

    watched = Watched("login:", search)
    watched.watch.feed(b"x" * (LONGEST - 1) + end)
    for _ in range(100):
        watched.watch.feed(b"\rx")
    assert searches == 1
    watched.watch.feed(b"\n")
    assert searches == 2


def test_a_search_is_bounded_by_the_time_it_uses() -> None:
    watched = Watched("(x+x+)+y")
    watched.watch.feed(b"x" * 200)
    assert watched.reports == ["too slow"]
    watched.watch.feed(b"\nxxy")
    assert watched.reports == ["too slow"], "it is not looked for again"
    assert SEARCHED_WITHIN <= 0.1


def test_all_searches_together_are_bounded_by_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest finds a line for which the pattern takes less than its bound, and sends the next ones byte by byte."""
    used, now = 0.0, 0.0
    monkeypatch.setattr("time.thread_time", lambda: used)
    monkeypatch.setattr("time.monotonic", lambda: now)

    def search(*_: object) -> bool:
        nonlocal used
        used += 0.05
        return False

    watched = Watched("login:", search)
    for _ in range(30):
        now += 0.5  # each search takes a tenth of the time
        watched.watch.feed(b"w")
    assert watched.reports == []
    for _ in range(30):
        now += 0.05  # and here all of it
        watched.watch.feed(b"w")
    assert watched.reports == ["too slow"]
    assert used < 0.05 * 30 + SEARCHED_AT_MOST + 0.2 + 0.05
