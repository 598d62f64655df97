"""Where the threads of an instance may be: one set of rules for the start, for ``/readyz`` and for ``inspect``.

A thread is what the kernel shows of it (:class:`~runner.facts.threads.ThreadStatus`) with its role in the instance. The
:class:`ThreadRules` of an instance say for each role in which cgroup and on which CPUs its threads may be; what breaks
them is a :data:`Violation`. The :class:`Receipt` is what the kernel showed when nothing did.
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, assert_never, get_args

import attrs

from runner.cpuset import CpuSet
from runner.errors import UsageError
from runner.facts.threads import ThreadStatus
from runner.placement.backends import Backend, Placement

RECEIPT_VERSION = 1


class Role(enum.StrEnum):
    """What a thread does for an instance."""

    RUNNER = "runner"
    """This program, PID 1 of the container, and programs that it runs for a moment."""
    ANCHOR = "anchor"
    """``sleep infinity``, which keeps the pod's own cgroup populated."""
    DNSMASQ = "dnsmasq"
    VIRTIOFSD = "virtiofsd"
    PASST = "passt"
    EMULATOR = "emulator"
    """A thread of QEMU's that is neither a vCPU nor an iothread."""
    IOTHREAD = "iothread"
    """A thread of QEMU's that serves a disk."""
    VCPU = "vcpu"
    SANDBOX = "sandbox"
    """A pod's ``pause``, which sleeps until the pod ends."""
    OTHER = "other"
    """Anything else."""

    @classmethod
    def of_child(cls, name: str) -> Role:
        """Return the role of the threads of the runner's child *name*; QEMU's vCPUs and iothreads are not told apart."""
        if name == "qemu":
            return cls.EMULATOR
        return cls(name) if name in {cls.ANCHOR, cls.DNSMASQ, cls.VIRTIOFSD, cls.PASST} else cls.RUNNER


@attrs.frozen
class ObservedThread:
    """One thread and its role."""

    role: Role
    vcpu: int | None
    """The vCPU's index, where it is known."""
    thread: ThreadStatus
    kernel: bool = False
    """It is a kernel thread."""

    @property
    def title(self) -> str:
        """The role, with the vCPU's index."""
        return str(self.role) if self.vcpu is None else f"{self.role} {self.vcpu}"

    def __str__(self) -> str:
        return f"{self.title} (thread {self.thread.tid}, {self.thread.name!r})"

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values; CPU sets in the kernel's list format."""
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


@attrs.frozen
class MissingVcpu:
    """A vCPU without a thread."""

    vcpu: int


@attrs.frozen
class SharedCpu:
    """A CPU to which several vCPU threads are pinned; reported where it is not known which of them belongs there."""

    cpu: int
    threads: int
    """How many."""


@attrs.frozen
class MisplacedVcpu:
    """A vCPU thread whose mask is not its one CPU."""

    thread: ObservedThread
    wanted: CpuSet
    """The CPU it is pinned to; where the pin is not known, the CPUs of which it must have one."""
    pinned: bool
    """*wanted* is the pin."""


@attrs.frozen
class Intruder:
    """A thread that may run on the vCPUs' CPUs and is no vCPU's."""

    thread: ObservedThread
    cpus: CpuSet
    """The vCPUs' CPUs that it may run on."""


@attrs.frozen
class WrongCgroup:
    """A thread outside the cgroup of its role."""

    thread: ObservedThread
    wanted: str


Violation = MissingVcpu | SharedCpu | MisplacedVcpu | Intruder | WrongCgroup
"""What breaks the rules of an instance's threads."""


