"""The end of the event loop itself under a running guest: a system call of its own has failed, or memory was short in it.

The teardown and the way out of any other fault are tasks, and none of them runs any more, while the guest does and everything is held. So
the state is passed, by calls that wait for no task and ask no loop for the time, to the first of these that is possible:

1. a fresh image of this program, as after another fault of this program's;
2. another event loop of this process, which takes it over, powers the guest down and releases it;
3. no loop: the power button is pressed and the children are ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal

import attrs

from runner.base.errors import HostError, explain
from runner.base.events import InstanceEvent
from runner.instance.gate import Kind
from runner.instance.held import Held
from runner.instance.parts.daemons import STOPPED_WITHIN
from runner.instance.renewal.upgrade import BLOCKED, execute_again
from runner.instance.supervisor import Renewal, Supervisor
from runner.kernel.child_processes import KILLED_WITHIN, Process, alive_after
from runner.plan.instance import InstancePlan

log = logging.getLogger(__name__)

_POWER_BUTTON = b'{"execute": "system_powerdown"}\n'


def resume_after_loop(supervisor: Supervisor, error: Exception) -> Renewal | tuple[str, ...]:
    """Become a fresh image of this program; if that is not allowed or fails, return the state for another event loop.

    If *error* has ended that other loop, power the guest down without a loop, and return the resources that could not be released.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    renewal = supervisor.renewal
    if renewal.loop_ended_by is None:
        # A signal received from here on reaches the program or loop that continues: the kernel keeps it until that one unblocks it.
        for number in supervisor.stop.signals or ({signal.SIGTERM} if supervisor.stop.reason else ()):
            os.kill(os.getpid(), number)
        try:
            if not supervisor.changes.making(Kind.QEMU_UPDATE):
                execute_again(supervisor, error)
            return _for_another_loop(renewal, error)
        except Exception as found:  # noqa: BLE001 - whatever it is, the guest is to power down in order
            log.error(InstanceEvent.EVENT_LOOP_NOT_REPLACED, explain(found))  # noqa: TRY400
    log.error(InstanceEvent.GUEST_POWERED_DOWN_PLAINLY)
    return _end_children(supervisor)


def _for_another_loop(renewal: Renewal, error: Exception) -> Renewal:
    """Return the held state, to be taken over in this process and released."""
    held = Held({name: read() for name, read in renewal.held.read.items()})
    return attrs.evolve(
        renewal, held=held, resume_after_fault=None, resume_after_loop=None, leaving=[], loop_ended_by=error
    )


def _end_children(supervisor: Supervisor) -> tuple[str, ...]:
    """Press the power button, end the children, and return the resources that could not be released."""
    children = list(supervisor.processes)
    with contextlib.suppress(Exception):  # then QEMU is sent its signal at once
        _power_down(supervisor.held, next(child for child in children if child.role == "qemu"))
    alive = children
    for number, within in ((signal.SIGTERM, STOPPED_WITHIN), (signal.SIGKILL, KILLED_WITHIN)):
        for child in alive:
            with contextlib.suppress(HostError):
                child.send_signal(number)
        alive = alive_after(children, within)
    return (supervisor.renewal.unreleased(*(f"{child.role} (pid {child.pid})" for child in alive)),)


def _power_down(held: Held, qemu: Process) -> None:
    plan, connection = held.read["plan"](), held.read["QMP"]()
    if not isinstance(plan, InstancePlan) or not isinstance(connection, int):
        raise HostError("cannot power the guest down: it is not known how")
    os.write(connection, _POWER_BUTTON)
    alive_after([qemu], plan.shutdown.power_down)
