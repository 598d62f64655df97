"""How long passed-through devices take at a start: their facts read from sysfs, and the plan with the guest's PCI tree.

Usage: python tests/benchmarks/bench_devices.py [--json]

The host is the recorded one with eight H200, as ordinary files, with as many more PCI devices as such machines have. What
the kernel takes to answer for an attribute of a real device is not in it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import attrs

sys.path.insert(0, str(Path(__file__).parents[2]))

from runner.facts.pci import VfioFacts
from runner.facts.roots import Roots
from runner.kernel.pci import read_pci_facts
from runner.plan.instance import plan_instance
from runner.plan.nccl import nccl_topology
from runner.spec.instance import parse_instance
from tests.support.fake_pci import Record, recorded_pci, vfio_facts
from tests.support.plans import EPYC, KERNEL

NUMBERS = (0, 1, 20)
OTHERS = 500
"""PCI devices of the host beside the recorded ones: of two sockets most are parts of the CPUs."""
RUNS = 30
TEXT = f'{KERNEL}[cpu]\ncount = 8\ncpus = "1-2,65-66,33-34,97-98"\n[memory]\nsize = "64GiB"\n'
DEVICES = '[[device]]\nvariable = "ALL"\n'


def others() -> list[Record]:
    """Return devices that no guest gets."""
    made = {"vendor": "0x8086", "device": "0x324a", "class": "0x088000", "driver": "", "numa_node": 0}
    made |= {"group": None, "bars": [], "reset_method": "", "link": []}
    return [{**made, "address": f"0001:{each >> 3:02x}:00.{each & 7}"} for each in range(OTHERS)]


def milliseconds(work: Callable[[], object]) -> dict[str, float]:
    """Run *work* once to warm caches, then several times; give the CPU time, which other programs here change least."""
    work()
    times = []
    for _ in range(RUNS):
        start = time.process_time()
        work()
        times.append((time.process_time() - start) * 1000)
    return {"median_ms": round(median(times), 2), "least_ms": round(min(times), 2)}


def measured(root: Path, number: int) -> dict[str, dict[str, float]]:
    """Return what *number* devices take."""
    records = recorded_pci("hgx-h200")
    passed = [each["address"] for each in records if each["driver"] == "vfio-pci"][:number]
    vfio = vfio_facts(root, [*records, *others()], environment={"ALL": ",".join(passed)})
    vfio = attrs.evolve(vfio, devices={address: vfio.devices[address] for address in passed})
    facts = attrs.evolve(EPYC, vfio=vfio if number else VfioFacts())
    spec = parse_instance("spec.toml", f"{TEXT}{DEVICES if number else ''}".encode())
    machine = plan_instance("spec.toml", spec, facts).machine
    return {
        "read": milliseconds(lambda: read_pci_facts(passed, Roots.below(root))),
        "plan": milliseconds(lambda: plan_instance("spec.toml", spec, facts)),
        "NCCL's file, which is part of the plan": milliseconds(lambda: nccl_topology(machine)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="for machines")
    as_json = parser.parse_args().json
    figures = {}
    for number in NUMBERS:
        with tempfile.TemporaryDirectory() as directory:
            figures[f"{number} devices"] = measured(Path(directory), number)
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    for name, values in figures.items():
        for what, each in values.items():
            print(f"{name}: {what}: {each['median_ms']} ms (least {each['least_ms']})")


if __name__ == "__main__":
    main()
