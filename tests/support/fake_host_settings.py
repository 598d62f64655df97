"""Fakes of a machine's interrupts, idle states, frequencies and resctrl, made of ordinary files.

Where no emulated machine has the hardware, they are all there is: frequency governors and resctrl were not run on hardware.
The kernel's rules that they follow are in ``kernel/irq/proc.c`` and ``Documentation/filesystems/resctrl.rst``.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError
from runner.kernel.host_settings import (
    DEFAULT_AFFINITY,
    INTERRUPTS,
    WORK_QUEUES,
    HostSettings,
    SettingError,
    d3cold_path,
    governor_path,
    latency_path,
)
from runner.kernel.resctrl import Resctrl

ALL_WAYS = "fff"


class FakeHostSettings(HostSettings):
    """A machine of files; ``managed`` beside an interrupt's mask makes the kernel refuse to change that."""

    def write(self, path: str, value: str) -> None:
        file = self.root / path
        if (file.parent / "managed").exists():
            raise SettingError(f"cannot write {value!r} to /{path}: {os.strerror(errno.EIO)}", errno.EIO)
        if not file.exists():
            raise SettingError(f"cannot write {value!r} to /{path}: {os.strerror(errno.ENOENT)}", errno.ENOENT)
        file.write_text(f"{CpuSet.parse(value).mask() if path in {DEFAULT_AFFINITY, WORK_QUEUES} else value}\n")

    def put(self, path: str, content: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{content}\n")

    def add_interrupt(self, number: int, handler: str, cpus: str, *, numa_node: int = 0, managed: bool = False) -> None:
        line = f"{INTERRUPTS}/{number}"
        self.put(f"{line}/smp_affinity_list", cpus)
        self.put(f"{line}/node", str(numa_node))
        (self.root / line / handler).mkdir(exist_ok=True)
        if managed:
            self.put(f"{line}/managed", "")

    def add_pci_device(self, address: str, *, passthrough: bool, d3cold: str = "1") -> None:
        """Make the PCI device at *address*, bound to a driver for *passthrough* or to another one."""
        device = f"sys/bus/pci/devices/{address}"
        self.put(d3cold_path(address), d3cold)
        driver = self.root / f"sys/bus/pci/drivers/{'vfio-pci' if passthrough else 'nvme'}"
        driver.mkdir(parents=True, exist_ok=True)
        (self.root / device / "driver").symlink_to(f"../../drivers/{driver.name}")

    def add_machine(self, cpus: int) -> None:
        """Make the settings of a machine with *cpus* CPUs on two NUMA nodes, without interrupts.

        Each two CPUs have one frequency policy.
        """
        everything = CpuSet(range(cpus))
        self.put(DEFAULT_AFFINITY, everything.mask())
        self.put(WORK_QUEUES, everything.mask())
        for cpu in everything:
            self.put(latency_path(cpu), "0")
            directory = (self.root / governor_path(cpu)).parent
            policy = directory.parent.parent / f"cpufreq/policy{cpu & ~1}"
            self.put(str((policy / "scaling_governor").relative_to(self.root)), "powersave")
            directory.symlink_to(f"../cpufreq/{policy.name}")
        for node, half in enumerate((range(cpus // 2), range(cpus // 2, cpus))):
            self.put(f"sys/devices/system/node/node{node}/cpulist", str(CpuSet(half)))


class FakeResctrl(Resctrl):
    """A resctrl of files: CPUs are in one group, a group begins with all ways, and its CPUs go back when it is removed."""

    def mount(self, cpus: CpuSet, *, caches: int, bandwidth: str = "100") -> None:
        """Mount it, with the ways of a machine of twelve; *bandwidth* is the highest value of memory bandwidth."""
        for path, content in (
            ("info/L3/cbm_mask", ALL_WAYS),
            ("info/L3/min_cbm_bits", "1"),
            ("info/MB/min_bandwidth", "10"),
            ("info/MB/bandwidth_gran", "10"),
        ):
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(f"{content}\n")
        self._put(
            self.root,
            cpus,
            {"MB": dict.fromkeys(range(caches), bandwidth), "L3": dict.fromkeys(range(caches), ALL_WAYS)},
        )

    def _put(self, path: Path, cpus: CpuSet, values: dict[str, dict[int, str]]) -> None:
        (path / "cpus_list").write_text(f"{cpus}\n")
        lines = (f"{name}:{';'.join(f'{d}={v}' for d, v in each.items())}" for name, each in values.items())
        (path / "schemata").write_text("".join(f"    {line}\n" for line in lines))

    def create(self, group: str) -> None:
        if not (self.root / group).exists():
            super().create(group)
            default = self.groups_there()[""]
            self._put(
                self.root / group,
                CpuSet(),
                {"L3": dict.fromkeys(default["L3"], ALL_WAYS), "MB": dict.fromkeys(default["MB"], "100")},
            )

    def groups_there(self) -> dict[str, dict[str, dict[int, str]]]:
        """Return group → resource → domain → value."""
        names = [path.parent.relative_to(self.root) for path in self.root.glob("**/schemata")]
        return {
            "" if str(name) == "." else str(name): {
                resource: dict(values) for resource, values in self._group(self.root / name).values.items()
            }
            for name in names
        }

    def cpus(self, group: str) -> CpuSet:
        return CpuSet.parse((self.root / group / "cpus_list").read_text())

    def write(self, group: str, file: str, value: str) -> None:
        values = self.groups_there()
        if group not in values:
            raise HostError(f"cannot write {value!r} to {self.root / group / file}: No such file or directory")
        if file == "cpus_list":
            mine = CpuSet.parse(value)
            for name in values:
                left = mine if name == group else self.cpus(name) - mine
                (self.root / name / "cpus_list").write_text(f"{left}\n")
            return
        resource, _, domains = value.partition(":")
        for pair in domains.split(";"):
            domain, _, each = pair.partition("=")
            values[group][resource][int(domain)] = each
        self._put(self.root / group, self.cpus(group), values[group])

    def remove(self, group: str) -> None:
        back = self.cpus("") | self.cpus(group)
        shutil.rmtree(self.root / group)
        (self.root / "cpus_list").write_text(f"{back}\n")
