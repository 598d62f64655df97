"""The quadlets of examples/host as podman's own generator reads them: their units, and the rights that these give.

``tests/node/podman`` runs them, and ``tests/machine/test_host.py`` the commands of the service without podman.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from runner.spec.instance import parse_instance
from tests.images.built import PROJECT
from tests.images.conftest import NO_KVM, Run
from tests.images.manifests import VM_DEVICES, container_of
from tests.images.test_images import NEEDED

HOST = PROJECT / "examples/host"
CONTROLLER, TEMPLATE, INSTANCE = (
    f"{name}.service" for name in ("instance-cgroup-controller", "instance-runner@", "instance-runner@web")
)
OF_PODMAN = re.compile(
    r"--(?:name|cidfile|cgroups|sdnotify|cpuset-cpus)(?:=\S+| \S+)|--(?:replace|rm)\b|(?<= )-d\b|--device /dev/kvm"
)
"""Options that the tests' own runs of podman give, or must do without: there is no systemd here."""


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return name → text of the units that quadlet makes of the example's files."""
    if "RUNNER_PODMAN" not in os.environ:
        pytest.skip("a podman with quadlets is missing: tests/images/run fetches it and names it in RUNNER_PODMAN")
    podman, directory = tmp_path_factory.mktemp("podman"), tmp_path_factory.mktemp("units")
    subprocess.run(["fsck.erofs", f"--extract={podman}", os.environ["RUNNER_PODMAN"]], check=True, capture_output=True)
    environment = {**os.environ, "QUADLET_UNIT_DIRS": str(HOST / "quadlet")}
    argv = [str(podman / "usr/libexec/podman/quadlet"), str(directory)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return {path.name: path.read_text() for path in directory.glob("*.service")}


def command(unit: str) -> list[str]:
    """Return the words of ``podman run`` in *unit*."""
    [line] = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    return shlex.split(line)


def values(unit: str, option: str) -> list[str]:
    words = command(unit)
    return [words[number + 1] for number, word in enumerate(words) if word == option]


def test_quadlet_makes_a_unit_of_each_file(units: dict[str, str], tmp_path: Path) -> None:
    assert units.keys() == {CONTROLLER, TEMPLATE, INSTANCE}
    for name, text in units.items():
        (tmp_path / name).write_text(text)
    assert complaints(tmp_path) == []


def complaints(directory: Path) -> list[str]:
    """Return what systemd has to say against the two units in *directory*."""
    argv = ["systemd-analyze", "verify", "--man=no", *(str(directory / name) for name in (CONTROLLER, INSTANCE))]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    return [line for line in done.stderr.splitlines() if "instance-" in line]


def test_the_units_without_podman_are_valid(tmp_path: Path) -> None:
    for name in (CONTROLLER, TEMPLATE):  # the programs are not installed here
        text = (HOST / "systemd" / name).read_text()
        (tmp_path / name).write_text(re.sub(r"/usr/local/bin/[a-z-]+", "/bin/true", text))
    (tmp_path / INSTANCE).symlink_to(TEMPLATE)
    assert complaints(tmp_path) == []
    (tmp_path / CONTROLLER).write_text((tmp_path / CONTROLLER).read_text().replace("Restart=", "Restarts="))
    assert complaints(tmp_path) != []


def test_the_instance_has_the_rights_of_the_pod(units: dict[str, str]) -> None:
    unit = units[INSTANCE]
    assert [name.upper() for name in values(unit, "--cap-add")] == [*NEEDED]
    assert values(unit, "--cap-drop") == ["all"]
    assert {"--read-only", "--security-opt=no-new-privileges"} <= {*command(unit)}
    assert {*values(unit, "--device")} <= {*VM_DEVICES}
    assert values(unit, "--cgroups") == ["enabled"], "the controller knows podman's scopes, and no groups of services"
    spec = parse_instance("web.toml", (HOST / "web.toml").read_bytes(), {})
    assert values(unit, "--stop-timeout") == [str(int(spec.shutdown.grace) + 10)]
    [cpus] = [word.partition("=")[2] for word in command(unit) if word.startswith("--cpuset-cpus=")]
    assert len(CpuSet.parse(cpus)) == spec.cpu.count, "the controller's placement needs as many CPUs as vCPUs"
    offered = command(units[CONTROLLER])
    assert CpuSet.parse(cpus) <= CpuSet.parse(offered[offered.index("--cpus") + 1])


def test_the_controller_has_the_rights_of_the_daemon_set(units: dict[str, str]) -> None:
    context = container_of("controller")["securityContext"]
    asked = [name.upper() for name in values(units[CONTROLLER], "--cap-add")]
    assert asked == context["capabilities"]["add"]
    service = (HOST / "systemd" / CONTROLLER).read_text()
    [bounding] = re.findall(r"^CapabilityBoundingSet=(.*)$", service, re.MULTILINE)
    assert [name.removeprefix("CAP_") for name in bounding.split()] == asked


def test_the_image_runs_with_the_options_of_the_unit(
    units: dict[str, str], run: Run, gpu_instance: str, tmp_path: Path
) -> None:
    spec, sockets = tmp_path / "web.toml", tmp_path / "sockets"
    demo = (PROJECT / "images/gpu-instance/demo.toml").read_text()
    text = demo.replace("count = 1", 'count = 1\nplacement = "affinity"')
    spec.write_text(text.replace('[[share]]\ntag = "share"\npath = "/srv/share"\n', ""))
    spec.chmod(0o644)
    sockets.mkdir()
    line = " ".join(command(units[INSTANCE])[2:])
    line = OF_PODMAN.sub("", line).replace("/etc/instance-runner/%i.toml:", f"{spec}:")
    options, image, arguments = line.replace("/run/instance-cgroup-controller:", f"{sockets}:", 1).partition(
        "localhost/gpu-instance:0.1.0"
    )
    assert image
    container = run(gpu_instance, *options.split(), *NO_KVM, command=tuple(arguments.split()))
    container.until("guest: done")
    assert "guest: address 192.168.77.2/24" in container.output
    assert container.stop() == 0, container.output
    assert "faults=0" in container.output
