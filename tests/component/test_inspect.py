"""``instance-runner inspect`` over real processes: from their container by a receipt, from the node by its tree."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from runner.base.errors import HostError, Status, explain
from runner.facts.roots import Roots
from runner.kernel.tracefs import tracefs_reached
from runner.kubelet.pod_cgroups import NOT_SEALED
from tests.support.fake_instance import PYTHON, FakeInstance, fake_instance
from tests.support.json_schemas import fitting

FLOAT, *_, CPU = sorted(os.sched_getaffinity(0))
MIB = 1 << 20
INSPECT = (*PYTHON, "-m", "runner", "inspect")
_MISSING = "-sys_ptrace,-perfmon,-sys_admin"  # any one of them is enough (kernel/fork.c: may_access_mm)
NO_TRACE = ("setpriv", f"--bounding-set={_MISSING}", f"--inh-caps={_MISSING}")
UID = "3ceda12c-3ee9-40fa-9f42-61428fe654a6"

pytestmark = pytest.mark.skipif(FLOAT == CPU, reason="a second CPU is missing")


@attrs.frozen
class Instance:
    """Processes with the roles of an instance of one vCPU on the last CPU, and its receipt."""

    fake_instance: FakeInstance
    receipt: Path
    qemu: int
    vcpu: int
    anchor: int

    def inspect(self, *more: str) -> subprocess.CompletedProcess[str]:
        """Run inspect in the container."""
        return subprocess.run(self.command(*more), check=False, capture_output=True, text=True)

    def command(self, *more: str, before: tuple[str, ...] = ()) -> tuple[str, ...]:
        return self.fake_instance.command(*before, *INSPECT, "--state-dir", str(self.receipt.parent), *more)

    def judged(self, rule: str) -> tuple[str, str]:
        """Return the level of *rule*, and what was found; it has one judgement."""
        return judged(json.loads(self.inspect("--json").stdout), rule)


def judged(report: dict[str, Any], rule: str) -> tuple[str, str]:
    judgements = (*report["instances"][0]["judgements"], *report["judgements"])
    [found] = [(each["level"], each["found"]) for each in judgements if each["subject"] == rule]
    return found


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Instance]:
    with fake_instance() as found:
        found.request("pin", 0, [FLOAT])
        anchor = found.start_anchor()
        found.request("pin", anchor, [FLOAT])
        dnsmasq, _ = found.start("dnsmasq", [FLOAT])
        qemu, threads = found.start(
            "qemu-system-x86", [FLOAT], {"IO mon_iothread": [FLOAT], "CPU 0/TCG": [CPU]}, 4 * MIB
        )
        vcpu = threads["CPU 0/TCG"]
        roles = {1: "runner", anchor: "anchor", dnsmasq: "dnsmasq", qemu: "emulator"}
        found.request("receipt", str(tmp_path / "receipt.json"), [CPU], roles, {vcpu: 0})
        yield Instance(found, tmp_path / "receipt.json", qemu, vcpu, anchor)


def test_a_good_instance_from_its_container(instance: Instance) -> None:
    shown = instance.inspect()
    assert shown.returncode == 0, shown.stdout + shown.stderr
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert lines[1][:6] == ["ROLE", "TID", "NAME", "ALLOWED_CPUS", "RUNNING_ON", "NUMA_NODE"]
    assert ["vcpu", "0", str(instance.vcpu), "CPU", "0/TCG", str(CPU), str(CPU), "0"] in [line[:8] for line in lines]
    assert [" ".join(line[:2]) for line in lines if line and line[0] in {"ok", "unknown", "error"}] == [
        "ok vcpus",
        "unknown exclusive",
        "ok local",
        *(["ok charged"] if "ok       charged" in shown.stdout else ["unknown charged"]),
        "unknown kubelet",
    ]
    assert "cannot be seen from inside a PID namespace; inspect on the node" in shown.stdout


def test_why_the_guarantee_is_no_better_is_taken_from_the_receipt(instance: Instance) -> None:
    instance.receipt.write_text(
        json.dumps(json.loads(instance.receipt.read_text()) | {"guarantee_reason": "the kernel is old"})
    )
    assert "placement affinity, guarantee arranged (the kernel is old)\n" in instance.inspect().stdout
    (found,) = json.loads(instance.inspect("--json").stdout)["instances"]
    assert (found["guarantee"], found["guarantee_reason"]) == ("arranged", "the kernel is old")


def test_the_json_report(instance: Instance) -> None:
    report = fitting("inspect", json.loads(instance.inspect("--json").stdout))
    assert (report["version"], report["seen_from"], report["verdict"]) == (2, "container", "unknown")
    (found,) = report["instances"]
    assert (found["name"], found["backend"], found["cpus"]) == ("instance", "affinity", str(CPU))
    assert (found["guarantee"], found["guarantee_reason"]) == ("arranged", None)
    assert [thread["role"] for thread in found["threads"]] == [
        "runner",
        "anchor",
        "dnsmasq",
        "emulator",
        "emulator",
        "vcpu",
    ]
    assert sum(found["memory"]["small_pages"].values()) == 4 * MIB
    assert found["threads"][-1]["allowed_cpus"] == str(CPU)


def test_an_intruder_is_named(instance: Instance) -> None:
    pid, _ = instance.fake_instance.start("intruder", [FLOAT, CPU])
    shown = instance.inspect()
    assert shown.returncode == 3, shown.stdout
    assert f"error    exclusive  other (thread {pid}, 'intruder')" in shown.stdout
    assert f"may run on '{CPU}'" in shown.stdout
    instance.fake_instance.request("pin", pid, [FLOAT])
    assert instance.inspect().returncode == 0


def test_a_vcpu_that_lost_its_pin(instance: Instance) -> None:
    instance.fake_instance.request("pin", instance.vcpu, [FLOAT, CPU])
    both = f"{FLOAT}-{CPU}" if CPU == FLOAT + 1 else f"{FLOAT},{CPU}"
    sentence = f"vcpu 0 (thread {instance.vcpu}, 'CPU 0/TCG') may run on '{both}' instead of '{CPU}'"
    assert instance.judged("vcpus") == ("error", sentence)
    assert instance.inspect().returncode == 3


def test_qemu_has_died(instance: Instance) -> None:
    instance.fake_instance.request("end", instance.qemu)
    assert instance.judged("vcpus") == ("error", "vCPU 0 has no thread")
    assert instance.judged("local") == ("unknown", "there is no QEMU")


def test_an_anchor_started_again_is_the_anchor(instance: Instance) -> None:
    instance.fake_instance.request("end", instance.anchor)
    pid = instance.fake_instance.start_anchor()
    instance.fake_instance.request("pin", pid, [FLOAT])
    report = fitting("inspect", json.loads(instance.inspect("--json").stdout))
    roles = {thread["pid"]: thread["role"] for thread in report["instances"][0]["threads"]}
    assert roles[pid] == "anchor"
    assert report["verdict"] != "error"


def test_memory_that_may_not_be_read(instance: Instance) -> None:
    """Docker's default capabilities do not allow it, because QEMU runs as another user."""
    shown = subprocess.run(instance.command("--json", before=NO_TRACE), check=True, capture_output=True, text=True)
    report = json.loads(shown.stdout)
    assert judged(report, "vcpus")[0] == "ok"
    reason = f"cannot read the memory of process {instance.qemu}: Permission denied; inspect on the node, as root"
    assert judged(report, "local") == ("unknown", reason)


