"""The store of a runner's resources by name: created in a fresh start, found in a program that renews a runner.

The descriptor store of systemd works in the same way (``FileDescriptorStoreMax=`` of systemd.service(5)). A part of the instance asks for
its resource by name, and cannot tell whether it was created now, or years ago by another version of this program::

    directory = stack.enter_context(held.fd("state directory", lambda: claimed(path)))
    counters = held.value("counters", Counters)
    held.keep(state, panic="panic", halted="halted")
    await held.once("guest runs", begin)

1. A name has one type, in one table: ``NAMES`` in ``runner/instance/renewal/names.py``. A suffix after a colon, as in
   ``anchor:0``, distinguishes resources of one kind. Only that table, and what reads and writes the documents, knows
   how a name looks on the wire; nothing is imported for it in a fresh start.
2. The store holds values (plain, frozen, or changed in place), attributes of larger objects, descriptors and sockets,
   children, and results of acts on the kernel or on QEMU that are done once.
3. At exec no part of the instance is asked: the store has each value itself, or the function that reads it. The next
   program inherits the descriptors whose numbers are in the documents.
4. A renewed program takes everything in one step of the event loop: no method awaits anything that was found. A name
   that is left over was not asked for, which is an error. A name that is missing was not written by the previous
   runner: an error as well, unless the table says that the name is newer than the format of the found state. Then
   the resource is made, as in a fresh start.
5. An error before the end of that step, in a method or in the block of one, executes the previous program
   (:attr:`Held.fall_back`), before anything is released.
6. A resource that QEMU has received is no longer held (:meth:`Held.passed_on`): a fresh start makes it, and a renewed
   program gets an empty one.
7. Times are on the kernel's clock (CLOCK_MONOTONIC): the clock of the event loop begins anew with each program.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn, TypeVar

from runner.base.errors import HostError
from runner.kernel.files import closing
from runner.kernel.sockets import Socket, adopted_socket, connected_pair, hung_up_on, refuse_fds

T = TypeVar("T")
W = TypeVar("W")
"""The type that the table gives to the name of a ``T``."""


def _same(value: Any) -> Any:
    return value


class Held:
    """The store of one program; by default that of a fresh start."""

    def __init__(
        self,
        found: dict[str, Any] | None = None,
        newer: Callable[[str], bool] = lambda _: False,
        fall_back: Callable[[BaseException], object] | None = None,
    ) -> None:
        self.found = found
        """The resources of the previous program that were not asked for yet, by name; ``None`` in a fresh start."""
        self.newer = newer
        """Tells whether a name is newer than the format of the found state."""
        self.fall_back = fall_back
        """Executes the previous program; ``None`` once there is no way back, and in a fresh start."""
        self.read: dict[str, Callable[[], object]] = {}
        """Name → function that returns the current value."""
        self.blocks: list[str] = []
        """The names of resources held by a block, whose end releases them."""
        self._before_commit: list[Callable[[], None]] = []
        self._at_commit: list[Callable[[], object]] = []

    @property
    def resuming(self) -> bool:
        """Return whether this program has taken over from another one."""
        return self.found is not None

    def value(
        self,
        name: str,
        make: Callable[[], T],
        adopt: Callable[[W], T] = _same,
        now: Callable[[T], W] = _same,
    ) -> T:
        """Return the value held as *name*, in a fresh start the result of *make*.

        *adopt* converts a found value; *now* converts the value, as it is then, for the next program.
        """
        with self.guarded():
            value = adopt(self._take(name)) if self._finds(name) else make()
        self.read[name] = lambda: now(value)
        return value

    def current(self, name: str, read: Callable[[], T]) -> T:
        """Return the value held as *name*; *read* returns the current one, which is used in a fresh start and for the next program."""
        value = self.value(name, read)
        self.read[name] = read
        return value

    def keep(self, owner: object, /, **names: str) -> None:
        """Hold attributes of *owner* by their *names*; those found are set. A fresh start reads them too, and fails if one is missing."""
        for attribute, name in names.items():
            setattr(owner, attribute, self.current(name, partial(getattr, owner, attribute)))

    async def once(
        self,
        name: str,
        act: Callable[[], Awaitable[T]] | None,
        adopt: Callable[[W], T] = _same,
        now: Callable[[T], W] = _same,
    ) -> T:
        """Do *act* once in the life of the instance and return its result, which a renewed program finds as :meth:`value` does.

        *act* is ``None`` in a program that always finds it.
        """
        if act is not None and not self._finds(name):
            value = await act()
            return self.value(name, lambda: value, adopt, now)
        return self.value(name, _never, adopt, now)

    @contextmanager
    def block(
        self,
        name: str,
        make: Callable[[], AbstractContextManager[T]],
        adopt: Callable[[W], AbstractContextManager[T]],
        now: Callable[[T], W] = _same,
    ) -> Iterator[T]:
        """Hold the result of *make* as *name*; *adopt* holds a found value likewise, *now* is as in :meth:`value`."""
        with ExitStack() as stack, self.guarded():
            value = stack.enter_context(adopt(self._take(name)) if self._finds(name) else make())
            self.read[name] = lambda: now(value)
            self.blocks.append(name)
            yield value

    def fd(self, name: str, make: Callable[[], AbstractContextManager[int]]) -> AbstractContextManager[int]:
        """Hold a descriptor, which the end closes."""
        return self.block(name, make, closing)

    def socket(self, name: str, make: Callable[[], AbstractContextManager[Socket]]) -> AbstractContextManager[Socket]:
        """Hold a socket."""
        return self.block(name, make, adopted_socket, Socket.fileno)

    @contextmanager
    def pair(
        self, name: str, purpose: str, now: Callable[[Socket], int] = Socket.fileno
    ) -> Iterator[tuple[Socket, Socket | None]]:
        """Hold our end of a connection as *name*, and in a fresh start also the other end, which the child gets."""
        with ExitStack() as stack:
            theirs: Socket | None = None

            def make() -> AbstractContextManager[Socket]:
                nonlocal theirs
                ours, theirs = stack.enter_context(connected_pair(purpose))
                refuse_fds(ours)
                return hung_up_on(nullcontext(ours))

            def adopt(number: int) -> AbstractContextManager[Socket]:
                return hung_up_on(adopted_socket(number))

            with self.block(name, make, adopt, now) as ours:
                yield ours, theirs

    def passed_on(self, make: Callable[[], AbstractContextManager[T]], nothing: T) -> AbstractContextManager[T]:
        """Hold the result of *make* until QEMU has it; *nothing* if QEMU has it already."""
        return make() if self.found is None else nullcontext(nothing)

    def before_commit(self, check: Callable[[], None]) -> None:
        """Call *check* once everything was taken over; an error leads back to the previous program. Not called in a fresh start."""
        self._before_commit.append(check)

    def at_commit(self, act: Callable[[], object]) -> None:
        """Call *act* once there is no way back, in the order of these calls; at once if there is none."""
        if self.fall_back is None:
            act()
        else:
            self._at_commit.append(act)

    def commit(self) -> None:
        """Give up the way back: everything was found and asked for."""
        if self.fall_back is None:
            return
        with self.guarded():
            if self.found:
                raise HostError(f"cannot take over {', '.join(self.found)}: nothing here asks for it")
            for check in self._before_commit:
                check()
        self.fall_back = None
        for act in self._at_commit:
            act()

    def go_back(self) -> None:
        """Execute the previous program, if that is still possible, before anything is released."""
        if self.fall_back is not None:
            self.fall_back(sys.exc_info()[1] or RuntimeError("it ended before it had taken everything over"))

    def _finds(self, name: str) -> bool:
        return self.found is not None and (name in self.found or not self.newer(name))

    def _take(self, name: str) -> Any:
        assert self.found is not None  # noqa: S101 - the caller has asked
        if name not in self.found:
            raise HostError(f"cannot take over {name}: the previous program did not hold it")
        return self.found.pop(name)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Go back if the block raises an error, before anything is released."""
        try:
            yield
        except BaseException:
            self.go_back()
            raise


def _never() -> NoReturn:
    raise AssertionError
