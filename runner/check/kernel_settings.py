"""Judgements about the kernel and its settings (pure)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from runner.base.cpuset import CpuSet
from runner.check.finding import Check, Finding, Place
from runner.facts.hardware import Hardware
from runner.kernel.settings import PciDevice, QuietCpus, Swap
from runner.plan.disks import AIO_REQUESTS
from runner.plan.host_checks import KEPT_MEMORY_STATE

CGROUPS = Check(
    "cgroups",
    "the controller keeps instances apart with cgroup v2 and its cpuset controller; without them only CPU masks do",
)
KERNEL = Check("kernel", "older kernels isolate instances less well")
CLOCK = Check(
    "clocksource", "a guest under KVM reads its clock without a VM exit only while the host's clock is the TSC"
)
SWAP = Check("swap", "a vCPU that touches guest RAM which was swapped out stops until it is read back")
TRANSPARENT_HUGEPAGES = Check(
    "transparent-hugepages", "guest RAM in 4 KiB pages costs memory-heavy guests some percent in page-table walks"
)
HUGEPAGES = Check("hugepages", "guest RAM in hugepages of another NUMA node is remote memory for its vCPUs")
AIO = Check(
    "native-aio",
    'QEMU does not start with a disk of aio = "native" when the machine has no requests of native AIO left',
)
NUMA_BALANCING = Check(
    "numa-balancing",
    "the kernel unmaps guest RAM repeatedly to learn which CPU uses it; each such page stops a vCPU briefly",
)
ISOLATED = Check(
    "isolated-cpus", "the scheduler balances no threads over CPUs of isolcpus=: a thread that starts there stays there"
)
PCI = Check(
    "pci-numa-nodes", "a device of unknown NUMA node counts as one of NUMA node 0, and guest RAM is placed accordingly"
)

LOSSES = (
    ((5, 16), "a descriptor of a cgroup admits only processes that may enter it by path as well"),
    ((6, 2), "a change of a cpuset may reset the masks of pinned threads"),
    ((6, 4), "vhost threads do not follow QEMU into its cgroup and may run on the vCPUs' CPUs"),
    ((6, 5), "the controller identifies its clients by bare PID (no SO_PEERPIDFD)"),
    ((6, 7), "the kernel cannot keep others off the vCPUs' CPUs (no remote partitions): that is arranged only"),
)
"""Kernel version → what is lost before it."""

FEW_DISKS = 8
"""Threads that serve disks, and are still to be started, below which :func:`judge_aio` warns."""
CHEAP_CLOCKS = {"tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"}

DEVICE_CLASSES = {0x01: "storage", 0x02: "network", 0x03: "display", 0x12: "accelerator"}
"""PCI base classes whose place matters to a guest (``include/linux/pci_ids.h``)."""


def judge_cgroups(
    place: Place, unified: str | None, controllers: Collection[str], legacy: Mapping[str, str]
) -> Finding:
    """Judge where cgroup v2 is mounted (*unified*), what it offers, and which v1 controllers are mounted where."""
    remedy = "boot with `systemd.unified_cgroup_hierarchy=1 cgroup_no_v1=all` on the kernel's command line"
    bad = CGROUPS.fatal if place is Place.NODE else CGROUPS.warning
    if "cpuset" in legacy:
        return bad(f"the cpuset controller is cgroup v1's (hybrid: {legacy['cpuset']})", remedy)
    if unified is None and legacy:
        return bad(f"cgroup v2 is not mounted, only v1 ({', '.join(sorted(legacy))})", remedy)
    if unified is None:
        return CGROUPS.unknown(
            "no cgroup hierarchy can be seen here", "mount /sys/fs/cgroup read-only, or run check on the node"
        )
    if "cpuset" not in controllers:
        offered = ", ".join(sorted(controllers)) or "none"
        return bad(
            f"cgroup v2 at {unified} does not offer cpuset (it offers: {offered})",
            f"echo +cpuset > {unified}/cgroup.subtree_control, as root on the node",
        )
    return CGROUPS.ok(f"cgroup v2 at {unified} offers cpuset")


def judge_kernel(release: str) -> Finding:
    """Judge the kernel's *release*, such as ``6.12.48+deb13-amd64``."""
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None:
        return KERNEL.unknown(f"Linux {release!r} has no version that could be compared")
    version = int(match[1]), int(match[2])
    lost = [f"before {since[0]}.{since[1]} {loss}" for since, loss in LOSSES if version < since]
    if lost:
        return KERNEL.warning(
            f"Linux {release}: {'; '.join(lost)}", "install Linux 6.7 or later (Debian 13, Ubuntu 24.04, RHEL 10)"
        )
    return KERNEL.ok(f"Linux {release}")


