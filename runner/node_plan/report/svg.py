"""The picture of a node as SVG: a box for each NUMA node, a column for each core, a cell with its number for each CPU.

Nodes of more than :data:`MOST_NUMBERED` CPUs are drawn with small cells without numbers. The colours follow the reader's
choice of light or dark (``prefers-color-scheme``); those of pods are the same in both.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

from runner.base.cpuset import CpuSet
from runner.base.errors import escaped
from runner.base.values import frozen
from runner.kubelet.pod import ContainerKind
from runner.kubelet.state import Block, MemoryTable
from runner.node_plan.node_plan import NodePlan, PodPlan
from runner.node_plan.report.picture import (
    Owner,
    cores_by_cache,
    cpus_words,
    devices_of,
    free_words,
    joined,
    lines_of,
    memory_of,
    owners_of,
    reserved_of,
    row_label,
    tables_of,
    title_of,
)
from runner.node_plan.report.text import hardware_line, kubelet_line

MOST_NUMBERED = 256
"""CPUs of the largest node whose cells have numbers: two boxes beside each other still fit a screen."""
PADDING, MARGIN = 12, 20
LINE = 15
BAR = 8
SWATCH = 12
LEAST_WIDTH = 560
BOXES_IN_ROW = 2
LETTER = 6.6
"""Pixels. The width of a letter of the small text, for breaking lines; fonts differ, so it is rather wide."""

FREE, RESERVED, REJECTED = "free", "reserved", "rejected"
INK, LIGHT_INK = "#202124", "#ffffff"
FILLS = (
    ("#0072b2", LIGHT_INK),
    ("#e69f00", INK),
    ("#009e73", LIGHT_INK),
    ("#cc79a7", INK),
    ("#56b4e9", INK),
    ("#d55e00", LIGHT_INK),
    ("#f0e442", INK),
    ("#5d4a9c", LIGHT_INK),
)
"""Fill and ink of each pod in turn: colours that differ for the colour-blind too (after Okabe and Ito). The second turn is
striped, so that sixteen pods differ."""
LIGHT = {
    "page": "fill:#ffffff",
    "ink": "fill:#202124",
    "faint": "fill:#5f6368",
    "box": "fill:#f4f5f7;stroke:#9aa0a6",
    "edge": "stroke:#80868b;stroke-width:0.6",
    FREE: "fill:#ffffff",
    RESERVED: "fill:#b9bec4",
    "others": "fill:#80868b",
    "on-free": "fill:#5f6368",
    "on-reserved": "fill:#202124",
    REJECTED: "fill:#c5221f",
}
"""Class → declarations of CSS."""
DARK = {
    "page": "fill:#1b1c1f",
    "ink": "fill:#e8eaed",
    "faint": "fill:#a8adb3",
    "box": "fill:#26282c;stroke:#5f6368",
    "edge": "stroke:#80868b;stroke-width:0.6",
    FREE: "fill:#303338",
    RESERVED: "fill:#5f6368",
    "others": "fill:#9aa0a6",
    "on-free": "fill:#b5bac0",
    "on-reserved": "fill:#e8eaed",
    REJECTED: "fill:#f28b82",
}


@frozen
class _Cells:
    """The sizes of the drawing of CPUs, in pixels, and how many cores stand in a row."""

    width: int
    height: int
    core_gap: int
    cache_gap: int
    row_gap: int
    cores_in_row: int
    label: int
    """The width of the label of a row, 0 without one."""


NUMBERED = _Cells(width=27, height=17, core_gap=2, cache_gap=8, row_gap=7, cores_in_row=16, label=0)
COMPACT = _Cells(width=8, height=8, core_gap=1, cache_gap=5, row_gap=6, cores_in_row=32, label=70)


@frozen
class _Style:
    """The class of a CPU's cell, and its *owner*, which the tooltip names."""

    name: str
    owner: str


@frozen
class _Box:
    """A part of the drawing, in pixels, with its upper left corner at the origin."""

    width: int
    height: int
    drawing: Sequence[str]


