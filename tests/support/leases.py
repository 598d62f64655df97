"""A process that takes leases on files (fcntl(2), ``F_SETLEASE``)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HOLDER = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
for path in sys.argv[1:]:
    try:
        fcntl.fcntl(os.open(path, os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_WRLCK)
        print("leased", flush=True)
    except OSError:
        print("refused", flush=True)
signal.pause()
"""


@contextmanager
def attempting_leases(*paths: Path) -> Iterator[list[str]]:
    """Run a process that tries to take a write lease on each of *paths*; yield ``leased`` or ``refused`` for each."""
    with subprocess.Popen(
        [sys.executable, "-ISc", _HOLDER, *map(str, paths)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield [process.stdout.readline().strip() for _ in paths]
        finally:
            process.kill()


@contextmanager
def leasing(*paths: Path) -> Iterator[None]:
    """Run a process that has a lease on each of *paths*."""
    with attempting_leases(*paths) as results:
        assert {*results} == {"leased"}
        yield
