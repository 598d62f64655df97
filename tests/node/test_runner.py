"""The runner with Debian trixie's programs: QEMU 10, the virtiofsd in Rust, vhost-net, on a machine with two NUMA nodes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from tests.node.cgroups import SECONDS, until

ROM = os.environ.get("RUNNER_NODE_ROM", "")
PROJECT = Path(__file__).parents[2]
NAMESPACES = ("unshare", "--fork", "--pid", "--mount", "--net", "--mount-proc", "--kill-child")
RUNNER = (
    "env",
    "--block-signal=TERM,INT,HUP",
    f"PYTHONPATH={os.pathsep.join([str(PROJECT), *sys.path])}",
    sys.executable,
    "-m",
    "runner",
)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    if not Path(ROM).is_file():
        pytest.skip("the ROM guest is missing: tests/node/run builds it and names it in RUNNER_NODE_ROM")
    (tmp_path / "shared").mkdir()
    path = tmp_path / "spec.toml"
    path.write_text(
        f'[cpu]\ncount = 4\ncpus = "2-3,10-11"\naccel = "tcg"\n[memory]\nsize = "64MiB"\n[boot]\nfirmware = "{ROM}"\n'
        f'[[network]]\n[[share]]\ntag = "share"\npath = "{tmp_path}/shared"\n[shutdown]\ngrace = 20\n'
    )
    return path


@contextlib.contextmanager
def running(spec: Path, directory: Path) -> Iterator[tuple[int, Callable[[], str], subprocess.Popen[bytes]]]:
    """Run the runner as PID 1 until the block ends; yield its pid, its output so far and the process to wait for."""
    output = directory / "output"
    with output.open("wb") as log:
        argv = (*NAMESPACES, *RUNNER, "run", "--log-level", "debug", "--state-dir", directory / "state", spec)
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        pid = int(until(lambda: children.read_text().split(), "unshare has a child")[0])
        yield pid, lambda: output.read_text(errors="replace"), process
    finally:
        process.kill()
        process.wait()


@pytest.mark.many_cpus
def test_four_vcpus_on_two_numa_nodes_with_network_and_share(spec: Path, tmp_path: Path) -> None:
    with running(spec, tmp_path) as (pid, output, process):
        until(lambda: "the guest runs" in output() or process.poll() is not None, "the guest runs")
        assert process.poll() is None, output()
        until(lambda: "ROM-GUEST-UP" in output(), "the guest to be up")
        receipt = json.loads((tmp_path / "state" / "receipt.json").read_text())
        pins = {thread["vcpu"]: thread["allowed_cpus"] for thread in receipt["threads"] if thread["role"] == "vcpu"}
        assert pins == {0: "2", 1: "10", 2: "3", 3: "11"}, "whole cores: neighbours are siblings, n and n + 8"
        names = {thread["name"] for thread in receipt["threads"] if thread["role"] == "emulator"}
        others = [CpuSet.parse(thread["allowed_cpus"]) for thread in receipt["threads"] if thread["role"] != "vcpu"]
        assert all(cpus.isdisjoint(CpuSet.parse("2-3,10-11")) for cpus in others)
        assert "QEMU is up" in output()
        assert "version=10." in output()
        assert "--shared-dir=" in output(), "virtiofsd was asked for its version, and it is the one in Rust"
        assert "vhost=on" in output()
        assert names
        os.kill(pid, signal.SIGTERM)
        assert process.wait(SECONDS) == 0, output()
        assert "ended outcome=stopped status=0 faults=0" in output()
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["console.log"]
