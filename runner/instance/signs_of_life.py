"""A guest's signs of life: output on its console, and CPU time of its vCPUs.

A guest without any indicates a KVM that creates virtual machines but does not execute them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

import attrs
import trio

from runner.base.events import InstanceEvent
from runner.base.values import define, frozen

log = logging.getLogger(__name__)

SILENT_AFTER = {"kvm": 30.0, "tcg": 120.0}
"""Seconds without a sign of life, by accelerator; emulated firmware and kernels take longer."""

MUTE_AFTER = 120.0
"""Seconds without console output, whatever CPU time the vCPUs use: firmware, GRUB and a kernel print earlier."""

MUTE_REMEDY = (
    "unless it has its own display or none, see whether boot.kernel, boot.firmware and the first disk hold what boots; Linux needs "
    "`console=ttyS0`, and GRUB `GRUB_TERMINAL=console`"
)

NEARLY_NOTHING = 0.02
"""CPU time in seconds up to which a vCPU counts as idle: setting up its thread takes 2 ms, firmware 100 ms."""

REMEDIES = {
    "kvm": 'set cpu.accel = "tcg", or "tried" for KVM where it runs guests; `instance-runner check --try-guest` tries it',
    "tcg": "see whether boot.kernel, boot.firmware and the first disk hold what boots",
}


@frozen
class Silence:
    """A time without any sign of life."""

    accel: Literal["kvm", "tcg"]
    seconds: float
    ran: float
    """Seconds of CPU time of the busiest vCPU."""

    def __str__(self) -> str:
        """Return the figures and the remedy."""
        return (
            f"no output on its console and {self.ran:.3f} s of CPU time of its busiest vCPU in "
            f"{self.seconds:.0f} s under {self.accel.upper()}; {REMEDIES[self.accel]}"
        )


@define
class SignsOfLife:
    """The signs of life that a guest has shown so far."""

    console_written: trio.Event = attrs.field(factory=trio.Event)
    """Set by its first output."""
    silence: Silence | None = None
    """The period without any sign; ``None`` while it is not too long."""
    mute: str = ""
    """A remark about a console without output after :data:`MUTE_AFTER`; only a remark, because a guest need not use its console."""

    async def watch(
        self, accel: Literal["kvm", "tcg"], busiest: Callable[[], float | None], changed: Callable[[], None]
    ) -> None:
        """Note and log the guest's silence until its first sign of life; may be cancelled at any moment.

        *busiest* returns the CPU time of the busiest vCPU in seconds, ``None`` if it is unknown. It is called each time the period is over:
        one timer runs until the first sign of life, then one until the guest counts as mute, then none. *changed* is called when the guest
        has become silent, and when it is no longer.
        """
        begun = trio.current_time()
        while not self.console_written.is_set():
            with trio.move_on_after(SILENT_AFTER[accel]):
                await self.console_written.wait()
                break
            ran = busiest()
            if ran is None or ran >= NEARLY_NOTHING:
                break
            was_silent = self.silence is not None
            self.silence = Silence(accel, trio.current_time() - begun, ran)
            if not was_silent:
                log.warning(InstanceEvent.GUEST_SILENT, self.silence)
                changed()
        if self.silence is not None:
            log.info(InstanceEvent.GUEST_NO_LONGER_SILENT)
            self.silence = None
            changed()
        if self.console_written.is_set():
            return
        with trio.move_on_at(begun + MUTE_AFTER):
            await self.console_written.wait()
            return
        self.mute = f"nothing on the console in the first {MUTE_AFTER:.0f} s; {MUTE_REMEDY}"
        log.warning(InstanceEvent.GUEST_CONSOLE_MUTE, self.mute)
        await self.console_written.wait()
        self.mute = ""
        log.info(InstanceEvent.GUEST_CONSOLE_USED)
