"""The reference of the events in Markdown, generated from their table: ``examples/EVENTS.md``."""

from __future__ import annotations

import re
from collections.abc import Iterator

from runner.base.events import MORE, OTHER, ControllerEvent, Event, InstanceEvent, SharedEvent, events_of

INTRODUCTION = """\
# Every event of the logs

With `--log-format json` each line of `instance-runner run` and of `instance-cgroup-controller` that is an event
(`"stream": "event"`) has its name in `event`. Names stay, words of messages may change: let programs read the name and
`fields`. `…` stands for what differs, `name=…` for a field of that name.

This file is generated: `instance-runner manual instance-runner-events.md > examples/EVENTS.md` writes it from
`runner/base/events.py`. [What the most important ones mean](kubernetes/operate.md#logs), and what to do.
"""


def events_markdown() -> str:
    """Return a document with one section for each program, and one row for each event."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield INTRODUCTION.rstrip("\n")
    for title, table in (("An instance", InstanceEvent), ("The controller", ControllerEvent), ("Both", SharedEvent)):
        yield from ("", f"## {title}", "", "| event | message |", "|---|---|")
        yield from (f"| `{event.key}` | {_shown(event)} |" for event in events_of(table))
    yield f"| `{OTHER}` | what a library logs |"


def _shown(event: Event) -> str:
    """Return the message of *event* without a note on omitted messages."""
    return event.meaning or f"`{re.sub(r'%[.0-9]*[a-z]s?', '…', MORE.sub('', str(event)))}`"
