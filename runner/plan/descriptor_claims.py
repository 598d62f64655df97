"""Inherited descriptors: each must be used by exactly one key of the spec."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath

import attrs

from runner.facts.descriptor import DescriptorFact
from runner.facts.host import HostFacts
from runner.plan.problems import Problems
from runner.spec.instance import DiskSpec, InstanceSpec

ALLOWED = {
    "tap": "a tap",
    "macvtap": "a macvtap",
    "socket": "a stream socket",
    "vhost-net": "a vhost-net",
    "file": "a file",
    "block": "a block device",
}
"""The kinds of descriptors that a spec can use, in words."""


def with_disks(spec: InstanceSpec, numbers: Mapping[str, int]) -> InstanceSpec:
    """Return *spec* with a path for each disk that is an inherited descriptor; *numbers* are the descriptors by name.

    A disk is opened again through its descriptor's magic link (proc_pid_fd(5)), because each use needs other flags; the
    access mode of the inherited descriptor must allow it.
    """

    def path(disk: DiskSpec) -> PurePosixPath | None:
        if disk.fd is None or disk.fd not in numbers:
            return disk.path
        return PurePosixPath(f"/proc/self/fd/{numbers[disk.fd]}")

    return attrs.evolve(spec, disk=tuple(attrs.evolve(disk, path=path(disk)) for disk in spec.disk))


class Claims:
    """The inherited descriptors, each of which one key of the spec can claim.

    ``instance-runner plan`` inherits none; then every claim succeeds and returns ``None``.
    """

    def __init__(self, facts: HostFacts, problems: Problems) -> None:
        self._inherited = facts.descriptors
        self._refuse = problems.refuse
        self._claimed: dict[str, str] = {}

    def claim(self, where: str, name: str, kinds: Collection[str], *, write: bool) -> DescriptorFact | None:
        """Return the facts about *name*; add a problem at the path *where* if it is missing, of another kind or not writable."""
        if name in self._claimed:
            self._refuse(where, f"the descriptor {name!r} is taken by {self._claimed[name]} already")
        self._claimed[name] = where
        if self._inherited is None:
            return None
        descriptor = self._inherited.get(name)
        if descriptor is None:
            known = ", ".join(map(repr, self._inherited)) or "none"
            self._refuse(where, f"no descriptor {name!r} was inherited", f"there are: {known}")
            return None
        allowed = " or ".join(ALLOWED[kind] for kind in ALLOWED if kind in kinds)
        if descriptor.kind not in kinds:
            self._refuse(where, f"the descriptor {name!r} is {descriptor.description}, it takes {allowed}")
            return None
        if descriptor.declared is not None and descriptor.declared != descriptor.kind:
            self._refuse(
                where, f"the descriptor {name!r} is {descriptor.description}, but came as {descriptor.declared!r}"
            )
            return None
        if write and not descriptor.writable:
            self._refuse(where, f"the descriptor {name!r} is open for reading only", "it takes one for both")
            return None
        return descriptor

    def claim_disks(self, disks: Sequence[DiskSpec]) -> None:
        """Claim the descriptors of *disks*."""
        for index, disk in enumerate(disks):
            if disk.fd is not None:
                self.claim(f"disk[{index}].fd", disk.fd, {"file", "block"}, write=disk.writes)

    def refuse_unclaimed(self) -> None:
        """Add a problem for each inherited descriptor that no key of the spec names, because it would stay open unused."""
        for name, descriptor in (self._inherited or {}).items():
            if name not in self._claimed:
                self._refuse(
                    "descriptors",
                    f"nothing names the descriptor {name!r} ({descriptor.description})",
                    "name it in a key fd, or do not pass it",
                )
