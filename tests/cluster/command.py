"""Run the manifests of examples/kubernetes in a real cluster: a control plane on this machine and the emulated node.

Usage: tests/cluster/run --bin DIR | --download VERSION [--only STAGE] [--emulator FILE] [-- pytest arguments]

DIR holds kubelet, kube-apiserver, kube-controller-manager and kube-scheduler of one version, kubectl if this machine has none that
fits, and, if they shall run too, generic-device-plugin and dracpu. etcd, containerd 2 and the CNI plugins are Debian forky's,
fetched once. The control plane runs in a network namespace of its own; the emulated node, with systemd, is its only machine.
Stages: without-node (every object applied, pods on Node objects that have no machine), which takes two minutes; with-node, which
takes an hour without KVM; with-claims, another cluster, in which the DRA driver dracpu gives pods their CPUs, and the kubelet none.
It needs root on Debian or Ubuntu, the packages that tests/run installs, openssl, dosfstools, mtools, fdisk, and 10 GiB of memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster import artefacts, cpu_driver
from tests.cluster.control_plane import PROGRAMS
from tests.emulated_node.artefacts import PROJECT, kustomize, rom
from tests.emulated_node.cache import EmulatedNodeError, directory, fetch, say
from tests.images import built
from tests.images.artefacts import prometheus
from tests.images.command import write_manifests

KUBELET, KUBECTL, DEVICE_PLUGIN = "kubelet", "kubectl", "generic-device-plugin"
KUBECTL_SKEW = 1
"""Minor versions between kubectl and the API server that Kubernetes supports (https://kubernetes.io/releases/version-skew-policy)."""
CLAIMS = "with-claims"
STAGES = {
    "without-node": ["tests/cluster/test_without_a_node.py"],
    "with-node": [
        "tests/cluster/test_fleet.py",
        "tests/cluster/test_with_a_node.py",
        "tests/cluster/test_disks_and_devices.py",
    ],
    CLAIMS: ["tests/cluster/test_with_claims.py"],
}
NO_TESTS = 5
"""pytest's status."""
RELEASES = "https://dl.k8s.io/release/{version}/bin/linux/amd64/{program}"


def main() -> int:
    """Run the stages that the command line selects and return the status."""
    parser = argparse.ArgumentParser(prog="tests/cluster/run", description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--bin", type=Path, metavar="DIR", help="the programs of Kubernetes")
    source.add_argument("--download", metavar="VERSION", help="the official ones of a version, such as v1.36.2")
    parser.add_argument("--only", choices=STAGES, help="only this stage")
    parser.add_argument(
        "--emulator", type=Path, metavar="FILE", help="the QEMU that emulates the node, instead of Debian's newest"
    )
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args()
    try:
        binaries = options.bin.resolve() if options.bin else downloaded(options.download)
        stages = stages_of(options.only, binaries)
        version = one_version(binaries, [*PROGRAMS, *([KUBELET] if stages != ["without-node"] else [])])
        given: dict[str, object] = {"binaries": str(binaries), "etcd": str(fetch(artefacts.etcd())), "kubelet": {}}
        given[KUBECTL] = str(kubectl_for(binaries, version))
        given["emulator"] = str(options.emulator.resolve()) if options.emulator else None
        disks: dict[str, str] = {}
        os.environ["RUNNER_KUBERNETES"] = version
        if stages != ["without-node"]:
            images = built.build(built.DEPLOYED)
            disks = {name: str(built.root_file_system(name, image)) for name, image in images.items()}
            disks |= {"containerd": str(fetch(artefacts.containerd())), KUBELET: str(binaries / KUBELET)}
            if (binaries / DEVICE_PLUGIN).exists():
                disks["device-plugin"] = str(binaries / DEVICE_PLUGIN)
            os.environ["RUNNER_KUSTOMIZE"] = str(fetch(kustomize()))
            given["disks"] = disks
            os.environ["RUNNER_NODE_MANIFESTS"] = str(PROJECT / write_manifests(images).removeprefix("/project/"))
        if "with-node" in stages:
            given["server-disk"] = str(fetch(artefacts.server_disk()))
            given["prometheus"] = str(fetch(prometheus()))
    except EmulatedNodeError as error:
        say(str(error))
        return 70
    say(f"a cluster of Kubernetes {version}")
    statuses = []
    if plain := [file for stage in stages if stage != CLAIMS for file in STAGES[stage]]:
        statuses.append(in_cluster(given, [*plain, *options.pytest]))
    if CLAIMS in stages:
        driver = {cpu_driver.PROGRAM: str(binaries / cpu_driver.PROGRAM)}
        other = {"kubelet": cpu_driver.KUBELET, "disks": {**disks, **driver}, "rom": str(fetch(rom()))}
        statuses.append(in_cluster({**given, **other}, [*STAGES[CLAIMS], *options.pytest]))
    # a word after -k may be one of the other cluster's tests
    ran = [status for status in statuses if status != NO_TESTS]
    return max(ran, default=NO_TESTS)


def in_cluster(given: Mapping[str, object], arguments: Sequence[str]) -> int:
    """Run pytest with a cluster of its own, which is made of what is *given*, and return its status.

    It and all that it starts are in a network namespace without any other interface.
    """
    argv = ["unshare", "--net", sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "RUNNER_CLUSTER": json.dumps(given)}
    return subprocess.run(argv, cwd=PROJECT, env=environment, check=False).returncode


def stages_of(only: str | None, binaries: Path) -> list[str]:
    """Return the stages to run: *only* one, or each for which the programs are there. Raises :class:`EmulatedNodeError`."""
    without = [] if os.access(binaries / cpu_driver.PROGRAM, os.X_OK) else [CLAIMS]
    if only in without:
        raise EmulatedNodeError(f"cannot run {only}: {binaries} has no {cpu_driver.PROGRAM}")
    return [only] if only else [name for name in STAGES if name not in without]


def one_version(binaries: Path, wanted: list[str]) -> str:
    """Return the version of all programs. Raises :class:`EmulatedNodeError` if one is missing or of another one."""
    missing = [name for name in wanted if not os.access(binaries / name, os.X_OK)]
    if missing:
        raise EmulatedNodeError(f"cannot make a cluster: {binaries} has no {', '.join(missing)}")
    versions = {name: version_of(binaries / name) for name in wanted}
    if len(set(versions.values())) > 1:
        raise EmulatedNodeError(f"cannot make a cluster of several versions: {versions}")
    return next(iter(versions.values()))


def kubectl_for(binaries: Path, version: str) -> Path:
    """Return the kubectl in *binaries*, or else this machine's. Raises :class:`EmulatedNodeError` if neither fits *version*."""
    found = shutil.which(KUBECTL, path=str(binaries)) or shutil.which(KUBECTL)
    if found is None:
        raise EmulatedNodeError(f"cannot make a cluster: neither {binaries} nor this machine has {KUBECTL}")
    client = version_of(Path(found))
    if abs(minor_of(client) - minor_of(version)) > KUBECTL_SKEW:
        raise EmulatedNodeError(
            f"cannot make a cluster of {version}: {found} is {client}; put another one into {binaries}"
        )
    return Path(found)


def minor_of(version: str) -> int:
    """Return the minor version of one such as ``v1.36.2``."""
    return int(version.split(".")[1])


def version_of(program: Path) -> str:
    """Return what a program of Kubernetes says of itself, such as ``v1.36.2``."""
    arguments = ["version", "--client", "-o", "json"] if program.name == KUBECTL else ["--version"]
    done = subprocess.run([program, *arguments], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise EmulatedNodeError(f"{program} does not run: {done.stderr.strip()}")
    if program.name == KUBECTL:
        return str(json.loads(done.stdout)["clientVersion"]["gitVersion"])
    return done.stdout.split()[-1]


def downloaded(version: str) -> Path:
    """Return a directory with the official programs of *version*, each compared with its published SHA-256.

    No test has run this: where these tests were made there is no way to the internet.
    """
    if platform.machine() != "x86_64":
        raise EmulatedNodeError("cannot make a cluster: the emulated node is an x86-64 machine")
    place = directory() / f"kubernetes-{version}"
    place.mkdir(parents=True, exist_ok=True)
    for program in (*PROGRAMS, KUBELET, KUBECTL):
        file, url = place / program, RELEASES.format(version=version, program=program)
        if file.exists():
            continue
        say(f"downloading {url}")
        with urllib.request.urlopen(f"{url}.sha256") as answer:  # noqa: S310 - https, above
            expected = answer.read().decode().split()[0]
        with urllib.request.urlopen(url) as answer:  # noqa: S310 - https, above
            content = answer.read()
        if hashlib.sha256(content).hexdigest() != expected:
            raise EmulatedNodeError(f"{url} is not what its published checksum says")
        part = file.with_suffix(".part")
        part.write_bytes(content)
        part.chmod(0o755)
        part.rename(file)
    return place


if __name__ == "__main__":
    sys.exit(main())
