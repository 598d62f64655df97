"""Every message that the programs log has a name, and every name is a message's."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import runner.base.errors
from runner.base.events import BOTH, CONTROLLER, INSTANCE, OTHER, OUTPUT_DROPPED, WHOLE_SENTENCES

PACKAGE = Path(runner.base.errors.__file__).parents[1]
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def messages(text: str) -> Iterator[str]:
    """Yield the template of each message that the module *text* logs."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "logging"), attr=level)) if level in LEVELS:
                yield from templates(node.args[1 if level == "log" else 0])


def templates(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.IfExp():
            yield from templates(node.body)
            yield from templates(node.orelse)
        case _:
            raise AssertionError(f"no name can be given to {ast.unparse(node)}: log a constant template")


def logger_of(path: Path, text: str) -> str:
    if 'getLogger("runner")' in text:
        return "runner"
    return ".".join(("runner", *path.relative_to(PACKAGE).with_suffix("").parts))


def test_every_message_has_a_name_and_every_name_a_message() -> None:
    logged: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        for template in messages(text):
            logged.setdefault(template, set()).add(logger_of(path, text))
    assert logged.pop("%s") == set(WHOLE_SENTENCES)
    named = {**INSTANCE, **CONTROLLER, **BOTH}
    assert {"without a name": logged.keys() - named.keys(), "never logged": named.keys() - logged.keys()} == {
        "without a name": set(),
        "never logged": set(),
    }
    for template, loggers in logged.items():
        by_controller = {name.startswith("runner.controller.") for name in loggers}
        assert template in BOTH or by_controller == {template in CONTROLLER}, template


def test_a_name_belongs_to_one_message() -> None:
    names = [*INSTANCE.values(), *CONTROLLER.values(), *BOTH.values(), *(name for name, _ in WHOLE_SENTENCES.values())]
    assert [name for name, count in Counter([*names, OTHER, OUTPUT_DROPPED]).items() if count > 1] == []
    assert [name for name in names if re.fullmatch(r"[a-z]+(_[a-z]+)*", name) is None] == []
