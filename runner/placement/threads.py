"""The rules for the CPUs and cgroups of an instance's threads, and the record of where they are (the receipt).

The start of an instance, ``/readyz`` and ``inspect`` use the same rules. An :class:`ObservedThread` is a thread as the
kernel shows it (:class:`~runner.facts.threads.ThreadStatus`) with its role in the instance. The :class:`ThreadRules` define
for each role the cgroup and the CPUs of its threads; a :data:`Violation` is a way to break them. The :class:`Receipt`
lists all threads as the kernel showed them when the guest was started, without a violation.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, assert_never, get_args

from runner.base.cpuset import CpuSet
from runner.base.errors import UsageError
from runner.base.values import frozen, short_text
from runner.facts.threads import ThreadStatus
from runner.placement.backends import Backend, GuaranteeKind
from runner.placement.children import IN_PODS_CGROUP, Role

if TYPE_CHECKING:
    from runner.placement.receipt_json import PlacedDocument, ThreadDocument

RECEIPT_VERSION: Final = 1

UNNAMED = "instance"
"""The name of an instance whose spec has none (``instance.name``)."""


@frozen
class ObservedThread:
    """One thread and its role."""

    role: Role
    vcpu: int | None
    """The index of a vCPU thread, if it is known."""
    thread: ThreadStatus
    kernel: bool = False
    """Whether it is a kernel thread."""

    @property
    def title(self) -> str:
        """The role, with the vCPU's index."""
        return str(self.role) if self.vcpu is None else f"{self.role} {self.vcpu}"

    def __str__(self) -> str:
        return f"{self.title} (thread {self.thread.tid}, {self.thread.name!r})"

    def to_json(self) -> ThreadDocument:
        """Return the thread as plain values, CPU sets in the kernel's list format."""
        return {
            "role": self.role.value,
            "vcpu": self.vcpu,
            "name": self.thread.name,
            "pid": self.thread.pid,
            "tid": self.thread.tid,
            "cgroup": self.thread.cgroup,
            "allowed_cpus": str(self.thread.cpus),
            "allowed_mems": str(self.thread.mems),
            "running_on": self.thread.running_on,
        }


# -- violations ------------------------------------------------------------------------------------------------------


@frozen
class MissingVcpu:
    """A vCPU without a thread."""

    vcpu: int


@frozen
class SharedCpu:
    """A CPU to which several vCPU threads are pinned; reported only if their pins are not known."""

    cpu: int
    threads: int
    """The number of these threads."""


@frozen
class MisplacedVcpu:
    """A vCPU thread whose CPU mask is not its pin."""

    thread: ObservedThread
    expected: CpuSet
    """The CPU that it should be pinned to; if the pin is not known, the CPUs of which it should have exactly one."""
    pinned: bool
    """Whether the pin is known."""


@frozen
class Intruder:
    """A thread that is no vCPU and may run on CPUs of vCPUs."""

    thread: ObservedThread
    cpus: CpuSet
    """The CPUs of vCPUs that it may run on."""


@frozen
class WrongCgroup:
    """A thread outside the cgroup of its role."""

    thread: ObservedThread
    expected: str


@frozen
class NarrowMask:
    """A thread in float that may run on only some of float's CPUs."""

    thread: ObservedThread
    float_cpus: CpuSet


Violation = MissingVcpu | SharedCpu | MisplacedVcpu | Intruder | WrongCgroup | NarrowMask
"""A way in which the threads of an instance break its rules."""


def sentences(violations: Iterable[Violation]) -> Iterator[str]:
    """Yield a sentence for each of *violations*; those of one kind and process share one, which names the first.

    Only intruders and threads with narrow masks share sentences.
    """
    intruders: dict[int, list[Intruder]] = {}
    narrow: dict[int, list[NarrowMask]] = {}
    for violation in violations:
        match violation:
            case MissingVcpu(vcpu):
                yield f"vCPU {vcpu} has no thread"
            case SharedCpu(cpu, threads):
                yield f"{threads} vCPU threads share CPU {cpu}"
            case MisplacedVcpu(thread, expected, pinned):
                one_of = "" if pinned else "one CPU of "
                yield f"{thread} may run on '{thread.thread.cpus}' instead of {one_of}'{expected}'"
            case Intruder(thread):
                intruders.setdefault(thread.thread.pid, []).append(violation)
            case WrongCgroup(thread, expected):
                yield f"{thread} is in the cgroup '{thread.thread.cgroup}' instead of '{expected}'"
            case NarrowMask(thread):
                narrow.setdefault(thread.thread.pid, []).append(violation)
            case _ as never:
                assert_never(never)
    yield from map(_intrusion, intruders.values())
    yield from map(_narrowness, narrow.values())


