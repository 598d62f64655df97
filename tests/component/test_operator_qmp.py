"""The QMP monitor for operators, with qemu.qmp's own client as the independent peer, and `ctl qmp`."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from pathlib import Path, PurePosixPath

import pytest
import trio
from qemu.qmp import ExecuteError, QMPClient

from runner.base.errors import UsageError
from runner.cli.ctl_qmp import parse_words
from runner.instance.control.qmp_rules import refusal
from runner.instance.parts.qemu import GuestEnd
from runner.instance.supervisor import Supervisor
from runner.kernel.child_processes import Command
from runner.kernel.sockets import reachable
from runner.protocol.qmp_server import BadRequestError, ObjectFramer
from tests.support.fake_host import FakeHost

Ask = Callable[..., Awaitable[tuple[int, str]]]

CLIENT = """
import asyncio, json, sys
from qemu.qmp import EventListener, ExecuteError, QMPClient

async def main():
    client = QMPClient("test")
    events = EventListener()
    client.register_listener(events)
    await client.connect(sys.argv[1])
    print(json.dumps(client.greeting._asdict()))
    for command in sys.argv[2:]:
        try:
            print(json.dumps(await client.execute(command)))
        except ExecuteError as error:
            print(error.error_class, error)
    if "announce-self" in sys.argv:
        print((await events.get())["event"])
    await client.disconnect()

asyncio.run(main())
"""


async def asked(fake_host: FakeHost, folder: Path, act: Callable[[Ask], Awaitable[None]]) -> None:
    """Run an instance and *act* while its guest runs; check that it ended well and nothing is left of it."""
    plan = fake_host.plan()

    async def meanwhile(host: Supervisor) -> None:
        async def ask(*argv: str, typed: str = "") -> tuple[int, str]:
            """Run a program in the instance's PID namespace; return its status and everything it printed."""
            (folder / "typed").write_text(typed)
            words = ("sh", "-c", 'exec "$@" <"$0/typed" >"$0/printed" 2>&1', str(folder), *argv)
            with trio.fail_after(60):
                status = await host.processes.spawn(Command("test", words)).wait()
            return status, (folder / "printed").read_text()

        try:
            with trio.fail_after(60):
                while not fake_host.guest_runs():
                    await trio.sleep(0.005)
            await act(ask)
        finally:
            fake_host.stop.ask("test")

    before = fake_host.snapshot()
    ended = await fake_host.run(plan, meanwhile=meanwhile)
    assert isinstance(ended, GuestEnd)
    assert fake_host.faults.sentences == []
    assert fake_host.snapshot() == before


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("asked")


def ctl(fake_host: FakeHost, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "runner", "ctl", "--state-dir", str(fake_host.root / "state"), "qmp", *words)


async def test_qemus_own_client_talks_to_the_instance(fake_host: FakeHost, folder: Path) -> None:
    printed: list[str] = []

    async def act(ask: Ask) -> None:
        commands = ("query-commands", "query-balloon", "quit", "announce-self")
        status, text = await ask(sys.executable, "-c", CLIENT, str(fake_host.root / "state" / "qmp.sock"), *commands)
        assert status == 0, text
        printed.extend(text.splitlines())

    await asked(fake_host, folder, act)
    assert json.loads(printed[0]) == {
        "QMP": {"version": {"qemu": {"major": 7, "minor": 2, "micro": 0}, "package": "fake"}, "capabilities": []}
    }
    assert json.loads(printed[1]) == [{"name": "query-status"}, {"name": "query-commands"}]
    assert printed[2] == "DeviceNotActive No balloon device has been activated"
    assert printed[3].startswith("GenericError cannot execute 'quit' here: PID 1 decides when and how the guest ends; ")
    assert printed[4:] == ["{}", "ANNOUNCED"]
    assert fake_host.commands().count("quit") == 1, "only that of PID 1, at the end"
    assert "qmp refused command='quit' pid=" in fake_host.logged()
    assert "qmp executes command='query-balloon' pid=" in fake_host.logged()


