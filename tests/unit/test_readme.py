"""The README is true: its tables are those of the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import runner.errors
from runner.check import cpu_owners, device_rights, host_reader, kernel_settings, programs
from runner.check.finding import Check, Level
from runner.errors import Status
from runner.instance import probes
from runner.instance.daemons import DEATHS
from runner.spec.instance import parse_instance, reference
from tests.unit.test_house import MAY_IMPORT

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_every_key_of_the_schema_is_in_the_reference_as_it_is() -> None:
    for name, allowed, default, meaning in reference():
        shown = default if default in {"-", "required"} else f"`{default}`"
        assert f"| `{name}` | {allowed} | {shown} | {meaning} |" in README
    assert len(re.findall(r"^\| `[a-z_]+(?:\[\])?\.[a-z0-9_]+` \|", README, re.MULTILINE)) == len(list(reference()))


def test_every_exit_status_is_in_the_table() -> None:
    for status in Status:
        assert f"| {status.value} | `{status.name.lower()}` |" in README


def test_every_check_is_named() -> None:
    checks = {
        value.name
        for module in (cpu_owners, device_rights, kernel_settings, host_reader, programs)
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
    table = README.partition("| child | when it dies |")[2].partition("\n\n")[0]
    children = " ".join(row.split("|")[1].lower() for row in table.splitlines()[2:])
    for role in DEATHS:
        assert role in re.findall(r"[a-z]+", children)


def test_every_room_is_in_the_table_of_rooms() -> None:
    table = README.partition("| room | what | may import |")[2].partition("\n\n")[0]
    rooms = {word for row in table.splitlines()[2:] for word in re.findall(r"\w+", row.split("|")[1])}
    assert MAY_IMPORT.keys() - {"errors", "cpuset"} <= rooms


def test_every_metric_of_an_instance_is_named() -> None:
    source = Path(probes.__file__).read_text()
    names = set(re.findall(r'add\(\s*"(?:vcpu_)?([a-z_]+)", "(?:gauge|counter)"', source)) - {"info"}
    assert len(names) > 10
    assert [name for name in sorted(names) if f"`{name}`" not in README] == []


def test_every_event_that_is_explained_is_one_of_ours() -> None:
    source = " ".join(path.read_text() for path in sorted(Path(runner.errors.__file__).parent.rglob("*.py")))
    table = README.partition("| event | it means | do |")[2].partition("\n\n")[0]
    events = re.findall(r"`([^`]+)`", "\n".join(row.split("|")[1] for row in table.splitlines()[2:]))
    assert len(events) > 10
    for event in events:
        words = max(re.split(r"…|'affinity'|\w+=|[:;]", event), key=len).strip()
        assert words in source, event


def test_the_example_specs_are_taken() -> None:
    specs = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    assert specs
    for spec in specs:
        assert tomllib.loads(spec)
        parse_instance("README.md", spec.encode(), {"POD_NAME": "web-1"})


def test_the_two_commands_exist() -> None:
    root = Path(__file__).parents[2]
    for command in re.findall(r"^# ((?:examples|tests)/[a-z/]+run)", README, re.MULTILINE):
        assert (root / command).is_file()
