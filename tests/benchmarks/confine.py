"""Process 1 of a pod that enters its cgroups as an instance does, with a child of many threads instead of QEMU.

Run by ``bench_confine.py``. Prints one JSON object a line: the milliseconds of one round.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from contextlib import AsyncExitStack
from itertools import cycle, islice
from pathlib import PurePosixPath

import trio

from runner.base.cpuset import CpuSet
from runner.instance.gate import StopRequest
from runner.instance.optional_parts import entered_cgroups
from runner.instance.parts.cgroups.entered import EnteredCgroups
from runner.instance.parts.daemons import anchored
from runner.instance.parts.thread_placement import QemuThreads, place_threads
from runner.instance.supervisor import Faults, Supervisor, open_supervisor
from runner.kernel.child_processes import Command, Process
from runner.kernel.procfs import Procfs
from runner.placement.backends import ControllerPlacement
from runner.protocol.qmp import VcpuThread

THREADS = """
import sys, threading
gate = threading.Event()
for _ in range(int(sys.argv[1])):
    threading.Thread(target=gate.wait).start()
gate.wait()
"""


async def many_threads(host: Supervisor, stack: AsyncExitStack, count: int) -> tuple[Process, tuple[VcpuThread, ...]]:
    """Start a process with *count* threads besides its first one, in this process's cgroup, and return them."""
    command = Command("qemu", (sys.executable, "-I", "-S", "-c", THREADS, str(count)))
    process = host.processes.spawn(command)
    stack.push_async_callback(host.processes.stop, process, 2)
    while len(tids := Procfs().thread_ids(process.pid)) <= count:
        await trio.sleep(0.01)
    return process, tuple(VcpuThread(index, tid) for index, tid in enumerate(tids[1:]))


def bare(
    active: EnteredCgroups[ControllerPlacement], process: Process, vcpus: tuple[VcpuThread, ...], pins: tuple[int, ...]
) -> None:
    """Do the same writes and set the same masks, without any check."""
    os.write(active.cgroup_fds.float_procs.number, b"%d\n" % process.pid)
    for vcpu in vcpus:
        os.write(active.cgroup_fds.instance_threads.number, b"%d\n" % vcpu.tid)
    for vcpu, cpu in zip(vcpus, pins, strict=True):
        os.sched_setaffinity(vcpu.tid, [cpu])


async def measure(socket: PurePosixPath, uid: str, cpus: CpuSet, count: int, *, is_bare: bool) -> dict[str, float]:
    """Return the milliseconds of one round with *count* threads; if they are more than the CPUs, they share them."""
    placement = ControllerPlacement(cpus, tuple(islice(cycle(cpus), count)), socket, uid)
    async with (
        open_supervisor(StopRequest(), Faults()) as host,
        AsyncExitStack() as pod,
        anchored(host, ("sleep", "infinity")) as anchors,
    ):
        process, vcpus = await many_threads(host, pod, count)
        begun = time.perf_counter()
        async with entered_cgroups(host, placement, anchors) as active, AsyncExitStack() as stack:
            entered = time.perf_counter()
            stack.push_async_callback(host.processes.stop, process, 2)  # before its cgroup is removed
            if is_bare:
                assert isinstance(active, EnteredCgroups)
                bare(active, process, vcpus, placement.pins)
            else:
                place_threads(host.processes, host.procfs, active, placement, QemuThreads(process, vcpus))
            ended = time.perf_counter()
    assert host.faults.sentences == []
    name = "bare loop" if is_bare else "confine, pin, read back"
    return {"threads": count, "register and enter float": (entered - begun) * 1000, name: (ended - entered) * 1000}


async def main() -> None:
    """Measure what the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("socket", type=PurePosixPath)
    parser.add_argument("uid")
    parser.add_argument("cpus", type=CpuSet.parse)
    parser.add_argument("rounds", type=int)
    parser.add_argument("counts", type=int, nargs="+")
    options = parser.parse_args()
    for number in range(options.rounds):
        for count in options.counts:
            for is_bare in (bool(number % 2), not number % 2):
                print(
                    json.dumps(await measure(options.socket, options.uid, options.cpus, count, is_bare=is_bare)),
                    flush=True,
                )


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    trio.run(main)
