"""The reference of the spec in Markdown, generated from its schema: ``examples/SPEC.md``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from textwrap import fill

from runner.spec.reference import reference, tables_of_reference

MOST_OF_A_CELL = 200
"""Characters of a table's cell; a longer text is put below the table."""

INTRODUCTION = """\
# Every key of a spec

A spec is TOML for people and JSON of the same shape for machines. A key that is not given has its default; unknown keys
are errors. `required` stands for a key without which its table is an error, `-` for one that is not set by default. A
meaning that ends in `…` stands whole below its table.

This file is generated: `instance-runner manual instance-runner-spec.md > examples/SPEC.md` writes it from the schema in
`runner/spec/instance.py`.
[README.md](README.md) explains the keys by topic, with examples.
"""


def spec_markdown() -> str:
    """Return a document with one section for each table of a spec, and one row for each of its keys."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield INTRODUCTION.rstrip("\n")
    purposes = tables_of_reference()
    for table, keys in groupby(reference(), lambda key: key[0].rpartition(".")[0]):
        written = f"[[{table.removesuffix('[]')}]]" if table.endswith("[]") else f"[{table}]"
        yield from ("", f"## `{written}`", "", f"{_capitalized(purposes[table])}.", "")
        yield from ("| key | takes | default | meaning |", "|---|---|---|---|")
        long: list[str] = []
        for name, allowed, default, meaning in keys:
            shown = default if default in {"-", "required"} else f"`{default}`"
            yield f"| `{name}` | {allowed} | {shown} | {_in_a_cell(meaning)} |"
            if len(meaning) > MOST_OF_A_CELL:
                long.append(f"`{name}`: {meaning}.")
        for paragraph in long:
            yield from ("", fill(paragraph, 120, break_long_words=False, break_on_hyphens=False))


def _in_a_cell(meaning: str) -> str:
    """Return *meaning*, or its first part if the whole text is put below the table."""
    if len(meaning) <= MOST_OF_A_CELL:
        return meaning
    first = re.split("[:;,.] ", meaning, maxsplit=1)[0]
    return "see below" if first.startswith("`") else f"{first} …"


def _capitalized(text: str) -> str:
    return text if text.startswith("vCPU") else f"{text[0].upper()}{text[1:]}"
