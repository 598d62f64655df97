"""The parser of YAML files for Kubernetes: pod manifests and kubelet configurations, as plain values.

The dialect is YAML 1.1 as the kubelet's parser (``sigs.k8s.io/yaml``) reads it, with three differences: a repeated key
is an error, a date stays a string, and so does ``1:30``, which YAML 1.1 reads as 90. Aliases are accepted as long as
the document stays small when they are expanded.

Only ``plan`` reads YAML: PyYAML costs tens of milliseconds and 2.6 MB, and PID 1 never imports this module.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any, ClassVar

import yaml

from runner.base.document_value import Value
from runner.base.errors import Problem, SpecError

MAX_BYTES = 3 << 20
"""Size of the largest file accepted; etcd stores at most half of that for one object."""
MAX_VALUES = 100_000
"""Largest number of values in a file, and in one of its documents after aliases are expanded."""


def parse_yaml(source: str, data: bytes, *, repeated: bool = False) -> list[Value]:
    """Parse the documents of one file, without empty ones; *source* is its name in errors.

    Keys become strings, as they are in JSON. With *repeated* the last value of a repeated key counts. Raises :class:`SpecError`
    with line and column.
    """
    if len(data) > MAX_BYTES:
        raise SpecError(
            source, [Problem("", f"cannot parse the document: {len(data)} bytes are more than {MAX_BYTES}")]
        )
    try:
        documents = list(yaml.load_all(data, _RepeatingLoader if repeated else _Loader))
    except (yaml.YAMLError, ValueError) as error:  # not UTF-8, or an integer of thousands of digits
        raise SpecError(source, [Problem("", f"cannot parse the document as YAML: {_sentence(error)}")]) from None
    except RecursionError:
        raise SpecError(source, [Problem("", "cannot parse the document as YAML: it is nested too deeply")]) from None
    many = len(documents) > 1
    return [
        Value(document, f"{source} (document {number})" if many else source)
        for number, document in enumerate(documents, start=1)
        if document is not None
    ]


def _sentence(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return str(error).splitlines()[0]


class _Loader(yaml.SafeLoader):
    """PyYAML's loader in Python, not that in C: on a deeply nested document it raises an error instead of crashing."""

    repeated: ClassVar[bool] = False
    """Whether a key may be repeated; the last value counts."""
    values: int = 0
    """Number of values read from the file, before aliases are expanded."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.values += 1  # counted first: each takes 40 µs and 0.5 KB
        if self.values > MAX_VALUES:
            raise yaml.constructor.ConstructorError(None, None, f"more than {MAX_VALUES} values", self.get_mark())
        return super().compose_node(parent, index)

    def get_data(self) -> Any:
        node = self.get_node()
        if node is not None:
            _check(node, repeated=self.repeated)
        return self.construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002
        self.flatten_mapping(node)
        mapping: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a scalar", key_node.start_mark)
            mapping[key_node.value if isinstance(key, bool) else str(key)] = self.construct_object(
                value_node, deep=deep
            )
        return mapping


class _RepeatingLoader(_Loader):
    repeated = True


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":int", ":float"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# The numbers of YAML 1.1 without base 60, whose pattern matches times of day and MAC addresses.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]+|0|[1-9][0-9_]*)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)$"
    ),
    list("-+0123456789."),
)


def _check(root: yaml.Node, *, repeated: bool) -> None:
    """Refuse repeated keys unless they may be, an alias that contains itself, and more than :data:`MAX_VALUES` values after expansion."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        known = sizes.get(id(node))
        if known == 0:
            raise yaml.constructor.ConstructorError(None, None, "an alias contains itself", node.start_mark)
        if known is not None:
            return known
        sizes[id(node)] = 0
        inner = 0
        if isinstance(node, yaml.MappingNode):
            if not repeated:
                _check_keys(node)
            inner = sum(size(key) + size(value) for key, value in node.value)
        elif isinstance(node, yaml.SequenceNode):
            inner = sum(map(size, node.value))
        sizes[id(node)] = 1 + inner
        if inner >= MAX_VALUES:
            raise yaml.constructor.ConstructorError(
                None, None, f"more than {MAX_VALUES} values with aliases expanded", node.start_mark
            )
        return 1 + inner

    size(root)


def _check_keys(mapping: yaml.MappingNode) -> None:
    seen: set[object] = set()
    for key, _ in mapping.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is repeated", key.start_mark
                )
            seen.add(key.value)