def test_watching_prints_changes_until_ctrl_c(instance: Instance) -> None:
    with subprocess.Popen(instance.command("--watch", "0.1"), stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        for line in watching.stdout:
            if line.startswith("+ kubelet unknown"):
                break
        instance.fake_instance.request("pin", instance.vcpu, [FLOAT, CPU])
        changed = [watching.stdout.readline() for _ in range(4)]
        assert [line.split()[:3] for line in changed] == [
            ["-", "instance", "vcpu"],
            ["-", "instance", "vcpus"],
            ["+", "instance", "vcpu"],
            ["+", "instance", "vcpus"],
        ]
        assert "vcpus error" in changed[3]
        inspector = int(Path(f"/proc/{watching.pid}/task/{watching.pid}/children").read_text())
        os.kill(inspector, signal.SIGINT)
        assert watching.wait(30) == 3


def test_watching_on_a_terminal_draws_the_table(instance: Instance) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(instance.command("--watch", "0.1"), stdout=theirs) as watching:
        os.close(theirs)
        shown = b""
        while shown.count(b"\x1b[H\x1b[2J") < 3:
            shown += os.read(ours, 65536)
        os.kill(int(Path(f"/proc/{watching.pid}/task/{watching.pid}/children").read_text()), signal.SIGINT)
        assert watching.wait(30) == 0
    os.close(ours)
    assert shown.count(b"CPU 0/TCG") >= 2


# -- from the node ---------------------------------------------------------------------------------------------------


@attrs.frozen
class Node:
    """A controller's tree and a kubelet's state file in ordinary directories, with the threads of a fake instance."""

    directory: Path

    @property
    def domain(self) -> Path:
        return self.directory / "stelia" / f"instance-{UID}"

    @property
    def group(self) -> Path:
        """Return the cgroup of its vCPUs."""
        return self.domain / "vcpus"

    def write(self, default: str = str(FLOAT), float_cpus: str = str(FLOAT)) -> None:
        state = {"policyName": "static", "defaultCpuSet": default, "entries": {UID: {"main": str(CPU)}}, "checksum": 0}
        for group in (self.domain / "float", self.group):
            group.mkdir(parents=True, exist_ok=True)
        (self.directory / "cpu_manager_state").write_text(json.dumps(state))
        (self.domain / "float" / "cpuset.cpus.effective").write_text(float_cpus)
        (self.group / "cpuset.cpus.effective").write_text(str(CPU))

    def inspect(self, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*more), check=False, capture_output=True, text=True)

    def command(self, *more: str) -> tuple[str, ...]:
        where = ("--root", str(self.directory / "stelia"), "--kubelet-dir", str(self.directory), "--pod-logs-dir=/none")
        return (*INSPECT, "--state-dir", str(self.directory / "none"), *where, *more)

    def report(self, *more: str) -> dict[str, Any]:
        report: dict[str, Any] = fitting("inspect", json.loads(self.inspect("--json", *more).stdout))
        return report


