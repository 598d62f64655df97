"""Every kind of system call of an upgrade fails once, at several places: the guest runs on, and a runner answers for it.

The calls that the dynamic linker and the interpreter make before the first line of this program are the exception: what fails
there ends a process that is PID 1, and no code of ours runs that could prevent it. They are counted, not tried.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.component.test_system_calls import KINDS, failure_of
from tests.support.renewals import ProgramDirectory, RenewableStarter, failing, make_program
from tests.support.soak import FACTOR

pytestmark = pytest.mark.soak

EXECUTED = "execve("
OURS = re.compile(r'(openat|readlink)\(.*"/proc/self/fd/')
"""The interpreter opens the first stage."""
COMMITTED = re.compile(r'write\(\d+, "instance-runner"')
"""The name of the process, by the first stage."""

PLACES = ("before exec", "first", "in the middle", "last")
CASES = [(kind, place) for kind in KINDS for place in PLACES]
SAMPLE = [("getdents64", "first"), ("epoll_create1", "last"), ("epoll_wait", "before exec")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> ProgramDirectory:
    return make_program(tmp_path_factory.mktemp("programs") / "made")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[RenewableStarter]:
    starter = RenewableStarter(tmp_path)
    yield starter
    starter.end()


def calls(trace: Path) -> list[Counter[str]]:
    """Return how many calls of each kind there were before exec, of linker and interpreter, until the commit, and after it."""
    counts = [Counter[str]()]
    for line in trace.read_text(errors="replace").splitlines():
        begins = (line.startswith(EXECUTED), OURS.match(line), COMMITTED.match(line))
        if len(counts) <= len(begins) and begins[len(counts) - 1]:
            counts.append(Counter())
        if name := re.match(r"(\w+)\(", line):
            counts[-1][name[1]] += 1
            counts[-1]["injected"] += "(INJECTED)" in line
    return counts


_usual: list[Counter[str]] = []


def usual(start: RenewableStarter, made: ProgramDirectory) -> list[Counter[str]]:
    """Return the :func:`calls` of an upgrade in which nothing fails."""
    if not _usual:
        run = start()
        with failing(run) as trace:
            assert run.upgrade(made).returncode == 0, run.log
        _usual.extend(calls(trace))
        assert len(_usual) == 4
        assert run.stop() == 0
    return _usual


@pytest.mark.parametrize(("kind", "place"), CASES if FACTOR else SAMPLE)
def test_a_call_that_fails_once_does_not_end_the_guest(
    start: RenewableStarter, made: ProgramDirectory, kind: str, place: str
) -> None:
    before, linker, ours, _ = (each[kind] for each in usual(start, made))
    when = {
        "before exec": max(1, before - 1),
        "first": before + linker + 1,
        "in the middle": before + linker + ours // 2 + 1,
        "last": before + linker + ours,
    }[place]
    if not (before if place == "before exec" else ours):
        return  # not made there
    run = start()
    with failing(run, f"{kind}:{failure_of(kind)}:when={when}") as trace:
        ended = run.upgrade(made)
    if len(found := calls(trace)) > 1 and found[1]["injected"]:
        return  # fewer calls than usual came before
    assert run.process.poll() is None, f"{ended.stderr}\n{run.log}"
    assert run.status()["ready"], run.log
    assert run.stop() == 0, run.log


def test_a_package_that_is_not_found_once_does_not_end_the_guest(
    start: RenewableStarter, made: ProgramDirectory
) -> None:
    """Python takes a package without its file for an empty one, which shows when it is used, not when it is imported."""
    run = start()
    with failing(run, "newfstatat:error=ENOENT:when=1", path=json.__file__) as trace:
        assert run.upgrade(made).returncode == 0, run.log
    assert "(INJECTED)" in trace.read_text(errors="replace")
    assert run.status()["ready"], run.log
    assert run.stop() == 0, run.log
