"""A guest's signs of life: output on its console, and CPU time of its vCPUs.

A guest without any is what a KVM looks like that makes virtual machines and runs nothing in them.
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
"""Seconds without any output on the console, whatever CPU time the vCPUs take: firmware, GRUB and a kernel print earlier."""

MUTE_REMEDY = (
    "unless it has its own display or none, see whether boot.kernel, boot.firmware and the first disk hold what boots; Linux needs "
    "`console=ttyS0`, and GRUB `GRUB_TERMINAL=console`"
)

NEARLY_NOTHING = 0.02
"""Seconds of CPU time of a vCPU that has executed next to nothing: setting up its thread takes 2 ms, firmware 100 ms."""

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
    """Seconds of CPU time of the vCPU that had most."""

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
    """How long it has shown nothing; ``None`` while that is not too long."""
    mute: str = ""
    """What its console without output may mean, after :data:`MUTE_AFTER`; a remark, as a guest need not use its console."""

    async def watch(
        self, accel: Literal["kvm", "tcg"], busiest: Callable[[], float | None], changed: Callable[[], None]
    ) -> None:
        """Note and log the guest's silence until its first sign of life; may be cancelled at any moment.

        *busiest* returns the CPU time of the busiest vCPU in seconds, ``None`` if it is unknown. It is asked when the time
        is over, and again as often: there is one timer until the first sign of life, then one until the guest is mute, and none
        afterwards. *changed* is called when the guest has become silent, and when it is no longer.
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