def judge_clock(current: str) -> Finding:
    """Judge the clock source in use (``clocksource0/current_clocksource``), empty when it cannot be read."""
    if not current:
        return CLOCK.unknown("the kernel does not say which clock it uses")
    if current in CHEAP_CLOCKS:
        return CLOCK.ok(f"the clock is {current}")
    return CLOCK.warning(
        f"the clock is {current}",
        "see `dmesg | grep -i tsc` for why the TSC was given up; boot with `tsc=reliable` if the firmware can be trusted",
    )


def judge_swap(swaps: Sequence[Swap], limit: str) -> Finding:
    """Judge the swap devices; *limit* is our ``memory.swap.max``, empty when it cannot be read."""
    if not swaps:
        return SWAP.ok("swap is off")
    named = ", ".join(f"{swap.name} ({swap.size >> 20} MiB)" for swap in swaps)
    if limit == "0":
        return SWAP.ok(f"swap is on ({named}), but not for this container")
    return SWAP.warning(f"swap is on: {named}", "swapoff -a, and remove it from /etc/fstab")


def judge_transparent_hugepages(shmem: str) -> Finding:
    """Judge ``shmem_enabled`` of transparent hugepages, which guest RAM is made of; empty when it cannot be read."""
    if not shmem:
        return TRANSPARENT_HUGEPAGES.unknown("the kernel does not say whether shared memory gets hugepages")
    if shmem in {"never", "deny"}:
        return TRANSPARENT_HUGEPAGES.warning(
            f"shared memory, which guest RAM is, never gets transparent hugepages (shmem_enabled is {shmem!r})",
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        )
    return TRANSPARENT_HUGEPAGES.ok(f"shmem_enabled is {shmem!r}")


def judge_hugepages(hardware: Hardware, cpus: CpuSet, asked: int | None) -> Finding:
    """Judge the hugepages on the NUMA nodes of *cpus*: those of *asked* bytes; for ``None`` every size that is reserved.

    Whether there are enough for a spec is decided by the plan; *cpus* is then empty.
    """
    near = {hardware.by_cpu[cpu].numa_node for cpu in cpus & hardware.online}
    shown, missing = [], []
    reserved = {pool.size for node in hardware.numa_nodes for pool in node.hugepages if pool.total}
    for size in sorted(reserved if asked is None else {asked}):
        where = []
        for node in hardware.numa_nodes:
            total, free = next(((pool.total, pool.free) for pool in node.hugepages if pool.size == size), (0, 0))
            where.append(f"{free} of {total} free on NUMA node {node.id}")
            if node.id in near and not free:
                missing.append((size, node.id))
        shown.append(f"{_size(size)}: {', '.join(where)}")
    if not shown:
        return HUGEPAGES.ok("none are reserved, and no instance asks for them")
    if missing:
        size, node_id = missing[0]
        return HUGEPAGES.warning(
            f"none of {_size(size)} is free on NUMA node {node_id} ({'; '.join(shown)})",
            f"echo NUMBER > /sys/devices/system/node/node{node_id}/hugepages/hugepages-{size >> 10}kB/nr_hugepages; "
            f"{KEPT_MEMORY_STATE}",
        )
    return HUGEPAGES.ok("; ".join(shown))


def _size(size: int) -> str:
    return f"{size >> 30} GiB" if size >= 1 << 30 else f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def judge_aio(free: int | None) -> Finding:
    """Judge how many requests of native AIO the machine has left; ``None``: the kernel does not say."""
    if free is None:
        return AIO.unknown("the kernel does not say how many requests of native AIO are left")
    disks = free // AIO_REQUESTS
    shown = f"fs.aio-max-nr leaves {free} requests, for {disks} more threads of QEMU that serve disks with native AIO"
    if disks < FEW_DISKS:
        return AIO.warning(shown, "sysctl -w fs.aio-max-nr=1048576, and the same in /etc/sysctl.d")
    return AIO.ok(shown)


