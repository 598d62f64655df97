"""Log records as text and as JSON."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from runner.base.events import Event, InstanceEvent
from runner.protocol.logs import LONGEST, JsonConsole, LogTable, json_line, json_of_dropped, text_lines
from tests.support.json_schemas import fitting


class TriedEvent:
    """Events that no program logs."""

    DISKS_FAILED = Event("the disk %s has failed to %s%s; and so on", "pid=%d")
    READY = Event("ready", "frozen=%r")
    PERCENT = Event("%s is at 5%%")
    PERCENT_WITH_FIELD = Event("at 5%%", "pid=%d")
    NAME = Event("a", "name=%s")
    NAME_QUOTED = Event("a", "name=%r")


def record(message: str | Event, *arguments: object, level: int = logging.INFO) -> logging.LogRecord:
    made = logging.LogRecord("runner.x", level, "file", 1, message, arguments, None)
    made.created, made.msecs = 1_700_000_000.25, 250.0
    return made


def test_text_has_the_time_and_the_level() -> None:
    assert text_lines(record(TriedEvent.PERCENT_WITH_FIELD, 7)) == b"22:13:20.250 info    at 5% pid=7\n"


HOSTILE = [
    "\n22:13:20.250 info    the guest runs",
    "\r22:13:20.250 info    the guest runs",
    "\x1b]0;title\x07\x1b[2J",
    "\x9b2J",
    "\x0b\x0c\x1c\x1d\x1e\x85",
    "\u2028line\u2029paragraph",
    "\u202etxt.exe\u2066\u200f",
    "\x00\x7f\ufeff\u00ad",
    "\udcff",
]
"""What a guest or a pod may call itself, answer or print."""


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("message", ["%s", TriedEvent.NAME, TriedEvent.NAME_QUOTED, TriedEvent.DISKS_FAILED])
def test_words_of_others_forge_no_line_and_control_no_terminal(message: str | Event, text: str) -> None:
    template = str(message)
    made = record(message, *[text] * template.count("%s"), *[text] * template.count("%r"), *[7] * template.count("%d"))
    line = text_lines(made).decode()
    assert line.endswith("\n")
    assert line[:-1].isprintable()
    document = json.loads(json_line(made))
    for shown in (document["message"], *document["fields"].values()):
        assert isinstance(shown, int) or shown.isprintable()


def test_what_is_printable_stays_as_it_is() -> None:
    assert text_lines(record("%s", "größer als 3 … 東京 ✓")).decode().endswith(" größer als 3 … 東京 ✓\n")


def test_a_traceback_forges_no_line() -> None:
    for text in HOSTILE:
        made = record("this is a bug")
        try:
            raise KeyError from ValueError(text)  # noqa: TRY301
        except KeyError:
            made.exc_info = sys.exc_info()
        lines = text_lines(made).decode().split("\n")
        assert lines[-1] == ""
        assert all(line.isprintable() and line.startswith("22:13:20.250 info      ") for line in lines[1:-1])
        assert all(line.isprintable() for line in json.loads(json_line(made))["message"].split("\n"))


@pytest.mark.parametrize(
    ("made", "message", "fields"),
    [
        (record(InstanceEvent.QEMU_STARTED, 7, "10.0"), "QEMU is up", {"pid": 7, "version": "10.0"}),
        (record(InstanceEvent.CHILD_RESTARTING, "dnsmasq", "died", 0.5), "dnsmasq died; starting it again", {"pause": "0.5"}),
        (record(TriedEvent.READY, "why = it is"), "ready", {"frozen": "why = it is"}),
        (record(InstanceEvent.GUEST_STARTED), "the guest runs", {}),
        (record("%s", "what a child=7"), "what a child=7", {}),
        (record(TriedEvent.PERCENT, "it"), "it is at 5%", {}),
        (record(TriedEvent.PERCENT_WITH_FIELD, 3), "at 5%", {"pid": 3}),
        (record("two\nlines"), "two\\nlines", {}),
    ],
)  # fmt: skip
def test_json_has_one_object_with_the_fields_apart(
    made: logging.LogRecord, message: str, fields: dict[str, object]
) -> None:
    line = json_line(made)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250000Z",
        "stream": "event",
        "event": json.loads(line)["event"],
        "level": "info",
        "logger": "runner.x",
        "message": message,
        "fields": fields,
    }


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (record(InstanceEvent.GUEST_STARTED), "guest_started"),
        (record(InstanceEvent.CHILD_RESTARTING, "dnsmasq", "died", 0.5), "child_restarting"),
        (record("%s", "the guest runs"), "other"),
        (record(InstanceEvent.PLAN_REMARKED, "cpu.placement: 'affinity' is second best"), "plan_remarked"),
        (record("a library's"), "other"),
    ],
)
def test_json_has_the_events_name(made: logging.LogRecord, name: str) -> None:
    assert fitting("events", json.loads(json_line(made)))["event"] == name


def test_a_table_is_lines_in_text_and_data_in_json() -> None:
    rows: list[dict[str, object]] = [{"role": "vcpu", "vcpu": 0, "name": "CPU 0/KVM"}, {"role": "anchor"}]
    made = record(InstanceEvent.THREADS_PLACED, LogTable("threads", rows, ("ROLE", "vcpu 0  \x1b[2J")))
    assert text_lines(made) == (
        b"22:13:20.250 info    placement: ROLE\n22:13:20.250 info    placement: vcpu 0  \\x1b[2J\n"
    )
    found = json.loads(json_line(made))
    assert (found["event"], found["message"], found["fields"]) == ("threads_placed", "placement", {"threads": rows})


def test_a_traceback_is_part_of_the_message() -> None:
    made = record("this is a bug")
    try:
        raise KeyError("that")  # noqa: TRY301
    except KeyError:
        made.exc_info = sys.exc_info()
    assert "KeyError: 'that'" in json.loads(json_line(made))["message"]
    assert b"info      KeyError: 'that'" in text_lines(made)


class Output:
    """What was written, and what was dropped unformatted."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.dropping = False
        self.dropped = 0

    def write(self, data: bytes) -> None:
        assert not self.dropping
        self.lines.append(data)

    def drop(self, size: int) -> None:
        self.dropped += size


