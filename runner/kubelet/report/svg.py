"""The picture of a node as SVG: a box for each NUMA node, a column for each core, a cell with its number for each CPU."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from xml.sax.saxutils import escape

from runner.cpuset import CpuSet
from runner.kubelet.node_plan import NodePlan
from runner.kubelet.report.picture import (
    Owner,
    cores_by_cache,
    facts_of,
    joined,
    lines_of,
    owners_of,
    reserved_of,
    title_of,
)
from runner.kubelet.report.text import hardware_line
from runner.values import frozen

CELL_WIDTH, CELL_HEIGHT = 27, 17
CORE_GAP, CACHE_GAP, ROW_GAP = 2, 8, 7
PADDING, MARGIN = 12, 20
LINE = 15
SWATCH = 12
CORES_IN_ROW = 16
BOXES_IN_ROW = 2
LETTER = 6.1
"""Pixels. The width of a letter of the small text, for breaking lines; fonts differ, so it is rather wide."""

INK, FAINT = "#202124", "#6b7178"
FREE, RESERVED = "#ffffff", "#b9bec4"
FILLS = (
    ("#0072b2", "#ffffff"),
    ("#e69f00", INK),
    ("#009e73", "#ffffff"),
    ("#cc79a7", INK),
    ("#56b4e9", INK),
    ("#d55e00", "#ffffff"),
    ("#f0e442", INK),
    ("#5d4a9c", "#ffffff"),
)
"""Fill and ink of each pod in turn: colours that differ for the colour-blind too (after Okabe and Ito)."""


@frozen
class _CellStyle:
    """The colours of a CPU's cell, and its *owner*, which the tooltip names."""

    fill: str
    ink: str
    owner: str


@frozen
class _Box:
    """A part of the drawing, in pixels, with its upper left corner at the origin."""

    width: int
    height: int
    drawing: Sequence[str]


def picture_svg(plan: NodePlan) -> str:
    """Return *plan* as an SVG document; the same plan gives the same text."""
    styled = [
        (owner, _CellStyle(fill, ink, owner.name))
        for owner, (fill, ink) in zip(owners_of(plan), itertools.cycle(FILLS), strict=False)
    ]
    styles = {cpu: _CellStyle(RESERVED, INK, "reserved") for cpu in reserved_of(plan)}
    styles |= {cpu: style for owner, style in styled for cpu in owner.cpus}
    bodies = [_cores(plan, node.id, styles) for node in plan.hardware.numa_nodes]
    inside = max(body.width for body in bodies)
    boxes = [
        _numa_node(title_of(node.id, plan.hardware), facts_of(plan, node.id), body, inside)
        for node, body in zip(plan.hardware.numa_nodes, bodies, strict=True)
    ]
    beside = min(BOXES_IN_ROW, len(boxes))
    width = max(MARGIN + beside * (boxes[0].width + MARGIN), 560)
    heading = textwrap.wrap(hardware_line(plan.hardware), int(width / LETTER / 1.3))
    drawing = [
        _text(MARGIN, MARGIN + 14 + 18 * number, line, 14, INK, bold=True) for number, line in enumerate(heading)
    ]
    y = MARGIN + 18 * len(heading) + 10
    for start in range(0, len(boxes), beside):
        row = boxes[start : start + beside]
        for place, box in enumerate(row):
            x = MARGIN + place * (box.width + MARGIN)
            drawing += [f'<g transform="translate({x} {y})">', *box.drawing, "</g>"]
        y += max(box.height for box in row) + MARGIN
    legend = _legend(styled, reserved_of(plan), width - 2 * MARGIN)
    drawing += [f'<g transform="translate({MARGIN} {y})">', *legend.drawing, "</g>"]
    y += legend.height + MARGIN
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" viewBox="0 0 {width} {y}"'
                ' font-family="DejaVu Sans, Verdana, sans-serif">'
            ),
            f'<rect width="{width}" height="{y}" fill="#ffffff"/>',
            *drawing,
            "</svg>\n",
        ]
    )


