"""One zip archive with the modules of a program, from which a renewed runner imports all of them (:mod:`zipimport`)."""

from __future__ import annotations

import os
import re
import struct
import sys
from collections.abc import Iterator
from importlib.util import MAGIC_NUMBER
from pathlib import PurePosixPath
from typing import Final
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

from runner.kernel.execution import seal
from runner.kernel.program_directory import check_owners, digest_of, files_of, require_digest

_BYTECODE: Final = re.compile(rf"(.*/|)__pycache__/([^/]+)\.{sys.implementation.cache_tag}\.pyc", re.DOTALL)


def write_archive(directory: PurePosixPath, digest: str, memory: int) -> None:
    """Write the modules in *directory*, unchanged since *digest* was taken, to the file in memory *memory*, and seal it.

    Raises :exc:`~runner.base.errors.RefusedError` unless the directory has this *digest* and only root may change it.
    """
    check_owners(directory)
    with open(memory, "wb", closefd=False) as file, ZipFile(file, "w") as archive:
        require_digest(digest_of(_added(archive, directory)), digest, directory)
    seal(memory)


def _added(archive: ZipFile, directory: PurePosixPath) -> Iterator[tuple[str, bytes]]:
    """Yield the files in *directory*, and add its modules to *archive*: as bytecode, or as source where the bytecode is stale."""
    sources: dict[str, bytes] = {}
    for name, content in files_of(directory):
        yield name, content
        if match := _BYTECODE.fullmatch(name):
            source = f"{match[1]}{match[2]}.py"
            if _is_current(content, directory / source):
                sources.pop(source, None)
                _add(archive, f"{source}c", content)
        elif name.endswith(".py") and f"{name}c" not in archive.NameToInfo:
            sources[name] = content
    for name, content in sources.items():
        _add(archive, name, content)


def _is_current(bytecode: bytes, source: PurePosixPath) -> bool:
    try:
        status = os.stat(source)  # noqa: PTH116 - a pure path
    except FileNotFoundError:
        return False
    # The flags say that it is never compared with its source, or is followed by the source's time and size (PEP 552).
    age = struct.pack("<III", 0, int(status.st_mtime) & 0xFFFFFFFF, status.st_size)
    return bytecode.startswith((MAGIC_NUMBER + struct.pack("<I", 1), MAGIC_NUMBER + age))


def _add(archive: ZipFile, name: str, content: bytes) -> None:
    for above in PurePosixPath(name).parents[:-1]:
        if f"{above}/" not in archive.NameToInfo:  # needed to find a package without `__init__`
            archive.writestr(ZipInfo(f"{above}/"), b"")
    # Modules that this program has imported are stored uncompressed: the next program imports them as well, and PID 1 does nothing else
    # meanwhile. The others, which it may import later, are compressed, because the archive takes memory for as long as that program runs.
    imported = name.rpartition(".")[0].removesuffix("/__init__").replace("/", ".") in sys.modules
    archive.writestr(ZipInfo(name), content, ZIP_STORED if imported else ZIP_DEFLATED, compresslevel=1)
