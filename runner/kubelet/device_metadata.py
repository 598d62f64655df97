"""The parser of the files in which DRA drivers describe the devices of a resource claim to the container (KEP-5304).

A file is a stream of JSON objects, the same description in several versions of the API. Readers take the first version that
they know and skip others; a malformed object of a known version is an error (``devicemetadata/decode.go``, "Device metadata
protocol" in the documentation of Kubernetes). The writer is ``kubeletplugin/metadata.go``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from runner.base.document_value import Value
from runner.base.errors import Problem, SpecError
from runner.base.table import some
from runner.facts.pci import ClaimedDevice
from runner.kubelet.go_json import one_error

VERSIONS = tuple(f"metadata.resource.k8s.io/{version}" for version in ("v1beta1", "v1alpha1"))
"""The versions of Kubernetes 1.37 and 1.36; the parts read here are the same in both."""
KIND = "DeviceMetadata"
PCI_ADDRESS = "resource.kubernetes.io/pciBusID"
NUMA_NODE = "resource.kubernetes.io/numaNode"
PCIE_ROOT = "resource.kubernetes.io/pcieRoot"
CLAIMS, TEMPLATES = "resourceclaims", "resourceclaimtemplates"
"""The directories of claims named directly by the pod, and of those made from a template (``types.go``)."""
SUFFIX = "-metadata.json"
"""The end of a file's name, after the name of the driver."""
LARGEST = 1 << 20
"""Bytes of the largest file that is read; a device has at most 32 attributes, of some hundred bytes each."""


def parse_device_metadata(source: str, data: bytes) -> tuple[ClaimedDevice, ...]:
    """Return the devices in the content *data* of a file; *source* is its name in errors.

    Raises :exc:`~runner.base.errors.SpecError`.
    """
    unknown = []
    with one_error(source):
        for value in _objects(source, data):
            version = value.get("apiVersion").text()
            if version in VERSIONS:
                if value.get("kind").text() != KIND:
                    value.get("kind").fail(f"must be {KIND}, found {value.value['kind']!r}")
                return tuple(_devices(value))
            unknown.append(version)
        if unknown:
            known = " or ".join(VERSIONS)
            raise SpecError(source, [Problem("apiVersion", f"must be {known}, found {some(unknown)}")])
    raise SpecError(source, [Problem("", "it is empty")])


def _objects(source: str, data: bytes) -> Iterator[Value]:
    """Yield the objects of the stream *data* lazily: data after the object that is used are ignored."""
    decoder = json.JSONDecoder()
    try:
        text, at = data.decode().strip(), 0
        while at < len(text):
            value, at = decoder.raw_decode(text, at)
            yield Value(value, source)
            while text[at : at + 1].isspace():
                at += 1
    except (ValueError, RecursionError) as error:
        raise SpecError(source, [Problem("", f"it is no JSON: {error}")]) from error


def _devices(value: Value) -> Iterator[ClaimedDevice]:
    for request in value.get("requests").elements() if value.get("requests") else ():
        for device in request.get("devices").elements() if request.get("devices") else ():
            attributes = device.get("attributes", {})
            address = attributes.get(PCI_ADDRESS)
            yield ClaimedDevice(
                driver=device.get("driver").text(),
                name=device.get("name").text(),
                attributes=tuple(each.key for each in attributes.members()),
                address=address.get("string").text().lower() if address else None,
                numa_node=_numa_node(attributes.get(NUMA_NODE)),
                pcie_root=_text(attributes.get(PCIE_ROOT)),
            )


def _text(value: Value) -> str | None:
    return value.get("string").text() if value else None


def _numa_node(value: Value) -> int | None:
    """Return the device's own NUMA node: the number, or the first of a list, whose other members are equally near."""
    if not value:
        return None
    if value.get("int"):
        return value.get("int").number()
    return next(iter(value.get("ints").numbers()), None) if value.get("ints") else None
