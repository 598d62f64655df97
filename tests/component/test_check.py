"""`instance-runner check` on recorded trees of a node and a pod, on this machine, and with real and fake controllers."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path, PurePosixPath

import pytest
import trio
import trio.testing

from runner.base.errors import Status
from runner.base.judgement import Level
from runner.check.checker import ask_controller, check_host
from runner.check.checks import CheckedHost, Place
from runner.facts.hardware import Hardware
from tests.support.fake_cgroupfs import fake_cgroupfs, format_cpu_state
from tests.support.fake_kernel import FAKE_KERNEL
from tests.support.fake_node import Node, controlled
from tests.support.json_schemas import fitting
from tests.unit.kernel.test_sysfs import write, write_sysfs

EPYC = Hardware.from_json((Path(__file__).parents[1] / "data/hosts/epyc-7543-2s-nps1.json").read_text())
PROGRAM = (sys.executable, "-m", "runner", "check")
UID = "3ceda12c-3ee9-40fa-9f42-61428fe654a6"
FIRST_NAMESPACE, OTHER_NAMESPACE = 4026531836, 4026532256
MEMORY_STATE = {
    "policyName": "Static",
    "machineState": {
        "0": {
            "numberOfAssignments": 0,
            "memoryMap": {
                "memory": {"total": 9, "systemReserved": 1 << 30, "allocatable": 8, "reserved": 0, "free": 8},
            },
            "cells": [0],
        }
    },
    "checksum": 0,
}


def here(root: Path, environment: Mapping[str, str] | None = None) -> CheckedHost:
    socket = PurePosixPath(root / "run" / "controller.sock")
    return CheckedHost(root, root / "kubelet", socket, PurePosixPath(root / "state"), environment or {})


@pytest.fixture(scope="module")
def epyc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a machine with 128 CPUs and two NUMA nodes that passes every check, seen from its initial namespaces."""
    root = tmp_path_factory.mktemp("epyc")
    write_sysfs(root, EPYC)
    cpus = str(EPYC.online)
    status = f"Name:\tcheck\nPid:\t7\nSigBlk:\t0000000000004000\nSigCgt:\t0\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t0-1"
    for file, content in {
        "proc/self/status": status,
        "proc/self/cgroup": "0::/",
        "proc/self/uid_map": "         0          0 4294967295",
        "proc/sys/user/max_user_namespaces": 15000,
        "proc/self/oom_score_adj": 0,
        "proc/self/mountinfo": "35 24 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate",
        "proc/1/status": status,
        "proc/meminfo": "MemTotal:       1048576 kB",
        "proc/swaps": "Filename\tType\tSize\tUsed\tPriority",
        "proc/sys/kernel/osrelease": "6.12.48",
        "proc/sys/kernel/numa_balancing": 0,
        "proc/sys/fs/aio-max-nr": 65536,
        "proc/sys/fs/aio-nr": 1024,
        "proc/irq/9/effective_affinity_list": 0,
        "proc/irq/9/smp_affinity_list": cpus,
        "proc/irq/9/acpi/x": "",
        "proc/irq/10/smp_affinity_list": cpus,  # no device handles it
        "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc",
        "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force",
        "sys/devices/system/cpu/isolated": "",
        "sys/devices/system/cpu/nohz_full": "(null)",
        "sys/bus/pci/devices/0000:41:00.0/class": "0x030200",
        "sys/bus/pci/devices/0000:41:00.0/numa_node": 1,
    }.items():
        write(root / file, content)
    for process in ("self", "1"):
        (root / "proc" / process / "ns").mkdir()
    name_namespace(root, FIRST_NAMESPACE)
    (root / "sys/fs").mkdir()
    mount = fake_cgroupfs(root / "sys/fs/cgroup", cpus=cpus, mems="0-1")
    for name in ("system.slice", "kubepods.slice", "idle.slice"):
        mount.child(name).create()
    (mount.path / "kubepods.slice" / "cgroup.events").write_text("populated 1\n")
    return root


