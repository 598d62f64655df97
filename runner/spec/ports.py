"""The ports of the pod that are forwarded to the guest (``network[].ports``)."""

from __future__ import annotations

import ipaddress
import re
from typing import Literal, get_args

from runner.base.values import frozen

Protocol = Literal["tcp", "udp"]

HIGHEST = 65535
PATTERN = (
    r"(?:(?P<address>[0-9]{1,3}(?:\.[0-9]{1,3}){3})/)?"
    r"(?P<first>[0-9]{1,5})(?:-(?P<last>[0-9]{1,5}))?"
    r"(?::(?P<guest>[0-9]{1,5})(?:-(?P<guest_last>[0-9]{1,5}))?)?"
    rf"(?:/(?P<protocol>{'|'.join(get_args(Protocol))}))?"
)
"""``22``, ``8000-8010``, ``80:8080``, ``8000-8010:9000-9010``; with the prefix ``127.0.0.1/`` on one address, with ``/udp`` for UDP."""


@frozen
class PortForward:
    """Ports of the pod, from *first* to *last*, forwarded to as many of the guest's, from *guest* on."""

    first: int
    last: int
    guest: int
    protocol: Protocol = "tcp"
    address: str = ""
    """The address of the pod on which they listen; empty for all of its addresses."""

    def __str__(self) -> str:
        """Return the ports in the form of passt(1)."""
        target = "" if self.guest == self.first else f":{_range(self.guest, self.guest + self.count - 1)}"
        return f"{self.address}{'/' * bool(self.address)}{_range(self.first, self.last)}{target}"

    @property
    def count(self) -> int:
        """Return the number of ports."""
        return self.last - self.first + 1


EVERY_PORT = PortForward(1, HIGHEST, 1)
"""The ports that ``"all"`` can include."""
MOST_OF_ALL = (1 << 15) + (1 << 14) - 1
"""The most ports of ``"all"``: all that RFC 6335 does not call ephemeral. passt from 2025 on omits ``ip_local_port_range``: 37,303."""


def _range(first: int, last: int) -> str:
    return f"{first}-{last}" if last > first else str(first)


def parse_ports(value: object) -> PortForward | None:
    """Return the ports of one entry of the array, a number or a text of the form :data:`PATTERN`; ``None`` for anything else."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    match = re.fullmatch(PATTERN, text, re.ASCII) if isinstance(text, str) else None
    if match is None:
        return None
    first, last = int(match["first"]), int(match["last"] or match["first"])
    guest, guest_last = first, last
    if match["guest"]:
        guest, guest_last = int(match["guest"]), int(match["guest_last"] or match["guest"])
    try:
        address = str(ipaddress.IPv4Address(match["address"])) if match["address"] else ""
    except ValueError:
        return None
    sound = 0 < first <= last <= HIGHEST and 0 < guest <= guest_last <= HIGHEST and last - first == guest_last - guest
    return PortForward(first, last, guest, "udp" if match["protocol"] == "udp" else "tcp", address) if sound else None
