"""The pure parts of the emulated node, and its cache of artefacts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from tests.emulated_node import artefacts, cache, command
from tests.emulated_node.cache import Artefact, EmulatedNodeError
from tests.emulated_node.cpio import Entry, archive
from tests.emulated_node.madt import madt
from tests.emulated_node.shape import Shape

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a recipe's path below a folder of recipes, with an empty cache."""
    monkeypatch.setenv("RUNNER_NODE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "recipe.sh"
    path.write_text('# a comment\ncat input >"$OUT"; echo built\n')
    return path


def artefact(recipe: Path, content: bytes = b"1") -> Artefact:
    return Artefact("thing", str(recipe), {"input": content})


def test_a_built_artefact_is_kept(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = cache.fetch(artefact(recipe))
    assert first.read_bytes() == b"1"
    assert "building" in capfd.readouterr().err
    assert cache.fetch(artefact(recipe)) == first
    assert "building" not in capfd.readouterr().err


def test_a_changed_recipe_is_another_artefact(recipe: Path) -> None:
    first = artefact(recipe).key
    assert artefact(recipe, b"2").key != first
    recipe.write_text(recipe.read_text().replace("a comment", "another comment"))
    assert artefact(recipe).key == first
    recipe.write_text(recipe.read_text() + "true\n")
    assert artefact(recipe).key != first


def test_a_failed_build_says_why_and_leaves_nothing(recipe: Path) -> None:
    recipe.write_text('echo half >"$OUT"; echo "no space left"; exit 1')
    with pytest.raises(EmulatedNodeError, match="status 1:\nno space left"):
        cache.fetch(artefact(recipe))
    assert sorted(path.name for path in cache.directory().iterdir()) == ["thing.lock", "thing.log"]


def test_a_killed_build_leaves_no_partial_result(recipe: Path) -> None:
    recipe.write_text('echo half >"$OUT"; echo started; kill -KILL $PPID')
    code = "import sys; from pathlib import Path; from tests.emulated_node import cache\n"
    code += "cache.fetch(cache.Artefact('thing', sys.argv[1], {'input': b'1'}))"
    killed = subprocess.run([sys.executable, "-c", code, recipe], cwd=PROJECT, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    recipe.write_text('cat input >"$OUT"')
    built = cache.fetch(artefact(recipe))
    assert built.read_bytes() == b"1"
    assert sorted(path.name for path in cache.directory().iterdir()) == [built.name, "thing.lock", "thing.log"]


def test_a_missing_tool_is_named_with_its_package(recipe: Path) -> None:
    needy = Artefact("thing", str(recipe), {}, tools={"no-such-tool": "no-such-package", "sh": "dash"})
    with pytest.raises(EmulatedNodeError, match=r"apt-get install no-such-package$"):
        cache.fetch(needy)


def test_only_old_artefacts_of_other_recipes_go(recipe: Path) -> None:
    old, young = cache.fetch(artefact(recipe, b"old")), cache.fetch(artefact(recipe, b"young"))
    os.utime(old, (0, 0))
    cache.fetch(artefact(recipe, b"new"))
    assert not old.exists()
    assert young.exists()


def test_the_article_host_has_its_numbers() -> None:
    shape = Shape(cpus=128, numa_nodes=2)
    assert str(shape.numa_cpus(0)) == "0-31,64-95"
    assert str(shape.numa_cpus(1)) == "32-63,96-127"


@pytest.mark.parametrize(("cpus", "numa_nodes"), [(0, 1), (3, 1), (6, 2), (16, 0), (256, 2)])
def test_impossible_shapes_are_refused(cpus: int, numa_nodes: int) -> None:
    with pytest.raises(EmulatedNodeError):
        Shape(cpus=cpus, numa_nodes=numa_nodes)


@pytest.mark.parametrize(
    ("shape", "apic_ids"),
    [
        (Shape(cpus=8, numa_nodes=2), [0, 2, 4, 6, 1, 3, 5, 7]),
        (Shape(cpus=12, numa_nodes=2), [0, 2, 4, 8, 10, 12, 1, 3, 5, 9, 11, 13]),
        (Shape(cpus=2, numa_nodes=1), [0, 1]),
    ],
)
def test_the_cpu_table_lists_first_threads_first(shape: Shape, apic_ids: list[int]) -> None:
    table = madt(shape)
    assert sum(table) % 256 == 0
    assert int.from_bytes(table[4:8], "little") == len(table)
    found = []
    at = 44
    while at < len(table):
        kind, length = table[at], table[at + 1]
        if kind == 0:
            found.append(table[at + 3])
        at += length
    assert at == len(table)
    assert found == apic_ids


def test_every_cpu_is_on_one_numa_node() -> None:
    shape = Shape(cpus=48, numa_nodes=4)
    nodes = [shape.numa_cpus(numa_node) for numa_node in range(4)]
    assert sorted(cpu for node in nodes for cpu in node) == list(CpuSet(range(48)))


def test_cpio_reads_the_archives(tmp_path: Path) -> None:
    if shutil.which("cpio") is None:
        pytest.skip("cpio is missing")
    data = archive([Entry.directory("d"), Entry.file("d/f", b"content", mode=0o755), Entry.device("d/console", 5, 1)])
    listed = subprocess.run(["cpio", "-itv", "--quiet"], input=data, capture_output=True, check=True).stdout.decode()
    modes = [(line.split()[0], line.split()[-1]) for line in listed.splitlines()]
    assert modes == [("drwxr-xr-x", "d"), ("-rwxr-xr-x", "d/f"), ("crw-------", "d/console")]
    subprocess.run(["cpio", "-i", "--quiet", "d", "d/f"], input=data, cwd=tmp_path, check=True)
    assert (tmp_path / "d/f").read_bytes() == b"content"


def test_the_initial_root_begins_with_the_cpu_table() -> None:
    if shutil.which("busybox") is None:
        pytest.skip("busybox-static is missing")
    data = artefacts.initrd(Shape())
    assert b"kernel/firmware/acpi/apic.aml" in data[:1024]


def test_the_results_of_a_run_that_goes_on_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda _: "20000101-000000")
    long_one = command.new_run(tmp_path / "runs")
    ended = [tmp_path / "runs" / f"20000102-00000{number}" for number in range(command.KEPT_RUNS + 2)]
    for each in ended:
        each.mkdir()
    monkeypatch.setattr("time.strftime", lambda _: "20000103-000000")
    newest = command.new_run(tmp_path / "runs")
    left = {path.name for path in (tmp_path / "runs").iterdir()} - {"last"}
    assert left == {path.name for path in (long_one, *ended[3:], newest)}
    assert (tmp_path / "runs" / "last").resolve() == newest
