"""The images run without a cluster: by podman, as PID 1, with a real Linux guest."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path, PurePosixPath
from urllib.parse import quote

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from runner.kernel.program_directory import digest_of, files_of
from tests.images.built import LABELS, PROJECT
from tests.images.conftest import NO_KVM, PODMAN, Run
from tests.support.program_runs import FIRST_SECOND
from tests.support.soak import some

Files = Callable[[str], AbstractContextManager[Path]]
MEGABYTES = {"gpu_instance": 240, "gpu_instance_backports": 242, "controller": 140}
"""The largest unpacked size of each image; Debian takes 80 of it. images/README.md lists their parts."""
NEEDED = ("NET_ADMIN", "SYS_NICE", "SETUID", "SETGID", "KILL", "NET_BIND_SERVICE")
"""The capabilities of a run: for bridge and tap, to pin threads of another user, to become and to end it, for the DHCP port."""
NEEDED_FOR_SHARES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETFCAP", "SETPCAP", "SYS_CHROOT")
"""The capabilities that virtiofsd keeps, and those that it needs to drop the others."""

RUN = ("run", "/etc/instance/spec.toml")


def at(spec: Path) -> tuple[str, str]:
    return ("--volume", f"{spec}:{RUN[1]}:ro")


def required(name: str) -> set[str]:
    """Return the distribution *name* and what it needs to run, and what those need."""
    found, new = set[str](), {name}
    while new:
        found |= new
        needs = (Requirement(text) for each in new for text in metadata.requires(each) or [])
        new = {
            canonicalize_name(need.name) for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})
        }
        new -= found
    return found


def inspect(image: str, template: str) -> str:
    argv = [*PODMAN, "image", "inspect", "--format", template, image]
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def test_a_bare_run_boots_the_demo_guest_and_stops_it_in_order(run: Run, gpu_instance: str, tmp_path: Path) -> None:
    share = tmp_path / "share"
    share.mkdir(mode=0o777)
    container = run(gpu_instance, "--privileged", *NO_KVM, "--volume", f"{share}:/srv/share")
    container.until("guest: done")
    assert container.execute("cat", "/proc/1/comm").strip() == "instance-runner"
    assert "guest: address 192.168.77.2/24" in container.output
    assert "guest: wrote hello into the share" in container.output
    assert (share / "word").read_text() == "hello\n"
    shell, healthy = json.loads(inspect(gpu_instance, "{{json .HealthCheck.Test}}"))
    assert shell == "CMD-SHELL"
    container.execute("sh", "-c", healthy)
    with pytest.raises(subprocess.CalledProcessError):
        container.execute("env", "INSTANCE_RUNNER_STATE_DIR=/tmp", "sh", "-c", healthy)
    users = container.execute("sh", "-c", "stat -c %U /proc/$(cat /proc/*/stat | grep qemu-system | cut -d' ' -f1)")
    assert users.strip() == "qemu"
    assert container.stop() == 0, container.output
    assert "guest: power button" in container.output
    assert "ended outcome=stopped status=0 faults=0" in container.output
    assert re.search(r"QEMU is up pid=\d+ version=10\.0\.", container.output), container.output


def test_qemu_of_the_backports_boots_the_demo_guest(run: Run, gpu_instance_backports: str) -> None:
    """Its files of QEMU are those that the image keeps of the stable one, and few capabilities are enough for it, too."""
    container = run(gpu_instance_backports, *least(*NEEDED, *NEEDED_FOR_SHARES), "--tmpfs", "/srv/share:mode=777")
    container.until("guest: done")
    assert re.search(r"QEMU is up pid=\d+ version=11\.[1-9]", container.output), container.output
    assert "guest: address 192.168.77.2/24" in container.output
    assert "guest: wrote hello into the share" in container.output
    assert "~bpo13" in container.execute("dpkg-query", "-W", "-f", "${Version}", "passt")
    assert container.stop() == 0, container.output
    assert "guest: power button" in container.output
    assert "ended outcome=stopped status=0 faults=0" in container.output


def test_a_first_guest_has_a_shell_and_is_looked_at_by_the_commands_that_are_shown(run: Run, gpu_instance: str) -> None:
    container = run(gpu_instance, "--privileged", *NO_KVM, command=("try",))
    container.until("guest# ")
    shown = re.search(r"in another terminal: docker exec \S+ (.*); docker exec \S+ (.*)\]", container.output)
    assert shown is not None, container.output
    status, judged = (container.execute(*shlex.split(each)) for each in shown.groups())
    assert re.search(r"^guest +running for ", status, re.MULTILINE), status
    assert "vcpu 0" in judged
    runner = json.loads(container.execute(*shlex.split(shown[1]), "--json"))["runner"]
    assert runner["digest"] == container.execute("cat", "/opt/instance-runner/digest").strip()
    assert container.stop() == 0, container.output
    assert "ended outcome=stopped status=0 faults=0" in container.output


@pytest.mark.parametrize("milliseconds", some(FIRST_SECOND, 3))
def test_a_stop_in_the_first_second_is_not_lost(run: Run, gpu_instance: str, milliseconds: int) -> None:
    container = run(gpu_instance, "--privileged", *NO_KVM, "--tmpfs", "/srv/share:mode=777")
    container.until_started()
    time.sleep(milliseconds / 1000)  # the moment is what is tested
    status = container.stop()
    assert status in {0, 13}, (status, container.output)  # podman's SIGKILL would be 137


def least(*capabilities: str) -> tuple[str, ...]:
    added = (word for name in capabilities for word in ("--cap-add", name))
    read_only = ("--read-only", "--read-only-tmpfs=false", "--tmpfs", "/run/instance-runner:mode=777")
    return (*read_only, "--security-opt", "no-new-privileges", "--cap-drop", "ALL", *added, "--device", "/dev/net/tun")


def test_a_few_capabilities_and_a_read_only_root_are_enough(run: Run, gpu_instance: str, tmp_path: Path) -> None:
    verdict, share = tmp_path / "verdict", tmp_path / "share"
    verdict.touch()
    share.mkdir()
    container = run(
        gpu_instance,
        *least(*NEEDED, *NEEDED_FOR_SHARES),
        *("--volume", f"{verdict}:/dev/termination-log", "--volume", f"{share}:/srv/share"),
    )
    container.until("guest: done")
    assert "guest: address 192.168.77.2/24" in container.output
    assert (share / "word").read_text() == "hello\n"
    assert container.stop() == 0, container.output
    assert json.loads(verdict.read_text())["outcome"] == "stopped"
    assert "warning dnsmasq" not in container.output


def test_fewer_are_enough_without_shares(run: Run, gpu_instance: str, tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    demo = (PROJECT / "images/gpu-instance/demo.toml").read_text()
    spec.write_text(demo.replace('[[share]]\ntag = "share"\npath = "/srv/share"\n', ""))
    spec.chmod(0o644)
    assert "[[share]]" not in spec.read_text()
    container = run(gpu_instance, *least(*NEEDED), *at(spec), command=RUN)
    container.until("guest: done")
    assert "guest: address 192.168.77.2/24" in container.output
    assert container.stop() == 0, container.output
    assert "warning dnsmasq" not in container.output


def test_a_wrong_spec_has_an_exit_status_of_its_own(run: Run, gpu_instance: str, tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text("[cpu]\ncounts = 4\n")
    spec.chmod(0o644)
    container = run(gpu_instance, *at(spec), command=RUN)
    assert container.wait() == 30, container.output
    assert "cpu.counts: unknown key; did you mean 'count'?" in container.output


def test_uefi_starts_from_the_firmware_in_the_image(run: Run, gpu_instance: str, tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text('[memory]\nsize = "256MiB"\n[boot]\nfirmware = "/usr/share/OVMF/OVMF_CODE_4M.fd"\n')
    spec.chmod(0o644)
    container = run(gpu_instance, "--privileged", *NO_KVM, *at(spec), command=RUN)
    container.until("BdsDxe: ")


def test_a_server_with_secure_boot_a_screen_and_a_seed(run: Run, gpu_instance: str, tmp_path: Path) -> None:
    """The image has the files of OVMF and QEMU that this needs; few capabilities and a read-only root are enough."""
    spec = tmp_path / "spec.toml"
    lines = ('[boot]\nfirmware = "uefi-secure"', "[display]\nvnc = true", "[cloud_init]", "[[network]]")
    grace = "[shutdown]\ngrace = 5"  # its firmware may ignore the power button, and podman kills after 10 s
    spec.write_text("\n".join(('[memory]\nsize = "256MiB"', *lines, grace)))
    spec.chmod(0o644)
    container = run(gpu_instance, *least(*NEEDED), *at(spec), command=RUN)
    container.until("BdsDxe: ")
    assert "srw-------" in container.execute("ls", "-l", "/run/instance-runner/vnc.sock")
    assert container.stop() in {0, 13}, container.output
    assert "faults=0" in container.output


def test_the_controllers_image_runs_its_program(run: Run, controller: str) -> None:
    container = run(controller, command=("--help",))
    assert container.wait() == 0, container.output
    assert "usage: instance-cgroup-controller" in container.output
    # Without the node's cgroups and kubelet it prints what is missing and ends.
    bare = run(controller)
    assert bare.wait() == 31, bare.output
    assert "Traceback" not in bare.output
    assert "cannot listen at /run/instance-cgroup-controller/controller.sock" in bare.output


def test_the_controllers_image_has_what_explains_a_node(run: Run, controller: str, tmp_path: Path) -> None:
    """``kubectl exec`` into the controller's pod; ``tests/node/images`` does so where there are instances."""
    (tmp_path / "pod.yaml").write_text((PROJECT / "examples/plan/pod.yaml").read_text())
    (tmp_path / "kubelet.yaml").write_text((PROJECT / "examples/kubernetes/kubelet-configuration.yaml").read_text())
    plan = ("plan", "--node", "/in/kubelet.yaml", "--pod", "/in/pod.yaml")
    for command, statuses, words in (
        (("version",), {0}, f"instance-runner {metadata.version('instance-runner')}"),
        (("inspect",), {4}, "cannot find an instance"),
        (("check",), {0, 3}, "clocksource"),
        (plan, {0, 3, 30}, "kubelet"),  # it would not start with this configuration where there are few CPUs
    ):
        given = ("--entrypoint", "instance-runner", "--volume", f"{tmp_path}:/in:ro")
        container = run(controller, *given, command=command)
        assert container.wait() in statuses, container.output
        assert words in container.output
        assert "Traceback" not in container.output


