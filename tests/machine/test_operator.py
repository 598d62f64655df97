"""What an operator sees of a real guest: probes and metrics over HTTP, a log in JSON, names from the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.machine.test_disks import WRITER, image
from tests.support.exposition import figures
from tests.support.json_schemas import fitting
from tests.support.program_runs import ProgramStarter, until

CLIENT = """
import sys, urllib.error, urllib.request
try:
    with urllib.request.urlopen(f"http://{sys.argv[1]}/{sys.argv[2]}", timeout=10) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""
LOOPBACK = ("sh", "-c", 'ip link set lo up && exec "$@"', "sh")
SPEC = '[environment]\nallow = ["POD_NAME"]\n[instance]\nname = "${POD_NAME}"\n[[network]]\n'


def test_an_instance_shows_probes_metrics_and_a_log_in_json(start: ProgramStarter) -> None:
    environment = {"POD_NAME": "web-1", "POD_NAMESPACE": "prod", "NODE_NAME": "n1"}
    run = start(SPEC, "", "--log-format=json", "--http=:9441", inside=LOOPBACK, environment=environment)

    def get(name: str, address: str = "127.0.0.1:9441") -> str:
        argv = ("nsenter", f"--target={run.pid()}", "--net", sys.executable, "-c", CLIENT, address, name)
        return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout

    run.until("the guest runs", lambda: run.log)
    assert get("readyz") == "200 ok\n\n"
    assert get("healthz", "[::1]:9441") == "200 running\n\n"
    assert (run.state / "ready").exists()
    found = figures(get("metrics").partition(" ")[2])
    assert 'info{name="web-1",node_name="n1",placement="affinity",pod_name="web-1",pod_namespace="prod"}' in found
    assert found["placement_holds"] == 1
    # No thread was started to resolve a name or to answer a request.
    assert len(os.listdir(f"/proc/{run.pid()}/task")) == 1  # noqa: PTH208
    run.until("guest: done", lambda: run.console)
    assert run.stop() == 0
    assert not (run.state / "ready").exists()
    events = [fitting("events", json.loads(line)) for line in run.log.splitlines()]
    console = [fitting("events", json.loads(line)) for line in run.console.splitlines()]
    assert {each["stream"] for each in events} == {"event"}
    assert {each["stream"] for each in console} == {"console"}
    assert any(each["message"].startswith("guest: done") for each in console)
    assert {each["event"] for each in events} >= {"qemu_started", "guest_started", "child_output", "stop_requested"}
    [table] = [each for each in events if each["event"] == "threads_placed"]
    assert {each["role"] for each in table["fields"]["threads"]} == {"runner", "anchor", "dnsmasq", "emulator", "vcpu"}
    [pod] = [each for each in events if each["event"] == "pod_named"]
    assert pod["fields"] == {"name": "web-1", "namespace": "prod", "node": "n1", "uid": ""}
    assert events[-1]["event"] == "instance_ended"
    assert events[-1]["fields"] == {"outcome": "stopped", "status": 0, "faults": 0}
    assert b"\r\n" in (run.state / "console.log").read_bytes()


def test_metrics_have_what_the_guest_did_with_its_disks(start: ProgramStarter, tmp_path: Path) -> None:
    for name in ("boot", "other"):
        image(tmp_path / name, WRITER)
    disks = "".join(f'[[disk]]\npath = "{tmp_path}/{name}"\n' for name in ("boot", "other"))
    run = start(f"{disks}[shutdown]\ngrace = 1\n", "", "--http=127.0.0.1:9441", boot=False, inside=LOOPBACK)
    run.until("WRITTEN", lambda: run.console)
    argv = ("nsenter", f"--target={run.pid()}", "--net", sys.executable, "-c", CLIENT, "127.0.0.1:9441", "metrics")
    shown = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = figures(shown.partition(" ")[2])
    writes = found['disk_writes_total{disk="disk0"}']
    assert writes >= 100
    assert found['disk_written_bytes_total{disk="disk0"}'] == 512 * writes
    assert found['disk_write_seconds_total{disk="disk0"}'] > 0
    assert found['disk_read_bytes_total{disk="disk0"}'] >= 512, "the BIOS has read the boot sector"
    assert found['disk_writes_total{disk="disk1"}'] == 0


def test_an_operators_qmp_shows_and_changes_nothing(start: ProgramStarter) -> None:
    run = start("")
    run.until("the guest runs", lambda: run.log)

    def qmp(*words: str, typed: str = "") -> subprocess.CompletedProcess[str]:
        enter = ("nsenter", f"--target={run.pid()}", "--mount", "--pid")
        argv = (*enter, sys.executable, "-m", "runner", "ctl", f"--state-dir={run.state}", "qmp", *words)
        return subprocess.run(argv, input=typed, capture_output=True, text=True, check=False, timeout=60)

    assert json.loads(qmp("query-status").stdout)["status"] == "running"
    assert json.loads(qmp("qom-get", "path=/machine", "property=type").stdout).startswith("pc-q35")
    refused = qmp("stop")
    assert (refused.returncode, "PID 1 alone lets the guest run" in refused.stderr) == (4, True)
    names = {each["name"] for each in json.loads(qmp("query-commands").stdout)}
    assert {"query-block", "inject-nmi"} <= names
    assert {"cont", "device_add", "human-monitor-command"} & names == set()
    shell = qmp("--shell", typed="qom-list path=/nowhere\nannounce-self initial=1 max=1 rounds=1 step=1\nquery-name\n")
    assert shell.returncode == 0, shell.stderr
    assert "cannot execute 'qom-list': Device '/nowhere' not found" in shell.stdout
    assert shell.stdout.rstrip().endswith('"name": "instance"\n}'), shell.stdout
    run.until("guest: done", lambda: run.console)
    assert run.stop() == 0
    assert "qmp refused command='stop' pid=" in run.log


def test_an_address_that_this_machine_does_not_have_is_a_failed_start(start: ProgramStarter) -> None:
    run = start("", "", "--http=192.0.2.1:9441", inside=LOOPBACK)
    assert run.wait() == 31
    assert "cannot listen at 192.0.2.1:9441" in run.log
    assert until(lambda: run.termination_log()["outcome"], "the termination log") == "start_failed"
