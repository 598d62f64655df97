"""Build the images without a registry, run them here and in the emulated node, check the Kubernetes manifests.

Usage: tests/images/run [--only build|gate|here|node|systemd] [--kubelet PATH] [pytest arguments]

It needs root on Debian or Ubuntu and the packages that tests/run installs. Base, layers, clean Debians and the programs of
others (kustomize, Prometheus, a newer podman) are fetched from Debian once and kept in the node's cache. Images are run by
podman and runc as PID 1 with --privileged, then in the node with the pods that the manifests in examples/kubernetes
describe, by crun and runc. A node with systemd has the services of examples/host, containerd, which runs the images as well,
and podman, which runs the services that it makes of the quadlets there. If the program of a kubelet is given (or named by
RUNNER_KUBELET), that one runs the images there too, without a cluster. ``gate`` is one node for all the tests of the gate,
of which one runs the images.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

from tests.emulated_node import artefacts
from tests.emulated_node.artefacts import PROJECT
from tests.emulated_node.cache import EmulatedNodeError, fetch, say
from tests.images import built
from tests.images.artefacts import RELEASES, clean_debian, podman, prometheus
from tests.images.manifests import DIRECTORIES, put_together

CALLED = {"gpu-instance": "gpu-instance", "controller": "instance-cgroup-controller"}
"""Directory of an image → its name in the manifests."""


def write_manifests(images: dict[str, str]) -> str:
    """Write the manifests' objects and the images' configurations to a file, and return its path in the node."""
    configurations = {
        called: json.loads(built.podman("image", "inspect", "--format", "{{json .Config}}", images[name]))
        for name, called in CALLED.items()
    }
    file = PROJECT / ".cache" / "images" / "manifests.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    objects = {directory: put_together(directory) for directory in DIRECTORIES}
    file.write_text(json.dumps({"objects": objects, "configurations": configurations}))
    return f"/project/{file.relative_to(PROJECT)}"


def in_node(images: dict[str, str], *arguments: str) -> int:
    """Run tests/node/run with *arguments*, the images as disks and the manifests; return its status."""
    disks = [f"--disk={name}={built.root_file_system(name, images[name])}" for name in built.DEPLOYED]
    return subprocess.run(
        ["tests/node/run", *disks, *arguments],
        cwd=PROJECT,
        env={**os.environ, "RUNNER_NODE_MANIFESTS": write_manifests(images)},
        check=False,
    ).returncode


def main() -> int:
    """Run the steps that the command line selects and return the status."""
    parser = argparse.ArgumentParser(prog="tests/images/run", description=__doc__.splitlines()[0])
    steps = ("build", "gate", "here", "node", "systemd")
    parser.add_argument("--only", choices=steps, help="only this step, and the build before it")
    given = os.environ.get("RUNNER_KUBELET")
    parser.add_argument("--kubelet", metavar="PATH", default=given, help="a kubelet's program, 1.20 or later")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args()
    try:
        images = built.build(built.DEPLOYED if options.only in {"gate", "node", "systemd"} else built.IMAGES)
        os.environ["RUNNER_KUSTOMIZE"] = str(fetch(artefacts.kustomize()))
        if options.only == "gate":
            return in_node(images, "--qemu", "--", "-m", "gate and not node_only", "tests/node", *options.pytest)
        os.environ["RUNNER_PROMETHEUS"] = str(fetch(prometheus()))
        os.environ["RUNNER_PODMAN"] = str(fetch(podman()))
        os.environ["RUNNER_CLEAN"] = " ".join(f"{name}={fetch(clean_debian(name))}" for name in RELEASES)
        status = 0
        if options.only in {None, "here"}:
            status = subprocess.run(
                [sys.executable, "-m", "pytest", "tests/images", *options.pytest],
                cwd=PROJECT,
                env={**os.environ, "RUNNER_IMAGES": " ".join(f"{name}={image}" for name, image in images.items())},
                check=False,
            ).returncode
        if status == 0 and options.only in {None, "node"}:
            status = in_node(images, "--", "tests/node/images", *options.pytest)
        if status == 0 and options.only in {None, "systemd"}:
            disks = [f"--disk=podman={os.environ['RUNNER_PODMAN']}"]
            tests = ["tests/node/systemd", "tests/node/containerd/test_pods_of_containerd.py"]
            if options.kubelet:
                disks, tests = [*disks, f"--disk=kubelet={options.kubelet}"], [*tests, "tests/node/containerd/kubelet"]
            else:
                say("a kubelet is missing (--kubelet PATH or RUNNER_KUBELET), so its test is left out")
            tests.append("tests/node/podman")
            status = in_node(images, "--systemd", "--cpus=8", *disks, "--", *tests, *options.pytest)
        built.forget_old()
    except EmulatedNodeError as error:
        say(str(error))
        return 70
    return status


if __name__ == "__main__":
    sys.exit(main())
