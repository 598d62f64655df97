"""Checks of the host that both ``run`` and ``check`` use, so that their answers cannot differ."""

from __future__ import annotations

from runner.base.cpuset import CpuSet
from runner.facts.host import Kvm, PodQos, format_version, parse_version
from runner.spec.instance import InstanceSpec

QEMU_OLDEST = (7, 2)
"""The oldest QEMU that this program was tested with."""

OWN_CPUS = (
    "give every container of the pod whole CPUs and memory with requests equal to limits (not in spec.resources), and the "
    "kubelet `cpuManagerPolicy: static`, or claim CPUs of a DRA driver"
)
"""The remedy for :func:`shared_cpus`. A pod with pod-level resources can be Guaranteed and gets no exclusive CPUs, whatever
its containers request (``policy_static.go``, ``Allocate``, with the gate ``PodLevelResourceManagers`` off)."""

CPU_TIME = (
    "raise the limit (`limits.cpu`, `docker --cpus`, `cpu.max` of the groups above) to at least the number of vCPUs"
)
"""The remedy for :func:`too_little_time`."""

ASKING_FOR_LESS = frozenset({"affinity", "delegated"})
"""Placements that keep apart only the threads of the container; a spec that names one accepts CPUs that are not exclusive."""

_GUARANTEED, _BEST_EFFORT = -997, 1000


def qos_of_oom_score_adj(value: int) -> str:
    """Return the QoS class for which the kubelet sets ``oom_score_adj`` to *value*, empty if there is none.

    ``pkg/kubelet/qos/policy.go``, ``GetContainerOOMScoreAdjust``: -997, 1000, and for Burstable a value between
    them by its share of memory. A node-critical pod of any class has -997 too.
    """
    if value == _GUARANTEED:
        return "guaranteed"
    if value == _BEST_EFFORT:
        return "besteffort"
    return "burstable" if 1 < value < _BEST_EFFORT else ""


def shared_cpus(pod: PodQos | None, allowed: CpuSet, online: CpuSet) -> str | None:
    """Return the reason why the CPUs that a process of *pod* may use are not exclusive; ``None`` if nothing indicates that.

    The kubelet gives exclusive CPUs to Guaranteed pods alone, and never every *online* CPU of the node: its static
    policy does not start without a reservation (``policy_static.go``, ``NewStaticPolicy``). A DRA driver gives them to a
    container of any pod.
    """
    if pod is None or pod.has_claimed(allowed):
        return None
    if pod.qos in {"burstable", "besteffort"}:
        name = {"burstable": "Burstable", "besteffort": "BestEffort"}[pod.qos]
        return f"the pod is {name} ({pod.evidence}), so it shares its CPUs with other pods"
    if online <= allowed:
        guaranteed = "is Guaranteed, but " if pod.qos == "guaranteed" else ""
        return f"the pod {guaranteed}may use every CPU of the node ('{allowed}'), so none is its own"
    return None


def too_little_time(cpu_time: float | None, vcpus: int) -> str | None:
    """Return the reason why *vcpus* vCPUs cannot run all the time; *cpu_time* is the limit in CPUs, ``None`` without one."""
    if cpu_time is None or cpu_time >= vcpus:
        return None
    return f"cpu.max gives {vcpus} vCPUs the time of {cpu_time:g} CPUs, and stops them when it is used up"


def emulated(kvm: Kvm) -> str | None:
    """Return the reason why the guest would be emulated; ``None`` if KVM runs it."""
    if kvm.error is None:
        return None
    return f"no KVM ({kvm.error}): the guest is emulated in software (TCG), many times slower"


def kvm_unusable(kvm: Kvm) -> str | None:
    """Return the reason why KVM cannot create a virtual machine although it answers; ``None`` if it can."""
    return None if kvm.trial is None else f"/dev/kvm answers, but makes no virtual machine: {kvm.trial}"


def runs_no_guest(kvm: Kvm) -> str | None:
    """Return the reason why a guest with accelerator ``tried`` is emulated; ``None`` if KVM has run the trial guest."""
    reason = kvm.trial or kvm.guest
    if reason is None:
        return None
    return f"KVM runs no guest here ({reason}): the guest is emulated in software (TCG), many times slower"


KVM_UNUSABLE_REMEDY = 'see `dmesg | grep -i kvm` on the node, or set cpu.accel = "tcg"'
"""The remedy for :func:`kvm_unusable`."""


