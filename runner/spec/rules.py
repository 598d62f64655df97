"""Rules for the keys of a TOML or JSON document, and the function that applies a schema of them.

A schema is an attrs class whose attributes are made by :func:`key`. Each key has a :class:`Rule`, which turns a plain
value into a checked one. :func:`structure` turns a table into an object of such a class and reports *all* problems, each
with its path, so that a user can fix them at once.

pydantic and cattrs are not used because PID 1 pays for every import (``runner/README.md`` has the figures), and neither
suggests the nearest known key for a misspelled one.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast, get_args, overload

import attrs

from runner.base.cpuset import CpuSet
from runner.base.errors import Problem
from runner.base.values import frozen
from runner.facts.descriptor import DESCRIPTOR_NAME
from runner.spec.ports import HIGHEST, PATTERN, PortForward, parse_ports

if TYPE_CHECKING:
    from typing_extensions import TypeForm  # of mypy; a program needs none

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Other = TypeVar("Other")

MIB = 1 << 20
LARGEST_SIZE = 1 << 52
"""Bytes; no x86 CPU has a longer physical address."""
LONGEST_TEXT = (128 << 10) - 1
"""Bytes of the longest argument of a program (``MAX_ARG_STRLEN``, without the NUL)."""
_UNITS = {"Ki": 1 << 10, "Mi": MIB, "Gi": 1 << 30, "Ti": 1 << 40}
_SECONDS = {"": 1, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}
"""Units of durations in other programs."""
_SIZE = re.compile(r"([0-9]{1,12})(Ki|Mi|Gi|Ti)B?", re.ASCII)
_SIZE_ELSEWHERE = r"(?i:([0-9]{1,12}(?:\.[0-9]{1,9})?) ?([KMGT]?)i?B?)"
"""Pattern of a size as QEMU, Kubernetes or people write it; compiled only for an invalid one."""
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_MAC = r"(?!00(:00){5})[0-9a-f][02468ace](:[0-9a-f]{2}){5}"
"""Pattern of a unicast MAC address: the lowest bit of the first byte is 0."""
_PLAIN = r"[^\u0000-\u001f\u007f]*"
"""Pattern of a string without control characters."""
_ADDRESS = r"[0-9]{1,3}(\.[0-9]{1,3}){3}"


class WrongValueError(ValueError):
    """A value that a rule does not accept; *suggestion* is the nearest acceptable one, as written in a document, or empty."""

    def __init__(self, message: str, suggestion: str = "") -> None:
        super().__init__(message)
        self.suggestion = suggestion


@frozen
class Rule(Generic[T_co]):
    """The values that a key can have, and the type that they are parsed to."""

    allowed: str
    """A description of them for messages and the reference, as a noun phrase."""
    parse: Callable[[object], T_co]
    """Checks a value and converts it; raises ``ValueError``."""
    json: Mapping[str, Any] = attrs.field(factory=dict)
    """The rule in JSON Schema, as far as that can express it; empty for tables."""
    schema: type | None = None
    """The attrs class of a table, or of each table of an array."""
    many: bool = False
    """Whether it is an array of tables (``[[disk]]``)."""


@overload
def key(rule: Rule[T], *, doc: str, elsewhere: Sequence[str] = ()) -> T: ...
@overload
def key(rule: Rule[T], *, doc: str, default: Other, elsewhere: Sequence[str] = ()) -> T | Other: ...
def key(rule: Rule[T], *, doc: str, default: object = attrs.NOTHING, elsewhere: Sequence[str] = ()) -> object:
    """Declare a key of a schema class; without *default* the document must have it.

    *elsewhere* are its names in other programs or usage: they are refused, with this key as the suggestion.
    """
    return attrs.field(default=default, metadata={"rule": rule, "doc": doc, "elsewhere": elsewhere})


def rule_of(attribute: attrs.Attribute[Any]) -> Rule[object]:
    """Return the rule that :func:`key` gave to *attribute*."""
    return cast("Rule[object]", attribute.metadata["rule"])


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


def _wrong(value: object, suggestion: str = "") -> NoReturn:
    raise WrongValueError(f"found {found(value)}", suggestion)


def _string(value: object) -> str:
    return value if isinstance(value, str) else _wrong(value)


def _refuse_unprintable(value: str) -> None:
    unprintable = next((each for each in value if not each.isprintable()), None)
    if unprintable is not None:
        raise WrongValueError(f"found {found(value)} with the character {unprintable!r}")


def _nearest(value: object, words: Iterable[str]) -> str:
    """Return the word that *value* is probably a misspelling of, in quotes; empty if there is none, or its digits differ."""
    if not isinstance(value, str):
        return ""
    import difflib  # here, because only a document with a mistake needs it

    alike = [word for word in words if re.findall("[0-9]+", word) == re.findall("[0-9]+", value)]
    return next(
        (f'"{word}"' for given in (value, value.lower()) for word in difflib.get_close_matches(given, alike, 1)), ""
    )


def _meant(value: object, words: Iterable[str], elsewhere: Mapping[str, str] | None) -> str:
    """Return the word that *value* stands for in another program, or is a misspelling of, in quotes; empty if there is none."""
    meant = (elsewhere or {}).get(value.lower()) if isinstance(value, str) else None
    return _nearest(value, words) if meant is None else f'"{meant}"'


def _nearest_number(value: object, least: float, most: float, units: Mapping[str, float]) -> str:
    """Return the number within both bounds that a string probably means, as written in a document; empty if there is none.

    *units* maps each possible unit after the number to its factor.
    """
    pattern = rf"\s*([0-9]{{1,9}}(?:\.[0-9]{{1,6}})?)\s*({'|'.join(units)})\s*"
    match = re.fullmatch(pattern, value, re.ASCII) if isinstance(value, str) else None
    number = 0.0 if match is None else float(match[1]) * units[match[2]]
    return f"{number:.9g}" if match is not None and least <= number <= most else ""


def matching(pattern: str) -> Mapping[str, Any]:
    """Return the JSON Schema of a string that matches *pattern* as a whole."""
    return {"type": "string", "pattern": f"^(?:{pattern})$"}


def text(pattern: str | None = None, allowed: str = "a string of one line without control characters") -> Rule[str]:
    """Accept a string without control characters, which matches *pattern* as a whole if one is given."""

    def parse(value: object) -> str:
        written = _string(value)
        _refuse_unprintable(written)
        if (length := len(written.encode())) > LONGEST_TEXT:
            raise WrongValueError(f"found a string of {length} bytes, and {LONGEST_TEXT} are allowed")
        if pattern is not None and re.fullmatch(pattern, written, re.ASCII) is None:
            lower = written.lower()
            _wrong(value, f'"{lower}"' if re.fullmatch(pattern, lower, re.ASCII) else "")
        return written

    return Rule(allowed, parse, matching(pattern or _PLAIN))


def integer(least: int, most: int) -> Rule[int]:
    """Accept an integer between two bounds, both included."""

    def parse(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            meant = _nearest_number(value, least, most, {"": 1})
            _wrong(value, meant if meant.isdecimal() else "")
        return value

    return Rule(f"an integer from {least} to {most}", parse, {"type": "integer", "minimum": least, "maximum": most})


def flag() -> Rule[bool]:
    """Accept a boolean."""

    def parse(value: object) -> bool:
        meant = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}
        return value if isinstance(value, bool) else _wrong(value, meant.get(str(value).lower(), ""))

    return Rule("true or false", parse, {"type": "boolean"})


def choice(literal: TypeForm[T], *, elsewhere: Mapping[str, str] | None = None) -> Rule[T]:
    """Accept a word of *literal*; *elsewhere* maps words of other programs, which are refused, to their meaning here."""
    words = get_args(literal)

    def parse(value: object) -> T:
        if value in words:
            return cast("T", value)
        _wrong(value, _meant(value, words, elsewhere))

    return Rule("one of " + ", ".join(f'"{word}"' for word in words), parse, {"enum": [*words]})


def size(least: int) -> Rule[int]:
    """Accept a size in bytes that is a multiple of one MiB, written with a binary unit."""

    def parse(value: object) -> int:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            _wrong(value, _nearest_size(value, least))
        result = int(match[1]) * _UNITS[match[2]]
        if not least <= result <= LARGEST_SIZE or result % MIB:
            _wrong(value, _nearest_size(value, least))
        return result

    allowed = f'a size in whole MiB, at least {format_size(least)} and at most {format_size(LARGEST_SIZE)}, such as "512MiB" or "4GiB"'
    return Rule(allowed, parse, matching(_SIZE.pattern))


def _nearest_size(value: object, least: int) -> str:
    """Return the size that *value* probably means, as written in a document; empty if it is no size.

    A number without a unit counts bytes; if that is below one MiB it counts MiB, and if these are too few, GiB. ``2G`` and ``2GB`` mean 2
    GiB to QEMU.
    """
    written = str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
    match = re.fullmatch(_SIZE_ELSEWHERE, written, re.ASCII)
    if match is None:
        return ""
    number = float(match[1])
    likely = 1 if number >= MIB else MIB if number * MIB >= least else _UNITS["Gi"]
    unit = _UNITS[f"{match[2].upper()}i"] if match[2] else likely
    meant = max(least, round(number * unit / MIB) * MIB)
    return f'"{format_size(meant)}"' if meant <= LARGEST_SIZE else ""


def either(literal: TypeForm[Other], rule: Rule[T], *, first: bool = False) -> Rule[Other | T]:
    """Accept the word of *literal*, or a value that *rule* accepts; with *first* messages name the word before the rule."""
    (word,) = get_args(literal)

    def parse(value: object) -> Other | T:
        if value == word:
            return cast("Other", word)
        try:
            return rule.parse(value)
        except WrongValueError as error:
            error.suggestion = _nearest(value, [word]) or error.suggestion
            raise

    allowed = f'"{word}", or {rule.allowed}' if first else f'{rule.allowed}, or "{word}"'
    return Rule(allowed, parse, {"anyOf": [{"enum": [word]}, rule.json]})


def seconds(least: float, most: float) -> Rule[float]:
    """Accept a duration in seconds."""

    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            _wrong(value, _nearest_number(value, least, most, _SECONDS))
        return float(value)

    bounds = {"type": "number", "minimum": least, "maximum": most}
    return Rule(f"a number of seconds from {least:g} to {most:g}", parse, bounds)


def path() -> Rule[PurePosixPath]:
    """Accept an absolute path; relative ones are refused, because PID 1's working directory is arbitrary."""

    def parse(value: object) -> PurePosixPath:
        if not isinstance(value, str) or not value.startswith("/"):
            _wrong(value)
        _refuse_unprintable(value)
        return PurePosixPath(value)

    return Rule("an absolute path", parse, matching(f"/{_PLAIN}"))