def judge_numa_balancing(value: str, numa_nodes: int) -> Finding:
    """Judge ``kernel.numa_balancing``, empty where the kernel has none; it leaves memory alone that is bound to a NUMA node."""
    if numa_nodes == 1:
        return NUMA_BALANCING.ok("the machine has one NUMA node")
    if value in {"", "0"}:
        return NUMA_BALANCING.ok("it is off")
    return NUMA_BALANCING.warning(
        f"kernel.numa_balancing is {value}, and scans all memory that is not bound to a NUMA node",
        "sysctl -w kernel.numa_balancing=0, and the same in /etc/sysctl.d",
    )


def _quiet(cpus: QuietCpus) -> str:
    work = {
        "the timer tick": ("nohz_full=", str(cpus.nohz_full)),
        "RCU callbacks": ("rcu_nocbs=", cpus.rcu_nocbs or str(cpus.nohz_full)),
        "interrupts that the kernel manages": ("isolcpus=managed_irq,", cpus.managed_irq),
    }
    kept = [f"{what} ({option}{where})" for what, (option, where) in work.items() if where]
    left = [f"{what} ({option})" for what, (option, where) in work.items() if not where]
    return (f"; kept off at boot: {', '.join(kept)}" if kept else "") + (
        f"; boot options could keep off: {', '.join(left)}" if left else ""
    )


def judge_isolated(isolated: CpuSet | None, quiet_cpus: QuietCpus, shared_pool: CpuSet | None) -> Finding:
    """Judge the CPUs of ``isolcpus=`` and ``nohz_full=``; *shared_pool* is the kubelet's, ``None`` if unknown.

    Beside that it says which of the kernel's own work only boot options keep off CPUs, and off which they do. A partition
    that would leave no CPU outside of both is refused (``isolated_cpus_can_update``, ``kernel/cgroup/cpuset.c``).
    """
    quiet = _quiet(quiet_cpus)
    if shared_pool and shared_pool <= quiet_cpus.nohz_full:
        return ISOLATED.warning(
            f"all CPUs of the shared pool, '{shared_pool}', are in nohz_full=: the kernel's own work is left to instances' "
            "CPUs, and newer kernels isolate the last of them for no instance",
            "leave the CPUs of the shared pool out of nohz_full=",
        )
    if isolated is None:
        return ISOLATED.unknown("the kernel does not say which CPUs are isolated")
    if not isolated:
        return ISOLATED.ok(f"isolcpus= names none{quiet}")
    if shared_pool is None:
        return ISOLATED.unknown(
            f"isolcpus='{isolated}'{quiet}; the shared pool is not known here", "run check on the node"
        )
    if isolated.isdisjoint(shared_pool):
        return ISOLATED.ok(f"isolcpus='{isolated}', none of them in the shared pool{quiet}")
    return ISOLATED.warning(
        f"CPUs '{isolated & shared_pool}' of the shared pool are in isolcpus={quiet}",
        "remove isolcpus= from the kernel's command line: the kubelet and the controller isolate CPUs",
    )


def judge_pci(devices: Sequence[PciDevice], numa_nodes: int) -> Finding:
    """Judge whether the firmware names the NUMA node of each device."""
    if numa_nodes == 1:
        return PCI.ok("the machine has one NUMA node")
    unknown = [device for device in devices if device.numa_node < 0 and device.base_class in DEVICE_CLASSES]
    if unknown:
        named = ", ".join(f"{device.address} ({DEVICE_CLASSES[device.base_class]})" for device in unknown[:8])
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""  # noqa: PLR2004
        return PCI.warning(
            f"numa_node is -1 for {named}{more}",
            f"update the firmware; until then, where the slot is known: echo NODE > /sys/bus/pci/devices/{unknown[0].address}/numa_node",
        )
    return PCI.ok("the NUMA node of every device is known")
