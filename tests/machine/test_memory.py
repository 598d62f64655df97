"""The smallest machine runs; and no machine has more overhead than was calculated."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
from pathlib import Path, PurePosixPath

import pytest

from runner.base.cpuset import CpuSet
from runner.facts.disk import FileFact
from runner.facts.hardware import Hardware
from runner.facts.host import HostFacts
from runner.kernel import files
from runner.plan.argv.qemu import qemu_argv
from runner.plan.argv.qemu_endpoints import QemuFds
from runner.plan.host_checks import ADDRESSES_THREAD, WORKERS
from runner.plan.instance import plan_instance
from runner.plan.memory import RUNNER, memory_overhead
from runner.spec.instance import parse_instance
from tests.machine.test_shapes import HOSTS, ROM, QmpConnection
from tests.support.program_runs import ProgramStarter, until

EXAMPLE = Path(__file__).parents[2] / "examples" / "instances" / "tiny.toml"
DEMO = "/usr/share/instance-runner/demo"


def resident(pid: int) -> int:
    """Return the bytes that a process has without shared memory, which the guest's RAM is, but with its page tables."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(
        int(size) * 1024 for _, size in re.findall(r"^(RssAnon|RssFile|VmPTE):\s+(\d+) kB", status, re.MULTILINE)
    )


def test_the_smallest_machine_runs(start: ProgramStarter) -> None:
    text = EXAMPLE.read_text().replace(f"{DEMO}/vmlinuz", str(start.guest.kernel))
    text = text.replace(f"{DEMO}/initrd", str(start.guest.initrd)).replace("[cpu]\n", '[cpu]\naccel = "tcg"\n')
    run = start(text, boot=False)
    run.until_done()
    assert run.stop() == 0, run.log


def test_a_real_guest_and_its_daemons_need_no_more_than_calculated(start: ProgramStarter, tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    share = f'[[share]]\ntag = "share"\npath = "{tmp_path}/share"\n'
    run = start(f'[memory]\nsize = "512MiB"\nprealloc = true\n[[network]]\n{share}', "guest.word=xyzzy")
    run.until_done()
    assert "the guest's memory is there size=512MiB" in run.log
    processes = [run.pid(), *(pid for pids in run.descendants().values() for pid in pids)]
    used = sum(map(resident, processes))
    spec = parse_instance("spec.toml", (start.root / "spec.toml").read_bytes(), {})
    vcpus, size = spec.cpu.count, spec.memory.size
    assert vcpus != "all"
    assert size != "limits"
    calculated = memory_overhead(spec, vcpus, size, "tcg")
    print(f"used {used >> 20} of the {calculated >> 20} MiB calculated")
    assert calculated / 4 < used <= calculated
    assert run.stop() == 0


@pytest.mark.parametrize("more", ["", "disks", "locked", "disks locked"])
@pytest.mark.parametrize("vcpus", [1, 16, 64])
def test_qemu_needs_no_more_than_calculated(vcpus: int, more: str, tmp_path: Path) -> None:
    hardware = Hardware.from_json((HOSTS / "epyc-7543-2s-nps1.json").read_text())
    text = f'[cpu]\ncount = {vcpus}\naccel = "tcg"\n[memory]\nsize = "127MiB"\nbind = false\n'
    text += "lock = true\n" if "locked" in more else ""
    text += f'[guest]\nagent = false\n[boot]\nfirmware = "{ROM}"\n'
    disks = []
    for index in range(8 if "disks" in more else 0):
        disks.append(tmp_path / f"disk{index}")
        with disks[-1].open("wb") as disk:
            disk.truncate(1 << 20)
        text += f'[[disk]]\npath = "{disks[-1]}"\niothread = true\n'
    spec = parse_instance("spec.toml", text.encode(), {})
    facts = HostFacts(
        allowed_cpus=hardware.online,
        hardware=hardware,
        memory_nodes=CpuSet(node.id for node in hardware.numa_nodes),
        memory=1 << 40,
        state_directory=PurePosixPath("/none"),
        qemu=PurePosixPath(str(shutil.which("qemu-system-x86_64"))),
        sleep=PurePosixPath("/none"),
        files={ROM: FileFact("file", 1 << 18), **{PurePosixPath(disk): FileFact("file", 1 << 20) for disk in disks}},
    )
    machine = plan_instance("spec.toml", spec, facts).machine
    with contextlib.ExitStack() as held:
        ours, qmp, console, _ = (
            held.enter_context(end) for pair in (socket.socketpair(), socket.socketpair()) for end in pair
        )
        numbers = {"firmware": held.enter_context(files.opened(ROM))}
        for index, path in enumerate(disks):
            numbers[f"disk{index}"] = held.enter_context(files.opened(PurePosixPath(path), write=True))
        ram = tuple(held.enter_context(files.memory("ram", each.memory)) for each in machine.topology.numa_nodes)
        descriptors = QemuFds(qmp.fileno(), console.fileno(), ram, numbers)
        qemu = held.enter_context(
            subprocess.Popen(qemu_argv(machine, descriptors), pass_fds=descriptors.numbers(), stderr=subprocess.DEVNULL)
        )
        held.callback(qemu.kill)
        qmp.close()
        monitor = QmpConnection(ours, held)
        monitor.execute("cont")
        monitor.execute("query-status")
        if machine.ram.locked:
            for pool in ("main-loop", *(disk.name for disk in machine.disks)):
                assert monitor.execute("qom-get", path=f"/objects/{pool}", property="thread-pool-max") == WORKERS
            addresses = re.search(r"^VmSize:\s+(\d+) kB", Path(f"/proc/{qemu.pid}/status").read_text(), re.MULTILINE)
            assert addresses is not None
            idle = WORKERS * (1 + len(machine.disks)) * ADDRESSES_THREAD  # workers that do not exist yet
            assert int(addresses[1]) * 1024 + idle <= machine.lockable
        calculated = memory_overhead(spec, machine.vcpus, machine.memory, "tcg") - RUNNER
        # What a vCPU thread touches first it may touch later than QEMU answers.
        used = until(
            lambda: (found := resident(qemu.pid)) > calculated / 8 and found, "an eighth of what is calculated"
        )
        print(json.dumps({"vcpus": vcpus, "more": more, "used": used >> 20, "calculated": calculated >> 20}))
        assert used <= calculated
