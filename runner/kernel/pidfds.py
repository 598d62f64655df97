"""Processes of others, ended by a descriptor (pidfd_open(2)): a number may be another process's meanwhile, this may not."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable

from runner.base.errors import HostError


def kill_process(pid: int, check: Callable[[], bool]) -> int | None:
    """Kill process *pid* if *check*, which reads about it by its number, returns true.

    Returns a descriptor that is readable when the process has ended, its memory given back, and that the caller closes;
    ``None`` if it had ended before, or is not the one that is meant. Raises :class:`HostError` where that is not allowed.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        raise HostError(f"cannot end process {pid}") from error
    try:
        if check() and not has_ended(fd):  # alive after the check, so the number was its own meanwhile
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            return fd
    except ProcessLookupError:
        pass
    except OSError as error:
        os.close(fd)
        raise HostError(f"cannot end process {pid}", remedy="give the controller the capability KILL") from error
    os.close(fd)
    return None


def has_ended(fd: int) -> bool:
    """Tell whether all threads of the process of pidfd *fd* have ended."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
