"""The line reader: its bounds on bytes and on lines, for input split anywhere."""

from __future__ import annotations

import itertools
import random

import pytest

from runner.kernel.line_reader import LINES_PER_STEP, LineFramer, OverlongError, pieces, receive_line


def test_lines_do_not_depend_on_how_they_are_split_into_pieces() -> None:
    text = b"one\n\ntwo\r\n" + b"x" * 50 + b"\nthe end\n"
    for size in range(1, len(text) + 1):
        framer = LineFramer(50)
        found: list[bytes] = []
        for begin in range(0, len(text), size):
            framer.feed(text[begin : begin + size])
            found += framer.step()
        assert found == text.split(b"\n")[:-1]
        assert not framer


@pytest.mark.parametrize("end", [b"\n", b"\xff", b"\r\n\r\n"])
def test_a_line_has_its_limit_and_its_end_does_not_count(end: bytes) -> None:
    text = b"x" * 10 + end + b"rest"
    for cut in range(len(text) + 1):
        framer = LineFramer(10)
        framer.feed(text[:cut])
        line = framer.next_line(end)
        framer.feed(text[cut:])
        assert (line or framer.next_line(end)) == b"x" * 10
        assert framer.take_rest() == b"rest"
    framer = LineFramer(10)
    framer.feed(b"x" * 11 + end)
    for _ in range(2):
        with pytest.raises(OverlongError):
            framer.next_line(end)


def test_lines_before_an_overlong_line_are_still_yielded() -> None:
    framer = LineFramer(3)
    framer.feed(b"one\ntwo\nthree\n")
    found: list[bytes] = []
    with pytest.raises(OverlongError):
        found.extend(framer.step())
    assert found == [b"one", b"two"]


def test_a_split_line_loses_nothing() -> None:
    chance = random.Random(20260)  # noqa: S311 - no secret
    for _ in range(200):
        text = b"".join(chance.choice([b"x" * chance.randrange(40), b"\n"]) for _ in range(20))
        framer = LineFramer(10, split=True)
        found: list[bytes] = []
        rest = text
        while rest:
            size = chance.randrange(1, 30)
            framer.feed(rest[:size])
            rest = rest[size:]
            found += framer.step()
        found.append(framer.take_rest())
        assert max(map(len, found)) <= 10
        assert b"".join(found) == text.replace(b"\n", b"")


def test_a_step_is_bounded() -> None:
    framer = LineFramer(10)
    framer.feed(b"\n" * 1000)
    steps = list(itertools.takewhile(bool, (len(list(framer.step())) for _ in range(100))))
    assert steps == [LINES_PER_STEP] * 3 + [1000 - 3 * LINES_PER_STEP]
    assert not framer.has_line


def test_dropped_lines_are_counted_and_the_last_of_them_kept() -> None:
    framer = LineFramer(10)
    assert framer.drop_lines(2) == (0, [])
    framer.feed(b"".join(b"%d\n" % number for number in range(1000)) + b"half")
    assert framer.drop_lines(3) == (1000, [b"997", b"998", b"999"])
    assert framer.take_rest() == b"half"
    framer.feed(b"one\n")
    assert framer.drop_lines(3) == (1, [b"one"])


def test_an_overlong_line_is_dropped_in_pieces_while_lines_are_dropped() -> None:
    framer = LineFramer(10, split=True)
    framer.feed(b"first\n" + b"a" * 10_003)
    assert framer.drop_lines(2) == (1001, [b"a" * 10] * 2)
    assert framer.take_rest() == b"aaa"


def test_pieces_have_few_line_ends_and_lose_nothing() -> None:
    for text in (b"", b"x", b"\n" * 1000, b"a\n" * 700 + b"b", b"x" * 70_000):
        found = list(pieces(text))
        assert b"".join(found) == text
        assert all(0 < piece.count(b"\n") <= LINES_PER_STEP or piece.count(b"\n") == 0 for piece in found)
        assert len(found) <= text.count(b"\n") // LINES_PER_STEP + 1


async def test_a_line_is_received_and_what_follows_it_is_kept() -> None:
    chunks = [b"on", b"e\ntwo\nth", b"", b""]

    async def receive(size: int) -> bytes:
        assert size == 7
        return chunks.pop(0)

    framer = LineFramer(10)
    assert [await receive_line(receive, framer, chunk=7) for _ in range(3)] == [b"one", b"two", None]
    assert framer.take_rest() == b"th"
