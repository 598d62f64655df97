"""The text of a document, TOML or JSON, as tables, lists and values; none of them is judged yet."""

from __future__ import annotations

import re
import tomllib
from typing import NoReturn

from runner.base.errors import Problem, SpecError
from runner.spec.rules import MIB, format_size, found

LARGEST_DOCUMENT = MIB
"""Bytes; the largest content of a ConfigMap (``MaxSecretSize`` in ``pkg/apis/core/validation``)."""
DEEPEST = 16
"""Levels of tables and arrays in a document; a spec has five."""
MOST_ENTRIES, MOST_OF_ALL = 1024, 16 * 1024
"""Entries of one table or array in a document, and of all. Checks compare entries with each other: 30,000 disks took a minute, and QEMU
supports some hundreds at most. The nearest known key takes 0.1 ms for each unknown one: 120,000 took 12 s."""

_TOML_STRING = (
    r'"{3}(?:\\.|[^\\])*?(?:"{3,5}|\\?\Z)'
    r"|'{3}.*?(?:'{3,5}|\Z)"
    r'|"(?:\\.|[^"\\\n])*+"?'
    r"|'[^'\n]*+'?|#[^\n]*"
)
"""A string or a comment of TOML, in which dots are no separators. An unterminated one matches, too: the parser stops there, and otherwise
each quotation mark in it would cause another scan of the rest."""

_DEEP_KEY = r"(?<![\w-])(?:[\w-]++|\")(?:[ \t]*+\.[ \t]*+(?:[\w-]++|\")){%d}"
"""A key with that many dots, after strings were replaced by a quotation mark."""


def parse_document(source: str, data: bytes) -> dict[str, object]:
    """Parse *data* as JSON if *source* ends in ``.json`` or the text begins with a brace, else as TOML.

    Raises :exc:`~runner.base.errors.SpecError` with line and column.
    """
    if len(data) > LARGEST_DOCUMENT:
        _refuse(source, f"cannot parse the document: it has more than {format_size(LARGEST_DOCUMENT)}")
    content = _decoded(source, data)
    is_json = source.endswith(".json") or content.lstrip().startswith("{")
    document: dict[str, object] = {}
    try:
        too_deep = not is_json and _has_deep_key(content)
        if not too_deep:
            document = _parse_json(source, content) if is_json else _parse_toml(source, content)
            too_deep = _is_deeper(source, document)
    except RecursionError:
        too_deep = True
    if too_deep:
        _refuse(source, f"cannot parse the document: it has more than {DEEPEST} levels of tables and arrays")
    return document


def _refuse(source: str, message: str, remedy: str = "") -> NoReturn:
    raise SpecError(source, [Problem("", message, remedy)]) from None


def _decoded(source: str, data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        _refuse(source, "cannot decode the document: it is UTF-16", "save it as UTF-8")
    if data.startswith(b"\xef\xbb\xbf"):
        _refuse(source, "cannot parse the document: it begins with a byte-order mark", "save it as UTF-8 without one")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(source, f"cannot decode the document: it is not UTF-8 at byte {error.start}")


def _has_deep_key(content: str) -> bool:
    """Tell whether the TOML *content* has a dotted key of too many levels.

    Checked before parsing: for a key of n parts :mod:`tomllib` takes memory in n² (1.6 GB for 40 KB).
    """
    bare = re.sub(_TOML_STRING, lambda match: "" if match[0].startswith("#") else '"', content, flags=re.DOTALL)
    return re.search(_DEEP_KEY % DEEPEST, bare, re.ASCII) is not None


def _is_deeper(source: str, document: object) -> bool:
    """Tell whether *document* has more than :data:`DEEPEST` levels; refuse it if it has too many entries."""
    level, entries = [document], 0
    for _ in range(DEEPEST):
        if any(len(value) > MOST_ENTRIES for value in level if isinstance(value, dict | list)):
            _refuse(
                source, f"cannot parse the document: a table or an array in it has more than {MOST_ENTRIES} entries"
            )
        level = [
            each
            for value in level
            if isinstance(value, dict | list)
            for each in (value.values() if isinstance(value, dict) else value)
        ]
        entries += len(level)
    if entries > MOST_OF_ALL:
        _refuse(source, f"cannot parse the document: it has more than {MOST_OF_ALL} entries in all")
    return any(isinstance(value, dict | list) for value in level)


def _parse_toml(source: str, content: str) -> dict[str, object]:
    try:
        return tomllib.loads(content)
    except ValueError as error:  # TOMLDecodeError, or an integer of thousands of digits
        first = next((line for line in content.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
        if not re.match(r"---|[\w.\"'/-]+:(\s|$)", first):
            _refuse(source, f"cannot parse the document as TOML: {_toml_mistake(str(error))}")
    if re.search(r"^apiVersion:", content, re.MULTILINE):
        reason, remedy = "it is a manifest of Kubernetes", "name a spec, or give the manifest to plan --node by --pod"
    else:
        reason, remedy = f"{first[:40]!r} is YAML", "write TOML, such as [cpu] and below it count = 4, or JSON"
    _refuse(source, f"cannot parse the document as TOML: {reason}", remedy)


def _toml_mistake(sentence: str) -> str:
    """Return the *sentence* of :mod:`tomllib`, with the two most frequent mistakes in terms of TOML instead of its parser."""
    declared = re.match(r"Cannot declare \((.*?),?\) twice", sentence)
    if declared is not None:
        table = ".".join(re.findall(r"'([^']*)'", declared[1]))
        return f"the table [{table}] is given twice{sentence[declared.end() :]}"
    return sentence.replace("Cannot overwrite a value", "a key is given twice")


def _parse_json(source: str, content: str) -> dict[str, object]:
    from runner.base.strict_json import parse_json  # here, because most documents are TOML

    try:
        document = parse_json(content)
    except ValueError as error:
        _refuse(source, f"cannot parse the document as JSON: {error}")
    if not isinstance(document, dict):
        _refuse(source, f"the document must be a table, found {found(document)}")
    return document
