"""Writes ``*.paths`` beside it: how NCCL's own code rates the way between each two devices of a recorded host.

Usage, as root: ``python tests/data/nccl/record.py PROGRAM VERSION``. PROGRAM contains ``xml.cc``, ``topo.cc`` and ``paths.cc`` of NCCL
(``src/graph``), unchanged, and is called with a topology file, or with ``-`` for the sysfs of the host, and with
``gpu=ADDRESS`` or ``net=ADDRESS`` for each device. It adds the elements ``<gpu>`` and ``<net>``, which NCCL makes of what
drivers tell it, has NCCL compute all paths, and prints one line for each pair: both addresses, the type of the path and
its bandwidth in GB/s. Nothing here contains or builds NCCL.

Each line has what NCCL computes on the host, of our file for a guest, and of our file with ``topology = "numa"``. NCCL
knows neither AMD's GPUs nor version 2 of the file, so MI300X is recorded as GPUs of class 0x03 in a file of version 1.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from runner.facts.pci import is_gpu
from runner.plan.nccl import nccl_topology
from runner.plan.passthrough_plan import DevicePlan
from tests.support.fake_pci import fake_pci_tree, recorded_pci
from tests.unit.plan.test_nccl import COLUMNS, HERE, HOSTS, digest, nccl_devices, planned_column

EMPTY, RECORDED = "mount -t tmpfs none /sys", "mount --bind {} /sys"
"""Commands by which the program finds no sysfs, as the file says everything, or the recorded one."""


def fake_sysfs(root: Path, name: str) -> Path:
    """Write the recorded host *name* below *root*, with the directories by which NCCL finds a device; return its sysfs."""
    records = [{**each, "class": each["class"].replace("0x12", "0x03")} for each in recorded_pci(name)]
    sys_root = fake_pci_tree(root, records) / "sys"
    buses = sys_root / "class/pci_bus"
    buses.mkdir(parents=True)
    for device in (sys_root / "bus/pci/devices").iterdir():
        path = device.resolve()
        bus = path.parent / "pci_bus" / path.name[:7]
        bus.mkdir(parents=True, exist_ok=True)
        if not (buses / bus.name).is_symlink():
            (buses / bus.name).symlink_to(Path("/sys") / bus.relative_to(sys_root))
    return sys_root


def paths(program: str, mount: str, file: str, devices: Mapping[str, DevicePlan]) -> dict[frozenset[str], str]:
    """Return type and bandwidth of each path by the host's addresses of both devices."""
    words = [f"{'gpu' if is_gpu(each.device_class) else 'net'}={address}" for address, each in devices.items()]
    script = f'{mount} && exec "$@"'
    argv = ["unshare", "--mount", "sh", "-c", script, "sh", program, file, *words]
    output = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {
        frozenset((devices[one].address, devices[other].address)): f"{kind} {bandwidth}"
        for one, other, kind, bandwidth in map(str.split, output.splitlines())
    }


def lines_of(program: str, version: str, name: str, root: Path) -> Sequence[str]:
    """Return the lines of a record: NCCL's version, the digests of our files, then the pairs."""
    mount = RECORDED.format(fake_sysfs(root / "host", name))
    plan, _ = planned_column(root / "order", name, "guest")
    found = [paths(program, mount, "-", {each.address: each for each in nccl_devices(plan)})]
    digests = []
    for column in COLUMNS[1:]:
        plan, _ = planned_column(root / column, name, column)
        topology = nccl_topology(plan.machine)
        (root / f"{column}.xml").write_text(
            topology.replace('version="2"', 'version="1"').replace("0x120000", "0x030000")
        )
        devices = {each.guest_address: each for each in nccl_devices(plan)}
        found.append(paths(program, EMPTY, str(root / f"{column}.xml"), devices))
        digests.append(f"# {column} {digest(topology)}")
    return [
        f"# {version}",
        *digests,
        *(" ".join([*sorted(pair), *(each[pair] for each in found)]) for pair in found[0]),
    ]


if __name__ == "__main__":
    _, program, version = sys.argv
    for host in HOSTS:
        with tempfile.TemporaryDirectory() as directory:
            (HERE / f"{host}.paths").write_text("\n".join(lines_of(program, version, host, Path(directory))) + "\n")
