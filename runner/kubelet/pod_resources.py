"""The messages of the kubelet's PodResources API, version 1, in the parts that this project reads (pure).

They are those of ``k8s.io/kubelet/pkg/apis/podresources/v1/api.proto``, which ``pkg/kubelet/apis/podresources/server_v1.go``
fills in. The requests of the two methods that are called here have no fields, so they are empty messages.

They are in protobuf's wire format (https://protobuf.dev/programming-guides/encoding/). Only five kinds of fields are read, so this module
decodes them itself; ``runner/README.md`` lists the costs of the libraries. A field that is not known is skipped, as every reader of
protobuf does: a newer kubelet may send more.

Every malformed message raises :class:`SpecError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from runner.base.cpuset import CpuSet
from runner.base.errors import Problem, SpecError
from runner.base.values import frozen

LIST = "/v1.PodResourcesLister/List"
GET_ALLOCATABLE = "/v1.PodResourcesLister/GetAllocatableResources"
"""The paths of the methods in gRPC."""
NO_FIELDS = b""
"""The encoded request of both methods."""

SOURCE = "the kubelet's PodResources API"
"""The name of its answers in :class:`SpecError`."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types; 3 and 4 are groups, which proto3 has not."""
_LONGEST_VARINT = 10
"""Bytes: ``uint64`` in groups of seven bits."""
_HIGHEST_FIELD = 2**29 - 1


@frozen
class ContainerResources:
    """The resources of a running container, as the kubelet lists them."""

    pod: str
    """``namespace/name``; the API does not return the pod's UID."""
    name: str
    cpus: CpuSet
    """Its exclusive CPUs from the CPU Manager; empty for a container on shared CPUs."""
    cdi_devices: frozenset[str]
    """The qualified names of the CDI devices of its resource claims (DRA), such as ``dra.k8s.io/cpu=claim-1b2c``."""


def parse_pods(message: bytes) -> tuple[ContainerResources, ...]:
    """Return the containers of a ``ListPodResourcesResponse``: the app containers and sidecars of all active pods."""
    return tuple(
        container
        for pod in _messages(message, 1, "pod_resources")
        for container in _containers(pod, f"{_text(pod, 2, 'namespace')}/{_text(pod, 1, 'name')}")
    )


def parse_allocatable_cpus(message: bytes) -> CpuSet:
    """Return the CPUs of an ``AllocatableResourcesResponse``: all that pods can have exclusively, assigned or not.

    Those are all CPUs but the reserved ones (``GetAllocatableCPUs`` of ``pkg/kubelet/cm/cpumanager/policy_static.go``); none
    under policy ``none``, and none before the kubelet has started its CPU Manager.
    """
    return _cpus(message, 2)


def _containers(pod: bytes, name: str) -> Iterator[ContainerResources]:
    for container in _messages(pod, 3, "containers"):
        devices = frozenset(
            _text(device, 1, "name")
            for claim in _messages(container, 5, "dynamic_resources")
            for resource in _messages(claim, 4, "claim_resources")
            for device in _messages(resource, 1, "cdi_devices")
        )
        yield ContainerResources(name, _text(container, 1, "name"), _cpus(container, 3), devices)


def _messages(message: bytes, number: int, name: str) -> Iterator[bytes]:
    """Yield the values of the field *number* of *message*, which are messages or strings themselves."""
    for found, value in _fields(message):
        if found == number:
            if not isinstance(value, bytes):
                _fail(f"its field {name!r} is a number")
            yield value


def _text(message: bytes, number: int, name: str) -> str:
    """Return the string field *number* of *message*, the last one if it is repeated; empty if there is none."""
    text = b""
    for text in _messages(message, number, name):  # noqa: B007  # the last one
        pass
    try:
        return text.decode()
    except UnicodeDecodeError:
        _fail(f"its field {name!r} is not UTF-8: {text[:80]!r}")


def _cpus(message: bytes, number: int) -> CpuSet:
    """Return the repeated ``int64`` *number* of *message* as CPUs; each may come alone, or many in a packed field."""
    cpus: set[int] = set()
    for found, value in _fields(message):
        if found == number:
            if isinstance(value, int):
                cpus.add(value)
            else:
                at = 0
                while at < len(value):
                    cpu, at = _varint(value, at)
                    cpus.add(cpu)
    try:
        return CpuSet(cpus)
    except ValueError as error:
        _fail(f"its field 'cpu_ids' holds {error}")


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field of *message*, in its order."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if not 0 < number <= _HIGHEST_FIELD:
            _fail(f"it has a field of number {number}")
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            _fail(f"it has a field of wire type {kind}")
        if size > len(message) - at:
            _fail(f"its field {number} ends {size - len(message) + at} bytes behind it")
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number at the offset *at* of *message*, and the offset of its end."""
    value = 0
    for shift, byte in enumerate(message[at : at + _LONGEST_VARINT]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:  # noqa: PLR2004  # the highest bit says that more follow
            break
    else:
        _fail("a number in it has no end")
    return value & 2**64 - 1, at + shift + 1


def _fail(reason: str) -> NoReturn:
    raise SpecError(SOURCE, [Problem("", reason)])
