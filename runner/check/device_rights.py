"""Judgements about device nodes and about what this process may do (pure)."""

from __future__ import annotations

import errno

from runner.check.finding import Check, Finding, Place
from runner.facts.host import Kvm
from runner.plan.host_checks import (
    DENIED,
    KVM_UNUSABLE_REMEDY,
    LET_IN,
    emulated,
    kvm_remedy,
    kvm_unusable,
    root_for_kvm,
    too_little_lockable,
)
from runner.plan.host_checks import MEMLOCK as MEMLOCK_REMEDY

KVM = Check("kvm", "KVM runs the guest's instructions on the CPU itself")
TUN = Check("tun", "a guest's network is a tap interface made with it")
VHOST_NET = Check("vhost-net", "without it QEMU copies every packet itself")
MEMLOCK = Check("memlock", "VFIO locks all guest RAM in memory, and so does memory.lock")
MBIND = Check("mbind", "guest RAM is bound to NUMA nodes with it")

SECCOMP = Check("seccomp", "as root of a user namespace a process can write the limits and the CPUs of its cgroups")

MODULES = {TUN: "tun", VHOST_NET: "vhost_net"}
"""Check → the kernel's module that makes the device node."""

GIVE = "give the container the device: `--device {0}`, or a device plugin's resource in the pod's manifest"
ADD_SECCOMP = (
    "seccompProfile: RuntimeDefault in the pod's manifest, or seccompDefault: true in the kubelet's configuration; or set "
    "user.max_user_namespaces to 0 on the node"
)
ALLOW_MBIND = "add the capability SYS_NICE: the default seccomp profiles of Docker and containerd then allow mbind"


def judge_kvm(kvm: Kvm) -> Finding:
    """Judge ``/dev/kvm``."""
    reason = emulated(kvm)
    if reason is not None:
        given = f"{GIVE.format('/dev/kvm')}; on the node: modprobe kvm_intel (or kvm_amd)"
        return KVM.warning(reason, kvm_remedy(kvm) or given)
    if (unusable := kvm_unusable(kvm)) is not None:
        return KVM.fatal(unusable, KVM_UNUSABLE_REMEDY)
    root = root_for_kvm(kvm)
    if root is not None:
        return KVM.warning(root, "chgrp kvm /dev/kvm && chmod 660 /dev/kvm, on the node")
    return KVM.ok("/dev/kvm makes virtual machines")


def judge_device(check: Check, place: Place, path: str, reason: str | None) -> Finding:
    """Judge a device node; *reason* is why it cannot be opened for reading and writing, ``None`` if it can."""
    if reason is None:
        return check.ok(f"{path} may be used")
    if reason == DENIED:
        return check.warning(f"{path}: {reason}", LET_IN)
    bare = place in {Place.NODE, Place.MACHINE}
    return check.warning(f"{path}: {reason}", f"modprobe {MODULES[check]}" if bare else GIVE.format(path))


def judge_memlock(limit: int | None, needed: int | None) -> Finding:
    """Judge the *limit* of bytes that may be locked (``None``: none) for a guest that may need *needed* (``None``: unknown)."""
    if needed == 0:
        return MEMLOCK.ok("nothing is locked")
    if needed is None:
        return MEMLOCK.unknown("how much is locked depends on what the plan was refused for", "fix that first")
    reason = too_little_lockable(limit, needed)
    if reason is not None:
        return MEMLOCK.warning(reason, MEMLOCK_REMEDY)
    return MEMLOCK.ok("there is no limit" if limit is None else f"{limit >> 20} MiB may be locked")


def judge_seccomp(*, may_make_root: bool) -> Finding:
    """Judge whether the container's processes are kept from being root of a user namespace."""
    if may_make_root:
        return SECCOMP.warning("no seccomp profile, and user namespaces may be made", ADD_SECCOMP)
    return SECCOMP.ok("a seccomp profile, a sysctl or a user namespace is in the way of becoming root of one")


def judge_mbind(error: OSError | None, numa_nodes: int) -> Finding:
    """Judge a trial of mbind(2) by its *error*, ``None`` for success."""
    if error is None:
        return MBIND.ok("mbind works")
    if error.errno == errno.ENOSYS or numa_nodes == 1:
        return MBIND.ok(f"mbind fails ({error.strerror}), but the machine has one NUMA node")
    if error.errno == errno.EPERM:
        return MBIND.warning("mbind is forbidden, by a seccomp profile", ALLOW_MBIND)
    return MBIND.unknown(f"a trial of mbind failed: {error.strerror}")
