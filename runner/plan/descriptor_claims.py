"""Descriptors that somebody else has opened: which of them is what, and that each has one use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import PurePosixPath

import attrs

from runner.facts.descriptor import DescriptorFact
from runner.facts.host import HostFacts
from runner.spec.instance import DiskSpec, InstanceSpec

ALLOWED = {
    "tap": "a tap",
    "macvtap": "a macvtap",
    "socket": "a stream socket",
    "vhost-net": "a vhost-net",
    "file": "a file",
    "block": "a block device",
}
"""What a spec can use, by the kind that the kernel was seen to say."""


def with_disks(spec: InstanceSpec, numbers: Mapping[str, int] | None) -> InstanceSpec:
    """Return *spec* with the paths of the disks that were handed over as descriptors; *numbers* are those, by name.

    A disk is opened again by its descriptor's magic link (proc_pid_fd(5)), for each use of it takes flags of its own: the
    access that was handed over must allow that. Without *numbers* nothing is handed over, and their paths only name them.
    """

    def path(disk: DiskSpec) -> PurePosixPath:
        if disk.fd is None or (numbers is not None and disk.fd not in numbers):
            return disk.path
        return PurePosixPath(f"fd:{disk.fd}" if numbers is None else f"/proc/self/fd/{numbers[disk.fd]}")

    return attrs.evolve(spec, disk=tuple(attrs.evolve(disk, path=path(disk)) for disk in spec.disk))


class Claims:
    """The descriptors that were handed over, and who in the spec claims which; each can be claimed once.

    A plan made beforehand (``instance-runner plan``) takes none over, because that would use them up. It takes the spec's word.
    """

    def __init__(self, facts: HostFacts, refuse: Callable[[str, str], None]) -> None:
        self._handed = facts.descriptors
        self._refuse = refuse
        self._claimed: dict[str, str] = {}

    def claim(self, where: str, name: str, kinds: Collection[str], *, write: bool) -> DescriptorFact | None:
        """Return what *name* is; refuse, at the path *where*, what is not there, of another kind, or not for writing."""
        if name in self._claimed:
            self._refuse(where, f"the descriptor {name!r} is taken by {self._claimed[name]} already")
        self._claimed[name] = where
        if self._handed is None:
            return None
        found = self._handed.get(name)
        if found is None:
            known = ", ".join(map(repr, self._handed)) or "none"
            self._refuse(where, f"no descriptor {name!r} was handed to us; there are: {known}")
            return None
        allowed = " or ".join(ALLOWED[kind] for kind in ALLOWED if kind in kinds)
        if found.kind not in kinds:
            self._refuse(where, f"the descriptor {name!r} is {found.description}, it takes {allowed}")
            return None
        if found.declared is not None and found.declared != found.kind:
            self._refuse(where, f"the descriptor {name!r} is {found.description}, but came as {found.declared!r}")
            return None
        if write and not found.writable:
            self._refuse(where, f"the descriptor {name!r} is open for reading only; it takes one for both")
            return None
        return found

    def unclaimed(self) -> None:
        """Refuse what was handed over and nothing in the spec names: it would stay open for nobody."""
        for name, found in (self._handed or {}).items():
            if name not in self._claimed:
                self._refuse(
                    "descriptors",
                    f"nothing names the descriptor {name!r} ({found.description}); name it, or hand it to somebody else",
                )
