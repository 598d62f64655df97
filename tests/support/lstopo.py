"""hwloc's lstopo: how it is called and taken along, and what two PCI devices have in common in what it shows."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree as ET

from tests.emulated_node.cpio import Entry

LSTOPO = "/usr/bin/lstopo-no-graphics"
SHOW = (LSTOPO, "--filter", "all:all", "--of", "xml", "-")
"""The command that prints everything it finds, as XML."""


def with_libraries(*programs: str) -> Iterator[Entry]:
    """Yield *programs* of this machine with the libraries they need, and the directories of both, for an initramfs."""
    libraries = "".join(
        subprocess.run(["ldd", name], check=False, capture_output=True, text=True).stdout for name in programs
    )
    names = sorted({*programs, *re.findall(r"(/\S+) \(0x", libraries)})
    for directory in sorted({str(above) for name in names for above in Path(name).parents[:-1]}):
        yield Entry.directory(directory.lstrip("/"))
    for name in names:
        yield Entry.file(name.lstrip("/"), Path(name).read_bytes(), 0o755)


def ways(topology: str) -> dict[str, list[tuple[str, str]]]:
    """Return kind and number of each object above every PCI device that *topology* shows, from above."""
    found: dict[str, list[tuple[str, str]]] = {}

    def walk(element: ET.Element, above: list[tuple[str, str]]) -> None:
        for each in element.findall("object"):
            kind = each.get("type", "")
            if kind == "PCIDev":
                found[each.get("pci_busid", "")] = above
            if kind == "Bridge":
                kind = "root complex" if each.get("bridge_type", "").startswith("0") else "bridge"
            walk(each, [*above, (kind, each.get("gp_index", ""))])

    walk(ET.fromstring(topology), [])  # noqa: S314 - lstopo's
    return found


def in_common(one: list[tuple[str, str]], other: list[tuple[str, str]]) -> str:
    """Return the kind of the lowest object that is above two devices: a bridge is in a switch, as each port has one device."""
    return [first for first, second in zip(one, other, strict=False) if first == second][-1][0]


def pairs(
    found: dict[str, list[tuple[str, str]]], addresses: Mapping[str, str]
) -> Iterator[tuple[tuple[str, str], str]]:
    for pair in combinations(addresses, 2):
        yield pair, in_common(*(found[addresses[each]] for each in pair))
