"""Real runners as PID 1 with fake programs, and directories of programs that they are renewed by."""

from __future__ import annotations

import compileall
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from py_compile import PycInvalidationMode
from typing import Any

import attrs

from runner.kernel.program_directory import digest_of, files_of
from tests.support.fake_host import FAKES
from tests.support.fake_kernel import FAKE_FIRMWARE
from tests.support.json_schemas import fitting
from tests.support.program_runs import BLOCK, PROJECT, RUNNER, children_by_name, until

PACKAGES = (
    *("attr", "attrs", "h11", "idna", "outcome", "prometheus_client", "pycdlib", "pyroute2", "qemu", "sniffio"),
    *("sortedcontainers", "trio"),
)
"""What the program needs besides itself, as `pip install --target` would put it there."""


@attrs.frozen
class ProgramDirectory:
    """A directory with a program, which a runner may be renewed by."""

    path: Path

    @property
    def digest(self) -> str:
        return digest_of(files_of(PurePosixPath(self.path)))

    def patch(self, module: str, *changes: tuple[str, str]) -> None:
        """Replace texts of *module*, each of which is there once."""
        file = self.path / "runner" / module
        text = file.read_text()
        for old, new in changes:
            assert text.count(old) == 1, (module, old, text.count(old))
            text = text.replace(old, new)
        file.write_text(text)
        # Whatever its time: it may be as old as the text before, and copies of it need not be compiled again.
        assert compileall.compile_file(file, quiet=1, force=True, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)


def make_program(path: Path) -> ProgramDirectory:
    """Make a directory with this program and all that it needs, compiled."""
    path.mkdir(mode=0o755)
    ignored = shutil.ignore_patterns("*.pyc.*", "_tests", "tests", "*.so")
    shutil.copytree(PROJECT / "runner", path / "runner", ignore=ignored)
    for name in PACKAGES:
        spec = find_spec(name)
        if spec is not None:
            found = spec.submodule_search_locations
            assert found
            shutil.copytree(next(iter(found)), path / name, ignore=ignored)
    assert compileall.compile_dir(path, quiet=1)  # what is compiled already has come along
    subprocess.run(["chmod", "-R", "go-w", path], check=True)
    return ProgramDirectory(path)


