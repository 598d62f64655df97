"""What our programs print or serve is what its JSON Schema says, no field missing and none more."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from jsonschema import Draft7Validator  # type: ignore[import-untyped]

from runner.cli.json_documents import DOCUMENTS
from runner.instance.control.method_table import METHODS


@cache
def validator(name: str) -> Draft7Validator:
    """Return what finds the errors of a document of the kind *name*; a field that the schema does not name is one."""
    return Draft7Validator(closed(json.loads(json.dumps(DOCUMENTS[name].schema()))))


def closed(schema: Any) -> Any:
    """Return *schema*, in which no object takes other fields than are named."""
    if isinstance(schema, list):
        return [*map(closed, schema)]
    if not isinstance(schema, dict):
        return schema
    more = {"additionalProperties": False} if schema.get("type") == "object" and "properties" in schema else {}
    return more | {key: closed(each) for key, each in schema.items()}


def fitting(name: str, document: Any) -> Any:
    """Return *document*, which is one of the kind *name*, as a program reads it."""
    read = json.loads(json.dumps(document))
    errors = [f"{error.json_path}: {error.message}" for error in validator(name).iter_errors(read)]
    assert errors == [], errors
    return read


def fitting_answer(method: str, answer: Any) -> Any:
    """Return *answer*, which is one to *method* of the control socket."""
    return fitting(METHODS[method].result, answer)
