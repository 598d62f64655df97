"""JSON Schemas (draft 7) of what the commands print and instances write, made from the types of the values.

A TypedDict, a named tuple or an attrs class is an object, ``Annotated[str, X]`` what is written of an X. The docstring of a class and the
strings below its fields are the descriptions. Fields that a later version adds are accepted, as a program should.
"""

from __future__ import annotations

import ast
import enum
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Callable, Mapping
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
from runner.base.events import OTHER, ControllerEvent, Event, InstanceEvent, SharedEvent, events_of
from runner.base.judgement import Judgement
from runner.base.subject import FORMAT
from runner.base.values import frozen
from runner.check.documents import CheckDocument
from runner.cli.documents import DocumentsDocument
from runner.cli.refusal import RefusalDocument
from runner.controller.documents import InstancesDocument, NodeStatusDocument
from runner.inspect.documents import InspectDocument, TraceDocument
from runner.instance.control.methods import PROTOCOL
from runner.instance.documents import (
    DiskDocument,
    DisksAnswer,
    EndDocument,
    NothingAnswer,
    QemuCheckAnswer,
    QemuUpdateAnswer,
    RunnerAnswer,
    StatusDocument,
    VcpusAnswer,
)
from runner.node_plan.report.documents import NodeDocument
from runner.placement.backends import Placement
from runner.placement.documents import PlacedThreadDocument, ReceiptDocument
from runner.plan.instance import InstancePlan
from runner.plan.machine import MachinePlan
from runner.spec.json_schema import Schema

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
"""A reference to another object of Python, and code, as docstrings have them."""


class SchemaBuilder:
    """Makes schemas of types; a class that it has met is a definition."""

    def __init__(self) -> None:
        self.definitions: dict[str, Schema] = {}

    def of(self, kind: Any) -> Schema:
        """Return the schema of values of *kind*, as they are written."""
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
                "description": _plain(kind.__doc__ or ""),
                "properties": {field: _described(each, meanings.get(field, "")) for field, each in properties.items()},
                "required": [field for field, hint in hints.items() if get_origin(hint) is not NotRequired],
            }
        return {"$ref": f"#/definitions/{name}"}


def _described(schema: Schema, meaning: str) -> Schema:
    if not meaning:
        return schema
    return {"description": meaning, **({"allOf": [schema]} if "$ref" in schema else schema)}


def _imported_for_types(kind: type) -> dict[str, Any]:
    """Return what the module of *kind* imports for its types alone, by name."""
    found = dict[str, Any]()
    for block in ast.parse(inspect.getsource(sys.modules[kind.__module__])).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for each in block.body:
                if isinstance(each, ast.ImportFrom) and each.module is not None:
                    module = import_module(each.module)
                    found |= {alias.name: getattr(module, alias.name) for alias in each.names}
    return found


def _meanings(kind: type) -> dict[str, str]:
    """Return the strings that stand below the fields of *kind*, and of the types that it extends."""
    found = dict[str, str]()
    if kind.__doc__ is None:
        return found  # it has no body
    module = sys.modules[kind.__module__]
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)  # noqa: S101 - the source of a class
    for base in definition.bases:  # a TypedDict does not know those that it extends
        extended = getattr(module, base.id, None) if isinstance(base, ast.Name) else None
        if isinstance(extended, type) and extended.__module__.startswith("runner."):
            found |= _meanings(extended)
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            found[field.target.id] = _plain(ast.literal_eval(below.value))
    return found


def _plain(docstring: str) -> str:
    return " ".join(_ROLES.sub(lambda match: match[1] or f"`{match[2]}`", docstring).split())


# -- the documents -----------------------------------------------------------------------------------------------------


def _answer(kind: type) -> Callable[[SchemaBuilder], Schema]:
    """Return what makes the schema of *kind* with the number of the control socket's protocol."""

    def make(builder: SchemaBuilder) -> Schema:
        builder.of(kind)
        schema = builder.definitions.pop(kind.__name__)
        properties = {"version": {"description": "of the protocol", "const": PROTOCOL}, **schema["properties"]}
        return {**schema, "properties": properties, "required": ["version", *schema["required"]]}

    return make


def _document(kind: type) -> Callable[[SchemaBuilder], Schema]:
    """Return what makes the schema of *kind*."""

    def make(builder: SchemaBuilder) -> Schema:
        builder.of(kind)
        return builder.definitions.pop(kind.__name__)

    return make


