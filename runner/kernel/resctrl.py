"""resctrl: limits of L3 cache ways and memory bandwidth for groups of CPUs (``Documentation/filesystems/resctrl.rst``).

The file system can be mounted once, and all groups end with the mount (``rdt_kill_sb``). So this program uses it where the node has mounted
it, and never mounts it: a restart would otherwise end the groups of running instances.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError
from runner.base.values import frozen
from runner.kernel.leases import open_at_once, read_at_once

OWN_DIRECTORIES = {"info", "mon_data", "mon_groups"}
"""Directories in a group's directory that are not groups."""


@frozen
class CacheGroup:
    """A group: its CPUs, and resource (``L3``, ``MB``) → domain → value, as in its ``schemata``."""

    cpus: CpuSet
    values: Mapping[str, Mapping[int, str]]


@frozen
class CacheCapabilities:
    """The CPUs' capabilities: *all_ways* of an L3 cache as a mask, 0 where ways cannot be assigned."""

    all_ways: int
    fewest_ways: int
    least_bandwidth: int
    """In the unit of ``MB`` in ``schemata``; 0 where memory bandwidth cannot be limited."""
    bandwidth_step: int
    code_and_data: bool = False
    """Whether ways are assigned to code and to data separately (mount option ``cdp``), and so none to both."""


@frozen
class Resctrl:
    """resctrl mounted at *root*."""

    root: Path

    def mounted(self) -> bool:
        """Tell whether resctrl is mounted there."""
        return (self.root / "schemata").exists()

    def capabilities(self) -> CacheCapabilities:
        """Return the CPUs' capabilities."""
        info = self.root / "info"
        return CacheCapabilities(
            int(_text(info / "L3/cbm_mask") or "0", 16),
            int(_text(info / "L3/min_cbm_bits") or 1),
            int(_text(info / "MB/min_bandwidth") or 0),
            int(_text(info / "MB/bandwidth_gran") or 1),
            code_and_data=(info / "L3CODE").exists(),
        )

    def groups(self) -> dict[str, CacheGroup]:
        """Return the groups by name; the default group, of all other CPUs, has an empty name. Raises :class:`HostError`."""
        try:
            names = sorted(
                entry.name for entry in os.scandir(self.root) if entry.is_dir() and entry.name not in OWN_DIRECTORIES
            )
            return {name: self._group(self.root / name) for name in ("", *names)}
        except (OSError, ValueError) as error:
            raise HostError(f"cannot read the groups of {self.root}") from error

    def _group(self, path: Path) -> CacheGroup:
        values: dict[str, dict[int, str]] = {}
        for line in read_at_once(path / "schemata").decode().splitlines():
            resource, _, domains = line.strip().partition(":")
            pairs = (each.split("=") for each in domains.split(";"))
            values[resource] = {int(domain): value.strip() for domain, value in pairs}
        return CacheGroup(CpuSet.parse(read_at_once(path / "cpus_list").decode()), values)

    def write(self, group: str, file: str, value: str) -> None:
        """Write *value* to *file* of a group. Raises :class:`HostError` with the kernel's reason (``last_cmd_status``)."""
        path = self.root / group / file
        try:
            fd = open_at_once(path, os.O_WRONLY)
            try:
                os.write(fd, f"{value}\n".encode())
            finally:
                os.close(fd)
        except OSError as error:
            status = _text(self.root / "info/last_cmd_status")
            why = status if status and status != "ok" else os.strerror(error.errno or errno.EIO)
            raise HostError(f"cannot write {value!r} to {path}: {why}") from error

    def create(self, group: str) -> None:
        """Create a group unless it exists. Raises :class:`HostError`; the CPUs support a small number of them."""
        try:
            (self.root / group).mkdir(exist_ok=True)
        except OSError as error:
            remedy = "the CPUs support no more groups" if error.errno == errno.ENOSPC else ""
            raise HostError(f"cannot create {self.root / group}", remedy=remedy) from error

    def remove(self, group: str) -> None:
        """Remove a group; its CPUs return to the default group. Raises :class:`HostError`."""
        try:
            (self.root / group).rmdir()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise HostError(f"cannot remove {self.root / group}") from error


def _text(path: Path) -> str:
    try:
        return read_at_once(path).decode().strip()
    except OSError:
        return ""
