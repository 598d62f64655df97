"""The real program as PID 1 of fresh namespaces, with this machine's QEMU, dnsmasq and virtiofsd, and a real Linux guest."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from runner.kernel.processes import become_subreaper

PROJECT = Path(__file__).parents[2]
RUNNER = Path(sys.executable).with_name("instance-runner")
BLOCK = "--block-signal=TERM,INT,HUP"


@attrs.frozen
class Guest:
    kernel: Path
    initrd: Path


@pytest.fixture(scope="session")
def guest() -> Guest:
    """Make the quickstart's guest, once for all runs on this machine."""
    cache = Path(os.environ.get("RUNNER_GUEST_CACHE") or Path.home() / ".cache" / "instance-runner" / "guest")
    subprocess.run([PROJECT / "examples" / "quickstart" / "make-guest", cache], check=True, timeout=300)
    return Guest(cache / "vmlinuz", cache / "initrd")


@attrs.define
class Run:
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
        result: dict[str, list[int]] = {}
        for child in map(int, Path(f"/proc/{self.pid()}/task/{self.pid()}/children").read_text().split()):
            result.setdefault(Path(f"/proc/{child}/comm").read_text().strip(), []).append(child)
        return result

    def until(self, text: str, where: Callable[[], str], patience: float = 90) -> None:
        """Wait until *text* appears, or fail as soon as the program has ended without it."""

        def appeared() -> bool:
            ended = self.process.poll() is not None
            if text in where():
                return True
            assert not ended, (
                f"ended with {self.process.returncode} without {text!r}:\n{self.log}\n{self.console[-2000:]}"
            )
            return False

        until(appeared, repr(text), patience)

    def until_runs(self) -> None:
        self.until("the guest runs", lambda: self.log)

    def until_done(self) -> None:
        self.until("guest: done", lambda: self.console)

    def send(self, *numbers: int) -> None:
        for number in numbers:
            os.kill(self.pid(), number)

    def wait(self, patience: float = 90) -> int:
        """Return the exit status; a run that does not end is killed and failed."""
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"did not end within {patience} s:\n{self.log}")

    def stop(self) -> int:
        self.send(signal.SIGTERM)
        return self.wait()

    def verdict(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.directory / "verdict").read_text())
        return result


def until(condition: Callable[[], Any], what: str, patience: float = 30) -> Any:
    """Return what *condition* returns once that is true; the outside world can only be looked at again."""
    deadline = time.monotonic() + patience
    while not (result := condition()):
        assert time.monotonic() < deadline, f"waited {patience} s for {what}"
        time.sleep(0.01)
    return result


@attrs.define
class Start:
    """Starts runs, and sees to it that none outlives its test."""

    root: Path
    guest: Guest
    runs: list[Run] = attrs.field(factory=list)

    def spec(self, text: str, cmdline: str = "", *, boot: bool = True) -> Path:
        kernel = f'[boot]\nkernel = "{self.guest.kernel}"\ninitrd = "{self.guest.initrd}"\ncmdline = "console=ttyS0 quiet {cmdline}"\n'
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
    ) -> Run:
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
        run = Run(process, directory)
        self.runs.append(run)
        return run

    def end(self) -> None:
        for run in self.runs:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait()


@pytest.fixture
def start(tmp_path: Path, guest: Guest) -> Iterator[Start]:
    tmp_path.chmod(0o755)
    starter = Start(tmp_path, guest)
    yield starter
    starter.end()


@pytest.fixture(scope="session", autouse=True)
def adopted() -> None:
    """Let what a run leaves behind become a child of the tests, where it is seen."""
    become_subreaper()


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """Fail a test that leaves a process, a link or a mount of ours on this machine."""

    def ours() -> set[str]:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # what was killed with its PID 1, and is nobody else's to reap
                pass
        # Only what can be ours: this machine may be busy with other things, whose links and mounts come and go.
        links = (line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:])
        found = {f"link {link}" for link in links if link.startswith(("vmbr", "vmtap"))}
        found |= {f"mount {line}" for line in Path("/proc/mounts").read_text().splitlines() if str(tmp_path) in line}
        waiting = [os.getpid()]  # a subreaper: what is left behind anywhere below becomes a child of ours
        while waiting:
            for thread in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
                for child in map(int, thread.read_text().split()):
                    waiting.append(child)
                    found.add(f"process {child} {Path(f'/proc/{child}/comm').read_text().strip()}")
        return found

    before = ours()
    yield
    until(lambda: ours() <= before, f"nothing left, found {ours() - before}", 5)
