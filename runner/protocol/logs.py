"""Lines of a log, for people or for machines: one format for both programs.

The message of a record is an :class:`~runner.base.events.Event`, which ends in its fields, ``QEMU is up pid=7 version=10.0.2``. In
text it is written as it stands; in JSON the name of the event and its fields are written apart.

Messages hold words of guests, pods and other programs. A message is one line, in which every character that is not printable is escaped: so
no message can forge a line or control its reader's terminal. Only a traceback has lines of its own.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from runner.base.errors import escaped
from runner.base.events import OTHER, Event, SharedEvent
from runner.base.values import frozen
from runner.kernel.line_reader import LineFramer
from runner.kernel.nonblocking_writer import NonBlockingWriter, dropped_message

LONGEST = 16 * 1024
"""Bytes of a console line in JSON; a longer one is split into several."""


@frozen
class LogTable:
    """A table, as the only argument of a message that ends in ``: %s``: one message for each line in text, data in JSON."""

    name: str
    """The name of the field that has *rows*."""
    rows: Sequence[Mapping[str, object]]
    lines: Sequence[str]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def text_lines(record: logging.LogRecord) -> bytes:
    """Return *record* for people: time (UTC), level and message; the lines of a traceback are indented below it."""
    moment = time.strftime("%H:%M:%S", time.gmtime(record.created))
    head = f"{moment}.{record.msecs:03.0f} {record.levelname.lower():7} "
    lines = [*_messages(record), *(f"  {line}" for line in _traceback(record))]
    return "".join(f"{head}{escaped(line)}\n" for line in lines).encode()


def _messages(record: logging.LogRecord) -> list[str]:
    match record.args:
        case (LogTable(lines=lines),):
            return [str(record.msg) % line for line in lines]
    return [record.getMessage()]


def json_line(record: logging.LogRecord) -> bytes:
    """Return *record* as one line of JSON: ``time`` (RFC 3339), ``stream``, ``event``, ``level``, ``logger``, ``message``, ``fields``."""
    message, fields = _split_fields(record)
    return _line(
        record.created,
        stream="event",
        event=record.msg.key if isinstance(record.msg, Event) else OTHER,
        level=record.levelname.lower(),
        logger=record.name,
        message="\n".join(map(escaped, (message, *_traceback(record)))),
        fields=fields,
    )


def _traceback(record: logging.LogRecord) -> list[str]:
    if not record.exc_info:
        return []
    import traceback

    return "".join(traceback.format_exception(record.exc_info[1])).splitlines()


def _split_fields(record: logging.LogRecord) -> tuple[str, dict[str, object]]:
    match record.msg, record.args:
        case Event(words=words), (LogTable(name=name, rows=rows),):
            return words.removesuffix(": %s"), {name: rows}
        case Event(words=words, fields=fields), tuple(arguments) if fields:
            pairs = [field.split("=") for field in fields.split()]
            before, after = arguments[: -len(pairs)], arguments[-len(pairs) :]
            return words % before, {
                name: value if isinstance(value, int | float) and conversion == "%d" else escaped(str(value))
                for (name, conversion), value in zip(pairs, after, strict=True)
            }
    return record.getMessage(), {}


def _line(moment: float, **values: object) -> bytes:
    whole = int(moment)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))
    # ASCII only: a guest's output may not be UTF-8, and half of a surrogate pair could not be written.
    return json.dumps({"time": f"{stamp}.{int((moment - whole) * 1e6):06}Z", **values}).encode() + b"\n"


def json_of_dropped(size: int) -> bytes:
    """Return the message about *size* dropped bytes as a line of JSON."""
    return json_line(logging.LogRecord(__name__, logging.WARNING, "", 0, SharedEvent.OUTPUT_DROPPED, (size,), None))


def open_output(fd: int, style: str) -> NonBlockingWriter:
    """Return a writer to *fd* whose message about dropped bytes has the format *style* (:data:`~runner.base.arguments.LOG_FORMATS`)."""
    return NonBlockingWriter(fd, json_of_dropped if style == "json" else dropped_message)


class LogHandler(logging.Handler):
    """Writes log records in one of :data:`~runner.base.arguments.LOG_FORMATS` by *write*, which never waits."""

    def __init__(self, write: Callable[[bytes], object], style: str) -> None:
        super().__init__()
        self._write = write
        self._line = json_line if style == "json" else text_lines

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        self._write(self._line(record))


class DroppingWriter(Protocol):
    """A writer that drops data for which it has no room, such as :class:`~runner.kernel.nonblocking_writer.NonBlockingWriter`."""

    @property
    def dropping(self) -> bool:
        """Tell whether a write would be dropped now."""

    def drop(self, size: int) -> None:
        """Count *size* bytes as dropped."""

    def write(self, data: bytes) -> None:
        """Write *data* or drop it."""


class JsonConsole:
    """Writes the output of a guest's serial console as lines of JSON, none of which can be taken for an event.

    The caller cuts the output into pieces of few lines (:func:`~runner.kernel.line_reader.pieces`): each piece is one step.
    """

    def __init__(self, writer: DroppingWriter) -> None:
        self._writer = writer
        self._lines = LineFramer(LONGEST, split=True)

    def write(self, data: bytes) -> None:
        """Write the lines that *data* completes; empty *data* ends the output.

        Consecutive empty lines become one object with their number, ``"lines": 3``, because 80 bytes of JSON for each byte of the guest
        would be an amplification. While the writer drops data, nothing is formatted.
        """
        self._lines.feed(data)
        if self._writer.dropping:
            self._writer.drop(len(self._lines.take_rest()))
            return
        moment = time.clock_gettime(time.CLOCK_REALTIME)
        empty = 0
        while (line := self._lines.next_line()) is not None:
            if line in {b"", b"\r"}:
                empty += 1
                continue
            self._write_empty(moment, empty)
            empty = 0
            self._write(moment, line)
        self._write_empty(moment, empty)
        if not data and self._lines:
            self._write(moment, self._lines.take_rest())

    @property
    def unfinished(self) -> bytes:
        """Return the bytes of an incomplete line, which were not written yet."""
        return self._lines.held

    def take_over(self, unfinished: bytes) -> None:
        """Continue the incomplete line of the previous program."""
        self._lines.feed(unfinished)

    def _write_empty(self, moment: float, count: int) -> None:
        if count == 1:
            self._write(moment, b"")
        elif count:
            self._writer.write(_line(moment, stream="console", message="", lines=count))

    def _write(self, moment: float, line: bytes) -> None:
        self._writer.write(_line(moment, stream="console", message=line.rstrip(b"\r").decode(errors="replace")))