def sentences(violations: Iterable[Violation]) -> Iterator[str]:
    """Yield a sentence for each of *violations*; the intruding threads of one process share one, which names the first."""
    intruders: dict[int, list[Intruder]] = {}
    for violation in violations:
        match violation:
            case MissingVcpu(vcpu):
                yield f"vCPU {vcpu} has no thread"
            case SharedCpu(cpu, threads):
                yield f"{threads} vCPU threads share CPU {cpu}"
            case MisplacedVcpu(thread, wanted, pinned):
                one_of = "" if pinned else "one CPU of "
                yield f"{thread} may run on '{thread.thread.cpus}' instead of {one_of}'{wanted}'"
            case Intruder(thread):
                intruders.setdefault(thread.thread.pid, []).append(violation)
            case WrongCgroup(thread, wanted):
                yield f"{thread} is in the cgroup '{thread.thread.cgroup}' instead of '{wanted}'"
            case _ as never:
                assert_never(never)
    yield from map(_intrusion, intruders.values())


def _intrusion(of_process: Sequence[Intruder]) -> str:
    first = of_process[0].thread
    cpus = CpuSet(cpu for each in of_process for cpu in each.cpus)
    more = "" if len(of_process) == 1 else f" and {len(of_process) - 1} more of process {first.thread.pid}"
    where = f" in the cgroup '{first.thread.cgroup}'" if first.thread.cgroup else ""
    return f"{first}{more}{where} may run on '{cpus}', which belong to vCPUs"


# -- rules -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class CgroupPaths:
    """The cgroups of an instance, as ``/proc/PID/cgroup`` shows them; one that is empty is not known, and not judged."""

    pod: str
    float_cgroup: str
    instance: str
    ends: bool = False
    """Only how the paths end counts: the reader may be in another cgroup namespace than the instance."""

    def of(self, role: Role) -> str:
        """Return the cgroup in which a thread of *role* belongs, empty where it may be in any."""
        match role:
            case Role.ANCHOR:
                return self.pod
            case Role.VCPU:
                return self.instance
            case Role.SANDBOX | Role.OTHER:
                return ""
            case Role.RUNNER | Role.DNSMASQ | Role.VIRTIOFSD | Role.PASST | Role.EMULATOR | Role.IOTHREAD:
                return self.float_cgroup
            case _ as never:
                assert_never(never)

    def misses(self, each: ObservedThread) -> bool:
        """Tell whether *each* is outside the cgroup in which it belongs."""
        wanted, found = self.of(each.role), each.thread.cgroup
        return bool(wanted) and (not found.endswith(wanted) if self.ends else found != wanted)


