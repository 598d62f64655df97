"""Modules imported without the `__init__` of their package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runner.kernel.partial_imports import without_init


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a package whose `__init__` fails."""
    folder = tmp_path / "laden"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('executed')\n")
    (folder / "light.py").write_text("import laden\nVALUE = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return "laden"


def test_a_module_is_imported_and_the_package_is_not(package: str) -> None:
    with without_init(package):
        from laden.light import VALUE  # type: ignore[import-not-found] # made by the fixture
    assert VALUE == 7
    with pytest.raises(RuntimeError, match="executed"):
        __import__(package)


def test_a_package_that_was_imported_stays(package: str) -> None:
    there = sys.modules[package] = type(sys)(package)
    with without_init(package):
        assert sys.modules[package] is there
    assert sys.modules[package] is there


def test_a_missing_package_is_named() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'not_there'"), without_init("not_there"):
        pytest.fail("entered")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("runner.cli.run", {"pyroute2.netlink", "qemu.qmp.message", "asyncio"}),
        (
            "runner.kernel.network",
            {"asyncio", "multiprocessing", "pyroute2.ndb", "pyroute2.iproute", "pyroute2.config"},
        ),
    ],
)
def test_what_pid_1_does_not_import(module: str, absent: set[str]) -> None:
    """The whole of each package works afterwards, and has the modules that were imported before."""
    program = (
        f"import sys, {module}\n"
        f"print(sorted({absent!r} & set(sys.modules)))\n"
        "early = sys.modules.get('pyroute2.netlink')\n"
        "import pyroute2.netlink, qemu.qmp\n"
        "assert early in {None, sys.modules['pyroute2.netlink']}\n"
        "print(pyroute2.IPRoute.__name__, qemu.qmp.QMPClient.__name__)\n"
    )
    output = subprocess.run((sys.executable, "-c", program), check=True, capture_output=True, text=True).stdout
    assert output.splitlines() == ["[]", "IPRoute QMPClient"]
