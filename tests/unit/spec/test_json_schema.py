"""The JSON Schema and the parser agree, as far as a schema can express what the parser checks."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator  # type: ignore[import-untyped]

from runner.base.errors import SpecError
from runner.plan.spec_checks import document_problems
from runner.spec.instance import parse_instance
from runner.spec.json_schema import spec_schema
from runner.spec.reference import reference
from tests.unit.spec.test_instance_spec import FULL, KERNEL, MISTAKES

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads(json.dumps(spec_schema()))
VALIDATOR = Draft7Validator(SCHEMA)
BEYOND = (
    "cpu.cpus: range",
    "guest.ready: found a regular expression of",
    'guest.ready: found the string "(a"',
    "cpu.cpus: '1-2' are 2",
    'memory.size: found the string "8MiB"',
    'memory.size: found the string "33000KiB"',
    "share[1].tag: 't' is taken",
    "disk[1].path: '/d' is given twice",
    'network[0].subnet: found the string "10.0.0.1/24"',
    *(f'network[0].subnet: found the string "{each}' for each in ("0.0.0.0", "127.", "224.", "240.")),
    "network[0].subnet6: found",
    "network[0].ports: gives 2",
    "network[1].",
    'boot.kernel: found the string "${HOME}/k"',
    "cannot parse the document: it has more than 1MiB",
)
"""Beginnings of messages for what no JSON Schema expresses: arithmetic, comparisons of several tables, variables."""


def table_of(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return None


def errors(document: object) -> list[str]:
    return [f"{list(error.path)}: {error.message}" for error in VALIDATOR.iter_errors(document)]


def test_it_is_a_schema_with_every_key() -> None:
    Draft7Validator.check_schema(SCHEMA)
    for name, *_, meaning in reference():
        table, _, key = name.partition(".")
        properties = SCHEMA["properties"][table.removesuffix("[]")]
        assert properties.get("items", properties)["properties"][key]["description"] == meaning


SPECS = [*sorted((ROOT / "examples").rglob("*.toml")), *sorted((ROOT / "images").rglob("*.toml"))]


@pytest.mark.parametrize("path", SPECS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_example_is_accepted(path: Path) -> None:
    assert errors(tomllib.loads(path.read_text())) == []


def test_every_spec_of_the_documents_is_accepted() -> None:
    found = [
        spec
        for path in ROOT.rglob("*.md")
        if ".venv" not in path.parts
        for spec in re.findall(r"```toml\n(.*?)```", path.read_text(), re.DOTALL)
    ]
    assert len(found) > 5
    assert [errors(tomllib.loads(spec)) for spec in found] == [[]] * len(found)


def test_every_key_can_be_given() -> None:
    assert errors(tomllib.loads(FULL)) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [mistake for mistake in MISTAKES if "cannot parse" not in mistake[1] and "YAML" not in mistake[1]],
)
def test_a_mistake_is_refused_unless_no_schema_can_express_it(text: str, message: str) -> None:
    document = table_of(text)
    assert document is not None
    assert bool(errors(document)) != message.startswith(BEYOND), errors(document)


@pytest.mark.parametrize(
    "text",
    [
        '[memory]\nprealloc = false\nhugepages = "2MiB"\n',
        "[memory]\nprealloc = false\nlock = true\n",
        '[memory]\nprealloc = false\n[cpu]\nplacement = "controller"\n',
        '[memory]\nprealloc = false\n[[device]]\naddress = "0000:41:00.0"\n',
        '[memory]\nshared = false\nhugepages = "2MiB"\n',
        '[memory]\nshared = false\n[[share]]\ntag = "t"\npath = "/srv"\n',
    ],
)
def test_what_a_plan_refuses_on_every_host_is_refused(text: str) -> None:
    assert document_problems(parse_instance("spec.toml", (KERNEL + text).encode()))
    assert errors(tomllib.loads(KERNEL + text))


@pytest.mark.parametrize(
    "text",
    [
        "[[device]]\n",
        '[[device]]\naddress = "0000:41:00.0"\nresource = "a/b"\n',
        '[[device]]\naddress = "0000:41:00.0"\ncount = 1\n',
        '[[device]]\nresource = "a/b"\nclaim = "a"\n',
        '[[device]]\nvariable = "A"\nrequest = "a"\n',
        '[[device]]\nresource = "a/b"\nproperties = { x-no-mmap = 1 }\n',
        '[[network]]\nmode = "descriptor"\n',
        '[[network]]\nmode = "passt"\nqueues = 2\n',
        '[[network]]\nsubnet6 = "fd00::/64"\n',
        '[[network]]\nmode = "passt"\nipv6 = true\n',
        '[cloud_init]\nmeta_data = "a: b"\nhostname = "a"\n',
        '[cloud_init]\nmeta_data = "a: b"\nssh_keys = ["a"]\n',
        '[boot]\nfirmware_vars = "/v"\n[[disk]]\npath = "/d"\n',
        '[environment]\nallow = ["${A}"]\n',
    ],
)
def test_other_contradictions_are_refused_by_both(text: str) -> None:
    text = text if "[boot]" in text else KERNEL + text
    with pytest.raises(SpecError):
        parse_instance("spec.toml", text.encode(), {"A": "a"})
    assert errors(tomllib.loads(text))


def test_strings_may_come_from_variables() -> None:
    text = """
[environment]
allow = ["KEY", "DIR", "FORMAT"]
[cpu]
accel = "${KEY}"
[[disk]]
path = "${DIR}/disk"
backing = ["${DIR}"]
format = "${FORMAT}"
"""
    assert errors(tomllib.loads(text)) == []
    assert errors(tomllib.loads(text.replace("[cpu]", '[cpu]\ncount = "${KEY}"'))) == []  # it may be "all"
    assert errors(tomllib.loads(text.replace("[cpu]", "[cpu]\nsweep = '${KEY}'")))


def candidates(table: str, key: str, schema: dict[str, Any]) -> list[Any]:
    """Return values that are probably right: the words and booleans of *schema*, and those in the full example."""
    tables = tomllib.loads(FULL)[table]
    found = [each[key] for each in (tables if isinstance(tables, list) else [tables]) if key in each]
    words = [word for choice in (schema, *schema.get("anyOf", ())) for word in choice.get("enum", ())]
    booleans = [False, True] if schema.get("type") == "boolean" else []
    return [*found, *words, *booleans, *([schema["default"]] if "default" in schema else [])]


TABLES = {
    name: st.fixed_dictionaries(
        {},
        optional={
            key: st.sampled_from(values)
            for key, of_key in schema.get("items", schema)["properties"].items()
            if (values := candidates(name, key, of_key))
        },
    )
    for name, schema in SCHEMA["properties"].items()
    if name != "environment"
}
DOCUMENTS = st.fixed_dictionaries(
    {"boot": st.just({"kernel": "/k"})},
    optional={
        name: st.lists(table, max_size=2) if SCHEMA["properties"][name]["type"] == "array" else table
        for name, table in TABLES.items()
        if name != "boot"
    },
)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much], max_examples=300)
@given(DOCUMENTS)
def test_what_the_parser_accepts_the_schema_accepts(document: dict[str, Any]) -> None:
    try:
        spec = parse_instance("spec.json", json.dumps(document).encode())
    except SpecError:
        return
    if not document_problems(spec):
        assert errors(document) == []
