"""How the plan of a node is shown: as text, JSON and pictures."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree as ET

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.node_plan.node_plan import (
    NodePlan,
    WhatIf,
    fit_of,
)
from runner.node_plan.report.picture import MORE, owners_of, picture_lines
from runner.node_plan.report.svg import picture_svg
from runner.node_plan.report.text import node_json, runs_of
from tests.support.json_schemas import fitting
from tests.support.node_plans import (
    EPYC,
    GPU,
    HOSTS,
    STATIC,
    host,
    planned,
    pod,
    shown,
)

pytestmark = pytest.mark.kubelet_model


@pytest.mark.parametrize(
    ("pins", "runs"),
    [
        ((5,), ["0→5"]),
        ((1, 2, 3), ["0-2→1-3"]),
        ((1, 65, 2, 66, 3, 67, 4, 68), ["0,2..6→1-4", "1,3..7→65-68"]),
        ((1, 65, 2, 66), ["0,2→1-2", "1,3→65-66"]),
        ((9, 3, 7), ["0→9", "1→3", "2→7"]),
        ((0, 1, 2, 3, 64, 65, 66, 67), ["0-3→0-3", "4-7→64-67"]),
    ],
)
def test_pins_in_runs(pins: tuple[int, ...], runs: list[str]) -> None:
    assert list(runs_of(pins)) == runs


@given(st.lists(st.integers(0, 40), unique=True, min_size=1))
def test_runs_contain_every_pin_once(pins: list[int]) -> None:
    shown_pins: dict[int, int] = {}
    for run in runs_of(pins):
        vcpus, cpus = (_numbers(each) for each in run.split("→"))
        assert len(vcpus) == len(cpus)
        shown_pins |= dict(zip(vcpus, cpus, strict=True))
    assert shown_pins == dict(enumerate(pins))


def _numbers(text: str) -> list[int]:
    if ".." in text:
        first, rest = text.split(",")
        second, last = rest.split("..")
        return list(range(int(first), int(last) + 1, int(second) - int(first)))
    if "-" in text:
        first, last = text.split("-")
        return list(range(int(first), int(last) + 1))
    return [int(number) for number in text.split(",")]


def test_alternatives_are_a_table_if_it_is_narrow_enough() -> None:
    plan = planned(EPYC, pod("p", 40))
    other = WhatIf("topologyManagerPolicy=none", planned(EPYC, pod("p", 2)))
    plan = attrs.evolve(plan, what_if=(other, WhatIf("x=y", None, "no")))
    table = """
what if                     p           shared pool
as it is                    1-20,65-84  0,21-64,85-127
topologyManagerPolicy=none  1,65        0,2-64,66-127
x=y                         the kubelet would not start: no
"""
    assert table in shown(plan, 61)
    blocks = """
what if     as it is
            p: 1-20,65-84
            shared pool: 0,21-64,85-127
what if     topologyManagerPolicy=none
            p: 1,65
            shared pool: 0,2-64,66-127
what if     x=y
            the kubelet would not start: no
