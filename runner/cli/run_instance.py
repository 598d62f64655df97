"""One run of an instance, from its spec to the exit status and the termination log."""

from __future__ import annotations

import argparse
import logging
import os
import signal
from pathlib import Path, PurePosixPath

from runner.base.errors import UsageError
from runner.base.events import InstanceEvent
from runner.cli.options import TERMINATION_LOG, read_spec_file
from runner.instance.exit_report import ExitReport
from runner.instance.init import ASK_TO_STOP, run_as_init
from runner.instance.outputs import Outputs
from runner.instance.supervisor import Renewal
from runner.kernel.child_processes import raise_limits

log = logging.getLogger("runner")

RESUME = "runner.cli.resume"
"""The module that replaces this one when the runner is renewed; imported only then."""


def run(arguments: argparse.Namespace, state_directory: PurePosixPath) -> int:
    """Run the instance and return its exit status; every error results in a status, an event and a termination log."""
    # For an entry point that forgot `env --block-signal`: late, but better than never.
    signal.pthread_sigmask(signal.SIG_BLOCK, ASK_TO_STOP)
    raise_limits()  # container runtimes set a limit of 1024 open files
    os.umask(os.umask(0o077) | 0o022)  # only its own user may change its files, whatever the umask was
    renewal = Renewal(entry=RESUME)
    held = renewal.held
    with Outputs(held, arguments.log_level, arguments.log_format) as outputs:
        outputs.termination_log = _open_termination_log(arguments.termination_log)
        streams = outputs.streams(held, arguments.http)

        async def act() -> ExitReport:
            data, pid1 = _read(arguments.spec), not arguments.not_pid1
            source = arguments.spec
            return await run_as_init(source, data, state_directory, streams, pid1=pid1, renewal=renewal)

        return outputs.reported(act, renewal)


def _read(spec: str) -> bytes:
    if spec == "-":
        raise UsageError(
            "cannot read the spec from standard input: a writer that is slow could block PID 1", remedy="name a file"
        )
    return read_spec_file(spec)


def _open_termination_log(path: Path | None) -> int | None:
    """Open *path*, or Kubernetes' default file, before anything else, because descriptors may be short at the end."""
    try:
        if path is None and not TERMINATION_LOG.exists():
            return None
        return os.open(
            path or TERMINATION_LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o644
        )
    except OSError as error:
        log.warning(InstanceEvent.TERMINATION_LOG_FAILED, error.strerror)
        return None
