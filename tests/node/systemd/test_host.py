"""The units of examples/host, started by systemd on a host without Kubernetes: the controller, and an instance as a service."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.base.cpuset import CpuSet
from tests.node.cgroups import SECONDS, cgroup_of, until
from tests.node.instances import ROM, SOCKETS, TREE, Thread, members_of, threads_of
from tests.node.standin_kubelet import PROJECT

UNITS = PROJECT / "examples/host/systemd"
CONTROLLER, INSTANCE = "instance-cgroup-controller.service", "instance-runner@web.service"
STATE = Path("/run/instance-runner/web")
ID = "5baab67f1daf9297c60974e50ad9f94f288077161a7c41376478e79aae671e07"
SPEC = """
[cpu]
count = 2
accel = "tcg"
placement = "{placement}"
[memory]
size = "64MiB"
[boot]
firmware = "/etc/instance-runner/rom"
[shutdown]
grace = 20
"""

pytestmark = pytest.mark.usefixtures("rom", "installed")


def systemctl(*arguments: str) -> str:
    done = subprocess.run(["systemctl", *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, (arguments, done.stderr, *unit_logs())
    return done.stdout


def unit_logs() -> Iterator[str]:
    """Yield the end of the logs of both units, where there is a journal."""
    for unit in (CONTROLLER, INSTANCE):
        with contextlib.suppress(FileNotFoundError):
            yield subprocess.run(["journalctl", "-n30", "-u", unit], check=False, capture_output=True, text=True).stdout


def show(unit: str, name: str) -> str:
    return systemctl("show", "--value", "-p", name, unit).strip()


@pytest.fixture
def installed() -> Iterator[None]:
    """Install the programs and the units, as the README describes, and stop and remove what was installed."""
    path = os.pathsep.join([str(PROJECT), *filter(None, sys.path)])
    scripts = {
        "instance-runner": f"exec env PYTHONPATH={path} {sys.executable} -m runner",
        "instance-cgroup-controller": f"exec env PYTHONPATH={path} {sys.executable} "
        "-c 'import sys; from runner.controller.main import main; sys.exit(main())'",
    }
    files = {
        **{f"/usr/local/bin/{name}": f'#!/bin/sh\n{text} "$@"\n' for name, text in scripts.items()},
        **{
            f"/run/systemd/system/{unit.relative_to(UNITS)}": unit.read_text()
            for unit in UNITS.rglob("*.*")
            if unit.is_file()
        },
        "/etc/default/instance-cgroup-controller": "INSTANCE_CPUS=2-3,6-7\n",
        "/etc/instance-runner/web.toml": SPEC.format(placement="delegated"),
        "/etc/instance-runner/podman.toml": SPEC.format(placement="controller"),
    }
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text.replace("AllowedCPUs=4-9", "AllowedCPUs=4-7"))  # the node has eight
        Path(name).chmod(0o755 if "/bin/" in name else 0o644)
    shutil.copy(ROM, "/etc/instance-runner/rom")
    systemctl("daemon-reload")
    yield
    subprocess.run(["systemctl", "stop", INSTANCE, CONTROLLER], check=False)
    subprocess.run(["systemctl", "reset-failed"], check=False)
    for name in files:
        Path(name).unlink()
    shutil.rmtree("/etc/instance-runner")
    systemctl("daemon-reload")
    TREE.remove()


def guest_is_up(state: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return "ROM-GUEST-UP" in (state / "console.log").read_text(errors="replace")
    return False


def wait_for_the_service() -> None:
    """Wait until the guest of the service is up; fail with the log as soon as the service has failed."""

    def up() -> bool:
        assert show(INSTANCE, "ActiveState") in {"active", "activating", "deactivating"}, "\n".join(unit_logs())
        return guest_is_up(STATE)

    until(up, "the guest", 4 * SECONDS)


def init_of(pid: int) -> int:
    """Return the child of unshare, *pid*: PID 1 of the instance."""
    [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def vcpus(init: int) -> list[Thread]:
    threads = [thread for pid in members_of(init) for thread in threads_of(pid)]
    return [thread for thread in threads if thread.name.startswith("CPU ")]


def receipt(state: Path) -> dict[str, Any]:
    return dict(json.loads((state / "receipt.json").read_text()))


def controller_listens() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{SOCKETS}/controller.sock")
        return True
    return False


def test_an_instance_is_a_service_and_a_guest_that_dies_is_started_again() -> None:
    systemctl("start", INSTANCE)
    wait_for_the_service()
    assert receipt(STATE)["backend"] == "delegated"
    init = int(show(INSTANCE, "MainPID"))
    group = show(INSTANCE, "ControlGroup")
    assert group.startswith("/instances.slice/")
    assert cgroup_of(init) == f"{group}/float"
    pins = [thread.cpus for thread in vcpus(init)]
    assert len({str(cpus) for cpus in pins}) == 2
    assert all(len(cpus) == 1 and cpus <= CpuSet.parse("4-7") for cpus in pins)
    systemctl("daemon-reload")
    assert [thread.cpus for thread in vcpus(init)] == pins
    [qemu] = {thread.pid for thread in vcpus(init)}
    os.kill(qemu, signal.SIGKILL)
    until(lambda: int(show(INSTANCE, "NRestarts")) == 1, "the restart", 4 * SECONDS)
    until(lambda: int(show(INSTANCE, "MainPID")) not in {0, init}, "another main process")
    wait_for_the_service()
    init = int(show(INSTANCE, "MainPID"))
    systemctl("stop", INSTANCE)
    assert (show(INSTANCE, "Result"), show(INSTANCE, "ExecMainStatus")) == ("success", "0")
    assert not Path(f"/proc/{init}").exists()
    assert not STATE.exists()


def test_the_controller_serves_containers_and_is_restarted_beside_them(tmp_path: Path) -> None:
    """A scope with podman's name stands in for podman, which the node does not have."""
    state = tmp_path / "state"
    systemctl("start", CONTROLLER)
    until(controller_listens, "the controller to answer")
    assert int(show(CONTROLLER, "MainPID")) > 0
    run = ("env", "--block-signal=TERM,INT,HUP", "instance-runner", "run", "--state-dir", str(state))
    fresh = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    unit = (
        "--scope",
        "--slice=machine.slice",
        f"--unit=libpod-{ID}.scope",
        "-p",
        "Delegate=yes",
        "-p",
        "AllowedCPUs=2-3",
    )
    scope = ("systemd-run", "--quiet", *unit)
    with (tmp_path / "log").open("wb") as log:
        container = subprocess.Popen([*scope, *fresh, *run, "/etc/instance-runner/podman.toml"], stdout=log, stderr=log)
    try:
        until(lambda: guest_is_up(state) or container.poll() is not None, "the guest", 4 * SECONDS)
        assert container.poll() is None, (tmp_path / "log").read_text()
        assert receipt(state)["backend"] == "controller"
        init = init_of(container.pid)
        group = f"{TREE}/instance-{ID}/vcpus"
        placed = sorted((thread.cgroup, str(thread.cpus)) for thread in vcpus(init))
        assert {where for where, _ in placed} == {group}
        assert [cpu for _, cpu in placed] == ["2", "3"]
        systemctl("restart", CONTROLLER)
        until(controller_listens, "the controller to answer again")
        systemctl("daemon-reload")
        assert sorted((thread.cgroup, str(thread.cpus)) for thread in vcpus(init)) == placed
        assert "cpuset" in TREE.words("cgroup.subtree_control")
        os.kill(init, signal.SIGTERM)
        assert container.wait(SECONDS) == 0, (tmp_path / "log").read_text()
        # It stays for as long as memory is charged to it, and the controller looks again from time to time.
        domain = Path(f"/sys/fs/cgroup{group}").parent
        until(lambda: not domain.exists(), "its domain to be removed", 2 * SECONDS)
    finally:
        container.kill()
        container.wait()