"""
    assert blocks in shown(plan, 50)


def test_json_is_plain_and_the_same_every_time() -> None:
    plan = planned(EPYC, pod("p", 40), pod("q", 400), topologyManagerPolicy="restricted")
    plan = attrs.evolve(plan, what_if=(WhatIf("x=y", None, "no"), WhatIf("y=z", plan)), fit=fit_of(2, None, plan))
    document: Any = fitting("node", node_json(plan))
    assert json.loads(json.dumps(document)) == document
    again = planned(EPYC, pod("p", 40), pod("q", 400), topologyManagerPolicy="restricted")
    assert node_json(again)["pods"] == document["pods"]
    first, second = document["pods"]
    assert first["containers"][0]["cpus"] == "1-20,65-84"
    assert first["containers"][0]["placement"]["pins"][:4] == [1, 65, 2, 66]
    assert (second["outcome"], second["reason"], second["containers"]) == ("rejected", "TopologyAffinityError", [])
    assert second["missing"][0]["wanted"] == 400
    assert document["what_if"][0] == {"name": "x=y", "refusal": "no", "pods": [], "after": None, "if_live": None}
    assert document["after"]["shared_pool"] == "0,21-64,85-127"


ALL_HOSTS = sorted(path.stem for path in HOSTS.glob("*.json"))


ROW = re.compile(r" +[0-9]+((-|\.\.)[0-9]+)?  ")


def cells(plan: NodePlan, width: int) -> Counter[str]:
    rows = [line[13:] for line in picture_lines(plan, width=width, colour=False) if ROW.match(line)]
    return Counter("".join(rows)) - Counter({" ": len("".join(rows))})


@pytest.mark.parametrize("name", ALL_HOSTS)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_cpu_is_in_the_picture_once_whatever_the_width(name: str, width: int) -> None:
    hardware = host(name)
    plan = planned(hardware, pod("a", 2), pod("b", 3))
    counted = cells(plan, width)
    assert counted == Counter({"A": 2, "B": 3, "#": 1, ".": len(hardware.cpus) - 6})
    rows = [line for line in picture_lines(plan, width=width, colour=False) if ROW.match(line)]
    assert max(map(len, rows)) <= width


def test_a_title_breaks_between_resources() -> None:
    lines = list(picture_lines(planned(EPYC, devices={GPU: {0: 4}}, **STATIC), width=80, colour=False))
    assert lines[:2] == [
        "NUMA node 0 (socket 0): 63 of 64 CPUs free, memory 18.7Gi of 18.7Gi free",
        "             hugepages-2Mi 108.5Gi of 108.5Gi free, nvidia.com/gpu 4 of 4 free",
    ]


def test_a_core_is_a_column_and_a_cache_is_a_group() -> None:
    rows = [line for line in picture_lines(planned(EPYC, pod("p", 4)), width=80, colour=False) if ROW.match(line)]
    assert rows[0] == "       0-31  #AA. .... .... .... .... .... .... ...."
    assert rows[1] == "      64-95  .AA. .... .... .... .... .... .... ...."


def test_unequal_cores_and_siblings_side_by_side() -> None:
    lines = list(picture_lines(planned(host("core-i9-13900k")), width=80, colour=False))
    assert lines[1:3] == ["      0..31  ........#...............", "      1..15  ........"]
    lines = list(picture_lines(planned(host("power9-2s")), width=80, colour=False))
    assert lines[1].split() == ["0..60", "#", *["."] * 15]


def test_owners_after_the_last_letter_have_a_sign_too() -> None:
    plan = planned(EPYC, *(pod(f"p{number}", 2) for number in range(30)))
    assert [owner.sign for owner in owners_of(plan)][24:28] == ["Y", "Z", MORE, MORE]
    assert cells(plan, 100)[MORE] == 8


def test_colours_change_nothing_but_colours() -> None:
    plan = planned(EPYC, pod("p", 40), pod("q", 8))
    plain = "\n".join(picture_lines(plan, width=80, colour=False))
    coloured = "\n".join(picture_lines(plan, width=80, colour=True))
    escapes = ("\x1b[2m", "\x1b[1;32m", "\x1b[1;36m", "\x1b[0m")
    for escape in escapes:
        assert escape in coloured
        coloured = coloured.replace(escape, "")
    assert coloured == plain


@pytest.mark.parametrize("name", ALL_HOSTS)
def test_an_svg_has_every_cpu_once_inside_its_frame(name: str) -> None:
    plan = planned(host(name), pod("a <&> b", 2), pod("c", 3))
    text = picture_svg(plan)
    assert text == picture_svg(plan)
    root = ET.fromstring(text)  # noqa: S314 - our own text
    space = "{http://www.w3.org/2000/svg}"
    titles = [title.text or "" for title in root.iter(f"{space}title")]
    cpus = [int(title.split()[1].rstrip(",")) for title in titles if title.startswith("CPU ")]
    assert sorted(cpus) == list(plan.hardware.online)
    assert sum(title.endswith(": a <&> b") for title in titles) == 2
    width, height = int(root.attrib["width"]), int(root.attrib["height"])
    places = list(_places(root, 0, 0))
    assert all(x >= 0 and x + w <= width and y >= 0 and y + h <= height for x, y, w, h in places)


def _places(element: ET.Element, x: int, y: int) -> Iterator[tuple[float, float, float, float]]:
    """Yield x, y, width and height of each rectangle of *element*."""
    moved = element.attrib.get("transform", "")
    if moved:
        right, down = moved.removeprefix("translate(").removesuffix(")").split()
        x, y = x + int(right), y + int(down)
    for child in element:
        if child.tag.endswith("rect"):
            here = {key: float(child.attrib.get(key, "0")) for key in ("x", "y", "width", "height")}
            yield x + here["x"], y + here["y"], here["width"], here["height"]
        yield from _places(child, x, y)


@given(st.lists(st.tuples(st.integers(1, 80), st.sampled_from(["1Gi", "20Gi", "300Gi"])), max_size=6))
@settings(max_examples=40)
def test_all_cpus_are_accounted_for_after_any_pods(asked: list[tuple[int, str]]) -> None:
    plan = planned(EPYC, *(pod(f"p{number}", *each) for number, each in enumerate(asked)), **STATIC)
    given_away = [container.cpus for each in plan.pods for container in each.containers]
    assert sum(map(len, given_away)) + len(plan.after.shared_pool) == len(EPYC.cpus)
    assert len(plan.pods) == len(asked)
    assert shown(plan)
    for each in plan.pods:
        assert each.explanation.admission.admitted == bool(each.containers)
