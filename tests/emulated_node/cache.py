"""The artefacts of the emulated node, built once and kept.

An artefact is the output of a shell script and its input files. Its name in the cache holds the hash of both, so a
changed recipe makes another artefact and an unchanged one is found again. It is built in a directory of its own and
renamed into place when it is complete: an interrupted build leaves nothing that looks like a result.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

RECIPES = Path(__file__).with_name("recipes")
KEPT_SECONDS = 14 * 24 * 3600
"""Seconds after its last use until an artefact of an older recipe is removed; another branch may still use it."""


class EmulatedNodeError(Exception):
    """The emulated node could not be built or did not stay up; printed as one line or with the end of its log."""


def directory() -> Path:
    """Return the directory of artefacts: ``$RUNNER_NODE_CACHE``, else below the user's cache directory."""
    given = os.environ.get("RUNNER_NODE_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "instance-runner" / "node"


@dataclass(frozen=True)
class Artefact:
    """A file made by ``recipes/<script>`` from *inputs* (name → content), which it finds in its working directory."""

    name: str
    script: str
    inputs: Mapping[str, bytes]
    tools: Mapping[str, str] = field(default_factory=dict)
    """Program (or file, by its path) the script needs on this machine → the Debian package that has it."""

    @property
    def key(self) -> str:
        """Return the hash of the recipe; a comment in the script is not part of it."""
        digest = hashlib.sha256()
        lines = (RECIPES / self.script).read_text().splitlines()
        parts = {"": "\n".join(line for line in lines if not line.lstrip().startswith("#")).encode(), **self.inputs}
        for name, content in sorted(parts.items()):
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()[:16]


def fetch(artefact: Artefact) -> Path:
    """Return *artefact*, building it first when the cache has none of this recipe."""
    cache = directory()
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / f"{artefact.name}-{artefact.key}"
    if path.exists():  # without the lock, which another recipe of this name may hold for minutes
        os.utime(path)
        return path
    with locked(cache / f"{artefact.name}.lock", artefact.name):
        if not path.exists():
            missing = sorted({package for tool, package in artefact.tools.items() if not available(tool)})
            if missing:
                raise EmulatedNodeError(
                    f"cannot build the {artefact.name}: something is missing; apt-get install {' '.join(missing)}"
                )
            for left in cache.glob(f".{artefact.name}-*"):  # of a build that was killed: we hold its lock
                shutil.rmtree(left, ignore_errors=True)
            build(artefact, path)
        for other in cache.glob(f"{artefact.name}-*"):
            if other != path and time.time() - other.stat().st_mtime > KEPT_SECONDS:
                other.unlink()
    return path


def available(tool: str) -> bool:
    """Return whether a program, or a file named by its path, exists."""
    return Path(tool).exists() if tool.startswith("/") else shutil.which(tool) is not None


def build(artefact: Artefact, path: Path) -> None:
    """Run the recipe in a fresh directory and rename what it made to *path*."""
    work = Path(tempfile.mkdtemp(prefix=f".{artefact.name}-", dir=path.parent))
    log = path.parent / f"{artefact.name}.log"
    try:
        for name, content in artefact.inputs.items():
            (work / name).write_bytes(content)
        out = work / "out"
        started = time.monotonic()
        say(f"building the {artefact.name} (once per recipe; log: {log})")
        script = RECIPES / artefact.script
        environment = {**os.environ, "OUT": str(out), "LC_ALL": "C.UTF-8"}
        status, last = follow(artefact.name, ["bash", str(script)], log, work, environment)
        if status != 0 or not out.exists():
            raise EmulatedNodeError(f"{script.name} failed with status {status}:\n{last}")
        out.rename(path)
        say(f"{artefact.name}: {path.stat().st_size / 1e6:.1f} MB in {time.monotonic() - started:.0f} s")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def follow(name: str, argv: list[str], log: Path, work: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a long command in *work*, write its output to *log*, show some of it, and return its status and last lines."""
    last: deque[str] = deque(maxlen=20)
    with (
        log.open("w") as lines,
        subprocess.Popen(
            argv,
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        with Progress(name) as progress:
            for line in process.stdout:
                lines.write(line)
                last.append(line)
                progress.show(line)
    return process.returncode, "".join(last)


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock of one artefact: two checkouts that share a cache build it once."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another build of the {what}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    """Print one line about the progress to standard error."""
    print(f"node: {text}", file=sys.stderr, flush=True)


class Progress:
    """The last line of a long build, shown five times a second on a terminal and every 15 s in a log."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.started = self.shown = time.monotonic()
        self.lines = 0
        self.terminal = sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def show(self, line: str) -> None:
        """Show *line* unless another one was shown shortly before."""
        self.lines += 1
        now = time.monotonic()
        if now - self.shown < (0.2 if self.terminal else 15):
            return
        self.shown = now
        text = f"  {self.name} {now - self.started:4.0f} s, {self.lines} lines: {line.strip()}"
        if self.terminal:
            sys.stderr.write(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}")
        else:
            sys.stderr.write(f"{text[:120]}\n")
        sys.stderr.flush()
