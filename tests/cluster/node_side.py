"""Runs in the emulated node: makes it a machine of the cluster, then executes what the other side asks for.

A request is a line of JSON, ``{"argv": [...], "timeout": seconds}``, on a connection of its own; the answer is one as well,
``{"status", "stdout", "stderr"}``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socketserver
import subprocess
import tempfile
import threading
import traceback
from pathlib import Path

from tests.cluster import cpu_driver
from tests.cluster.control_plane import ADDRESS, NODE, NODE_ADDRESS
from tests.cluster.joined_node import KEPT, KUBELET_SETTINGS, PKI, PORT
from tests.node.containerd.daemon import CONFIGURATION_2, PAUSE, Containerd, Image, pause_program, run_unit
from tests.node.containerd.kubelet.configuration import example_on_a_small_machine
from tests.node.images.manifested import DISKS, Manifests, disk, mount_image

RESULTS = Path("/results")
RESERVED = "0,6"
"""One core, the system's."""
KUBELET_DIRECTORY, CONTAINERD_DIRECTORY, PROGRAMS = (
    Path("/var/lib/kubelet"),
    Path("/var/lib/containerd"),
    Path("/opt/containerd"),
)
KUBELET_UNIT = "kubelet.service"
NEXT = "0.1.1"
"""The tag of a controller's image that differs from the manifests' in its name alone, to roll to."""
DEVICE_PLUGIN = "generic-device-plugin"
HUGE_PAGES = 300
"""Of 2 MiB, on each NUMA node: what an instance with a device takes, and some more."""
TIMED_OUT = 124
"""The status of a command that took too long, as timeout(1) has it."""


def join_network() -> None:
    """Give the interface that the node was given its address, and let pods out through it."""
    drivers = {path.parts[-3]: path.resolve().name for path in Path("/sys/class/net").glob("*/device/driver")}
    [interface] = [name for name, driver in drivers.items() if driver == "virtio_net"]  # the others are to be passed
    for words in (
        f"link set {interface} up",
        f"address add {NODE_ADDRESS}/24 dev {interface}",
        f"route add default via {ADDRESS}",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def reserve_huge_pages() -> None:
    """Reserve them on every NUMA node, before the kubelet starts, which counts them once."""
    for file in Path("/sys/devices/system/node").glob("node*/hugepages/hugepages-2048kB/nr_hugepages"):
        file.write_text(str(HUGE_PAGES))
        assert int(file.read_text()) == HUGE_PAGES, f"{file} has only {file.read_text()}"


def start_containerd() -> Containerd:
    """Start containerd 2 with every image that the manifests name, unpacked."""
    PROGRAMS.mkdir()
    subprocess.run(["mount", "-t", "erofs", "-o", "ro", disk("containerd"), PROGRAMS], check=True)
    CONTAINERD_DIRECTORY.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "containerd", CONTAINERD_DIRECTORY], check=True)
    containerd = Containerd(CONTAINERD_DIRECTORY, PROGRAMS, CONFIGURATION_2)
    containerd.start()
    manifests = Manifests.read()
    names = manifests.images()
    images = {PAUSE: Image({"Entrypoint": ["/pause"]}, {"pause": pause_program()})}
    mounted = {}
    for reference, name in names.items():
        tags = [reference, f"{name}:{NEXT}"] if DISKS[name] == "controller" else [reference]
        for tag in tags:
            file = tag.replace(":", "-").replace("/", "-")
            images[tag] = Image(manifests.configurations[name], {file: b""})
            mounted[file] = name
    if (program := given("device-plugin")) is not None:
        [reference] = [each for each in manifests.references() if DEVICE_PLUGIN in each]
        images[reference] = Image({"Entrypoint": [f"/{DEVICE_PLUGIN}"]}, {DEVICE_PLUGIN: program})
    if (program := given(cpu_driver.PROGRAM)) is not None:
        images[cpu_driver.image()] = Image({"Cmd": [f"/{cpu_driver.PROGRAM}"]}, {cpu_driver.PROGRAM: program})
    containerd.take(images)
    for file, name in mounted.items():
        put_image(name, containerd.unpacked(file))
    return containerd


