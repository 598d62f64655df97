"""This machine's QEMU gets guests of every shape, and reports them as they were planned."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from runner.base.cpuset import CpuSet
from runner.base.errors import SpecError
from runner.facts.disk import FileFact
from runner.facts.hardware import Hardware
from runner.facts.host import HostFacts
from runner.kernel import files
from runner.plan.argv.qemu import qemu_argv
from runner.plan.argv.qemu_endpoints import QemuFds
from runner.plan.instance import plan_instance
from runner.plan.machine import MachinePlan
from runner.spec.instance import parse_instance

HOSTS = Path(__file__).parents[1] / "data" / "hosts"
ROM = PurePosixPath("/usr/share/seabios/bios-256k.bin")
FIRST_CORES = {
    "epyc-7543-2s-nps1": "1,65,33,97",
    "epyc-7543-2s-nps4": "1,65,9,73,17,81,25,89,33,97,41,105,49,113,57,121",
    "xeon-8280l-8s": "1,29,57,85,113,141,169,197",
    "xeon-8468-2s-snc4": "1,97,13,109,25,121,37,133",
}
"""A core of each NUMA node (of one socket, with sub-NUMA clustering)."""
SHAPES = [
    *((host, cpus) for host, cpus in FIRST_CORES.items()),
    *(("vm-8", f"0-{count - 1}") for count in (1, 3, 5, 7)),
    ("epyc-7543-2s-nps1", "31-33"),
    ("epyc-7543-2s-nps1", "29-33"),
    ("epyc-7543-2s-nps1", "28-34"),
    ("epyc-7543-2s-nps1", "4-11,68-75"),
    ("power9-2s", "8-15"),
    ("core-i9-13900k", "2-5,16-17"),
]


def planned(host: str, cpus: str, more: str = "[guest]\nagent = false\n") -> MachinePlan:
    hardware = Hardware.from_json((HOSTS / f"{host}.json").read_text())
    count = len(CpuSet.parse(cpus))
    # Not bound, because this machine does not have the NUMA nodes of *host*; tests/node tests the binding.
    text = f'[cpu]\ncount = {count}\ncpus = "{cpus}"\naccel = "tcg"\nmodel = "Skylake-Server"\n[memory]\nsize = "127MiB"\nbind = false\n'
    facts = HostFacts(
        allowed_cpus=hardware.online,
        hardware=hardware,
        memory_nodes=CpuSet(node.id for node in hardware.numa_nodes),
        memory=1 << 40,
        state_directory=PurePosixPath("/none"),
        qemu=PurePosixPath(str(shutil.which("qemu-system-x86_64"))),
        sleep=PurePosixPath("/none"),
        files={ROM: FileFact("file", 1 << 18)},
    )
    document = parse_instance("spec.toml", f'{text}[boot]\nfirmware = "{ROM}"\n{more}'.encode())
    return plan_instance("spec.toml", document, facts).machine


class QmpConnection:
    """A connection to the monitor of a QEMU that was just started."""

    def __init__(self, end: socket.socket, held: contextlib.ExitStack) -> None:
        end.settimeout(60)
        self._lines = held.enter_context(end.makefile("rwb"))
        self._lines.readline()
        self.execute("qmp_capabilities")

    def execute(self, command: str, **arguments: str) -> Any:
        self._lines.write(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        self._lines.flush()
        while "return" not in (reply := json.loads(self._lines.readline())):
            assert "error" not in reply, reply
        return reply["return"]


@pytest.mark.parametrize(("host", "cpus"), SHAPES)
def test_qemu_reports_the_planned_shape(host: str, cpus: str) -> None:
    machine = planned(host, cpus)
    topology = machine.topology
    with contextlib.ExitStack() as held:
        ours, qmp, console, _ = (
            held.enter_context(end) for pair in (socket.socketpair(), socket.socketpair()) for end in pair
        )
        rom = held.enter_context(files.opened(ROM))
        ram = tuple(held.enter_context(files.memory("ram", each.memory)) for each in topology.numa_nodes)
        descriptors = QemuFds(qmp.fileno(), console.fileno(), ram, {"firmware": rom})
        argv = qemu_argv(machine, descriptors)
        qemu = held.enter_context(subprocess.Popen(argv, pass_fds=descriptors.numbers(), stderr=subprocess.PIPE))
        held.callback(qemu.kill)
        qmp.close()
        monitor = QmpConnection(ours, held)
        slots = [slot["props"] for slot in monitor.execute("query-hotpluggable-cpus")]
        vcpus = {vcpu["cpu-index"]: vcpu["props"] for vcpu in monitor.execute("query-cpus-fast")}
        backends = {backend["id"]: backend["size"] for backend in monitor.execute("query-memdev")}
        monitor.execute("quit")
        _, output = qemu.communicate(timeout=60)
        assert qemu.returncode == 0
        assert [line for line in output.splitlines() if b"TCG doesn't support" not in line] == []
    assert len(slots) == len(vcpus) == topology.vcpus, "no vCPU is missing, no slot is empty"
    places = ("socket-id", "die-id", "core-id", "thread-id")
    sizes = tuple(len({props.get(place, 0) for props in slots}) for place in places)
    assert sizes == (topology.sockets, topology.dies, topology.cores, topology.threads)
    several = len(topology.numa_nodes) > 1
    for number, each in enumerate(topology.numa_nodes):
        assert not several or {index for index, props in vcpus.items() if props["node-id"] == number} == set(each.vcpus)
        assert backends[f"ram{number}" if several else "ram"] == each.memory
    cores = Counter(tuple(props.get(place, 0) for place in places[:3]) for props in vcpus.values())
    assert set(cores.values()) == {topology.threads}


@pytest.mark.parametrize(
    ("host", "cpus", "disks"), [("vm-8", "0-1", 26), ("xeon-8280l-8s", FIRST_CORES["xeon-8280l-8s"], 18)]
)
def test_the_root_bus_has_room_for_what_the_plan_allows(host: str, cpus: str, disks: int) -> None:
    more = '[guest]\nwatchdog = "reset"\n[hotplug]\ndisks = {}\n' + f'[[disk]]\npath = "{ROM}"\nread_only = true\n' * (
        disks - 2
    )
    with pytest.raises(SpecError, match=r"30 slots, and 31 are wanted: .*; lower hotplug\.disks to 2$"):
        planned(host, cpus, more.format(3))
    machine = planned(host, cpus, more.format(2))
    with contextlib.ExitStack() as held:
        ours, qmp, console, _ = (
            held.enter_context(end) for pair in (socket.socketpair(), socket.socketpair()) for end in pair
        )
        agent, _ = (held.enter_context(end) for end in socket.socketpair())
        names = ("firmware", *(disk.name for disk in machine.disks))
        numbers = {name: held.enter_context(files.opened(ROM)) for name in names}
        ram = tuple(held.enter_context(files.memory("ram", each.memory)) for each in machine.topology.numa_nodes)
        descriptors = QemuFds(qmp.fileno(), console.fileno(), ram, numbers, guest_agent_channel=agent.fileno())
        argv = qemu_argv(machine, descriptors)
        qemu = held.enter_context(subprocess.Popen(argv, pass_fds=descriptors.numbers(), stderr=subprocess.DEVNULL))
        held.callback(qemu.kill)
        qmp.close()
        buses = QmpConnection(ours, held).execute("query-pci")
        [root] = [bus for bus in buses if bus["bus"] == 0]
        assert {device["slot"] for device in root["devices"]} == set(range(32)), "no slot is left"
