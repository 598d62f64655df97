"""The paths of an instance, and its programs, that lead through a directory which it shares with the guest."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import PurePosixPath

import attrs

from runner.base.errors import RefusedError
from runner.facts.host import VIRTIOFSD_DIRECTORIES, HostFacts
from runner.facts.roots import Roots
from runner.kernel.files import find_program
from runner.kernel.shared_directories import SharedDirectories, shared_directories
from runner.spec.instance import InstanceSpec, opened_paths


def with_shares(facts: HostFacts, spec: InstanceSpec, roots: Roots) -> HostFacts:
    """Add the paths of *spec* that lead through a share which the guest can write to.

    A program that the guest may change is refused here and not by the plan: to be asked for its version, it is executed. This program is
    checked as well: most of its modules are imported when needed, even while a guest runs.
    """
    directories = shared_directories([share.path for share in spec.share if not share.read_only], roots)
    programs = facts.qemu, facts.dnsmasq, facts.sleep, facts.passt, find_program("virtiofsd", VIRTIOFSD_DIRECTORIES)
    preallocator = PurePosixPath(facts.preallocator[-1])
    ours = (PurePosixPath(each) for each in sys.path if each.startswith("/"))
    for path in (*programs, *ours, preallocator.parent):
        if path is not None and (share := directories.holding(path)) is not None:
            raise RefusedError(
                f"cannot use {str(path)!r}: the guest may change it by the share {str(share)!r}",
                remedy="put the program elsewhere, or set the share's read_only",
            )
    return attrs.evolve(facts, in_shares=dict(_in_shares(directories, spec, facts.state_directory)))


def _in_shares(
    directories: SharedDirectories, spec: InstanceSpec, state_directory: PurePosixPath
) -> Iterator[tuple[PurePosixPath, PurePosixPath]]:
    for _, path in opened_paths(spec, state_directory):
        if (share := directories.holding(path)) is not None:
            yield path, share
    for each in spec.share:
        if (share := directories.leading_to(each.path)) is not None:
            yield each.path, share
