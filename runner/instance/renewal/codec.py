"""Frozen values as JSON and back: the state that a runner carries over to the program that renews it.

A value of a class is ``{"$": "plan.machine.MachinePlan", …}`` with the fields that differ from their defaults, by name. So a
program understands what an older one carries whose classes had fewer fields, and what a newer one carries as long as that uses
nothing new. A class or a field that it does not know is an error that names it: nothing is guessed, nothing left out.
"""

from __future__ import annotations

import base64
import enum
import importlib
import ipaddress
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any, Final

import attrs

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError
from runner.kernel.carried import CarriedFd

_KIND: Final = "$"
_PACKAGE: Final = __name__.partition(".")[0]

_TEXTS: Mapping[str, tuple[type, Callable[[str], object]]] = {
    "path": (PurePosixPath, PurePosixPath),
    "cpus": (CpuSet, CpuSet.parse),
    "bytes": (bytes, base64.b64decode),
    **{
        each.__name__: (each, each)
        for each in (
            ipaddress.IPv4Address,
            ipaddress.IPv4Interface,
            ipaddress.IPv4Network,
            ipaddress.IPv6Address,
            ipaddress.IPv6Interface,
            ipaddress.IPv6Network,
        )
    },
}
"""Kind → the class of values that are written as a text, and how the text is read."""
_KIND_OF = {cls: kind for kind, (cls, _) in _TEXTS.items()}
_SEQUENCES: Mapping[str, Callable[[list[Any]], object]] = {"list": list, "set": set, "frozenset": frozenset}


def encode(value: object, descriptors: list[int]) -> Any:
    """Return *value* as JSON; the numbers of all descriptors in it are appended to *descriptors*.

    Raises :exc:`~runner.base.errors.HostError` for a value of another kind.
    """
    if isinstance(value, enum.Enum):
        return {_KIND: "enum", "class": _name(type(value)), "value": value.value}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [encode(each, descriptors) for each in value]
    return {_KIND: _kind(value), **_content(value, descriptors)}


def _kind(value: object) -> str:
    cls = type(value)
    if cls in _KIND_OF:
        return _KIND_OF[cls]
    if cls.__name__ in _SEQUENCES or cls is dict:
        return cls.__name__
    if attrs.has(cls) and cls.__module__.startswith(f"{_PACKAGE}."):
        return _name(cls)
    raise HostError(f"cannot carry over a value of the class {cls.__name__!r}")


def _content(value: Any, descriptors: list[int]) -> dict[str, Any]:
    match value:
        case list() | set() | frozenset():
            return {"items": [encode(each, descriptors) for each in value]}
        case dict():
            return {"items": [[encode(key, descriptors), encode(each, descriptors)] for key, each in value.items()]}
        case bytes():
            return {"text": base64.b64encode(value).decode()}
        case CarriedFd(number=number):
            descriptors.append(number)
    return {"text": str(value)} if type(value) in _KIND_OF else _fields(value, descriptors)


def _fields(value: Any, descriptors: list[int]) -> dict[str, Any]:
    found = {}
    for field in attrs.fields(type(value)):
        each = getattr(value, field.name)
        if field.init and (field.default is attrs.NOTHING or each != _default(field)):
            found[field.alias] = encode(each, descriptors)
    return found


def _default(field: attrs.Attribute[Any]) -> object:
    default: Any = field.default
    return default.factory() if hasattr(default, "factory") and not default.takes_self else default


def decode(document: Any) -> Any:
    """Return the value that :func:`encode` has made *document* of.

    Raises :exc:`~runner.base.errors.HostError` for what this program does not know.
    """
    if isinstance(document, list):
        return tuple(map(decode, document))
    if not isinstance(document, dict):
        return document
    kind: str = document[_KIND]
    if kind == "dict":
        return {decode(key): decode(each) for key, each in document["items"]}
    if kind == "enum":
        return _class(document["class"])(document["value"])
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](list(map(decode, document["items"])))
    return _leaf(kind, document)


def _leaf(kind: str, document: dict[str, Any]) -> Any:
    if kind in _TEXTS:
        return _TEXTS[kind][1](document["text"])
    return _object(kind, {key: decode(each) for key, each in document.items() if key != _KIND})


def _object(name: str, fields: dict[str, Any]) -> Any:
    cls = _class(name)
    if not attrs.has(cls):
        raise HostError(f"cannot understand the state of the runner before: {name} is no value here")
    known = {field.alias for field in attrs.fields(cls)}
    if unknown := sorted(fields.keys() - known):
        raise HostError(f"cannot understand the state of the runner before: {name} has no {', '.join(unknown)} here")
    try:
        return cls(**fields)
    except (TypeError, ValueError) as error:
        raise HostError(f"cannot understand the state of the runner before: {name}") from error


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix(f"{_PACKAGE}.")


def _class(name: str) -> Any:
    """Return the class *name* of this package, and of no other."""
    module, _, cls = name.rpartition(".")
    try:
        return getattr(importlib.import_module(f"{_PACKAGE}.{module}"), cls)
    except (ImportError, AttributeError) as error:
        raise HostError(f"cannot understand the state of the runner before: there is no {name} here") from error
