"""The emulated node as a machine of the cluster: systemd, containerd 2 and a kubelet, reached through a tap.

``node_side.py`` runs in it, prepares it and then executes what this side asks for.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from tests.cluster.control_plane import NODE, NODE_ADDRESS, ControlPlane
from tests.cluster.kubectl import Kubectl, until
from tests.emulated_node import artefacts
from tests.emulated_node.artefacts import PROJECT
from tests.emulated_node.cache import fetch
from tests.emulated_node.command import new_run
from tests.emulated_node.machine import boot
from tests.emulated_node.shape import Shape

TAP, POD_NETWORK, PORT = "cluster0", "10.22.0.0/24", 9999
SHAPE = Shape(12, 2, 8192)
"""Of each NUMA node's six CPUs one core is the system's: an instance of four fits into either."""
VM_DISK, VM_DISK_SIZE = "vm-disk", 2 << 30
"""The serial number of the disk that instances may write to, and its size in bytes."""
UP_WITHIN, READY_WITHIN, LASTS = 180, 300, 2 * 3600
KEPT = ("cpu_manager_state", "memory_manager_state")
KUBELET_SETTINGS = "kubelet.json"
"""The file of what the kubelet's configuration has besides the example's, or instead."""
CONTAINERD_LOG = "/var/lib/containerd/log"
PKI = ("ca.crt", "node.crt", "node.key", "node.conf", "kubelet-serving.crt", "kubelet-serving.key")


class NodeCommandError(Exception):
    """A command in the node ended with a status other than 0; the text is what it has printed."""


@attrs.define
class Machine:
    """The process that boots the node, and is the node while it lives."""

    run: Path
    disks: Mapping[str, str]
    emulator: str | None
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self.run / "node.log").read_text(errors="replace")

    def on(self) -> None:
        """Boot it, and wait until it executes commands."""
        disks = [f"{name}={path}" for name, path in self.disks.items()]
        argv = [
            "setpriv",
            "--pdeathsig",
            "TERM",
            sys.executable,
            "-m",
            "tests.cluster.joined_node",
            *([f"--emulator={self.emulator}"] if self.emulator else []),
            str(self.run),
            *disks,
        ]
        with (self.run / "node.log").open("ab") as log:  # a node that is switched on again continues it
            self.process = subprocess.Popen(argv, cwd=PROJECT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + UP_WITHIN
        while not answers():
            assert self.process.poll() is None, f"the node has ended:\n{self.log[-4000:]}"
            assert time.monotonic() < end, f"the node does not answer:\n{self.log[-4000:]}"
            time.sleep(0.5)

    def off(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()


@attrs.frozen
class JoinedNode:
    """The node, which executes commands."""

    kubectl: Kubectl
    results: Path
    """A directory that it sees as ``/results``."""
    machine: Machine
    name: str = NODE
    address: str = NODE_ADDRESS

    def restart(self) -> None:
        """Switch the machine off without a word to anybody, and on again; of its disks only the kubelet's state files are kept."""
        self("cp", *(f"/var/lib/kubelet/{name}" for name in KEPT), "/results")
        self("sync")
        self.machine.off()
        until(lambda: not self.ready, "the node to be missed", READY_WITHIN)
        self.machine.on()
        until(lambda: self.ready, "the node to be Ready again", UP_WITHIN + READY_WITHIN)

    def restart_unit(self, unit: str) -> None:
        """Restart a systemd unit, and wait until the kubelet knows its pods; for the API the node is Ready all the time."""
        self("systemctl", "restart", unit)
        until(self.knows_its_pods, "the kubelet to know its pods", READY_WITHIN)

    def knows_its_pods(self) -> bool:
        """Tell whether the kubelet, which answers, has all pods that the API has for it."""
        known = json.loads(self.kubectl("get", "--raw", f"/api/v1/nodes/{self.name}/proxy/pods"))["items"] or []
        bound = self.kubectl.items("pods", "-A", f"--field-selector=spec.nodeName={self.name}")
        return {each["metadata"]["uid"] for each in bound} <= {each["metadata"]["uid"] for each in known}

    def execute(self, *argv: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command in the node, and return its status and output."""
        answer = request(argv, timeout)
        return subprocess.CompletedProcess(argv, answer["status"], answer["stdout"], answer["stderr"])

    def __call__(self, *argv: str, timeout: float = 120) -> str:
        """Run a command in the node and return its output. Raises :class:`NodeCommandError`."""
        done = self.execute(*argv, timeout=timeout)
        if done.returncode != 0:
            raise NodeCommandError(f"{' '.join(argv)}: status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def read(self, path: str) -> str:
        """Return a file's text. Raises :class:`NodeCommandError`."""
        return self("cat", path)

    @property
    def ready(self) -> bool:
        """Whether the API has it as Ready."""
        found = self.kubectl.items("nodes", f"--field-selector=metadata.name={self.name}")
        conditions = [each for node in found for each in node["status"].get("conditions", [])]
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


@contextmanager
def joined_node(given: Mapping[str, Any], control: ControlPlane) -> Iterator[JoinedNode]:
    """Hold the node, booted in a process of its own; it is Ready when this yields."""
    run = new_run()
    (run / "pki").mkdir()
    for file in PKI:
        shutil.copy(control.certificates[file], run / "pki")
    with (run / VM_DISK).open("wb") as disk:
        disk.truncate(VM_DISK_SIZE)
    shutil.copy(os.environ["RUNNER_NODE_MANIFESTS"], run / "manifests.json")
    (run / KUBELET_SETTINGS).write_text(json.dumps(given["kubelet"]))
    variables = {
        "PYTHONPATH": "/project",
        "RUNNER_NODE": "emulated",
        "RUNNER_NODE_MANIFESTS": "/results/manifests.json",
        "RUNNER_KUBERNETES": os.environ["RUNNER_KUBERNETES"],
    }
    exports = "".join(f"export {name}={value}\n" for name, value in variables.items())
    (run / "job").write_text(f"cd /project\n{exports}exec python3 -m tests.cluster.node_side\n")
    node = JoinedNode(control.kubectl, run, Machine(run, given["disks"], given["emulator"]))
    try:
        node.machine.on()
        try:
            until(lambda: node.ready, "the node to be Ready", READY_WITHIN)
        except AssertionError:
            print(node.machine.log[-4000:], node.execute("tail", "-n", "60", CONTAINERD_LOG).stdout, sep="\n")
            raise
        yield node
    finally:
        node.machine.off()


def request(argv: Sequence[str], timeout: float) -> Any:
    """Have the node run a command, and return its answer. Raises ``OSError`` and ``ValueError`` if it gives none."""
    with socket.create_connection((NODE_ADDRESS, PORT), timeout=10) as connection:
        connection.settimeout(timeout + 10)
        connection.sendall(json.dumps({"argv": argv, "timeout": timeout}).encode() + b"\n")
        return json.loads(connection.makefile().readline())


def answers() -> bool:
    """Return whether the node executes commands."""
    try:
        return bool(request(["true"], 10)["status"] == 0)
    except (OSError, ValueError):
        return False


def main() -> int:
    """Boot the node of a directory with disks, and return when it has ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--emulator", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("disks", nargs="*")
    options = parser.parse_args()
    # with SystemExit the blocks below are left, and QEMU is ended
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    disks = {serial: Path(file) for serial, _, file in (each.partition("=") for each in options.disks)}
    outcome = boot(
        SHAPE,
        "auto",
        options.run,
        kernel=fetch(artefacts.kernel()),
        disks=disks,
        interactive=False,
        systemd=True,
        devices=True,
        writable={VM_DISK: options.run / VM_DISK},
        tap=TAP,
        hpet=True,
        emulator=options.emulator,
        boot_seconds=UP_WITHIN,
        job_seconds=LASTS,
    )
    return 0 if outcome.status == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