def path_or(literal: TypeForm[T], *, elsewhere: Mapping[str, str] | None = None) -> Rule[PurePosixPath | T]:
    """Accept an absolute path, or one of a few words, as :func:`choice` does."""
    word, file = choice(literal, elsewhere=elsewhere), path()

    def parse(value: object) -> PurePosixPath | T:
        return file.parse(value) if isinstance(value, str) and value.startswith("/") else word.parse(value)

    allowed = "an absolute path, or " + " or ".join(f'"{each}"' for each in get_args(literal))
    return Rule(allowed, parse, {"anyOf": [word.json, file.json]})


def document() -> Rule[PurePosixPath | str]:
    """Accept a text of any number of lines, or the path of a file with one; a value that begins with a slash is a path."""

    def parse(value: object) -> PurePosixPath | str:
        if not isinstance(value, str) or not value or "\0" in value or not _encodable(value):
            _wrong(value)
        return PurePosixPath(value) if value.startswith("/") else value

    return Rule("a text, or the absolute path of a file that holds it", parse, {"type": "string", "minLength": 1})


def documents() -> Rule[tuple[PurePosixPath | str, ...]]:
    """Accept an array of texts or paths, as :func:`document` does."""
    return _array(document(), "an array of texts, or of absolute paths of files that hold them")


