"""The reference of the events in Markdown, made from their names: ``examples/EVENTS.md`` is this text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from runner.base.events import BOTH, CONTROLLER, INSTANCE, OTHER, OUTPUT_DROPPED, WHOLE_SENTENCES

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
    of_controller = {logger: event for logger, event in WHOLE_SENTENCES.items() if ".controller." in logger}
    of_instance = {logger: event for logger, event in WHOLE_SENTENCES.items() if logger not in of_controller}
    for title, events, sentences in (
        ("An instance", INSTANCE, of_instance),
        ("The controller", CONTROLLER, of_controller),
        ("Both", BOTH, {}),
    ):
        yield from ("", f"## {title}", "", "| event | message |", "|---|---|")
        yield from (f"| `{name}` | {_shown(template)} |" for template, name in events.items())
        yield from (f"| `{name}` | {meaning} |" for name, meaning in sentences.values())
    yield f"| `{OUTPUT_DROPPED}` | `output was dropped: the reader was too slow bytes=…` |"
    yield f"| `{OTHER}` | what a library logs |"


def _shown(template: str) -> str:
    """Return the message of *template*; a conversion that follows a word is one for messages that were left out."""
    if template == "placement: %s":
        return "`placement`, with `threads=…`: the table as a list of objects"
    return f"`{re.sub(r'%[.0-9]*[a-z]s?', '…', re.sub(r'(?<=[a-z])%s', '', template))}`"
