"""Directories shared by virtiofs: the daemon of each, and the reasons for refusing one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

import attrs

from runner.base.values import frozen
from runner.facts.disk import MISSING
from runner.facts.host import HostFacts, User, Virtiofsd, format_version
from runner.facts.packages import install
from runner.plan.disks import within
from runner.plan.problems import Problems
from runner.spec.instance import InstanceSpec, ShareSpec, opened_paths


@frozen
class SharePlan:
    """virtiofsd for one directory."""

    program: Virtiofsd
    tag: str
    path: PurePosixPath
    read_only: bool
    mounted_read_only: bool = attrs.field(default=False)
    """Whether nothing can be written to it, whatever virtiofsd allows."""
    updatable: bool = attrs.field(default=False)
    """Whether another virtiofsd can replace this one while the guest runs."""


def plan_shares(spec: InstanceSpec, user: User, facts: HostFacts, problems: Problems) -> Iterator[SharePlan]:
    """Yield the plan of each share for which there is a virtiofsd.

    Refuse paths of *spec* that the guest, or QEMU's *user*, could redirect, and those of the kernel.
    """
    _refuse_paths(user, spec, facts, problems)
    for index, share in enumerate(spec.share):
        where, program = f"share[{index}]", facts.virtiofsd
        _require_directory(f"{where}.path", share.path, facts, problems)
        if program is None:
            problems.refuse(
                where,
                f"cannot use virtiofsd: {facts.virtiofsd_error}",
                install("virtiofsd", facts.os_release),
            )
            continue
        if share.read_only and not program.read_only:
            problems.refuse(
                f"{where}.read_only",
                f"virtiofsd {format_version(program.version)} cannot share read-only, 1.11 can",
                "mount the directory read-only in the pod instead",
            )
        refuse_our_files_inside(share, spec, problems, facts)
        yield SharePlan(
            program,
            share.tag,
            share.path,
            share.read_only,
            mounted_read_only=facts.files.get(share.path, MISSING).mounted_read_only,
            updatable=spec.hotplug.qemu and program.hands_over,
        )


def _require_directory(where: str, path: PurePosixPath, facts: HostFacts, problems: Problems) -> None:
    fact = facts.files.get(path, MISSING)
    if fact.kind == "missing":
        problems.refuse(where, f"{str(path)!r} does not exist", "make the directory, or mount it into the container")
    elif fact.kind != "directory":
        problems.refuse(where, f"{str(path)!r} {fact.words}, not a directory")


def refuse_our_files_inside(
    share: ShareSpec, spec: InstanceSpec, problems: Problems, facts: HostFacts | None = None
) -> None:
    """Refuse files in a writable *share* that this process opens: the guest could replace them by links to any file.

    Without *facts*, judge by the paths alone.
    """
    if share.read_only:
        return
    state_directory, in_shares = (None, {}) if facts is None else (facts.state_directory, facts.in_shares)
    for where, path in opened_paths(spec, state_directory):
        if within(path, [share.path]) or in_shares.get(path) == share.path:
            problems.refuse(
                where,
                f"{str(path)!r} lies in the share {share.tag!r}, by this name or by a hard link, where the guest may change it, or "
                "put a link in its place",
                "keep it elsewhere, as a copy if it has hard links, or set the share's read_only",
            )
    for index, other in enumerate(spec.share):
        if in_shares.get(other.path) == share.path:
            problems.refuse(
                f"share[{index}].path",
                f"{str(other.path)!r} leads through the share {share.tag!r}, where the guest may put a link to any other directory in "
                "its place",
                f"mount it into the container elsewhere, or set the read_only of {share.tag!r}",
            )


def _refuse_paths(user: User, spec: InstanceSpec, facts: HostFacts, problems: Problems) -> None:
    """Refuse paths through links of QEMU's *user*, which an attacker who broke out of an earlier guest may have made.

    Refuse also the kernel's files, which are a mistake: what a guest writes to a console or a disk could be a setting of the machine.
    """
    shares = ((f"share[{index}].path", share.path) for index, share in enumerate(spec.share))
    for where, path in (*opened_paths(spec, facts.state_directory), *shares):
        if path.parts[1:2] in {("proc",), ("sys",)}:
            problems.refuse(where, f"{str(path)!r} is the kernel's, not a file for a guest", "name another path")
        if user.may_control(facts.links.get(path, ())):
            problems.refuse(
                where,
                f"{str(path)!r} leads through a symbolic link of a user as which QEMU runs, here or in another pod: one that its guest has "
                "taken over may have it lead to any file",
                "name the file itself, or make the link anew as root",
            )
