"""The first code that runs after exec in a renewal: it returns to the previous program unless the next one commits.

It is executed as a script by the previous runner's interpreter, with the standard library alone (``-I -S``), from that runner's own copy in
sealed memory, which is known to work. Usage: ``first_stage.py MODE FD INDEX REASON``. FD is a sealed file with the state as JSON. INDEX is
the place of a program in its list ``programs``: the one to become comes first, the one before second. REASON says why it is not the first
one; it is empty if it is.

======== ===========================================================================================================
resume   become that program and go on with what the runner before has held
rehearse only import that program and read the state, as a child; print why it cannot go on, and nothing if it can
======== ===========================================================================================================
"""

from __future__ import annotations

import os
import sys

MOST_ATTEMPTS = 3
"""Attempts of this stage to read its modules and the state, each a new exec: the cause of a failure may be momentary."""
AGAIN = "again"
"""The word added to its command line for each attempt."""


def try_again() -> None:
    """Execute this file again, which has changed nothing yet; return after the last attempt, and if it was imported as a module."""
    if __name__ == "__main__" and sys.argv.count(AGAIN) + 1 < MOST_ATTEMPTS:
        os.execve(sys.orig_argv[0], [*sys.orig_argv, AGAIN], os.environ)


try:
    import contextlib
    import json
    import signal
    from importlib import import_module
    from typing import Any, NotRequired, TypedDict
except BaseException:
    try_again()
    raise

COMMITTED_WITHIN = 10
"""Seconds from exec until a program must have taken everything over, unless it brings its own ``within``; 0.2 are usual."""
LONGEST_REASON = 1000
"""Characters of the reason that is passed to the previous program."""
NAME = "instance-runner"
"""The name shown by ``ps``: that of the program before exec, not the interpreter's."""
FLAGS = ("-I", "-S", "-B")
"""The interpreter's options: neither environment nor site-packages nor new bytecode files change what is executed."""


class ProgramDocument(TypedDict):
    """A program that may continue the instance."""

    path: list[str]
    """Its import path, beginning with the directory or archive of its own modules."""
    bytecode: NotRequired[str | None]
    """``sys.pycache_prefix``."""
    digest: str
    """Empty for the program that was started first."""
    within: NotRequired[int]
    """Seconds from exec until it must have taken everything over; by default :data:`COMMITTED_WITHIN`."""


class StageDocument(TypedDict):
    """The interpreter of the previous runner, and its copy of this file."""

    interpreter: str
    file: str
    fd: int


class RenewalDocument(TypedDict):
    """The content of the sealed file with the state."""

    format: int
    cause: str
    """``upgrade``, or ``fault`` of the previous runner."""
    reason: str
    """The fault."""
    generation: int
    own_faults: list[float]
    """Times of ``CLOCK_MONOTONIC`` at which runners of this instance had faults."""
    programs: list[ProgramDocument]
    """The program to become, and the previous one."""
    entry: str
    """The name of the module whose ``resume`` or ``rehearse`` is called."""
    left_at: float
    """The time of ``CLOCK_MONOTONIC`` at which the previous runner stopped."""
    descriptors: dict[str, list[int]]
    """The number of each inherited descriptor → its file, by :func:`runner.kernel.execution.identity`."""
    state: dict[str, Any]
    """Name in the store → its document."""
    stage: NotRequired[StageDocument]
    directory: NotRequired[str]
    """The directory of the program to become, for the child that makes its archive."""
    archive: NotRequired[int]
    """The descriptor of that archive."""


def stage_argv(stage: StageDocument, mode: str, fd: int, index: int, reason: str) -> list[str]:
    """Return the command line by which *stage*, an interpreter and a copy of this file, becomes the program *index*."""
    words = [stage["interpreter"], *FLAGS, stage["file"], mode, str(fd), str(index), reason]
    return [word.replace("\0", "") for word in words]


class FirstStage:
    """The way to the program *index* of the list in *document*, and back to the one after it in that list.

    That program may be of another version: the attributes that are set here, :meth:`commit` and :meth:`fall_back` are its interface.
    """

    def __init__(self, fd: int, document: RenewalDocument, index: int, reason: str) -> None:
        self.fd = fd
        self.document = document
        self.index = index
        self.reason = reason
        self.committed = False

    @property
    def program(self) -> ProgramDocument:
        """The program that continues."""
        return self.document["programs"][self.index]

    def import_program(self) -> Any:
        """Return the entry module of the program that continues."""
        sys.path[:0] = self.program["path"]
        sys.pycache_prefix = self.program.get("bytecode")  # the previous runner's PYTHONPYCACHEPREFIX, which -I ignores
        return import_module(self.document["entry"])  # the import path decides whose module this is

    def commit(self) -> None:
        """Give up the way back: everything has been taken over."""
        signal.alarm(0)
        self.committed = True
        others = {each["path"][0] for each in self.document["programs"]} - {self.program["path"][0]}
        archives = [int(name) for folder, name in map(os.path.split, others) if folder == f"/proc/{os.getpid()}/fd"]
        for number in (*archives, self.document["stage"]["fd"], self.fd):
            with contextlib.suppress(OSError):
                os.close(number)
        with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:  # noqa: PTH123 - one word
            comm.write(NAME)

    def fall_back(self, error: BaseException) -> None:
        """Execute the previous program; return if there is no way back."""
        if self.committed or self.index + 1 >= len(self.document["programs"]):
            return
        signal.alarm(0)
        reason = f"{type(error).__name__}: {error}"[:LONGEST_REASON].encode("utf-8", "replace").decode()
        stage = self.document["stage"]
        for number in (self.fd, stage["fd"], *map(int, self.document["descriptors"])):
            os.set_inheritable(number, True)
        argv = stage_argv(stage, "resume", self.fd, self.index + 1, reason)
        os.execve(argv[0], argv, os.environ)

    def resume(self) -> int:
        """Become the program and return the status with which this process is to end."""
        within = self.program.get("within", COMMITTED_WITHIN)

        def too_late(_number: int, _frame: object) -> None:
            self.fall_back(TimeoutError(f"it has not taken everything over within {within} s"))

        try:
            signal.signal(signal.SIGALRM, too_late)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
            signal.alarm(within)
            status: int = self.import_program().resume(self)
        except BaseException as error:
            self.fall_back(error)
            raise
        return status


def main() -> int:
    """Carry out the command line."""
    mode, fd, index, reason = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    try:
        document = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
    except Exception:  # Python takes a package whose __init__.py it cannot look up for an empty one
        try_again()
        raise
    stage = FirstStage(fd, document, index, reason)
    if mode == "resume":
        return stage.resume()
    try:
        stage.import_program().rehearse(stage)
    except Exception as error:  # noqa: BLE001 - whatever it is, this program cannot go on
        sys.stdout.write(f"{type(error).__name__}: {error}"[:LONGEST_REASON] + "\n")
        sys.stdout.flush()
        return 1
    return 0


if __name__ == "__main__":
    os._exit(main())
