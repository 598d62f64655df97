"""A value of a JSON or YAML document with its path in it, so that every error names the place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, Self

import attrs

from runner.cpuset import MAX_CPU, CpuSet
from runner.errors import Problem, SpecError


@attrs.frozen
class Value:
    """One value of the document *source*, at *path* (``entries.uid[1]``), under *key* of its object.

    A value that is not of the asked type raises :class:`SpecError` with the path.
    """

    value: Any
    source: str
    path: str = ""
    key: str = ""

    @classmethod
    def of_json(cls, text: str, source: str) -> Self:
        """Read the text of a document, which is an object."""
        try:
            document = cls(json.loads(text), source)
        except ValueError as error:
            cls(None, source).fail(f"is not JSON: {error}")
        document.members()
        return document

    def fail(self, message: str, remedy: str = "") -> NoReturn:
        """Raise :class:`SpecError`: *message* says what is wrong with the value."""
        raise SpecError(self.source, [Problem(self.path, message, remedy)])

    def get(self, key: str, default: Mapping[str, Any] | None = None) -> Value:
        """Return what the object has under *key*, or *default*."""
        if not isinstance(self.value, dict):
            self.fail(f"must be an object, found {self.value!r}")
        # Go leaves an empty map out, or writes null.
        value = self.value.get(key)
        return Value(default if value is None else value, self.source, f"{self.path}.{key}".lstrip("."), key)

    def __bool__(self) -> bool:
        """Tell whether there is a value."""
        return self.value is not None

    def members(self) -> list[Value]:
        """Return the values of an object, in its order."""
        if not isinstance(self.value, dict):
            self.fail(f"must be an object, found {self.value!r}")
        return [self.get(key) for key in self.value]

    def elements(self) -> Iterator[Value]:
        """Yield the elements of a list."""
        if not isinstance(self.value, list):
            self.fail(f"must be a list, found {self.value!r}")
        for index, value in enumerate(self.value):
            yield Value(value, self.source, f"{self.path}[{index}]")

    def number(self) -> int:
        """Take a whole number from 0."""
        if type(self.value) is not int or self.value < 0:
            self.fail(f"must be a whole number, found {self.value!r}")
        return self.value

    def numbers(self) -> tuple[int, ...]:
        """Take a list of whole numbers."""
        return tuple(element.number() for element in self.elements())

    def decimal(self) -> int:
        """Take the key for a NUMA node."""
        if not self.key.isascii() or not self.key.isdigit() or int(self.key) > MAX_CPU:
            self.fail(f"{self.key!r} is no NUMA node")
        return int(self.key)

    def text(self) -> str:
        """Take a string."""
        if not isinstance(self.value, str):
            quotes = f'write it in quotes: "{self.value}"' if isinstance(self.value, int | float) else ""
            self.fail(f"must be a string, found {self.value!r}", quotes.lower())
        return self.value

    def flag(self) -> bool:
        """Take a truth value."""
        if not isinstance(self.value, bool):
            self.fail(f"must be true or false, found {self.value!r}")
        return self.value

    def cpu_set(self) -> CpuSet:
        """Take a string of CPUs in the kernel's list format."""
        try:
            return CpuSet.parse(self.text())
        except ValueError as error:
            self.fail(str(error))
