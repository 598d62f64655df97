"""Reading files that another process replaces: the kubelet's state files, and those of DRA drivers.

The caller brings the parser (:mod:`runner.kubelet.state_files`), because this room knows no types of the kubelet.
That is why ``settled``, which needs a clock, is here: the controller, ``check`` and ``inspect`` may all import it.

One reading proves nothing. The kubelet replaces ``cpu_manager_state`` twice per allocation, and in between some CPUs
are in neither the shared pool nor an entry. A reading counts only if it is consistent and equal to the one before it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

import trio

from runner.base.errors import HostError, RunnerError, SpecError, explain
from runner.base.values import frozen
from runner.kernel.files import closing

OTHER_ROOT = (
    "if the kubelet has another --root-dir, name it with --kubelet-dir, and in a pod mount it, too (k0s: /var/lib/k0s/kubelet,"
    " MicroK8s: /var/snap/microk8s/common/var/lib/kubelet, IBM Cloud: /var/data/kubelet, TKGI: /var/vcap/data/kubelet)"
)
"""The remedy for a state file that is not there: beside another root, ``/var/lib/kubelet`` exists as well, for device plugins."""

_LARGEST = 16 * 1024 * 1024
"""Bytes. A file larger than this is not the kubelet's."""

_MOST_FILES = 8192
"""More claims than there can be CPUs."""

T = TypeVar("T")


@frozen
class Frozen:
    """The kubelet's state cannot be used; running instances are left unchanged."""

    reason: str
    """A sentence for the operator."""


def read_state_file(path: Path) -> bytes:
    """Return the content of *path*, at most 16 MiB. Raises :class:`HostError` with the reason alone.

    Only a regular file is read: opening a FIFO without ``O_NONBLOCK`` would wait for a writer.
    """
    try:
        with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as fd:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise HostError("it is not a regular file")
            # One more byte than is taken tells whether there are more. Fewer may come back: read(2) is not atomic.
            with open(fd, "rb", closefd=False) as stream:
                text = stream.read(_LARGEST + 1) or b""  # None if there is nothing now, as in /proc/kmsg
    except OSError as error:
        raise HostError("it cannot be read") from error
    if len(text) > _LARGEST:
        raise HostError(f"it is larger than {_LARGEST} bytes")
    return text


def attempt(path: Path, parse: Callable[[bytes], T]) -> T | Frozen:
    """Read *path* once and *parse* its content; an error is returned as :class:`Frozen`, with *path* in its sentence."""
    try:
        return parse(read_state_file(path))
    except SpecError as error:  # str(error) begins with the document's name, which is in the sentence already
        return Frozen(f"cannot use {path}: {'; '.join(map(str, error.problems))}")
    except RunnerError as error:
        elsewhere = f"; {OTHER_ROOT}" if isinstance(error.__cause__, FileNotFoundError) else ""
        return Frozen(f"cannot use {path}: {explain(error)}{elsewhere}")


def attempt_claims(
    state: Path,
    specifications: Path,
    patterns: Sequence[str],
    parse: Callable[[bytes | None, str, Mapping[str, bytes]], T],
) -> T | Frozen:
    """Read the file *state* and those in *specifications* whose names match one of *patterns*, and *parse* them together.

    A missing *state* is passed as ``None``, a missing specification is left out. An error is returned as :class:`Frozen`, with the path of
    its file in the sentence.
    """
    path = state
    try:
        text = _read_if_there(state)
        found = {}
        for path in _matching(specifications, patterns):
            if (specification := _read_if_there(path)) is not None:
                found[str(path)] = specification
        return parse(text, str(state), found)
    except SpecError as error:
        return Frozen(f"cannot use {error.source}: {'; '.join(map(str, error.problems))}")
    except RunnerError as error:
        return Frozen(f"cannot use {path}: {explain(error)}")


def _read_if_there(path: Path) -> bytes | None:
    try:
        return read_state_file(path)
    except HostError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def _matching(directory: Path, patterns: Sequence[str]) -> list[Path]:
    try:
        names = os.listdir(directory)  # noqa: PTH208  # names only
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise HostError(f"cannot list {directory}") from error
    paths = [directory / name for name in sorted(names) if any(fnmatchcase(name, each) for each in patterns)]
    if len(paths) > _MOST_FILES:
        raise HostError(f"{directory} has {len(paths)} files of that name, more than {_MOST_FILES}")
    return paths


def is_registered(plugins: Path, pattern: str) -> bool:
    """Tell whether a DRA driver whose socket matches *pattern* is registered in the kubelet's directory *plugins*."""
    try:
        return bool(_matching(plugins, [pattern]))
    except HostError:
        return False


async def settled(path: Path, parse: Callable[[bytes], T], *, pause: float, readings: int) -> T | Frozen:
    """Return *path*'s content as *parse* returns it, once two consecutive readings, *pause* seconds apart, are equal.

    *parse* raises :class:`RunnerError` for what cannot be used. After *readings* attempts the last error is returned: the file stays
    unusable, or changes faster than it can be read.
    """
    last = attempt(path, parse)
    for _ in range(max(1, readings - 1)):
        await trio.sleep(pause)
        reading = attempt(path, parse)
        if reading == last and not isinstance(reading, Frozen):
            return reading
        last = reading
    if isinstance(last, Frozen):
        return last
    return Frozen(f"cannot use {path}: no two of {readings} readings in a row were equal")
