"""A value of a JSON or YAML document together with its path in the document, so that errors can name the path."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn

from runner.base.cpuset import CpuSet
from runner.base.errors import Problem, SpecError
from runner.base.values import frozen


@frozen
class Value:
    """One value of a document. Its methods raise :class:`SpecError` with the path if it does not have the requested type."""

    value: Any
    source: str
    """The name of the document in errors."""
    path: str = ""
    """The path in the document, such as ``reservedMemory[1].limits``; empty for the document itself."""
    key: str = ""
    """The key of the value in its object; empty for the document itself and for elements of lists."""

    def fail(self, message: str, remedy: str = "") -> NoReturn:
        """Raise :class:`SpecError` for this value; *message* is a verb phrase, such as ``must be a string``."""
        raise SpecError(self.source, [Problem(self.path, message, remedy)])

    def get(self, key: str, default: Mapping[str, Any] | None = None) -> Value:
        """Return the member *key* of this object, or *default* if it is missing or null."""
        if not isinstance(self.value, dict):
            self.fail(f"must be an object, found {self.value!r}")
        # Go omits an empty map, or writes null for it.
        value = self.value.get(key)
        return Value(default if value is None else value, self.source, f"{self.path}.{key}".lstrip("."), key)

    def __bool__(self) -> bool:
        """Tell whether the value exists and is not null."""
        return self.value is not None

    def members(self) -> list[Value]:
        """Return the members of an object, in its order."""
        if not isinstance(self.value, dict):
            self.fail(f"must be an object, found {self.value!r}")
        return [self.get(key) for key in self.value]

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Fail for a member of this object whose key is not *known*."""
        for member in self.members():
            if member.key not in known:
                member.fail("is not known")

    def elements(self) -> Iterator[Value]:
        """Yield the elements of a list."""
        if not isinstance(self.value, list):
            self.fail(f"must be a list, found {self.value!r}")
        for index, value in enumerate(self.value):
            yield Value(value, self.source, f"{self.path}[{index}]")

    def number(self, most: int | None = None) -> int:
        """Return the value as a whole number from 0, to *most* if that is given."""
        if type(self.value) is not int or self.value < 0:
            self.fail(f"must be a whole number, found {self.value!r}")
        if most is not None and self.value > most:
            self.fail(f"must be a whole number up to {most}")
        return self.value

    def numbers(self) -> tuple[int, ...]:
        """Return the value as a list of whole numbers from 0."""
        return tuple(element.number() for element in self.elements())

    def text(self) -> str:
        """Return the value as a string."""
        if not isinstance(self.value, str):
            remedy = f'write it in quotes: "{self.value}"' if isinstance(self.value, int | float) else ""
            self.fail(f"must be a string, found {self.value!r}", remedy.lower())
        return self.value

    def flag(self) -> bool:
        """Return the value as a boolean."""
        if not isinstance(self.value, bool):
            self.fail(f"must be true or false, found {self.value!r}")
        return self.value

    def cpu_set(self) -> CpuSet:
        """Return the value as CPUs; it is a string in the kernel's list format."""
        try:
            return CpuSet.parse(self.text())
        except ValueError as error:
            self.fail(str(error))
