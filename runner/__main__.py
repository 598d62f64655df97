"""The program ``instance-runner``: argv → command → exit status. The only exit."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from runner.base.errors import RunnerError, Status, UsageError, escaped, explain
from runner.cli.commands import program_parser
from runner.cli.options import asks_for_json


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that *argv* names and return its exit status."""
    _prepare_standard_streams()
    _write_from_the_background()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        import_module("runner.base.completion").complete(program_parser(os.environ["COMP_LINE"].split()))
    words = _with_options(sys.argv[1:] if argv is None else argv)
    command = _command_of(words)
    status: int = Status.STOPPED  # also for a command whose reader stops reading
    try:
        status = _run_command(command, words)
        if command != "run":  # its status reports the guest's end, regardless of the output
            sys.stdout.flush()
    except RunnerError as error:
        _print_error(explain(error))
        status = _status_of(error, command)
    except BrokenPipeError:
        pass  # the reader has read enough
    except OSError as error:  # an error of the output has no file name
        named = isinstance(error.filename, (str, bytes))
        _print_error(
            f"cannot {f'use {os.fsdecode(error.filename)!r}' if named else 'write the output'}: {error.strerror}"
        )
        status = Status.FAILED if named else Status.USAGE
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    return int(status)


def _with_options(words: Sequence[str]) -> Sequence[str]:
    """Return *words* with ``--version`` for ``version``, and ``[COMMAND] --help`` for ``help [COMMAND]``."""
    match words:
        case ["version"]:
            return ["--version"]
        case ["help", *command]:
            return [*command, "--help"]
    return words


def _command_of(words: Sequence[str]) -> str:
    """Return the first word that is neither an option nor the value of ``--state-dir``, the only option there with a value."""
    value = False
    for word in words:
        if not value and not word.startswith("-"):
            return word
        value = not value and len(word) > len("--") and "--state-dir".startswith(word)  # as argparse abbreviates it
    return ""


def _status_of(error: RunnerError, command: str) -> Status:
    """Return the exit status for *error* in *command*: only ``run`` and ``try`` start guests, and a request of ``ctl`` is no spec."""
    if command in {"run", "try"} or error.status not in {Status.START_FAILED, Status.REFUSED}:
        return error.status
    return error.status if error.status is Status.REFUSED and command in {"plan", "check"} else Status.FAILED


def _run_command(command: str, words: Sequence[str]) -> int:
    try:
        arguments = program_parser({command}).parse_args(words)
    except SystemExit as ended:  # --help, --version
        return int(ended.code or 0)
    except UsageError as error:
        if asks_for_json(words):
            import_module("runner.cli.refusal").print_refusal(error)
        raise
    try:
        status: int = import_module(f"runner.cli.{arguments.command}").main(arguments)
    except RunnerError as error:
        if getattr(arguments, "json", False):
            import_module("runner.cli.refusal").print_refusal(error, arguments)
        raise
    return status


def _print_error(message: str) -> None:
    lines = "\n".join(f"instance-runner: {escaped(line)}" for line in message.split("\n"))
    with contextlib.suppress(OSError):  # the exit status reports it, too
        print(lines, file=sys.stderr, flush=True)


def _prepare_standard_streams() -> None:
    """Open /dev/null if descriptor 0, 1 or 2 is closed, so that no file of ours gets that number and is written to."""
    with contextlib.suppress(OSError):  # there is no /dev/null
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # noqa: PLR2004 - standard error
            os.set_inheritable(fd, True)
        os.close(fd)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:  # Python sets it to None if the descriptor was closed
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - a descriptor, open until the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale without arrows is no reason to fail
            stream.reconfigure(errors="backslashreplace")


def _write_from_the_background() -> None:
    """Let PID 1 write to a terminal with ``stty tostop`` from the background, and get EIO when it reads from one.

    These signals stop any other process (``__tty_check_change()`` in ``drivers/tty/tty_jobctrl.c``). The kernel does not stop PID 1, but
    restarts the write endlessly, and no other signal is handled meanwhile.
    """
    if os.getpid() == 1:
        for number in (signal.SIGTTOU, signal.SIGTTIN):
            signal.signal(number, signal.SIG_IGN)


def entry() -> None:
    """Run the program ``instance-runner``."""
    status = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    # The interpreter's own shutdown takes 20 to 30 ms of every stop, and everything this process held has been released already.
    os._exit(status)


if __name__ == "__main__":
    entry()
