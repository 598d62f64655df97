"""``ctl upgrade``: replaces the program of a running instance's runner, and prints the result."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from runner.base.errors import HostError, UsageError
from runner.cli.instance_requests import ask_instance
from runner.protocol.jsonrpc import METHOD_NOT_FOUND
from runner.protocol.jsonrpc_client import CallRefusedError, ServerAbsentError


async def upgrade(state_directory: PurePosixPath, directory: PurePosixPath, digest: str) -> object:
    """Return the runner's description of itself once it is the program in *directory*, which has this *digest*.

    Raises :exc:`~runner.base.errors.RunnerError` if that failed and the previous program continues.
    """
    before = await _runner(state_directory)
    params = {"from": str(directory), "digest": digest}
    try:
        await ask_instance(state_directory, "upgrade", params)
    except ServerAbsentError as error:
        if not isinstance(error.__cause__, OSError):
            raise
    # The runner has hung up, because exec closes every connection; whichever program it is now, its socket still listens.
    after = await _runner(state_directory)
    if after["runner"]["generation"] == before["runner"]["generation"]:
        reason = after["runner"]["reason"] or "it hung up"
        raise HostError(f"cannot renew the runner: {reason}; the program before continues")
    return after


async def _runner(state_directory: PurePosixPath) -> dict[str, Any]:
    try:
        document: Any = await ask_instance(state_directory, "runner", {})
    except CallRefusedError as error:
        if error.code != METHOD_NOT_FOUND:
            raise
        raise UsageError(
            "cannot renew the runner: it is older than `ctl upgrade`", remedy="restart its pod once"
        ) from error
    return dict(document)
