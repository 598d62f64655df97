"""Three things that trio lacks: the first of several tasks, an outcome as a value, and an event that can be set repeatedly."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import NoReturn, TypeVar

import attrs
import trio

from runner.base.values import define

T = TypeVar("T")


@define
class Announcements:
    """Wakes the tasks that wait for a repeated event: :meth:`announce` sets *next* and replaces it by a new event."""

    next: trio.Event = attrs.field(factory=trio.Event)

    def announce(self) -> None:
        """Wake the tasks that wait for *next*."""
        self.next.set()
        self.next = trio.Event()


async def first_of(*acts: Callable[[], Awaitable[T]]) -> T:
    """Run all *acts* at once and return (or raise) what the first to end returns (or raises); the others are cancelled."""
    ended: list[Callable[[], T]] = []

    async with trio.open_nursery() as nursery:

        async def run(act: Callable[[], Awaitable[T]]) -> None:
            ended.append(await capture(act))
            nursery.cancel_scope.cancel()

        for act in acts:
            nursery.start_soon(run, act)
    return ended[0]()


async def capture(act: Callable[[], Awaitable[T]]) -> Callable[[], T]:
    """Run *act* and return a function that returns, or raises, what *act* did.

    Called outside of a nursery, that function raises an error as it is: the nursery would wrap it.
    """
    try:
        value = await act()
    except Exception as error:  # noqa: BLE001 - raised where the result is asked for
        return partial(_raise, error)
    return lambda: value


def _raise(error: Exception) -> NoReturn:
    raise error
