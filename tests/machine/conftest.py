"""The real program as PID 1 of fresh namespaces, with this machine's QEMU, dnsmasq and virtiofsd, and a real Linux guest."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.kernel.child_processes import become_subreaper
from tests.support.namespaces import own_names_of_networks
from tests.support.program_runs import GuestFiles, ProgramStarter, until


@pytest.fixture(scope="session")
def guest() -> GuestFiles:
    return GuestFiles.made()


@pytest.fixture
def start(tmp_path: Path, guest: GuestFiles) -> Iterator[ProgramStarter]:
    tmp_path.chmod(0o755)
    starter = ProgramStarter(tmp_path, guest)
    yield starter
    starter.end()


@pytest.fixture(scope="session", autouse=True)
def adopted() -> None:
    """Make the processes that a run leaves behind children of this one, so that they are found; names of networks are its own."""
    own_names_of_networks()
    become_subreaper()


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """Fail a test that leaves a process, a link or a mount of ours on this machine."""

    def ours() -> set[str]:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[
                0
            ]:  # processes that were killed with their PID 1: only this process can reap them
                pass
        # Only links and mounts that can be ours: others may come and go on this machine.
        links = (line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:])
        found = {f"link {link}" for link in links if link.startswith(("vmbr", "vmtap"))}
        found |= {f"mount {line}" for line in Path("/proc/mounts").read_text().splitlines() if str(tmp_path) in line}
        waiting = [os.getpid()]  # a subreaper: orphans below it become its children
        while waiting:
            for thread in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
                for child in map(int, text_of(thread).split()):
                    waiting.append(child)
                    found.add(f"process {child} {text_of(Path(f'/proc/{child}/comm')).strip()}")
        return found

    def text_of(path: Path) -> str:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return path.read_text()
        return ""  # it has just ended

    before = ours()
    yield
    until(lambda: ours() <= before, f"nothing left, found {ours() - before}", 5)
