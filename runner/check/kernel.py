"""Checks of the kernel and its settings."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from runner.base.cpuset import CpuSet
from runner.base.errors import in_shell
from runner.base.judgement import Judgement
from runner.base.table import some
from runner.check.checks import CheckContext, Place, check, for_each
from runner.facts.hardware import Hardware
from runner.kernel.cgroup_mounts import CgroupMounts, read_cgroup_mounts
from runner.kernel.kernel_facts import (
    PciDevice,
    QuietCpus,
    Swap,
    read_choice,
    read_cpus,
    read_line,
    read_pci_devices,
    read_quiet_cpus,
    read_swaps,
)
from runner.kernel.procfs import Procfs
from runner.plan.disks import AIO_REQUESTS
from runner.plan.host_checks import KEPT_MEMORY_STATE
from runner.spec.rules import format_size


@check(
    "cgroups",
    "the controller keeps instances apart with cgroup v2 and its cpuset controller; without them only CPU masks do",
)
def cgroups(context: CheckContext) -> Iterator[Judgement]:
    """Judge the mounted cgroup hierarchies, and the controllers of version 2."""
    mounts = read_cgroup_mounts(context.roots.proc)
    offered = "" if mounts.unified is None else read_line(context.host.root / mounts.unified[1:] / "cgroup.controllers")
    yield judge_cgroups(context.place, mounts, offered.split())


def judge_cgroups(place: Place, mounts: CgroupMounts, controllers: Collection[str]) -> Judgement:
    """Judge the *mounts* of cgroups, and the *controllers* that version 2 offers."""
    unified, legacy = mounts.unified, mounts.legacy
    remedy = "boot with `systemd.unified_cgroup_hierarchy=1 cgroup_no_v1=all` on the kernel's command line"
    bad = cgroups.error if place is Place.NODE else cgroups.warning
    if "cpuset" in legacy:
        return bad(f"the cpuset controller is cgroup v1's (hybrid: {legacy['cpuset']})", remedy)
    if unified is None and legacy:
        return bad(f"cgroup v2 is not mounted, only v1 ({', '.join(sorted(legacy))})", remedy)
    if unified is None:
        return cgroups.unknown(
            "no cgroup hierarchy can be seen here", "mount /sys/fs/cgroup read-only, or run check on the node"
        )
    if "cpuset" not in controllers:
        offered = ", ".join(sorted(controllers)) or "none"
        return bad(
            f"cgroup v2 at {unified} does not offer cpuset (it offers: {offered})",
            f"echo +cpuset > {in_shell(f'{unified}/cgroup.subtree_control')}, as root on the node",
        )
    if place is Place.NODE and not mounts.delegates:
        return cgroups.warning(
            f"cgroup v2 at {unified} is mounted without nsdelegate: a pod may open its cgroup files again, any number of times",
            f"mount -o remount,nsdelegate {in_shell(unified)}, as root on the node, and at every boot, as systemd does by itself",
        )
    return cgroups.ok(f"cgroup v2 at {unified} offers cpuset")


LOSSES = (
    ((5, 16), "a descriptor of a cgroup admits only processes that may enter it by path as well"),
    ((6, 2), "a change of a cpuset may reset the masks of pinned threads"),
    ((6, 4), "vhost threads do not follow QEMU into its cgroup and may run on the vCPUs' CPUs"),
    ((6, 5), "the controller identifies its clients by bare PID (no SO_PEERPIDFD)"),
    ((6, 7), "the kernel cannot keep others off the vCPUs' CPUs (no remote partitions): that is arranged only"),
)
"""Kernel version → the function that older kernels lack."""


@check("kernel", "older kernels isolate instances less well")
def kernel(context: CheckContext) -> Iterator[Judgement]:
    """Judge the kernel's release."""
    yield from judge_kernel(read_line(context.roots.proc / "sys/kernel/osrelease"))


