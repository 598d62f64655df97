"""Every message that the programs log is an event of the table, and every event of the table is logged."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import runner.base.errors
from runner.base.events import MORE, OTHER, ControllerEvent, Event, InstanceEvent, SharedEvent, events_of

PACKAGE = Path(runner.base.errors.__file__).parents[1]
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
TABLES = {cls.__name__: cls for cls in (InstanceEvent, ControllerEvent, SharedEvent)}
EVENTS = [event for table in TABLES.values() for event in events_of(table)]


def messages(text: str) -> Iterator[tuple[Event, int | None]]:
    """Yield each event that the module *text* logs, and the number of its arguments, ``None`` if that is not seen."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "logging"), attr=level)) if level in LEVELS:
                message, *arguments = node.args[1 if level == "log" else 0 :]
                starred = any(isinstance(each, ast.Starred) for each in arguments)
                for event in events(message):
                    yield event, None if starred else len(arguments)
            case ast.Call(func=ast.Attribute(attr="log"), args=[ast.Attribute() | ast.Name(), message, *arguments]):
                for event in events(message):  # by a rate limit, which adds one
                    assert MORE.search(event.words), event.key
                    yield event, len(arguments) + 1


def events(node: ast.expr) -> Iterator[Event]:
    match node:
        case ast.Attribute(value=ast.Name(id=table), attr=name) if table in TABLES:
            yield getattr(TABLES[table], name)
        case ast.IfExp():
            yield from events(node.body)
            yield from events(node.orelse)
        case _:
            raise AssertionError(f"{ast.unparse(node)} is no event of runner/base/events.py")


def test_every_message_is_an_event_with_its_arguments_and_every_event_is_logged() -> None:
    logged: set[Event] = {SharedEvent.OUTPUT_DROPPED}  # by no logger: it stands where the reader has missed output
    for path in sorted(PACKAGE.rglob("*.py")):
        for event, arguments in messages(path.read_text()):
            logged.add(event)
            assert arguments in {None, len(re.findall("%[^%]", str(event)))}, f"{path}: {event.key}"
            assert event in events_of(SharedEvent) or (event in events_of(ControllerEvent)) == (
                "controller" in path.relative_to(PACKAGE).parts
            ), f"{path}: {event.key}"
    assert set(EVENTS) - logged == set()


def test_a_name_belongs_to_one_event() -> None:
    keys = Counter([OTHER, *(event.key for event in EVENTS)])
    assert [key for key, count in keys.items() if count > 1 or re.fullmatch(r"[a-z]+(_[a-z]+)*", key) is None] == []


def test_each_field_is_one_word_with_one_value() -> None:
    fields = {field for event in EVENTS for field in event.fields.split()}
    assert [field for field in fields if re.fullmatch(r"[a-z_]+=%[.0-9]*[a-z]{1,3}", field) is None] == []
    assert [event for event in EVENTS if re.search(r" \w+=\S+$", event.words)] == []
