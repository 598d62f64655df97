"""Fixtures of the tests of the node: a machine with root and cgroup v2, and a stand-in for its kubelet."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from tests.node import host_settings
from tests.node.cgroups import ROOT, Cgroup
from tests.node.images.manifested import Manifests
from tests.node.instances import ROM, Controller, NodeFixture, controller_of, kubelet_of, pool
from tests.node.minimal_pods import Machine, machine_of
from tests.node.standin_kubelet import Kubelet, Mount


def unsuitable() -> str:
    """Return what this machine lacks, or an empty string."""
    if os.geteuid() != 0:
        return "root privilege is missing"
    if not (ROOT / "cgroup.controllers").exists():
        return f"cgroup v2 is missing at {ROOT}"
    missing = {"cpuset", "cpu", "memory", "pids"} - Cgroup(ROOT).words("cgroup.controllers")
    if missing:
        return f"cgroup v2 controllers are missing: {', '.join(sorted(missing))}"
    return ""


def pytest_collection_finish() -> None:
    """Keep what was imported out of garbage collections: an emulated CPU takes seconds for each that looks at all of it."""
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    reason = unsuitable()
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.node)
            if reason:
                item.add_marker(pytest.mark.skip(reason=f"{reason}; tests/node/run brings a machine that has it"))


@pytest.fixture(scope="session")
def manifests() -> Manifests:
    if "RUNNER_NODE_MANIFESTS" not in os.environ:
        pytest.skip("built images are missing: tests/images/run builds them and gives them to the node")
    return Manifests.read()


@pytest.fixture
def tree() -> Iterator[Cgroup]:
    """Return an empty cgroup below the root, with every controller; it is removed with everything in it."""
    root = Cgroup(ROOT)
    root.delegate()
    tree = root.child(f"test-{os.getpid()}")
    try:
        yield tree
    finally:
        tree.remove()


@pytest.fixture
def pod(tree: Cgroup) -> Cgroup:
    """Return a cgroup as a pod's container has it: a domain with every controller on the way to it."""
    tree.delegate()
    return tree.child("pod.scope", cpuset_cpus="2-3")


@pytest.fixture
def threaded(tree: Cgroup) -> Cgroup:
    """Return the root of a threaded subtree: its children may become threaded, because it enables only cpuset for them."""
    tree.delegate()
    root = tree.child("threaded")
    root.delegate("cpuset")
    return root


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Return a machine with a controller and minimal pods; they end with the test."""
    with machine_of(tmp_path) as machine:
        yield machine


@pytest.fixture(scope="session")
def numa() -> dict[int, CpuSet]:
    """Return NUMA node → its CPUs."""
    return {
        int(path.name.removeprefix("node")): CpuSet.parse((path / "cpulist").read_text())
        for path in Path("/sys/devices/system/node").glob("node[0-9]*")
    }


@pytest.fixture
def kubelet(tmp_path: Path, numa: dict[int, CpuSet]) -> Iterator[Kubelet]:
    """Return a stand-in kubelet of this machine; its pods end with the test."""
    with kubelet_of(tmp_path, numa) as kubelet:
        yield kubelet


@pytest.fixture
def controller_options() -> tuple[str, ...]:
    """Return more arguments of the controller; a test replaces them by its parameter of this name."""
    return ()


@pytest.fixture
def controller(kubelet: Kubelet, tmp_path: Path, controller_options: tuple[str, ...]) -> Iterator[Controller]:
    """Return the node's controller, which answers; its tree is removed after the test."""
    with controller_of(kubelet, tmp_path, *controller_options) as controller:
        yield controller


@pytest.fixture
def node_fixture(kubelet: Kubelet, controller: Controller, tmp_path: Path) -> NodeFixture:
    """Return a node with kubelet and controller."""
    return NodeFixture(kubelet, controller, tmp_path)


@pytest.fixture(scope="module")
def shared_node(tmp_path_factory: pytest.TempPathFactory, numa: dict[int, CpuSet]) -> Iterator[NodeFixture]:
    """Return a node that all tests of a file share, because starts take most of their time."""
    directory = tmp_path_factory.mktemp("node")
    with kubelet_of(directory, numa) as kubelet, controller_of(kubelet, directory) as controller:
        yield NodeFixture(kubelet, controller, directory)


@pytest.fixture
def rom() -> Path:
    """Return the guest that is a ROM."""
    if not ROM.is_file():
        pytest.skip("the ROM guest is missing: tests/node/run builds it and names it in RUNNER_NODE_ROM")
    return ROM


@pytest.fixture
def linux_guest(tmp_path: Path) -> tuple[Path, Path]:
    """Return kernel and initramfs of the Linux guest, for the few tests that need one: emulated CPUs take a minute to boot it.

    QEMU maps the kernel while it loads it; from the share of the results that is slow.
    """
    found = [Path(os.environ.get(f"RUNNER_NODE_GUEST_{name}", "")) for name in ("KERNEL", "INITRD")]
    if not all(file.is_file() for file in found):
        pytest.skip("the Linux guest is missing: tests/node/run builds it and names it in RUNNER_NODE_GUEST_KERNEL")
    place = tmp_path / "linux-guest"
    place.mkdir()
    kernel, initrd = (Path(shutil.copy(file, place)) for file in found)
    return kernel, initrd


@pytest.fixture
def before() -> Iterator[dict[str, str]]:
    """Return the machine's settings before the test; they are the same after it."""
    host_settings.reset()
    assert host_settings.movable(), "a machine with interrupts that can be moved is missing"
    found = host_settings.settings()
    yield found
    assert host_settings.changes(found) == {}


@pytest.fixture
def reserve(numa: dict[int, CpuSet]) -> Iterator[Callable[[int, int], None]]:
    """Return a function that reserves huge pages on two NUMA nodes; they are given back after the test."""
    if len(numa) < 2 or not pool(0, "nr_hugepages").exists():
        pytest.skip("a machine with two NUMA nodes and huge pages of 2 MiB is missing")
    before = [pool(node, "nr_hugepages").read_text() for node in (0, 1)]

    def reserved(*pages: int) -> None:
        for node, count in enumerate(pages):
            pool(node, "nr_hugepages").write_text(str(count))
            assert pool(node, "nr_hugepages").read_text() == f"{count}\n", "the machine has no room for them"

    yield reserved
    for node, count in enumerate(before):
        pool(node, "nr_hugepages").write_text(count)


@pytest.fixture
def guest(rom: Path, tmp_path: Path) -> tuple[Mount, ...]:
    """Return the mount of a directory with the ROM guest."""
    place = tmp_path / "guest"
    place.mkdir()
    (place / "rom").write_bytes(rom.read_bytes())
    return ((place, "/guest", "ro"),)
