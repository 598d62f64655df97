"""Attaching and detaching queues of a live tap or macvtap interface (``TUNSETQUEUE``, ``drivers/net/tun.c`` and ``tap.c``)."""

from __future__ import annotations

import errno
import fcntl
import struct

from runner.base.errors import HostError

_TUNSETQUEUE = 0x400454D9
_IFF_ATTACH_QUEUE = 0x0200
_IFF_DETACH_QUEUE = 0x0400


def attach_queue(fd: int) -> bool:
    """Attach the queue *fd*, and return whether it was detached."""
    return _set_queue(fd, _IFF_ATTACH_QUEUE)


def detach_queue(fd: int) -> bool:
    """Detach the queue *fd*, which then carries no packets, and return whether it was attached."""
    return _set_queue(fd, _IFF_DETACH_QUEUE)


def _set_queue(fd: int, flag: int) -> bool:
    try:
        fcntl.ioctl(fd, _TUNSETQUEUE, struct.pack("16sH22x", b"", flag))
    except OSError as error:
        if error.errno == errno.EINVAL:  # it is in that state already
            return False
        raise HostError("cannot attach or detach a queue of the tap interface") from error
    return True
