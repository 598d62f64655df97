"""Devices that serve the guest: agent channel, clock, vsock, watchdog."""

from __future__ import annotations

import hashlib

from runner.facts.host import HostFacts
from runner.plan.problems import Problems
from runner.spec.instance import ClockBase, GuestSpec, WatchdogAction
from runner.values import frozen

FIRST_CID, LAST_CID = 3, (1 << 32) - 2
"""Context identifiers of guests (``include/uapi/linux/vm_sockets.h``): 0 to 2 and 2**32 - 1 have meanings of their own."""


@frozen
class VsockPlan:
    """A vsock device; the node's kernel has one guest of each context identifier."""

    cid: int
    exact: bool
    """Whether only this identifier may be used; otherwise the next free one is used."""


@frozen
class GuestPlan:
    """Devices that serve the guest. There is no balloon: the guest's memory is never reclaimed."""

    agent: bool
    """Whether there is a virtio-serial port for ``qemu-ga`` in the guest."""
    clock: ClockBase
    """The time that the hardware clock shows."""
    vsock: VsockPlan | None
    watchdog: WatchdogAction | None
    """The action when the guest no longer resets the watchdog; ``None``: there is no watchdog."""


def plan_guest(guest: GuestSpec, identity: str, facts: HostFacts, problems: Problems) -> GuestPlan:
    """Decide about the devices of *guest*; *identity* stays the same as long as the instance is the same."""
    vsock = None
    if guest.vsock is not None:
        if not facts.vhost_vsock:
            problems.refuse(
                "guest.vsock",
                "cannot use /dev/vhost-vsock: it is missing or not writable",
                "load the module vhost_vsock on the node and give the pod the device",
            )
        exact = guest.vsock != "auto"
        vsock = VsockPlan(derived_cid(identity) if guest.vsock == "auto" else guest.vsock, exact)
    return GuestPlan(guest.agent, guest.clock, vsock, guest.watchdog)


def derived_cid(identity: str) -> int:
    """Return the first context identifier to try, derived from *identity* so that it is mostly the same after a restart."""
    number = int.from_bytes(hashlib.sha256(f"{identity}/vsock".encode()).digest()[:4], "big")
    return FIRST_CID + number % (LAST_CID - FIRST_CID)
