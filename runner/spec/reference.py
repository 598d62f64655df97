"""The reference of the spec's keys, of which ``examples/SPEC.md`` is made."""

from __future__ import annotations

import json
from collections.abc import Iterator

import attrs

from runner.spec.instance import InstanceSpec
from runner.spec.rules import (
    format_size,
    rule_of,
)


def reference() -> Iterator[tuple[str, str, str, str]]:
    """Yield ``(key, allowed values, default, meaning)`` for every key of the schema, in document order."""
    for table_name, schema, _ in _tables():
        for inner in attrs.fields(schema):
            default = _shown(inner.name, inner.default)
            yield f"{table_name}.{inner.name}", rule_of(inner).allowed, default, inner.metadata["doc"]


def tables_of_reference() -> dict[str, str]:
    """Return the meaning of each table of :func:`reference`, by its name there."""
    return {name: doc for name, _, doc in _tables()}


def _tables() -> Iterator[tuple[str, type, str]]:
    """Yield name, schema and meaning of each table; the name of an array of tables ends in ``[]``."""
    for attribute in attrs.fields(InstanceSpec):
        rule = rule_of(attribute)
        if rule.schema is not None:
            yield f"{attribute.name}[]" if rule.many else attribute.name, rule.schema, attribute.metadata["doc"]


def _shown(name: str, default: object) -> str:
    if default is attrs.NOTHING:
        return "required"
    if default in (None, ()):
        return "-"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return json.dumps(default)
    if name.endswith("size") and isinstance(default, int):
        return f'"{format_size(default)}"'
    return (
        f"{default:g}" if isinstance(default, float) else f'"{default}"' if isinstance(default, str) else str(default)
    )
