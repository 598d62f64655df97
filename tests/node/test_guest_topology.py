"""The topology that a guest sees and the place of its memory are as planned, on a machine with two NUMA nodes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.base.cpuset import CpuSet
from tests.node.cgroups import until
from tests.node.instances import LINUX_CMDLINE
from tests.node.test_runner import ROM, RUNNER, running

MIB = 1 << 20
BOOTS_WITHIN = 480
"""Seconds: with KVM on an emulated machine four vCPUs take 20 of them; emulated once more, several times that."""
DENY_MBIND = """
import ctypes, os, struct, sys
code = ((0x20, 0, 0, 0), (0x15, 0, 1, 237), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000))
filters = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in code))
program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(filters)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""A container's seccomp profile: system call 237, mbind, is EPERM on x86-64; all others are allowed (``seccomp(2)``)."""


def core_of_each(numa: dict[int, CpuSet]) -> str:
    """Return the CPUs of the last core of each NUMA node."""
    last = [max(cpus) for _, cpus in sorted(numa.items())]
    path = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return ",".join(Path(path.format(cpu)).read_text().strip() for cpu in last)


def planned(spec: Path) -> dict[str, Any]:
    shown = subprocess.run([*RUNNER, "plan", "--json", spec], check=True, stdout=subprocess.PIPE).stdout
    plan: dict[str, Any] = json.loads(shown)
    return plan


def qemu_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next(int(child) for child in children if Path(f"/proc/{child}/comm").read_text().startswith("qemu"))


def pages(pid: int) -> dict[str, tuple[str, dict[int, int]]]:
    """Return the guest's memory: name → policy, and NUMA node → pages there (``/proc/PID/numa_maps``)."""
    found = {}
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        if named := re.search(r"file=/memfd:instance-(ram[0-9]+)", line):
            nodes = {int(node): int(count) for node, count in re.findall(r" N([0-9]+)=([0-9]+)", line)}
            found[named[1]] = (line.split()[1], nodes)
    return found


@pytest.mark.timeout(BOOTS_WITHIN + 120)
def test_the_guest_sees_the_planned_topology_and_its_memory_is_on_the_planned_nodes(
    tmp_path: Path, numa: dict[int, CpuSet], linux_guest: tuple[Path, Path]
) -> None:
    kernel, initrd = linux_guest
    spec = tmp_path / "spec.toml"
    spec.write_text(
        f'[cpu]\ncount = 4\ncpus = "{core_of_each(numa)}"\naccel = "auto"\nmodel = "Skylake-Server"\n'
        f'[memory]\nsize = "192MiB"\n[boot]\nkernel = "{kernel}"\ninitrd = "{initrd}"\n'
        f'cmdline = "{LINUX_CMDLINE} facts=1"\n'
    )
    plan = planned(spec)
    topology = plan["machine"]["topology"]
    assert [topology[key] for key in ("sockets", "dies", "cores", "threads")] == [2, 1, 1, 2]
    with running(spec, tmp_path) as (pid, output, process):
        until(lambda: "LINUX-GUEST-UP" in output() or process.poll() is not None, "the guest to be up", BOOTS_WITHIN)
        assert process.poll() is None, output()
        facts = dict(re.findall(r"^((?:cpu/|node/|0000:)\S+):(.*?)\r?$", output(), re.MULTILINE))
        ranges = re.findall(r"SRAT: Node (\d+) PXM \d+ \[mem 0x([0-9a-f]+)-0x([0-9a-f]+)\]", output())
        memory = pages(qemu_of(pid))

    for vcpu in range(4):
        core = f"{vcpu & ~1}-{vcpu | 1}"
        assert facts[f"cpu/cpu{vcpu}/topology/thread_siblings_list"] == core
        assert facts[f"cpu/cpu{vcpu}/cache/index3/shared_cpu_list"] == core, "a die is what one L3 cache gives"
        assert facts[f"cpu/cpu{vcpu}/topology/physical_package_id"] == str(vcpu // 2)
    for number, each in enumerate(topology["numa_nodes"]):
        assert facts[f"node/node{number}/cpulist"] == each["vcpus"]
        assert tuple(map(int, facts[f"node/node{number}/distance"].split())) == tuple(each["distances"])
        of_node = [(int(first, 16), int(last, 16) + 1) for node, first, last in ranges if int(node) == number]
        assert max(of_node)[1] - min(of_node)[0] == each["memory"] == 96 * MIB
        assert facts[f"0000:{(64, 160)[number]:02x}/cpulistaffinity"] == each["vcpus"]
        policy, where = memory[f"ram{number}"]
        assert policy == f"bind:{each['host']}"
        assert set(where) == {each["host"]}, "every page is where the vCPUs of its guest NUMA node are"


def test_a_refused_mbind_is_a_failed_start_with_a_remedy(tmp_path: Path, numa: dict[int, CpuSet]) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(
        f'[cpu]\ncount = 4\ncpus = "{core_of_each(numa)}"\naccel = "tcg"\n[memory]\nsize = "64MiB"\n[boot]\nfirmware = "{ROM}"\n'
    )
    command = (*RUNNER, "run", "--not-pid1", "--state-dir", tmp_path / "state", spec)
    run = subprocess.run(
        [sys.executable, "-c", DENY_MBIND, *command], check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output = run.stdout.decode()
    assert run.returncode == 31, output
    assert "cannot bind memory to host NUMA nodes: Operation not permitted" in output
    assert "--cap-add SYS_NICE, or set memory.bind = false" in output