def components(document: Path) -> dict[str, set[str]]:
    """Return the names of what a software bill of materials lists, by the type in their package URLs."""
    read = json.loads(document.read_text())
    assert (read["bomFormat"], read["specVersion"]) == ("CycloneDX", "1.5")
    found: dict[str, set[str]] = {}
    for each in read["components"]:
        assert each["purl"].partition("?")[0].endswith(f"@{quote(each['version'])}")
        found.setdefault(each["purl"].removeprefix("pkg:").partition("/")[0], set()).add(each["name"])
    return found


def installed(status: Path) -> set[str]:
    """Return the names of the packages that dpkg has installed, by its own file."""
    stanzas = (stanza for stanza in status.read_text().split("\n\n") if "\nStatus: install ok installed\n" in stanza)
    return {stanza.partition("\n")[0].removeprefix("Package: ") for stanza in stanzas}


@pytest.mark.parametrize("entry_point", ["instance-runner", "instance-cgroup-controller"])
def test_an_image_imports_nothing_that_the_pod_puts_in_its_way(
    run: Run, request: pytest.FixtureRequest, tmp_path: Path, entry_point: str
) -> None:
    fixture = {"instance-runner": "gpu_instance", "instance-cgroup-controller": "controller"}[entry_point]
    (tmp_path / "runner").mkdir()
    (tmp_path / "runner/__init__.py").write_text("raise SystemExit('another runner')\n")
    elsewhere = ("--volume", f"{tmp_path}:/elsewhere:ro", "--workdir", "/elsewhere", "--env", "PYTHONPATH=/elsewhere")
    container = run(request.getfixturevalue(fixture), *elsewhere, command=("--help",))
    assert container.wait() == 0, container.output
    assert f"usage: {entry_point}" in container.output