def name_namespace(root: Path, inode: int) -> None:
    link = root / "proc/self/ns/pid"
    link.unlink(missing_ok=True)
    link.symlink_to(f"pid:[{inode}]")


@pytest.fixture
def node(epyc: Path, tmp_path: Path) -> Path:
    """Return that machine as a node of Kubernetes, with one pod that has whole cores to itself."""
    root = tmp_path / "node"
    subprocess.run(["cp", "--archive", "--link", str(epyc), str(root)], check=True)
    entries = {UID: {"main": "1-2,65-66"}}
    write(root / "kubelet/cpu_manager_state", format_cpu_state("0,3-64,67-127", entries).decode())
    write(root / "kubelet/memory_manager_state", json.dumps(MEMORY_STATE))
    return root


POD_STATUS = "Name:\tcheck\nPid:\t1\nSigBlk:\t0000000000004000\nSigCgt:\t0\nCpus_allowed_list:\t1-2,65-66\nMems_allowed_list:\t0-1"


@pytest.fixture
def pod(epyc: Path, tmp_path: Path) -> Path:
    """Return that machine as seen from the container of a Guaranteed pod that runs this program."""
    root = tmp_path / "pod"
    subprocess.run(["cp", "--archive", "--link", str(epyc), str(root)], check=True)
    change(root, "proc/self/status", f"{POD_STATUS}\nSeccomp:\t2")
    change(root, "proc/1/status", POD_STATUS)
    change(root, "proc/self/oom_score_adj", -997)
    name_namespace(root, OTHER_NAMESPACE)
    change(root, "sys/fs/cgroup/cpu.max", "400000 100000")
    change(root, "sys/fs/cgroup/cpu.stat", "usage_usec 5\nnr_periods 7\nnr_throttled 0")
    return root


def change(root: Path, file: str, content: object) -> None:
    (root / file).unlink(missing_ok=True)  # a link to the machine's
    write(root / file, content)


IN_KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
OF_THIS_MACHINE = {"memlock", "mbind", "qemu", "dnsmasq", "virtiofsd", "sleep", "tun", "vhost-net", "kvm"}
"""Checks that read the machine the tests run on, or device nodes, which no recorded tree has."""


async def levels(where: CheckedHost) -> tuple[Place, dict[str, str]]:
    report = await check_host(where, None)
    return report.place, {
        each.subject: each.level.value for each in report.judgements if each.subject not in OF_THIS_MACHINE
    }


GOOD_KERNEL = dict.fromkeys(
    (
        "cgroups",
        "kernel",
        "clocksource",
        "swap",
        "transparent-hugepages",
        "hugepages",
        "numa-balancing",
        "native-aio",
        "isolated-cpus",
        "pci-numa-nodes",
    ),
    "ok",
)


async def test_a_well_configured_node_passes_every_check(node: Path) -> None:
    place, found = await levels(here(node))
    assert place is Place.NODE
    assert found == {
        **GOOD_KERNEL,
        "cores": "ok",
        "interrupts": "ok",
        "neighbours": "ok",
        "cpu-manager": "ok",
        "memory-manager": "ok",
        "topology-manager": "unknown",
        "disturbances": "unknown",
        "controller": "warning",
    }


async def test_a_guaranteed_pod_on_it(pod: Path) -> None:
    place, found = await levels(here(pod, IN_KUBERNETES))
    assert place is Place.POD
    assert found == {
        **GOOD_KERNEL,
        "own-cpus": "ok",
        "cpu-time": "ok",
        "cores": "ok",
        "interrupts": "ok",
        "pid-namespace": "ok",
        "signals": "ok",
        "seccomp": "ok",
        "controller": "warning",
    }


Fault = tuple[str, str | None, str, str, str]
"""A file, its changed content (``None``: removed), the check that finds it, its level, and a part of its sentence."""


