"""The check of specs without a host (``plan --document-only``), and of the YAML that a spec contains.

Only ``plan`` imports it: PID 1 must not load a YAML parser, and cloud-init in the guest ignores a document that is no YAML.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, TypedDict

from runner.base.errors import Problem, RunnerError, SpecError, escaped, explain, problems_of
from runner.base.values import frozen
from runner.cli.options import read_spec, source_of
from runner.plan.cloud_init import SeedPlan, yaml_kind
from runner.plan.spec_checks import document_problems
from runner.spec.document_parser import parse_document
from runner.spec.instance import CloudInitSpec, InstanceSpec, parse_elsewhere
from runner.spec.refusals import FORMAT, ProblemDocument, problem_documents
from runner.spec.yaml import parse_yaml


class JudgedDocument(TypedDict):
    """The result for one document."""

    document: str
    """Its name on the command line."""
    right: bool
    unset: list[str]
    """The variables that it uses but that are not set here."""
    problems: list[ProblemDocument]


class DocumentsDocument(TypedDict):
    """The results of ``plan --document-only``, without a host."""

    version: Literal[1]
    documents: list[JudgedDocument]


@frozen
class _Judged:
    """A document, its spec if it is valid and depends on no unset variable, and the names of those variables."""

    source: str
    written: Mapping[str, object]
    spec: InstanceSpec | None = None
    unset: tuple[str, ...] = ()
    error: RunnerError | None = None


def check_documents(paths: Iterable[str], *, as_json: bool) -> int:
    """Print the problems and remarks of each document, one line for a document without any; return the highest exit status."""
    judged = list[_Judged]()
    for path in paths:
        judged.append(_judge(path))
        if not as_json:
            _print(judged[-1])
    if as_json:
        document: DocumentsDocument = {"version": FORMAT, "documents": [*map(_as_json, judged)]}
        print(json.dumps(document, indent=1))
    return max((each.error.status for each in judged if each.error is not None), default=0)


def _judge(path: str) -> _Judged:
    source, written = source_of(path), dict[str, object]()
    try:
        data = read_spec(path)
        written = parse_document(source, data)
        return _Judged(source, written, *_checked(source, data))
    except RunnerError as error:
        return _Judged(source, written, error=error)


def _print(judged: _Judged) -> None:
    if judged.error is not None:
        sys.stdout.flush()
        print("\n".join(f"instance-runner: {line}" for line in explain(judged.error).splitlines()), file=sys.stderr)
        return
    about = "right" if judged.spec is None else f"right, {_summary(judged.spec)}"
    unknown = f"; without the values of {', '.join(judged.unset)}, which are not set here" if judged.unset else ""
    print(escaped(f"{judged.source}: {about}{unknown}"))


def _as_json(judged: _Judged) -> JudgedDocument:
    problems = (
        [] if judged.error is None else problem_documents(judged.source, problems_of(judged.error), judged.written)
    )
    return {"document": judged.source, "right": not problems, "unset": [*judged.unset], "problems": problems}


def _checked(source: str, data: bytes) -> tuple[InstanceSpec | None, tuple[str, ...]]:
    spec, unset = parse_elsewhere(source, data, os.environ)
    if spec is not None:
        problems = document_problems(spec)
        if spec.cloud_init is not None:
            problems += yaml_problems(_texts(spec.cloud_init))
        if problems:
            raise SpecError(source, problems)
    return spec, unset


def _summary(spec: InstanceSpec) -> str:
    from runner.spec.rules import counted, format_size

    count = "all CPUs" if spec.cpu.count == "all" else counted(spec.cpu.count, "vCPU")
    return f"{count}, {'memory by limits' if spec.memory.size == 'limits' else format_size(spec.memory.size)}"


def _texts(cloud_init: CloudInitSpec) -> dict[str, bytes]:
    """Return the documents contained in the spec, by key; those in files are not included."""
    given = {name: getattr(cloud_init, name) for name in ("user_data", "meta_data", "network_config")}
    return {name: value.encode() for name, value in given.items() if isinstance(value, str)}


def refuse_broken_seed(source: str, seed: SeedPlan) -> None:
    """Raise :exc:`~runner.base.errors.SpecError` if cloud-init could not read the documents of *seed*."""
    given = {"user_data": seed.user_data, "meta_data": seed.meta_data, "network_config": seed.network_config}
    problems = [*yaml_problems({name: secret.content for name, secret in given.items() if secret is not None})]
    if problems:
        raise SpecError(source, problems)


def yaml_problems(documents: Mapping[str, bytes]) -> Iterator[Problem]:
    """Yield the problems for cloud-init in *documents*, by their keys in ``[cloud_init]``: YAML with one mapping, or a list of parts.

    User-data may be of another kind than YAML; cloud-init uses the last value of a repeated key.
    """
    for name, content in documents.items():
        kind = yaml_kind(content) if name == "user_data" else dict
        if kind is None:
            continue
        where = f"cloud_init.{name}"
        try:
            values = parse_yaml(where, content, repeated=True)
        except SpecError as error:
            yield from (Problem(where, each.message, "cloud-init would ignore it") for each in error.problems)
            continue
        empty = not values and name == "user_data"
        if not empty and (len(values) != 1 or not isinstance(values[0].value, kind)):
            yield (
                Problem(where, "must be one mapping in YAML or JSON", "write keys with values, such as `version: 2`")
                if kind is dict
                else Problem(where, "must be one list in YAML or JSON", "write its parts, each after a `-`")
            )
