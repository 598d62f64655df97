"""Descriptors from outside: inherited or sent by an agent, identified by the kernel, and none of them left open."""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import attrs
import pytest
import trio

from runner.base.errors import RefusedError, explain
from runner.instance.gate import StopRequest
from runner.instance.held import Held
from runner.instance.init import _with_inherited_fds
from runner.instance.parts.qemu import GuestEnd
from runner.instance.renewal.names import NAMES
from runner.instance.renewal.state_codec import from_document, to_document
from runner.instance.supervisor import Counters, Faults, Renewal, open_supervisor
from runner.kernel import character_devices
from runner.kernel.files import Descriptor
from runner.kernel.inherited_fds import InheritedFd, inherited_fds, probe_descriptor
from runner.plan.network_plan import InheritedFdPlan
from tests.support.fake_host import FakeHost

Sent = tuple[bytes, Sequence[int]]


def open_now() -> set[str]:
    return {f"{entry.name} {entry.readlink()}" for entry in Path("/proc/self/fd").iterdir() if entry.exists()}


@contextlib.contextmanager
def agent(path: Path, *messages: Sent, close: bool = True) -> Iterator[PurePosixPath]:
    """Serve one connection: send *messages*, each with its descriptors, and then close the connection unless *close* is false."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        over = threading.Event()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for text, numbers in messages:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))] if numbers else []
                    connection.sendmsg([text], rights)
                if not close:
                    over.wait()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield PurePosixPath(path)
        finally:
            over.set()
            thread.join()
    path.unlink()


def line(name: str, kind: str) -> bytes:
    return json.dumps({"name": name, "kind": kind}).encode() + b"\n"


async def test_descriptors_of_an_agent_are_identified_by_the_kernel(tmp_path: Path) -> None:
    """Several lines in one message, and one line in two: a stream has no boundaries but those of descriptors."""
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(4096))
    ours, theirs = socket.socketpair()
    before = open_now()
    with character_devices.tap("vmtap9") as [tap], disk.open("r+b") as file, disk.open("rb") as reading, ours, theirs:
        messages = [
            (line("disk0", "file") + line("net0", "tap"), [file.fileno(), tap.number]),
            (b'{"name": "read", ', [reading.fileno()]),
            (b'"kind": "file"}\n', []),
            (line("user", "socket"), [theirs.fileno()]),
        ]
        with agent(tmp_path / "agent", *messages) as path:
            async with inherited_fds({}, path) as received:
                found = {name: probe_descriptor(each.descriptor.number) for name, each in received.items()}
                inherited = [os.get_inheritable(each.descriptor.number) for each in received.values()]
        assert {name: (each.kind, each.size, each.writable) for name, each in found.items()} == {
            "disk0": ("file", 4096, True),
            "net0": ("tap", 0, True),
            "read": ("file", 4096, False),
            "user": ("socket", 0, True),
        }
        assert found["net0"].interface == "vmtap9"
        assert inherited == [False] * 4
    ours.close()
    assert open_now() <= before


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([(line("a", "file"), [])], "cannot take over 'a' of {}: no descriptor came with it"),
        ([(line("a", "file"), [0]), (line("a", "file"), [0])], "cannot take over two descriptors called 'a'"),
        ([(line("a b", "file"), [0, 0])], "cannot take over a descriptor called 'a b'"),
        ([(b"hello\n", [0])], "cannot understand the agent {}: it sent 'hello'; it takes"),
        ([(b"\xff[" * 1000 + b"\n", [0])], "cannot understand the agent {}"),
        ([(line("a", "gpu"), [0])], "cannot understand the agent {}"),
        ([(b'{"name": "a", "kind": []}\n', [0])], "cannot understand the agent {}"),
        ([(b'{"name": {}, "kind": "block"}\n', [0])], "cannot understand the agent {}"),
        ([(b'{"name": "a"', [0])], "cannot take over the descriptors of {}: the agent closed after half a line"),
        ([(line("a", "file"), [0, 0])], "{}: the agent closed after a descriptor without a line"),
        ([(line(f"a{n}", "file"), [0]) for n in range(65)], "{}: more than 64 of them or 64 KiB of text"),
        ([(b" " * 65537, [0])], "{}: more than 64 of them or 64 KiB of text"),
    ],
)
async def test_a_protocol_error_of_an_agent_is_reported_and_closes_its_descriptors(
    tmp_path: Path, messages: Sequence[Sent], expected: str
) -> None:
    before = open_now()
    with agent(tmp_path / "agent", *messages) as path, pytest.raises(RefusedError) as caught:
        async with inherited_fds({}, path):
            pass
    assert expected.format(repr(str(path))) in str(caught.value)
    assert open_now() <= before


async def test_an_agent_that_does_not_close_times_out(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    del autojump_clock
    before = open_now()
    with (
        agent(tmp_path / "agent", (line("a", "file"), [0]), close=False) as path,
        pytest.raises(RefusedError, match="the agent has not closed within 10 s"),
    ):
        async with inherited_fds({}, path):
            pass
    assert open_now() <= before


async def test_an_agent_of_another_user_is_not_trusted(tmp_path: Path) -> None:
    # It binds as root: another user would need the directories above, whose rights each start of pytest takes away.
    serve = (
        "import os, socket, sys\nwith socket.socket(socket.AF_UNIX) as s:\n s.bind(sys.argv[1]); os.setuid(65534); s.listen()\n"
        " print(flush=True); c, _ = s.accept(); c.recv(1)"
    )
    path = tmp_path / "agent"
    argv = ("/usr/bin/python3", "-IS", "-c", serve, str(path))
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:  # noqa: ASYNC220 - the test controls it
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(RefusedError, match="it runs as user 65534, neither root nor ours"):
            async with inherited_fds({}, PurePosixPath(path)):
                pass
    with pytest.raises(RefusedError) as caught:
        async with inherited_fds({}, PurePosixPath(path)):
            pass
    assert explain(caught.value).endswith("that hands over descriptors: Connection refused")


INHERIT = """
import os, sys, trio
from runner.base.errors import RefusedError
from runner.kernel.inherited_fds import inherited_fds, probe_descriptor

