"""Pages of the kernel's trace ring buffer (``Documentation/trace/ring-buffer-design.rst``, ``kernel/trace/ring_buffer.c``).

``trace_pipe_raw`` gives whole pages: half the bytes of the text of ``trace_pipe``, times in nanoseconds instead of
microseconds, names as they are, and a flag where events were lost.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping

from runner.base.errors import HostError
from runner.base.values import frozen

_PAGE_HEADER = struct.Struct("=QQ")
"""``struct buffer_data_page``: the time of the page in nanoseconds, and how many bytes of it are committed."""
_COMMITTED = (1 << 30) - 1
_MISSED_EVENTS = 1 << 31
"""``RB_MISSED_EVENTS`` in the committed size: events before this page were lost."""
_WORD = struct.Struct("=I")
_TIME_BITS = 27
"""``struct ring_buffer_event``: the type or length in 5 bits, the time since the event before in 27."""
_PADDING, _TIME_EXTEND, _TIME_STAMP = 29, 30, 31
_STAMP_BITS = (1 << 59) - 1
"""The bits of a time that a ``TIME_STAMP`` holds; the higher ones are those of the page's time."""
_HEADER_FIELD = re.compile(r"field: .*\bdata;\toffset:([0-9]+);\tsize:([0-9]+);", re.ASCII)
_ID = re.compile(r"^ID: ([0-9]+)$", re.ASCII | re.MULTILINE)
_FIELD = re.compile(r"field:[^;]*?(\w+)(?:\[\w*\])?;\toffset:([0-9]+);\tsize:([0-9]+);", re.ASCII)


@frozen
class EventFormat:
    """The layout of an event's record, from its ``format`` file."""

    number: int
    """The ``common_type`` that its records begin with."""
    fields: Mapping[str, tuple[int, int]]
    """Name of a field → its offset and size in bytes."""

    def record(self, **codes: str) -> struct.Struct:
        """Return the layout of the record up to the last of the fields in *codes*, each with its code of :mod:`struct`.

        The first value is the number of the event. Raises :class:`HostError` when the kernel has no such field, or one of
        another size.
        """
        at, layout = 2, "=H"
        for name, code in sorted(codes.items(), key=lambda item: self.fields.get(item[0], (0, 0))):
            offset, size = self.fields.get(name, (0, 0))
            if size != struct.calcsize(f"={code}"):
                raise HostError(
                    f"cannot read the trace: the kernel's event {self.number} has no field {name!r} as expected"
                )
            layout += f"{offset - at}x{code}"
            at = offset + size
        return struct.Struct(layout)


def parse_format(text: str) -> EventFormat:
    """Parse the ``format`` file of an event. Raises :class:`HostError` for another text."""
    number = _ID.search(text)
    if number is None:
        raise HostError("cannot read the trace: the format of an event has no ID")
    return EventFormat(int(number[1]), {name: (int(at), int(size)) for name, at, size in _FIELD.findall(text)})


def parse_page_size(text: str) -> int:
    """Return the size of a page from ``events/header_page``.

    Raises :class:`HostError` when its header is not that of a 64-bit kernel, which :func:`records` expects.
    """
    data = _HEADER_FIELD.search(text)
    if data is None or int(data[1]) != _PAGE_HEADER.size:
        raise HostError("cannot read the trace: the kernel's ring buffer has pages of an unknown layout")
    return _PAGE_HEADER.size + int(data[2])


def has_missed_events(page: bytes) -> bool:
    """Tell whether events were lost between the page before and *page*."""
    committed: int = _PAGE_HEADER.unpack_from(page)[1]
    return bool(committed & _MISSED_EVENTS)


def records(page: bytes) -> Iterator[tuple[int, int]]:
    """Yield the time in nanoseconds and the offset in *page* of each record."""
    time, committed = _PAGE_HEADER.unpack_from(page)
    at, end = _PAGE_HEADER.size, min(_PAGE_HEADER.size + (committed & _COMMITTED), len(page))
    while at < end:
        (head,) = _WORD.unpack_from(page, at)
        kind, delta = head & 31, head >> 5
        at += _WORD.size
        if kind == _PADDING and delta == 0:  # the rest of the page is empty
            return
        if kind == _TIME_STAMP:
            time = (time & ~_STAMP_BITS) | ((_WORD.unpack_from(page, at)[0] << _TIME_BITS) + delta)
            at += _WORD.size
            continue
        if kind == _TIME_EXTEND:
            time += (_WORD.unpack_from(page, at)[0] << _TIME_BITS) + delta
            at += _WORD.size
            continue
        time += delta
        if kind == _PADDING:  # an event that was discarded: its length in bytes includes the word that holds it
            at += _WORD.unpack_from(page, at)[0]
        elif kind:
            yield time, at
            at += kind * _WORD.size
        else:
            yield time, at + _WORD.size
            at += _WORD.unpack_from(page, at)[0]
