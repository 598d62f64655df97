"""Rules for the keys of a TOML or JSON document, and the function that applies a schema of them.

A schema is an attrs class whose attributes are made by :func:`key`. Each key has a :class:`Rule`, which turns a plain
value into a checked one. :func:`structure` turns a table into an object of such a class and reports *all* problems, each
with its path, so that a user can fix them at once.

pydantic and cattrs are not used because PID 1 pays for every import: pydantic takes as long to import as the whole
runner (69 ms), and neither suggests the nearest known key for a misspelled one.
"""

from __future__ import annotations

import ipaddress
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NoReturn, TypeVar, cast

import attrs

from runner.cpuset import CpuSet
from runner.errors import Problem, SpecError
from runner.values import frozen

T = TypeVar("T")

MIB = 1 << 20
_UNITS = {"Ki": 1 << 10, "Mi": MIB, "Gi": 1 << 30, "Ti": 1 << 40}
_SIZE = re.compile(r"([0-9]{1,12})(Ki|Mi|Gi|Ti)B?", re.ASCII)
DESCRIPTOR_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}"
"""Pattern of a descriptor's name; sd_listen_fds_with_names(3) allows more."""
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_REFERENCE = r"\$\$\{|\$\{([^}]*)\}?"
"""Pattern of ``$${``, which stands for a literal ``${``, and of ``${NAME}``."""
_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}", re.ASCII)


@frozen
class Rule:
    """The values that one key can have."""

    allowed: str
    """A description of them for messages and the reference, as a noun phrase."""
    parse: Callable[[object], object]
    """Checks a value and converts it; raises ``ValueError``."""
    schema: type | None = None
    """The attrs class of a table, or of each table of an array."""
    many: bool = False
    """An array of tables (``[[disk]]``)."""


def key(rule: Rule, *, doc: str, default: object = attrs.NOTHING) -> Any:
    """Declare a key of a schema class; without *default* the document must have it."""
    return attrs.field(default=default, metadata={"rule": rule, "doc": doc})


def rule_of(attribute: attrs.Attribute[Any]) -> Rule:
    """Return the rule that :func:`key` gave to *attribute*."""
    return cast("Rule", attribute.metadata["rule"])


def found(value: object) -> str:
    """Describe *value* of a document by type and content, shortened."""
    kinds = {
        str: "the string",
        bool: "the boolean",
        int: "the integer",
        float: "the number",
        dict: "a table",
        list: "an array",
    }
    kind = kinds.get(type(value))
    if kind is None:
        return "null" if value is None else f"the {type(value).__name__} {value}"
    if isinstance(value, dict | list):
        return kind
    if isinstance(value, int) and value.bit_length() > 64:  # noqa: PLR2004 - TOML's integers have 64 bits
        return f"an integer of {value.bit_length()} bits"
    text = json.dumps(value, ensure_ascii=False)
    return f"{kind} {text if len(text) <= 60 else text[:57] + '…'}"  # noqa: PLR2004 - a line has to end somewhere


def _wrong(value: object) -> NoReturn:
    raise ValueError(f"found {found(value)}")


def _nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return the one of *known* that is most like *word*, if one is."""
    import difflib  # here, because only a document with a mistake needs it

    return difflib.get_close_matches(word, list(known), 1, cutoff)


def text(pattern: str | None = None, allowed: str = "a string") -> Rule:
    """Take a string without control characters, which matches *pattern* as a whole if one is given."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or not value.isprintable():
            _wrong(value)
        if pattern is not None and re.fullmatch(pattern, value, re.ASCII) is None:
            _wrong(value)
        return value

    return Rule(allowed, parse)


