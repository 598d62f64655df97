"""The built images, and containers of them run by podman and runc as PID 1."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from tests.images.built import storage

PODMAN = ("podman", *storage(), "--runtime", "runc", "--cgroup-manager", "cgroupfs")
LIMITS = ("--ulimit", "nofile=20000:20000", "--ulimit", "nproc=30000:30000")
"""Given, because without CAP_SYS_RESOURCE the runtime could not raise them to podman's defaults."""
NO_KVM = ("--volume", "/dev/null:/dev/kvm")
"""These guests are always emulated, because a /dev/kvm that opens may still run no guest (nested virtualisation)."""
SECONDS = 90


@attrs.define
class Container:
    """A container, its process and its output."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, text: str) -> None:
        """Wait until it prints *text*; fail as soon as it has ended without."""
        end = time.monotonic() + SECONDS
        while text not in self.output:
            assert self.process.poll() is None or text in self.output, f"ended without {text!r}:\n{self.output}"
            assert time.monotonic() < end, f"waited {SECONDS} s for {text!r}:\n{self.output}"
            time.sleep(0.05)

    def until_started(self) -> None:
        """Wait until the runtime has started its PID 1."""
        argv = [*PODMAN, "container", "inspect", "--format", "{{.State.Running}}", self.name]
        end = time.monotonic() + SECONDS
        while subprocess.run(argv, check=False, capture_output=True, text=True).stdout.strip() != "true":
            assert self.process.poll() is None, self.output
            assert time.monotonic() < end, self.output

    def stop(self) -> int:
        """Ask it to stop as ``podman stop`` does, which kills after a while, and return its exit status."""
        subprocess.run([*PODMAN, "stop", "--time", "60", self.name], check=True, capture_output=True, timeout=SECONDS)
        return self.wait()

    def wait(self) -> int:
        return self.process.wait(SECONDS)

    def execute(self, *command: str) -> str:
        """Run a command in it and return its output."""
        argv = [*PODMAN, "exec", self.name, *command]
        return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, timeout=SECONDS).stdout


Run = Callable[..., Container]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Return a function that starts containers, which end with the test."""
    containers: list[Container] = []

    def start(image: str, *options: str, command: tuple[str, ...] = ()) -> Container:
        name = f"instance-runner-{os.getpid()}-{len(containers)}"
        log = tmp_path / f"{name}.log"
        argv = [
            *PODMAN,
            "run",
            "--rm",
            "--name",
            name,
            "--net=none",
            "--no-healthcheck",
            *LIMITS,
            *options,
            image,
            *command,
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        containers.append(Container(name, process, log))
        return containers[-1]

    yield start
    for container in containers:
        if container.process.poll() is None:
            for command in (
                ("kill",),
                ("rm", "--force"),
            ):  # rm alone waits 10 s for a guest that ignores its power button
                subprocess.run([*PODMAN, *command, container.name], check=False, capture_output=True)
            container.process.wait(SECONDS)


def image(name: str) -> str:
    images = dict(pair.split("=", 1) for pair in os.environ.get("RUNNER_IMAGES", "").split())
    if name not in images:
        pytest.skip("built images are missing: tests/images/run builds them and names them in RUNNER_IMAGES")
    return images[name]


@pytest.fixture(scope="session")
def gpu_instance() -> str:
    return image("gpu-instance")


@pytest.fixture(scope="session")
def gpu_instance_backports() -> str:
    return image("gpu-instance-backports")


@pytest.fixture(scope="session")
def controller() -> str:
    return image("controller")


@pytest.fixture(scope="session")
def files() -> Callable[[str], contextlib.AbstractContextManager[Path]]:
    """Return a function that mounts an image for a block."""

    @contextlib.contextmanager
    def mounted(image: str) -> Iterator[Path]:
        argv = [*PODMAN, "image", "mount", image]
        try:
            yield Path(subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())
        finally:
            subprocess.run([*PODMAN, "image", "unmount", image], check=True, capture_output=True)

    return mounted
