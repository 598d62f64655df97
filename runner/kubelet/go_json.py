"""JSON as Go's ``encoding/json`` reads it: the files of the kubelet and of DRA drivers (pure).

Keys are compared without regard to case, and null is an empty value. Every malformed document raises :class:`SpecError`,
with the path of the value where there is one.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import attrs

from runner.base.cpuset import CpuSet
from runner.base.document_value import Value
from runner.base.errors import Problem, SpecError
from runner.base.strict_json import parse_json

_LONGEST = 300
"""Largest number of characters of an error message, which quotes values: a file may be one string of 16 MiB."""


@contextlib.contextmanager
def one_error(source: str) -> Iterator[None]:
    """Turn deep nesting into :class:`SpecError`, and shorten messages that quote long values."""
    try:
        yield
    except RecursionError:  # from the JSON scanner, or from repr() of what it returned
        raise SpecError(source, [Problem("", "it is nested too deeply")]) from None
    except SpecError as error:
        problems = [Problem(_short(each.path), _short(each.message), _short(each.remedy)) for each in error.problems]
        raise SpecError(source, problems) from None


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def parse_document(text: bytes, source: str) -> Value:
    """Return the JSON object *text*, or the one in its string ``data``, which checkpoints have beside a checksum."""
    document = _object(text, Value(None, source))
    if not _spellings(document, "data"):
        return document
    data = field(document, "data")
    return _object(data.text().encode(), data)


def _object(text: bytes, at: Value) -> Value:
    try:
        value = parse_json(text.decode())
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError, a ValueError, for half of a surrogate pair
    except ValueError as error:
        at.fail(f"it is not JSON: {error}" if text.strip() else "it is empty")
    document = attrs.evolve(at, value=value)
    members(document)
    return document


def _spellings(struct: Value, name: str) -> list[str]:
    """Return the keys of *struct* that Go reads as the field *name*: ``encoding/json`` ignores case."""
    return [member.key for member in members(struct) if member.key.casefold() == name.casefold()]


def field(struct: Value, name: str, default: object = None) -> Value:
    """Return the field *name* of *struct*, or *default* if it is missing or null, as for an empty map in Go."""
    spellings = _spellings(struct, name)
    if len(spellings) > 1:
        struct.fail(f"a key appears twice in one object: {' and '.join(map(repr, spellings))}")
    value = struct.value[spellings[0]] if spellings else None
    return Value(default if value is None else value, struct.source, f"{struct.path}.{name}".lstrip("."), name)


def members(value: Value) -> list[Value]:
    """Return the members of an object, or an empty list for null, which Go writes for an empty map."""
    return value.members() if value else []


def cpu_set(value: Value) -> CpuSet:
    """Return the CPUs of a string written by ``cpuset.CPUSet.String``."""
    text = value.text()
    if text != text.strip():  # Go's cpuset.Parse allows no white space, CpuSet.parse the kernel's line end
        value.fail(f"{text!r} has white space around it")
    return value.cpu_set()
