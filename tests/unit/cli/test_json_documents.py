"""The JSON Schemas of what is printed and served: which there are, and that they refuse what is not so."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft7Validator  # type: ignore[import-untyped]

from runner.base.events import InstanceEvent
from runner.cli.json_documents import DOCUMENTS
from runner.cli.schema import NAMES
from runner.instance.control.method_table import METHODS
from tests.support.json_schemas import fitting, validator


def test_each_document_has_a_name() -> None:
    assert ("spec", *DOCUMENTS) == NAMES
    assert {each.result for each in METHODS.values()} <= {*DOCUMENTS}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_it_is_a_schema_without_loose_ends(name: str) -> None:
    schema = DOCUMENTS[name].schema()
    Draft7Validator.check_schema(schema)
    assert set(references(schema)) == {*schema["definitions"]}


def references(schema: Any) -> list[str]:
    values = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    found = [each for value in values for each in references(value)]
    named = schema.get("$ref") if isinstance(schema, dict) else None
    return found + ([named.rpartition("/")[2]] if isinstance(named, str) else [])


@pytest.mark.parametrize("name", sorted({*DOCUMENTS} - {"events"}))
def test_each_has_a_version(name: str) -> None:
    schema = DOCUMENTS[name].schema()
    assert "version" in schema["required"]
    assert schema["properties"]["version"].get("const", schema["properties"]["version"].get("enum")) in (1, [1], 2, [2])


def test_a_field_has_the_sentence_that_stands_below_it_in_the_code() -> None:
    properties = DOCUMENTS["status"].schema()["properties"]
    assert properties["not_ready"]["description"] == "The reason why it is not ready; empty if it is."
    inherited = DOCUMENTS["receipt"].schema()["properties"]
    assert inherited["guarantee_reason"]["description"] == "The reason why it is not `enforced`; empty if it is."


LINE = {"time": "2023-11-14T22:13:20.250000Z", "stream": "event", "event": "qemu_started", "level": "info"}
LINE |= {"logger": "runner", "message": "QEMU is up"}


@pytest.mark.parametrize(
    ("name", "document", "wrong"),
    [
        ("done", {"version": 1}, {"version": 2}),
        ("done", {"version": 1}, {"version": 1, "more": 0}),
        ("done", {"version": 1}, {}),
        ("refusal", {"version": 1, "problems": []}, {"version": 1, "problems": [{"path": "a"}]}),
        ("events", LINE | {"fields": {"pid": 7, "version": "10"}}, LINE | {"fields": {"pid": "7", "version": "10"}}),
        ("events", LINE | {"fields": {"pid": 7, "version": "10"}}, LINE | {"fields": {"pid": 7}}),
        ("events", LINE | {"fields": {"pid": 7, "version": "10"}}, LINE | {"event": "unheard_of", "fields": {}}),
        (
            "events",
            {"time": "", "stream": "console", "message": "", "lines": 3},
            {"time": "", "stream": "event", "message": ""},
        ),
    ],
)
def test_what_is_not_so_is_refused(name: str, document: Any, wrong: Any) -> None:
    assert fitting(name, document) == document
    assert [*validator(name).iter_errors(wrong)]


def test_every_event_with_fields_says_their_types() -> None:
    fields = {
        each["if"]["properties"]["event"]["const"]: each["then"] for each in DOCUMENTS["events"].schema()["allOf"][1:]
    }
    assert fields[InstanceEvent.QEMU_STARTED.key]["properties"]["fields"]["required"] == ["pid", "version"]
