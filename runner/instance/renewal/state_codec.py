"""Values of known types as plain JSON, and back, for the state listed in :mod:`runner.instance.renewal.names`.

================================ =============================================================================
type                             JSON
================================ =============================================================================
a class of attributes, or a      an object with those that differ from their defaults, by name; where a value may be of
named tuple                      several classes, also its ``kind``
a mapping                        an object; if its keys are no texts, a list of pairs
a sequence or a set              a list; that of a set is in order
bytes                            base64
paths, addresses, sets of CPUs   their text
enumerations                     their value
a descriptor                     its number
================================ =============================================================================

A field, a kind or a value that the type does not have is an error that names it: nothing is guessed, nothing left out.
"""

from __future__ import annotations

import base64
import enum
import ipaddress
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import PurePosixPath
from typing import Annotated, Any, Final, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import attrs

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError
from runner.instance.renewal.names import ELSEWHERE, KINDS
from runner.kernel.files import Descriptor

_TEXTS: Final[Mapping[type, Callable[[str], object]]] = {
    PurePosixPath: PurePosixPath,
    CpuSet: CpuSet.parse,
    bytes: base64.b64decode,
    **{
        each: each
        for each in (
            *(ipaddress.IPv4Address, ipaddress.IPv4Interface, ipaddress.IPv4Network),
            *(ipaddress.IPv6Address, ipaddress.IPv6Interface, ipaddress.IPv6Network),
        )
    },
}
"""Classes whose values are written as text → the function that reads the text."""
_PLAIN = (bool, int, float, str)
_MADE = (list, set, frozenset, tuple, Counter)
"""Collections that are created with the type of the field; others become tuples and dictionaries."""


def to_document(value: Any, kind: Any, descriptors: list[int]) -> Any:
    """Return *value*, which is of the type *kind*, as JSON; the numbers of the open descriptors in it are appended to *descriptors*.

    Raises :exc:`~runner.base.errors.HostError` for a value of another type.
    """
    origin, of = get_origin(kind), get_args(kind)
    if origin is Annotated or kind is Descriptor:
        number: int = value.number if isinstance(value, Descriptor) else value
        descriptors.extend([number] if number >= 0 else [])
        return number
    if origin in (Union, types.UnionType):
        return _union_document(value, of, descriptors)
    if origin is not None and origin is not Literal:
        return _collection_document(value, origin, of, descriptors)
    if _has_fields(kind) and isinstance(value, kind):
        return _fields_document(value, kind, descriptors)
    return _scalar_document(value, kind)


def _scalar_document(value: Any, kind: Any) -> Any:
    if kind in _TEXTS and isinstance(value, kind):
        return base64.b64encode(value).decode() if kind is bytes else str(value)
    if isinstance(value, enum.Enum) and isinstance(value, kind):
        return value.value
    if not _is_plain(value, kind, get_args(kind)):
        _refuse(value)
    return value


def _has_fields(kind: Any) -> bool:
    return isinstance(kind, type) and (attrs.has(kind) or hasattr(kind, "_fields"))  # a named tuple has it


def _is_text(kind: Any) -> bool:
    return kind is str or get_origin(kind) is Literal  # ours are of words


def _is_plain(value: Any, kind: Any, of: tuple[Any, ...]) -> bool:
    if get_origin(kind) is Literal:
        return value in of
    if kind is object:
        match value:
            case list():
                return all(_is_plain(each, object, ()) for each in value)
            case dict():
                return all(isinstance(key, str) and _is_plain(each, object, ()) for key, each in value.items())
        return value is None or isinstance(value, _PLAIN)
    if kind is float and isinstance(value, int):
        return True
    return value is None if kind in (None, types.NoneType) else kind in _PLAIN and isinstance(value, kind)


def _refuse(value: object) -> NoReturn:
    raise HostError(f"cannot carry over a value of the class {type(value).__name__!r}")


def _union_document(value: Any, kinds: Iterable[Any], descriptors: list[int]) -> Any:
    if value is None:
        return None
    if len(rest := _without_none(kinds)) == 1:
        return to_document(value, rest[0], descriptors)
    if type(value) not in rest:
        _refuse(value)
    document = to_document(value, type(value), descriptors)
    return {"kind": KINDS[type(value)], **document} if type(value) in KINDS else document


def _without_none(kinds: Iterable[Any]) -> list[Any]:
    return [each for each in kinds if each is not types.NoneType]


