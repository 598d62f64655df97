"""The files of the state directory that others read as signs of a guest that runs."""

from __future__ import annotations

from pathlib import PurePosixPath

from runner.kernel.files import discard_left

READY = "ready"
"""There while the guest runs."""

RECEIPT = "receipt.json"
"""Where every thread is, while the guest runs."""


def discard_signs(path: PurePosixPath) -> None:
    """Remove from the state directory *path* the signs that a killed runner has left, as far as it is ours."""
    discard_left(path, (READY, RECEIPT))