def picture_svg(plan: NodePlan) -> str:
    """Return *plan* as an SVG document; the same plan gives the same text."""
    classes = itertools.cycle(f"pod{number}" for number in range(2 * len(FILLS)))
    styled = [(owner, _Style(name, owner.name)) for owner, name in zip(owners_of(plan), classes, strict=False)]
    styles = {cpu: _Style(RESERVED, "reserved") for cpu in reserved_of(plan)}
    styles |= {cpu: style for owner, style in styled for cpu in owner.cpus}
    cells = NUMBERED if len(plan.machine.cpus) <= MOST_NUMBERED else COMPACT
    bodies = [_cores(plan, node.id, styles, cells) for node in plan.machine.numa_nodes]
    inside = max(body.width for body in bodies)
    boxes = [
        _numa_node(plan, node.id, body, inside, styles)
        for node, body in zip(plan.machine.numa_nodes, bodies, strict=True)
    ]
    columns = min(BOXES_IN_ROW, len(boxes))
    width = max(MARGIN + columns * (boxes[0].width + MARGIN), LEAST_WIDTH)
    drawing, y = _heading(plan, width)
    for start in range(0, len(boxes), columns):
        row = boxes[start : start + columns]
        for place, box in enumerate(row):
            drawing += _moved(box, MARGIN + place * (box.width + MARGIN), y)
        y += max(box.height for box in row) + MARGIN
    for part in (_legend(plan, styled, width - 2 * MARGIN), _key(plan, cells, width - 2 * MARGIN)):
        drawing += _moved(part, MARGIN, y)
        y += part.height + MARGIN
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" viewBox="0 0 {width} {y}"'
                ' font-family="DejaVu Sans, Verdana, sans-serif">'
            ),
            *_style_sheet(len(styled)),
            f'<rect width="{width}" height="{y}" class="page"/>',
            *drawing,
            "</svg>\n",
        ]
    )


def _style_sheet(owners: int) -> Iterator[str]:
    """Yield the colours of everything, and of as many *owners*."""
    striped = range(len(FILLS), min(owners, 2 * len(FILLS)))
    for number in striped:
        fill, ink = FILLS[number % len(FILLS)]
        yield f'<pattern id="stripes{number}" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        yield f'<rect width="5" height="5" fill="{fill}"/><rect width="2" height="5" fill="{ink}" fill-opacity="0.3"/></pattern>'
    yield "<style>"
    yield from (f".{name}{{{rules}}}" for name, rules in LIGHT.items())
    for number in range(min(owners, len(FILLS))):
        fill, ink = FILLS[number]
        yield f".pod{number}{{fill:{fill}}}.on-pod{number}{{fill:{ink}}}"
    for number in striped:
        yield f".pod{number}{{fill:url(#stripes{number})}}.on-pod{number}{{fill:{FILLS[number % len(FILLS)][1]}}}"
    yield "@media (prefers-color-scheme:dark){"
    yield from (f".{name}{{{rules}}}" for name, rules in DARK.items())
    yield "}"
    yield "</style>"


def _moved(box: _Box, x: int, y: int) -> list[str]:
    return [f'<g transform="translate({x} {y})">', *box.drawing, "</g>"]


def _heading(plan: NodePlan, width: int) -> tuple[list[str], int]:
    """Return the lines that describe host and kubelet, and the height that they take."""
    title = textwrap.wrap(hardware_line(plan.hardware), int((width - 2 * MARGIN) / LETTER / 1.3))
    policies = textwrap.wrap(
        f"kubelet {kubelet_line(plan)}", int((width - 2 * MARGIN) / LETTER), break_on_hyphens=False
    )
    drawing = [_text(MARGIN, MARGIN + 12 + 18 * number, line, 14, bold=True) for number, line in enumerate(title)]
    y = MARGIN + 12 + 18 * len(title)
    drawing += [_text(MARGIN, y + LINE * number, line, 11, "faint") for number, line in enumerate(policies)]
    return drawing, y + LINE * len(policies) + 4