def _collection_document(value: Any, origin: Any, of: tuple[Any, ...], descriptors: list[int]) -> Any:
    if not isinstance(value, origin):
        _refuse(value)
    if issubclass(origin, Mapping):
        keys, values = (*of, int)[:2]  # a Counter has one argument
        pairs = [
            (to_document(key, keys, descriptors), to_document(each, values, descriptors)) for key, each in value.items()
        ]
        return dict(pairs) if _is_text(keys) else [list(pair) for pair in pairs]
    if issubclass(origin, tuple) and of[-1] is not ...:
        return [to_document(each, kind, descriptors) for each, kind in zip(value, of, strict=True)]
    return [
        to_document(each, of[0], descriptors)
        for each in (sorted(value) if isinstance(value, set | frozenset) else value)
    ]


def _fields_document(value: Any, kind: Any, descriptors: list[int]) -> dict[str, Any]:
    hints = field_types(kind)
    if not attrs.has(kind):
        defaults = kind._field_defaults
        return {
            name: to_document(each, hints[name], descriptors)
            for name, each in value._asdict().items()
            if name not in defaults or each != defaults[name]
        }
    fields = {}
    for field in attrs.fields(kind):
        each = getattr(value, field.name)
        if field.init and (field.default is attrs.NOTHING or each != _default(field)):
            fields[field.alias] = to_document(each, hints[field.name], descriptors)
    return fields


@cache
def field_types(kind: type) -> dict[str, Any]:
    """Return the types of the fields of a class, by name."""
    return get_type_hints(kind, None, ELSEWHERE, include_extras=True)


def _default(field: attrs.Attribute[Any]) -> object:
    default: Any = field.default
    return default.factory() if hasattr(default, "factory") and not default.takes_self else default


def from_document(document: Any, kind: Any, where: str) -> Any:
    """Return the value of the type *kind* that *document* describes; *where* names it in an error.

    Raises :exc:`~runner.base.errors.HostError` for fields, kinds and values that this program does not know.
    """
    try:
        return _value(document, kind, where)
    except (TypeError, ValueError, AttributeError) as error:
        raise _unknown(f"{where} is none here") from error


def _unknown(what: str) -> HostError:
    return HostError(f"cannot understand the state of the runner before: {what}")


def _value(document: Any, kind: Any, where: str) -> Any:
    origin, of = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _value(document, of[0], where)
    if origin in (Union, types.UnionType):
        return None if document is None else _one_of(document, _without_none(of), where)
    if origin is not None and origin is not Literal:
        return _collection(document, origin, of, where)
    if _has_fields(kind):
        return _object(document, kind, where)
    return _scalar(document, kind)


def _scalar(document: Any, kind: Any) -> Any:
    if kind in _TEXTS:
        return _TEXTS[kind](document)
    if kind is Descriptor or (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        return kind(document)
    if not _is_plain(document, kind, get_args(kind)):
        raise TypeError(f"{document!r} is no {kind}")
    return document


def _one_of(document: Any, kinds: list[Any], where: str) -> Any:
    if len(kinds) == 1:
        return _value(document, kinds[0], where)
    if isinstance(document, dict):
        named = {KINDS.get(each): each for each in kinds}
        if (kind := document.get("kind")) not in named:
            raise _unknown(f"{where} has the kind {kind!r}, which is none here")
        return _value({key: each for key, each in document.items() if key != "kind"}, named[kind], where)
    for each in kinds:
        try:
            return _TEXTS[each](document)
        except ValueError:
            continue
    raise ValueError(document)


def _collection(document: Any, origin: Any, of: tuple[Any, ...], where: str) -> Any:
    if issubclass(origin, Mapping):
        keys, values = (*of, int)[:2]
        pairs = document.items() if _is_text(keys) else document
        found = {_value(key, keys, where): _value(each, values, where) for key, each in pairs}
        return found if origin not in _MADE else origin(found)
    if not isinstance(document, list):
        raise TypeError(document)
    if issubclass(origin, tuple) and of[-1] is not ...:
        return tuple(_value(each, kind, where) for each, kind in zip(document, of, strict=True))
    return (origin if origin in _MADE else tuple)(_value(each, of[0], where) for each in document)


def _object(document: dict[str, Any], kind: Any, where: str) -> Any:
    names = [(each.alias, each.name) for each in attrs.fields(kind) if each.init] if attrs.has(kind) else ()
    fields = dict(names or ((name, name) for name in field_types(kind)))
    if unknown := sorted(document.keys() - fields.keys()):
        raise _unknown(f"{where} has no {', '.join(unknown)} here")
    hints = field_types(kind)
    return kind(**{key: _value(each, hints[fields[key]], f"{where}: {key}") for key, each in document.items()})
