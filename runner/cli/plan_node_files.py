"""Reading the files of ``plan --node``, including the packaged examples; manifests also from directories and standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from runner.base.document_value import Value
from runner.base.errors import SpecError, UsageError, in_shell
from runner.cli.options import source_of
from runner.node_plan.configuration import configuration_among
from runner.node_plan.manifest_mistakes import mistakes_of
from runner.node_plan.vendor_forms import form_of_text, no_configuration
from runner.spec.yaml import MAX_BYTES, parse_yaml

PACKAGE = Path(__file__).parents[1]
"""This package, which in a wheel contains the examples (``pyproject.toml``)."""
KUSTOMIZATIONS = ("kustomization.yaml", "kustomization.yml", "Kustomization")
"""``RecognizedKustomizationFileNames`` of kustomize."""


def read_manifests(paths: Iterable[str]) -> list[Value]:
    """Return the documents in all *paths*, in their order; a directory has those of its files, by name."""
    return [
        document for path in paths for file in _files(path) for document in parse_yaml(source_of(file), _read(file))
    ]


def manifest_notes(paths: Iterable[str], documents: Iterable[Value]) -> Iterator[str]:
    """Yield a sentence for each mistake in *documents*, and for each kustomization among *paths*, which is not applied."""
    for path in paths:
        if any((Path(path) / name).is_file() for name in KUSTOMIZATIONS):
            yield (
                f"{path}: its kustomization was not applied; that is done by"
                f" `kubectl kustomize {in_shell(path)} | instance-runner plan --node … --pod -`"
            )
    yield from mistakes_of(documents)


def _files(path: str) -> list[str]:
    """Return *path*, or the files of this directory that ``kubectl apply -f`` reads, without kustomizations."""
    if not Path(path).is_dir():
        return [path]
    files = (each for each in sorted(Path(path).iterdir()) if each.suffix in {".json", ".yaml", ".yml"})
    return [str(each) for each in files if each.name not in KUSTOMIZATIONS]


def read_named(path: str, what: str) -> bytes:
    """Read the file *path*, or the example of that name from the documents, which an installed package includes."""
    example = PACKAGE / path
    named = path.startswith("examples/") and ".." not in example.parts and not Path(path).exists() and example.is_file()
    try:
        with (example if named else Path(path)).open("rb") as file:  # it may be a pipe, of a shell's <(…)
            return file.read(MAX_BYTES + 1)  # a larger one is refused unparsed
    except OSError as error:
        raise UsageError(f"cannot read the {what} {path!r}") from error


def read_configuration(path: str) -> Value:
    """Return the kubelet's configuration in the file *path*, or in an example.

    Raises :class:`UsageError` for a file of another kind, and :class:`SpecError` for one that is no YAML.
    """
    data = read_named(path, "kubelet configuration")
    try:
        documents = parse_yaml(path, data)
    except SpecError:
        name, form = form_of_text(data)
        if form:
            raise no_configuration(path, name, form) from None
        raise
    if not documents:
        raise no_configuration(path, "nothing", "")
    return configuration_among(documents)


def _read(file: str) -> bytes:
    if file != "-":
        return read_named(file, "manifest")
    try:
        return sys.stdin.buffer.read(MAX_BYTES + 1)  # a larger one is refused unparsed
    except OSError as error:
        raise UsageError("cannot read the manifest '-'") from error
