"""Directories shared by virtiofs: what is started for each, and why it cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

import attrs

from runner.facts.disk import MISSING
from runner.facts.host import HostFacts, Virtiofsd
from runner.plan.disks import within
from runner.plan.problems import Problems
from runner.spec.instance import InstanceSpec, ShareSpec
from runner.values import frozen


@frozen
class SharePlan:
    """virtiofsd for one directory."""

    program: Virtiofsd
    tag: str
    path: PurePosixPath
    read_only: bool
    updatable: bool = attrs.field(default=False)
    """Whether another virtiofsd can take its place while the guest runs."""


def plan_shares(spec: InstanceSpec, facts: HostFacts, problems: Problems) -> Iterator[SharePlan]:
    """Yield the plan of each share for which there is a virtiofsd."""
    for index, share in enumerate(spec.share):
        where, program = f"share[{index}]", facts.virtiofsd
        _require_directory(f"{where}.path", share.path, facts, problems)
        if program is None:
            problems.refuse(
                where,
                f"cannot use virtiofsd: {facts.virtiofsd_error}",
                "install the package virtiofsd (Debian 12: qemu-system-common)",
            )
            continue
        if share.read_only and not program.read_only:
            version = ".".join(map(str, program.version))
            problems.refuse(
                f"{where}.read_only",
                f"virtiofsd {version} cannot share read-only, 1.11 can",
                "mount the directory read-only in the pod instead",
            )
        refuse_our_files_inside(share, spec, problems, facts.state_directory)
        yield SharePlan(
            program, share.tag, share.path, share.read_only, updatable=spec.hotplug.qemu and program.hands_over
        )


def _require_directory(where: str, path: PurePosixPath, facts: HostFacts, problems: Problems) -> None:
    fact = facts.files.get(path, MISSING)
    if fact.kind == "missing":
        problems.refuse(where, f"{str(path)!r} does not exist", "make the directory, or mount it into the container")
    elif fact.kind != "directory":
        problems.refuse(where, f"{str(path)!r} {fact.words}, not a directory")


def refuse_our_files_inside(
    share: ShareSpec, spec: InstanceSpec, problems: Problems, state_directory: PurePosixPath | None = None
) -> None:
    """Refuse files in a writable *share* that this process writes: the guest could put a link to any file in their place."""
    if share.read_only:
        return
    for where, path in (
        ("console.log", spec.console.log),
        ("boot.firmware_vars", spec.boot.firmware_vars),
        ("--state-dir", state_directory),
    ):
        if path is not None and within(path, [share.path]):
            problems.refuse(
                where,
                f"{str(path)!r} lies in the share {share.tag!r}, where the guest may put a link in its place",
                "keep it elsewhere, or set the share's read_only",
            )
