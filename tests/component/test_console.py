"""The shared serial console: replay, several readers, one writer, slow clients, and the user's terminal."""

from __future__ import annotations

import json
import os
import pty
import resource
import socket
import stat
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path, PurePosixPath

import pytest
import trio

from runner.base.errors import RunnerError, Status, UsageError, explain
from runner.cli.console import parse_key
from runner.cli.console_client import AttachRequest
from runner.instance.parts.console import MOST_CONNECTIONS, REQUEST_WITHIN
from runner.instance.parts.qemu import GuestEnd
from runner.instance.supervisor import Supervisor
from runner.kernel.child_processes import Command
from runner.kernel.log_file import kept_log
from tests.support.fake_host import FakeHost

PROJECT = str(Path(__file__).parents[2])
WRITE, READ, STEAL = (
    AttachRequest(write=True, steal=False),
    AttachRequest(write=False, steal=False),
    AttachRequest(write=True, steal=True),
)


class Client:
    """An attached client that keeps everything it received."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.seen = b""

    async def until(self, text: bytes) -> None:
        with trio.fail_after(60):
            while text not in self.seen:
                data = await self.stream.receive_some(1 << 16)
                assert data, f"disconnected without {text!r}: {self.seen[-200:]!r}"
                self.seen += data


@asynccontextmanager
async def attached(fake_host: FakeHost, request: AttachRequest) -> AsyncIterator[Client]:
    path = fake_host.root / "state" / "console.sock"
    async with await trio.open_unix_socket(path) as stream:
        await stream.send_all(json.dumps({"write": request.write, "steal": request.steal}).encode() + b"\n")
        client = Client(stream)
        await client.until(b"\n")
        yield client


async def running(fake_host: FakeHost, act: Callable[[], Awaitable[None]], **qemu: object) -> None:
    """Run an instance and, while its guest runs, *act*; at the end check that nothing is left."""
    plan = fake_host.plan(qemu=qemu)
    before = fake_host.snapshot()

    result = await fake_host.run(plan, meanwhile=lambda _: fake_host.act_while_it_runs(act))
    assert isinstance(result, GuestEnd), explain(result)
    assert result.status is Status.STOPPED
    assert fake_host.faults.sentences == []
    assert fake_host.snapshot() == before


async def test_one_client_writes_all_read_and_late_ones_get_the_history(fake_host: FakeHost) -> None:
    async def act() -> None:
        mode = (fake_host.root / "state" / "console.sock").stat().st_mode
        assert stat.S_IMODE(mode) == 0o600
        async with (
            attached(fake_host, WRITE) as first,
            attached(fake_host, WRITE) as second,
            attached(fake_host, READ) as third,
        ):
            assert [b'"writes": true' in each.seen for each in (first, second, third)] == [True, False, False]
            await first.stream.send_all(b"one")
            for each in (first, second, third):
                await each.until(b"guest: runs")
                await each.until(b"you typed one")
            await second.stream.send_all(b"not me")
            async with attached(fake_host, STEAL) as stealer:
                assert b'"writes": true' in stealer.seen
                await stealer.until(b"you typed one")
                await first.until(b"another console writes now")
                await first.stream.send_all(b"nor me")
                await stealer.stream.send_all(b"two")
                await first.until(b"you typed two")
        async with attached(fake_host, WRITE) as again:  # the writer has disconnected: its place is free
            assert b'"writes": true' in again.seen
        assert [record["text"] for record in fake_host.records("qemu", "typed")] == ["one", "two"]

    await running(fake_host, act, console="echo")


async def type_until_full(client: Client) -> None:
    """Type until every buffer between the client and the guest is full."""
    stuck = False
    while not stuck:
        with trio.move_on_after(0.5) as timeout:
            await client.stream.socket.send(b"x" * (1 << 16))
        stuck = timeout.cancelled_caught


async def test_a_writer_to_a_guest_that_does_not_read_can_be_replaced_and_can_hang_up(fake_host: FakeHost) -> None:
    async def act() -> None:
        async with attached(fake_host, WRITE) as first:
            await type_until_full(first)
            async with attached(fake_host, STEAL) as stealer:
                assert b'"writes": true' in stealer.seen
                await type_until_full(stealer)
                await first.until(b"another console writes now")
            with trio.fail_after(60):
                while True:  # the stealer has disconnected with unsent input: its place is free
                    async with attached(fake_host, WRITE) as next_one:
                        if b'"writes": true' in next_one.seen:
                            return

    await running(fake_host, act)


async def test_a_slow_reader_delays_no_other_and_learns_what_it_missed(fake_host: FakeHost) -> None:
    much, rounds = 128 << 10, 12

    async def act() -> None:
        async with attached(fake_host, WRITE) as quick, attached(fake_host, READ) as slow:
            for _ in range(rounds):
                quick.seen = b""
                await quick.stream.send_all(b"go")
                await quick.until(b"xEND")
                assert b"dropped" not in quick.seen
            await slow.until(b"bytes of output were dropped: the reader was too slow]")
            assert much < len(slow.seen) < rounds * much, "only what the socket and our own buffer hold"

    await running(fake_host, act, console=much)


@pytest.mark.parametrize("hello", [b"x" * 1000, b"not json\n", b"[1]\n", b"\xff\n", b""])
async def test_a_client_without_a_request_is_disconnected(fake_host: FakeHost, hello: bytes) -> None:
    async def act() -> None:
        async with await trio.open_unix_socket(fake_host.root / "state" / "console.sock") as stream:
            with trio.fail_after(60):
                await stream.send_all(hello)
                await stream.send_eof()
                with suppress(trio.BrokenResourceError):
                    assert await stream.receive_some(10) == b""

    await running(fake_host, act)


async def test_the_ninth_reader_is_refused(fake_host: FakeHost) -> None:
    async def act() -> None:
        async with AsyncExitStack() as readers:
            for _ in range(8):
                await readers.enter_async_context(attached(fake_host, READ))
            async with attached(fake_host, READ) as ninth:
                assert b"8 are attached already" in ninth.seen

    await running(fake_host, act)


async def test_connections_without_a_request_are_limited(fake_host: FakeHost) -> None:
    path = fake_host.root / "state" / "console.sock"

    async def act() -> None:
        async with AsyncExitStack() as connections:
            for _ in range(MOST_CONNECTIONS):
                await connections.enter_async_context(await trio.open_unix_socket(path))
            with trio.fail_after(REQUEST_WITHIN / 2):
                async with await trio.open_unix_socket(path) as one_too_many:
                    assert await one_too_many.receive_some(10) == b""

    await running(fake_host, act)


async def test_a_request_and_the_first_keys_may_come_together(fake_host: FakeHost) -> None:
    async def act() -> None:
        async with await trio.open_unix_socket(fake_host.root / "state" / "console.sock") as stream:
            await stream.send_all(b'{"write": true}\nkeys')
            await Client(stream).until(b"you typed keys")

    await running(fake_host, act, console="echo")


async def test_a_stale_socket_is_replaced_and_another_runners_is_not(fake_host: FakeHost) -> None:
    path = fake_host.root / "state" / "console.sock"
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))

    async def act() -> None:
        async with attached(fake_host, READ) as client:
            await client.until(b"guest: runs")

    plan = fake_host.plan(qemu={"at_cont": "shutdown"})
    assert isinstance(await fake_host.run(plan), GuestEnd)
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as other:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        other.bind(str(path))
        other.listen()
        result = await fake_host.run(plan)
        assert isinstance(result, RunnerError)
        assert "another runner listens there; give each instance a --state-dir of its own" in explain(result)
    path.unlink()
    path.write_text("something")
    result = await fake_host.run(plan)
    assert isinstance(result, RunnerError)
    assert "there is something else of that name" in explain(result)
    assert path.read_text() == "something"


async def test_a_second_runner_does_no_harm_to_the_first(fake_host: FakeHost) -> None:
    state = fake_host.root / "state"

    async def act() -> None:
        async with attached(fake_host, READ) as client:
            await client.until(b"guest: runs")  # the only line that the log gets
        before = {path.name: path.read_bytes() for path in state.iterdir() if path.is_file()}
        assert {"ready", "receipt.json", "console.log"} <= set(before)
        assert before["console.log"] == b"guest: runs\r\n"
        result = await fake_host.run(fake_host.plan())
        assert isinstance(result, RunnerError)
        assert result.status is Status.REFUSED
        assert "another runner uses it; give each instance a --state-dir of its own" in explain(result)
        assert {path.name: path.read_bytes() for path in state.iterdir() if path.is_file()} == before

    await running(fake_host, act)


def test_the_log_has_the_newest_output_and_at_most_twice_its_size(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"before\n")
    with kept_log(path, 100) as log:  # type: ignore[arg-type] # a path is a pure path
        for number in range(100):
            assert not log.write(b"line %02d\n" % number)
            assert log.error is None
    both = (tmp_path / "log.1").read_bytes() + path.read_bytes()
    assert both.endswith(b"line 98\nline 99\n")
    assert 100 <= len(both) <= 200
    assert max(path.stat().st_size, (tmp_path / "log.1").stat().st_size) <= 100
    with kept_log(path, 100) as log:  # type: ignore[arg-type]
        (tmp_path / "log.1").unlink()
        (tmp_path / "log.1").mkdir()
        assert [log.write(b"x" * 60) for _ in range(3)] == [False, True, False]
        assert log.error == "Is a directory"


def test_a_log_that_takes_only_a_part_has_failed_with_the_reason(tmp_path: Path) -> None:
    """A disk that is nearly full takes the beginning of a write; here it is a limit."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with kept_log(PurePosixPath(tmp_path / "log"), 1 << 20) as log:
        assert not log.write(b"12345")
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
        try:
            assert log.write(b"1234567890")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert log.error is not None
        assert log.error.endswith("File too large")
    assert (tmp_path / "log").read_bytes() == b"1234512345"


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


