"""Runs of the real program as PID 1 of fresh namespaces, seen from outside."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

PROJECT = Path(__file__).parents[2]
RUNNER = Path(sys.executable).with_name("instance-runner")
BLOCK = "--block-signal=TERM,INT,HUP"
FIRST_SECOND = range(0, 1000, 10)
"""Milliseconds from the start of a program, at which a signal must not be lost."""


@attrs.frozen
class GuestFiles:
    """What a guest boots from."""

    kernel: Path
    initrd: Path

    @classmethod
    def made(cls) -> GuestFiles:
        """Return the quickstart's guest, made once for all runs on this machine whose scripts make the same one."""
        scripts = [PROJECT / "examples" / "quickstart" / name for name in ("make-guest", "guest-init")]
        digest = hashlib.sha256(b"".join(each.read_bytes() for each in scripts)).hexdigest()[:16]
        usual = Path.home() / ".cache" / "instance-runner" / f"guest-{digest}"
        directory = Path(os.environ.get("RUNNER_GUEST_CACHE") or usual)
        subprocess.run([scripts[0], directory], check=True, timeout=300, stdout=subprocess.DEVNULL)
        return cls(directory / "vmlinuz", directory / "initrd")


@attrs.define
class ProgramRun:
    """One run of the program, seen from outside."""

    process: subprocess.Popen[bytes]
    directory: Path

    @property
    def console(self) -> str:
        return (self.directory / "stdout").read_text(errors="replace")

    @property
    def log(self) -> str:
        return (self.directory / "stderr").read_text(errors="replace")

    @property
    def state(self) -> Path:
        return self.directory / "state"

    def pid(self) -> int:
        """Return the program's pid as this namespace sees it: the only child of unshare(1)."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(until(lambda: children.read_text().split(), "unshare has a child")[0])

    def descendants(self) -> dict[str, list[int]]:
        """Return the program's children by name."""
        return children_by_name(self.pid())

    def until(self, text: str, where: Callable[[], str], timeout: float = 90) -> None:
        """Wait until *text* appears, or fail as soon as the program has ended without it."""

        def appeared() -> bool:
            ended = self.process.poll() is not None
            if text in where():
                return True
            assert not ended, (
                f"ended with {self.process.returncode} without {text!r}:\n{self.log}\n{self.console[-2000:]}"
            )
            return False

        until(appeared, repr(text), timeout)

    def until_runs(self) -> None:
        self.until("the guest runs", lambda: self.log)

    def until_done(self) -> None:
        self.until("guest: done", lambda: self.console)

    def send(self, *numbers: int) -> None:
        for number in numbers:
            os.kill(self.pid(), number)

    def wait(self, timeout: float = 90) -> int:
        """Return the exit status; a run that does not end is killed and failed."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"did not end within {timeout} s:\n{self.log}")

    def stop(self) -> int:
        self.send(signal.SIGTERM)
        return self.wait()

    def termination_log(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.directory / "verdict").read_text())
        return result


def children_by_name(pid: int) -> dict[str, list[int]]:
    """Return the children of process *pid* by name, with their pids in our namespace."""
    found: dict[str, list[int]] = {}
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        found.setdefault(Path(f"/proc/{child}/comm").read_text().strip(), []).append(child)
    return found


def until(condition: Callable[[], Any], what: str, timeout: float = 240) -> Any:
    """Return what *condition* returns once that is true; the outside world can only be looked at again.

    The limit names what was waited for before pytest ends the test; no test may depend on it.
    """
    deadline = time.monotonic() + timeout
    while not (result := condition()):
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(0.01)
    return result


@attrs.define
class ProgramStarter:
    """Starts runs of the program; :meth:`end` kills those that still run."""

    root: Path
    guest: GuestFiles
    runs: list[ProgramRun] = attrs.field(factory=list)

    def spec(self, text: str, cmdline: str = "", *, boot: bool = True) -> Path:
        cmdline = f"console=ttyS0 quiet no_timer_check {cmdline}"
        files = f'kernel = "{self.guest.kernel}"\ninitrd = "{self.guest.initrd}"'
        kernel = f'[boot]\n{files}\ncmdline = "{cmdline}"\n'
        accel = "" if "accel" in text else ('accel = "tcg"\n' if text.startswith("[cpu]") else '[cpu]\naccel = "tcg"\n')
        path = self.root / "spec.toml"
        if text.startswith("[cpu]"):
            text = text.replace("[cpu]\n", f"[cpu]\n{accel}", 1)
            accel = ""
        path.write_text(accel + (kernel if boot else "") + text)
        return path

    def __call__(
        self,
        text: str = "",
        cmdline: str = "",
        *arguments: str,
        boot: bool = True,
        pid1: bool = True,
        namespaces: bool = True,
        around: tuple[str, ...] = (),
        inside: tuple[str, ...] = (),
        streams: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
    ) -> ProgramRun:
        """Start the program with a spec that begins with *text*; *around* goes before everything, *inside* into the namespaces."""
        directory = self.root / f"run{len(self.runs)}"
        directory.mkdir()
        spec = self.spec(text, cmdline, boot=boot)
        fresh = (
            "unshare",
            "--fork",
            "--pid",
            "--mount",
            "--mount-proc",
            "--kill-child",
            *(() if around else ("--net",)),
        )
        command = (RUNNER, "run", *(() if pid1 else ("--not-pid1",)), "--state-dir", directory / "state")
        argv = (
            *around,
            *(fresh if pid1 and namespaces else ()),
            *inside,
            "env",
            BLOCK,
            *command,
            "--termination-log",
            directory / "verdict",
            *arguments,
            spec,
        )
        with (directory / "stdout").open("wb") as stdout, (directory / "stderr").open("wb") as stderr:
            to: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr, **(streams or {})}
            process = subprocess.Popen(argv, env={**os.environ, **(environment or {})}, start_new_session=True, **to)
        run = ProgramRun(process, directory)
        self.runs.append(run)
        return run

    def end(self) -> None:
        for run in self.runs:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait()