async def main():
    try:
        async with inherited_fds(os.environ, None) as inherited:
            print({name: probe_descriptor(each.descriptor.number).kind for name, each in inherited.items()})
    except RefusedError as error:
        print(error)
    print([number for number in (3, 4, 5) if os.path.exists(f"/proc/self/fd/{number}")])
    print(os.path.exists("/proc/self/fd/6"))

trio.run(main)
"""


@pytest.mark.parametrize(
    ("environment", "expected", "left"),
    [
        ("LISTEN_FDS=3 LISTEN_FDNAMES=a:b:c LISTEN_PID=$$", "{'a': 'file', 'b': 'other', 'c': 'socket'}", "[]"),
        ("LISTEN_FDS=3 LISTEN_FDNAMES=a:b:c LISTEN_PID=1", "{}", "[3, 4, 5]"),
        ("LISTEN_FDS=3 LISTEN_FDNAMES=a:a:c LISTEN_PID=$$", "cannot take over two descriptors called 'a'", "[]"),
        (
            "LISTEN_FDS=3 LISTEN_PID=$$",
            "cannot use LISTEN_FDNAMES '': it names 1 descriptors, and LISTEN_FDS says 3",
            "[]",
        ),
        ("LISTEN_FDS=9 LISTEN_FDNAMES=a LISTEN_PID=$$", "cannot use LISTEN_FDS '9': descriptor 7 is not open", "[]"),
        ("LISTEN_FDS=$(printf 9%04500d) LISTEN_PID=$$", "cannot use LISTEN_FDS '9000", "[3, 4, 5]"),
        ("LISTEN_FDS=99 LISTEN_PID=$$", "cannot use LISTEN_FDS '99': it takes a number up to 64", "[3, 4, 5]"),
        ("LISTEN_FDS= LISTEN_PID=$$", "{}", "[3, 4, 5]"),
    ],
)
def test_descriptors_are_inherited_as_from_systemd(tmp_path: Path, environment: str, expected: str, left: str) -> None:
    ours, theirs = socket.socketpair()
    (tmp_path / "disk").write_bytes(bytes(512))
    script = f'exec 3<>{tmp_path}/disk 4</dev/null 5<&{theirs.fileno()} 6<&{theirs.fileno()} {theirs.fileno()}<&-; {environment} exec "$@"'
    with ours, theirs:
        argv = ("bash", "-c", script, "bash", sys.executable, "-c", INHERIT)
        done = subprocess.run(argv, pass_fds=[theirs.fileno()], check=True, capture_output=True, text=True)
    first, *_, listed, sixth = done.stdout.splitlines()
    assert first.startswith(expected), done
    assert listed == left
    assert sixth == str("FDS=9 " not in environment)


async def test_qemu_inherits_the_descriptors_and_no_other_child_does(fake_host: FakeHost) -> None:
    """QEMU gets a copy, then ours is closed, and at the end none is open."""
    plan = fake_host.plan("[[network]]\n" + fake_host.share(), qemu={"at_cont": "shutdown"})
    before = fake_host.snapshot()
    with contextlib.ExitStack() as held:
        [tap] = held.enter_context(character_devices.tap("vmtap9"))
        inherited = {"net0": InheritedFd(Descriptor(os.dup(tap.number)), None)}
        network = InheritedFdPlan("52:54:00:00:00:01", 1500, 1, "tap", ("net0",), (), vhost=False)
        plan = attrs.evolve(plan, dhcp=(), machine=attrs.evolve(plan.machine, networks=(network,)))
        result = await fake_host.run(plan, inherited_fds=inherited)
        assert isinstance(result, GuestEnd), explain(result)
        assert inherited["net0"].descriptor.number == -1
    [qemu] = fake_host.records("qemu", "start")
    named = next(word for word in qemu["argv"] if word.startswith("tap,"))
    assert int(named.rpartition("fd=")[2]) in qemu["fds"]
    for daemon in ("virtiofsd", "sleep"):
        assert fake_host.records(daemon, "start")
        for started in fake_host.records(daemon, "start"):
            assert "/dev/net/tun" not in started["open"].values(), daemon
    assert fake_host.snapshot() == before


def test_a_descriptor_is_described_as_the_kernel_reports_it(tmp_path: Path) -> None:
    descriptions = {}
    with contextlib.ExitStack() as held:
        listening = held.enter_context(socket.socket(socket.AF_UNIX))
        packets = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        for name, path in (("null", "/dev/null"), ("unused", "/dev/net/tun"), ("directory", str(tmp_path))):
            number = os.open(path, os.O_RDONLY)
            held.callback(os.close, number)
            descriptions[name] = probe_descriptor(number).description
        ends = os.pipe()
        for end in ends:
            held.callback(os.close, end)
        descriptions |= {
            "listening": probe_descriptor(listening.fileno()).description,
            "packets": probe_descriptor(packets.fileno()).description,
        }
        descriptions["pipe"] = probe_descriptor(ends[0]).description
        assert probe_descriptor(packets.fileno()).kind == probe_descriptor(listening.fileno()).kind == "other"
    assert descriptions == {
        "null": "the character device 1:3",
        "unused": "a /dev/net/tun that is no interface's yet (TUNSETIFF)",
        "directory": "a directory",
        "listening": "a socket that is not connected",
        "packets": "a socket of datagrams or packets",
        "pipe": "a pipe",
    }


async def test_another_program_finds_what_the_one_before_had_inherited() -> None:
    """One is open, and closed at the end; the other one is QEMU's alone by now."""
    number = os.memfd_create("inherited")
    inherited = {"disk0": InheritedFd(Descriptor(number), "file"), "tap0": InheritedFd(Descriptor(-1), None)}
    descriptors: list[int] = []
    document = to_document(inherited, NAMES["inherited descriptors"].type, descriptors)
    assert descriptors == [number]
    found = from_document(
        json.loads(json.dumps(document)), NAMES["inherited descriptors"].type, "inherited descriptors"
    )
    renewal = Renewal(Held({"inherited descriptors": found, "orphans": 0, "counters": Counters()}))
    async with (
        open_supervisor(StopRequest(), Faults(), renewal=renewal) as bare,
        _with_inherited_fds(bare, None) as supervisor,
    ):
        assert supervisor.inherited_fds["disk0"].descriptor.number == number
        assert supervisor.inherited_fds["disk0"].declared == "file"
        assert supervisor.inherited_fds["tap0"].descriptor.number == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
