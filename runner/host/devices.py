"""The PCI devices that a guest gets, and the files in the container that describe those of resource claims (DRA)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import attrs

from runner.base.errors import SpecError
from runner.facts.host import HostFacts
from runner.facts.pci import ClaimFile, VfioFacts
from runner.facts.roots import Roots
from runner.kernel.file_prober import read_document
from runner.kernel.pci import read_pci_facts
from runner.kernel.vfio import probe_node
from runner.kubelet.device_metadata import CLAIMS, LARGEST, SUFFIX, TEMPLATES, parse_device_metadata
from runner.plan.passthrough_planner import given_addresses
from runner.spec.instance import InstanceSpec


def with_devices(facts: HostFacts, spec: InstanceSpec, roots: Roots) -> HostFacts:
    """Add the facts that the plan needs about the devices in *spec*."""
    claims = {each.claim: read_claim(roots.claims, each.claim) for each in spec.device if each.claim is not None}
    vfio = VfioFacts(
        devices=read_pci_facts(given_addresses(spec.device, os.environ, claims), roots),
        environment=os.environ,
        claims=claims,
        container=probe_node(PurePosixPath(roots.dev / "vfio/vfio")),
        iommufd=probe_node(PurePosixPath(roots.dev / "iommu")),
    )
    return attrs.evolve(facts, vfio=vfio)


def read_claim(root: Path, claim: str) -> tuple[ClaimFile, ...]:
    """Return the files about the devices of *claim* below *root*, by request and then by driver; none if there are none here.

    A claim that the pod names directly takes precedence over one of the same name made from a template.
    """
    return tuple(
        _read(path, path.parent.name)
        for kind in (CLAIMS, TEMPLATES)
        for request in _listed(root / kind / claim)
        for path in _listed(request)
        if path.name.endswith(SUFFIX)
    )


def _listed(directory: Path) -> Iterator[Path]:
    try:
        yield from sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return


def _read(path: Path, request: str) -> ClaimFile:
    file = PurePosixPath(path)
    document = read_document(file, LARGEST)
    if document.error is not None:
        return ClaimFile(file, request, error=document.error)
    try:
        return ClaimFile(file, request, parse_device_metadata(str(path), document.content))
    except SpecError as error:
        return ClaimFile(file, request, error="; ".join(map(str, error.problems)))