def _intrusion(of_process: Sequence[Intruder]) -> str:
    first = of_process[0].thread
    cpus = CpuSet.union(each.cpus for each in of_process)
    more = _more(of_process)
    where = f" in the cgroup '{first.thread.cgroup}'" if first.thread.cgroup else ""
    return f"{first}{more}{where} may run on '{cpus}', which belong to vCPUs"


def _narrowness(of_process: Sequence[NarrowMask]) -> str:
    first, float_cpus = of_process[0].thread, of_process[0].float_cpus
    return f"{first}{_more(of_process)} may run on '{first.thread.cpus}' alone of float's CPUs '{float_cpus}': it has a CPU mask"


def _more(of_process: Sequence[Intruder] | Sequence[NarrowMask]) -> str:
    number, pid = len(of_process) - 1, of_process[0].thread.thread.pid
    return f" and {number} more of process {pid}" if number else ""


# -- rules -----------------------------------------------------------------------------------------------------------


@frozen
class CgroupPaths:
    """The paths of an instance's cgroups, as ``/proc/PID/cgroup`` shows them; an empty path is unknown and not checked."""

    pod: str
    float_cgroup: str
    instance: str
    ends: bool = False
    """Whether only the ends of paths are compared, because the reader may be in another cgroup namespace."""

    def of(self, role: Role) -> str:
        """Return the cgroup for threads of *role*, empty if they may be in any."""
        if role is Role.VCPU:
            return self.instance
        if role in {Role.SANDBOX, Role.OTHER}:
            return ""
        return self.pod if role in IN_PODS_CGROUP else self.float_cgroup

    def misses(self, observed: ObservedThread) -> bool:
        """Tell whether *observed* is outside the cgroup of its role."""
        expected, actual = self.of(observed.role), observed.thread.cgroup
        return bool(expected) and (not actual.endswith(expected) if self.ends else actual != expected)


