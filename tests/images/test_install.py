"""The documented ways to install the program, in a clean Debian 12 and a clean Debian 13."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import attrs
import pytest

from tests.images.artefacts import RELEASES
from tests.images.built import CERTIFICATES, PROJECT

UNITS = PROJECT / "examples/host/systemd"
FRONT_PAGE = (PROJECT / "README.md").read_text()
ENTER = """
set -e
mount --make-rprivate /
mount --bind "$1" "$1"; cd "$1"
mount -t proc proc proc; mount --rbind /dev dev; mount --rbind /sys sys; mount --bind "$2" uv-cache
shift 2
exec chroot . "$@"
"""
"""Enters a root file system with what a booted machine has mounted; every mount ends with the namespace."""


@attrs.frozen
class Debian:
    """A clean root file system with uv, and this tree in ``/src``."""

    root: Path

    def run(self, command: str, *, status: int = 0) -> str:
        """Run a shell command in ``/src``, as an administrator would, and return its output."""
        environment = {
            "HOME": "/root",
            "PATH": "/root/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LC_ALL": "C.UTF-8",
            "UV_CACHE_DIR": "/uv-cache",
            "UV_LINK_MODE": "copy",
            "UV_PYTHON_DOWNLOADS": "never",
            "SSL_CERT_FILE": CERTIFICATES,
        }
        proxies = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
        unshare = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
        enter = ("sh", "-c", ENTER, "enter", str(self.root), uv("cache", "dir"))
        done = subprocess.run(
            [*unshare, *enter, "bash", "-c", f"cd /src && {command}"],
            check=False,
            capture_output=True,
            text=True,
            env=environment | proxies,
            timeout=240,
        )
        assert done.returncode == status, f"{command}: status {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout


def uv(*arguments: str) -> str:
    """Run this machine's uv and return its output."""
    return subprocess.run(["uv", *arguments], check=True, stdout=subprocess.PIPE, text=True, cwd=PROJECT).stdout.strip()


@pytest.fixture(scope="module", params=RELEASES)
def debian(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Debian]:
    """Unpack a clean Debian, whose files are removed after its tests."""
    roots = dict(pair.split("=", 1) for pair in os.environ.get("RUNNER_CLEAN", "").split())
    if request.param not in roots:
        pytest.skip(f"a clean {request.param} is missing: tests/images/run makes it and names it in RUNNER_CLEAN")
    root = tmp_path_factory.mktemp(request.param)
    subprocess.run(["tar", "-C", root, "--exclude=./dev/*", "-xf", roots[request.param]], check=True)
    for name in ("src", "uv-cache"):
        (root / name).mkdir()
    files = subprocess.run(["git", "ls-files", "-z"], check=True, stdout=subprocess.PIPE, cwd=PROJECT).stdout
    for name in filter(None, files.decode().split("\0")):
        if (PROJECT / name).is_file():
            (root / "src" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / name, root / "src" / name)
    program = shutil.which("uv")
    assert program, "uv is missing from PATH: run the tests by tests/images/run"
    shutil.copy(Path(program).resolve(), root / "usr/local/bin/uv")
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    shutil.copy(os.environ.get("SSL_CERT_FILE", CERTIFICATES), f"{root}{CERTIFICATES}")
    yield Debian(root)
    shutil.rmtree(root)


def works(debian: Debian) -> None:
    """Start both programs as a newcomer does after installing them."""
    version = metadata.version("instance-runner")
    for program in ("instance-runner", "instance-cgroup-controller"):
        assert version in debian.run(f"{program} --version")
        assert f"usage: {program}" in debian.run(f"{program} --help")
        completed = debian.run(f"source <(instance-runner completion bash) && complete -p {program}")
        assert completed.strip().endswith(f" {program}")
    debian.run("instance-runner plan --document-only examples/instances/*.toml")
    (shown,) = re.findall(
        r"```console\n\$ (instance-runner plan --node .*)\n",
        (PROJECT / "examples/plan/README.md").read_text().replace("\\\n    ", ""),
    )
    assert "admitted" in debian.run(f"cd / && {shown}")
    checked = debian.run("instance-runner check; test $? = 3")  # a clean Debian has no QEMU
    assert "qemu-system-x86_64" in checked
    assert debian.run("instance-runner manual") == (PROJECT / "examples/SPEC.md").read_text()
    assert debian.run('find "$(uv tool dir)" -name "*.md" -path "*/runner/*"') == ""


def documented(*words: str) -> str:
    """Return the one command on the front page that begins with *words*; it may stand in what is said of another."""
    [line] = re.findall(rf"^\$ (?:.*: )?({re.escape(' '.join(words))}[^#\n]*?) *(?:#.*)?$", FRONT_PAGE, re.MULTILINE)
    return str(line)


def test_from_the_tree(debian: Debian) -> None:
    debian.run(documented("uv tool install ."))
    works(debian)
    debian.run("uv tool uninstall instance-runner && ! command -v instance-runner")
    host = (PROJECT / "examples/host/README.md").read_text()
    [line] = re.findall(r"^# (UV_TOOL_DIR=.*)$", host, re.MULTILINE)
    debian.run(line)
    started = re.findall(r"/usr/local/bin/[a-z-]+", "".join(unit.read_text() for unit in UNITS.glob("*.service")))
    assert {debian.run(f"{program} --version") for program in started}


def test_from_the_wheel(debian: Debian) -> None:
    debian.run(documented("uv build"))
    debian.run(f"mv runner elsewhere && {documented('uv tool install dist/')}; mv elsewhere runner")
    works(debian)
    debian.run("uv tool uninstall instance-runner")