DENIED = "Permission denied"
"""The reason, EACCES, if the owner and mode of a device node forbid opening it; a device filter's is EPERM."""
LET_IN = (
    'let every user open it, on the node, by a rule of udev with MODE="0666": in a user namespace (hostUsers: false) it is '
    "nobody's, and the device filter still decides"
)
"""The remedy for :data:`DENIED`."""


_NOT_SERVED = (
    "load kvm_intel or kvm_amd on the node, whose kernel has no driver for the device (neither loads without hardware virtualization, "
    "which its firmware may have off)"
)
_KVM_REMEDIES = {DENIED: LET_IN, "No such device": _NOT_SERVED, "No such device or address": _NOT_SERVED}


def kvm_remedy(kvm: Kvm) -> str:
    """Return the remedy if ``/dev/kvm`` exists and cannot be opened; empty if it is only to provide the device."""
    return _KVM_REMEDIES.get((kvm.error or "").rpartition(": ")[2], "")


def root_for_kvm(kvm: Kvm) -> str | None:
    """Return the reason why QEMU has to run as root to open ``/dev/kvm``; ``None`` if not. Before 8.1 it accepts no descriptor."""
    if kvm.admits_everyone or kvm.admits_group:
        return None
    return f"QEMU runs as root, because /dev/kvm (mode {kvm.mode & 0o777:o}) lets no group in"


def too_old(version: str) -> str | None:
    """Return the reason why QEMU *version* (``7.2.22``, as in QMP's greeting and ``--version``) cannot be used; ``None`` if it can."""
    if parse_version(version) >= QEMU_OLDEST:
        return None
    return f"QEMU {version} is older than {format_version(QEMU_OLDEST)}"


ADDRESSES, ADDRESSES_THREAD = 512 << 20, 80 << 20
"""Bytes of QEMU's address space without the guest's RAM, and of each thread (a heap of 64 MiB, a stack of 8 MiB). They count
against ``RLIMIT_MEMLOCK`` even if unused (``mm/mlock.c``, ``mlockall``; measured: 414 and at most 73 MiB)."""
WORKERS = 4
"""Worker threads of QEMU's main thread and of each iothread if memory is locked (``thread-pool-max``); else there are up to
64, whose stacks and heaps would count."""
VFIO_MEMLOCK_OVERHEAD = 64 << 20
"""Upper bound of the bytes that VFIO locks in addition to the guest's RAM: firmware, option ROMs, video memory."""

KEPT_MEMORY_STATE = (
    "with the static Memory Manager drain the node, stop the kubelet, and remove its old memory_manager_state"
)
"""The consequence of another number of huge pages: the kubelet refuses a state file with the former number
(``pkg/kubelet/cm/memorymanager/policy_static.go``, ``validateState``)."""

MEMLOCK = (
    "give it `LimitMEMLOCK=infinity` in the [Service] section of containerd.service, `docker run --ulimit memlock=-1`, "
    "or, without a user namespace, the capability SYS_RESOURCE, with which the limit is raised"
)
"""The remedy for :func:`too_little_lockable`."""


def locked_threads(spec: InstanceSpec, vcpus: int) -> int:
    """Return the largest number of threads of QEMU with locked memory, without those that every QEMU has."""
    iothreads = sum(disk.iothread for disk in spec.disk)
    return vcpus + iothreads + WORKERS * (1 + iothreads)


def bytes_to_lock(spec: InstanceSpec, vcpus: int, size: int, bars: int = 0) -> int:
    """Return the bytes that QEMU may have to lock with *size* bytes of RAM and *bars* bytes of device regions; 0 if none.

    VFIO counts the RAM again after ``mlockall(2)``, which also counts the device regions that QEMU maps.
    """
    memory, needed = spec.memory, 0
    if memory.lock:
        # hugetlb pages are never swapped, but they are counted too.
        needed += size + ADDRESSES + locked_threads(spec, vcpus) * ADDRESSES_THREAD
    if spec.device:
        needed += size + VFIO_MEMLOCK_OVERHEAD + (bars if memory.lock else 0)
    return needed


def too_little_lockable(limit: int | None, needed: int) -> str | None:
    """Return the reason why *needed* bytes cannot be locked under *limit* (``RLIMIT_MEMLOCK``, hard); ``None`` if they can."""
    if limit is None or limit >= needed:
        return None
    return f"{needed >> 20} MiB may have to be locked, and RLIMIT_MEMLOCK is {limit >> 10} KiB"
