"""The gate for live changes: what each kind does to each other, by its table; and what those that wait and the operator learn."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import trio
import trio.testing

from runner.base.errors import RefusedError
from runner.instance.gate import (
    PRECEDENCE,
    Changes,
    Kind,
    OvertakenError,
    Precedence,
    StopRequest,
    StopRequestedError,
)


@asynccontextmanager
async def in_progress(changes: Changes, kind: Kind, over: trio.Event, log: list[str]) -> AsyncIterator[None]:
    """Have a change of *kind* in progress until *over* is set; note how it ended."""
    begun = trio.Event()

    async def change() -> None:
        try:
            async with changes.begin(kind, "the first is being made") as made:
                made.left = "half of it stays"
                begun.set()
                await over.wait()
            log.append("first made")
        except (RefusedError, StopRequestedError) as error:
            log.append(f"first given up: {error}")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(change)
        await begun.wait()
        yield
        over.set()


PAIRS = [pair for pair in itertools.product(Kind, Kind) if pair[1] is not Kind.STOP]


@pytest.mark.parametrize(("coming", "other"), PAIRS, ids=lambda kind: kind.name)
async def test_each_kind_does_to_each_other_what_the_table_says(coming: Kind, other: Kind) -> None:
    changes, over, log = Changes(StopRequest()), trio.Event(), list[str]()
    precedence = PRECEDENCE[coming, other]

    async def come() -> None:
        try:
            async with changes.begin(coming, "the second is being made"):
                log.append("second made")
        except RefusedError as error:
            log.append(str(error))

    async with in_progress(changes, other, over, log), trio.open_nursery() as nursery:
        nursery.start_soon(come)
        await trio.testing.wait_all_tasks_blocked()
        match precedence:
            case Precedence.WAIT:
                assert log == []
                over.set()
                await trio.testing.wait_all_tasks_blocked()
                assert log == ["first made", "second made"]
            case Precedence.REFUSE:
                now = f"cannot {coming.value} now: the first is being made (for 0 s); ask again later"
                assert log == [now]
            case Precedence.OVERTAKE:
                reason = f"cannot {other.value}: the second is being made; half of it stays"
                first = f"first given up: {'' if other is Kind.START else reason}"
                assert sorted(log) == sorted([first, "second made"])


@pytest.mark.parametrize("coming", [kind for kind in Kind if kind is not Kind.STOP], ids=lambda kind: kind.name)
@pytest.mark.parametrize("when", ["asked for", "in progress"])
async def test_nothing_is_begun_after_a_stop(coming: Kind, when: str) -> None:
    stop = StopRequest()
    changes = Changes(stop)
    async with trio.open_nursery() as nursery:
        if when == "asked for":
            stop.ask("SIGTERM")
        else:
            async with changes.begin(Kind.STOP, "the instance ends: QEMU was killed"):
                pass
        with pytest.raises((RefusedError, StopRequestedError)) as refused:
            async with changes.begin(coming, "the second is being made"):
                pytest.fail("it was begun")
        nursery.cancel_scope.cancel()
    why = "the instance was asked to stop (SIGTERM)" if when == "asked for" else "the instance ends: QEMU was killed"
    assert coming is Kind.START or str(refused.value) == f"cannot {coming.value} now: {why}"
    assert isinstance(refused.value, StopRequestedError) is (coming is Kind.START)


async def test_a_stop_overtakes_what_is_in_progress_and_ends_what_waits() -> None:
    stop, over, log = StopRequest(), trio.Event(), list[str]()
    changes = Changes(stop)

    async def wait() -> None:
        with pytest.raises(RefusedError, match="cannot change the number of vCPUs now: the instance was asked to stop"):
            async with changes.begin(Kind.VCPUS, "the vCPUs are being changed"):
                pytest.fail("it was begun")

    async with in_progress(changes, Kind.DISK, over, log), trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        stop.ask("SIGTERM")
    assert log == ["first given up: cannot change a disk: the instance was asked to stop (SIGTERM); half of it stays"]


async def test_a_stop_waits_until_what_it_has_overtaken_has_undone_its_half() -> None:
    stop, log = StopRequest(), list[str]()
    changes, begun = Changes(stop), trio.Event()

    async def change() -> None:
        with suppress(OvertakenError):
            async with changes.begin(Kind.QEMU_UPDATE, "QEMU is being updated"):
                try:
                    begun.set()
                    await trio.sleep_forever()
                finally:
                    with trio.CancelScope(shield=True):
                        await trio.testing.wait_all_tasks_blocked()
                        log.append("undone")
        log.append("over")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(change)
        await begun.wait()
        stop.ask("SIGTERM")
        async with changes.begin(Kind.STOP, "the instance ends"):
            log.append("stopping")
    assert sorted(log) == ["over", "stopping", "undone"]
    assert log[0] == "undone"


async def test_those_that_wait_begin_in_their_order_and_what_overtakes_before_them() -> None:
    changes, over, log = Changes(StopRequest()), trio.Event(), list[str]()

    async def made(kind: Kind, name: str) -> None:
        try:
            async with changes.begin(kind, f"{name} is being made"):
                log.append(name)
                await trio.lowlevel.checkpoint()
        except RefusedError as error:
            log.append(f"{name}: {error}")

    async with in_progress(changes, Kind.VCPUS, over, []), trio.open_nursery() as nursery:
        for kind, name in (
            (Kind.PLACEMENT, "one"),
            (Kind.DISK, "two"),
            (Kind.CPUS_LOST, "three"),
            (Kind.PLACEMENT, "four"),
        ):
            nursery.start_soon(made, kind, name)
            await trio.testing.wait_all_tasks_blocked()
        refused = "two: cannot change a disk now: three is being made (for 0 s); ask again later"
        assert log == [refused], "its reason may last"
        over.set()
    assert log == [refused, "one", "three", "four"]


async def test_one_that_is_cancelled_while_it_waits_lets_the_next_one_begin() -> None:
    changes, over, log = Changes(StopRequest()), trio.Event(), list[str]()
    scope = trio.CancelScope()

    async def made(name: str, within: trio.CancelScope) -> None:
        with within:
            async with changes.begin(Kind.DISK, "a disk is being changed"):
                log.append(name)

    async with in_progress(changes, Kind.DISK, over, log), trio.open_nursery() as nursery:
        nursery.start_soon(made, "two", scope)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(made, "three", trio.CancelScope())
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
        over.set()
    assert log == ["first made", "three"]


async def test_an_error_of_a_change_is_its_own_and_the_gate_is_open_again() -> None:
    changes = Changes(StopRequest())

    async def change() -> None:
        async with changes.begin(Kind.DISK, "a disk is being attached"):
            assert changes.making(Kind.DISK)
            assert changes.current is not None
            assert changes.current.to_json() == {"what": "a disk is being attached", "seconds": 0}
            raise ValueError("of the change")

    with pytest.raises(ValueError, match="of the change"):
        await change()
    assert changes.current is None
    await changes.over(Kind.DISK)


async def test_the_end_of_a_kind_can_be_waited_for() -> None:
    changes, over, log = Changes(StopRequest()), trio.Event(), list[str]()

    async def wait(act: Callable[[], Awaitable[None]]) -> None:
        await act()
        log.append("over")

    async with in_progress(changes, Kind.QEMU_UPDATE, over, log), trio.open_nursery() as nursery:
        nursery.start_soon(wait, lambda: changes.over(Kind.QEMU_UPDATE))
        await trio.testing.wait_all_tasks_blocked()
        assert log == []
        over.set()
    assert sorted(log) == ["first made", "over"]
