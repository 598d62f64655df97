"""The settings of a running kernel, read from fake files."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from runner.kernel.kernel_facts import QuietCpus, read_quiet_cpus


@pytest.mark.parametrize(
    ("cmdline", "expected"),
    [
        ("quiet splash", QuietCpus()),
        ("quiet rcu_nocbs=all isolcpus=2-3 nohz_full=1", QuietCpus(CpuSet([1]), "all")),
        ("isolcpus=managed_irq,2-3", QuietCpus(CpuSet([1]), "", "2-3")),
        ("isolcpus=domain,managed_irq,2-N rcu_nocbs=2-N", QuietCpus(CpuSet([1]), "2-N", "2-N")),
        ("isolcpus=managed_irq,nohz,2,3", QuietCpus(CpuSet([1]), "", "2,3")),
    ],
)
def test_what_the_kernel_keeps_off_cpus_from_boot_on(tmp_path: Path, cmdline: str, expected: QuietCpus) -> None:
    (tmp_path / "cmdline").write_text(cmdline + "\n")
    (tmp_path / "nohz_full").write_text(f"{expected.nohz_full or '(null)'}\n")
    assert read_quiet_cpus(tmp_path, tmp_path) == expected
