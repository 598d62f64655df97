"""The JSON Schema of a spec (draft 7, which editors support), generated from the attrs classes of the schema.

It refuses unknown keys, wrong values and most contradictions. It cannot express sums, comparisons of several tables, and conditions on the
host: only the parser checks these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import attrs

from runner.base.json_schema import DRAFT, Schema, given, implies
from runner.spec.instance import (
    NETWORK_KEYS,
    BootSpec,
    CloudInitSpec,
    CpuSpec,
    DeviceSpec,
    DiskSpec,
    GuestSpec,
    InstanceSpec,
    MemorySpec,
    NetworkSpec,
)
from runner.spec.rules import format_size, rule_of
from runner.spec.variables import EnvironmentSpec

VARIABLE: Schema = {"$ref": "#/definitions/variable"}


def spec_schema() -> Schema:
    """Return the JSON Schema of a whole document."""
    return {
        "$schema": DRAFT,
        "title": "A spec of Instance Runner",
        "definitions": {
            "variable": {
                "description": "a string with ${NAME}, which environment.allow must name",
                "type": "string",
                "pattern": r"\$\{[A-Za-z_][A-Za-z0-9_]*\}",
            }
        },
        **_table(InstanceSpec),
    }


def _table(schema: type) -> Schema:
    properties: Schema = {}
    for attribute in attrs.fields(schema):
        rule = rule_of(attribute)
        about: Schema = {"description": attribute.metadata["doc"]}
        if rule.schema is None:
            value = rule.json if schema is EnvironmentSpec else _with_variables(rule.json)
            properties[attribute.name] = about | _default(attribute) | dict(value)
        elif rule.many:
            properties[attribute.name] = about | {"type": "array", "items": _table(rule.schema)}
        else:
            properties[attribute.name] = about | _table(rule.schema)
    required = [each.name for each in attrs.fields(schema) if each.default is attrs.NOTHING]
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **({"required": required} if required else {}),
        **({"allOf": CONTRADICTIONS[schema]} if schema in CONTRADICTIONS else {}),
    }


def _default(attribute: attrs.Attribute[Any]) -> Schema:
    default = attribute.default
    if default is attrs.NOTHING or default in (None, ()):
        return {}
    if attribute.name.endswith("size") and isinstance(default, int):
        return {"default": format_size(default)}
    return {"default": str(default) if isinstance(default, PurePosixPath) else default}


def _with_variables(value: Mapping[str, Any]) -> Schema:
    """Return the schema *value*, in which a string may also consist of variables."""
    match value:
        case {"anyOf": [*choices]}:
            return {"anyOf": [*choices, VARIABLE]}
        case {"type": "array", "items": items}:
            return {**value, "items": _with_variables(items)}
        case {"type": "object", "properties": properties}:
            return {**value, "properties": {name: _with_variables(each) for name, each in properties.items()}}
        case {"type": "string"} | {"enum": _}:
            return {"anyOf": [dict(value), VARIABLE]}
    return dict(value)


# -- contradictions ----------------------------------------------------------------------------------------------------


def _not(name: str, value: object) -> Schema:
    """Return a schema for tables whose key *name* does not have this *value*."""
    return {"not": given(**{name: value})}


def _in(name: str, *words: str) -> Schema:
    """Return a schema for tables whose key *name*, if present, is one of *words*."""
    return {"properties": {name: _with_variables({"enum": [*words]})}}


def _needed(name: str, *words: str) -> Schema:
    """Return a schema for tables with the key *name*, whose value is one of *words*."""
    return {"required": [name], **_in(name, *words)}


def _network() -> Iterator[Schema]:
    for name, modes in NETWORK_KEYS.items():
        keys = given(**{name: True if name == "ipv6" else ...})
        yield implies(keys, _in("mode", *modes) if "private" in modes else _needed("mode", *modes))
    yield implies(given(subnet6=...), given(ipv6=True))
    yield implies(given(mode="descriptor"), {"required": ["fd"]})
    yield implies(given(mode="passt"), {"properties": {"queues": {"const": 1}}})


_FILLED = {"minItems": 1}
_BACKED = {"required": ["backing"], "properties": {"backing": _FILLED}}

CONTRADICTIONS: Mapping[type, list[Schema]] = {
    CpuSpec: [implies(given(cpus=...), _not("count", "all"))],
    MemorySpec: [
        implies(given(prealloc=False), {"not": {"required": ["hugepages"]}}),
        implies(given(prealloc=False), _not("lock", True)),
        implies(given(shared=False), {"not": {"required": ["hugepages"]}}),
    ],
    BootSpec: [{"dependencies": {"initrd": ["kernel"], "cmdline": ["kernel"], "firmware_vars": ["firmware"]}}],
    DiskSpec: [
        {"oneOf": [{"required": ["path"]}, {"required": ["fd"]}]},
        implies(given(ephemeral=True), {"allOf": [_not("read_only", True), _in("cache", "auto"), _in("aio", "auto")]}),
        implies(given(ephemeral_size=...), given(ephemeral=True)),
        implies(_BACKED, _needed("format", "qcow2")),
        implies(given(aio="native"), _in("cache", "auto", "none")),
        implies(given(detect_zeroes="unmap"), _not("discard", False)),
    ],
    NetworkSpec: [*_network()],
    DeviceSpec: [
        {"oneOf": [{"required": [each]} for each in ("address", "resource", "claim", "variable")]},
        {"dependencies": {"request": ["claim"], "count": {"not": {"required": ["address"]}}}},
    ],
    GuestSpec: [implies(given(ready="agent"), _not("agent", False))],
    CloudInitSpec: [
        implies(given(meta_data=...), {"properties": {"ssh_keys": {"maxItems": 0}, "hostname": False}}),
    ],
    InstanceSpec: [
        {
            "anyOf": [
                {"required": ["boot"], "properties": {"boot": {"required": ["kernel"]}}},
                {"required": ["boot"], "properties": {"boot": {"required": ["firmware"]}}},
                {"required": ["disk"], "properties": {"disk": _FILLED}},
            ]
        },
        implies(
            {
                "required": ["guest"],
                "properties": {"guest": {"required": ["ready"], "properties": {"ready": {"pattern": "^port:"}}}},
            },
            {"required": ["network"], "properties": {"network": {"contains": _in("mode", "private")}}},
        ),
        implies(
            {"required": ["memory"], "properties": {"memory": given(shared=False)}},
            {"properties": {"share": {"maxItems": 0}}},
        ),
        implies(
            {"required": ["memory"], "properties": {"memory": given(prealloc=False)}},
            {
                "properties": {
                    "device": {"maxItems": 0},
                    "cpu": _not("placement", "controller"),
                }
            },
        ),
    ],
}
"""The contradictions between keys of one table: ``contradictions()`` of these classes, and of :mod:`runner.plan.memory`."""
