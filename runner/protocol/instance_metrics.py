"""The metrics of an instance: one table for its own endpoint, its reports to the controller, and the controller's endpoint.

A report has only numbers, under names and label values of this table. Labels that count parts, such as vCPUs, are summed, so that a report
has 4 KiB at most, however large the machine is. The few labels that are texts of the instance's own bear ``reported_`` before their names
in the controller's metrics: it cannot check them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, get_args

from runner.base.values import frozen

PREFIX = "instance_runner_"

LONGEST_NAME = 253
"""Characters of the longest name in Kubernetes (``DNS1123SubdomainMaxLength``)."""
LONGEST_VERSION = 64
REPORTED = "reported_"
"""The prefix, in the controller's metrics, of the names of labels whose value the instance has chosen."""

Phase = Literal["starting", "running", "stopping"]

RenewalOutcome = Literal["renewed", "fell_back", "resumed"]
"""Another program has taken over; it could not, and the previous one continues; this one continues after a fault of its own."""

QemuUpdateOutcome = Literal["updated", "fell_back", "lost"]
"""Another QEMU has the guest; the previous one continues; neither continues, and the instance ends."""

PHASES: tuple[Phase, ...] = get_args(Phase)
RENEWAL_OUTCOMES: tuple[RenewalOutcome, ...] = get_args(RenewalOutcome)
QEMU_UPDATE_OUTCOMES: tuple[QemuUpdateOutcome, ...] = get_args(QemuUpdateOutcome)
RESTARTED_ROLES = ("anchor", "dnsmasq")
UNREADY = (
    "phase",
    "cpus_lost",
    "cpus_offline",
    "qemu_silent",
    "halted",
    "panicked",
    "resets",
    "silent",
    "no_address",
    "awaits_sign",
)
"""The reasons why a guest is not ready; causes come before their consequences."""


@frozen
class Label:
    """A label of a family: one of *values*, a text of the instance's own of at most *longest* characters, or the number of a part."""

    name: str
    values: tuple[str, ...] = ()
    longest: int = 0

    @property
    def text(self) -> bool:
        """Return whether the instance chooses its value."""
        return self.longest > 0

    @property
    def is_part(self) -> bool:
        """Return whether it numbers parts of the instance, which a report sums up."""
        return not self.values and not self.text

    def accepts(self, value: object) -> bool:
        """Tell whether *value* is valid for this label in a report."""
        if self.text:
            return isinstance(value, str) and len(value) <= self.longest and value.isascii() and value.isprintable()
        return value in self.values


@frozen
class Family:
    """A family of metrics."""

    name: str
    """Its name without :data:`PREFIX`; that of a counter ends in ``_total``."""
    help: str
    labels: tuple[Label, ...] = ()

    @property
    def is_counter(self) -> bool:
        """Return whether it is a counter; others are gauges."""
        return self.name.endswith("_total")

    @property
    def reported_labels(self) -> tuple[Label, ...]:
        """Return the labels that remain in a report."""
        return tuple(each for each in self.labels if not each.is_part)


_TOO_LARGE = 1e300
"""The exclusive limit of numbers in a report: a whole number too large for a ``float`` can be compared with it, but not converted."""

Samples = Iterable[tuple[Sequence[object], float]]
"""(the values of a family's labels, in their order; the sample's value)."""
Report = Mapping[str, Mapping[tuple[str, ...], float]]
"""Family → values of the report's labels → number."""

ReportedValue = float | Mapping[str, float] | Mapping[str, str] | None
"""A family of a report for people and programs: its number, its numbers by label value, or the values of its labels by name."""

_VCPU = (Label("vcpu"), Label("cpu"))
_NETWORK = (Label("network"),)
_DISK = (Label("disk"),)

