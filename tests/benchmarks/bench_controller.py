"""Measure the cost of the controller: ``python tests/benchmarks/bench_controller.py [--json] [--quick]``.

The hierarchy is made of ordinary files in a temporary directory, so that the figures are the controller's own and can
be measured anywhere; the kernel adds about a millisecond per cpuset it writes. Medians of repeated runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

import trio  # noqa: E402  # the project's root comes first

from runner.base.cpuset import CpuSet  # noqa: E402
from runner.controller.tree.cpu_source import CpuSource  # noqa: E402
from runner.controller.tree.limits import Limits  # noqa: E402
from runner.controller.tree.loop import Intervals, ReconcileLoop  # noqa: E402
from runner.controller.tree.model import Requested  # noqa: E402
from runner.controller.tree.pods import PodCgroups  # noqa: E402
from runner.controller.tree.tree import Tree  # noqa: E402
from runner.kernel.procfs import Procfs  # noqa: E402
from runner.kubelet.state_files import KubeletFiles  # noqa: E402
from tests.support.fake_cgroupfs import fake_cgroupfs, fake_sysfs  # noqa: E402
from tests.support.fake_node import ENTRIES, SHARED, B, Node, connected, controlled  # noqa: E402

Figures = dict[str, float]


def reconcile_pass(count: int, repeat: int) -> Figures:
    """Milliseconds of the first pass with *count* instances in the tree, and of one that finds nothing to do."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        last = 7 + count
        mount = fake_cgroupfs(path / "cgroup", cpus=f"0-{last}", mems="0-1")
        sys_ = fake_sysfs(path / "sys", cpus=f"0-{last}", mems="0-1")
        kubelet = path / "kubelet"
        kubelet.mkdir()
        entries = {f"pod-{index}": {"instance": str(8 + index)} for index in range(count)}
        document = {"policyName": "static", "defaultCpuSet": "0-7", "entries": entries, "checksum": 0}
        (kubelet / "cpu_manager_state").write_text(json.dumps(document))
        root = mount.child("stelia")
        pods = PodCgroups(mount, Procfs(path), kubelet=True)
        source = CpuSource(KubeletFiles(kubelet, path / "cdi"), sys_, CpuSet())
        loop = ReconcileLoop(Tree(root), source, Limits(), sys_, Intervals(), pods)
        trio.run(loop.settle, source)
        loop.pass_over({uid: Requested(CpuSet.parse(entry["instance"])) for uid, entry in entries.items()})
        times = []
        for _ in range(repeat):
            started = time.perf_counter()
            assert loop.pass_over({}) == ()
            times.append(time.perf_counter() - started)
        assert len(root.children()) == count
        return {f"pass_{count}_ms": statistics.median(times) * 1000}


async def latencies(repeat: int) -> Figures:
    """Milliseconds from the kubelet's rename to float's new cpuset, and from a registration's request to its answer."""
    with tempfile.TemporaryDirectory() as name:
        node = Node.new(Path(name))
        node.become(B)
        changed, registered = [], []
        async with controlled(node, intervals=Intervals()) as controller, connected(node.socket) as client:
            for number in range(repeat):
                shared, entries = (SHARED, ENTRIES) if number % 2 else ("2-10", {**ENTRIES, "x": {"web": "11"}})
                started = time.perf_counter()
                node.put_state(shared, entries)
                while str(node.float_cgroup.cpus()) != shared:
                    await controller.loop.next_pass()
                changed.append(time.perf_counter() - started)
            await controller.loop.next_pass()  # by the change of float's own files
            for _ in range(repeat):
                started = time.perf_counter()
                await client.result("registerCgroup", uuid=B, cpuset="14-17")
                registered.append(time.perf_counter() - started)
                await client.result("deregisterCgroup", uuid=B)
        return {
            "state_to_float_ms": statistics.median(changed) * 1000,
            "register_ms": statistics.median(registered) * 1000,
        }


async def build(node: Node) -> None:
    """Build the tree, because the program itself cannot make cgroups out of ordinary directories."""
    node.become(B)
    async with controlled(node), connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")


def idle(seconds: float) -> Figures:
    """Time from exec to ready, then CPU seconds per hour and memory of the program while nothing happens."""
    with tempfile.TemporaryDirectory() as name:
        node = Node.new(Path(name))
        trio.run(build, node)
        command = "import sys; from runner.controller.main import main; sys.exit(main())"
        started = time.perf_counter()
        with subprocess.Popen(
            [
                *(sys.executable, "-c", command, "--root", node.root.path, "--cgroupfs", node.mount.path),
                *(
                    "--socket",
                    node.socket,
                    "--state-dir",
                    node.path / "state",
                    "--kubelet-dir",
                    node.kubelet,
                    "--sysfs",
                    node.path / "sys",
                ),
                "--no-device-filter",
                *("--procfs", node.proc),
            ],
            cwd=PROJECT,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stderr is not None
            while "ready" not in process.stderr.readline():
                assert process.poll() is None
            ready = time.perf_counter() - started
            before = cpu_seconds(process.pid)
            time.sleep(seconds)
            used = cpu_seconds(process.pid) - before
            status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
        return {
            "exec_to_ready_ms": ready * 1000,
            "idle_cpu_s_per_hour": used / seconds * 3600,
            "resident_mib": resident / 1024,
        }


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of *pid*; schedstat has it in nanoseconds, where stat has ticks of 10 ms."""
    return (
        sum(int(task.joinpath("schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())
        / 1e9
    )


def main() -> None:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(description="Measure the controller.")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--quick", action="store_true", help="a few seconds in all")
    options = parser.parse_args()
    logging.disable()
    repeat = 5 if options.quick else 21
    figures: Figures = {"cpus": os.cpu_count() or 0}
    for count in (0, 50, 500):
        figures |= reconcile_pass(count, repeat)
    figures |= trio.run(latencies, repeat)
    figures |= idle(2 if options.quick else 35)
    rounded = {name: round(value, 3) for name, value in figures.items()}
    if options.json:
        print(json.dumps(rounded))
    else:
        for name, value in rounded.items():
            print(f"{name:24}{value:12g}")


if __name__ == "__main__":
    main()
