"""Output that nobody reads must not stop us."""

from __future__ import annotations

import os
import pty
import socket
from pathlib import Path

import trio

from runner.kernel.nonblocking_writer import BACKLOG, NonBlockingWriter


async def test_a_pipe_nobody_reads_takes_what_it_takes_and_the_rest_is_counted() -> None:
    reading, writing = os.pipe()
    with NonBlockingWriter(writing) as outlet:
        for _ in range(100):
            outlet.write(b"x" * 65536)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outlet.drain)
            read = bytearray()
            os.set_blocking(reading, False)
            with trio.fail_after(10):
                while len(read) < 65536 + BACKLOG:
                    await trio.lowlevel.wait_readable(reading)
                    read += os.read(reading, 1 << 20)
                outlet.write(b"again\n")
                while not read.endswith(b"again\n"):
                    await trio.lowlevel.wait_readable(reading)
                    read += os.read(reading, 1 << 20)
            nursery.cancel_scope.cancel()
    assert len(read) < 2 * BACKLOG
    dropped = 100 * 65536 - read.count(b"x")
    assert f"[{dropped} bytes of output were dropped: the reader was too slow]".encode() in read
    assert os.get_blocking(writing), "the description we share with others is left as it was"
    os.close(reading)
    os.close(writing)


def test_closed_and_broken_outputs_are_nobodys_problem() -> None:
    reading, writing = os.pipe()
    with NonBlockingWriter(writing) as outlet:
        os.close(reading)
        outlet.write(b"x")
        outlet.write(b"y")
    os.close(writing)
    with NonBlockingWriter(writing) as outlet:  # closed
        outlet.write(b"x")
    with NonBlockingWriter(os.open("/dev/full", os.O_WRONLY)) as outlet:
        outlet.write(b"x")


def test_a_pipe_of_another_user_is_written_without_waiting() -> None:
    """It cannot be reopened; what it takes is written, and a full one keeps nobody waiting."""
    reading, writing = os.pipe()
    os.fchmod(writing, 0o600)
    os.seteuid(65534)
    try:
        outlet = NonBlockingWriter(writing)
    finally:
        os.seteuid(0)
    with outlet:
        outlet.write(b"hello\n")
        assert os.read(reading, 10) == b"hello\n"
        for _ in range(100):
            outlet.write(b"x" * 65536)
    assert len(os.read(reading, 1 << 20)) >= 4096
    os.close(reading)
    os.close(writing)


def test_a_file_is_written_where_its_other_writers_are(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"before ")
    with NonBlockingWriter(fd) as outlet:
        outlet.write(b"ours ")
    os.write(fd, b"after")
    os.close(fd)
    assert (tmp_path / "log").read_text() == "before ours after"


def test_a_terminal_and_a_socket(tmp_path: Path) -> None:
    del tmp_path
    controller, terminal = pty.openpty()
    with NonBlockingWriter(terminal) as outlet:
        outlet.write(b"hello\n")
    assert os.read(controller, 100) == b"hello\r\n"
    assert os.get_blocking(terminal)
    os.close(controller)
    os.close(terminal)
    left, right = socket.socketpair()
    with left, right, NonBlockingWriter(right.fileno()) as outlet:
        outlet.write(b"hello")
        assert left.recv(10) == b"hello"