async def test_one_command(fake_host: FakeHost, folder: Path) -> None:
    async def act(ask: Ask) -> None:
        assert await ask(*ctl(fake_host, "query-commands")) == (
            0,
            json.dumps([{"name": "query-status"}, {"name": "query-commands"}], indent=1) + "\n",
        )
        assert await ask(*ctl(fake_host, "query-balloon")) == (
            4,
            "instance-runner: cannot execute 'query-balloon': No balloon device has been activated\n",
        )
        status, text = await ask(*ctl(fake_host, "device_add", '{"driver": "max-x86_64-cpu"}'))
        assert status == 4
        assert text.startswith("instance-runner: cannot execute 'device_add' here: the thread of a new vCPU")
        assert "cannot tell what to execute" in (await ask(*ctl(fake_host)))[1]

    await asked(fake_host, folder, act)
    assert "device_add" not in fake_host.commands()


async def test_a_prompt(fake_host: FakeHost, folder: Path) -> None:
    """Errors do not end it, and events are shown after the next command."""
    typed = "query-balloon\nhelp\n'\nquery-status x\nannounce-self\nquery-status\nexit\nquery-block\n"
    answers: list[str] = []

    async def act(ask: Ask) -> None:
        status, text = await ask(*ctl(fake_host, "--shell"), typed=typed)
        assert status == 0, text
        answers.append(text)
        assert await ask(*ctl(fake_host, "--shell"), typed="") == (0, "")

    await asked(fake_host, folder, act)
    [text] = answers
    places = [
        text.index(part)
        for part in (
            "cannot execute 'query-balloon': No balloon",
            "COMMAND KEY=VALUE",
            "cannot understand the line: No closing quotation",
            "cannot understand 'x': arguments are",
            '"event": "ANNOUNCED"',
        )
    ]
    assert places == sorted(places)
    assert "query-block" not in fake_host.commands()


