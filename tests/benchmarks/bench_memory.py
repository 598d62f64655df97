"""How fast the guest's memory is preallocated: ``tests/benchmarks/run --only taking``, or this file for ``tests/node/run``.

By one thread; by our threads, all NUMA nodes at once, each on the CPUs of its node; and by QEMU alone, one NUMA node
after the other. Then how long QEMU needs to map preallocated memory. Ordinary pages, and huge ones where they can be
reserved. Medians; ``MIB_OF_EACH`` is the memory of each NUMA node.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from runner.host.facts_reader import PREALLOCATOR
from runner.kernel import files
from tests.benchmarks.figures import Figure
from tests.benchmarks.instances import BenchmarkSetup

MIB = 1 << 20
ROUNDS = 3
MIB_OF_EACH = int(os.environ.get("MIB_OF_EACH", "512"))
QEMU = ("qemu-system-x86_64", "-nodefaults", "-display", "none", "-S", "-accel", "tcg", "-M", "none")
OURS, PEER = "ours, near, all nodes at once", "QEMU alone"
MAPPED, BARE = "QEMU, mapping what is there", "QEMU's start without memory"
Memory = Sequence[tuple[int, int]]
"""Descriptor and NUMA node."""


def cpus_by_numa_node() -> dict[int, CpuSet]:
    """Return NUMA node → those of its CPUs that this process may use."""
    nodes = Path("/sys/devices/system/node").glob("node[0-9]*")
    usable = CpuSet(os.sched_getaffinity(0))
    found = {int(path.name[4:]): CpuSet.parse((path / "cpulist").read_text()) & usable for path in nodes}
    return {node: cpus for node, cpus in sorted(found.items()) if cpus} or {0: usable}


def by_ours(memory: Memory, page: int, cpus: dict[int, CpuSet], threads: int | None) -> None:
    """Preallocate it with our program: *threads* for each NUMA node, or one for each of its CPUs."""
    ranges = [
        f"{fd}:{MIB_OF_EACH * MIB}:{page}:{node}:{cpus[node]}:{threads or min(16, len(cpus[node]))}"
        for fd, node in memory
    ]
    argv = [sys.executable, "-IS", str(PREALLOCATOR), "10", *ranges]
    subprocess.run(argv, pass_fds=[fd for fd, _ in memory], check=True)


def by_one_thread(memory: Memory, page: int, cpus: dict[int, CpuSet]) -> None:
    """Preallocate it with one thread, one NUMA node after the other."""
    for each in memory:
        by_ours([each], page, cpus, 1)


def by_qemu(memory: Memory, threads: int) -> None:
    """Preallocate it, or map preallocated memory, with QEMU's ``prealloc``."""
    argv = [*QEMU, "-qmp", "stdio"]
    for fd, node in memory:
        where = f"mem-path=/proc/self/fd/{fd},share=on,host-nodes={node},policy=bind"
        touched = f"prealloc=on,prealloc-threads={threads}"
        argv += ["-object", f"memory-backend-file,id=m{fd},size={MIB_OF_EACH}M,{where},{touched}"]
    talk = b'{"execute":"qmp_capabilities"}\n{"execute":"quit"}\n'
    subprocess.run(argv, input=talk, pass_fds=[fd for fd, _ in memory], stdout=subprocess.DEVNULL, check=True)


@contextlib.contextmanager
def fresh(cpus: dict[int, CpuSet], page: int) -> Iterator[Memory]:
    """Hold untouched memory, one file for each NUMA node."""
    with contextlib.ExitStack() as held:
        yield [
            (held.enter_context(files.owned(files.create_memory("m", MIB_OF_EACH * MIB, page or None))).number, node)
            for node in cpus
        ]


def seconds(act: Callable[[], None]) -> float:
    """Return how long *act* takes."""
    began = time.monotonic()
    act()
    return time.monotonic() - began


@contextlib.contextmanager
def reserved(cpus: dict[int, CpuSet]) -> Iterator[bool]:
    """Reserve huge pages for the block, give them back, and yield whether there were enough."""
    path = "/sys/devices/system/node/node{}/hugepages/hugepages-2048kB/{}_hugepages"
    before: dict[Path, str] = {}
    enough = True
    try:
        for node in cpus:
            file = Path(path.format(node, "nr"))
            if not file.exists() or not os.access(file, os.W_OK):
                enough = False
                continue
            before[file] = file.read_text()
            file.write_text(str(int(before[file]) + MIB_OF_EACH // 2))
            enough = enough and int(Path(path.format(node, "free")).read_text()) >= MIB_OF_EACH // 2
        yield enough
    finally:
        for file, value in before.items():
            file.write_text(value)


def sampled(page: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way."""
    cpus = cpus_by_numa_node()
    threads = min(16, max(map(len, cpus.values())))
    ways: dict[str, Callable[[Memory], None]] = {
        "one thread": lambda memory: by_one_thread(memory, page, cpus),
        OURS: lambda memory: by_ours(memory, page, cpus, None),
        PEER: lambda memory: by_qemu(memory, threads),
    }
    taken: dict[str, list[float]] = {way: [] for way in (*ways, MAPPED, BARE)}
    for _ in range(rounds):
        for way, take in ways.items():
            with fresh(cpus, page) as memory:
                taken[way].append(seconds(lambda: take(memory)))  # noqa: B023 - called at once
                if way == OURS:
                    taken[MAPPED].append(seconds(lambda: by_qemu(memory, threads)))
        taken[BARE].append(seconds(lambda: by_qemu([], threads)))
    return taken


def measure(page: int) -> Iterator[str]:
    """Yield a line for each way."""
    total = MIB_OF_EACH * len(cpus_by_numa_node()) / 1024
    kind = f"{page // MIB} MiB" if page else "ordinary"
    taken = sampled(page, ROUNDS)
    peer = statistics.median(taken[PEER])
    for way, times in taken.items():
        median = statistics.median(times)
        speed, ratio = ("", "") if way == BARE else (f"{total / median:.2f} GiB/s", f"{peer / median:.2f}")
        yield f"| {kind} | {way} | {speed} | {median:.2f} s | {ratio} | {min(times):.2f} to {max(times):.2f} |"


def taking(setup: BenchmarkSetup) -> Iterator[Figure]:
    """Yield the times of our program with ordinary pages, and those of its peers."""
    taken = sampled(0, setup.rounds(ROUNDS, 1))
    size = f"{MIB_OF_EACH * len(cpus_by_numa_node())} MiB"
    yield Figure(f"taking {size}, s", taken[OURS], {way: taken[way] for way in ("one thread", PEER)})
    yield Figure(f"taking {size}: QEMU maps what is there, s", taken[MAPPED], {"QEMU without memory": taken[BARE]})


def report() -> Iterator[str]:
    """Yield the table."""
    cpus = cpus_by_numa_node()
    yield f"{MIB_OF_EACH} MiB on each of {len(cpus)} NUMA nodes, {sum(map(len, cpus.values()))} CPUs, {ROUNDS} rounds"
    yield "| pages | by | speed | time | ratio to QEMU alone | from, to |"
    yield from measure(0)
    with reserved(cpus) as enough:
        if enough:
            yield from measure(2 * MIB)
        else:
            yield "huge pages could not be reserved"


def test_how_fast_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print("", *report(), sep="\n")
