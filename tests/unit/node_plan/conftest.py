from __future__ import annotations

import functools
import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.node_plan.cpu_assignment import CpuFacts, CpuTopology

VECTORS = Path(__file__).parents[2] / "data/vectors"
Document = dict[str, Any]


def read(folder: Path, name: str) -> Iterator[tuple[Document, Document]]:
    with gzip.open(folder / f"{name}.jsonl.gz", "rt") as lines:
        for line in lines:
            entry = json.loads(line)
            result = entry.pop("result")
            # The cases with devices stand beside their results, in the formats of plan --node.
            yield entry.get("case", entry), result


@pytest.fixture
def vectors() -> Callable[[str], Iterator[tuple[Document, Document]]]:
    """Answers of the real kubelet: name of the file → pairs of case and result; RUNNER_VECTORS names another folder."""
    return functools.partial(read, Path(os.environ.get("RUNNER_VECTORS", VECTORS)))


@pytest.fixture
def our_vectors() -> Callable[[str], Iterator[tuple[Document, Document]]]:
    """Read the vectors in this repository, for tests that need particular cases."""
    return functools.partial(read, VECTORS)


@pytest.fixture
def cpu_topology() -> Callable[[Iterable[Document]], CpuTopology]:
    """Build the CPU Manager's view from the `cpus` of a vector."""

    def build(cpus: Iterable[Document]) -> CpuTopology:
        # The kubelet calls a core by its lowest CPU; a vector may call it anything unique.
        facts = sorted(cpus, key=lambda cpu: int(cpu["cpu"]))
        lowest: dict[int, int] = {}
        for cpu in facts:
            lowest.setdefault(cpu["core"], cpu["cpu"])
        return CpuTopology(
            tuple(
                CpuFacts(
                    cpu["cpu"],
                    lowest[cpu["core"]],
                    cpu["socket"],
                    cpu["numa"],
                    cpu["uncore"] if "uncore" in cpu else cpu["socket"],
                )
                for cpu in facts
            )
        )

    return build