async def test_the_prompt_completes_the_commands_that_can_be_executed(fake_host: FakeHost, folder: Path) -> None:
    """In a terminal, as a person uses it: Tab completes, and the line is kept in the history."""
    program = (
        "import os, pty, sys\n"
        "pid, terminal = pty.fork()\n"
        "if pid == 0:\n    os.environ['TERM'] = 'dumb'\n    os.execv(sys.argv[1], sys.argv[1:])\n"
        "text = b''\n"
        "def until(word):\n"
        "    global text\n"
        "    while word not in text:\n"
        "        data = os.read(terminal, 4096)\n"
        "        sys.stdout.buffer.write(data)\n"
        "        text += data\n"
        "    text = text.partition(word)[2]\n"
        "until(b'(qmp) ')\n"
        "os.write(terminal, b'query-c\\t\\n')\n"
        "until(b'query-status')\nuntil(b'(qmp) ')\n"
        "os.write(terminal, b'\\x10\\n')\n"  # Ctrl-P: the line before
        "until(b'query-status')\nuntil(b'(qmp) ')\n"
        "os.write(terminal, b'\\x04')\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )

    async def act(ask: Ask) -> None:
        status, text = await ask(sys.executable, "-c", program, *ctl(fake_host, "--shell"))
        assert status == 0, text
        assert "(qmp) query-commands" in text

    await asked(fake_host, folder, act)
    assert fake_host.commands().count("query-commands") == 3, "for the completion, and twice from the line"


async def test_another_user_is_turned_away(fake_host: FakeHost, folder: Path) -> None:
    program = (
        "import os, socket, sys\n"
        "os.open(sys.argv[1], os.O_PATH)\n"  # as root, so that no directory above need be opened to others
        "os.setresuid(65534, 65534, 65534)\n"
        "connection = socket.socket(socket.AF_UNIX)\n"
        "connection.connect('/proc/self/fd/3/qmp.sock')\n"
        "print(connection.recv(4096).decode())\n"
    )

    async def act(ask: Ask) -> None:
        state = fake_host.root / "state"
        state.chmod(0o711)
        (state / "qmp.sock").chmod(0o666)
        status, text = await ask(sys.executable, "-IS", "-c", program, str(state))
        assert "of user 65534: only root in the instance's own PID namespace may ask" in text, (status, text)

    await asked(fake_host, folder, act)
    assert "qmp executes" not in fake_host.logged()


async def test_five_clients_are_too_many(fake_host: FakeHost, folder: Path) -> None:
    async def act(_ask: Ask) -> None:
        with ExitStack() as held, trio.fail_after(30):
            greetings = []
            for _ in range(5):
                connection = held.enter_context(trio.socket.socket(socket.AF_UNIX))
                with reachable(PurePosixPath(fake_host.root / "state" / "qmp.sock")) as address:
                    await connection.connect(address)
                greetings.append(json.loads(await connection.recv(4096)))
        assert [list(each) for each in greetings] == [["QMP"]] * 4 + [["error"]]
        assert greetings[4]["error"]["desc"] == "cannot take more: 4 clients are connected; wait for one to go"

    await asked(fake_host, folder, act)


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (b'{"execute": "query-status", "id": [1]}', "Expecting capabilities negotiation with 'qmp_capabilities'"),
        (b'{"id": 1}', "QMP input lacks member 'execute'"),
        (b'{"exec-oob": "query-status"}', "QMP input lacks member 'execute'"),
        (b'{"execute": "qmp_capabilities", "arguments": []}', "QMP input member 'arguments' must be an object"),
        (b"quit\n", "JSON parse error, no object: b'quit\\n'"),
        (b'{"execute": \xff}', "JSON parse error in"),
        (b'{"execute": "' + b"x" * 70_000, "a message may have 65536 bytes"),
        (b'{"id": ' + b"[" * 100 + b"]" * 100 + b"}", "a message may be nested 100 deep"),
        (b'{"execute": "query-status", "arguments": {"a": NaN}}', "a number or a character that JSON does not have"),
        (b'{"execute": "query-status", "arguments": {"a": -1e999}}', "a number or a character that JSON does not have"),
        (
            b'{"execute": "query-status", "arguments": {"a": "\\ud800"}}',
            "a number or a character that JSON does not have",
        ),
    ],
)
async def test_requests_that_are_no_commands(fake_host: FakeHost, folder: Path, sent: bytes, received: str) -> None:
    async def act(_ask: Ask) -> None:
        with trio.socket.socket(socket.AF_UNIX) as connection, trio.fail_after(30):
            with reachable(PurePosixPath(fake_host.root / "state" / "qmp.sock")) as address:
                await connection.connect(address)
            assert b'"QMP"' in await connection.recv(4096)
            rest = sent
            while rest:
                rest = rest[await connection.send(rest) :]
            assert received in json.loads(await connection.recv(4096))["error"]["desc"]

    await asked(fake_host, folder, act)
    assert "query-status" not in fake_host.commands()


def test_objects_are_found_wherever_they_are_cut() -> None:
    stream = b' {"a": "}\\"{"}{"b": {"c": {}}}\r\n{"d": [{}, "\\\\"]}'
    wanted = [b'{"a": "}\\"{"}', b'{"b": {"c": {}}}', b'{"d": [{}, "\\\\"]}']
    for size in range(1, len(stream)):
        framer = ObjectFramer(64)
        found = []
        for start in range(0, len(stream), size):
            framer.feed(stream[start : start + size])
            while (each := framer.next_object()) is not None:
                found.append(each)
        assert found == wanted, size
    framer = ObjectFramer(10)
    framer.feed(b'{"a": "xxxxxxx')
    with pytest.raises(BadRequestError):
        framer.next_object()


