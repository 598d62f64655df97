"""``ctl status`` and ``logs`` of a running instance, and how the commands that ask one are called and end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import Status
from runner.base.version import VERSION
from runner.cli.commands import program_parser
from runner.cli.ctl import answer_lines
from runner.cli.instance_requests import ask_instance
from runner.facts.host import PodName
from runner.instance.parts.qemu import GuestEnd
from runner.instance.supervisor import Supervisor
from runner.plan.instance import InstancePlan
from tests.support.fake_host import FakeHost
from tests.support.json_schemas import fitting_answer

PROGRAM = (sys.executable, "-m", "runner")
POD = PodName("web-1", "prod", "n1", "3ceda12c-3ee9-40fa-9f42-61428fe654a6")
CPUS = sorted(os.sched_getaffinity(0))


async def wait_for(condition: Callable[[], object]) -> None:
    with trio.fail_after(60):
        while not condition():
            await trio.sleep(0.005)


def plan_of(fake_host: FakeHost, spec: str = "", **qemu: object) -> InstancePlan:
    return attrs.evolve(fake_host.plan(f"[[network]]\n{spec}", qemu=qemu), pod=POD)


async def status_of(plan: InstancePlan) -> Any:
    return fitting_answer("status", await ask_instance(plan.state_directory, "status", {}))


async def test_a_status_says_what_it_is_and_does(fake_host: FakeHost) -> None:
    plan = plan_of(fake_host, agent="answers", console="plays")
    found: list[dict[str, Any]] = []

    async def meanwhile(host: Supervisor) -> None:
        try:
            await wait_for(lambda: "the guest agent is there" in fake_host.logged() or host.guest_state.since)
            found.append(await status_of(plan))
            next(process for process in host.processes if process.role == "dnsmasq").send_signal(signal.SIGKILL)
            await wait_for(lambda: host.counters.restarts["dnsmasq"] and "dnsmasq" in {p.role for p in host.processes})
            [qemu] = [process for process in host.processes if process.role == "qemu"]
            [vcpu] = [each for each in host.procfs.threads(qemu.pid) if each.cpus == plan.placement.cpus]
            os.sched_setaffinity(vcpu.tid, CPUS)
            os.sched_setaffinity(0, CPUS)
            host.guest_state.panic = "Kernel panic - not syncing: \x1b[2J"
            found.append(await status_of(plan))
        finally:
            fake_host.stop.ask("test")

    result = await fake_host.run(plan, meanwhile=meanwhile)
    assert isinstance(result, GuestEnd)
    first, second = found
    cpu = str(plan.placement.cpus)
    assert 0 <= first.pop("uptime") < 60
    assert first == {
        "version": 1,
        "name": "instance",
        "pod": {"name": "web-1", "namespace": "prod", "node": "n1", "uid": POD.pod_uid},
        "guest": "running",
        "ready": True,
        "not_ready": "",
        "accelerator": "tcg",
        "cpu_model": plan.machine.cpu_model,
        "vcpus": 1,
        "most_vcpus": None,
        "memory": plan.machine.memory,
        "placement": {
            "backend": "affinity",
            "guarantee": "arranged",
            "guarantee_reason": "placement 'affinity' has no cgroups",
            "cpus": cpu,
            "pins": [*plan.placement.pins],
            "float_cpus": ",".join(str(each) for each in CPUS if str(each) != cpu),
            "misplaced": [],
        },
        "agent": "absent",
        "networks": [{"mode": "private", "mac": plan.networks[0].mac, "addresses": ["192.168.77.2/24"]}],
        "restarts": {},
        "console_log": f"{plan.state_directory}/console.log",
        "console_bytes": len("guest: runs\r\n"),
        "console_silent": "",
        "resets": {"total": 0, "last_minute": 0},
        "disks": [],
        "free_slots": plan.machine.slots,
        "change": None,
        "runner": {"version": VERSION, "generation": 0, "digest": "", "outcome": None, "reason": ""},
        "qemu": {"version": "7.2.0", "generation": 0, "error": ""},
    }
    assert second["restarts"] == {"dnsmasq": 1}
    assert second["placement"]["float_cpus"] == str(CpuSet(CPUS)), "not that of the receipt"
    assert not second["ready"]
    assert any(each.startswith("vcpu 0 (thread ") for each in second["placement"]["misplaced"])


STATUS: dict[str, Any] = {
    "name": "web",
    "pod": {"name": "web-1", "namespace": "prod", "node": "n1", "uid": "3ceda12c"},
    "guest": "running",
    "uptime": 7500.0,
    "ready": False,
    "not_ready": "the guest's kernel has panicked: \x1b[2J",
    "accelerator": "kvm",
    "cpu_model": "host",
    "vcpus": 4,
    "memory": 8 << 30,
    "placement": {
        "backend": "controller",
        "guarantee": "enforced",
        "guarantee_reason": "",
        "cpus": "2-5",
        "pins": [2, 3, 4, 5],
        "float_cpus": "0-1",
        "misplaced": [],
    },
    "agent": "connected",
    "networks": [
        {"mode": "bridge", "mac": "52:54:00:00:00:01", "addresses": ["10.0.0.7/24", "fd00::7/64"]},
        {"mode": "macvtap", "mac": "52:54:00:00:00:02", "addresses": []},
    ],
    "restarts": {"anchor": 1, "dnsmasq": 2},
    "console_log": "/run/instance-runner/console.log",
    "disks": [
        {"name": "disk0", "path": "/dev/vm-disk", "format": "raw", "size": 20 << 30}
        | {"read_only": False, "ephemeral": False, "serial": None, "attached": False, "released": False}
    ],
    "free_slots": 3,
}

SHOWN = """\
name         web
pod          prod/web-1 on node n1
guest        running for 2 h 5 min
ready        no: the guest's kernel has panicked: \\x1b[2J
vCPUs        4 on CPUs 2-5
memory       8GiB
accelerator  kvm, CPU model host
placement    controller, guarantee enforced: every thread is in its place, the others on CPUs 0-1
network      10.0.0.7/24, fd00::7/64 (bridge, 52:54:00:00:00:01)
network      address not known here (macvtap, 52:54:00:00:00:02)
guest agent  connected
restarts     anchor 1, dnsmasq 2
console log  /run/instance-runner/console.log
disk slots   3 free