@attrs.define
class RenewableRun:
    """A runner in its own namespaces, with fake programs and real children."""

    root: Path
    process: subprocess.Popen[bytes]
    pid1: bool
    """Whether it is PID 1; else a shell is, which reaps what outlives the runner."""

    @property
    def pid(self) -> int:
        first = self._child(self.process.pid)
        return first if self.pid1 else self._child(first)

    def _child(self, pid: int) -> int:
        children = Path(f"/proc/{pid}/task/{pid}/children")
        return int(until(lambda: children.read_text().split(), f"{pid} to have a child")[0])

    @property
    def log(self) -> str:
        return (self.root / "stderr").read_text(errors="replace")

    @property
    def console(self) -> str:
        return (self.root / "stdout").read_text(errors="replace")

    @property
    def state(self) -> Path:
        return self.root / "state"

    def until_logged(self, text: str, times: int = 1, timeout: float = 90) -> None:
        def logged() -> bool:
            found = self.log.count(text) >= times
            assert found or self.process.poll() is None, f"ended without {text!r}:\n{self.log}"
            return found

        until(logged, f"{text!r}:\n{self.log}", timeout)

    def command(self, *argv: str | Path) -> list[str | Path]:
        """Return *argv* as a command in the runner's namespaces."""
        return ["nsenter", f"--target={self.pid}", "--pid", "--mount", "--net", *argv]

    def ctl(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        argv = self.command(RUNNER, "ctl", "--state-dir", self.state, *words)
        return subprocess.run(argv, check=False, capture_output=True, text=True, timeout=120)

    def metrics(self) -> subprocess.CompletedProcess[str]:
        """Ask for the metrics of a runner with `--http 127.0.0.1:9441`."""
        script = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9441/metrics').read().decode())"
        return subprocess.run(
            self.command(sys.executable, "-c", script), check=False, capture_output=True, text=True, timeout=60
        )

    def upgrade(self, program: ProgramDirectory, digest: str | None = None) -> subprocess.CompletedProcess[str]:
        return self.ctl("upgrade", "--from", program.path, "--digest", digest or program.digest)

    def status(self) -> dict[str, Any]:
        ended = self.ctl("status", "--json")
        assert ended.returncode == 0, ended.stderr
        found: dict[str, Any] = fitting("status", json.loads(ended.stdout))
        return found

    def receipt(self) -> dict[str, Any]:
        found: dict[str, Any] = fitting("receipt", json.loads((self.state / "receipt.json").read_text()))
        return found

    def children(self) -> dict[str, list[int]]:
        """Return the runner's children by name, with their pids in our namespace."""
        return children_by_name(self.pid)

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def rss(self) -> int:
        """Return the runner's resident memory in KiB."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0])

    def records(self, what: str) -> list[dict[str, Any]]:
        """Return the records of kind *what* that the fakes wrote."""
        lines = (self.root / "log").read_text().splitlines()
        return [each for each in map(json.loads, lines) if each["what"] == what]

    def stop(self) -> int:
        os.kill(self.pid, signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        return self.process.wait(60)

    def termination_log(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.root / "verdict").read_text())
        return found


@contextmanager
def failing(run: RenewableRun, *faults: str, path: str | None = None) -> Iterator[Path]:
    """Have system calls of the runner fail as *faults* say, in the form of strace(1): ``NAME:error=ERROR:when=FIRST``.

    Yield the file with all calls; with *path*, only those that access it are counted and listed.
    """
    trace = run.root / "trace"
    argv = ["strace", "-qq", "-o", str(trace), *(f"--inject={each}" for each in faults), "-p", str(run.pid)]
    argv += [] if path is None else ["-P", path]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as strace:
        status = Path(f"/proc/{run.pid}/status")
        until(lambda: "TracerPid:\t0" not in status.read_text(), "strace to trace the runner")
        try:
            yield trace
        finally:
            strace.terminate()


def until_idle(trace: Path) -> None:
    """Wait until the runner with this *trace* sleeps in its event loop, where a signal finds it outside of any task."""
    until(lambda: re.search(r"epoll_wait\([^\n]*\Z", trace.read_text(errors="replace")), "the runner to be idle")


def _program(root: Path, name: str, fake: str, behaviour: Mapping[str, object]) -> None:
    path = root / "bin" / name
    head = f"#!{sys.executable} -IS\nNAME = {name!r}\nLOG = {str(root / 'log')!r}\nBEHAVIOUR = {behaviour!r}\n"
    path.write_text(head + (FAKES / fake).read_text())
    path.chmod(0o755)


@attrs.define
class RenewableStarter:
    """Starts runners; :meth:`end` kills those that still run."""

    root: Path
    runs: list[RenewableRun] = attrs.field(factory=list)

    def __call__(
        self,
        spec: str = "",
        *arguments: str,
        qemu: Mapping[str, object] | None = None,
        daemon: Mapping[str, object] | None = None,
        program: ProgramDirectory | None = None,
        pid1: bool = True,
    ) -> RenewableRun:
        """Start a runner, or *program* in its place, and wait until its guest runs."""
        root = self.root / f"run{len(self.runs)}"
        (root / "bin").mkdir(parents=True)
        (root / "share").mkdir()
        _program(root, "qemu-system-x86_64", "fake_qemu.py", {"console": "plays", **(qemu or {})})
        for name in ("dnsmasq", "virtiofsd", "passt"):
            _program(root, name, "fake_daemon.py", daemon or {})
        (root / "firmware").write_bytes(FAKE_FIRMWARE)
        (root / "spec.toml").write_text(
            '[instance]\nuser = "root"\n[cpu]\naccel = "tcg"\nplacement = "affinity"\n[memory]\nsize = "32MiB"\nprealloc = false\n'
            f'[boot]\nfirmware = "{root}/firmware"\n[shutdown]\ngrace = 5\n{spec.format(root=root)}'
        )
        run_it = 'exec "$@"' if pid1 else '"$@" & while :; do sleep 0.1; done'
        runner = [RUNNER] if program is None else [sys.executable, "-m", "runner"]
        namespaces = ("unshare", "--fork", "--pid", "--mount", "--mount-proc", "--net", "--kill-child")
        argv = [
            *namespaces,
            "sh",
            "-c",
            f"ip link set lo up; {run_it}",
            "sh",
            "env",
            BLOCK,
            *runner,
            "run",
            "--state-dir",
            root / "state",
            *arguments,
        ]
        argv += ["--termination-log", root / "verdict", root / "spec.toml"]
        environment = {**os.environ, "PATH": f"{root}/bin:{os.environ['PATH']}"}
        if program is not None:
            environment["PYTHONPATH"] = str(program.path)
        with (root / "stdout").open("ab") as stdout, (root / "stderr").open("ab") as stderr:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment, cwd="/"
            )
        run = RenewableRun(root, process, pid1)
        self.runs.append(run)
        run.until_logged("the guest runs")
        return run

    def end(self) -> None:
        for run in self.runs:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait()


HOOK = """def _hook(name: str, passed: list[str] = []) -> None:
    import json, os, signal, time
    passed.append(name)
    with open({path!r}) as file:
        what = json.load(file)
    if what["at"] == len(passed):
        exec(what["do"])


"""


def hook(program: ProgramDirectory) -> Path:
    """Have *program* do what the returned file says, before it takes over the holder with that number.

    The file has JSON: ``at``, a number from 1 on, and ``do``, statements of Python, in which ``name`` is the holder's.
    """
    path = program.path.parent / "hook.json"
    program.patch(
        "instance/held.py",
        (
            "        assert self.found is not None  # noqa: S101 - the caller has asked\n",
            "        assert self.found is not None\n        _hook(name)\n",
        ),
        ("class Held:", HOOK.format(path=str(path)) + "class Held:"),
    )
    return path
