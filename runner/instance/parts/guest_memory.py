"""The guest's RAM: files in memory, preallocated before QEMU is started where the plan says so."""

from __future__ import annotations

import logging
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import trio

from runner.base.errors import HostError
from runner.base.events import InstanceEvent
from runner.instance.gate import Kind
from runner.instance.supervisor import Supervisor
from runner.kernel import files
from runner.kernel.child_processes import Command, Process
from runner.plan.argv.preallocator import preallocator_argv
from runner.plan.instance import InstancePlan
from runner.plan.machine import MachinePlan
from runner.spec.rules import format_size

log = logging.getLogger(__name__)

MBIND_REMEDY = "let the container's seccomp profile allow mbind(2), as Docker's does with --cap-add SYS_NICE, or set memory.bind = false"
FULL_REMEDY = "raise the pod's limits of memory and huge pages, or give the guest less"


@asynccontextmanager
async def guest_memory(
    supervisor: Supervisor, plan: InstancePlan, pod_cgroup_fd: int | None
) -> AsyncIterator[tuple[files.Descriptor, ...]]:
    """Hold the RAM of each of the guest's NUMA nodes until QEMU has it; none where QEMU allocates the RAM itself.

    It is preallocated in the pod's cgroup, which a child enters by *pod_cgroup_fd* (``None``: it starts there): on all NUMA nodes at once,
    by threads on their CPUs.
    """
    machine = plan.machine
    if not machine.ram.shared:
        yield ()
        return
    nothing: tuple[files.Descriptor, ...] = ()
    with supervisor.held.passed_on(lambda: _files_in_memory(machine), nothing) as ram:
        if ram and machine.ram.preallocate:
            await _preallocate(supervisor, plan, pod_cgroup_fd, tuple(each.number for each in ram))
        yield ram


@contextmanager
def _files_in_memory(machine: MachinePlan) -> Iterator[tuple[files.Descriptor, ...]]:
    with ExitStack() as stack:
        yield tuple(
            stack.enter_context(
                files.owned(files.create_memory(f"{machine.name}-ram{number}", each.memory, machine.ram.page_size))
            )
            for number, each in enumerate(machine.topology.numa_nodes)
        )


async def _preallocate(
    supervisor: Supervisor, plan: InstancePlan, pod_cgroup_fd: int | None, ram: tuple[int, ...]
) -> None:
    argv = preallocator_argv(plan.machine, plan.placement, ram)
    command = Command("preallocator", tuple(argv), ram, entering=pod_cgroup_fd)
    began = trio.current_time()
    async with supervisor.processes.daemon(command, 0) as process:
        try:
            with trio.fail_after(plan.start_timeout):
                async with supervisor.changes.begin(Kind.START, "the guest's memory is being allocated"):
                    status = await process.wait()
        except trio.TooSlowError:
            output = process.last_lines[-1] if process.last_lines else "nothing"
            raise HostError(
                f"cannot preallocate the guest's memory: it takes more than {plan.start_timeout:g} s, and its last output was {output!r}"
            ) from None
    if status != 0:
        raise _failure(process)
    size, seconds = plan.machine.memory, trio.current_time() - began
    log.info(InstanceEvent.MEMORY_PREALLOCATED, format_size(size), seconds)


def _failure(process: Process) -> HostError:
    from runner.kernel.preallocate import (
        NO_MEMORY,
        NO_THREADS,
        NOT_BOUND,
    )  # here, because it is a program, and few fail

    remedies = {NO_MEMORY: FULL_REMEDY, NOT_BOUND: MBIND_REMEDY, NO_THREADS: process.limit()}
    status = process.returncode
    if status in remedies and process.last_lines:
        reason, remedy = process.last_lines[-1], remedies[status]
    elif status == -signal.SIGKILL:
        reason, remedy = "the preallocator was killed, as the kernel does when a cgroup is over memory.max", FULL_REMEDY
    else:
        reason, remedy = f"the preallocator {process.how_it_ended()}", ""
    return HostError(f"cannot preallocate the guest's memory: {reason}", remedy=remedy)