@frozen
class ThreadRules:
    """The CPUs and cgroups that the threads of one instance may have."""

    cpus: CpuSet
    """The CPUs of the vCPUs."""
    pins: tuple[int | None, ...]
    """The CPU of each vCPU by its index; ``None`` stands for any one of *cpus* that no other vCPU has."""
    shared: bool
    """Whether all other threads run on the CPUs of the vCPUs too, because there are no others."""
    cgroups: CgroupPaths | None
    """``None`` if the placement has no cgroups."""

    def violations(self, threads: Sequence[ObservedThread]) -> tuple[Violation, ...]:
        """Return the violations by *threads*: all threads of the instance, and other threads that may be intruders."""
        return (
            *self._of_vcpus(threads),
            *(found for observed in threads for found in self._of_thread(observed)),
            *self._narrow(threads),
        )

    def _narrow(self, threads: Sequence[ObservedThread]) -> Iterator[NarrowMask]:
        """Yield the threads with fewer CPUs than float has, judged by the CPUs of all the instance's threads there."""
        if self.cgroups is None or not self.cgroups.float_cgroup:
            return
        in_float = [
            each
            for each in threads
            if self.cgroups.of(each.role) == self.cgroups.float_cgroup and not self.cgroups.misses(each)
        ]
        most = CpuSet.union(each.thread.cpus for each in in_float)
        if not self.shared:
            most -= self.cpus  # a thread that may run there is an intruder
        yield from (NarrowMask(each, most) for each in in_float if not most <= each.thread.cpus)

    def _of_vcpus(self, threads: Sequence[ObservedThread]) -> Iterator[Violation]:
        vcpus = [observed for observed in threads if observed.role is Role.VCPU]
        found = {observed.vcpu for observed in vcpus}
        yield from (MissingVcpu(index) for index in range(len(self.pins)) if index not in found)
        # Known pins differ, so one of two threads on a CPU is a MisplacedVcpu anyway.
        unknown_pins = Counter(
            min(observed.thread.cpus)
            for observed in vcpus
            if self._pin(observed) is None and len(observed.thread.cpus) == 1
        )
        yield from (SharedCpu(cpu, number) for cpu, number in unknown_pins.items() if number > 1)

    def _pin(self, observed: ObservedThread) -> int | None:
        # On the Kubernetes node the index comes from the thread's name, so it may be higher than any of the pins.
        return self.pins[observed.vcpu] if observed.vcpu is not None and observed.vcpu < len(self.pins) else None

    def _of_thread(self, observed: ObservedThread) -> Iterator[Violation]:
        if observed.role is Role.VCPU:
            yield from self._of_vcpu(observed)
        elif not self.shared and not self.exempts(observed) and (taken := observed.thread.cpus & self.cpus):
            yield Intruder(observed, taken)
        if self.cgroups is not None and self.cgroups.misses(observed):
            yield WrongCgroup(observed, self.cgroups.of(observed.role))

    def _of_vcpu(self, observed: ObservedThread) -> Iterator[Violation]:
        if (pin := self._pin(observed)) is not None:
            if observed.thread.cpus != CpuSet([pin]):
                yield MisplacedVcpu(observed, CpuSet([pin]), pinned=True)
        elif len(observed.thread.cpus) != 1 or not observed.thread.cpus <= self.cpus:
            yield MisplacedVcpu(observed, self.cpus, pinned=False)

    def exempts(self, observed: ObservedThread) -> bool:
        """Tell whether *observed* may have CPUs of vCPUs in its mask, because it does not compete for them.

        Exempt are a pod's ``pause`` process and, if the placement has cgroups, the anchors: they stay in a cgroup that
        may have no other CPUs, and sleep until they are killed. Exempt are also kernel threads in the root cgroup: those
        bound to one CPU serve that CPU, and no cpuset keeps the others off it
        (``Documentation/admin-guide/kernel-parameters.rst``: ``isolcpus=``, ``nohz_full=``). A kernel thread in another
        cgroup works for that cgroup's processes, such as ``vhost-`` before Linux 6.4, and is not exempt.
        """
        if observed.kernel:
            return observed.thread.cgroup in {"", "/"}
        return observed.role is Role.SANDBOX or (observed.role is Role.ANCHOR and self.cgroups is not None)

    def is_child_of_vcpu(self, observed: ObservedThread) -> bool:
        """Tell whether a vCPU thread started *observed*: a thread inherits the cgroup and the mask of its parent.

        Since Linux 6.14 the first vCPU that runs starts KVM's ``kvm-nx-lpage-recovery``.
        """
        if observed.role is not Role.EMULATOR:
            return False
        if self.cgroups is not None:
            return observed.thread.cgroup == self.cgroups.instance
        return not self.shared and len(observed.thread.cpus) == 1 and observed.thread.cpus <= self.cpus


def guarantee_of(backend: Backend, cpus: CpuSet, threads: Iterable[ObservedThread]) -> GuaranteeKind:
    """Return the mechanism that keeps all other tasks off the vCPUs' *cpus*, as the *threads* of the instance show it.

    The pod's own cgroup names these CPUs and no others. If the kernel lets the anchors, which stay in it, run only on other CPUs, it has
    removed *cpus* from every cgroup but the instance's: by a partition (``cpuset.cpus.partition``).
    """
    anchors = [each.thread.cpus for each in threads if each.role is Role.ANCHOR]
    sealed = bool(anchors) and all(allowed.isdisjoint(cpus) for allowed in anchors)
    return "enforced" if sealed and backend == "controller" else "arranged"


# -- the receipt -----------------------------------------------------------------------------------------------------