def paths() -> Rule[tuple[PurePosixPath, ...]]:
    """Accept an array of absolute paths."""
    return _array(path(), "an array of absolute paths")


def _array(one: Rule[T], allowed: str) -> Rule[tuple[T, ...]]:
    def parse(value: object) -> tuple[T, ...]:
        return tuple(map(one.parse, value)) if isinstance(value, list) else _wrong(value)

    return Rule(allowed, parse, {"type": "array", "items": one.json})


def _encodable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can spell and no file name holds
        return False
    return True


def cpu_set() -> Rule[CpuSet]:
    """Accept CPU numbers in the kernel's list format."""

    def parse(value: object) -> CpuSet:
        if not isinstance(value, str) or not value.strip():
            _wrong(value)
        return CpuSet.parse(value)

    listed = matching(r"\s*[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*\s*")
    return Rule('CPUs in the kernel\'s list format, such as "1-20,65-84"', parse, listed)


def mac() -> Rule[str]:
    """Accept a unicast MAC address in lower case."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or re.fullmatch(_MAC, value) is None:
            written = value.lower().replace("-", ":") if isinstance(value, str) else ""
            _wrong(value, f'"{written}"' if re.fullmatch(_MAC, written) else "")
        return value

    return Rule('a unicast MAC address in lower case, such as "52:54:00:12:34:56"', parse, matching(_MAC))


_NO_HOST = "whose addresses are no host's"
_NO_HOSTS = tuple(map(ipaddress.IPv4Network, ("0.0.0.0/8", "127.0.0.0/8", "224.0.0.0/3")))
"""The host itself, its loopback, and multicast with reserved ranges (RFC 6890, RFC 1112): kernels accept no packet from there."""
_NO_HOSTS6 = tuple(map(ipaddress.IPv6Network, ("::/8", "fe80::/10", "ff00::/8")))
"""Reserved, link-local, and multicast addresses (RFC 4291, 2.4): a router advertisement makes no address there."""


def _internet(kind: Callable[[str], T], value: object) -> T:
    """Return *value* as an address or network of a *kind* of :mod:`ipaddress`."""
    written = _string(value)
    try:
        return kind(written)
    except ValueError as error:
        raise ValueError(f"found {found(value)} ({error})") from None


def subnet() -> Rule[ipaddress.IPv4Network]:
    """Accept an IPv4 subnet with room for a gateway and a guest."""

    def parse(value: object) -> ipaddress.IPv4Network:
        network = _internet(ipaddress.IPv4Network, value)
        if network.prefixlen > 30:  # noqa: PLR2004 - network, gateway, guest, broadcast
            raise ValueError(f"found {found(value)}, which has no room for a gateway and a guest")
        if any(network.overlaps(each) for each in _NO_HOSTS):
            raise ValueError(f"found {found(value)}, {_NO_HOST}")
        return network

    allowed = 'an IPv4 subnet of at least four addresses, such as "192.168.77.0/24"'
    return Rule(allowed, parse, matching(f"{_ADDRESS}/(0*[12]?[0-9]|0*30|{_ADDRESS})"))


def settings(known: Mapping[str, Rule[object]]) -> Rule[tuple[tuple[str, object], ...]]:
    """Accept a table of a few *known* settings, each with a rule of its own, as ``(name, value)`` pairs in their order."""

    def parse(value: object) -> tuple[tuple[str, object], ...]:
        if not isinstance(value, Mapping):
            _wrong(value)
        pairs = []
        for name, setting in value.items():
            rule = known.get(name)
            if rule is None:
                raise WrongValueError(f"found the unknown {name!r}", _nearest(name, known))
            try:
                pairs.append((name, rule.parse(setting)))
            except ValueError as error:
                raise ValueError(f"{name}: {error}, where it takes {rule.allowed}") from None
        return tuple(pairs)

    properties = {name: rule.json for name, rule in known.items()}
    table_of = {"type": "object", "properties": properties, "additionalProperties": False}
    return Rule("a table of " + ", ".join(known), parse, table_of)


def address() -> Rule[ipaddress.IPv4Address]:
    """Accept an IPv4 address."""
    parse = partial(_internet, ipaddress.IPv4Address)
    return Rule('an IPv4 address, such as "192.168.77.10"', parse, matching(_ADDRESS))


def subnet6() -> Rule[ipaddress.IPv6Network]:
    """Accept an IPv6 subnet of 64 bits: hosts configure themselves only in such subnets."""

    def parse(value: object) -> ipaddress.IPv6Network:
        network = _internet(ipaddress.IPv6Network, value)
        if network.prefixlen != 64:  # noqa: PLR2004 - RFC 4291, 2.5.4
            _wrong(value)
        if any(network.overlaps(each) for each in _NO_HOSTS6):
            raise ValueError(f"found {found(value)}, {_NO_HOST}")
        return network

    return Rule('an IPv6 subnet of 64 bits, such as "fd12:3456:789a:1::/64"', parse, matching("[0-9a-fA-F:.]+/0*64"))


def descriptor_names() -> Rule[tuple[str, ...]]:
    """Accept names of descriptors, separated by commas (:data:`~runner.facts.descriptor.DESCRIPTOR_NAME`)."""

    def parse(value: object) -> tuple[str, ...]:
        names = tuple(_string(value).split(","))
        if not all(re.fullmatch(DESCRIPTOR_NAME, name, re.ASCII) for name in names):
            _wrong(value)
        return names

    listed = matching(f"{DESCRIPTOR_NAME}(,{DESCRIPTOR_NAME})*")
    return Rule('names of descriptors, such as "net0" or "net0,net1"', parse, listed)


def variables() -> Rule[tuple[str, ...]]:
    """Accept names of environment variables, each once."""

    def parse(value: object) -> tuple[str, ...]:
        if not isinstance(value, list):
            _wrong(value)
        for name in value:
            if not isinstance(name, str) or re.fullmatch(_VARIABLE, name, re.ASCII) is None:
                _wrong(name)
            if value.count(name) > 1:
                raise ValueError(f"found {found(name)} twice")
        return tuple(value)

    listed = {"type": "array", "items": matching(_VARIABLE), "uniqueItems": True}
    return Rule('an array of names of environment variables, such as ["NODE_NAME"]', parse, listed)


def ports() -> Rule[tuple[PortForward, ...]]:
    """Accept an array of ports that are forwarded to the guest (:mod:`runner.spec.ports`)."""

    def parse(value: object) -> PortForward:
        return parse_ports(value) or _wrong(value)

    bare = re.sub(r"\?P<\w+>", "?:", PATTERN)
    entry = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": HIGHEST}, matching(bare)]}
    return _array(Rule("a port", parse, entry), 'an array of ports, such as [22, "8000-8010", "80:8080/tcp"]')


def table(schema: type[T]) -> Rule[T]:
    """Accept a table that follows *schema*."""
    return Rule("a table", _never, schema=schema)


def tables(schema: type[T]) -> Rule[tuple[T, ...]]:
    """Accept an array of tables that follow *schema*."""
    return Rule("an array of tables", _never, schema=schema, many=True)


def _never(value: object) -> NoReturn:
    raise AssertionError(f"tables are walked, not parsed: {value!r}")


def counted(number: int, noun: str) -> str:
    """Return ``1 core``, or ``2 cores``."""
    return f"{number} {noun}{'s' * (number > 1)}"


def format_size(number: int) -> str:
    """Return *number* of bytes with the largest binary unit that keeps it whole, e.g. ``1536MiB``."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        if number and number % _UNITS[unit] == 0:
            return f"{number // _UNITS[unit]}{unit}B"
    return f"{number} bytes"