def judge_kernel(release: str) -> Iterator[Judgement]:
    """Judge the kernel's *release*, such as ``6.12.48+deb13-amd64``."""
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None:
        yield kernel.unknown(f"Linux {release!r} has no version that could be compared")
        return
    version = int(match[1]), int(match[2])
    lost = [(since, loss) for since, loss in LOSSES if version < since]
    for (major, minor), loss in lost:
        yield kernel.warning(
            f"Linux {release}: before {major}.{minor} {loss}",
            "install Linux 6.7 or later (Debian 13, Ubuntu 24.04, RHEL 10)",
        )
    if not lost:
        yield kernel.ok(f"Linux {release}")


CHEAP_CLOCKS = {"tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"}


@check("clocksource", "a guest under KVM reads its clock without a VM exit only while the host's clock is the TSC")
def clock(context: CheckContext) -> Iterator[Judgement]:
    """Judge the clock source in use."""
    yield judge_clock(read_line(context.roots.sys / "devices/system/clocksource/clocksource0/current_clocksource"))


def judge_clock(current: str) -> Judgement:
    """Judge the clock source in use (``clocksource0/current_clocksource``), empty when it cannot be read."""
    if not current:
        return clock.unknown("the kernel does not say which clock it uses")
    if current in CHEAP_CLOCKS:
        return clock.ok(f"the clock is {current}")
    return clock.warning(
        f"the clock is {current}",
        "see `dmesg | grep -i tsc` for why the TSC was given up, and boot with `tsc=reliable` if the firmware can be trusted",
    )


@check("swap", "a vCPU that touches guest RAM which was swapped out stops until it is read back")
def swap(context: CheckContext) -> Iterator[Judgement]:
    """Judge the swap devices, and this cgroup's limit of them."""
    limit = read_line(context.roots.cgroup / context.cgroup[1:] / "memory.swap.max")
    yield judge_swap(read_swaps(context.roots.proc), limit)


def judge_swap(swaps: Sequence[Swap], limit: str) -> Judgement:
    """Judge the swap devices; *limit* is our ``memory.swap.max``, empty when it cannot be read."""
    if not swaps:
        return swap.ok("swap is off")
    named = ", ".join(f"{each.name} ({each.size >> 20} MiB)" for each in swaps)
    if limit == "0":
        return swap.ok(f"swap is on ({named}), but not for this container")
    return swap.warning(f"swap is on: {named}", "swapoff -a, and remove it from /etc/fstab")


@check("transparent-hugepages", "guest RAM in 4 KiB pages costs memory-heavy guests some percent in page-table walks")
def transparent_hugepages(context: CheckContext) -> Iterator[Judgement]:
    """Judge whether shared memory gets huge pages."""
    yield judge_transparent_hugepages(read_choice(context.roots.sys / "kernel/mm/transparent_hugepage/shmem_enabled"))


def judge_transparent_hugepages(shmem: str) -> Judgement:
    """Judge ``shmem_enabled`` of transparent hugepages, which guest RAM is made of; empty when it cannot be read."""
    if not shmem:
        return transparent_hugepages.unknown("the kernel does not say whether shared memory gets hugepages")
    if shmem in {"never", "deny"}:
        return transparent_hugepages.warning(
            f"shared memory, which guest RAM is, never gets transparent hugepages (shmem_enabled is {shmem!r})",
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        )
    return transparent_hugepages.ok(f"shmem_enabled is {shmem!r}")


@check("hugepages", "guest RAM in hugepages of another NUMA node is remote memory for its vCPUs")
def hugepages(context: CheckContext) -> Iterator[Judgement]:
    """Judge the huge pages that the machine has reserved."""
    near = context.hardware.online if context.place is Place.NODE else context.cpus
    if context.hugepage_size is not None and context.backend is not None:
        near = CpuSet()  # the plan has found enough of them on the right NUMA nodes
    yield from judge_hugepages(context.hardware, near, context.hugepage_size)


