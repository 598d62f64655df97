"""The archive of a program that a runner is renewed by."""

from __future__ import annotations

import os
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from py_compile import PycInvalidationMode
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import pytest

from runner.base.errors import RefusedError
from runner.kernel.execution import memory
from runner.kernel.program_archive import write_archive
from runner.kernel.program_directory import MOST_BYTES, digest_of, files_of

BYTECODE = f"{sys.implementation.cache_tag}.pyc"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program"
    path.mkdir(mode=0o755)
    return path


@pytest.fixture
def archive() -> Iterator[int]:
    with memory("program") as fd:
        yield fd


def add(program: Path, name: str, text: str, mode: PycInvalidationMode | None = None) -> Path:
    """Add the module *name*, with bytecode of this *mode*."""
    path = program / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if mode is not None:
        py_compile.compile(str(path), doraise=True, invalidation_mode=mode)
    subprocess.run(["chmod", "-R", "go-w", program], check=True)
    return path


def archived(program: Path, archive: int) -> list[str]:
    """Return the names in the archive of *program*."""
    path = PurePosixPath(program)
    write_archive(path, digest_of(files_of(path)), archive)
    with ZipFile(f"/proc/self/fd/{archive}") as found:
        return found.namelist()


def printed(archive: int, statement: str) -> str:
    """Return what an isolated interpreter prints that imports from the *archive* alone."""
    code = f"import sys; sys.path.insert(0, '/proc/{os.getpid()}/fd/{archive}'); {statement}"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", code], check=True, capture_output=True, text=True
    ).stdout


def test_a_program_is_imported_from_it_when_its_directory_has_gone(program: Path, archive: int) -> None:
    """One package has no ``__init__``."""
    add(program, "package/inner/module.py", "print(__name__)\n", PycInvalidationMode.UNCHECKED_HASH)
    add(program, "data.txt", "of no use to the importer\n")
    assert archived(program, archive) == ["package/inner/", "package/", "package/inner/module.pyc"]
    shutil.rmtree(program)
    assert printed(archive, "import package.inner.module") == "package.inner.module\n"


def test_it_is_sealed(program: Path, archive: int) -> None:
    add(program, "module.py", "")
    archived(program, archive)
    for change in (
        lambda: os.write(archive, b"x"),
        lambda: os.ftruncate(archive, 0),
        lambda: os.ftruncate(archive, 9999),
    ):
        with pytest.raises(PermissionError):
            change()


@pytest.mark.parametrize(
    ("mode", "older", "name"),
    [
        (PycInvalidationMode.TIMESTAMP, False, "module.pyc"),
        (PycInvalidationMode.TIMESTAMP, True, "module.py"),
        (PycInvalidationMode.UNCHECKED_HASH, True, "module.pyc"),
        (PycInvalidationMode.CHECKED_HASH, False, "module.py"),
        (None, False, "module.py"),
    ],
)
def test_bytecode_is_taken_where_the_interpreter_would_take_it(
    program: Path, archive: int, mode: PycInvalidationMode | None, name: str, *, older: bool
) -> None:
    path = add(program, "module.py", "print('written')\n", mode)
    if older:
        os.utime(path, (0, 0))
    assert archived(program, archive) == [name]
    assert printed(archive, "import module") == "written\n"


def test_bytecode_of_another_interpreter_is_not_taken(program: Path, archive: int) -> None:
    add(program, "module.py", "print('written')\n", PycInvalidationMode.UNCHECKED_HASH)
    bytecode = program / f"__pycache__/module.{BYTECODE}"
    bytecode.write_bytes(b"\0\0\r\n" + bytecode.read_bytes()[4:])
    assert archived(program, archive) == ["module.py"]


def test_what_this_program_has_not_imported_is_compressed(program: Path, archive: int) -> None:
    add(program, "trio/__init__.py", "")
    add(program, "never_imported.py", "")
    archived(program, archive)
    with ZipFile(f"/proc/self/fd/{archive}") as found:
        kinds = {each.filename: each.compress_type for each in found.infolist() if not each.is_dir()}
    assert kinds == {"trio/__init__.py": ZIP_STORED, "never_imported.py": ZIP_DEFLATED}


def test_another_digest_is_refused(program: Path, archive: int) -> None:
    add(program, "module.py", "")
    with pytest.raises(RefusedError, match="its digest is sha256:"):
        write_archive(PurePosixPath(program), "sha256:0", archive)


def test_a_directory_that_is_too_large_is_refused(program: Path, archive: int) -> None:
    os.truncate(add(program, "data", ""), MOST_BYTES)
    add(program, "module.py", "1")
    with pytest.raises(RefusedError, match="it has more than"):
        archived(program, archive)