DISK   SIZE   FORMAT  MODE      ATTACHED  PATH
disk0  20GiB  raw     writable  at start  /dev/vm-disk
"""


def test_people_get_sizes_and_times_in_units() -> None:
    assert "\n".join(answer_lines(STATUS)) + "\n" == SHOWN


# -- the command line --------------------------------------------------------------------------------------------------


def ask(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (*PROGRAM, *words), env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize(
    "words",
    [
        ("ctl", "--state-dir", "{}", "disk", "list"),
        ("--state-dir", "{}", "ctl", "disk", "list"),
        ("--state={}", "ctl", "disk", "list"),
        ("--state-dir", "/none", "ctl", "disk", "list", "--state-dir", "{}"),
        ("ctl", "disk", "--state-dir={}", "list"),
        ("ctl", "disk", "list", "--state-dir", "{}"),
        ("inspect", "--state-dir", "{}", "--root=/none"),
        ("--state-dir", "{}", "inspect", "--root=/none"),
        ("console", "--state-dir", "{}"),
        ("--state-dir", "{}", "logs"),
    ],
)
def test_the_state_directory_may_stand_anywhere(tmp_path: Path, words: tuple[str, ...]) -> None:
    directory = tmp_path / "ctl"  # a name of a command is one of a directory, too
    done = ask(*(word.format(directory) for word in words), INSTANCE_RUNNER_STATE_DIR="/none")
    assert (done.returncode, str(directory) in done.stderr) == (Status.FAILED, True), done.stderr


def test_the_environment_may_name_it(tmp_path: Path) -> None:
    named = {"INSTANCE_RUNNER_STATE_DIR": str(tmp_path)}
    for words in (
        ("ctl", "status"),
        ("ctl", "qmp", "query-status"),
        ("console",),
        ("logs",),
        ("logs", "-f"),
        ("inspect", "--root=/none"),
    ):
        done = ask(*words, **named)
        assert (done.returncode, str(tmp_path) in done.stderr) == (4, True), (words, done.stderr)
    for unset in ("", "/run/instance-runner"):
        assert "'/run/instance-runner'" in ask("logs", INSTANCE_RUNNER_STATE_DIR=unset).stderr


def test_a_command_that_is_wrong_is_still_status_2() -> None:
    for words in (("ctl",), ("ctl", "status", "-o", "yaml"), ("ctl", "disk", "attach", "/d", "x"), ("--state-dir",)):
        assert ask(*words).returncode == Status.USAGE, words


@pytest.mark.parametrize("words", [("--json",), ("-o", "json"), ("-ojson",), ("--output=json",)])
@pytest.mark.parametrize("command", [("check",), ("plan", "{}"), ("ctl", "status"), ("inspect",)])
def test_json_has_two_spellings_everywhere(words: tuple[str, ...], command: tuple[str, ...]) -> None:
    parse = program_parser().parse_args
    assert parse([*command, *words]).json is True
    assert parse([*command]).json is False
    assert parse([*command, "-o", "text"]).json is False
    if command[0] == "ctl":
        assert parse([command[0], *words, *command[1:]]).json is True


def test_a_kept_log_is_printed_whole_after_the_end(tmp_path: Path) -> None:
    (tmp_path / "console.log").write_bytes(b"new \xff\r\n")
    (tmp_path / "console.log.1").write_bytes(b"old\r\n")
    done = subprocess.run((*PROGRAM, "logs", "--state-dir", tmp_path), capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"old\r\nnew \xff\r\n", b"")


async def test_a_log_is_followed_until_the_end(fake_host: FakeHost) -> None:
    plan = plan_of(fake_host, console="plays")
    state = str(plan.state_directory)
    output = b""
    started: list[subprocess.Popen[str]] = []

    async def meanwhile(_host: Supervisor) -> None:
        nonlocal output
        ours, theirs = os.pipe()
        try:
            await wait_for(fake_host.guest_runs)
            argv = (*PROGRAM, "logs", "--follow", "--state-dir", state)
            started.append(await trio.to_thread.run_sync(partial(subprocess.Popen, argv, stdout=theirs)))
            os.close(theirs)
            async with trio.lowlevel.FdStream(ours) as following:
                while b"guest: runs" not in output:
                    output += await following.receive_some()
                async with await trio.open_unix_socket(f"{state}/console.sock") as console:
                    await console.send_all(json.dumps({"write": True}).encode() + b"\nlater\r\n")
                    while b"later" not in output:
                        output += await following.receive_some()
                fake_host.stop.ask("test")
                async for data in following:  # until it ends, as the instance does
                    output += data
        finally:
            fake_host.stop.ask("test")

    with trio.fail_after(60):
        assert isinstance(await fake_host.run(plan, meanwhile=meanwhile), GuestEnd)
    started[0].wait()
    assert output == b"guest: runs\r\nlater\r\n"


@pytest.mark.parametrize("read", [0, 1])
@pytest.mark.parametrize("command", [("console",), ("logs", "--follow")])
def test_a_runner_that_hangs_up_on_a_console_client_is_reported(
    tmp_path: Path, command: tuple[str, ...], read: int
) -> None:
    """As with a connection too many: one that is closed with the request unread is reset, and no reader that has gone."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "console.sock"))
        listener.listen()
        argv = (*PROGRAM, *command, "--state-dir", str(tmp_path))
        with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as client:
            connection = listener.accept()[0]
            if read:
                connection.recv(1, socket.MSG_PEEK)
            connection.close()
            output, errors = client.communicate(timeout=60)
    assert (client.returncode, output) == (Status.FAILED, b"")
    assert errors.startswith(b"instance-runner: cannot attach to the console: the runner closed the connection")
