"""Devices that serve the guest (agent channel, clock, vsock, watchdog), and the sign by which it is ready."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from ipaddress import IPv4Address
from typing import TYPE_CHECKING, Literal

from runner.base.values import frozen
from runner.facts.host import HostFacts
from runner.plan.identity import Identity
from runner.plan.problems import Problems
from runner.spec.instance import ClockBase, GuestSpec, WatchdogAction
from runner.spec.readiness import AgentSign, ConsoleSign, PortSign, ReadySign

if TYPE_CHECKING:
    from runner.plan.network_plan import NetworkPlan

FIRST_CID, LAST_CID = 3, (1 << 32) - 2
"""Context identifiers of guests (``include/uapi/linux/vm_sockets.h``): 0 to 2 and 2**32 - 1 have meanings of their own."""


@frozen
class VsockPlan:
    """A vsock device; the node's kernel has one guest of each context identifier."""

    cid: int
    exact: bool
    """Whether only this identifier may be used; otherwise the next free one is used."""


@frozen
class GuestPort:
    """The guest is ready when it accepts a TCP connection at this address, to which this program has a route."""

    address: IPv4Address
    port: int
    sign: Literal["port"] = "port"

    def __str__(self) -> str:
        return f"port:{self.port}"


ReadyPlan = AgentSign | ConsoleSign | GuestPort


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
    ready: ReadyPlan | None = None
    """The sign with which the guest reports that it is ready; ``None``: ready as soon as it runs with every thread in its place."""


def plan_guest(
    guest: GuestSpec, identity: Identity, networks: Sequence[NetworkPlan], facts: HostFacts, problems: Problems
) -> GuestPlan:
    """Plan the devices that serve *guest*."""
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
    return GuestPlan(guest.agent, guest.clock, vsock, guest.watchdog, _ready(guest.ready, networks))


def _ready(sign: ReadySign | None, networks: Sequence[NetworkPlan]) -> ReadyPlan | None:
    if not isinstance(sign, PortSign):
        return sign
    from runner.plan.network_plan import BridgedPlan  # here, because some guests have no network

    # With mode "bridge" the guest has the pod's own address, which leads this program only to itself.
    private = (each.guest.ip for each in networks if isinstance(each, BridgedPlan) and each.pod is None)
    address = next(private, None)
    return None if address is None else GuestPort(address, sign.port)


def derived_cid(identity: Identity) -> int:
    """Return the first context identifier to try, derived from *identity* so that it is mostly the same after a restart."""
    number = int.from_bytes(hashlib.sha256(f"{identity.value}/vsock".encode()).digest()[:4], "big")
    return FIRST_CID + number % (LAST_CID - FIRST_CID)