_TABLE = (
    Family(
        "info",
        "The instance's names and placement.",
        (
            *(Label(each, longest=LONGEST_NAME) for each in ("name", "pod_name", "pod_namespace", "node_name")),
            Label("placement", ("controller", "delegated", "affinity")),
        ),
    ),
    Family(
        "build_info",
        "The runner's version, and the digest of its program, where it is known.",
        (Label("version", longest=LONGEST_VERSION), Label("digest", longest=len("sha256:") + 64)),
    ),
    Family("qemu_info", "QEMU's version.", (Label("version", longest=LONGEST_VERSION),)),
    Family("generation", "How often the runner was renewed under its guest."),
    Family("qemu_generation", "How often QEMU was updated under its guest."),
    Family("emulated", "1 while the guest is emulated in software."),
    Family("guest_state", "1 for the state that the guest is in.", (Label("state", PHASES),)),
    Family("guest_uptime_seconds", "How long the guest has run."),
    Family("guest_ready", "1 while the guest is ready, but for threads that are not in their places."),
    Family("guest_unready", "1 for each reason why the guest is not ready.", (Label("reason", UNREADY),)),
    Family("console_bytes_total", "Bytes that the guest has written to its console."),
    Family("guest_resets_total", "Resets of the guest."),
    Family(
        "child_restarts_total",
        "Children that ended and were started again.",
        (Label("role", RESTARTED_ROLES),),
    ),
    Family("orphans_reaped_total", "Orphans of other processes that were reaped."),
    Family("swept_total", "Threads of others moved off the vCPUs' CPUs."),
    Family(
        "renewals_total",
        "Renewals of the runner under the guest that runs.",
        (Label("outcome", RENEWAL_OUTCOMES),),
    ),
    Family(
        "qemu_updates_total",
        "Updates of QEMU under the guest that runs.",
        (Label("outcome", QEMU_UPDATE_OUTCOMES),),
    ),
    Family("shortages_total", "Calls that were made again as the kernel was short of something."),
    Family("release_faults_total", "What could not be released."),
    Family("network_receive_bytes_total", "Bytes the guest has received.", _NETWORK),
    Family("network_receive_packets_total", "Packets of these.", _NETWORK),
    Family("network_receive_dropped_total", "Packets to it, lost.", _NETWORK),
    Family("network_transmit_bytes_total", "Bytes the guest has sent.", _NETWORK),
    Family("network_transmit_packets_total", "Packets of these.", _NETWORK),
    Family("network_transmit_dropped_total", "Packets of it, lost.", _NETWORK),
    Family("disk_read_bytes_total", "Bytes the guest has read.", _DISK),
    Family("disk_reads_total", "Requests by which it has read.", _DISK),
    Family("disk_read_seconds_total", "Time that these took, all together.", _DISK),
    Family("disk_written_bytes_total", "Bytes the guest has written.", _DISK),
    Family("disk_writes_total", "Requests by which it has written.", _DISK),
    Family("disk_write_seconds_total", "Time that these took, all together.", _DISK),
    Family("disk_flushes_total", "Requests to have on the disk what was written.", _DISK),
    Family("disk_flush_seconds_total", "Time that these took, all together.", _DISK),
    Family("guarantee_enforced", "1 while the kernel keeps all others off the vCPUs' CPUs."),
    Family("placement_holds", "1 while every thread is in its place."),
    Family("placement_strays", "Threads that are not in their places."),
    Family("cpus_offline", "CPUs of vCPUs that the machine has taken offline."),
    Family("vcpus", "vCPUs that the guest has."),
    Family("vcpu_cpu_seconds_total", "Time the vCPU has run.", _VCPU),
    Family("vcpu_run_delay_seconds_total", "Time it waited for its CPU; the guest sees it stolen.", _VCPU),
    Family("vcpu_involuntary_switches_total", "Times something else took its CPU.", _VCPU),
    Family("vcpu_steal_seconds_total", "Time a hypervisor below this host took from its CPU.", _VCPU),
    Family(
        "vcpu_foreign_seconds_total",
        "Time other tasks, also the kernel's, ran on its CPU since it was pinned. Absent where the vCPUs have no CPUs of their own, "
        "and where the kernel has no /proc/schedstat (CONFIG_SCHEDSTATS).",
        _VCPU,
    ),
    Family("memory_charged_bytes", "What the pod's cgroup is charged for.", (Label("kind", ("memory", "hugetlb")),)),
)

FAMILIES: Mapping[str, Family] = {each.name: each for each in _TABLE}


def reported(samples: Iterable[tuple[str, Samples]]) -> dict[str, list[list[str | float]]]:
    """Return the report for *samples* as JSON: for each family a list of label values and the number.

    Parts are summed up, and numbers have three decimals, so that a report has less than 4 KiB; texts are shortened to the length that
    :meth:`Label.accepts` allows.
    """
    found: dict[str, list[list[str | float]]] = {}
    for name, values in samples:
        family, sums = FAMILIES[name], dict[tuple[str, ...], float]()
        for labels, value in values:
            key = tuple(
                _short(str(text), label.longest) if label.text else str(text)
                for label, text in zip(family.labels, labels, strict=True)
                if not label.is_part
            )
            sums[key] = sums.get(key, 0) + value
        if sums:
            found[name] = [[*key, round(float(value), 3)] for key, value in sums.items()]
    return found


def _short(text: str, longest: int) -> str:
    kept = text.encode("ascii", "replace").decode()[:longest]
    return "".join(each if each.isprintable() else "?" for each in kept)


def parse_report(document: object) -> Report:
    """Parse the result of :func:`reported`. Raises ``ValueError`` for anything else.

    Families that this program does not know are left out: the instance's may be newer.
    """
    if not isinstance(document, dict):
        raise ValueError("it must be an object")  # noqa: TRY004 - of a message
    return {name: dict(_parsed(FAMILIES[name], values)) for name, values in document.items() if name in FAMILIES}


def _parsed(family: Family, values: object) -> Iterator[tuple[tuple[str, ...], float]]:
    labels = family.reported_labels
    if not isinstance(values, list) or (len(values) > 1 and any(label.text for label in labels)):
        raise ValueError(f"{family.name!r} must be a list, and of one sample if it has texts")
    for sample in values:
        if not isinstance(sample, list) or len(sample) != len(labels) + 1:
            raise ValueError(f"{family.name!r}: a sample must be a list of {len(labels)} labels and a number")
        *texts, value = sample
        for label, text in zip(labels, texts, strict=True):
            if not label.accepts(text):
                raise ValueError(f"{family.name!r}: {label.name!r} cannot be {str(text)[:40]!r}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _TOO_LARGE:
            raise ValueError(f"{family.name!r}: {str(value)[:40]!r} is not a number")
        yield tuple(texts), float(value)


def as_json(report: Report) -> dict[str, ReportedValue]:
    """Return *report* for people and programs, without label values whose number is zero."""
    values: dict[str, ReportedValue] = {}
    for name, samples in report.items():
        labels = FAMILIES[name].reported_labels
        match labels:
            case ():
                values[name] = samples.get(())
            case [label] if not label.text:
                values[name] = {texts[0]: value for texts, value in samples.items() if value}
            case _:
                values[name] = {
                    label.name: text for texts in samples for label, text in zip(labels, texts, strict=True)
                }
    return values