def test_what_may_be_executed() -> None:
    """Every command of a QEMU is either allowed or refused with a reason; no promise can be broken by an allowed one."""
    qemu = subprocess.run(
        ("qemu-system-x86_64", "-nodefaults", "-display", "none", "-M", "none", "-S", "-qmp", "stdio"),
        input='{"execute": "qmp_capabilities"}{"execute": "query-commands"}{"execute": "quit"}',
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    replies = [json.loads(line).get("return") for line in qemu.splitlines()]
    names = next([each["name"] for each in reply] for reply in replies if isinstance(reply, list))
    allowed = {name for name in names if refusal(name) is None}
    shown = {name for name in allowed if name.startswith(("query-", "x-query-"))}
    assert allowed - shown == {
        *("announce-self", "inject-nmi", "send-key"),
        *("qom-get", "qom-list", "qom-list-types", "trace-event-get-state"),
    }
    general = {name for name in names if "not among the commands" in str(refusal(name))}
    assert general & DANGEROUS == set()
    assert DANGEROUS & allowed == set()
    assert len(DANGEROUS & set(names)) > 25


DANGEROUS = {
    *("cont", "stop", "quit", "system_reset", "system_powerdown", "set-action", "device_add", "device_del", "cpu-add"),
    *("human-monitor-command", "migrate", "migrate-incoming", "xen-save-devices-state", "dump-guest-memory", "add-fd"),
    *("getfd", "chardev-add", "object-add", "netdev_add", "blockdev-add", "block_resize", "qom-set", "memsave"),
    *("pmemsave", "screendump", "nbd-server-start", "snapshot-save", "balloon", "set_password", "transaction"),
    *("qom-list-get", "qom-list-properties", "device-list-properties"),
    *("blockdev-backup", "x-colo-lost-heartbeat", "add_client", "closefd", "remove-fd", "watchdog-set-action"),
}


@pytest.mark.parametrize(
    ("words", "parsed"),
    [
        (["query-status"], ("query-status", None)),
        (["a", "x=1", "y=text", 'z={"k": null}', "w=a=b"], ("a", {"x": 1, "y": "text", "z": {"k": None}, "w": "a=b"})),
        (["a", '{"x":', "[1]}"], ("a", {"x": [1]})),
    ],
)
def test_words(words: list[str], parsed: tuple[str, object]) -> None:
    assert parse_words(words) == parsed


@pytest.mark.parametrize("words", [["a", "b"], ["a", "=1"], ["a", "x=1", "x=2"], ["a", "{"], ["a", "{}", "{}"]])
def test_words_that_are_no_arguments(words: list[str]) -> None:
    with pytest.raises(UsageError, match="cannot understand"):
        parse_words(words)


def test_the_fake_qemu_is_one_to_qemus_own_client(fake_host: FakeHost) -> None:
    ours, qmp = socket.socketpair()
    console, other = socket.socketpair()
    with ours, qmp, console, other:
        options = ("-smp", "cpus=2", "-action", "reboot=shutdown", "-chardev", f"socket,id=qmp,fd={qmp.fileno()}")
        argv = (
            str(fake_host.program("qemu", "fake_qemu.py")),
            *options,
            "-chardev",
            f"socket,id=console,fd={other.fileno()}",
        )
        process = subprocess.Popen(argv, pass_fds=(qmp.fileno(), other.fileno()))
        qmp.close()  # so that the client sees the end of a fake that fails
        other.close()

        async def talk() -> object:
            client = QMPClient("test")
            await client.connect(ours.dup())
            with pytest.raises(ExecuteError, match="No balloon device has been activated"):
                await client.execute("query-balloon")
            vcpus = await client.execute("query-cpus-fast")
            await client.execute("quit")
            assert await asyncio.to_thread(process.wait, 10) == 0  # before: it tells about its end after the answer
            with suppress(EOFError):
                await client.disconnect()
            return vcpus

        vcpus = asyncio.run(talk())
    assert isinstance(vcpus, list)
    assert sorted(each["cpu-index"] for each in vcpus) == [0, 1]
    assert all(os.getpid() != each["thread-id"] for each in vcpus)
