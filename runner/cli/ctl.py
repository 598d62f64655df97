"""The command ``ctl``: ask a running instance to change, through its control socket."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from runner.errors import UsageError
from runner.kernel.sockets import CONTROL_SOCKET
from runner.protocol.controller_client import ask
from runner.table import aligned


async def control(state_directory: PurePosixPath, method: str, params: Mapping[str, object]) -> object:
    """Return what the instance whose *state_directory* this is answers.

    Raises :exc:`~runner.errors.RunnerError` when nobody is there, or it refuses.
    """
    return await ask("the instance", state_directory / CONTROL_SOCKET, method, params)


def parse_keys(words: Iterable[str]) -> dict[str, object]:
    """Return the keys of a ``[[disk]]`` given as ``key=value``: values as in TOML, words also without quotes.

    Raises :exc:`~runner.errors.UsageError`.
    """
    found: dict[str, object] = {}
    for word in words:
        name, sign, text = word.partition("=")
        if not sign or not name or name in found:
            raise UsageError(f"cannot understand {word!r}: keys of a disk are given once each, as key=value")
        try:
            found[name] = tomllib.loads(f"value = {text}")["value"]
        except ValueError:
            found[name] = text
    return found


def answer_lines(answer: Any) -> Iterator[str]:
    """Yield *answer* for people: disks as a table."""
    match answer:
        case {"disks": list(disks), **rest}:
            yield from (f"{key:<11} {value}" for key, value in rest.items())
            yield from _table(disks)
        case [*disks]:
            yield from _table(disks)
        case {"name": str(), "path": str()}:
            yield from _table([answer])
        case dict() if not answer:
            pass
        case _:
            yield json.dumps(answer)


def _table(disks: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    rows = [("DISK", "SIZE", "FORMAT", "MODE", "ATTACHED", "PATH")]
    for disk in disks:
        mode = "ephemeral" if disk["ephemeral"] else "read-only" if disk["read_only"] else "writable"
        since = "released" if disk["released"] else "later" if disk["attached"] else "at start"
        rows.append((disk["name"], str(disk["size"]), disk["format"], mode, since, disk["path"]))
    return aligned(rows)
