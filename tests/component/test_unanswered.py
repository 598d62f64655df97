"""Commands that ask an instance whose PID 1 is stopped: none waits without end, at whichever step it would."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from runner.base.errors import HostError
from runner.cli.console_client import AttachRequest, attached
from runner.cli.ctl_qmp import Connection
from runner.kernel.sockets import CONSOLE_SOCKET, QMP_SOCKET

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
