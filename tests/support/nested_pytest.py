"""A pytest of its own, for the tests of what ``tests/conftest.py`` does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"


def run_beside_conftest(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on the files in *folder* next to the shared conftest, with *variables* in its environment."""
    shutil.copy(CONFTEST, folder)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    return subprocess.run(
        [*argv, "--rootdir", str(folder), str(folder)],
        env={**os.environ, "RUNNER_REQUIRE": "", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