class Screen(Client):
    """The user's end of a pseudo terminal."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.seen = b""

    async def until(self, text: bytes) -> None:
        with trio.fail_after(30):
            while text not in self.seen:
                await trio.lowlevel.wait_readable(self.fd)
                self.seen += os.read(self.fd, 1 << 16)


def command_on(terminal: int, state: Path, *command: str) -> int:
    """Start the *command* on *terminal* and return the pid of a shell that prints its status.

    The shell is needed because the runner under test reaps all children of this process.
    """
    argv = [
        "sh",
        "-c",
        '"$@"; echo "status $?"',
        "sh",
        sys.executable,
        "-m",
        "runner",
        *command,
        "--state-dir",
        str(state),
    ]
    files = [(os.POSIX_SPAWN_DUP2, terminal, number) for number in range(3)]
    return os.posix_spawnp("sh", argv, {**os.environ, "PYTHONPATH": PROJECT}, file_actions=files)


@pytest.mark.parametrize("end", ["detach", "terminate", "the instance ends"])
async def test_the_terminal_is_restored_whatever_ends_it(
    fake_host: FakeHost, terminal: tuple[int, int], end: str
) -> None:
    ours, theirs = terminal
    before = termios.tcgetattr(theirs)
    screen = Screen(ours)

    async def act() -> None:
        shell = command_on(theirs, fake_host.root / "state", "console")
        await screen.until(b"attached; Ctrl-] detaches")
        await screen.until(b"guest: runs")
        assert not termios.tcgetattr(theirs)[3] & (termios.ICANON | termios.ECHO | termios.ISIG)
        os.write(ours, b"\x03")
        await screen.until(b"you typed \x03")
        if end == "detach":
            os.write(ours, b"last\x1dnever")
            await screen.until(b"[detached]")
            await screen.until(b"status 0")
            with trio.fail_after(60):
                while fake_host.records("qemu", "typed")[-1]["text"] != "last":
                    await trio.sleep(0.005)
        elif end == "terminate":
            [child] = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
            os.kill(int(child), 15)
            await screen.until(b"status 143")

    await running(fake_host, act, console="echo")
    if end == "the instance ends":
        await screen.until(b"[the instance has ended]")
        await screen.until(b"status 0")
    assert termios.tcgetattr(theirs) == before


@pytest.mark.parametrize("follow", [False, True])
async def test_kept_output_asks_a_terminal_nothing_and_leaves_its_modes(
    fake_host: FakeHost, terminal: tuple[int, int], *, follow: bool
) -> None:
    ours, theirs = terminal
    screen = Screen(ours)
    asked = "\x1b[6n\x9bc\x1b]11;?\x1b\\\x1b[?1049h\x1b[31mred"

    async def act() -> None:
        async with attached(fake_host, WRITE) as client:
            await client.stream.send_all(asked.encode() + b" over")
            await client.until(asked.encode() + b" over")
        command_on(theirs, fake_host.root / "state", "logs", *["--follow"] * follow)
        await screen.until(b" over" if follow else b"status 0")

    await running(fake_host, act, console="echo")
    await screen.until(b"\x1b[?1049lstatus 0")
    assert b"you typed \x1b[?1049h\x1b[31mred over" in screen.seen, screen.seen


def test_detach_keys() -> None:
    assert [parse_key(key) for key in ("ctrl-]", "Ctrl-A", "ctrl-@")] == [b"\x1d", b"\x01", b"\0"]
    for wrong in ("]", "ctrl-", "ctrl-ab", "alt-x", "ctrl-é"):
        with pytest.raises(UsageError, match="is no key like"):
            parse_key(wrong)


def test_without_an_instance_it_is_an_error(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "runner", "console", "--state-dir", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        cwd=PROJECT,
    )
    assert result.returncode == 4
    assert f"cannot connect to '{tmp_path}/console.sock': No such file or directory; start an instance" in result.stderr


STRANGER = """
import socket, sys
with socket.socket(socket.AF_UNIX) as client:
    client.connect(sys.argv[1])
    client.sendall(b'{"write": true, "steal": true}\\n')
    sys.stdout.write(client.recv(4096).decode())
"""


async def test_a_client_of_another_pid_namespace_is_refused(fake_host: FakeHost) -> None:
    """As control.sock refuses it: a directory may be shared with another container of the pod."""
    path = str(fake_host.root / "state" / "console.sock")
    new = ("unshare", "--pid", "--fork", "--kill-child")
    command = Command("stranger", (*new, sys.executable, "-S", "-c", STRANGER, path))
    lines: list[str] = []

    async def beside(host: Supervisor) -> None:
        try:
            with trio.fail_after(30):
                while not fake_host.guest_runs():
                    await trio.sleep(0.005)
                stranger = host.processes.spawn(command)
                await stranger.wait()
                lines.extend(stranger.last_lines)
        finally:
            fake_host.stop.ask("test")

    await fake_host.run(fake_host.plan(), meanwhile=beside)
    (line,) = lines
    assert "only root in the instance's own PID namespace may attach" in json.loads(line)["error"]
