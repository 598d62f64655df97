"""The client of ``ctl qmp``: QMP commands to a running instance, one at a time or from a prompt.

It uses the asyncio client of ``qemu.qmp`` on the instance's own QMP socket, which decides what an operator may execute
(:mod:`runner.instance.control.qmp_rules`).
"""

from __future__ import annotations

import asyncio
import json
import readline
import shlex
import sys
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from qemu.qmp import EventListener, ExecInterruptedError, ExecuteError, QMPClient, QMPError

from runner.base.errors import HostError, RefusedError, RunnerError, UsageError, explain
from runner.cli.options import parse_pairs
from runner.cli.unanswered import ANSWERED_WITHIN, unanswered
from runner.kernel.sockets import QMP_SOCKET, connected

T = TypeVar("T")

PROMPT = "(qmp) "
HELP = """\
COMMAND                        query-status
COMMAND KEY=VALUE ...          qom-list path=/machine
COMMAND '{"KEY": VALUE, ...}'  qom-get '{"path": "/machine", "property": "type"}'

A VALUE is JSON, or text. Tab completes commands, the arrow keys bring earlier lines back.
help shows this, exit or Ctrl-D ends. Events are shown after the next command."""


def run(state_directory: Path, words: Sequence[str], *, shell: bool) -> None:
    """Execute the command in *words* and print its result; with *shell*, execute typed commands instead.

    Raises :exc:`~runner.base.errors.RunnerError` when no instance listens, or the command is refused.
    """
    if shell == bool(words):
        raise UsageError("cannot tell what to execute: name a QMP command, or --shell without one")
    with Connection(state_directory) as connection:
        if shell:
            _Shell(connection).read_all()
        else:
            print(_shown(connection.execute(*parse_words(words))))


class Connection:
    """A QMP connection to the instance whose *state_directory* this is; its event loop runs only during a call."""

    def __init__(self, state_directory: Path, within: float = ANSWERED_WITHIN) -> None:
        self._directory = state_directory
        self._within = within
        """Time limit of each call, in seconds."""
        self._client = QMPClient("instance")
        self._events = EventListener()
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        self._client.register_listener(self._events)
        try:
            with connected(self._directory, QMP_SOCKET, self._within) as connection:
                self._run(self._client.connect(connection.dup()))
        except BlockingIOError:
            self._runner.close()
            raise unanswered(self._within) from None
        except QMPError as error:
            self._runner.close()
            raise HostError(
                "cannot talk to the instance: it sends no QMP greeting",
                remedy="only root in the instance's own PID namespace may ask, and four clients at once",
            ) from error
        except BaseException:
            self._runner.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._run(self._client.disconnect())
        except (QMPError, HostError, OSError, EOFError):
            pass  # the instance has ended, and with it the connection
        finally:
            self._runner.close()

    def execute(self, command: str, arguments: Mapping[str, object] | None = None) -> object:
        """Return the result of *command*. Raises :exc:`~runner.base.errors.RunnerError`."""
        try:
            return self._run(self._client.execute(command, arguments))
        except ExecuteError as error:
            description = str(error)
            raise RefusedError(
                description if description.startswith("cannot ") else f"cannot execute {command!r}: {description}"
            ) from None
        except (ExecInterruptedError, QMPError, OSError, EOFError) as error:
            raise HostError(f"cannot execute {command!r}: the instance hung up") from error

    def _run(self, act: Coroutine[Any, Any, T]) -> T:
        """Return the result of *act*. Raises :exc:`~runner.base.errors.HostError` if it takes too long."""
        try:
            return self._runner.run(asyncio.wait_for(act, self._within))
        except TimeoutError:
            raise unanswered(self._within) from None

    def events(self) -> Iterator[Mapping[str, object]]:
        """Yield the events received since the last call."""
        yield from self._events.clear()


def parse_words(words: Sequence[str]) -> tuple[str, dict[str, object] | None]:
    """Return the command and its arguments, given as one JSON object or as ``key=value`` with JSON or text as values.

    Raises :exc:`~runner.base.errors.UsageError`.
    """
    command, *rest = words
    if not rest:
        return command, None
    if rest[0].startswith("{"):
        return command, _parsed_object(" ".join(rest))
    return command, parse_pairs(rest, _parsed_value, "arguments are one JSON object, or each given once as key=value")


def _parsed_object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"cannot understand {text!r}: it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"cannot understand {text!r}: arguments are a JSON object")
    return value


def _parsed_value(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _shown(value: object) -> str:
    return json.dumps(value, indent=1)


class _Shell:
    """A prompt for commands."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._names: list[str] = []

    def read_all(self) -> None:
        """Execute every line of standard input, until its end or ``exit``."""
        listed = self._connection.execute("query-commands")
        self._names = sorted(str(each["name"]) for each in listed) if isinstance(listed, list) else []
        terminal = sys.stdin.isatty()
        with self._completing():
            while True:
                try:
                    words = shlex.split(input(PROMPT if terminal else ""))
                except EOFError:
                    return
                except KeyboardInterrupt:  # discards the line, as a shell does
                    print()
                    continue
                except ValueError as error:
                    print(f"cannot understand the line: {error}")
                    continue
                if words == ["exit"]:
                    return
                if words:
                    self._do(words)

    def _do(self, words: Sequence[str]) -> None:
        """Execute a line. Raises :exc:`~runner.base.errors.HostError` when the connection is over."""
        try:
            print(HELP if words == ["help"] else _shown(self._connection.execute(*parse_words(words))))
        except HostError:
            raise
        except RunnerError as error:
            print(explain(error))
        for event in self._connection.events():
            print(_shown(dict(event)))

    @contextmanager
    def _completing(self) -> Iterator[None]:
        before = readline.get_completer()
        readline.set_completer(self._completion)
        readline.set_completer_delims(" ")
        readline.parse_and_bind("tab: complete")
        try:
            yield
        finally:
            readline.set_completer(before)

    def _completion(self, text: str, number: int) -> str | None:
        """Return the *number*-th completion of *text*: only commands, at the beginning of the line."""
        if readline.get_begidx() > 0:
            return None
        fitting = [f"{name} " for name in (*self._names, "help", "exit") if name.startswith(text)]
        return fitting[number] if number < len(fitting) else None