@attrs.frozen
class ThreadRules:
    """On which CPUs and in which cgroups the threads of one instance may be."""

    cpus: CpuSet
    """The vCPUs' own CPUs."""
    pins: tuple[int | None, ...]
    """The CPU of each vCPU by its index; ``None``: any one of *cpus* that no other vCPU has."""
    shared: bool
    """No CPU is left for anything else, so everything else runs on the vCPUs' CPUs too."""
    cgroups: CgroupPaths | None
    """``None`` where the placement has no cgroups."""

    def violations(self, threads: Sequence[ObservedThread]) -> tuple[Violation, ...]:
        """Return what breaks the rules, *threads* being all of the instance, and of others what may be an intruder."""
        return (*self._of_vcpus(threads), *(found for each in threads for found in self._of_thread(each)))

    def _of_vcpus(self, threads: Sequence[ObservedThread]) -> Iterator[Violation]:
        vcpus = [each for each in threads if each.role is Role.VCPU]
        found = {each.vcpu for each in vcpus}
        yield from (MissingVcpu(index) for index in range(len(self.pins)) if index not in found)
        # Where the pins are known they differ, so that one of two threads on one CPU is not on its own.
        alone = Counter(
            min(each.thread.cpus) for each in vcpus if self._pin(each) is None and len(each.thread.cpus) == 1
        )
        yield from (SharedCpu(cpu, number) for cpu, number in alone.items() if number > 1)

    def _pin(self, each: ObservedThread) -> int | None:
        # An index beyond the pins is not one of the instance's: on the node it is only the name of a thread.
        return self.pins[each.vcpu] if each.vcpu is not None and each.vcpu < len(self.pins) else None

    def _of_thread(self, each: ObservedThread) -> Iterator[Violation]:
        if each.role is Role.VCPU:
            yield from self._of_vcpu(each)
        elif not self.shared and not self.exempts(each) and (taken := each.thread.cpus & self.cpus):
            yield Intruder(each, taken)
        if self.cgroups is not None and self.cgroups.misses(each):
            yield WrongCgroup(each, self.cgroups.of(each.role))

    def _of_vcpu(self, each: ObservedThread) -> Iterator[Violation]:
        if (pin := self._pin(each)) is not None:
            if each.thread.cpus != CpuSet([pin]):
                yield MisplacedVcpu(each, CpuSet([pin]), pinned=True)
        elif len(each.thread.cpus) != 1 or not each.thread.cpus <= self.cpus:
            yield MisplacedVcpu(each, self.cpus, pinned=False)

    def exempts(self, each: ObservedThread) -> bool:
        """Tell whether *each* may have the vCPUs' CPUs in its mask, because it does not compete for them.

        These are pods' ``pause`` processes and, where the placement has cgroups, the anchors: they stay in a cgroup that
        may have no other CPUs, and sleep until they are killed. And the kernel's own threads: those bound to one CPU
        serve that CPU, and no cpuset keeps the others off it (``Documentation/admin-guide/kernel-parameters.rst``:
        ``isolcpus=``, ``nohz_full=``). A kernel thread in a cgroup works for that cgroup's processes, such as
        ``vhost-`` before Linux 6.4, and is not exempt.
        """
        if each.kernel:
            return each.thread.cgroup in {"", "/"}
        return each.role is Role.SANDBOX or (each.role is Role.ANCHOR and self.cgroups is not None)

    def is_born_of_vcpu(self, each: ObservedThread) -> bool:
        """Tell whether a vCPU thread started *each*: a thread is born in the cgroup and with the mask of its parent.

        Since Linux 6.14 the first vCPU that runs starts KVM's ``kvm-nx-lpage-recovery``.
        """
        if each.role is not Role.EMULATOR:
            return False
        if self.cgroups is not None:
            return each.thread.cgroup == self.cgroups.instance
        return not self.shared and len(each.thread.cpus) == 1 and each.thread.cpus <= self.cpus


def thread_rules(placement: Placement, cgroups: CgroupPaths | None) -> ThreadRules:
    """Return the rules for the threads of an instance with *placement*, whose cgroups have the paths *cgroups*."""
    return ThreadRules(placement.cpus, placement.pins, placement.shared, cgroups)


# -- the receipt -----------------------------------------------------------------------------------------------------


@attrs.frozen
class Receipt:
    """What the kernel showed of every thread of an instance: ``receipt.json``."""

    backend: Backend
    rules: ThreadRules
    threads: tuple[ObservedThread, ...]

    def violations(self) -> tuple[Violation, ...]:
        """Return what breaks the rules."""
        return self.rules.violations(self.threads)

    def to_json(self) -> dict[str, object]:
        """Return it as written to ``receipt.json``: CPU sets in the kernel's list format."""
        runner = next(each.thread for each in self.threads if each.role is Role.RUNNER)
        cgroups = self.rules.cgroups
        return {
            "version": RECEIPT_VERSION,
            "backend": self.backend,
            "instance_cpus": str(self.rules.cpus),
            "float_cpus": str(runner.cpus),
            "shared": self.rules.shared,
            "cgroups": None
            if cgroups is None
            else {"pod": cgroups.pod, "floating": cgroups.float_cgroup, "instance": cgroups.instance},
            "threads": [each.to_json() for each in self.threads],
        }


def parse_receipt(text: str, source: str) -> Receipt:
    """Return the receipt in the JSON *text*; *source* names it in errors.

    The pins are the CPUs of the vCPU threads: a receipt is written when each has its own. Raises :class:`UsageError` for
    anything else than a receipt.
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
        return Receipt(document["backend"], rules, threads)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"cannot use {source}: it is no receipt of instance-runner's") from error


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
