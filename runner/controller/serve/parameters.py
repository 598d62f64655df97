"""The parameters of requests, checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from runner.base.cpuset import CpuSet
from runner.kubelet.pod_cgroups import INSTANCE_NAME
from runner.protocol.jsonrpc import INVALID_PARAMS, RpcError


def parse_arguments(
    params: Mapping[str, object] | list[object], names: tuple[str, ...], optional: frozenset[str]
) -> Mapping[str, object]:
    """Return *params* by name: all of *names*, and any of *optional*. Raises :class:`RpcError`, as all functions here."""
    if isinstance(params, list):
        if len(params) != len(names):
            raise RpcError(INVALID_PARAMS, f"Invalid params: {len(params)} given, {len(names)} wanted")
        return dict(zip(names, params, strict=True))
    missing, unknown = sorted(set(names) - set(params)), sorted(set(params) - {*names, *optional})
    if missing or unknown:
        raise RpcError(INVALID_PARAMS, f"Invalid params: missing {missing}, unknown {unknown}")
    return params


def parse_pod_uid(value: object) -> str:
    """Return the pod's UID."""
    if not isinstance(value, str) or not INSTANCE_NAME.fullmatch(value):
        raise RpcError(INVALID_PARAMS, "Invalid params: 'uuid' must be 1 to 64 of a-z, 0-9 and '-', as a pod's uid is")
    return value


def parse_cpuset(value: object) -> CpuSet:
    """Return the CPUs, at least one."""
    if not isinstance(value, str):
        raise RpcError(INVALID_PARAMS, "Invalid params: 'cpuset' must be a string like '4-7,12'")
    with checked("cpuset"):
        cpus = CpuSet.parse(value)
    if not cpus:
        raise RpcError(INVALID_PARAMS, "Invalid params: 'cpuset' is empty")
    return cpus


def parse_number(arguments: Mapping[str, object], name: str, default: int) -> int:
    """Return the whole number *name*."""
    value = arguments.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise RpcError(INVALID_PARAMS, f"Invalid params: {name!r} must be a whole number")
    return value


@contextmanager
def checked(name: str) -> Iterator[None]:
    """Turn a ``ValueError`` of the block into the error for the parameter *name*."""
    try:
        yield
    except ValueError as error:
        raise RpcError(INVALID_PARAMS, f"Invalid params: {name!r}: {error}") from None