async def all_noticed(where: CheckedHost, faults: list[Fault]) -> None:
    for file, content, *_ in faults:
        (where.root / file).unlink()  # a link to the good machine's
        if content is not None:
            write(where.root / file, content)
    found = (await check_host(where, None)).judgements
    for file, _, check, level, word in faults:
        about = [(each.level.value, each.found) for each in found if each.subject == check]
        assert any(each == level and word in sentence for each, sentence in about), (file, about)


async def test_every_misconfiguration_of_a_node_is_found(node: Path) -> None:
    entries = {UID: {"main": "1-2"}}
    await all_noticed(
        here(node),
        [
            (
                "proc/self/mountinfo",
                "3 2 0:3 / /c rw - cgroup cgroup rw,cpuset",
                "cgroups",
                "error",
                "v1's (hybrid: /c)",
            ),
            ("proc/sys/kernel/osrelease", "5.15.0", "kernel", "warning", "before 6.2"),
            (
                "sys/devices/system/clocksource/clocksource0/current_clocksource",
                "hpet",
                "clocksource",
                "warning",
                "hpet",
            ),
            ("proc/swaps", "Filename Type\n/dev/vdb partition 1048576 0 -2", "swap", "warning", "/dev/vdb (1024 MiB)"),
            (
                "sys/kernel/mm/transparent_hugepage/shmem_enabled",
                "[never]",
                "transparent-hugepages",
                "warning",
                "never",
            ),
            ("proc/sys/kernel/numa_balancing", "1", "numa-balancing", "warning", "is 1"),
            ("sys/devices/system/cpu/isolated", "0-3", "isolated-cpus", "warning", "CPUs '0,3' of the shared pool"),
            ("sys/bus/pci/devices/0000:41:00.0/numa_node", "-1", "pci-numa-nodes", "warning", "0000:41:00.0 (display)"),
            (
                "sys/devices/system/node/node1/hugepages/hugepages-1048576kB/free_hugepages",
                "0",
                "hugepages",
                "warning",
                "none of 1GiB is free on NUMA node 1",
            ),
            ("proc/irq/9/effective_affinity_list", "2-70", "interrupts", "warning", "1-2': 9 (acpi)"),
            (
                "sys/fs/cgroup/system.slice/cgroup.events",
                "populated 1",
                "neighbours",
                "warning",
                "system.slice may run",
            ),
            (
                "kubelet/cpu_manager_state",
                format_cpu_state("0,3-127", entries).decode(),
                "cores",
                "warning",
                f"pod {UID}: ",
            ),
            ("kubelet/memory_manager_state", '{"policyName": "None"}', "memory-manager", "warning", "'None'"),
        ],
    )


async def test_a_kubelet_without_exclusive_cpus(node: Path) -> None:
    state = format_cpu_state("", policy="none").decode()
    await all_noticed(
        here(node),
        [
            ("sys/fs/cgroup/cgroup.controllers", "cpu memory", "cgroups", "error", "does not offer cpuset"),
            ("kubelet/cpu_manager_state", state, "cpu-manager", "error", "'none'"),
            ("kubelet/memory_manager_state", "{", "memory-manager", "unknown", "is not JSON"),
        ],
    )


async def test_every_misconfiguration_of_a_pod_is_found(pod: Path) -> None:
    await all_noticed(
        here(pod, IN_KUBERNETES),
        [
            ("proc/self/oom_score_adj", "900", "own-cpus", "error", "the pod is Burstable (its oom_score_adj is 900)"),
            ("sys/fs/cgroup/cpu.max", "250000 100000", "cpu-time", "error", "the time of 2.5 CPUs"),
            ("proc/self/status", f"{POD_STATUS}\nSeccomp:\t0", "seccomp", "warning", "user namespaces may be made"),
        ],
    )


