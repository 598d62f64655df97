"""The newest QEMU, which the node has as a disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.images.manifested import disk
from tests.support.newest_qemu import mounted


@pytest.fixture(scope="session")
def newest() -> Iterator[Path]:
    """Return the directory of the newest QEMU."""
    with mounted(disk("qemu")) as program:
        yield program.parent
