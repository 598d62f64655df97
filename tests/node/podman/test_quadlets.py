"""The quadlets of examples/host as its README installs them: podman's generator makes services, which systemd and podman run."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from tests.node.cgroups import ROOT, SECONDS, cgroup_of, mask_of, until
from tests.node.instances import ROM, TREE, members_of, threads_of
from tests.node.podman.conftest import podman
from tests.node.standin_kubelet import PROJECT
from tests.support.program_runs import FIRST_SECOND
from tests.support.soak import some

HOST = PROJECT / "examples/host"
QUADLETS, SPECS = Path("/etc/containers/systemd"), Path("/etc/instance-runner")
CONTROLLER, INSTANCE = "instance-cgroup-controller.service", "instance-runner@web.service"
NAME = "instance-web"
EXCLUSIVE = CpuSet.parse("4-7")
"""The CPUs of the instance in its ``cpus.conf``."""
ROM_OF_THE_HOST = f"[Container]\nVolume={ROM}:/guest/rom:ro\n"

pytestmark = [pytest.mark.usefixtures("installed", "rom", "quadlets"), pytest.mark.timeout(20 * SECONDS)]


def journal(*matches: str) -> str:
    argv = ["journalctl", "--no-pager", *matches]
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout


def everything_said() -> str:
    """Return the journal of both services and of the instance's container."""
    return "\n".join((journal("-u", CONTROLLER), journal("-u", INSTANCE), journal(f"CONTAINER_NAME={NAME}")))


def systemctl(*arguments: str) -> str:
    done = subprocess.run(["systemctl", *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, (arguments, done.stderr)
    return done.stdout.strip()


def show(unit: str, name: str) -> str:
    return systemctl("show", "--value", "-p", name, unit)


def with_the_rom(spec: str) -> str:
    """Return *spec* with another guest, an emulated one: Linux would take minutes to boot on an emulated machine."""
    spec, accelerators = re.subn(r"^\[cpu\]$", '[cpu]\naccel = "tcg"', spec, flags=re.MULTILINE)
    text, guests = re.subn(r"\[boot\].*?(?=\n\n)", '[boot]\nfirmware = "/guest/rom"', spec, flags=re.DOTALL)
    text, sizes = re.subn(r'size = "\w+"', 'size = "64MiB"', text)
    assert (accelerators, guests, sizes) == (1, 1, 1)
    return text


@pytest.fixture
def quadlets() -> Iterator[None]:
    """Install the example's files; remove them and their services after the test."""
    shutil.copytree(HOST / "quadlet", QUADLETS, symlinks=True, dirs_exist_ok=True)
    (QUADLETS / "instance-runner@web.container.d/rom.conf").write_text(ROM_OF_THE_HOST)
    SPECS.mkdir()
    (SPECS / "web.toml").write_text(with_the_rom((HOST / "web.toml").read_text()))
    systemctl("daemon-reload")
    try:
        yield
    finally:
        print(everything_said())
        subprocess.run(["systemctl", "stop", INSTANCE, CONTROLLER], check=False)
        subprocess.run(["systemctl", "reset-failed"], check=False)
        shutil.rmtree(QUADLETS)
        shutil.rmtree(SPECS)
        systemctl("daemon-reload")
        TREE.remove()


def is_ready() -> bool:
    """Return whether the controller says over HTTP that it is ready."""
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen("http://127.0.0.1:9440/readyz", timeout=SECONDS) as answer,
    ):
        return bool(answer.status == 200)
    return False


def guest_is_up() -> bool:
    """Return whether the guest has said so; fail as soon as its service has ended."""
    assert show(INSTANCE, "ActiveState") == "active"
    return "ROM-GUEST-UP" in journal(f"CONTAINER_NAME={NAME}")


@pytest.mark.parametrize("milliseconds", some(FIRST_SECOND, 1))
@pytest.mark.node_only
def test_a_stop_in_the_first_second_of_the_container_is_not_lost(milliseconds: int) -> None:
    systemctl("start", "--no-block", INSTANCE)
    until(lambda: podman("ps", "--quiet", "--filter", f"name={NAME}"), "the container", 2 * SECONDS)
    time.sleep(milliseconds / 1000)  # the moment is what is tested
    systemctl("stop", INSTANCE)
    assert (show(INSTANCE, "Result"), show(INSTANCE, "ExecMainStatus")) == ("success", "0"), everything_said()


def test_the_example_from_its_start_to_its_stop() -> None:
    systemctl("start", INSTANCE)
    assert show(CONTROLLER, "ActiveState") == "active", "the instance requires it"
    until(is_ready, "the controller to be ready")
    until(guest_is_up, "the guest", 6 * SECONDS)

    [container] = json.loads(podman("inspect", NAME))
    init, name = container["State"]["Pid"], container["Id"]
    group, scope = TREE.path / f"instance-{name}", ROOT / f"machine.slice/libpod-{name}.scope"
    assert scope.exists()
    vcpus = [each for pid in members_of(init) for each in threads_of(pid) if each.name.startswith("CPU ")]
    assert sorted(str(thread.cpus) for thread in vcpus) == [str(cpu) for cpu in sorted(EXCLUSIVE)]
    assert {thread.cgroup for thread in vcpus} == {f"{TREE}/{group.name}/vcpus"}
    assert cgroup_of(init) == f"{TREE}/{group.name}/float"
    assert mask_of(init).isdisjoint(EXCLUSIVE)
    status = podman("exec", NAME, "instance-runner", "ctl", "status")
    assert re.search(r"^guest +running for ", status, re.MULTILINE), status

    systemctl("stop", INSTANCE)
    assert (show(INSTANCE, "Result"), show(INSTANCE, "ExecMainStatus")) == ("success", "0")
    lines = journal(f"CONTAINER_ID_FULL={name}")  # not of the containers before it, which had the same name
    steps = (
        "the guest runs",
        "asked to stop reason=SIGTERM",
        "the guest powered down",
        "ended outcome=stopped status=0 faults=0",
    )
    assert [lines.count(each) for each in steps] == [1] * len(steps), lines
    assert sorted(steps, key=lines.index) == [*steps]
    assert podman("ps", "--all", "--format", "{{.Names}}") == "systemd-instance-cgroup-controller"
    assert not group.exists()
    assert not scope.exists()
    assert not Path(f"/proc/{init}").exists()

    systemctl("stop", CONTROLLER)
    assert show(CONTROLLER, "Result") == "success"
    assert podman("ps", "--all", "--quiet") == ""
