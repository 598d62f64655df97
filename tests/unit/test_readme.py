"""The README is true: its tables are those of the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from runner.check import cpus, devices, kernel, reading, servants
from runner.check.finding import Check, Level
from runner.errors import Status
from runner.instance.services import DEATHS
from runner.spec.instance import parse_instance, reference

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_every_key_of_the_schema_is_in_the_reference_as_it_is() -> None:
    for name, allowed, default, meaning in reference():
        shown = default if default in {"-", "required"} else f"`{default}`"
        assert f"| `{name}` | {allowed} | {shown} | {meaning} |" in README
    assert len(re.findall(r"^\| `[a-z_]+(?:\[\])?\.[a-z_]+` \|", README, re.MULTILINE)) == len(list(reference()))


def test_every_exit_status_is_in_the_table() -> None:
    for status in Status:
        assert f"| {status.value} | `{status.name.lower()}` |" in README


def test_every_check_is_named() -> None:
    checks = {
        value.name
        for module in (cpus, devices, kernel, reading, servants)
        for value in vars(module).values()
        if isinstance(value, Check)
    }
    tables = README.partition("### Is it fit?")[2].partition("\n### ")[0]
    where = tables.partition("| where | checks |")[2]
    named = {
        name
        for row in re.findall(r"^\| [^|]+ \| (`.*) \|$", where, re.MULTILINE)
        for name in re.findall(r"`([a-z-]+)`", row)
    }
    assert named == checks
    for level in Level:
        assert f"| `{level.value}` | " in tables


def test_every_child_is_in_the_table_of_deaths() -> None:
    for role in DEATHS:
        assert role in README.lower()


def test_the_example_specs_are_taken() -> None:
    specs = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    assert specs
    for spec in specs:
        assert tomllib.loads(spec)
        parse_instance("README.md", spec.encode())


def test_the_two_commands_exist() -> None:
    root = Path(__file__).parents[2]
    for command in re.findall(r"^# ((?:examples|tests)/[a-z/]+run)", README, re.MULTILINE):
        assert (root / command).is_file()