def integer(least: int, most: int) -> Rule:
    """Take an integer between two bounds, both included."""

    def parse(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            _wrong(value)
        return value

    return Rule(f"an integer from {least} to {most}", parse)


def flag() -> Rule:
    """Take a boolean."""

    def parse(value: object) -> bool:
        return value if isinstance(value, bool) else _wrong(value)

    return Rule("true or false", parse)


def choice(*words: str) -> Rule:
    """Take one of a few words."""

    def parse(value: object) -> str:
        if isinstance(value, str) and value in words:
            return value
        near = _nearest(value, words) if isinstance(value, str) else []
        raise ValueError(f"found {found(value)}" + (f", did you mean {near[0]!r}?" if near else ""))

    return Rule("one of " + ", ".join(f'"{word}"' for word in words), parse)


def size(least: int) -> Rule:
    """Take a size in bytes that is a multiple of one MiB, written with a binary unit."""

    def parse(value: object) -> int:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            _wrong(value)
        result = int(match[1]) * _UNITS[match[2]]
        if result < least or result % MIB:
            _wrong(value)
        return result

    return Rule(f'a size in whole MiB, at least {format_size(least)}, such as "512MiB" or "4GiB"', parse)


def either(word: str, rule: Rule, *, first: bool = False) -> Rule:
    """Take *word* or a value that *rule* takes; with *first* messages name the word before the rule."""
    listed = f'"{word}", or {rule.allowed}' if first else f'{rule.allowed}, or "{word}"'
    return Rule(listed, lambda given: word if given == word else rule.parse(given))


def seconds(least: float, most: float) -> Rule:
    """Take a duration in seconds."""

    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            _wrong(value)
        return float(value)

    return Rule(f"a number of seconds from {least:g} to {most:g}", parse)


def path() -> Rule:
    """Take an absolute path; relative ones are refused, because PID 1's working directory is arbitrary."""

    def parse(value: object) -> PurePosixPath:
        if not isinstance(value, str) or "\0" in value or not value.startswith("/") or not _encodable(value):
            _wrong(value)
        return PurePosixPath(value)

    return Rule("an absolute path", parse)


def path_or(*words: str) -> Rule:
    """Take an absolute path, or one of a few words."""

    def parse(value: object) -> PurePosixPath | str:
        if isinstance(value, str) and value in words:
            return value
        return cast("PurePosixPath", path().parse(value))

    return Rule("an absolute path, or " + " or ".join(f'"{word}"' for word in words), parse)


def document() -> Rule:
    """Take a text of any number of lines, or the path of a file that holds one; a value that begins with a slash is a path."""

    def parse(value: object) -> PurePosixPath | str:
        if not isinstance(value, str) or not value or "\0" in value or not _encodable(value):
            _wrong(value)
        return PurePosixPath(value) if value.startswith("/") else value

    return Rule("a text, or the absolute path of a file that holds it", parse)


def documents() -> Rule:
    """Take an array of texts or paths, as :func:`document` does."""

    def parse(value: object) -> tuple[object, ...]:
        if not isinstance(value, list):
            _wrong(value)
        return tuple(map(document().parse, value))

    return Rule("an array of texts, or of absolute paths of files that hold them", parse)


def paths() -> Rule:
    """Take an array of absolute paths."""
    one = path()

    def parse(value: object) -> tuple[object, ...]:
        return tuple(map(one.parse, value)) if isinstance(value, list) else _wrong(value)

    return Rule("an array of absolute paths", parse)


def _encodable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can spell and no file name holds
        return False
    return True


def cpu_set() -> Rule:
    """Take CPU numbers in the kernel's list format."""

    def parse(value: object) -> CpuSet:
        if not isinstance(value, str) or not value.strip():
            _wrong(value)
        return CpuSet.parse(value)

    return Rule('CPUs in the kernel\'s list format, such as "1-20,65-84"', parse)


def mac() -> Rule:
    """Take a unicast MAC address in lower case."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or _MAC.fullmatch(value) is None or int(value[:2], 16) & 1:
            _wrong(value)
        return value

    return Rule('a unicast MAC address in lower case, such as "52:54:00:12:34:56"', parse)


def subnet() -> Rule:
    """Take an IPv4 subnet with room for a gateway and a guest."""

    def parse(value: object) -> ipaddress.IPv4Network:
        if not isinstance(value, str):
            _wrong(value)
        try:
            network = ipaddress.IPv4Network(value)
        except ValueError as error:
            raise ValueError(f"found {found(value)} ({error})") from None
        if network.prefixlen > 30:  # noqa: PLR2004 - network, gateway, guest, broadcast
            raise ValueError(f"found {found(value)}, which has no room for a gateway and a guest")
        return network

    return Rule('an IPv4 subnet of at least four addresses, such as "192.168.77.0/24"', parse)


def settings(known: Mapping[str, Rule]) -> Rule:
    """Take a table of a few *known* settings, each with a rule of its own, as ``(name, value)`` pairs in their order."""

    def parse(value: object) -> tuple[tuple[str, object], ...]:
        if not isinstance(value, Mapping):
            _wrong(value)
        pairs = []
        for name, setting in value.items():
            rule = known.get(name)
            if rule is None:
                near = _nearest(name, known)
                raise ValueError(f"found the unknown {name!r}" + (f", did you mean {near[0]!r}?" if near else ""))
            try:
                pairs.append((name, rule.parse(setting)))
            except ValueError as error:
                raise ValueError(f"{name}: {error}, where it takes {rule.allowed}") from None
        return tuple(pairs)

    return Rule("a table of " + ", ".join(known), parse)


def address() -> Rule:
    """Take an IPv4 address."""

    def parse(value: object) -> ipaddress.IPv4Address:
        if not isinstance(value, str):
            _wrong(value)
        try:
            return ipaddress.IPv4Address(value)
        except ValueError as error:
            raise ValueError(f"found {found(value)} ({error})") from None

    return Rule('an IPv4 address, such as "192.168.77.10"', parse)


def subnet6() -> Rule:
    """Take an IPv6 subnet of 64 bits: hosts configure themselves only in such subnets."""

    def parse(value: object) -> ipaddress.IPv6Network:
        if not isinstance(value, str):
            _wrong(value)
        try:
            network = ipaddress.IPv6Network(value)
        except ValueError as error:
            raise ValueError(f"found {found(value)} ({error})") from None
        if network.prefixlen != 64:  # noqa: PLR2004 - RFC 4291, 2.5.4
            _wrong(value)
        return network

    return Rule('an IPv6 subnet of 64 bits, such as "fd12:3456:789a:1::/64"', parse)


def descriptor_names() -> Rule:
    """Take names of descriptors, separated by commas (:data:`DESCRIPTOR_NAME`)."""

    def parse(value: object) -> tuple[str, ...]:
        if not isinstance(value, str):
            _wrong(value)
        names = tuple(value.split(","))
        if not all(re.fullmatch(DESCRIPTOR_NAME, name, re.ASCII) for name in names):
            _wrong(value)
        return names

    return Rule('names of descriptors, such as "net0" or "net0,net1"', parse)


def variables() -> Rule:
    """Take names of environment variables, each once."""

    def parse(value: object) -> tuple[str, ...]:
        if not isinstance(value, list):
            _wrong(value)
        for name in value:
            if not isinstance(name, str) or re.fullmatch(_VARIABLE, name, re.ASCII) is None:
                _wrong(name)
            if value.count(name) > 1:
                raise ValueError(f"found {found(name)} twice")
        return tuple(value)

    return Rule('an array of names of environment variables, such as ["NODE_NAME"]', parse)


def table(schema: type) -> Rule:
    """Take a table that follows *schema*."""
    return Rule("a table", _never, schema)


def tables(schema: type) -> Rule:
    """Take an array of tables that follow *schema*."""
    return Rule("an array of tables", _never, schema, many=True)


def _never(value: object) -> NoReturn:
    raise AssertionError(f"tables are walked, not parsed: {value!r}")


def format_size(number: int) -> str:
    """Return *number* of bytes with the largest binary unit that keeps it whole, e.g. ``1536MiB``."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        if number and number % _UNITS[unit] == 0:
            return f"{number // _UNITS[unit]}{unit}B"
    return f"{number} bytes"


def parse_document(source: str, data: bytes) -> dict[str, object]:
    """Parse *data* as JSON if *source* ends in ``.json`` or the text begins with a brace, else as TOML.

    Raises :exc:`~runner.errors.SpecError` with line and column.
    """
    try:
        content = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(
            source, [Problem("", f"cannot decode the document: it is not UTF-8 at byte {error.start}")]
        ) from None
    if source.endswith(".json") or content.lstrip().startswith("{"):
        return _parse_json(source, content)
    try:
        return tomllib.loads(content)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or an integer of thousands of digits
        raise SpecError(source, [Problem("", f"cannot parse the document as TOML: {error}")]) from None


def _parse_json(source: str, content: str) -> dict[str, object]:
    def unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
        result: dict[str, object] = {}
        for name, value in pairs:
            if name in result:
                raise ValueError(f"the key {json.dumps(name)} is repeated in one table")
            result[name] = value
        return result

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        document = json.loads(content, object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise SpecError(source, [Problem("", f"cannot parse the document as JSON: {error}")]) from None
    if not isinstance(document, dict):
        raise SpecError(source, [Problem("", f"the document must be a table, found {found(document)}")])
    return document


def expanded(value: object, variables: Mapping[str, str], where: str, problems: list[Problem]) -> object:
    """Replace ``${NAME}`` in every string of *value* from *variables*, and ``$${`` by ``${``; keys stay as they are.

    A name that is not in *variables* is added to *problems*: a user rarely means a literal ``${``. *where* is the path
    of *value*.
    """

    def replaced(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return "${"
        if not match[0].endswith("}"):
            problems.append(Problem(where, f"{match[0]!r} is not closed with }}", "write $${ for a literal ${"))
            return match[0]
        if name not in variables:
            problems.append(
                Problem(
                    where,
                    f"${{{name}}} is not declared",
                    "name it in environment.allow, or write $${ for a literal one",
                )
            )
            return match[0]
        return variables[name]

    match value:
        case str():
            return re.sub(_REFERENCE, replaced, value)
        case dict():
            inside = {name: f"{where}.{name}" if where else name for name in value}
            return {name: expanded(each, variables, inside[name], problems) for name, each in value.items()}
        case list():
            return [expanded(each, variables, f"{where}[{index}]", problems) for index, each in enumerate(value)]
        case _:
            return value


def structure(schema: type[T], value: object, where: str, problems: list[Problem]) -> T | None:
    """Turn the table *value*, found at *where*, into a *schema* object; append every problem to *problems*.

    Return ``None`` if a key of this table is wrong or missing. A schema class may have a method ``contradictions()``,
    which yields :class:`~runner.errors.Problem` values with paths relative to its table. It is called only if each key
    on its own is right.
    """
    if not isinstance(value, Mapping):
        problems.append(Problem(where, f"must be a table, found {found(value)}"))
        return None
    before = len(problems)
    attributes = {attribute.name: attribute for attribute in attrs.fields(cast("Any", schema))}
    problems.extend(_unknown(name, attributes, where) for name in value if name not in attributes)
    values: dict[str, object] = {}
    for name, attribute in attributes.items():
        here = f"{where}.{name}" if where else name
        if name in value:
            values[name] = _value(rule_of(attribute), value[name], here, problems)
        elif attribute.default is attrs.NOTHING:
            problems.append(Problem(here, "is missing", f"it takes {rule_of(attribute).allowed}"))
    if len(problems) > before:
        return None
    result = schema(**values)
    contradictions: Callable[[], Iterator[Problem]] | None = getattr(result, "contradictions", None)
    if contradictions is not None:
        problems.extend(
            attrs.evolve(problem, path=f"{where}.{problem.path}" if where and problem.path else where or problem.path)
            for problem in contradictions()
        )
    return result


def _unknown(name: str, attributes: Mapping[str, object], where: str) -> Problem:
    near = _nearest(name, attributes, 0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(attributes)}"
    return Problem(f"{where}.{name}" if where else name, "unknown key", hint)


def _value(rule: Rule, value: object, here: str, problems: list[Problem]) -> object:
    if rule.schema is None:
        try:
            return rule.parse(value)
        except ValueError as error:
            problems.append(Problem(here, str(error), f"it takes {rule.allowed}"))
            return None
    if not rule.many:
        return structure(rule.schema, value, here, problems)
    if not isinstance(value, list):
        problems.append(Problem(here, f"must be an array of tables ([[{here}]]), found {found(value)}"))
        return None
    return tuple(structure(rule.schema, item, f"{here}[{index}]", problems) for index, item in enumerate(value))
