"""The versions of the kubelet that are modelled, its known bugs, and the errors of its managers.

The managers are modelled bug for bug. Each bug that changes a decision has a name in :class:`Quirk` and can be switched
off, to compare decisions with and without it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from runner.base.errors import RefusedError

OLDEST_MINOR = 33
NEWEST_MINOR = 36
"""The oldest and the newest minor version of the kubelet (1.33 to 1.36) whose answers were compared."""
FROM_SOURCE_MINOR = 37
"""The next minor version, modelled from the changes that were merged for it; no kubelet of it was asked."""


class Quirk(enum.Enum):
    """A known bug of the kubelet that changes which CPUs a container gets; the value is its issue on GitHub, if there is one."""

    COMBINATIONS_OVERWRITTEN = "kubernetes#141238"
    """``distribute-cpus-across-numa`` keeps a reference to the Go slice with the best combination of NUMA nodes, and the
    search overwrites this slice later, so another combination may be used."""
    LIVELOCK = "kubernetes#140730"
    """``distribute-cpus-across-numa`` with ``full-pcpus-only`` counts the remaining CPUs one by one, but takes whole
    cores: if only half cores remain it never ends. The model raises :class:`KubeletHangsError` instead."""
    WHOLE_UNITS_UNCHECKED = "kubernetes#140495"
    """A socket counts as completely free if it has as many free CPUs as an *average* one has CPUs; then all its CPUs are
    taken, including reserved and assigned ones. This happens on hosts with unequal sockets."""
    WHOLE_CORES_UNCHECKED = "kubernetes#140498"
    """The same for cores, on hosts with unequal cores; the value is its fix, in 1.37."""
    HINT_SHRUNK = "kubernetes#139430"
    """``distribute-cpus-across-numa`` takes CPUs of as few NUMA nodes as possible, also of fewer than the Topology Manager has
    chosen; fixed in 1.37."""
    EMPTY_MEMORY_HINTS = "an empty hint map reads as no preference"
    """A memory request that fits nowhere results in no hints, which the Topology Manager reads as "no preference": the pod
    is rejected only after CPUs were assigned to it, and they stay assigned until the next admission."""
    DEVICE_HINTS_EVERYWHERE = "kubernetes#135541"
    """Device hints name all NUMA nodes of the host, also those without devices of the resource; fixed in 1.36."""


_FIXED_IN: Mapping[Quirk, int] = {
    Quirk.DEVICE_HINTS_EVERYWHERE: 36,
    Quirk.LIVELOCK: 37,
    Quirk.WHOLE_CORES_UNCHECKED: 37,
    Quirk.HINT_SHRUNK: 37,
}
"""Bug → the minor version since which it is fixed."""


def quirks_of(minor: int) -> frozenset[Quirk]:
    """Return the bugs of kubelet 1.*minor*; :class:`RefusedError` for a version that is not modelled."""
    if not OLDEST_MINOR <= minor <= FROM_SOURCE_MINOR:
        raise RefusedError(
            f"cannot predict kubelet 1.{minor}: decisions are known from 1.{OLDEST_MINOR} to 1.{FROM_SOURCE_MINOR}",
            remedy="give the version of the kubelet on that node",
        )
    return frozenset(quirk for quirk in Quirk if minor < _FIXED_IN.get(quirk, minor + 1))


class AllocationError(Exception):
    """The kubelet's error when a container's request cannot be satisfied; the text is the kubelet's own."""

    reason = "UnexpectedAdmissionError"
    """``status.reason`` of the rejected pod."""


class EmptyPodSharedPoolError(AllocationError):
    """Pod-level resources of which nothing is left for the containers without exclusive ones."""

    reason = "EmptyPodSharedPoolError"


class KubeletConfigError(RefusedError):
    """The kubelet would not start with this configuration; the text is the kubelet's own."""


class KubeletHangsError(Exception):
    """The kubelet would never finish this admission, and admit no other pod either."""


class KubeletCrashesError(Exception):
    """The kubelet would panic."""


def parse_bool(option: str, value: str) -> bool:
    """Parse the value of a policy option as Go's ``strconv.ParseBool`` does; :class:`KubeletConfigError` for others."""
    if value in {"1", "t", "T", "TRUE", "true", "True"}:
        return True
    if value in {"0", "f", "F", "FALSE", "false", "False"}:
        return False
    raise KubeletConfigError(f'bad value for option "{option}": strconv.ParseBool: parsing "{value}": invalid syntax')