def _plan(builder: SchemaBuilder) -> Schema:
    """Return the schema of :func:`~runner.plan.render.plan_json`, which arranges the fields of a plan."""
    plan, machine = _document(InstancePlan)(builder), builder.definitions[MachinePlan.__name__]
    for name in ("networks", "shares"):
        plan["properties"][name] = machine["properties"].pop(name)
        machine["required"].remove(name)
    for each in get_args(Placement):
        placement = builder.definitions[each.__name__]
        placement["properties"] |= {"backend": {"enum": [each.backend]}, "shared": {"type": "boolean"}}
        placement["required"] = sorted({*placement["required"], "backend", "shared"})
    del plan["properties"]["remarks"]
    plan["properties"] = {
        "version": {"const": FORMAT},
        **plan["properties"],
        "judgements": {"type": "array", "items": builder.of(Judgement)},
    }
    plan["required"] = [*plan["properties"]]
    return plan


def _events(builder: SchemaBuilder) -> Schema:
    """Return the schema of a line of a log in JSON: an event with the fields that the tables of events name, or the guest's output."""
    known = [event for table in (InstanceEvent, ControllerEvent, SharedEvent) for event in events_of(table)]
    threads = {"type": "array", "items": builder.of(PlacedThreadDocument)}
    fields = {event.key: _fields(event) for event in known if event.fields}
    fields[InstanceEvent.THREADS_PLACED.key] = {"threads": threads}
    of_event = {"event": {"enum": [*(event.key for event in known), OTHER]}, "level": {"type": "string"}}
    return {
        "type": "object",
        "description": "A line of the log of a runner, or of a controller, with `--log-format json`.",
        "properties": {
            "time": {"type": "string", "format": "date-time"},
            "stream": {"enum": ["event", "console"]},
            "message": {"type": "string"},
            "lines": {"description": "As many empty lines of the console in a row.", "type": "integer"},
            **of_event,
            "logger": {"type": "string"},
            "fields": {"type": "object"},
        },
        "required": ["time", "stream", "message"],
        "allOf": [
            _if("stream", "event", {"required": [*of_event, "logger", "fields"]}),
            *(
                _if("event", key, {"properties": {"fields": {"properties": values, "required": [*values]}}})
                for key, values in fields.items()
            ),
        ],
    }


def _if(name: str, value: str, then: Schema) -> Schema:
    return {"if": {"properties": {name: {"const": value}}, "required": [name]}, "then": then}


def _fields(event: Event) -> Schema:
    pairs = (field.partition("=") for field in event.fields.split())
    return {name: {"type": "number" if conversion == "%d" else "string"} for name, _, conversion in pairs}


@frozen
class JsonDocument:
    """A kind of JSON: *where* it comes from, and what makes its schema."""

    where: str
    make: Callable[[SchemaBuilder], Schema]

    def schema(self) -> Schema:
        """Return its JSON Schema."""
        builder = SchemaBuilder()
        schema = self.make(builder)
        head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": f"Instance Runner: {self.where}"}
        return {**head, **schema, "definitions": builder.definitions}


DOCUMENTS = {
    "plan": JsonDocument("`plan`", _plan),
    "node": JsonDocument("`plan --node`", _document(NodeDocument)),
    "documents": JsonDocument("`plan --document-only`", _document(DocumentsDocument)),
    "check": JsonDocument("`check`", _document(CheckDocument)),
    "inspect": JsonDocument("`inspect`", _document(InspectDocument)),
    "trace": JsonDocument("`inspect --trace 10`", _document(TraceDocument)),
    "refusal": JsonDocument("each command with `--json` that could not do its work", _document(RefusalDocument)),
    "status": JsonDocument("`ctl status`", _answer(StatusDocument)),
    "disks": JsonDocument("`ctl disk list`", _answer(DisksAnswer)),
    "disk": JsonDocument("`ctl disk attach`, `ctl disk grow`", _answer(DiskDocument)),
    "vcpus": JsonDocument("`ctl cpus`", _answer(VcpusAnswer)),
    "renewal": JsonDocument("`ctl upgrade`", _answer(RunnerAnswer)),
    "qemu-check": JsonDocument("`ctl qemu-update --check`", _answer(QemuCheckAnswer)),
    "qemu-update": JsonDocument("`ctl qemu-update`", _answer(QemuUpdateAnswer)),
    "done": JsonDocument("`ctl disk detach`", _answer(NothingAnswer)),
    "instances": JsonDocument("`listInstances` of the controller's socket", _document(InstancesDocument)),
    "controller": JsonDocument("`getStatus` of the controller's socket", _document(NodeStatusDocument)),
    "receipt": JsonDocument("the file `receipt.json`", _document(ReceiptDocument)),
    "end": JsonDocument("the termination log", _document(EndDocument)),
    "events": JsonDocument("each line of `run --log-format json`, and of the controller's", _events),
}
"""Name → the document."""