@pytest.fixture
def node(tmp_path: Path, instance: Instance) -> Node:
    node = Node(tmp_path / "node")
    node.write()
    (node.group / "cgroup.threads").write_text(f"{instance.fake_instance.outside(instance.vcpu)}\n")
    return node


def test_from_the_node_an_instance_is_the_processes_in_qemus_pid_namespace(node: Node, instance: Instance) -> None:
    instance.fake_instance.start("passt.avx2", [])
    report = node.report()
    (found,) = report["instances"]
    assert (report["seen_from"], found["name"], found["cpus"]) == ("node", UID, str(CPU))
    outside = instance.fake_instance.outside
    roles = [(thread["tid"], thread["role"], thread["vcpu"]) for thread in found["threads"]]
    assert (outside(instance.vcpu), "vcpu", 0) in roles
    assert (outside(instance.qemu), "emulator", None) in roles
    assert (outside(1), "runner", None) in roles
    assert (outside(instance.anchor), "anchor", None) in roles
    assert [role for _, role, _ in roles].count("dnsmasq") == 1
    assert [role for _, role, _ in roles].count("passt") == 1
    assert len(roles) == 7
    assert sum(found["memory"]["small_pages"].values()) == 4 * MIB


def test_from_the_node_a_pod_has_the_name_that_the_kubelet_gives_its_logs(node: Node) -> None:
    logs = node.directory / "logs"
    (logs / f"prod_web-1_{UID}").mkdir(parents=True)
    (logs / "something else").mkdir()
    (found,) = node.report("--pod-logs-dir", str(logs))["instances"]
    assert (found["name"], found["pod"], found["pod_uid"]) == ("web-1", "prod/web-1", UID)
    assert found["uptime"] >= 0
    head, row, *_ = node.inspect("--pod-logs-dir", str(logs)).stdout.splitlines()
    assert head.split() == ["INSTANCE", "POD", "UUID", "CPUS", "UPTIME", "VERDICT"]
    assert row.split()[:4] == ["web-1", "prod/web-1", UID, str(CPU)]
    assert "error: " in row


def test_from_the_node_other_processes_are_intruders(node: Node) -> None:
    """This machine's other processes may run anywhere, and this test is one of them."""
    shown = node.inspect("--json")
    assert shown.returncode == 3
    found = json.loads(shown.stdout)["instances"][0]["judgements"]
    intruders = [each["found"] for each in found if (each["subject"], each["level"]) == ("exclusive", "error")]
    assert any(f"other (thread {os.getpid()}, " in each for each in intruders)


def test_float_is_compared_with_the_kubelets_shared_pool(node: Node) -> None:
    assert judged(node.report(), "kubelet") == ("ok", f"float has '{FLOAT}', the kubelet's shared pool")
    node.write(float_cpus=f"{FLOAT},{CPU}")
    level, found = judged(node.report(), "kubelet")
    assert (level, f"but the kubelet's shared pool is '{FLOAT}'" in found) == ("error", True)
    (node.directory / "cpu_manager_state").write_text("{")
    level, found = judged(node.report(), "kubelet")
    assert (level, "cpu_manager_state" in found) == ("unknown", True)


