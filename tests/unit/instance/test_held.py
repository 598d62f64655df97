from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest

from runner.base.errors import HostError
from runner.instance.held import Held


@attrs.define
class Events:
    """What has happened, in order."""

    names: list[str] = attrs.field(factory=list)

    def made(self, value: Any = "made") -> Any:
        self.names.append("made")
        return value

    def back(self, error: BaseException) -> None:
        self.names.append(f"back: {error}")

    @contextmanager
    def block(self, value: Any = "made") -> Iterator[Any]:
        self.names.append("entered")
        try:
            yield value
        finally:
            self.names.append("released")


@pytest.fixture
def events() -> Events:
    return Events()


def renewed(events: Events, **found: Any) -> Held:
    return Held(found, fall_back=events.back)


def test_a_fresh_start_makes_and_a_renewed_program_finds(events: Events) -> None:
    counts = {"a": 1}
    first = Held()
    assert first.value("counts", lambda: events.made(counts)) is counts
    counts["a"] = 2
    found = first.read["counts"]()
    second = renewed(events, counts=found)
    assert second.value("counts", events.made) == {"a": 2}
    assert second.read["counts"]() == {"a": 2}
    second.commit()
    assert events.names == ["made"]


async def test_an_act_is_done_once(events: Events) -> None:
    async def act() -> str:
        return str(events.made("done"))

    first = Held()
    assert await first.once("act", act) == "done"
    assert await renewed(events, act=first.read["act"]()).once("act", act) == "done"
    assert events.names == ["made"]


def test_a_name_that_is_missing_is_an_error_unless_it_is_newer(events: Events) -> None:
    held = renewed(events)
    with pytest.raises(HostError, match="cannot take over thing: the previous program did not hold it"):
        held.value("thing", events.made)
    assert events.names == ["back: cannot take over thing: the previous program did not hold it"]
    held.newer = lambda name: name == "thing"
    assert held.value("thing", events.made) == "made"


def test_what_nothing_asks_for_is_an_error(events: Events) -> None:
    held = renewed(events, one=1, two=2)
    held.value("one", events.made)
    with pytest.raises(HostError, match="cannot take over two: nothing here asks for it"):
        held.commit()
    assert events.names == ["back: cannot take over two: nothing here asks for it"]


def test_the_program_before_goes_on_before_anything_is_released(events: Events) -> None:
    held = renewed(events, outer=1, inner=2)
    with (
        pytest.raises(OSError, match="injected"),
        held.block("outer", events.block, events.block),
        held.block("inner", events.block, events.block),
    ):
        raise OSError("injected")
    assert events.names[:3] == ["entered", "entered", "back: injected"]
    assert events.names[-1] == "released"


def test_an_error_after_the_commit_releases_as_ever(events: Events) -> None:
    held = renewed(events, outer=1)

    def fail() -> None:
        with held.block("outer", events.block, events.block):
            held.commit()
            raise OSError("injected")

    with pytest.raises(OSError, match="injected"):
        fail()
    assert events.names == ["entered", "released"]


def test_a_check_that_fails_before_the_commit_is_a_way_back(events: Events) -> None:
    held = renewed(events)
    held.at_commit(lambda: events.names.append("committed"))

    def fail() -> None:
        raise HostError("it is misplaced")

    held.before_commit(fail)
    with pytest.raises(HostError):
        held.commit()
    assert events.names == ["back: it is misplaced"]


def test_what_is_done_at_the_commit_is_done_at_once_where_there_is_no_way_back(events: Events) -> None:
    for held, before in ((Held(), ["done"]), (renewed(events), [])):
        events.names.clear()
        held.at_commit(lambda: events.names.append("done"))
        assert events.names == before
        held.commit()
        held.commit()
        assert events.names == ["done"]


def test_what_qemu_has_got_is_not_made_again(events: Events) -> None:
    with (
        Held().passed_on(events.block, "nothing") as first,
        renewed(events).passed_on(events.block, "nothing") as second,
    ):
        assert (first, second) == ("made", "nothing")


def test_a_pair_has_its_other_end_only_in_a_fresh_start(events: Events) -> None:
    first = Held()
    with first.pair("line", "a line") as (ours, theirs):
        assert theirs is not None
        number = first.read["line"]()
        assert number == ours.fileno()
        second = renewed(events, line=os.dup(ours.fileno()))
        with second.pair("line", "a line") as (again, none):
            assert none is None
            again.sendall(b"x")
        assert theirs.recv(1) == b"x"


def test_attributes_are_held_and_found(events: Events) -> None:
    first = Held()
    first.keep(events, names="what has happened")
    events.names = ["changed"]
    second = Events()
    renewed(events, **{"what has happened": first.read["what has happened"]()}).keep(second, names="what has happened")
    assert second.names == ["changed"]
    with pytest.raises(AttributeError, match="missing"):
        Held().keep(events, missing="a name")
