"""The picture of a node for a browser: what its shapes and texts stand for."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from runner.node_plan.node_plan import NodePlan
from runner.node_plan.report.svg import DARK, FILLS, LIGHT, picture_svg
from tests.support.node_plans import EPYC, STATIC, host, planned, pod

pytestmark = pytest.mark.kubelet_model

SVG = "{http://www.w3.org/2000/svg}"


def root_of(plan: NodePlan) -> ET.Element:
    return ET.fromstring(picture_svg(plan))  # noqa: S314 - our own text


def texts(plan: NodePlan) -> list[str]:
    return [element.text or "" for element in root_of(plan).iter(f"{SVG}text")]


def test_a_key_says_what_column_row_gap_and_bar_are() -> None:
    key = " ".join(texts(planned(EPYC, **STATIC))[-2:])
    assert key == (
        "A column is a core, its rows are the core's threads, with the number of each CPU. A wider gap stands between cores of "
        "different L3 caches. A bar is memory or huge pages: reserved for the system, given to containers, free. The pointer shows "
        "a CPU's owner."
    )
    assert "A bar" not in " ".join(texts(planned(EPYC)))


def test_the_policies_are_there() -> None:
    assert (
        "kubelet 1.36: CPU Manager static, Memory Manager Static, Topology Manager restricted (scope container)"
        in texts(planned(EPYC, **{**STATIC, "topologyManagerPolicy": "restricted"}))
    )


def test_pods_without_cpus_of_their_own_are_in_the_legend() -> None:
    plan = planned(EPYC, pod("large", 200), pod("half", "500m"), topologyManagerPolicy="restricted")
    shown = " ".join(texts(plan))
    assert "large: rejected: TopologyAffinityError: Resources cannot be allocated with Topology locality" in shown
    assert "half: in the shared pool" in shown
    assert texts(plan).count("✕") == 1


def test_a_bar_has_the_parts_of_each_container_and_of_the_system() -> None:
    plan = planned(EPYC, pod("a", 2, "4Gi"), **STATIC)
    groups = [group for group in root_of(plan).iter(f"{SVG}g") if group.find(f"{SVG}title") is not None]
    titles = {group.findtext(f"{SVG}title"): group for group in groups}
    (table,) = [node.tables["memory"] for number, node in plan.after.memory.numa_nodes.items() if number == 0]
    part = titles["a: 4.0Gi"].find(f"{SVG}rect")
    (whole,) = {
        float(rect.attrib["width"])
        for rect in root_of(plan).iter(f"{SVG}rect")
        if rect.attrib["height"] == "8" and rect.attrib["class"] == "free edge"
    }
    assert part is not None
    assert float(part.attrib["width"]) == pytest.approx(whole * (4 << 30) / table.total, abs=0.1)
    assert any(title is not None and title.startswith("reserved: ") for title in titles)


def test_a_large_node_has_small_cells_without_numbers() -> None:
    large, small = (root_of(planned(host(name))) for name in ("epyc-9754-2s-nps4-cxl", "epyc-7543-2s-nps1"))
    assert float(large.attrib["height"]) < 1000
    assert float(large.attrib["width"]) < float(small.attrib["width"])
    shown = [element.text for element in large.iter(f"{SVG}text")]
    assert "511" not in shown
    assert "480-511" in shown
    assert "127" in [element.text for element in small.iter(f"{SVG}text")]


def test_the_colours_follow_the_reader() -> None:
    text = picture_svg(planned(EPYC, pod("a", 2)))
    style = text.partition("<style>")[2].partition("</style>")[0]
    light, _, dark = style.partition("@media (prefers-color-scheme:dark){")
    assert LIGHT.keys() == DARK.keys()
    for name in LIGHT:
        assert f".{name}{{{LIGHT[name]}}}" in light
        assert f".{name}{{{DARK[name]}}}" in dark
    used = {name for classes in re.findall(r'class="([^"]*)"', text) for name in classes.split()}
    assert used <= set(re.findall(r"\.([a-z0-9-]+)\{", style))
    assert not re.search(r'(fill|stroke)="#', text.partition("</style>")[2]), "a colour that no scheme can change"


def test_sixteen_pods_look_different() -> None:
    text = picture_svg(planned(EPYC, *(pod(f"p{number}", 2) for number in range(16))))
    fills = re.findall(r"\.pod[0-9]+\{(fill:[^}]+)\}", text)
    assert len(fills) == len(set(fills)) == 2 * len(FILLS)


def test_names_cannot_break_the_document(tmp_path: Path) -> None:
    plan = planned(EPYC, pod("a <&> \x1b[31m\u202e", 2), pod("]]>\x00", 999))
    (tmp_path / "node.svg").write_text(picture_svg(plan))
    shown = " ".join(element.text or "" for element in ET.parse(tmp_path / "node.svg").iter())  # noqa: S314 - our own text
    assert r"a <&> \x1b[31m\u202e: " in shown
    assert r"]]>\x00: rejected" in shown
