"""Commands that ask an instance whose PID 1 is stopped, or that answers with what no runner says."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from runner.__main__ import main
from runner.base.errors import HostError, Status
from runner.cli.console_client import AttachRequest, attached
from runner.cli.ctl import parse_keys
from runner.cli.ctl_qmp import Connection
from runner.kernel.sockets import CONSOLE_SOCKET, CONTROL_SOCKET, QMP_SOCKET

WITHIN = 0.2
"""Seconds; nothing ever comes."""


@contextmanager
def stopped(directory: Path, name: str, *, full: bool) -> Iterator[None]:
    """Hold a socket at which nothing accepts; *full*: its queue takes no connection more."""
    with ExitStack() as held:
        listener = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(directory / name))
        listener.listen(0)
        while full:
            client = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            try:
                client.connect(str(directory / name))
            except BlockingIOError:
                break
        yield


def attach(directory: Path) -> None:
    with attached(directory, AttachRequest(write=True, steal=False), WITHIN):
        pytest.fail("nothing has answered")


def execute(directory: Path) -> None:
    with Connection(directory, WITHIN):
        pytest.fail("nothing has answered")


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize(("name", "ask"), [(CONSOLE_SOCKET, attach), (QMP_SOCKET, execute)])
def test_an_instance_that_is_stopped_is_not_waited_for_without_end(
    tmp_path: Path, name: str, ask: Callable[[Path], None], *, full: bool
) -> None:
    with (
        stopped(tmp_path, name, full=full),
        pytest.raises(HostError, match="cannot get an answer of the instance within 0 s: its PID 1 is stopped"),
    ):
        ask(tmp_path)


@contextmanager
def answering(directory: Path, name: str, answer: bytes) -> Iterator[None]:
    """Hold a socket whose server answers the first request with *answer*."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(directory / name))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        yield
        server.join(10)


@pytest.mark.parametrize(
    "result",
    [
        {"disks": [], "placement": {}},
        {"disks": [5], "placement": {"cpus": 1}, "name": "\x1b[31m", "pod": 5},
        {"disks": [], "qemu": 5},
        {"disks": [{"name": []}]},
        {"vcpus": [{}], "unused": "0"},
        {"name": "disk0", "path": "/d"},
        5,
    ],
)
@pytest.mark.parametrize("command", ["status", "disk list"])
def test_an_answer_that_no_runner_gives_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, result: object
) -> None:
    with answering(tmp_path, CONTROL_SOCKET, json.dumps({"id": 1, "result": result}).encode() + b"\n"):
        status = main(["ctl", *command.split(), "--state-dir", str(tmp_path)])
    if status != 0:  # some are no state, and still a list of disks
        assert status == Status.FAILED
        assert "cannot understand the instance: it answered" in capsys.readouterr().err


@pytest.mark.parametrize("reply", [b"5", b"null", b"[" * 4000, b'"writes"', b"{", b"\xff"])
def test_a_reply_that_no_console_gives_is_an_error(tmp_path: Path, reply: bytes) -> None:
    with (
        answering(tmp_path, CONSOLE_SOCKET, reply + b"\n"),
        pytest.raises(HostError, match="the runner's reply is not understood"),
    ):
        attach(tmp_path)


def test_an_instance_that_hangs_up_can_be_asked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It closes the connections of some clients when too many ask."""
    with answering(tmp_path, CONTROL_SOCKET, b""):
        assert main(["ctl", "status", "--state-dir", str(tmp_path)]) == Status.FAILED
    assert "it hung up before it had answered; it has just ended, or too many ask it at the same time: ask again" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("value", ["2020-01-01", "07:32:00", "[" * 3000, "[2020-01-01]", "word"])
def test_a_key_whose_value_no_request_can_hold_is_sent_as_a_text(value: str) -> None:
    assert parse_keys([f"key={value}", "other=1"]) == {"key": value, "other": 1}
