"""The entry points of both programs: an interrupt that arrives before a program handles it ends the process as usual."""

from __future__ import annotations

import os
import sys


def instance_runner() -> None:
    """Run the program ``instance-runner``."""
    try:
        from runner.__main__ import entry  # here, because importing takes a tenth of a second

        entry()
    except KeyboardInterrupt:
        _end_by_interrupt()


def instance_cgroup_controller() -> None:
    """Run the program ``instance-cgroup-controller``."""
    try:
        from runner.controller.main import main  # as above

        sys.exit(main())
    except KeyboardInterrupt:
        _end_by_interrupt()


def _end_by_interrupt() -> None:
    """End this process by SIGINT, so that its parent sees the signal; PID 1 of a container cannot, and exits."""
    import signal  # here, because nothing else needs it

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(128 + signal.SIGINT)