@pytest.mark.parametrize("name", list(MEGABYTES))
def test_what_is_in_an_image_and_what_is_not(name: str, request: pytest.FixtureRequest, files: Files) -> None:
    image = request.getfixturevalue(name)
    size = int(inspect(image, "{{.Size}}")) / 1e6
    assert size < MEGABYTES[name], f"{name} has {size:.0f} MB"
    labels = json.loads(inspect(image, "{{json .Labels}}"))
    assert labels["org.opencontainers.image.version"] == metadata.version("instance-runner")
    assert labels["org.opencontainers.image.base.name"].startswith("localhost/base:")
    assert {name: labels[f"org.opencontainers.image.{name.lower()}"] for name in LABELS} == LABELS
    with files(image) as root:
        programs = {
            path.name
            for folder in ("usr/bin", "usr/local/bin", "opt/instance-runner/bin")
            for path in (root / folder).iterdir()
        }
        assert name == "controller" or "passt" in programs
        assert not programs & {"gcc", "cc", "make", "pip", "pip3", "uv", "git", "curl", "qemu-system-i386"}
        packages = root / "opt/instance-runner/lib/python3.13/site-packages"
        found = {path.name.split("-")[0].replace("_", "-") for path in packages.glob("*.dist-info")}
        assert found == required("instance-runner")
        assert (root / "opt/instance-runner/digest").read_text() == digest_of(files_of(PurePosixPath(packages))) + "\n"
        listed = components(root / "opt/instance-runner/sbom.cdx.json")
        assert listed["pypi"] == required("instance-runner") - {"instance-runner"}
        assert listed["deb"] == installed(root / "var/lib/dpkg/status")
        assert not [
            path for path in (root / "usr").rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o6000
        ]
        sources = list(packages.rglob("*.py"))
        assert sources
        assert [path for path in sources if not list(path.parent.glob(f"__pycache__/{path.stem}.*.pyc"))] == []
        assert not list((root / "var/lib/apt/lists").glob("*_Packages*"))
        assert not list((root / "var/cache/apt/archives").glob("*.deb"))
