"""The values of ``runner.base.values``: what attrs' own comparisons, hash and repr say of them."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import pytest

from runner.base.values import frozen


def classes(decorator: Any) -> tuple[Any, Any]:
    """Return two classes of the same fields, decorated by *decorator*."""

    class Inner:
        number: int
        secret: bytes = attrs.field(default=b"", repr=False)
        kind: ClassVar[str] = "inner"

    class Outer:
        inner: Any
        names: tuple[str, ...] = ()

    return decorator(Inner), decorator(Outer)


INNER, OUTER = classes(frozen)
ATTRS_INNER, ATTRS_OUTER = classes(attrs.frozen)


@pytest.mark.parametrize("first", [(1,), (2,), (1, b"x")])
@pytest.mark.parametrize("second", [(1,), (2,), (1, b"x")])
def test_comparison_and_hash_are_those_of_attrs(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    ours, theirs = ((cls(*first), cls(*second)) for cls in (INNER, ATTRS_INNER))
    assert (ours[0] == ours[1]) is (theirs[0] == theirs[1]) is (first == second)
    assert (ours[0] != ours[1]) is (theirs[0] != theirs[1])
    assert (hash(ours[0]) == hash(ours[1])) is (hash(theirs[0]) == hash(theirs[1]))


def test_a_value_equals_no_value_of_another_class() -> None:
    assert INNER(1) != ATTRS_INNER(1)
    assert INNER(1) != (1, b"")
    assert OUTER(INNER(1)) == OUTER(INNER(1)) != OUTER(ATTRS_INNER(1))


def test_a_repr_is_that_of_attrs() -> None:
    assert repr(OUTER(INNER(1, b"x"), ("a",))) == repr(ATTRS_OUTER(ATTRS_INNER(1, b"x"), ("a",)))
    assert "x" not in repr(INNER(1, b"x"))


def test_a_class_keeps_its_own_methods() -> None:
    @frozen
    class Named:
        name: str

        def __repr__(self) -> str:
            return self.name

    assert repr(Named("a")) == "a"
    assert Named("a") == Named("a")


def test_everything_else_is_that_of_attrs() -> None:
    value = INNER(1)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        value.number = 2
    assert attrs.evolve(value, number=2) == INNER(2)
    assert attrs.asdict(OUTER(value)) == {"inner": {"number": 1, "secret": b""}, "names": ()}
    assert not hasattr(value, "__dict__")
    match value:
        case INNER(number):
            assert number == 1