def _numa_node(plan: NodePlan, numa_node: int, body: _Box, inside: int, styles: Mapping[int, _Style]) -> _Box:
    """Draw the box of one NUMA node: its name, what it has, its memory as bars, and its cores."""
    columns = int(inside / LETTER)
    tables = tables_of(plan, numa_node)
    facts = [cpus_words(plan, numa_node), *([] if tables else memory_of(plan, numa_node)), *devices_of(plan, numa_node)]
    y = PADDING + 10
    drawing = [_text(PADDING, y, title_of(numa_node, plan.machine), 13, bold=True)]
    for line in joined(facts, columns):
        y += LINE
        drawing.append(_text(PADDING, y, line, 11, "faint"))
    for resource, table in tables:
        y += LINE + 2
        drawing.append(_text(PADDING, y, free_words(resource, table), 11, "faint"))
        drawing += _bar(y + 4, inside, table, _shares(plan, numa_node, resource, styles))
        y += BAR + 4
    top = y + 12
    width, height = inside + 2 * PADDING, top + body.height + PADDING
    frame = f'<rect width="{width}" height="{height}" rx="6" class="box"/>'
    return _Box(width, height, [frame, *drawing, *_moved(body, PADDING, top)])


def _shares(plan: NodePlan, numa_node: int, resource: str, styles: Mapping[int, _Style]) -> list[tuple[_Style, int]]:
    """Return the containers of the plan with exclusive CPUs and the bytes of *resource* that they have on *numa_node* alone."""
    return [
        (styles[min(cpus)], block.size)
        for pod in plan.pods
        for cpus, memory in _memory_by_cpus(pod)
        for block in memory
        if block.resource == resource and tuple(block.numa_nodes) == (numa_node,)
    ]


def _memory_by_cpus(pod: PodPlan) -> Iterator[tuple[CpuSet, Iterable[Block]]]:
    """Yield CPUs of containers of *pod* with the memory that goes with them, each block once.

    In a pod with memory as a whole the containers without memory of their own share one part of it, and an init container
    uses what later ones get.
    """
    shared = False
    for container in pod.containers:
        cpus = container.cpus or container.pod_cpus
        again = pod.whole_memory and (
            container.container.kind is ContainerKind.INIT or (container.shares_memory and shared)
        )
        if cpus and not again:
            yield cpus, container.memory
            shared = shared or container.shares_memory


def _bar(y: int, width: int, table: MemoryTable, shares: Iterable[tuple[_Style, int]]) -> Iterator[str]:
    """Draw *table* as a bar: reserved for the system, the *shares* of containers, those of others, free."""
    parts = [(_Style(RESERVED, "reserved"), table.system_reserved), *shares]
    others = table.system_reserved + table.reserved - sum(size for _, size in parts)
    parts.append((_Style("others", "other containers"), max(0, others)))
    yield f'<rect x="{PADDING}" y="{y}" width="{width}" height="{BAR}" class="{FREE} edge"/>'
    x = float(PADDING)
    for style, size in parts:
        length = width * size / table.total
        if size:
            yield (
                f"<g><title>{_escaped(style.owner)}: {size / (1 << 30):.1f}Gi</title>"
                f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="{BAR}" class="{style.name}"/></g>'
            )
        x += length


def _cores(plan: NodePlan, numa_node: int, styles: Mapping[int, _Style], cells: _Cells) -> _Box:
    """Draw the cores of *numa_node*, those that share an L3 cache together."""
    drawing: list[str] = []
    y = width = 0
    for line in lines_of(cores_by_cache(plan.machine, numa_node), cells.cores_in_row, gap=0):
        x = cells.label
        threads = max(len(core) for group in line for core in group)
        for group in line:
            for core in group:
                for thread, cpu in enumerate(core):
                    style = styles.get(cpu, _Style(FREE, "shared pool"))
                    tip = f"CPU {cpu}, core {min(core)}: {style.owner}"
                    drawing.append(_cell(x, y + thread * cells.height, cpu, tip, style, cells))
                x += cells.width + cells.core_gap
            x += cells.cache_gap - cells.core_gap
        if cells.label:
            drawing += _row_labels(line, threads, y, cells)
        width = max(width, x - cells.cache_gap)
        y += threads * cells.height + cells.row_gap
    return _Box(max(width, 260), max(0, y - cells.row_gap), drawing)