@pytest.mark.parametrize(
    ("partition", "refused", "guarantee", "reason"),
    [
        ("isolated", "", "enforced", None),
        ("isolated", "as it was before", "enforced", None),
        ("member", "", "arranged", None),
        ("member", "the kernel says 'isolated invalid (…)'", "arranged", "the kernel says 'isolated invalid (…)'"),
        (None, "", "arranged", None),
        (
            "isolated invalid (Enable partition not permitted)",
            "",
            "arranged",
            "its partition is 'isolated invalid (Enable partition not permitted)'",
        ),
    ],
)
def test_the_guarantee_is_that_of_the_kernel(
    node: Node, instance: Instance, partition: str | None, refused: str, guarantee: str, reason: str | None
) -> None:
    if partition is not None:
        (node.group / "cpuset.cpus.partition").write_text(f"{partition}\n")
    if refused:
        os.setxattr(node.domain, NOT_SEALED, refused.encode())
    # An isolated partition takes its CPUs from the pod's cgroup, whatever its cpuset.cpus, and so from the anchors.
    anchor_cpus = [FLOAT] if guarantee == "enforced" else [FLOAT, CPU]
    instance.fake_instance.request("pin", instance.anchor, anchor_cpus)
    report = node.report()
    (found,) = report["instances"]
    assert (found["guarantee"], found["guarantee_reason"]) == (guarantee, reason)
    assert found["cpus"] == str(CPU)
    assert judged(report, "kubelet")[0] == "ok"
    anchor = instance.fake_instance.outside(instance.anchor)
    assert not any(f"(thread {anchor}, " in each["found"] for each in found["judgements"])


def test_an_instance_is_chosen_by_the_beginning_of_its_uuid(node: Node) -> None:
    other = node.domain.with_name("instance-416de7c2-21de-472d-817c-fa9d4306cb7d")
    (other / "vcpus").mkdir(parents=True)
    (other / "vcpus/cpuset.cpus.effective").write_text(str(FLOAT))
    (other / "vcpus/cgroup.threads").write_text("")
    assert [found["name"] for found in node.report()["instances"]] == [UID, other.name.removeprefix("instance-")]
    (empty,) = node.report("416de")["instances"]
    assert [each["level"] for each in empty["judgements"][:1]] == ["unknown"]
    refused = node.inspect("77")
    assert refused.returncode == 4
    assert refused.stderr.startswith("instance-runner: cannot find an instance whose uuid begins with '77' in ")
    assert UID in refused.stderr


def test_without_permission_to_trace_memory_is_unknown(node: Node, instance: Instance) -> None:
    shown = subprocess.run((*NO_TRACE, *node.command("--json")), check=False, capture_output=True, text=True)
    (found,) = json.loads(shown.stdout)["instances"]
    assert instance.fake_instance.outside(instance.vcpu) in {thread["tid"] for thread in found["threads"]}
    assert ["Permission denied" in each["found"] for each in found["judgements"] if each["subject"] == "local"] == [
        True
    ]


def test_without_instances_the_error_names_both_places(tmp_path: Path) -> None:
    argv = (*INSPECT, "--state-dir", str(tmp_path), "--root", str(tmp_path / "no"))
    shown = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert (shown.returncode, shown.stdout) == (4, "")
    assert shown.stderr.startswith(
        f"instance-runner: cannot find an instance: there is neither {tmp_path}/receipt.json nor {tmp_path}/no; run this in"
    )


@pytest.mark.parametrize("seconds", ["0", "x", "nan", "-1"])
def test_the_interval_is_a_number_of_seconds(seconds: str) -> None:
    refused = subprocess.run((*INSPECT, f"--watch={seconds}"), check=False, capture_output=True, text=True)
    assert refused.returncode == 2
    assert f"{seconds!r} is not a number of seconds from 0.1 to 86400" in refused.stderr


@pytest.mark.parametrize("content", [b'{"version": 1, "backend": "\xff"}', b"[" * 200_000], ids=["not UTF-8", "deep"])
def test_a_file_that_is_no_receipt_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "receipt.json").write_bytes(content)
    argv = (*INSPECT, "--state-dir", str(tmp_path))
    ended = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert f"instance-runner: cannot use {tmp_path}/receipt.json: it " in ended.stderr


