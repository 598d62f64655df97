"""Output that is not read must not block the program."""

from __future__ import annotations

import os
import pty
import socket
from pathlib import Path

import trio

from runner.kernel.nonblocking_writer import BACKLOG, NonBlockingWriter


async def test_an_unread_pipe_fills_up_and_the_rest_is_counted() -> None:
    reading, writing = os.pipe()
    with NonBlockingWriter(writing) as writer:
        for _ in range(100):
            writer.write(b"x" * 65536)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.drain)
            read = bytearray()
            os.set_blocking(reading, False)
            with trio.fail_after(60):
                while len(read) < 65536 + BACKLOG:
                    await trio.lowlevel.wait_readable(reading)
                    read += os.read(reading, 1 << 20)
                writer.write(b"again\n")
                while not read.endswith(b"again\n"):
                    await trio.lowlevel.wait_readable(reading)
                    read += os.read(reading, 1 << 20)
            nursery.cancel_scope.cancel()
    assert len(read) < 2 * BACKLOG
    dropped = 100 * 65536 - read.count(b"x")
    assert f"[{dropped} bytes of output were dropped: the reader was too slow]".encode() in read
    assert os.get_blocking(writing), "the shared file description is unchanged"
    os.close(reading)
    os.close(writing)


async def test_what_was_dropped_is_counted_as_soon_as_there_is_room_without_another_line() -> None:
    reading, writing = os.pipe()
    with NonBlockingWriter(writing) as writer:
        for _ in range(20):
            writer.write(b"x" * 65536)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.drain)
            read = bytearray()
            os.set_blocking(reading, False)
            with trio.fail_after(60):
                while not read.endswith(b"the reader was too slow]\n"):
                    await trio.lowlevel.wait_readable(reading)
                    read += os.read(reading, 1 << 20)
            nursery.cancel_scope.cancel()
    assert f"[{20 * 65536 - read.count(b'x')} bytes of output were dropped".encode() in read
    os.close(reading)
    os.close(writing)


def test_closed_and_broken_outputs_are_ignored() -> None:
    reading, writing = os.pipe()
    with NonBlockingWriter(writing) as writer:
        os.close(reading)
        writer.write(b"x")
        writer.write(b"y")
    os.close(writing)
    with NonBlockingWriter(writing) as writer:  # closed
        writer.write(b"x")
    with NonBlockingWriter(os.open("/dev/full", os.O_WRONLY)) as writer:
        writer.write(b"x")


def test_a_pipe_of_another_user_is_written_without_waiting() -> None:
    """The pipe cannot be reopened; output is written as long as it has room, and a full one does not block."""
    reading, writing = os.pipe()
    os.fchmod(writing, 0o600)
    os.seteuid(65534)
    try:
        writer = NonBlockingWriter(writing)
    finally:
        os.seteuid(0)
    with writer:
        writer.write(b"hello\n")
        assert os.read(reading, 10) == b"hello\n"
        for _ in range(100):
            writer.write(b"x" * 65536)
    assert len(os.read(reading, 1 << 20)) >= 4096
    os.close(reading)
    os.close(writing)


def test_a_file_is_written_where_its_other_writers_are(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"before ")
    with NonBlockingWriter(fd) as writer:
        writer.write(b"ours ")
    os.write(fd, b"after")
    os.close(fd)
    assert (tmp_path / "log").read_text() == "before ours after"


def test_a_terminal_and_a_socket(tmp_path: Path) -> None:
    del tmp_path
    controller, terminal = pty.openpty()
    with NonBlockingWriter(terminal) as writer:
        writer.write(b"hello\n")
    assert os.read(controller, 100) == b"hello\r\n"
    assert os.get_blocking(terminal)
    os.close(controller)
    os.close(terminal)
    left, right = socket.socketpair()
    with left, right, NonBlockingWriter(right.fileno()) as writer:
        writer.write(b"hello")
        assert left.recv(10) == b"hello"
