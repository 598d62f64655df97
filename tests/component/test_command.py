"""The program as a child: what its end, which skips the interpreter's own, must not lose."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata

PROGRAM = (sys.executable, "-m", "runner")
PLAN = (
    "import atexit, sys, runner.__main__ as m; m._plan = lambda _: {}; sys.argv = ['', 'plan', 'spec']; {}; m.entry()"
)


def test_the_version_is_looked_up_when_asked() -> None:
    said = subprocess.run([*PROGRAM, "--version"], check=True, capture_output=True, text=True)
    assert said.stdout == f"instance-runner {metadata.version('instance-runner')}\n"
    loaded = "import sys, runner.__main__; print('importlib.metadata' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], check=True, capture_output=True).stdout == b"False\n"


def test_an_error_has_its_sentence_and_status() -> None:
    ended = subprocess.run([*PROGRAM, "plan", "/no/such/spec"], check=False, capture_output=True, text=True)
    sentence = "instance-runner: cannot read the spec '/no/such/spec': No such file or directory\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", sentence)


def test_what_was_printed_is_out_before_the_end() -> None:
    script = PLAN.format("print('word') or 7", "atexit.register(print, 'late')")
    ended = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "word\n", "")


def test_a_reader_that_has_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    script = PLAN.format("print('word') or 7", "pass")
    ended = subprocess.run([sys.executable, "-c", script], check=False, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")
