"""Descriptors that another program opened for this one, as the kernel describes them."""

from __future__ import annotations

from typing import Literal

import attrs

DescriptorKind = Literal["tap", "macvtap", "vhost-net", "socket", "file", "block", "other"]


@attrs.frozen
class DescriptorFact:
    """A descriptor that another program opened, as the kernel describes it."""

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
    """Its MAC address; a macvtap delivers only frames that are sent to it."""
    multi_queue: bool = False
    declared: str | None = None
    """The kind that the sending agent declares; ``None`` for one inherited through exec."""