async def test_facts_hidden_from_a_pod_are_unknown(pod: Path) -> None:
    await all_noticed(
        here(pod, IN_KUBERNETES),
        [
            ("proc/self/oom_score_adj", "0", "own-cpus", "unknown", "QoS class cannot be seen"),
            ("sys/fs/cgroup/cgroup.controllers", None, "cpu-time", "unknown", "no cgroup v2 can be seen"),
            ("proc/self/mountinfo", "", "cgroups", "unknown", "no cgroup hierarchy can be seen"),
            ("sys/devices/system/cpu/isolated", None, "isolated-cpus", "unknown", "does not say"),
            ("proc/1/status", None, "pid-namespace", "unknown", "cannot read the status of process 1"),
        ],
    )


async def test_a_pod_with_the_hosts_processes(pod: Path) -> None:
    name_namespace(pod, FIRST_NAMESPACE)
    [found] = [
        each
        for each in (await check_host(here(pod, IN_KUBERNETES), None)).judgements
        if each.subject == "pid-namespace"
    ]
    assert (found.level, "hostPID" in found.remedy) == (Level.ERROR, True)


async def test_missing_state_files_leave_their_checks_unknown(node: Path) -> None:
    for name in ("cpu_manager_state", "memory_manager_state"):
        (node / "kubelet" / name).unlink()
    _, found = await levels(here(node))
    unknown = {"cpu-manager", "memory-manager", "topology-manager", "cores", "interrupts", "neighbours", "disturbances"}
    assert {check for check, level in found.items() if level == "unknown"} == unknown


async def test_checks_without_a_plan_are_unknown_or_estimated(pod: Path) -> None:
    """Without a plan every allowed CPU counts as a vCPU, and the memory to lock depends on their number."""
    (pod / "dev/vfio").mkdir(parents=True)
    where = here(pod, IN_KUBERNETES)
    text = '[boot]\nkernel = "/none"\n[cpu]\ncount = {}\n[memory]\nlock = {}\n'

    async def found(count: str, lock: str) -> dict[str, tuple[str, str]]:
        report = await check_host(where, ("spec.toml", text.format(count, lock).encode()))
        return {each.subject: (each.level.value, each.found) for each in report.judgements}

    everything = await found('"all"', "true")
    assert everything["boot.kernel"][0] == "error"
    assert everything["cpu-time"][1].endswith(" to 4"), "the four CPUs of the pod"
    assert everything["memlock"][0] == "unknown"
    assert (await found("1", "true"))["memlock"][0] != "unknown"
    assert (await found('"all"', "false"))["memlock"] == ("ok", "nothing is locked")
    assert (await found("1", "false"))["memlock"] == ("ok", "nothing is locked"), (
        "with a spec /dev/vfio has no influence"
    )


# -- the controller


async def test_a_controller_is_asked(tmp_path: Path) -> None:
    node = Node.new(tmp_path)
    async with controlled(node):
        answer = await ask_controller(PurePosixPath(node.socket))
    assert isinstance(answer, dict)
    assert (answer["protocol"], answer["policy"], answer["frozen"]) == (3, "static", None)
    gone = await ask_controller(PurePosixPath(node.socket))
    assert gone == f"cannot reach the controller at '{node.socket}': No such file or directory"
    assert await ask_controller(PurePosixPath(tmp_path / "none" / "socket")) is None


