"""The ROM guest under the QEMU of the machine under test: it runs, reacts, and ends in every way a guest can."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.node.cgroups import SECONDS

pytestmark = pytest.mark.node_only
UP = "ROM-GUEST-UP"
ROM = os.environ.get("RUNNER_NODE_ROM", "")


class Guest:
    """A QEMU with the ROM guest: its serial line and its monitor."""

    def __init__(self, process: subprocess.Popen[bytes], serial: socket.SocketIO, monitor: socket.SocketIO) -> None:
        self.process, self.serial, self.monitor = process, serial, monitor
        self.events: list[dict[str, Any]] = []
        assert "QMP" in json.loads(monitor.readline())
        self.execute("qmp_capabilities")

    def execute(self, command: str) -> Any:
        """Return a command's answer; events that come before it are kept."""
        self.monitor.write(json.dumps({"execute": command}).encode() + b"\n")
        while True:
            message = json.loads(self.monitor.readline())
            if "return" in message:
                return message["return"]
            assert "event" in message, message
            self.events.append(message)

    def press(self, key: str) -> None:
        self.serial.write(key.encode())

    def line(self) -> str:
        return self.serial.readline().decode().strip()

    def event(self, name: str) -> dict[str, Any]:
        """Wait for the event of this name and return its data."""
        while True:
            for event in self.events:
                if event["event"] == name:
                    return dict(event["data"])
            self.events.append(json.loads(self.monitor.readline()))


@contextlib.contextmanager
def guest(cpus: int = 1) -> Iterator[Guest]:
    ours, theirs = zip(socket.socketpair(), socket.socketpair(), strict=True)
    argv = [
        *("qemu-system-x86_64", "-M", "q35", "-accel", "tcg,thread=multi", "-smp", str(cpus), "-m", "32M"),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-shutdown", "-no-reboot", "-bios", ROM),
        *("-device", "pvpanic-pci"),
        *("-chardev", f"socket,id=serial,fd={theirs[0].fileno()}", "-serial", "chardev:serial"),
        *("-chardev", f"socket,id=monitor,fd={theirs[1].fileno()}", "-mon", "monitor,mode=control"),
    ]
    process = subprocess.Popen(argv, pass_fds=[end.fileno() for end in theirs], stdin=subprocess.DEVNULL)
    try:
        for end in theirs:
            end.close()
        for end in ours:
            end.settimeout(SECONDS)
        with ours[0], ours[1], ours[0].makefile("rwb", 0) as serial, ours[1].makefile("rwb", 0) as monitor:
            yield Guest(process, serial, monitor)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def _built() -> None:
    if not Path(ROM).is_file():
        pytest.skip("the ROM guest is missing: tests/node/run builds it and names it in RUNNER_NODE_ROM")


def test_it_comes_up_and_powers_off_when_the_power_button_is_pressed() -> None:
    with guest() as rom:
        assert rom.line() == UP
        rom.execute("system_powerdown")
        assert rom.line() == "ROM-GUEST-POWER-BUTTON"
        assert rom.event("SHUTDOWN")["reason"] == "guest-shutdown"
        rom.execute("quit")
        assert rom.process.wait(SECONDS) == 0


def test_every_vcpu_is_a_thread() -> None:
    with guest(cpus=4) as rom:
        assert rom.line() == UP
        found = {vcpu["thread-id"] for vcpu in rom.execute("query-cpus-fast")}
        assert len(found) == 4
        assert found < {int(path.name) for path in Path(f"/proc/{rom.process.pid}/task").iterdir()}


@pytest.mark.parametrize(("key", "reason"), [("q", "guest-shutdown"), ("r", "guest-reset")])
def test_a_key_makes_it_end_by_itself(key: str, reason: str) -> None:
    with guest() as rom:
        assert rom.line() == UP
        rom.press(key)
        assert rom.event("SHUTDOWN")["reason"] == reason


def test_a_key_makes_it_panic() -> None:
    with guest() as rom:
        assert rom.line() == UP
        rom.press("p")
        assert rom.event("GUEST_PANICKED")["action"] == "pause", "what -no-shutdown makes of it"


def test_a_key_makes_it_ignore_the_power_button() -> None:
    with guest() as rom:
        assert rom.line() == UP
        rom.press("d")
        assert rom.line() == "ROM-GUEST-DEAF"
        rom.execute("system_powerdown")
        rom.press("d")
        assert rom.line() == "ROM-GUEST-DEAF", "it runs, and did not react to the button"
        assert [event["event"] for event in rom.events] == ["POWERDOWN"]
