"""JSON Schemas (draft 7) of values, made from the types of the values.

A TypedDict, a named tuple or an attrs class is an object, ``Annotated[str, X]`` the written form of an X. The docstring of a class and the
strings below its fields are the descriptions. Unknown fields are accepted, because later versions may add some.
"""

from __future__ import annotations

import ast
import enum
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Mapping
from importlib import import_module
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import attrs

from runner.base.cpuset import CpuSet

Schema = dict[str, Any]
DRAFT = "http://json-schema.org/draft-07/schema#"

CPU_LIST: Schema = {"type": "string", "pattern": r"^$|^\d+(-\d+)?(,\d+(-\d+)?)*$"}
"""The kernel's list format, such as ``0-3,8``; empty for none."""
_SCALARS: Mapping[object, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    type(None): {"type": "null"},
    CpuSet: CPU_LIST,
    object: {},
    Any: {},
}
_ROLES = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`|``(.+?)``", re.DOTALL)
"""A reference to another Python object, and code, in the syntax of docstrings."""


class SchemaBuilder:
    """Makes schemas of types; each class becomes a definition."""

    def __init__(self) -> None:
        self.definitions: dict[str, Schema] = {}

    def of(self, kind: Any) -> Schema:
        """Return the schema of values of *kind* in their written form."""
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is not None:
            return self._generic(origin, arguments)
        if kind in _SCALARS:
            return dict(_SCALARS[kind])
        if is_typeddict(kind) or attrs.has(kind) or hasattr(kind, "_fields"):
            return self._object(kind)
        if issubclass(kind, enum.Enum):
            return {"enum": [each.value for each in kind]}
        return {"type": "string"}  # a path, an address: its text

    def taken(self, kind: type) -> Schema:
        """Return the schema of the class *kind* itself, which is no definition any more."""
        self.of(kind)
        return self.definitions.pop(kind.__name__)

    def _generic(self, origin: Any, arguments: tuple[Any, ...]) -> Schema:
        if origin is Annotated:
            schema = self.of(arguments[1])
        elif origin is NotRequired:
            schema = self.of(arguments[0])
        elif origin is Literal:
            schema = {"enum": [*arguments]}
        elif origin in {Union, types.UnionType}:
            schema = {"anyOf": [*map(self.of, arguments)]}
        elif issubclass(origin, Mapping):
            schema = {"type": "object", "additionalProperties": self.of(arguments[1])}
        elif origin is tuple and ... not in arguments:
            size = len(arguments)
            schema = {"type": "array", "items": [*map(self.of, arguments)], "minItems": size, "maxItems": size}
        else:
            schema = {"type": "array", "items": self.of(arguments[0])}
        return schema

    def _object(self, kind: type) -> Schema:
        name = kind.__name__
        if name not in self.definitions:
            hints = get_type_hints(kind, None, _imported_for_types(kind), include_extras=True)
            hints = {field: hint for field, hint in hints.items() if get_origin(hint) is not ClassVar}
            meanings = _meanings(kind)
            properties = {field: self.of(hint) for field, hint in hints.items()}
            self.definitions[name] = {
                "type": "object",
                "description": _as_sentences(kind.__doc__ or ""),
                "properties": {field: _described(each, meanings.get(field, "")) for field, each in properties.items()},
                "required": [field for field, hint in hints.items() if get_origin(hint) is not NotRequired],
            }
        return {"$ref": f"#/definitions/{name}"}


def _described(schema: Schema, meaning: str) -> Schema:
    if not meaning:
        return schema
    return {"description": meaning, **({"allOf": [schema]} if "$ref" in schema else schema)}


def _imported_for_types(kind: type) -> dict[str, Any]:
    """Return the names that the module of *kind* imports only for its types."""
    imported = dict[str, Any]()
    for block in ast.parse(inspect.getsource(sys.modules[kind.__module__])).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for each in block.body:
                if isinstance(each, ast.ImportFrom) and each.module is not None:
                    module = import_module(each.module)
                    imported |= {alias.name: getattr(module, alias.name) for alias in each.names}
    return imported


def _meanings(kind: type) -> dict[str, str]:
    """Return the strings below the fields of *kind*, and of the types that it extends."""
    meanings = dict[str, str]()
    if kind.__doc__ is None:
        return meanings  # it has no body
    module = sys.modules[kind.__module__]
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)  # noqa: S101 - the source of a class
    for base in definition.bases:  # a TypedDict does not record its bases
        extended = getattr(module, base.id, None) if isinstance(base, ast.Name) else None
        if isinstance(extended, type) and extended.__module__.partition(".")[0] == "runner":
            meanings |= _meanings(extended)
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            meanings[field.target.id] = _as_sentences(ast.literal_eval(below.value))
    return meanings


def _as_sentences(docstring: str) -> str:
    return " ".join(_ROLES.sub(lambda match: match[1] or f"`{match[2]}`", docstring).split())


def given(**values: object) -> Schema:
    """Return a schema for objects whose keys have these *values*; an ellipsis stands for any."""
    properties = {name: {} if value is ... else {"const": value} for name, value in values.items()}
    return {"required": [*values], "properties": properties}


def implies(condition: Schema, then: Schema) -> Schema:
    """Return a schema for what *then* fits, if *condition* does."""
    return {"if": condition, "then": then}
