"""Lines of a log, for people or for machines: one format for both programs.

Sentences of ours end in their fields, ``QEMU is up pid=7 version=10.0.2``. People read them as they stand; machines get
the fields taken apart again by the sentence's template, so that no call names them twice.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable

FORMATS = ("text", "json")

LONGEST = 16 * 1024
"""Bytes of a console line in JSON; a longer one is cut into several."""

_CONVERSION = r"%[-#0 +]*[0-9]*(?:\.[0-9]+)?[a-zA-Z]"
_FIELDS = rf"((?: \w+={_CONVERSION}[a-z]*)+)$"
_FIELD = rf" (\w+)=({_CONVERSION})[a-z]*"
"""Compiled when they are first used: in text they never are, and compiling them takes a millisecond."""


def text_lines(record: logging.LogRecord) -> bytes:
    """Return *record* for people: time (UTC), level and sentence, for each line of it."""
    moment = time.strftime("%H:%M:%S", time.gmtime(record.created))
    head = f"{moment}.{record.msecs:03.0f} {record.levelname.lower():7} "
    return "".join(f"{head}{line}\n" for line in _said(record).splitlines()).encode(errors="backslashreplace")


def json_line(record: logging.LogRecord) -> bytes:
    """Return *record* as one line of JSON: ``time`` (RFC 3339), ``stream``, ``level``, ``logger``, ``message``, ``fields``."""
    message, fields = _taken_apart(record)
    return _line(
        record.created,
        stream="event",
        level=record.levelname.lower(),
        logger=record.name,
        message=message,
        fields=fields,
    )


def _said(record: logging.LogRecord) -> str:
    message = record.getMessage()
    if record.exc_info:
        import traceback

        message += "\n" + "".join(traceback.format_exception(record.exc_info[1]))
    return message


def _taken_apart(record: logging.LogRecord) -> tuple[str, dict[str, object]]:
    template, arguments = str(record.msg), record.args
    found = re.search(_FIELDS, template, re.ASCII)
    if found is None or not isinstance(arguments, tuple):
        return _said(record), {}
    pairs = re.findall(_FIELD, found[1], re.ASCII)
    before, after = arguments[: -len(pairs)], arguments[-len(pairs) :]
    fields: dict[str, object] = {
        name: value if isinstance(value, int | float) and conversion == "%d" else str(value)
        for (name, conversion), value in zip(pairs, after, strict=True)
    }
    text = template[: found.start()]
    return text % before if before else text.replace("%%", "%"), fields


def _line(moment: float, **values: object) -> bytes:
    whole = int(moment)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))
    # ASCII alone: what a guest says may not be UTF-8, and a half of a surrogate pair could not be written.
    return json.dumps({"time": f"{stamp}.{int((moment - whole) * 1e6):06}Z", **values}).encode() + b"\n"


def json_of_dropped(size: int) -> bytes:
    """Return what a reader that is back is told of *size* bytes he has missed, as a line of JSON."""
    message = "output was dropped: nobody was reading"
    now = time.clock_gettime(time.CLOCK_REALTIME)
    return _line(now, stream="event", level="warning", logger=__name__, message=message, fields={"bytes": size})


class LogHandler(logging.Handler):
    """Writes what is logged, in one of :data:`FORMATS`, by *write*, which never waits."""

    def __init__(self, write: Callable[[bytes], object], style: str) -> None:
        super().__init__()
        self._write = write
        self._line = json_line if style == "json" else text_lines

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        self._write(self._line(record))


class JsonConsole:
    """Writes what a guest says on its serial console as lines of JSON, which nothing it says can be taken for an event."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._rest = b""

    def write(self, data: bytes) -> None:
        """Write the lines that *data* completes; without data it was the last."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        lines = [line[at : at + LONGEST] for line in whole for at in range(0, len(line) or 1, LONGEST)]
        while len(self._rest) > LONGEST or (self._rest and not data):
            lines.append(self._rest[:LONGEST])
            self._rest = self._rest[LONGEST:]
        now = time.clock_gettime(time.CLOCK_REALTIME)
        for line in lines:
            self._write(_line(now, stream="console", message=line.rstrip(b"\r").decode(errors="replace")))
