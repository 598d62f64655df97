"""Every kind of system call of the runner fails once, and for good, and is the last before a SIGKILL; then it starts again.

strace(1) makes the real program's calls fail (`--inject`), from the reading of the spec to the exit after a SIGTERM. QEMU and
the daemons are fakes. Whatever fails, the program ends, none of its processes is left, and the next start at the same place works.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from tests.support.fake_host import FakeHost, descendants, link_names
from tests.support.fake_kernel import FAKE_KERNEL
from tests.support.program_runs import until
from tests.support.soak import FACTOR

pytestmark = pytest.mark.soak

RUN = (sys.executable, "-m", "runner", "run", "--not-pid1")
ENDS_WITHIN = 90.0
"""Seconds for a start that runs into every timeout and an end that kills, under strace on a loaded machine."""

ERRORS = {
    "EINTR": set[str](),
    "ENOMEM": {"mmap", "mremap", "vfork", "clone", "clone3", "madvise", "munmap"},
    "ENOSPC": {"write", "pwrite64", "ftruncate", "fallocate", "mkdir", "rename", "sendmsg"},
    "EMFILE": {
        "openat",
        "socket",
        "socketpair",
        "pipe2",
        "memfd_create",
        "dup",
        "epoll_create1",
        "eventfd2",
        "accept4",
    },
    "EACCES": {"unlink", "rmdir", "connect", "bind", "kill", "chmod", "fchmod", "execve", "sched_setaffinity", "flock"},
    "ENOENT": {"readlink", "readlinkat", "lstat", "stat", "newfstatat", "statx", "access", "getdents64", "statfs"},
}
"""The error with which a call fails, by its name; every other one fails with EIO."""

KINDS = (
    "openat", "read", "pread64", "write", "close", "newfstatat", "lseek", "getdents64", "mmap", "munmap", "brk", "ioctl",
    "fcntl", "dup", "readlink", "unlink", "mkdir", "rename", "fchmod", "flock", "ftruncate", "socket", "socketpair", "bind",
    "listen", "connect", "sendto", "sendmsg", "recvfrom", "recvmsg", "setsockopt", "getsockopt", "getsockname", "pipe2",
    "epoll_create1", "epoll_ctl", "epoll_wait", "eventfd2", "poll", "rt_sigaction", "rt_sigprocmask", "kill", "waitid",
    "vfork", "prctl", "sched_getaffinity", "sched_setaffinity", "prlimit64", "getrandom", "memfd_create",
)  # fmt: skip
"""The kinds of calls that are made to fail; one that the program does not make is no case. Not futex: the C library aborts."""

WAYS = ("once, first", "once, last", "for good", "SIGKILL")
CASES = [(kind, way) for kind in KINDS for way in WAYS]
SAMPLE = [
    ("openat", "for good"),
    ("sendmsg", "once, last"),
    ("epoll_wait", "SIGKILL"),
]


def failure_of(kind: str) -> str:
    """Return how a call of *kind* fails, as strace(1) is told.

    brk returns no error, but the old end of the heap, which is below the one that was asked for (brk(2), NOTES). The C library takes
    the number of an error for a higher end, and writes to memory that does not exist. With 0 it reads the end anew.
    """
    if kind == "brk":
        return "retval=0"
    return f"error={next((error for error, kinds in ERRORS.items() if kind in kinds), 'EIO')}"


@attrs.frozen
class Place:
    """Where the program is started again and again."""

    host: FakeHost
    spec: Path

    def run(self, *strace: str) -> int:
        """Run the program to its end, under strace with options, and return its exit status, negative for a signal."""
        path = self.host.root / "bin"
        environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}", "PYTHONHASHSEED": "0"}
        around = ["strace", "-qq", *strace] if strace else []
        argv = [
            *around,
            *RUN,
            "--state-dir",
            str(self.host.root / "state"),
            str(self.spec),
        ]
        with (self.host.root / "output").open("wb") as output:
            return subprocess.run(
                argv, check=False, stdout=output, stderr=output, env=environment, timeout=ENDS_WITHIN
            ).returncode

    @property
    def output(self) -> str:
        return (self.host.root / "output").read_text(errors="replace")


@pytest.fixture
def place(fake_host: FakeHost) -> Place:
    kernel = fake_host.root / "kernel"
    kernel.write_bytes(FAKE_KERNEL)
    spec = fake_host.root / "spec.toml"
    spec.write_text(
        f'[instance]\nuser = "root"\n[cpu]\naccel = "tcg"\nplacement = "affinity"\n[boot]\nkernel = "{kernel}"\n'
        "[shutdown]\ngrace = 2\n"
    )
    fake_host.program("qemu-system-x86_64", "fake_qemu.py", at_cont="ask to stop")
    return Place(fake_host, spec)


_windows: dict[str, tuple[int, int]] = {}


def windows(place: Place) -> dict[str, tuple[int, int]]:
    """Return, for each kind of call, how many precede the reading of the spec and how many there are in all."""
    if not _windows:
        assert place.run() == 0, place.output  # a first run writes its modules' bytecode, which later ones do not
        trace = place.host.root / "trace"
        assert place.run("-o", str(trace)) == 0, place.output
        counts: dict[str, int] = {}
        before: dict[str, int] = {}
        for line in trace.read_text(errors="replace").splitlines():
            if found := re.match(r"(\w+)\(", line):
                if not before and str(place.spec) in line and found[1] == "openat":
                    before = dict(counts)
                counts[found[1]] = counts.get(found[1], 0) + 1
        assert before
        _windows.update({kind: (before.get(kind, 0), number) for kind, number in counts.items()})
    return _windows


def left(before: set[str]) -> set[str]:
    """Reap the orphans, which have become children of the tests, and return the processes that still live."""
    with contextlib.suppress(ChildProcessError):
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG):
            pass
    return set(descendants(os.getpid())) - before


@pytest.mark.parametrize(("kind", "way"), CASES if FACTOR else SAMPLE)
def test_a_call_that_fails_ends_well_and_the_next_start_works(place: Place, kind: str, way: str) -> None:
    first, last = windows(place).get(kind, (0, 0))
    if first == last:
        return  # not made in this window
    match way:
        case "once, first":
            when = f"{first + 1}"
        case "once, last":
            when = f"{last}"
        case "for good":
            when = f"{first + 1}+"
        case _:
            when = f"{(first + last) // 2 + 1}"
    what = "signal=SIGKILL" if way == "SIGKILL" else failure_of(kind)
    before = set(descendants(os.getpid()))
    links = set(link_names())
    status = place.run("-o", "/dev/null", f"--inject={kind}:{what}:when={when}")
    allowed = {-signal.SIGKILL, 137} if way == "SIGKILL" else {0, 2, 13, 20, 21, 30, 31, 40}
    if kind == "sendto" and "internal error in Trio" in place.output:
        allowed = {1}  # trio's loop cannot wake itself, and loses the error of the call
    assert status in allowed, place.output
    if way == "SIGKILL":  # the kernel ends the children of a real PID 1, however early they are in their start
        for line in left(before):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)
    until(lambda: not left(before), f"the end of every child:\n{place.output}")
    assert set(link_names()) == links
    assert place.run() == 0, place.output