def _numa_node(title: str, facts: Iterable[str], body: _Box, inside: int) -> _Box:
    """Draw the box of one NUMA node: its name, what it has, and its cores."""
    details = joined(facts, int(inside / LETTER))
    top = PADDING + 14 + LINE * len(details) + 8
    width, height = inside + 2 * PADDING, top + body.height + PADDING
    drawing = [
        f'<rect width="{width}" height="{height}" rx="6" fill="#f4f5f7" stroke="#9aa0a6"/>',
        _text(PADDING, PADDING + 10, title, 13, INK, bold=True),
        *(
            _text(PADDING, PADDING + 10 + LINE * number, detail, 11, FAINT)
            for number, detail in enumerate(details, start=1)
        ),
        f'<g transform="translate({PADDING} {top})">',
        *body.drawing,
        "</g>",
    ]
    return _Box(width, height, drawing)


def _cores(plan: NodePlan, numa_node: int, styles: Mapping[int, _CellStyle]) -> _Box:
    """Draw the cores of *numa_node*, those that share an L3 cache together."""
    drawing: list[str] = []
    y = width = 0
    for line in lines_of(cores_by_cache(plan.hardware, numa_node), CORES_IN_ROW, gap=0):
        x = 0
        for group in line:
            for core in group:
                for thread, cpu in enumerate(core):
                    style = styles.get(cpu, _CellStyle(FREE, FAINT, "shared pool"))
                    drawing.append(
                        _cell(x, y + thread * CELL_HEIGHT, cpu, f"CPU {cpu}, core {min(core)}: {style.owner}", style)
                    )
                x += CELL_WIDTH + CORE_GAP
            x += CACHE_GAP - CORE_GAP
        width = max(width, x - CACHE_GAP)
        y += max(len(core) for group in line for core in group) * CELL_HEIGHT + ROW_GAP
    return _Box(max(width, 260), max(0, y - ROW_GAP), drawing)


def _cell(x: int, y: int, cpu: int, tip: str, style: _CellStyle) -> str:
    return (
        f"<g><title>{escape(tip)}</title>"
        f'<rect x="{x}" y="{y}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" fill="{style.fill}" stroke="#80868b" stroke-width="0.6"/>'
        f'<text x="{x + CELL_WIDTH / 2:g}" y="{y + 12}" font-size="10" text-anchor="middle" fill="{style.ink}">{cpu}</text></g>'
    )


def _legend(styled: Iterable[tuple[Owner, _CellStyle]], reserved: CpuSet, width: int) -> _Box:
    entries = [
        (_CellStyle(RESERVED, INK, ""), f"reserved: {reserved or 'nothing'}"),
        (_CellStyle(FREE, FAINT, ""), "shared pool"),
    ]
    entries += [
        (style, f"{owner.name}{'' if owner.planned else ' (there before)'}: {owner.cpus}") for owner, style in styled
    ]
    drawing = []
    y = 0
    for style, words in entries:
        drawing.append(
            f'<rect x="0" y="{y}" width="{2 * SWATCH}" height="{SWATCH}" fill="{style.fill}" stroke="#80868b" stroke-width="0.6"/>'
        )
        for line in _broken(words, int((width - 2 * SWATCH - 8) / LETTER)):
            drawing.append(_text(2 * SWATCH + 8, y + 10, line, 11, INK))
            y += LINE
        y += 4
    return _Box(width, y, drawing)


def _broken(words: str, columns: int) -> list[str]:
    """Break *words* into lines; a list of CPUs has no spaces, so it breaks at its commas."""
    spaced = textwrap.wrap(words.replace(",", ", "), columns, break_on_hyphens=False)
    return [line.replace(", ", ",") for line in spaced]


def _text(x: int, y: int, words: str, size: int, fill: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}"{weight} fill="{fill}">{escape(words)}</text>'
