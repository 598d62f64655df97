"""Measure how long an instance needs to enter its cgroups: ``tests/node/run -- tests/benchmarks/bench_confine.py``.

From asking the controller until 4, 40 and 120 vCPU threads are confined, pinned and read back, by the runner's own code
in a real pod on a real kernel, compared with a loop of bare writes that checks nothing. Medians.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from tests.node.instances import SOCKETS, controller_of, kubelet_of, uid_of
from tests.node.standin_kubelet import Container, Pod

ROUNDS, COUNTS = 9, (4, 40, 120)
CPUS = CpuSet.parse("2-7,10-15")
PROGRAM = "/project/tests/benchmarks/confine.py"


@pytest.mark.timeout(1200)
def test_how_long_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numa = {
        int(path.name.removeprefix("node")): CpuSet.parse((path / "cpulist").read_text())
        for path in Path("/sys/devices/system/node").glob("node[0-9]*")
    }
    with kubelet_of(tmp_path, numa) as kubelet, controller_of(kubelet, tmp_path) as controller:
        command = (sys.executable, PROGRAM, f"{SOCKETS}/controller.sock", uid_of(1), str(CPUS), str(ROUNDS))
        main = Container(
            (*command, *map(str, COUNTS)),
            cpus=CPUS,
            mounts=((controller.directory, SOCKETS, "ro"),),
            cgroupfs="none",
        )
        running = kubelet.run(Pod(uid_of(1), (main,)))["main"]
        assert running.wait(1000) == 0, running.output
    rounds = [json.loads(line) for line in running.lines if line.startswith("{")]
    assert len(rounds) == 2 * ROUNDS * len(COUNTS)
    with capsys.disabled():
        for count in COUNTS:
            print(f"\n{count} threads, medians of {ROUNDS} in ms:", end="")
            for name in ("register and enter float", "confine, pin, read back", "bare loop"):
                found = [each[name] for each in rounds if each["threads"] == count and name in each]
                print(f" {name} {statistics.median(found):.1f} ({min(found):.1f} … {max(found):.1f});", end="")
        print()