# -- what ran on its CPUs ----------------------------------------------------------------------------------------------

BUSY = """
import os, sys, time
os.sched_setaffinity(0, [int(sys.argv[1])])
while True:
    pass
"""


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    """Return a loop on the vCPU's CPU."""
    with subprocess.Popen((sys.executable, "-I", "-S", "-c", BUSY, str(CPU))) as loop:
        yield loop
        loop.kill()


@pytest.fixture
def tracefs() -> Iterator[Path]:
    with contextlib.ExitStack() as held:
        try:
            path = held.enter_context(tracefs_reached(Roots().sys))
        except HostError as error:
            pytest.skip(f"tracefs is missing: {explain(error)}")
        yield path


def left(tracefs: Path) -> set[str]:
    return {each.name for each in (tracefs / "instances").iterdir() if each.name.startswith("instance-runner-")}


@pytest.mark.usefixtures("tracefs")
def test_a_loop_on_the_vcpus_cpu_is_named(node: Node, busy: subprocess.Popen[bytes]) -> None:
    shown = node.inspect("--trace", "0.5", "--json")
    assert shown.returncode == 3, shown.stderr
    report = fitting("trace", json.loads(shown.stdout))
    assert (report["source"], report["verdict"], report["seen_from"]) == ("sched_switch", "error", "node")
    assert 0.5e9 <= report["nanoseconds"] < 5e9
    [account] = report["instances"][0]["accounts"]
    assert (account["cpu"], account["vcpu"]) == (CPU, 0)
    [loop] = [task for task in account["others"] if task["pid"] == busy.pid]
    assert loop["ns"] > 1e6
    assert not loop["kernel"]
    spent = sum(account[key] for key in ("vcpu_ns", "idle_ns", "other_ns", "unknown_ns"))
    assert spent + sum(task["ns"] for task in account["kernel"]) == report["nanoseconds"]
    readable = node.inspect("--trace", "0.1")
    assert readable.returncode == 3
    assert "error    trace" in readable.stdout


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGHUP, 130)]
)
def test_a_record_that_is_ended_leaves_nothing_for_long(
    node: Node, tracefs: Path, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    before = left(tracefs)
    with (tmp_path / "output").open("wb") as output:
        # What these tests themselves were told to ignore, as by nohup, it would ignore, too.
        argv = ("env", "--default-signal=HUP,INT", sys.executable, *node.command("--trace", "600")[len(PYTHON) :])
        path = os.pathsep.join(sys.path)
        recording = subprocess.Popen(argv, stdout=output, stderr=output, env={**os.environ, "PYTHONPATH": path})
        mine = {f"instance-runner-{recording.pid}-{each}" for each in (0, 1)}
        deadline = time.monotonic() + 60
        try:
            while not mine <= left(tracefs):
                assert recording.poll() is None, (tmp_path / "output").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.01)  # tracefs reports no event
            recording.send_signal(number)
            assert recording.wait(30) == status, (tmp_path / "output").read_text()
        finally:
            recording.kill()
            recording.wait()
    assert left(tracefs) - before == (mine if number is signal.SIGKILL else set())
    assert node.inspect("--trace", "0.1").returncode in {0, 3}  # others may run on that CPU meanwhile
    assert left(tracefs) & mine == set()


def test_a_container_sees_sums_at_best(instance: Instance) -> None:
    shown = instance.inspect("--trace", "0.1", "--json")
    if Path("/proc/schedstat").exists():
        report = fitting("trace", json.loads(shown.stdout))
        assert (report["source"], report["instances"][0]["accounts"][0]["others"]) == ("schedstat", None)
        assert report["fallback"].startswith("the node's other processes cannot be seen from inside a PID namespace")
    else:
        assert shown.returncode == Status.FAILED
        assert (
            f"cannot sum up the time of the CPUs '{CPU}': /proc/schedstat has none; it needs a kernel with CONFIG_SCHEDSTATS"
            in shown.stderr
        )


def test_watching_and_recording_exclude_each_other() -> None:
    refused = subprocess.run((*INSPECT, "--watch", "--trace", "1"), check=False, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "not allowed with argument" in refused.stderr


def test_without_an_instance_nothing_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "stelia/float").mkdir(parents=True)
    argv = (*INSPECT, "--trace", "600", "--state-dir", str(tmp_path / "none"), "--root", str(tmp_path / "stelia"))
    shown = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert (shown.returncode, shown.stdout) == (
        0,
        "no instance is placed by the controller here; others are inspected in their containers\n",
    )
