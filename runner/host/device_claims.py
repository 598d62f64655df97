"""The files in the container about the devices of resource claims (DRA)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from runner.base.errors import SpecError
from runner.facts.pci import ClaimFile
from runner.kernel.file_prober import read_document
from runner.kubelet.device_metadata import CLAIMS, LARGEST, SUFFIX, TEMPLATES, parse_device_metadata


def read_claim(root: Path, claim: str) -> tuple[ClaimFile, ...]:
    """Return the files about the devices of *claim* below *root*, by request and then by driver; none if it has none here.

    A claim of this name that the pod names directly comes before one that is made from a template.
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
    found = PurePosixPath(path)
    document = read_document(found, LARGEST)
    if document.error is not None:
        return ClaimFile(found, request, error=document.error)
    try:
        return ClaimFile(found, request, parse_device_metadata(str(path), document.content))
    except SpecError as error:
        return ClaimFile(found, request, error="; ".join(map(str, error.problems)))
