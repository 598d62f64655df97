"""What a start learns from programs that it runs."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from runner.errors import HostError, explain
from runner.instance.discover import find_virtiofsd
from runner.kernel.processes import open_processes


@pytest.fixture
def virtiofsd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a virtiofsd that is found first, and cannot be started: its interpreter is missing."""
    path = tmp_path / "virtiofsd"
    path.write_text("#!/none\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return path


async def test_a_program_that_cannot_be_started_is_as_good_as_none(virtiofsd: Path) -> None:
    async with open_processes() as processes:
        found, reason = await find_virtiofsd(processes)
    assert (found, reason) == (
        None,
        f"cannot start virtiofsd-version ({str(virtiofsd)!r}): No such file or directory",
    )


@pytest.mark.usefixtures("virtiofsd")
async def test_a_shortage_is_not_blamed_on_the_program() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with open_processes() as processes:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            with pytest.raises(HostError) as caught:
                await find_virtiofsd(processes)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert explain(caught.value).endswith("Too many open files")
