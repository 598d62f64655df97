"""What the machine has for the guest beside CPUs, memory, disks and networks, and what is decided about it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import attrs

from runner.facts.host import HostFacts
from runner.spec.instance import GuestSpec

FIRST_CID, LAST_CID = 3, (1 << 32) - 2
"""Context identifiers of guests (``include/uapi/linux/vm_sockets.h``): 0 to 2 and 2**32 - 1 have meanings of their own."""


@attrs.frozen
class VsockPlan:
    """A vsock device; the node's kernel has one guest of each context identifier."""

    cid: int
    exact: bool
    """This one or none; else the next that is free."""


@attrs.frozen
class GuestPlan:
    """Devices that serve the guest. There is no balloon: nobody takes memory back that was asked for."""

    agent: bool
    """A virtio-serial port on which ``qemu-ga`` listens, if it is in the guest."""
    clock: str
    """What the hardware clock shows: ``utc`` or ``localtime``."""
    vsock: VsockPlan | None
    watchdog: str | None
    """What follows when nobody in the guest feeds it any more: ``reset``, ``exit``, ``nmi`` or ``none``."""


def plan_guest(guest: GuestSpec, identity: str, facts: HostFacts, refuse: Callable[[str, str], None]) -> GuestPlan:
    """Decide what *guest* gets; *identity* stays the same as long as the instance is the same."""
    vsock = None
    if guest.vsock is not None:
        if not facts.vhost_vsock:
            refuse(
                "guest.vsock",
                "cannot use /dev/vhost-vsock: it is not here, or may not be written; load the module vhost_vsock on the node "
                "and give the pod the device",
            )
        exact = isinstance(guest.vsock, int)
        vsock = VsockPlan(guest.vsock if isinstance(guest.vsock, int) else derived_cid(identity), exact)
    return GuestPlan(guest.agent, guest.clock, vsock, guest.watchdog)


def derived_cid(identity: str) -> int:
    """Return the context identifier to begin looking for a free one with: mostly the same one after a restart."""
    number = int.from_bytes(hashlib.sha256(f"{identity}/vsock".encode()).digest()[:4], "big")
    return FIRST_CID + number % (LAST_CID - FIRST_CID)
