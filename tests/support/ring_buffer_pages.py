"""Pages of the trace ring buffer as the kernel writes them (``include/linux/ring_buffer.h``)."""

from __future__ import annotations

import struct

from runner.kernel.ring_buffer import EventFormat

SIZE = 4096


def page(time: int, *events: bytes, flags: int = 0) -> bytes:
    """Return a page that begins at *time*, in nanoseconds, with *events*."""
    content = b"".join(events)
    return (struct.pack("=QQ", time, len(content) | flags) + content).ljust(SIZE, b"\0")


def head(kind: int, delta: int) -> bytes:
    """Return the first word of an event: its type or length in words, and the time since the event before."""
    return struct.pack("=I", delta << 5 | kind)


def event(delta: int, form: EventFormat, text: bytes = b"", **values: int | bytes) -> bytes:
    """Return an event with these *values* of its fields, and with *text*, a string that has a ``__data_loc``, behind them."""
    content = bytearray(max(offset + size for offset, size in form.fields.values()))
    content[:2] = struct.pack("=H", form.number)
    for name, value in values.items():
        offset, size = form.fields[name]
        content[offset : offset + size] = (
            value.ljust(size, b"\0") if isinstance(value, bytes) else value.to_bytes(size, "little")
        )
    content += text + b"\0" * (-len(text) % 4)
    return head(len(content) // 4, delta) + bytes(content)