def put_image(name: str, place: Path) -> None:
    """Put the root file system of an image into the directory of an unpacked layer.

    Instances' are copied, because containerd maps the users of a layer's own file system for a pod with a user namespace, and of
    none that is mounted there; the controller's is mounted, which takes no time.
    """
    if DISKS[name] == "controller":
        mount_image(name, place)
        return
    with tempfile.TemporaryDirectory() as directory:
        mount_image(name, Path(directory))
        subprocess.run(["cp", "--archive", f"{directory}/.", place], check=True)
        subprocess.run(["umount", directory], check=True)


def given(name: str) -> bytes | None:
    """Return the program on the disk of this serial number, if the node was given it."""
    for serial in Path("/sys/block").glob("vd*/serial"):
        if serial.read_text().strip() == name:
            return (Path("/dev") / serial.parent.name).read_bytes()
    return None


def start_kubelet(containerd: Containerd) -> None:
    """Start the kubelet with the example's configuration, and the settings that the other side wants instead.

    Its files are in their usual places.
    """
    KUBELET_DIRECTORY.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "kubelet", KUBELET_DIRECTORY], check=True)
    # the kubelet shares its volumes with containers
    subprocess.run(["mount", "--make-rshared", KUBELET_DIRECTORY], check=True)
    pki = KUBELET_DIRECTORY / "pki"
    pki.mkdir()
    for file in PKI:
        (pki / file).write_bytes((RESULTS / "pki" / file).read_bytes())
    for name in KEPT:  # of a life before this one
        if (RESULTS / name).exists():
            shutil.copy(RESULTS / name, KUBELET_DIRECTORY)
    program = Path("/opt/kubelet")
    program.write_bytes(disk("kubelet").read_bytes())
    program.chmod(0o755)
    configuration = example_on_a_small_machine(RESERVED) | {
        "containerRuntimeEndpoint": f"unix://{containerd.cri.socket}",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(pki / "kubelet-serving.crt"),
        "tlsPrivateKeyFile": str(pki / "kubelet-serving.key"),
        **json.loads((RESULTS / KUBELET_SETTINGS).read_text()),
    }
    # YAML is a superset of JSON
    (KUBELET_DIRECTORY / "config.yaml").write_text(json.dumps(configuration, indent=1))
    options = (
        *("--config", str(KUBELET_DIRECTORY / "config.yaml"), "--root-dir", str(KUBELET_DIRECTORY)),
        *("--kubeconfig", str(pki / "node.conf"), f"--hostname-override={NODE}", f"--node-ip={NODE_ADDRESS}", "--v=2"),
    )
    properties = ("KillMode=process", "Delegate=yes", "Restart=always")
    run_unit(KUBELET_UNIT, RESULTS / "kubelet.log", properties, str(program), *options)


class Handler(socketserver.StreamRequestHandler):
    """Executes one command."""

    def handle(self) -> None:
        request = json.loads(self.rfile.readline())
        try:
            done = subprocess.run(
                request["argv"],
                check=False,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=request["timeout"],
                cwd="/project",
            )
            status, output, errors = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as error:
            status, output, errors = TIMED_OUT, error.stdout or b"", error.stderr or b""
        except OSError as error:
            status, output, errors = 127, b"", str(error).encode()
        answer = {
            "status": status,
            "stdout": output.decode(errors="replace"),
            "stderr": errors.decode(errors="replace"),
        }
        self.wfile.write(json.dumps(answer).encode() + b"\n")


class Server(socketserver.ThreadingTCPServer):
    """One thread for each command."""

    allow_reuse_address, daemon_threads = True, True


def main() -> None:
    """Prepare the node, and serve until it is switched off, also if that fails: the other side then looks at what is there."""
    os.chdir("/project")
    join_network()
    with Server((NODE_ADDRESS, PORT), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for unit in ("init.scope", "system.slice"):
            subprocess.run(["systemctl", "set-property", "--runtime", unit, f"AllowedCPUs={RESERVED}"], check=True)
        try:
            reserve_huge_pages()
            start_kubelet(start_containerd())
        except (AssertionError, OSError, subprocess.SubprocessError):
            traceback.print_exc()
        signal.pause()


if __name__ == "__main__":
    main()
