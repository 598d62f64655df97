"""JSON Schemas (draft 7) of the JSON that commands print and instances write, generated from the types of the values."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from runner.base.events import OTHER, ControllerEvent, Event, InstanceEvent, SharedEvent, events_of
from runner.base.json_schema import DRAFT, Schema, SchemaBuilder, given, implies
from runner.base.judgement import Judgement
from runner.base.subject import FORMAT
from runner.base.values import frozen
from runner.check.checker import CheckDocument
from runner.cli.plan_document_only import DocumentsDocument
from runner.cli.refusal import RefusalDocument
from runner.controller.serve.methods_json import InstancesDocument, NodeStatusDocument
from runner.inspect.report_json import InspectDocument, TraceDocument
from runner.instance.control.method_table import PROTOCOL
from runner.instance.control_json import (
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
from runner.node_plan.report.node_json import NodeDocument
from runner.placement.backends import Placement
from runner.placement.receipt_json import PlacedThreadDocument, ReceiptDocument
from runner.plan.instance import InstancePlan
from runner.plan.machine import MachinePlan


def _answer(kind: type) -> Callable[[SchemaBuilder], Schema]:
    """Return the function that makes the schema of *kind* with the version of the control socket's protocol."""

    def make(builder: SchemaBuilder) -> Schema:
        schema = builder.taken(kind)
        properties = {"version": {"description": "of the protocol", "const": PROTOCOL}, **schema["properties"]}
        return {**schema, "properties": properties, "required": ["version", *schema["required"]]}

    return make


def _plan(builder: SchemaBuilder) -> Schema:
    """Return the schema of :func:`~runner.plan.render.plan_json`, which rearranges the fields of a plan."""
    plan, machine = builder.taken(InstancePlan), builder.definitions[MachinePlan.__name__]
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
    """Return the schema of a JSON log line: an event with the fields in the tables of events, or the guest's output."""
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
            implies(given(stream="event"), {"required": [*of_event, "logger", "fields"]}),
            *(
                implies(given(event=key), {"properties": {"fields": {"properties": values, "required": [*values]}}})
                for key, values in fields.items()
            ),
        ],
    }


def _fields(event: Event) -> Schema:
    pairs = (field.partition("=") for field in event.fields.split())
    return {name: {"type": "number" if conversion == "%d" else "string"} for name, _, conversion in pairs}


@frozen
class JsonDocument:
    """A kind of JSON: *where* it comes from, and the function that makes its schema."""

    where: str
    made_of: type | Callable[[SchemaBuilder], Schema]

    def schema(self) -> Schema:
        """Return its JSON Schema."""
        builder = SchemaBuilder()
        schema = builder.taken(self.made_of) if isinstance(self.made_of, type) else self.made_of(builder)
        head = {"$schema": DRAFT, "title": f"Instance Runner: {self.where}"}
        return {**head, **schema, "definitions": builder.definitions}


DOCUMENTS = {
    "plan": JsonDocument("`plan`", _plan),
    "node": JsonDocument("`plan --node`", NodeDocument),
    "documents": JsonDocument("`plan --document-only`", DocumentsDocument),
    "check": JsonDocument("`check`", CheckDocument),
    "inspect": JsonDocument("`inspect`", InspectDocument),
    "trace": JsonDocument("`inspect --trace 10`", TraceDocument),
    "refusal": JsonDocument("each command with `--json` that could not do its work", RefusalDocument),
    "status": JsonDocument("`ctl status`", _answer(StatusDocument)),
    "disks": JsonDocument("`ctl disk list`", _answer(DisksAnswer)),
    "disk": JsonDocument("`ctl disk attach`, `ctl disk grow`", _answer(DiskDocument)),
    "vcpus": JsonDocument("`ctl cpus`", _answer(VcpusAnswer)),
    "renewal": JsonDocument("`ctl upgrade`", _answer(RunnerAnswer)),
    "qemu-check": JsonDocument("`ctl qemu-update --check`", _answer(QemuCheckAnswer)),
    "qemu-update": JsonDocument("`ctl qemu-update`", _answer(QemuUpdateAnswer)),
    "done": JsonDocument("`ctl disk detach`", _answer(NothingAnswer)),
    "instances": JsonDocument("`listInstances` of the controller's socket", InstancesDocument),
    "controller": JsonDocument("`getStatus` of the controller's socket", NodeStatusDocument),
    "receipt": JsonDocument("the file `receipt.json`", ReceiptDocument),
    "end": JsonDocument("the termination log", EndDocument),
    "events": JsonDocument("each line of `run --log-format json`, and of the controller's", _events),
}
"""Name → the document."""
