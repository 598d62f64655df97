"""A trial guest, which shows whether an accelerator runs guests here before a real guest is started.

``KVM_CREATE_VM`` may succeed where guests cannot run: in a virtual machine whose hypervisor emulates virtualisation badly, or with a CPU
model whose registers KVM refuses. One host was seen that lacks a single instruction (``cmpxchg16b``), so that its guests fail minutes after
their start.
"""

from __future__ import annotations

import logging
from pathlib import PurePosixPath
from typing import Literal

import trio

from runner.base.errors import HostError, explain
from runner.base.values import frozen
from runner.kernel.child_processes import Command, Processes
from runner.kernel.files import filled_memory
from runner.plan.argv.qemu import SANDBOX

ENDS_WITHIN = 10.0
"""Seconds that a trial guest may take; 0.2 are usual, emulated too."""

TRIAL_GUEST = bytes.fromhex(
    "02b0ad1b00000100fe4f51e40000100000001000ce0010000040100020001000"  # the header
    "fcbf0010100031c0b9000c0000f3abc7050010100003201000c7050020100003"
    "301000c70500301000830000000f20e083c8200f22e0b8001010000f22d8b980"
    "0000c00f320d000100000f300f20c00d000000800f22c00f0115c8001000ea85"
    "0010000800b8010000000fa20fbae10d7312bf0018100031c031d231db31c9f0"
    "480fc70fb940420f00ffc975fcb02ae6f4f4ebfd000000000000000000000000"
    "00000000009a20000f00b8001000"
)
"""``trial_guest.S``, assembled; a test does it again."""

PASSED = 85
"""The exit status of QEMU when the guest has run to its end: it writes 42 to ``isa-debug-exit``, which makes it 2 · 42 + 1."""


@frozen
class GuestTrial:
    """The outcome of a trial guest."""

    accel: Literal["kvm", "tcg"]
    error: str | None
    """The reason why it did not run to its end; ``None`` if it did."""
    seconds: float


async def try_guest(
    processes: Processes, qemu: PurePosixPath, accel: Literal["kvm", "tcg"], model: str | None
) -> GuestTrial:
    """Boot the trial guest through QEMU's firmware, and wait at most :data:`ENDS_WITHIN` seconds for its end.

    *model* is QEMU's CPU model, by default the one that a plan names first.
    """
    begun = trio.current_time()
    error = await _error(processes, qemu, accel, model or ("host" if accel == "kvm" else "max"))
    return GuestTrial(accel, error, trio.current_time() - begun)


async def _error(processes: Processes, qemu: PurePosixPath, accel: str, model: str) -> str | None:
    """Return the reason why the trial guest did not run to its end; ``None`` if it did."""
    with filled_memory("trial guest", TRIAL_GUEST) as kernel:
        argv = (
            *(str(qemu), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-sandbox", SANDBOX),
            *("-machine", "q35", "-accel", accel, "-cpu", model, "-m", "32M", "-kernel", f"/proc/self/fd/{kernel}"),
            *("-device", "isa-debug-exit,iobase=0xf4,iosize=1"),
        )
        status: int | None = None
        try:
            async with processes.daemon(Command("trial-guest", argv, (kernel,), level=logging.DEBUG), 0) as process:
                with trio.move_on_after(ENDS_WITHIN):
                    status = await process.wait()
        except HostError as error:
            return explain(error)
    if status is None:
        return f"a trial guest has not run to its end within {ENDS_WITHIN:g} s"
    return None if status == PASSED else f"QEMU {process.how_it_ended()}"
