from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from runner.base.cpuset import CpuSet
from runner.base.errors import SpecError
from runner.facts.hardware import Hardware

HOSTS = Path(__file__).parents[2] / "data/hosts"
RECORDS = sorted(HOSTS.glob("*.json"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_a_record_is_read_and_written_back_the_same(record: Path) -> None:
    text = record.read_text()
    assert Hardware.from_json(text).to_json() == text


def test_the_records_are_what_the_generator_makes() -> None:
    hosts = runpy.run_path(str(HOSTS / "generate.py"))["HOSTS"]
    assert {path.stem for path in RECORDS} == set(hosts)
    for name, host in hosts.items():
        assert (HOSTS / f"{name}.json").read_text() == host().to_json(), name


def test_a_dual_epyc() -> None:
    host = Hardware.from_json((HOSTS / "epyc-7543-2s-nps1.json").read_text())
    assert host.online == CpuSet.parse("0-127")
    assert host.siblings(70) == CpuSet.parse("6,70")
    assert host.cpus_of_numa_node == {0: CpuSet.parse("0-31,64-95"), 1: CpuSet.parse("32-63,96-127")}
    assert host.distance(0, 1) == 32


def test_memory_only_numa_nodes_have_no_cpus() -> None:
    host = Hardware.from_json((HOSTS / "epyc-9754-2s-nps4-cxl.json").read_text())
    assert [len(cpus) for cpus in host.cpus_of_numa_node.values()] == [64] * 8 + [0] * 8
    assert (host.distance(0, 8), host.distance(0, 12), host.distance(9, 13)) == (50, 70, 90)


def vm() -> Any:
    return json.loads((HOSTS / "vm-8.json").read_text())


def problems(document: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        Hardware.from_json(json.dumps(document), "host.json")
    return str(caught.value).splitlines()


def changed(document: Any, path: tuple[str | int, ...], value: object) -> Any:
    """Return *document* with *value* at *path*."""
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("offline",), 7, 'offline: must be a string, found 7; write it in quotes: "7"'),
        (("numa",), "no", "numa: must be true or false, found 'no'"),
        (("memory",), 2**63, "memory: must be a whole number up to 9223372036854775807"),
        (("cpus", 3, "core"), -1, "cpus[3].core: must be a whole number, found -1"),
        (("cpus", 3, "core"), 8192, "cpus[3].core: must be a whole number up to 8191"),
        (("cpus", 4, "colour"), "red", "cpus[4].colour: is not known"),
        (("cpus", 5, "numa_node"), None, "cpus[5].numa_node: must be a whole number, found None"),
        (("cpus", 6, "kind"), "fast", "cpus[6].kind: must be one of performance, efficiency, found 'fast'"),
        (
            ("numa_nodes", 0, "hugepages", 0, "free"),
            "all",
            "numa_nodes[0].hugepages[0].free: must be a whole number, found 'all'",
        ),
        (("numa_nodes", 0, "distances"), None, "numa_nodes[0].distances: must be a list, found None"),
    ],
)
def test_a_malformed_value_is_named_by_its_path(path: tuple[str | int, ...], value: object, problem: str) -> None:
    assert problems(changed(vm(), path, value)) == [f"host.json: {problem}"]


@pytest.mark.parametrize("size", [0, 512, 3 << 20])
def test_a_size_that_no_huge_page_has_is_reported(size: int) -> None:
    document = vm()
    document["numa_nodes"][0]["hugepages"][0]["size"] = size
    message = f"must be a power of two from 1024, found {size}"
    assert problems(document) == [f"host.json: numa_nodes[0].hugepages[0].size: {message}"]


def test_impossible_values_are_reported() -> None:
    document = vm()
    document["offline"] = "7-8"
    document["cpus"][1]["cpu"] = 0
    document["cpus"][2]["numa_node"] = 4
    document["cpus"][3]["core"] = 2
    document["cpus"][5]["core"] = 6
    document["numa_nodes"][0]["distances"] = [10, 20]
    assert problems(document) == [
        "host.json: cpus[1]: CPU 0 is repeated",
        "host.json: offline: CPU 7 cannot be both online and offline",
        "host.json: cpus[1].core: must be the lowest CPU of the core, 0, found 1",
        "host.json: cpus[2].numa_node: there is no NUMA node 4",
        "host.json: cpus[3].core: core 2 is on another socket, die or NUMA node than its CPU 2",
        "host.json: cpus[5].core: must be the lowest CPU of the core, 5, found 6",
        "host.json: numa_nodes[0].distances: must hold one distance for each NUMA node, found 2 for 1 NUMA nodes",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "host.json: is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[]", "host.json: must be an object, found []"),
        ('{"format": 2, "cpus": [], "numa_nodes": []}', "host.json: format: must be 1, found 2"),
        ('{"format": 1, "cpus": [], "numa_nodes": []}', "host.json: cpus: must hold at least one online CPU"),
        ('{"format": 1, "cpus": [7], "numa_nodes": []}', "host.json: cpus[0]: must be an object, found 7"),
    ],
)
def test_a_malformed_record_is_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        Hardware.from_json(text, "host.json")
    assert str(caught.value) == message