@contextlib.asynccontextmanager
async def answering_controller(path: Path, words: bytes | None) -> AsyncIterator[None]:
    """Answer every client with *words*, or not at all."""

    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        if words is None:
            await trio.sleep_forever()
        else:
            await stream.send_all(words)
        await stream.aclose()

    listener = trio.socket.socket(trio.socket.AF_UNIX)
    await listener.bind(str(path))
    listener.listen()
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, answer, [trio.SocketListener(listener)])
        yield
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (b"HTTP/1.1 400\r\n", "cannot understand the controller: it answered 'getStatus' with b'HTTP/1.1 400"),
        (b"", "cannot reach the controller"),
        (b'{"jsonrpc": "2.0", "error": {"code": -32005, "message": "too many"}, "id": null}\n', "too many"),
        (b'{"jsonrpc": "2.0", "result": [], "id": 1}\n', "its status is []"),
        (None, "it has not answered for 20 s"),
    ],
)
async def test_a_controller_that_does_not_answer(
    tmp_path: Path, words: bytes | None, reason: str, autojump_clock: trio.testing.MockClock
) -> None:
    autojump_clock.autojump_threshold = 0.2  # the kernel's part takes real time
    async with answering_controller(tmp_path / "socket", words):
        answer = await ask_controller(PurePosixPath(tmp_path / "socket"))
    assert isinstance(answer, str)
    assert reason in answer


async def test_a_socket_without_a_listener(tmp_path: Path) -> None:
    with trio.socket.socket(trio.socket.AF_UNIX) as left_behind:
        await left_behind.bind(str(tmp_path / "socket"))
    output = await ask_controller(PurePosixPath(tmp_path / "socket"))
    assert isinstance(output, str)
    assert output.endswith(": Connection refused")


# -- the command


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *arguments], check=False, capture_output=True, text=True)


def test_this_machine() -> None:
    done = command("--json")
    report = fitting("check", json.loads(done.stdout))
    assert done.returncode == (Status.FINDINGS if report["verdict"] == "error" else 0), done.stderr
    assert done.stderr == ""
    found = {each["subject"]: each["level"] for each in report["judgements"]}
    assert found["mbind"] == "ok", "the tests run as root and without a seccomp profile"
    assert found["qemu"] == "ok", "the tests take a QEMU"


def test_an_impossible_spec_is_an_error(tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(f'[cpu]\ncount = {len(os.sched_getaffinity(0)) + 1}\n[boot]\nkernel = "{tmp_path}/none"\n')
    done = command(spec)
    assert done.returncode == Status.FINDINGS
    errors = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("error")]
    assert [each for each in errors if each.startswith(("cpu.", "boot."))] == ["cpu.count", "boot.kernel"]
    spec.write_text("[cpu]\ncounts = 1\n")
    [unknown] = [
        each for each in json.loads(command("--json", spec).stdout)["judgements"] if each["subject"] == "cpu.counts"
    ]
    assert (unknown["found"], unknown["remedy"]) == ("unknown key", "did you mean 'count'?")


def test_a_spec_that_fits_is_reported_as_fitting(tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    (tmp_path / "kernel").write_bytes(FAKE_KERNEL)
    spec.write_text(f'[cpu]\nplacement = "affinity"\n[boot]\nkernel = "{tmp_path}/kernel"\n')
    found = json.loads(command("--json", spec).stdout)["judgements"]
    about = {each["found"] for each in found}
    [fits] = [each["found"] for each in found if each["subject"] == "spec"]
    assert fits.startswith(f"{spec}: 1 vCPU on CPUs '")
    assert any(sentence.startswith("placement 'affinity' is second best") for sentence in about)
    assert {each["subject"] for each in found if "/dev/kvm" in each["found"]} <= {"kvm"}, "it is reported once"


def test_a_spec_that_cannot_be_read_is_a_wrong_command_line() -> None:
    assert command("/no/such/spec").returncode == Status.USAGE


@pytest.mark.parametrize(("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_are_for_terminals(environment: dict[str, str], *, coloured: bool) -> None:
    ours, theirs = pty.openpty()
    plain = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(PROGRAM, stdout=theirs, env={**plain, **environment})
    os.close(theirs)
    output = b""
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while data := os.read(ours, 65536):
            output += data
    os.close(ours)
    process.wait()
    assert (b"\x1b[32mok     \x1b[0m" in output) == coloured
    assert b"machine: " in output or b"node: " in output or b"container: " in output or b"pod: " in output
