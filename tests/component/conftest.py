"""Fixtures for tests with real processes and fake programs."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from runner.kernel.child_processes import become_subreaper
from tests.support.fake_host import FakeHost
from tests.support.namespaces import CLONE_NEWNET, own_names_of_networks, unshare

VOLUME = os.environ.get("RUNNER_VOLUME")
"""The size, as tmpfs(5) takes it, of a volume that each test's directory is then; the caller has a mount namespace of its own."""


@pytest.fixture(scope="session", autouse=True)
def own_namespace() -> None:
    """Move the test process into network and mount namespaces of its own, and let it adopt orphans as PID 1 would."""
    unshare(CLONE_NEWNET)
    own_names_of_networks()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    become_subreaper()


@pytest.fixture(autouse=True)
def volume(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have the directory of a test that starts an instance, with the state directory in it, be a volume of the size :data:`VOLUME`."""
    if VOLUME is None or not {"fake_host", "start"} & set(request.fixturenames):
        yield
        return
    directory = request.getfixturevalue("tmp_path")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={VOLUME},mode=755", "volume", directory], check=True)
    yield
    subprocess.run(["umount", "--lazy", directory], check=True)


@pytest.fixture
def import_anew() -> Iterator[Callable[[str], None]]:
    """Return a function that has a module imported again at its next use; after the test the one of before is back.

    With another one in its place, other tests of this process would hold classes that the program does not use any more.
    """
    before: dict[str, ModuleType] = {}

    def forget(name: str) -> None:
        if name in sys.modules:
            before.setdefault(name, sys.modules.pop(name))

    yield forget
    for name, module in before.items():
        package, _, last = name.rpartition(".")
        sys.modules[name] = module
        setattr(sys.modules[package], last, module)


@pytest.fixture
def fake_host(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> FakeHost:
    caplog.set_level(logging.INFO)
    with contextlib.suppress(ChildProcessError):  # orphans of other tests: the run would reap them
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG):
            pass
    while len(list(Path("/proc/self/task").iterdir())) > 1:
        time.sleep(0.05)  # trio keeps a worker thread of another test for a while: the snapshot would count it
    return FakeHost(tmp_path, logged=lambda: caplog.text)
