"""Frozen values: ``attrs.frozen``, whose classes share one comparison, one hash and one ``repr``.

attrs compiles those for each class when it is imported: 0.23 of the 0.40 ms that a class takes, and PID 1 imports a
hundred classes before its guest runs (``tests/benchmarks/README.md``). attrs leaves out what a class already has. What changes
has none of the three: ``attrs.define`` without comparison and ``repr``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    from attrs import define, frozen  # mypy knows attrs' own decorators
else:
    import attrs

    def define(cls: type) -> type:
        """Return *cls* as ``attrs.define`` makes it; as it is mutable, an instance equals only itself and has Python's own ``repr``."""
        return attrs.define(cls, eq=False, repr=False)

    def frozen(cls: type) -> type:
        """Return *cls* as ``attrs.frozen`` makes it, with the methods below unless it has its own."""
        for name, method in (("__eq__", _equal), ("__hash__", _hash), ("__repr__", _repr)):
            if name not in cls.__dict__:
                setattr(cls, name, method)
        return attrs.frozen(cls)


__all__ = ["Fd", "define", "frozen"]

Fd = Annotated[int, "an open descriptor"]
"""The number of an open descriptor, which goes along when a runner becomes another program; a negative one stands for none."""


def _values(value: Any) -> tuple[Any, ...]:
    return tuple(getattr(value, field.name) for field in value.__attrs_attrs__)


def _equal(self: Any, other: object) -> bool:
    return _values(self) == _values(other) if other.__class__ is self.__class__ else NotImplemented


def _hash(self: Any) -> int:
    return hash((self.__class__, _values(self)))


def _repr(self: Any) -> str:
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in self.__attrs_attrs__ if field.repr)
    return f"{self.__class__.__qualname__.rpartition('>.')[2]}({', '.join(shown)})"


LONGEST_TEXT = 1000
"""Characters of another program's text that are kept or logged: a log drops a line that is too long."""


def whole_number(value: object) -> int:
    """Return *value* if it is a whole number of at most 63 bits, and not negative. Raises ``TypeError`` or ``ValueError``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{type(value).__name__} is no whole number")
    if not 0 <= value < 1 << 63:
        raise ValueError("no number of 63 bits")
    return value


def short_text(value: object) -> str:
    """Return *value* if it is a text of at most :data:`LONGEST_TEXT` characters. Raises ``TypeError`` or ``ValueError``."""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} is no text")
    if len(value) > LONGEST_TEXT:
        raise ValueError(f"a text of {len(value)} characters")
    return value
