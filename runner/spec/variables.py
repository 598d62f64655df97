"""The variables of the runner's environment in a document: ``${NAME}`` in its strings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import attrs

from runner.base.errors import Problem
from runner.base.values import frozen
from runner.spec.document_parser import LARGEST_DOCUMENT, MOST_OF_ALL, parse_document
from runner.spec.rules import (
    key,
    structure,
    variables,
)

_REFERENCE = r"\$\$\{|\$\{([^}]*)\}?"
"""Pattern of ``$${``, which stands for a literal ``${``, and of ``${NAME}``."""


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


def references(value: object, where: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the name of each ``${NAME}`` in the strings of *value*, whose own path is *where*."""
    match value:
        case str():
            yield from ((where, each[1]) for each in re.finditer(_REFERENCE, value) if each[1])
        case dict():
            for name, each in value.items():
                yield from references(each, f"{where}.{name}" if where else name)
        case list():
            for index, each in enumerate(value):
                yield from references(each, f"{where}[{index}]")


@frozen
class EnvironmentSpec:
    """The variables of the runner's environment that the document may use."""

    allow: tuple[str, ...] = key(
        variables(),
        default=(),
        doc="the environment variables that `${NAME}` in a string of this document may name. With this table a literal `${` is written "
        "`$${`; without it `$` has no special meaning",
    )


NO_ENVIRONMENT: Mapping[str, str] = MappingProxyType({})
"""The environment for a document that uses no variables."""


def variables_of(problem: Problem, used: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return the names in each ``${NAME}`` of the value that *problem* is about; *used* is the result of :func:`used_variables`."""
    from bisect import bisect_left  # here, because only a document with a mistake needs it

    path = problem.path
    if "." not in path:  # a whole table
        return ()
    ranges = ((path, f"{path}\0"), *((path + mark, path + chr(ord(mark) + 1)) for mark in ".["))
    return tuple(
        dict.fromkeys(
            name for first, end in ranges for _, name in used[bisect_left(used, (first,)) : bisect_left(used, (end,))]
        )
    )


def used_variables(written: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return path and name of each ``${NAME}`` in the unexpanded document *written*, sorted by path."""
    return sorted(references(written, ""), key=lambda each: each[0])


def with_variables(problems: Sequence[Problem], written: Mapping[str, object]) -> Iterator[Problem]:
    """Yield *problems*, each with the variables of its value: they caused it, or their declaration is missing."""
    used = used_variables(written)
    for problem in problems:
        if not (names := variables_of(problem, used)):
            yield problem
        elif "environment" in written:
            listed = " and ".join(f"${{{name}}}" for name in names)
            yield attrs.evolve(problem, message=f"{problem.message}, which comes from {listed}")
        else:
            yield attrs.evolve(problem, remedy=f"{declaring(names)}; {problem.remedy}")


def declaring(names: Sequence[str]) -> str:
    """Return the remedy for a document that uses the variables *names* without declaring them."""
    return f"add [environment] allow = {json.dumps(names)}, without which ${{{names[0]}}} has no special meaning"


def declared_variables(source: str, data: bytes) -> tuple[str, ...]:
    """Return the environment variables that a document declares; none if the table is wrong (:func:`parse_instance` reports it)."""
    declared = structure(EnvironmentSpec, parse_document(source, data).get("environment", {}), "environment", [])
    return () if declared is None else declared.allow


def with_environment(
    document: dict[str, object], environment: Mapping[str, str], problems: list[Problem]
) -> dict[str, object]:
    """Return *document* with each ``${NAME}`` replaced from *environment*, if it declares any; append a problem for each unset one."""
    if "environment" not in document:
        return document
    declared = structure(EnvironmentSpec, document["environment"], "environment", [])
    if declared is None:  # structure() reports it with the whole document
        return document
    for index, name in enumerate(declared.allow):
        if name not in environment:
            problems.append(
                Problem(
                    f"environment.allow[{index}]",
                    f"the environment has no {name}",
                    "set it in the pod (env:, fieldRef:) or on the command line",
                )
            )
    known = {name: environment.get(name, f"${{{name}}}") for name in declared.allow}
    used = [name for _, name in references(document, "")]
    if len(used) > MOST_OF_ALL or sum(len(known.get(name, "")) for name in used) > LARGEST_DOCUMENT:
        reason = f"the values of its variables are more than {MOST_OF_ALL} in all, or longer than {LARGEST_DOCUMENT} bytes together"
        problems.append(Problem("environment", reason, "write less of them into the document"))
        return document
    return {
        name: value if name == "environment" else expanded(value, known, name, problems)
        for name, value in document.items()
    }