def _row_labels(line: Sequence[Sequence[CpuSet]], threads: int, y: int, cells: _Cells) -> Iterator[str]:
    for thread in range(threads):
        cpus = [list(core)[thread] for group in line for core in group if thread < len(core)]
        yield _text(0, y + thread * cells.height + cells.height - 1, row_label(cpus), 8, "faint")


def _cell(x: int, y: int, cpu: int, tip: str, style: _Style, cells: _Cells) -> str:
    number = (
        ""
        if cells.label
        else f'<text x="{x + cells.width / 2:g}" y="{y + 12}" font-size="10" text-anchor="middle" class="on-{style.name}">{cpu}</text>'
    )
    return (
        f"<g><title>{_escaped(tip)}</title>"
        f'<rect x="{x}" y="{y}" width="{cells.width}" height="{cells.height}" class="{style.name} edge"/>{number}</g>'
    )


def _legend(plan: NodePlan, styled: Iterable[tuple[Owner, _Style]], width: int) -> _Box:
    """Draw the meaning of each colour, and the pods that have no CPUs of their own or were not admitted."""
    entries = [(RESERVED, f"reserved: {reserved_of(plan) or 'nothing'}"), (FREE, "shared pool")]
    entries += [
        (style.name, f"{owner.name}{'' if owner.planned else ' (there before)'}: {owner.cpus}")
        for owner, style in styled
    ]
    entries += [_without_cpus(pod) for pod in plan.pods if not pod.cpus]
    drawing = []
    y = 0
    for name, words in entries:
        drawing.append(
            _text(6, y + 11, "✕", 14, REJECTED)
            if name == REJECTED
            else f'<rect x="0" y="{y}" width="{2 * SWATCH}" height="{SWATCH}" class="{name} edge"/>'
        )
        for line in _broken(escaped(words), int((width - 2 * SWATCH - 8) / LETTER)):
            drawing.append(_text(2 * SWATCH + 8, y + 10, line, 11))
            y += LINE
        y += 4
    return _Box(width, y, drawing)


def _without_cpus(pod: PodPlan) -> tuple[str, str]:
    admission = pod.explanation.admission
    if admission.admitted:
        return FREE, f"{pod.manifest.name}: in the shared pool"
    reason = f": {admission.reason}" if admission.reason else ""
    return REJECTED, f"{pod.manifest.name}: {admission.outcome.value}{reason}: {admission.message}"


def _key(plan: NodePlan, cells: _Cells, width: int) -> _Box:
    """Draw the meanings of a column, a row, a gap and a bar."""
    numbers = "" if cells.label else ", with the number of each CPU"
    bars = " A bar is memory or huge pages: reserved for the system, given to containers, free."
    bars = bars if any(tables_of(plan, node.id) for node in plan.machine.numa_nodes) else ""
    words = (
        f"A column is a core, its rows are the core's threads{numbers}. A wider gap stands between cores of different L3 caches.{bars}"
        " The pointer shows a CPU's owner."
    )
    lines = textwrap.wrap(words, int(width / LETTER))
    return _Box(
        width, LINE * len(lines), [_text(0, 10 + LINE * at, line, 11, "faint") for at, line in enumerate(lines)]
    )


def _broken(words: str, columns: int) -> list[str]:
    """Break *words* into lines; a list of CPUs has no spaces, so it breaks at its commas."""
    spaced = textwrap.wrap(words.replace(",", ", "), columns, break_on_hyphens=False)
    return [line.replace(",  ", ", ") if ",  " in line else line.replace(", ", ",") for line in spaced]


def _text(x: int, y: int, words: str, size: int, name: str = "ink", *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}"{weight} class="{name}">{_escaped(words)}</text>'


def _escaped(words: str) -> str:
    """Return *words* for XML, which cannot contain control characters at all (XML 1.0, 2.2)."""
    return escape(escaped(words))