@frozen
class Receipt:
    """Every thread of an instance as the kernel showed it when the guest was started: ``receipt.json``."""

    backend: Backend
    rules: ThreadRules
    threads: tuple[ObservedThread, ...]
    guarantee_reason: str = ""
    """The reason why the CPUs could not be sealed at the guest's start; empty if they were."""

    @property
    def guarantee(self) -> GuaranteeKind:
        """Return the mechanism that keeps all other tasks off the vCPUs' CPUs."""
        return guarantee_of(self.backend, self.rules.cpus, self.threads)

    def violations(self) -> tuple[Violation, ...]:
        """Return the violations of its own rules."""
        return self.rules.violations(self.threads)

    def to_json(self) -> PlacedDocument:
        """Return the content of ``receipt.json``, CPU sets in the kernel's list format."""
        runner = next(each.thread for each in self.threads if each.role is Role.RUNNER)
        cgroups = self.rules.cgroups
        return {
            "version": RECEIPT_VERSION,
            "backend": self.backend,
            "instance_cpus": str(self.rules.cpus),
            "float_cpus": str(runner.cpus),
            "shared": self.rules.shared,
            "guarantee": self.guarantee,
            "guarantee_reason": self.guarantee_reason if self.guarantee == "arranged" else "",
            "cgroups": None
            if cgroups is None
            else {"pod": cgroups.pod, "floating": cgroups.float_cgroup, "instance": cgroups.instance},
            "threads": [each.to_json() for each in self.threads],
        }


def parse_receipt(text: str, source: str) -> tuple[Receipt, ReceiptNames]:
    """Return the receipt in the JSON *text*, and the names in it; *source* is its name in errors.

    The pins are the CPUs of the vCPU threads, because a receipt is written only if each thread is pinned to its own.
    Raises :class:`UsageError` for any other text.
    """
    try:
        document = json.loads(text)
        if document["version"] != RECEIPT_VERSION:
            raise UsageError(f"cannot use {source}: its version is {document['version']!r}, not {RECEIPT_VERSION}")
        if document["backend"] not in get_args(Backend):
            raise UsageError(f"cannot use {source}: it has an unknown placement {document['backend']!r}")
        threads = tuple(_parse_thread(each) for each in document["threads"])
        pin_of = {each.vcpu: min(each.thread.cpus) for each in threads if each.role is Role.VCPU}
        rules = ThreadRules(
            cpus=CpuSet.parse(document["instance_cpus"]),
            pins=tuple(pin_of[index] for index in range(len(pin_of))),
            shared=document["shared"],
            cgroups=_parse_cgroups(document.get("cgroups")),
        )
        receipt = Receipt(document["backend"], rules, threads, document.get("guarantee_reason", ""))
        return receipt, _parse_names(document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"cannot use {source}: it is no receipt of instance-runner's") from error


@frozen
class ReceiptNames:
    """The names in a receipt."""

    name: str
    """The instance's name; see :func:`chosen_name`."""
    pod: str
    """Namespace and name of its pod, empty without one."""
    pod_uid: str


def chosen_name(given: str, pod: str, *, otherwise: str) -> str:
    """Return the name *given* in the spec; if that is the default, the name of the *pod*, ``NAMESPACE/NAME``, or else *otherwise*.

    The host name is not used: outside of a pod it is the machine's name, or a container's id.
    """
    return given if given not in {"", UNNAMED} else pod.rpartition("/")[2] or otherwise


def _parse_names(document: Mapping[str, Any]) -> ReceiptNames:
    pod = document.get("pod") or {}
    full = "/".join(filter(None, (pod.get("namespace"), pod.get("name")))) if pod.get("name") else ""
    return ReceiptNames(
        chosen_name(document.get("instance") or "", full, otherwise=UNNAMED), full, short_text(pod.get("uid", ""))
    )


def _parse_thread(document: Mapping[str, Any]) -> ObservedThread:
    status = ThreadStatus(
        pid=document["pid"],
        tid=document["tid"],
        name=document["name"],
        cgroup=document["cgroup"],
        cpus=CpuSet.parse(document["allowed_cpus"]),
        mems=CpuSet.parse(document["allowed_mems"]),
        running_on=document["running_on"],
    )
    return ObservedThread(Role(document["role"]), document["vcpu"], status)


def _parse_cgroups(document: Mapping[str, str | None] | None) -> CgroupPaths | None:
    if document is None:
        return None
    return CgroupPaths(document["pod"] or "", document["floating"] or "", document["instance"] or "")
