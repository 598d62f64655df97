from __future__ import annotations

from pathlib import Path

import pytest

from runner.cpuset import CpuSet
from runner.host.procfs import Procfs

X86 = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\n\nprocessor\t: 1\nvendor_id\t: of another CPU\n\n"
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\n\nprocessor\t: 1\n\n"


@pytest.mark.parametrize(("text", "vendor"), [(X86, "AuthenticAMD"), (ARM, ""), ("", "")])
def test_the_vendor_of_the_cpus(tmp_path: Path, text: str, vendor: str) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert Procfs(tmp_path).cpu_vendor() == vendor


def test_memory_nodes_are_those_of_the_cpuset(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text("Name:\tpython\nMems_allowed:\t00000005\nMems_allowed_list:\t0,2\n")
    assert Procfs(tmp_path).memory_nodes() == CpuSet([0, 2])


def test_this_machine_has_memory() -> None:
    assert Procfs().memory_nodes()