def structure(schema: type[T], value: object, where: str, problems: list[Problem]) -> T | None:
    """Turn the table *value*, found at *where*, into a *schema* object; append every problem to *problems*.

    Return ``None`` if a key of this table is wrong or missing. A schema class may have a method ``contradictions()``,
    which yields :class:`~runner.base.errors.Problem` values with paths relative to its table. It is called only if each key
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


def _unknown(name: str, attributes: Mapping[str, attrs.Attribute[Any]], where: str) -> Problem:
    import difflib  # here, because only a document with a mistake needs it

    meant = (known for known, each in attributes.items() if name.lower() in each.metadata["elsewhere"])
    near = [*meant] or difflib.get_close_matches(name.lower(), attributes, 1, 0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(attributes)}"
    return Problem(f"{where}.{name}" if where else name, "unknown key", hint)


def _value(rule: Rule[object], value: object, here: str, problems: list[Problem]) -> object:
    if rule.schema is None:
        try:
            return rule.parse(value)
        except ValueError as error:
            meant = error.suggestion if isinstance(error, WrongValueError) else ""
            question = f"did you mean {meant}? It takes" if meant else "it takes"
            problems.append(Problem(here, str(error), f"{question} {rule.allowed}"))
            return None
    if not rule.many:
        return structure(rule.schema, value, here, problems)
    if not isinstance(value, list):
        problems.append(Problem(here, f"must be an array of tables ([[{here}]]), found {found(value)}"))
        return None
    return tuple(structure(rule.schema, item, f"{here}[{index}]", problems) for index, item in enumerate(value))
