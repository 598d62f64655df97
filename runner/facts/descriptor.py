"""File descriptors that another program opened and this one inherited or received, as the kernel describes them."""

from __future__ import annotations

from typing import Literal

from runner.base.values import frozen

DescriptorKind = Literal["tap", "macvtap", "vhost-net", "socket", "file", "block", "other"]
DESCRIPTOR_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}"
"""Pattern of a descriptor's name; sd_listen_fds_with_names(3) allows more."""


@frozen
class DescriptorFact:
    """A descriptor that another program opened."""

    kind: DescriptorKind
    description: str
    """The kind as a noun phrase for messages, such as ``a tap``."""
    writable: bool = True
    """Whether it is open for reading and writing."""
    size: int = 0
    """Bytes of a file or block device."""
    interface: str = ""
    """The name of the tap's or macvtap's network interface."""
    mac: str = ""
    """The MAC address of that interface; a macvtap delivers only frames to this address."""
    multi_queue: bool = False
    """Whether a tap or macvtap was opened with ``IFF_MULTI_QUEUE``."""
    declared: str | None = None
    """The kind that the sending agent declared; ``None`` for a descriptor inherited through exec."""
