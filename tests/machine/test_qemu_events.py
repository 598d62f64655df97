"""Every event that this machine's QEMU can send is known: handled, or ignored with a reason."""

from __future__ import annotations

import shutil
import socket
import subprocess
from contextlib import ExitStack
from typing import Any

from runner.instance.parts.qemu_events import HANDLED, IGNORED
from tests.machine.test_shapes import QmpConnection


def test_the_table_has_every_event_of_the_schema() -> None:
    qemu = shutil.which("qemu-system-x86_64")
    assert qemu is not None
    ours, theirs = socket.socketpair()
    machine = ("-machine", "none", "-nodefaults", "-no-user-config", "-display", "none")
    monitor = ("-chardev", f"socket,id=q,fd={theirs.fileno()}", "-mon", "q,mode=control")
    with ExitStack() as held:
        process = held.enter_context(subprocess.Popen((qemu, *machine, *monitor), pass_fds=(theirs.fileno(),)))
        theirs.close()
        connection = QmpConnection(held.enter_context(ours), held)
        schema: Any = connection.execute("query-qmp-schema")
        connection.execute("quit")
        process.wait(20)
    events = {each["name"] for each in schema if each["meta-type"] == "event"}
    assert {"RESET", "SHUTDOWN"} <= events, "the schema was read"
    assert sorted(events - {*HANDLED, *IGNORED}) == []
    assert HANDLED.keys() & IGNORED.keys() == set()
