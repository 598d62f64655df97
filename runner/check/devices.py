"""Checks of device nodes, and of this process's rights."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

from runner.base.cpuset import CpuSet
from runner.base.judgement import Judgement
from runner.check.checks import OFF_NODE, Check, CheckContext, Place, check
from runner.facts.host import Kvm
from runner.kernel.character_devices import why_not_opened
from runner.kernel.limits import read_lockable
from runner.kernel.mbind import try_mbind
from runner.kernel.procfs import Procfs
from runner.plan.host_checks import (
    DENIED,
    KVM_UNUSABLE_REMEDY,
    LET_IN,
    MEMLOCK,
    emulated,
    kvm_remedy,
    kvm_unusable,
    root_for_kvm,
    too_little_lockable,
)

GIVE = "give the container the device: `--device {0}`, or a device plugin's resource in the pod's manifest"


@check("kvm", "KVM runs the guest's instructions on the CPU itself")
def kvm(context: CheckContext) -> Iterator[Judgement]:
    """Judge the trial of KVM that was made earlier, because other checks need its result."""
    yield judge_kvm(context.kvm)


def judge_kvm(device: Kvm) -> Judgement:
    """Judge ``/dev/kvm``."""
    reason = emulated(device)
    if reason is not None:
        given = f"{GIVE.format('/dev/kvm')}; on the node: modprobe kvm_intel (or kvm_amd)"
        return kvm.warning(reason, kvm_remedy(device) or given)
    if (unusable := kvm_unusable(device)) is not None:
        return kvm.error(unusable, KVM_UNUSABLE_REMEDY)
    root = root_for_kvm(device)
    if root is not None:
        return kvm.warning(root, "chgrp kvm /dev/kvm && chmod 660 /dev/kvm, on the node")
    return kvm.ok("/dev/kvm makes virtual machines")


@check("tun", "a guest's network is a tap interface made with it")
def tun(context: CheckContext) -> Iterator[Judgement]:
    """Judge whether the device node can be opened."""
    path = context.roots.dev / "net/tun"
    yield judge_device(tun, "tun", context.place, path, why_not_opened(path))


@check("vhost-net", "without it QEMU copies every packet itself")
def vhost_net(context: CheckContext) -> Iterator[Judgement]:
    """Judge whether the device node can be opened."""
    path = context.roots.dev / "vhost-net"
    yield judge_device(vhost_net, "vhost_net", context.place, path, why_not_opened(path))


def judge_device(check: Check, module: str, place: Place, path: Path, reason: str | None) -> Judgement:
    """Judge a device node of the kernel's *module*; *reason* is why it cannot be opened for reading and writing, or ``None``."""
    if reason is None:
        return check.ok(f"{path} may be used")
    if reason == DENIED:
        return check.warning(f"{path}: {reason}", LET_IN)
    bare = place in {Place.NODE, Place.MACHINE}
    return check.warning(f"{path}: {reason}", f"modprobe {module}" if bare else GIVE.format(path))


@check("memlock", "VFIO locks all guest RAM in memory, and so does memory.lock", *OFF_NODE)
def memlock(context: CheckContext) -> Iterator[Judgement]:
    """Judge this process's limit of locked memory."""
    yield judge_memlock(read_lockable(Procfs().machine_capabilities()), context.lockable)


def judge_memlock(limit: int | None, needed: int | None) -> Judgement:
    """Judge the *limit* of locked bytes (``None``: no limit) for a guest that may need *needed* (``None``: unknown)."""
    if needed == 0:
        return memlock.ok("nothing is locked")
    if needed is None:
        return memlock.unknown("how much is locked depends on what the plan was refused for", "fix that first")
    reason = too_little_lockable(limit, needed)
    if reason is not None:
        return memlock.warning(reason, MEMLOCK)
    return memlock.ok("there is no limit" if limit is None else f"{limit >> 20} MiB may be locked")


@check("seccomp", "as root of a user namespace a process can write the limits and the CPUs of its cgroups", Place.POD)
def seccomp(context: CheckContext) -> Iterator[Judgement]:
    """Judge whether this process may be root of a user namespace."""
    yield judge_seccomp(may_make_root=Procfs(context.roots.proc).may_make_root())


def judge_seccomp(*, may_make_root: bool) -> Judgement:
    """Judge whether the container's processes are prevented from being root of a user namespace."""
    if may_make_root:
        return seccomp.warning(
            "no seccomp profile, and user namespaces may be made",
            "set seccompProfile: RuntimeDefault for the pod, seccompDefault: true for the kubelet, or user.max_user_namespaces to "
            "0 on the node",
        )
    return seccomp.ok("a seccomp profile, a sysctl or a user namespace is in the way of becoming root of one")


@check("mbind", "guest RAM is bound to NUMA nodes with it", *OFF_NODE)
def mbind(context: CheckContext) -> Iterator[Judgement]:
    """Judge whether a page can be bound to a NUMA node."""
    [numa_node, *_rest] = CpuSet.parse(Procfs().status()["Mems_allowed_list"])
    yield judge_mbind(try_mbind(numa_node), len(context.hardware.numa_nodes))


def judge_mbind(error: OSError | None, numa_nodes: int) -> Judgement:
    """Judge a trial of mbind(2) by its *error*, ``None`` for success."""
    if error is None:
        return mbind.ok("mbind works")
    if error.errno == errno.ENOSYS or numa_nodes == 1:
        return mbind.ok(f"mbind fails ({error.strerror}), but the machine has one NUMA node")
    if error.errno == errno.EPERM:
        return mbind.warning(
            "mbind is forbidden, by a seccomp profile",
            "add the capability SYS_NICE: the default seccomp profiles of Docker and containerd then allow mbind",
        )
    return mbind.unknown(f"a trial of mbind failed: {error.strerror}")
