"""Descriptors that another program opened for this one, as the kernel describes them."""

from __future__ import annotations

from typing import Literal

import attrs

DescriptorKind = Literal["tap", "macvtap", "vhost-net", "socket", "file", "block", "other"]


@attrs.frozen
class DescriptorFact:
    """A descriptor that was handed to us, as the kernel describes it."""

    kind: DescriptorKind
    description: str
    """The kind in words, as a message names it."""
    writable: bool = True
    """Whether it may be read and written."""
    size: int = 0
    """Bytes, of a file or block device."""
    interface: str = ""
    """The name of a tap or macvtap."""
    mac: str = ""
    """Its MAC address; a macvtap hands on only what is sent to that."""
    multi_queue: bool = False
    declared: str | None = None
    """What the agent that sent it says it is."""
