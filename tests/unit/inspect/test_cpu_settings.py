"""The machine's settings for an instance's CPUs, read from a fake machine."""

from __future__ import annotations

from pathlib import Path

from runner.base.cpuset import CpuSet
from runner.inspect.cpu_settings import CpuSettings, read_cpu_settings
from runner.kernel.host_settings import WORK_QUEUES, governor_path, latency_path
from tests.support.fake_host_settings import FakeHostSettings

CPUS = CpuSet.parse("2-3")


def test_they_are_those_of_its_cpus_alone(tmp_path: Path) -> None:
    host = FakeHostSettings(tmp_path)
    host.add_machine(8)
    host.add_interrupt(24, "eth0", "0-1,4-7")
    host.add_interrupt(26, "nvme0q3", "3", managed=True)
    host.write(WORK_QUEUES, "0-2,4-7")
    host.write(latency_path(2), "2")
    for cpu in CPUS:
        host.write(governor_path(cpu), "performance")
    found = read_cpu_settings(tmp_path, CPUS)
    assert found == CpuSettings(("26 (nvme0q3)",), CpuSet([2]), ("0", "2"), ("performance",))
    assert found.line() == (
        "interrupts: 26 (nvme0q3); unbound work queues: on '2'; idle states: any or up to 2 µs; governor: performance"
    )


def test_a_machine_without_any_has_none(tmp_path: Path) -> None:
    found = read_cpu_settings(tmp_path, CPUS)
    assert found == CpuSettings((), CpuSet(), (), ())
    assert found.line() == "interrupts: none; unbound work queues: none; idle states: unknown; governor: none"


def test_people_are_shown_some_interrupts_and_how_many_more(tmp_path: Path) -> None:
    host = FakeHostSettings(tmp_path)
    for number in range(30, 40):
        host.add_interrupt(number, "eth0", "0-7")
    assert "35 (eth0) and 4 more;" in read_cpu_settings(tmp_path, CPUS).line()
