"""A test whether passt starts here."""

from __future__ import annotations

import logging
from pathlib import PurePosixPath

import trio

from runner.kernel.child_processes import Command, Processes
from runner.kernel.sockets import connected_pair
from runner.plan.argv.networks import passt_argv
from runner.plan.network_plan import PasstPlan


async def why_it_does_not_start(processes: Processes, passt: PurePosixPath, within: float) -> str:
    """Return the error with which *passt* ends if it does not start here, for :attr:`HostFacts.passt_error`.

    It is started as for a guest, but with a stream whose other end is closed: it makes its sandbox and ends. If it has not ended *within*
    that many seconds, it counts as started. Raises :exc:`~runner.base.errors.HostError` where it cannot be executed.
    """
    with connected_pair("passt") as (ours, theirs):
        ours.close()
        argv = passt_argv(PasstPlan(mac="", mtu=1500, queues=1, program=passt), f"--fd={theirs.fileno()}")
        command = Command("passt-probe", tuple(argv), (theirs.fileno(),), level=logging.DEBUG)
        async with processes.daemon(command, 0) as process:
            with trio.move_on_after(within):
                await process.wait()
            return process.why_it_ended() if process.returncode else ""
