"""A CD image of a few small files in one directory: ISO 9660 with Rock Ridge names for Linux and Joliet names for Windows.

ECMA-119 (ISO 9660), the Rock Ridge Interchange Protocol (RRIP_1991A) over SUSP, and the Joliet specification. It is
a hundred lines of ours because pycdlib, which does all of the formats, costs PID 1 30 ms and 5 MB for this one.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

SECTOR = 2048
_PRIMARY_TABLES, _JOLIET_TABLES, _PRIMARY_ROOT, _JOLIET_ROOT, _FIRST_FILE = 19, 21, 23, 24, 25
"""Sectors; 0 to 15 belong to the system, then come the two volume descriptors and their terminator."""
_DATE = bytes((70, 1, 1, 0, 0, 0, 0))
"""The same for every image, so that equal files make equal images."""
_NO_DATE = b"0" * 16 + b"\0"
_DIRECTORY = 0o040755
_FILE = 0o100444
_JOLIET = b"%/E"
"""UCS-2 level 3."""


def image(label: str, files: Mapping[str, bytes]) -> bytes:
    """Return an image with *label* and *files* by name; equal files make equal images.

    Raises :exc:`ValueError` when the directory does not fit into one sector: some twenty files do.
    """
    contents = b""
    extents: dict[str, tuple[int, int]] = {}
    for name, content in files.items():
        extents[name] = (_FIRST_FILE + len(contents) // SECTOR, len(content))
        contents += _padded(content)
    primary = _directory(
        _PRIMARY_ROOT,
        [(_short(name, index), extents[name], _rock_ridge(name)) for index, name in enumerate(sorted(files))],
        _SUSP + _posix(_DIRECTORY),
        _posix(_DIRECTORY),
    )
    joliet = _directory(_JOLIET_ROOT, [(name.encode("utf-16-be"), extents[name], b"") for name in sorted(files)])
    sectors = _FIRST_FILE + len(contents) // SECTOR
    return b"".join(
        (
            bytes(16 * SECTOR),
            _descriptor(1, label.encode("ascii").ljust(32), b"", sectors, _PRIMARY_TABLES, _PRIMARY_ROOT),
            _descriptor(2, label.encode("utf-16-be").ljust(32, b"\0"), _JOLIET, sectors, _JOLIET_TABLES, _JOLIET_ROOT),
            _padded(b"\xffCD001\x01"),
            *_path_tables(_PRIMARY_ROOT),
            *_path_tables(_JOLIET_ROOT),
            primary,
            joliet,
            contents,
        )
    )


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % SECTOR)


def _both(number: int) -> bytes:
    """Return *number* as ISO 9660 has its 32-bit numbers, in both byte orders."""
    return struct.pack("<I", number) + struct.pack(">I", number)


def _both_short(number: int) -> bytes:
    return struct.pack("<H", number) + struct.pack(">H", number)


def _descriptor(kind: int, label: bytes, escape: bytes, sectors: int, tables: int, root: int) -> bytes:
    """Return a volume descriptor (ECMA-119, 8.4 and 8.5)."""
    blank = b" " if kind == 1 else b"\0"
    return _padded(
        bytes((kind,))
        + b"CD001\x01\0"
        + blank * 32
        + label
        + bytes(8)
        + _both(sectors)
        + escape.ljust(32, b"\0")
        + _both_short(1)  # volumes
        + _both_short(1)  # of which this is
        + _both_short(SECTOR)
        + _both(len(_path_table(root, "<")))
        + struct.pack("<II", tables, 0)
        + struct.pack(">II", tables + 1, 0)
        + _record(b"\0", (root, SECTOR), 2)
        + blank * (4 * 128 + 3 * 37)  # volume set, publisher, preparer, application; three file names
        + 4 * _NO_DATE
        + b"\x01\0"
    )


def _path_table(root: int, order: str) -> bytes:
    return struct.pack(f"{order}BBIHBB", 1, 0, root, 1, 0, 0)


def _path_tables(root: int) -> tuple[bytes, bytes]:
    return _padded(_path_table(root, "<")), _padded(_path_table(root, ">"))


def _directory(
    root: int, entries: list[tuple[bytes, tuple[int, int], bytes]], own: bytes = b"", parents: bytes = b""
) -> bytes:
    records = _record(b"\0", (root, SECTOR), 2, own) + _record(b"\1", (root, SECTOR), 2, parents)
    records += b"".join(_record(name, extent, 0, extra) for name, extent, extra in entries)
    if len(records) > SECTOR:
        raise ValueError(f"{len(entries)} files do not fit into one directory of {SECTOR} bytes")
    return _padded(records)


def _record(name: bytes, extent: tuple[int, int], flags: int, extra: bytes = b"") -> bytes:
    """Return a directory record (ECMA-119, 9.1)."""
    sector, size = extent
    body = _both(sector) + _both(size) + _DATE + bytes((flags, 0, 0)) + _both_short(1) + bytes((len(name),)) + name
    body += bytes(len(name) % 2 == 0)  # what follows begins at an even offset
    body += extra + bytes((len(body) + len(extra)) % 2)
    return bytes((len(body) + 2, 0)) + body


def _short(name: str, index: int) -> bytes:
    """Return a name that ISO 9660 itself allows; *index* keeps the order and makes it unique."""
    return f"{index:02}{''.join(letter for letter in name.upper() if letter.isalnum())[:6]}.;1".encode("ascii")


_SUSP = b"SP\x07\x01\xbe\xef\0" + b"ER\x12\x01\x0a\0\0\x01RRIP_1991A"


def _posix(mode: int) -> bytes:
    return b"PX\x24\x01" + _both(mode) + _both(1) + _both(0) + _both(0)


def _rock_ridge(name: str) -> bytes:
    encoded = name.encode("ascii")
    return _posix(_FILE) + b"NM" + bytes((5 + len(encoded), 1, 0)) + encoded
