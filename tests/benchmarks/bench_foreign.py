"""Measure what other tasks take from a vCPU's CPU, and what the guest notices: ``tests/benchmarks/foreign``.

An instance of the controller's, whose guest measures for how long it is not run (``jitter.S``), first on a quiet node, then
under a hostile load: a busy loop for each CPU of the node with no mask of its own, and new ones all the time in the
instance's own container, as ``kubectl exec`` starts them. Both with partitions, and then without; each says which guarantee
is in force.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from tests.node.instances import Controller, Instance, controller_of, kubelet_of, spec_text, start_instance
from tests.node.recorded import Record, recorded
from tests.node.standin_kubelet import Kubelet

ROM = Path("/results/jitter.rom")
TICKS = 1 << 35
"""``DURATION`` of jitter.S."""
LOOP = (sys.executable, "-I", "-S", "-c", "while True: pass")
INTRUDES_FOR = 0.5
"""Seconds between two loops that enter the container; each is killed when the next one comes."""
AT_MOST = 900.0
"""Seconds for one round; emulated CPUs are slow."""
Load = Callable[[Instance], AbstractContextManager[None]]


@pytest.mark.timeout(3600)
def test_what_others_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numa = {
        int(path.name.removeprefix("node")): CpuSet.parse((path / "cpulist").read_text())
        for path in Path("/sys/devices/system/node").glob("node[0-9]*")
    }
    mems = max(numa)
    cpus = CpuSet(list(numa[mems])[:2])
    with kubelet_of(tmp_path, numa) as kubelet:
        for first, partitions in enumerate(("auto", "off")):
            with controller_of(kubelet, tmp_path, "--partitions", partitions) as controller:
                for second, (name, load) in enumerate((("quiet", quiet), ("hostile", hostile))):
                    instance = start(kubelet, controller, 1 + 2 * first + second, cpus, CpuSet([mems]), tmp_path)
                    guarantee, shown = measured(instance, load)
                    kubelet.stop(instance.uid, grace=0)
                    kubelet.reconcile()
                    with capsys.disabled():
                        print(f"\n{name} node, guarantee {guarantee}:", *shown, sep="\n")


def measured(instance: Instance, load: Load) -> tuple[str, list[str]]:
    """Return the guarantee of *instance*, and what was taken from it and its guest noticed while *load* was held."""
    begun = at(instance, "jitter begin")
    guarantee, vcpus = instance.receipt()["guarantee"], [thread.tid for thread in instance.vcpus()]
    with recorded(instance.cpus) as record, load(instance):
        ended = at(instance, "jitter 000")
    at(instance, "jitter end")
    frequency = TICKS / (ended - begun)
    return guarantee, [*taken(record, vcpus, instance.cpus), *noticed(instance.running.output, frequency)]


def start(
    kubelet: Kubelet, controller: Controller, number: int, cpus: CpuSet, mems: CpuSet, directory: Path
) -> Instance:
    spec = spec_text(cpus).replace("[cpu]\n", '[cpu]\nplacement = "controller"\n').replace("/guest/rom", "/jitter/rom")
    guest = directory / "jitter"
    guest.mkdir(exist_ok=True)
    (guest / "rom").write_bytes(ROM.read_bytes())
    return start_instance(
        kubelet,
        number,
        cpus,
        spec=spec,
        directory=directory,
        mems=mems,
        sockets=controller.directory,
        more_mounts=[(guest, "/jitter", "ro")],
    )


def at(instance: Instance, text: str) -> float:
    """Wait until the guest has printed *text* and return when."""
    instance.running.wait_for(text, AT_MOST)
    return time.monotonic()


@contextlib.contextmanager
def quiet(_instance: Instance) -> Iterator[None]:
    yield


@contextlib.contextmanager
def hostile(instance: Instance) -> Iterator[None]:
    """Hold the load."""
    over = threading.Event()
    intruders = threading.Thread(target=intrude, args=(instance, over.wait))
    everywhere = [subprocess.Popen(LOOP) for _ in Path("/sys/devices/system/cpu").glob("cpu[0-9]*")]
    intruders.start()
    try:
        yield
    finally:
        over.set()
        intruders.join()
        for loop in everywhere:
            loop.kill()
            loop.wait()


def intrude(instance: Instance, over: Callable[[float], bool]) -> None:
    enter = ("sh", "-c", 'echo 0 >"$0" && exec "$@"', f"/sys/fs/cgroup{instance.scope}/cgroup.procs")
    while not over(0):
        with subprocess.Popen((*enter, *LOOP)) as loop:
            over(INTRUDES_FOR)
            loop.kill()


def taken(record: Record, vcpus: list[int], cpus: CpuSet) -> Iterator[str]:
    """Yield what others took, in nanoseconds for each second of a CPU."""
    seconds = record.nanoseconds * len(cpus) / 1e9
    others = record.others(vcpus)
    bound = sum(task.nanoseconds for account in record.accounts.values() for task in account.kernel)
    yield f"  other tasks: {sum(task.nanoseconds for task in others if not task.kernel) / seconds:,.0f} ns/s"
    yield f"  kernel threads not bound to the CPU: {sum(task.nanoseconds for task in others if task.kernel) / seconds:,.0f} ns/s"
    yield f"  kernel threads bound to the CPU: {bound / seconds:,.0f} ns/s"


def noticed(output: str, frequency: float) -> Iterator[str]:
    """Yield the guest's gaps; *frequency* is that of its time stamp counter, in Hz."""
    buckets = {int(bucket, 16): int(count, 16) for bucket, count in re.findall(r"jitter (\w{8}) (\w{8})", output)}
    [longest] = re.findall(r"jitter longest (\w{8})", output)
    readings = sum(buckets.values())
    below = itertools.accumulate(buckets.values())
    bucket = next(bucket for bucket, sofar in zip(buckets, below, strict=True) if sofar >= 0.999 * readings)
    percentile = (8 + bucket % 8) << (bucket // 8 - 3)
    yield (
        f"  the guest: {readings:,} readings, 99.9th percentile {percentile / frequency * 1e6:,.1f} µs, longest gap "
        f"{int(longest, 16) / frequency * 1e3:,.1f} ms"
    )
