"""The messages in the source: a sentence has one semicolon at most, which stands before its remedy."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache

import pytest

from tests.support.figures import files, nodes, parsed

MADE_BY = re.compile(
    r"\w+Error|Event|Fault|Judgement|Problem|_?(?:refuse|remark|finding)|ok|unknown|warning|error|bad|why_refused"
)
"""The names of what makes a message: its strings, one after the other, are the sentence and its remedy."""
TAKES_REMEDY = re.compile(
    r"(Usage|Refused|RequestRefused|Host|NoInstance|Placement|Peer|Controller|Cgroup|GuestStopped|Rpc)Error"
    r"|Problem|Fault|Unset|doing"
)
"""The names of what takes a remedy beside its sentence, by ``remedy=``."""

LONGEST = 200
"""Characters of a sentence with its remedy."""


@cache
def constants() -> dict[str, str]:
    """Return the texts of the package's constants by their names."""
    found = {}
    for path in files():
        for node in parsed(path).body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    found[name] = text_of(value, {})
    return found


def text_of(node: ast.expr, named: Mapping[str, str]) -> str:
    """Return what is known of a text before the program runs, with the texts of constants; ``{}`` stands for what is not."""
    parts: list[ast.expr] = []
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return named.get(name, "{}")
        case ast.JoinedStr(values=parts) | ast.FormattedValue(value=ast.JoinedStr(values=parts)):
            pass
        case ast.FormattedValue(value=value):
            parts = [value]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = [left, right]
        case ast.IfExp(body=body, orelse=other):
            return max(text_of(body, named), text_of(other, named), key=lambda text: text.count(";"))
    return "".join(text_of(part, named) for part in parts) or "{}"


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield each message of *tree* with the number of its line: sentence and remedy as they are shown, without commands."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and MADE_BY.fullmatch(getattr(call.func, "attr", getattr(call.func, "id", ""))):
            given = (*call.args, *(each.value for each in call.keywords if each.arg == "remedy"))
            parts = [part for part in (text_of(each, constants()) for each in given) if " " in part]
            yield call.lineno, re.sub(r"`[^`]*`", "", "; ".join(parts))


def test_a_sentence_has_one_semicolon_at_most() -> None:
    found = [(path, line, text) for path in files() for line, text in messages(parsed(path))]
    assert len(found) > 500
    assert [each for each in found if any(part.count(";") > 1 for part in re.split(r"\.\s", each[2]))] == []


def too_long(tree: ast.Module) -> list[tuple[int, str]]:
    """Return the messages of *tree* with more than :data:`LONGEST` characters; values and commands are not counted."""
    return [(line, text) for line, text in messages(tree) if len(text.replace("{}", "")) > LONGEST]


def test_a_message_has_at_most_200_characters() -> None:
    assert [(path, *each) for path in files() for each in too_long(parsed(path))] == []
    most = "cannot " + "c" * (LONGEST - len("cannot ; do it"))
    for source in (f'HostError(f"{most}{{it}}", remedy="do it`, {most}`")', f'Fault("group", "{most}", "do it")'):
        assert too_long(ast.parse(source)) == []
        assert len(too_long(ast.parse(source.replace("cc", "ccc", 1)))) == 1


def unquoted(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield each path that *tree* puts into a command of a message as it is."""
    for node in ast.walk(tree):
        inside = False
        for part in node.values if isinstance(node, ast.JoinedStr) else ():
            if isinstance(part, ast.Constant):
                inside ^= str(part.value).count("`") % 2 == 1
            elif inside and re.search(r"\b(path|file|directory)\}$", word := ast.unparse(part).strip("f'\"")):
                yield part.lineno, word


def test_a_path_in_a_command_is_one_word_of_a_shell() -> None:
    """The names in an image's header are those of another person, and an operator pastes the command."""
    assert [(path, *each) for path in files() for each in unquoted(parsed(path))] == []
    assert [*unquoted(ast.parse('f"do `convert {disk.path} NEW`"'))] == [(1, "{disk.path}")]
    assert [*unquoted(ast.parse('f"{disk.path} is `converted {in_shell(disk.path)}`"'))] == []


def joined(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield what could be a remedy in a sentence of *tree*: what follows ``; `` in it, unless it is what else has happened."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and TAKES_REMEDY.fullmatch(name := getattr(call.func, "id", "")):
            for each in call.args[2:3] if name == "Unset" else call.args[:2]:
                _, semicolon, rest = text_of(each, constants()).partition("; ")
                if semicolon and not re.match("and |the program before continues", rest):
                    yield call.lineno, rest


def test_a_remedy_stands_beside_its_sentence() -> None:
    """A program that reads a refusal in JSON finds it under ``remedy``."""
    assert [(path, *each) for path in files() for each in joined(parsed(path))] == []
    assert [*joined(ast.parse('with doing(f"open {it}; give it"): pass'))] == [(1, "give it")]
    assert [*joined(ast.parse('Problem("cpu", "is missing; give it", "or not; all")'))] == [(1, "give it")]
    assert [*joined(ast.parse('Fault(group, "cannot; restart it")'))] == [(1, "restart it")]
    assert [*joined(ast.parse('Unset("all", path, "cannot; mount it")'))] == [(1, "mount it")]


def test_a_remark_names_the_value_that_it_is_about() -> None:
    """A call with the sentence first has the right number of arguments, too."""
    calls = [node for path in files() for node in nodes(path) if isinstance(node, ast.Call)]
    remarks = [call for call in calls if getattr(call.func, "attr", "").lstrip("_") == "remark"]
    assert len(remarks) > 40
    assert [text for call in remarks if " " in (text := text_of(call.args[0], constants()))] == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('raise HostError(f"cannot {verb} it: no", remedy="do that; or this")', "cannot {} it: no; do that; or this"),
        ('problems.refuse("cpu.count", "is too much", "ask for less `a; b`")', "is too much; ask for less "),
    ],
)
def test_a_message_is_read_with_its_remedy(source: str, message: str) -> None:
    assert [text for _, text in messages(ast.parse(source))] == [message]