def judge_hugepages(hardware: Hardware, cpus: CpuSet, asked: int | None) -> Iterator[Judgement]:
    """Judge the huge pages on the NUMA nodes of *cpus*: those of *asked* bytes, or for ``None`` every reserved size.

    Whether there are enough for a spec is decided by the plan; *cpus* is then empty.
    """
    near = {hardware.by_cpu[cpu].numa_node for cpu in cpus & hardware.online}
    reserved = {pool.size for node in hardware.numa_nodes for pool in node.hugepages if pool.total}
    sizes = sorted(reserved if asked is None else {asked})
    for size in sizes:
        pools = {
            node.id: next(((pool.free, pool.total) for pool in node.hugepages if pool.size == size), (0, 0))
            for node in hardware.numa_nodes
        }
        where = ", ".join(f"{free} of {total} free on NUMA node {node}" for node, (free, total) in pools.items())
        missing = [node for node, (free, _) in pools.items() if node in near and not free]
        for node in missing:
            file = f"/sys/devices/system/node/node{node}/hugepages/hugepages-{size >> 10}kB/nr_hugepages"
            yield hugepages.warning(
                f"none of {format_size(size)} is free on NUMA node {node} ({where})",
                f"echo NUMBER > {file} ({KEPT_MEMORY_STATE})",
            )
        if not missing:
            yield hugepages.ok(f"{format_size(size)}: {where}")
    if not sizes:
        yield hugepages.ok("none are reserved, and no instance asks for them")


@check(
    "numa-balancing",
    "the kernel unmaps guest RAM repeatedly to learn which CPU uses it; each such page stops a vCPU briefly",
)
def numa_balancing(context: CheckContext) -> Iterator[Judgement]:
    """Judge the sysctl ``kernel.numa_balancing``."""
    value = read_line(context.roots.proc / "sys/kernel/numa_balancing")
    yield judge_numa_balancing(value, len(context.hardware.numa_nodes))


def judge_numa_balancing(value: str, numa_nodes: int) -> Judgement:
    """Judge ``kernel.numa_balancing``, empty where the kernel has none; it leaves memory alone that is bound to a NUMA node."""
    if numa_nodes == 1:
        return numa_balancing.ok("the machine has one NUMA node")
    if value in {"", "0"}:
        return numa_balancing.ok("it is off")
    return numa_balancing.warning(
        f"kernel.numa_balancing is {value}, and scans all memory that is not bound to a NUMA node",
        "sysctl -w kernel.numa_balancing=0, and the same in /etc/sysctl.d",
    )


FEW_DISKS = 8
"""Threads serving disks that could still be started, below which :func:`judge_aio` warns."""


@check(
    "native-aio",
    'QEMU does not start with a disk of aio = "native" when the machine has no requests of native AIO left',
)
def aio(context: CheckContext) -> Iterator[Judgement]:
    """Judge the number of free native AIO requests."""
    yield judge_aio(Procfs(context.roots.proc).aio_free())


def judge_aio(free: int | None) -> Judgement:
    """Judge the number of free native AIO requests on the machine; ``None``: the kernel does not show it."""
    if free is None:
        return aio.unknown("the kernel does not say how many requests of native AIO are left")
    disks = free // AIO_REQUESTS
    shown = f"fs.aio-max-nr leaves {free} requests, for {disks} more threads of QEMU that serve disks with native AIO"
    if disks < FEW_DISKS:
        return aio.warning(shown, "sysctl -w fs.aio-max-nr=1048576, and the same in /etc/sysctl.d")
    return aio.ok(shown)


@check(
    "isolated-cpus", "the scheduler balances no threads over CPUs of isolcpus=: a thread that starts there stays there"
)
def isolated_cpus(context: CheckContext) -> Iterator[Judgement]:
    """Judge the CPUs that the kernel's command line sets apart."""
    cpu = context.roots.sys / "devices/system/cpu"
    isolated = read_cpus(cpu / "isolated") if (cpu / "isolated").exists() else None
    yield judge_isolated(isolated, read_quiet_cpus(context.roots.proc, cpu), context.shared_pool)


