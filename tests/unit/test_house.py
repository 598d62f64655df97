"""The house's import law, executed: which room may import which, and which doors only one module may use."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import runner.errors

PACKAGE = Path(runner.errors.__file__).parent
BASE = {"errors", "cpuset"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "cpuset": set(),
    "table": set(),
    "arguments": set(),
    "spec": BASE,
    "topology": BASE | {"spec"},
    "plan": BASE | {"spec", "topology"},
    "host": BASE | {"topology.hardware"},
    "instance": BASE | {"table", "spec", "topology", "plan", "host"},
    "console": BASE | {"host"},
    "planner": BASE | {"spec", "topology", "plan", "host"},
    "ctl": BASE | {"table", "host"},
    "controller": BASE | {"arguments", "topology", "host"},
    # What the kubelet's file says, and how groups are called, is asked where it is known.
    "inspection": BASE
    | {"table", "topology", "host"}
    | {f"controller.{module}" for module in ("kubelet", "machine", "reconcile")},
    "check": BASE | {"spec", "topology", "plan", "host", "instance", "controller.kubelet", "controller.machine"},
}
"""Room → the rooms of ours it may import besides itself; ``__main__`` may import everything."""

PURE = (
    {"errors", "cpuset", "table", "spec", "topology", "plan"}
    | {f"inspection.{module}" for module in ("receipt", "render", "rules", "sighting")}
    | {f"check.{module}" for module in ("finding", "kernel", "cpus", "devices", "servants", "report")}
)
EFFECTS = {
    "asyncio",
    "ctypes",
    "fcntl",
    "io",
    "multiprocessing",
    "os",
    "select",
    "shutil",
    "signal",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "trio",
}
"""What no pure room imports: it decides, it does not do."""

ONE_DOOR = {
    "subprocess": {"host.processes"},
    "socket": {"host", "controller"},
    "yaml": {"spec.yaml"},
    "runner.spec.yaml": {"planner"},
    "runner.planner": {"__main__"},
}
"""Module → the only modules (or rooms) of ours that may import it."""


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        yield name, path


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            if module == "runner" or (
                module.startswith("runner.") and (PACKAGE / module.removeprefix("runner.").replace(".", "/")).is_dir()
            ):
                yield from (f"{module}.{alias.name}" for alias in node.names)
            else:
                yield module


def within(name: str, places: set[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


MODULES = [pytest.param(name, path, id=name) for name, path in modules() if name != "__init__"]


@pytest.mark.parametrize(("name", "path"), MODULES)
def test_rooms_import_only_what_the_law_allows(name: str, path: Path) -> None:
    room = name.split(".", maxsplit=1)[0]
    if room == "__main__":
        return
    ours = {found.removeprefix("runner.") for found in imports(path) if found.startswith("runner.")}
    assert {found for found in ours if not within(found, MAY_IMPORT[room] | {room})} == set()


@pytest.mark.parametrize(("name", "path"), MODULES)
def test_pure_rooms_do_nothing(name: str, path: Path) -> None:
    if within(name, PURE):
        assert {found for found in imports(path) if found.split(".")[0] in EFFECTS} == set()


@pytest.mark.parametrize(("name", "path"), MODULES)
def test_each_kernel_interface_has_one_door(name: str, path: Path) -> None:
    for module, doors in ONE_DOOR.items():
        if not within(name, doors):
            assert not any(within(found, {module}) for found in imports(path)), f"{name} imports {module}"


@pytest.mark.parametrize(("name", "path"), MODULES)
def test_no_decision_looks_at_the_wall_clock(name: str, path: Path) -> None:
    """It may jump an hour either way; what waits uses trio's monotonic clock."""
    calls = {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert not {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow"} & calls, name
    assert "datetime" not in set(imports(path))


@pytest.mark.parametrize(("name", "path"), [(name, path) for name, path in modules() if path.name == "__init__.py"])
def test_init_files_are_empty(name: str, path: Path) -> None:
    assert path.read_text() == "", name


def test_the_law_sees_an_offender(tmp_path: Path) -> None:
    offender = tmp_path / "offender.py"
    offender.write_text(
        "import runner.plan.argv\nfrom runner.host import qmp\nfrom runner import spec\nimport os.path\n"
    )
    assert set(imports(offender)) == {"runner.plan.argv", "runner.host.qmp", "runner.spec", "os.path"}
    assert not within("plan.argv", MAY_IMPORT["host"] | {"host"})
