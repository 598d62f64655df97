"""The machine under test has the CPUs, NUMA nodes, cgroups and programs that the tests need.

Where these tests fail, the results of the others in this folder mean nothing.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from runner.kernel.character_devices import probe_kvm, try_kvm
from tests.node.cgroups import ROOT, Cgroup, cgroup_of

CPU = Path("/sys/devices/system/cpu")
KVM = Path("/dev/kvm")
EMULATED = os.environ.get("RUNNER_NODE") == "emulated"
in_the_emulated_node = pytest.mark.skipif(
    not EMULATED, reason="the emulated node is missing: this machine's shape is its own"
)


@in_the_emulated_node
def test_cpus_are_numbered_as_on_real_multi_socket_hosts(numa: dict[int, CpuSet]) -> None:
    """First threads first: on 128 CPUs, NUMA node 0 has 0-31,64-95 and the sibling of n is n + 64."""
    cpus = CpuSet.parse((CPU / "online").read_text())
    half = len(cpus) // 2
    share = half // len(numa)
    for numa_node, found in numa.items():
        first = range(numa_node * share, (numa_node + 1) * share)
        assert found == CpuSet([*first, *(cpu + half for cpu in first)])
    for cpu in range(half):
        siblings = CpuSet.parse((CPU / f"cpu{cpu}/topology/thread_siblings_list").read_text())
        assert siblings == CpuSet([cpu, cpu + half])


@in_the_emulated_node
def test_every_numa_node_has_memory_of_its_own(numa: dict[int, CpuSet]) -> None:
    for numa_node in numa:
        first = Path(f"/sys/devices/system/node/node{numa_node}/meminfo").read_text().splitlines()[0]
        assert int(first.split()[3]) > 256 << 10, first


@in_the_emulated_node
def test_the_checkout_is_shared_read_only_and_results_come_back() -> None:
    with pytest.raises(OSError, match="Read-only"):
        Path("/project/trace").touch()
    Path("/results/trace").write_text("of the node")


@in_the_emulated_node
def test_tests_run_in_a_service_of_their_own_as_under_systemd() -> None:
    assert cgroup_of("self") == "/system.slice/job.service"
    assert cgroup_of(1) == "/init.scope"


def test_every_controller_a_kubelet_uses_is_there() -> None:
    assert {"cpuset", "cpu", "io", "memory", "hugetlb", "pids"} <= Cgroup(ROOT).words("cgroup.controllers")
    assert {"cpuset", "cpu", "memory", "pids"} <= Cgroup(ROOT).words("cgroup.subtree_control")


@pytest.mark.parametrize("program", ["qemu-system-x86_64", "crun", "runc", "dnsmasq", "/usr/libexec/virtiofsd"])
def test_the_programs_under_test_are_installed(program: str) -> None:
    assert shutil.which(program)


@pytest.mark.parametrize("device", ["/dev/net/tun", "/dev/vhost-net", "/dev/vsock", "/dev/fuse"])
def test_the_devices_guests_need_are_there(device: str) -> None:
    assert Path(device).is_char_device()


@in_the_emulated_node
def test_a_node_whose_cpus_have_svm_has_kvm() -> None:
    """TCG emulates it, and the Linux guests of these tests boot in a tenth of the time."""
    if " svm " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("SVM is missing: the node's CPUs are those of this machine")
    assert probe_kvm(KVM).error is None
    assert try_kvm(KVM) is None