def judge_isolated(isolated: CpuSet | None, quiet_cpus: QuietCpus, shared_pool: CpuSet | None) -> Judgement:
    """Judge the CPUs of ``isolcpus=`` and ``nohz_full=``; *shared_pool* is the kubelet's, ``None`` if unknown.

    It also reports the kernel's own work that only boot options keep off CPUs, and the CPUs that they name. A partition that would leave no
    CPU outside of both is refused (``isolated_cpus_can_update``, ``kernel/cgroup/cpuset.c``).
    """
    quiet = _quiet(quiet_cpus)
    if shared_pool and shared_pool <= quiet_cpus.nohz_full:
        return isolated_cpus.warning(
            f"all CPUs of the shared pool, '{shared_pool}', are in nohz_full=, so that the kernel's own work runs on "
            "instances' CPUs, and newer kernels do not isolate the last of those",
            "leave the shared pool out of nohz_full=",
        )
    if isolated is None:
        return isolated_cpus.unknown("the kernel does not say which CPUs are isolated")
    if not isolated:
        return isolated_cpus.ok(f"isolcpus= names none{quiet}")
    if shared_pool is None:
        return isolated_cpus.unknown(
            f"the shared pool is not known here, and isolcpus='{isolated}'{quiet}", "run check on the node"
        )
    if isolated.isdisjoint(shared_pool):
        return isolated_cpus.ok(f"isolcpus='{isolated}', none of them in the shared pool{quiet}")
    return isolated_cpus.warning(
        f"CPUs '{isolated & shared_pool}' of the shared pool are in isolcpus={quiet}",
        "remove isolcpus= from the kernel's command line: the kubelet and the controller isolate CPUs",
    )


def _quiet(cpus: QuietCpus) -> str:
    work = {
        "the timer tick": ("nohz_full=", str(cpus.nohz_full)),
        "RCU callbacks": ("rcu_nocbs=", cpus.rcu_nocbs or str(cpus.nohz_full)),
        "interrupts that the kernel manages": ("isolcpus=managed_irq,", cpus.managed_irq),
    }
    kept = [f"{what} ({option}{where})" for what, (option, where) in work.items() if where]
    left = [f"{what} ({option})" for what, (option, where) in work.items() if not where]
    phrases = [f"kept off at boot: {', '.join(kept)}"] if kept else []
    phrases += [f"boot options could keep off: {', '.join(left)}"] if left else []
    return f"; {', and '.join(phrases)}"


DEVICE_CLASSES = {0x01: "storage", 0x02: "network", 0x03: "display", 0x12: "accelerator"}
"""PCI base classes whose NUMA node matters to a guest (``include/linux/pci_ids.h``)."""


@check(
    "pci-numa-nodes", "a device of unknown NUMA node counts as one of NUMA node 0, and guest RAM is placed accordingly"
)
def pci_numa_nodes(context: CheckContext) -> Iterator[Judgement]:
    """Judge the NUMA node of each device."""
    yield judge_pci(tuple(read_pci_devices(context.roots.sys)), len(context.hardware.numa_nodes))


def judge_pci(devices: Sequence[PciDevice], numa_nodes: int) -> Judgement:
    """Judge whether the firmware reports the NUMA node of each device."""
    if numa_nodes == 1:
        return pci_numa_nodes.ok("the machine has one NUMA node")
    unknown = [device for device in devices if device.numa_node < 0 and device.base_class in DEVICE_CLASSES]
    if unknown:
        named = some(f"{device.address} ({DEVICE_CLASSES[device.base_class]})" for device in unknown)
        write = for_each(
            [device.address for device in unknown],
            "echo NODE > /sys/bus/pci/devices/$i/numa_node",
            "cd /sys/bus/pci/devices && grep -lx -e -1 */numa_node | cut -d/ -f1",
        )
        return pci_numa_nodes.warning(
            f"numa_node is -1 for {named}",
            f"update the firmware, or until then, where the slots are known: {write}",
        )
    return pci_numa_nodes.ok("the NUMA node of every device is known")
