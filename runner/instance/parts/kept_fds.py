"""Copies of QEMU's descriptors that this process keeps if QEMU can be updated: the next QEMU gets the same descriptors.

They do not include descriptors through which another process serves a single QEMU (vhost-net, a share), nor those of devices, which the
first QEMU passes on itself. The copy of a tap keeps the interface until QEMU has ended, and the copy of the RAM keeps the guest's memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from runner.instance.held import Held
from runner.kernel.files import owned
from runner.kernel.limits import limited
from runner.plan.argv.qemu_endpoints import QemuFds
from runner.plan.argv.wires import WireNumbers


def kept_fds(held: Held, descriptors: Callable[[], QemuFds]) -> AbstractContextManager[QemuFds]:
    """Hold copies of QEMU's *descriptors*, or the copies that the previous program has made."""
    return held.block("QEMU's descriptors", lambda: _copied(descriptors()), _adopted)


@contextmanager
def _copied(fds: QemuFds) -> Iterator[QemuFds]:
    """Hold copies of *fds*."""
    with ExitStack() as stack:

        def copy(number: int) -> int:
            try:
                return stack.enter_context(owned(os.dup(number))).number
            except OSError as error:
                raise limited("cannot keep copies of QEMU's descriptors", error) from error

        yield QemuFds(
            qmp=-1,
            console=copy(fds.console),
            ram=tuple(map(copy, fds.ram)),
            files={name: copy(number) for name, number in fds.files.items()},
            wires=tuple(WireNumbers(taps=tuple(map(copy, each.taps))) for each in fds.wires),
            guest_agent_channel=None if fds.guest_agent_channel is None else copy(fds.guest_agent_channel),
        )


@contextmanager
def _adopted(fds: QemuFds) -> Iterator[QemuFds]:
    """Hold the copies that the previous program has made."""
    with ExitStack() as stack:
        for number in fds.numbers():
            if number >= 0:
                stack.callback(os.close, number)
        yield fds