def test_console_output_is_lines_of_its_own_whatever_the_guest_writes() -> None:
    output = Output()
    lines = output.lines
    console = JsonConsole(output)
    forged = json_line(record("the guest is an admin"))
    console.write(b"Lin")
    console.write(b"ux\r\n" + forged + "grü".encode()[:-1])
    console.write("ü".encode()[-1:] + b"n \xff\x1b[0m\nlogin: ")
    found = [json.loads(line) for line in lines]
    assert all(line.count(b"\n") == 1 and line.isascii() for line in lines)
    assert {each["stream"] for each in found} == {"console"}
    assert [each["message"] for each in found] == ["Linux", forged.decode().rstrip(), "grün \ufffd\x1b[0m"]
    console.write(b"")
    assert json.loads(lines[-1])["message"] == "login: "
    console.write(b"x" * (2 * LONGEST + 3))
    console.write(b"")
    console.write(b"x" * (2 * LONGEST + 3) + b"\n\n")
    assert [len(json.loads(line)["message"]) for line in lines[4:]] == [LONGEST, LONGEST, 3, LONGEST, LONGEST, 3, 0]


def test_dropped_lines_are_reported_in_json_too() -> None:
    found = json.loads(json_of_dropped(7))
    assert (found["event"], found["fields"]) == ("output_dropped", {"bytes": 7})


def test_empty_lines_in_a_row_are_one_object() -> None:
    output = Output()
    console = JsonConsole(output)
    console.write(b"\n" * 250 + b"login:\n\r\n\r\n\n")
    console.write(b"\nx\n")
    found = [(each["message"], each.get("lines")) for each in map(json.loads, output.lines)]
    assert found == [("", 250), ("login:", None), ("", 3), ("", None), ("x", None)]


def test_records_that_would_be_dropped_are_not_formatted() -> None:
    output = Output()
    console = JsonConsole(output)
    console.write(b"be")
    output.dropping = True
    console.write(b"fore\nnow\n" * 100 + b"half")
    assert output.dropped == len(b"be" + b"fore\nnow\n" * 100 + b"half")
    output.dropping = False
    console.write(b" a line\n")
    assert [json.loads(line)["message"] for line in output.lines] == [" a line"]
