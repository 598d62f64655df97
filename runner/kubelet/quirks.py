"""What the kubelet's managers have in common: versions, known faults, and errors.

The managers are modelled bug for bug; where the kubelet is at fault, the fault has a name in :class:`Quirk` and can be
switched off to see what it does.
"""

from __future__ import annotations

import enum

from runner.errors import RefusedError

OLDEST_MINOR = 33
NEWEST_MINOR = 36
"""Minor versions of the kubelet (1.33 to 1.36) whose decisions are known."""


class Quirk(enum.Enum):
    """A known fault of the kubelet that decides which CPUs a container gets."""

    COMBINATIONS_OVERWRITTEN = "kubernetes#141238"
    """``distribute-cpus-across-numa`` keeps the best combination of NUMA nodes by reference to a Go slice that the
    search continues to write to, so that another combination than the best one may be used."""
    LIVELOCK = "kubernetes#140730"
    """``distribute-cpus-across-numa`` with ``full-pcpus-only`` counts what is left in CPUs, but hands it out in whole
    cores: with only half cores left it never ends. The model raises :class:`KubeletHangsError` instead."""
    WHOLE_UNITS_UNCHECKED = "kubernetes#140495"
    """A unit is whole when it has as many free CPUs as the *average* one; all its CPUs are taken then, the reserved or
    assigned ones among them. It shows on hosts with unequal cores or sockets."""
    EMPTY_MEMORY_HINTS = "an empty hint map reads as no preference"
    """A memory request that fits nowhere gives no hints at all, which the Topology Manager takes for "anywhere": the
    pod is rejected only after it was given CPUs, which stay taken until the next admission."""


def quirks_of(minor: int) -> frozenset[Quirk]:
    """Return the faults of kubelet 1.*minor*; :class:`RefusedError` for a version whose decisions are not known."""
    if not OLDEST_MINOR <= minor <= NEWEST_MINOR:
        raise RefusedError(
            f"cannot predict kubelet 1.{minor}: decisions are known from 1.{OLDEST_MINOR} to 1.{NEWEST_MINOR};"
            " give the version of the kubelet on that node"
        )
    return frozenset(Quirk)


class AllocationError(Exception):
    """The kubelet's own error when a container cannot have what it asks for; *reason* as in the pod's status."""

    reason = "UnexpectedAdmissionError"


class KubeletConfigError(RefusedError):
    """The kubelet would not start with this configuration; the text is the kubelet's own."""


class KubeletHangsError(Exception):
    """The kubelet would never finish this admission, and admit no other pod either."""


class KubeletCrashesError(Exception):
    """The kubelet would panic."""


def parse_bool(option: str, value: str) -> bool:
    """Read the value of a policy option as Go's ``strconv.ParseBool`` does."""
    if value in {"1", "t", "T", "TRUE", "true", "True"}:
        return True
    if value in {"0", "f", "F", "FALSE", "false", "False"}:
        return False
    raise KubeletConfigError(f'bad value for option "{option}": strconv.ParseBool: parsing "{value}": invalid syntax')
