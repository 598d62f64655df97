"""The topology file that describes the host's switches and links to NCCL and RCCL in the guest (NCCL's ``src/graph/xml.cc``).

Without it they read the guest's sysfs, where QEMU's switch ports always show 2.5 GT/s x1. The file names devices by their addresses in the
guest; the libraries find everything else (GPUs, NICs, NVLink) themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import quoteattr

from runner.base.cpuset import CpuSet
from runner.facts.pci import BRIDGE, is_gpu, is_network
from runner.placement.guest_topology import GuestTopology
from runner.plan.machine import MachinePlan
from runner.plan.passthrough_plan import DevicePlan, LinkSpeed, PassthroughPlan

AMD = "1002"
PATH = "/etc/nccl-topology.xml"
"""The path of the file in the guest."""
FW_CFG = "opt/org.instance-runner/nccl-topology.xml"
"""Its name in QEMU's firmware configuration, for a guest without cloud-init (``docs/specs/fw_cfg.rst``)."""


def nccl_topology(machine: MachinePlan) -> str:
    """Return the file for the devices of *machine*; empty if NCCL uses fewer than two of them.

    RCCL, which AMD's GPUs need, reads only version 2 of the format, and NCCL only version 1.
    """
    passthrough = machine.passthrough
    used = [device for device in passthrough.devices if device.guest_address and _is_used(device)]
    gpus = [device for device in used if is_gpu(device.device_class)]
    if not gpus or len(used) == 1:
        return ""
    version = 2 if all(device.name.startswith(f"{AMD}:") for device in gpus) else 1
    return "\n".join((f'<system version="{version}">', *_cpus(machine.topology, passthrough, used), "</system>\n"))


def vendor_data(topology: str) -> bytes:
    """Return the vendor-data with which cloud-init writes *topology* to the path that NCCL reads.

    A boothook runs at each boot, so that a guest that starts again with other devices gets a new file; the user's own user-data, and the
    user's own line in NCCL's configuration, are kept.
    """
    return f"""#cloud-boothook
#!/bin/sh
cat >{PATH} <<'END'
{topology}END
grep -qs ^NCCL_TOPO_FILE= /etc/nccl.conf || echo NCCL_TOPO_FILE={PATH} >>/etc/nccl.conf
""".encode()


def _is_used(device: DevicePlan) -> bool:
    return is_gpu(device.device_class) or is_network(device.device_class)


def _cpus(topology: GuestTopology, passthrough: PassthroughPlan, used: list[DevicePlan]) -> Iterator[str]:
    """Yield an element for each NUMA node of the guest with devices; for Linux a single node is 0, no node is -1."""
    nodes = topology.numa_nodes
    several = len(nodes) > 1
    numbers = sorted({_node(device, several=several) for device in used})
    for number in numbers:
        vcpus = nodes[number].vcpus if number >= 0 else CpuSet.union(each.vcpus for each in nodes)
        yield f' <cpu numaid="{number}" affinity="{vcpus.mask()}" arch="x86_64">'
        near = [device for device in used if _node(device, several=several) == number]
        for bus in dict.fromkeys(device.bus for device in near):
            yield from _below(passthrough, bus, near, 2)
        yield " </cpu>"


def _node(device: DevicePlan, *, several: bool) -> int:
    if not several:
        return 0
    return -1 if device.guest_numa_node is None else device.guest_numa_node


def _below(passthrough: PassthroughPlan, bus: str, used: list[DevicePlan], depth: int) -> Iterator[str]:
    for port in passthrough.ports:
        if port.bus != bus:
            continue
        for device in used:
            if device.port == port.name:
                yield " " * depth + _pci(device.guest_address, device.device_class, device.link, device.name) + "/>"
        below = list(_below(passthrough, port.name, used, depth + (port.kind == "upstream")))
        if port.kind == "upstream" and below:
            yield " " * depth + _pci(port.address, BRIDGE << 8, port.link, *port.host_name.split()) + ">"
            yield from below
            yield " " * depth + "</pci>"
        else:
            yield from below


def _pci(address: str, device_class: int, link: LinkSpeed | None, name: str = "", subsystem: str = "") -> str:
    values = {"busid": address, "class": f"0x{device_class:06x}"}
    for prefix, text in (("", name), ("subsystem_", subsystem)):
        if text:
            vendor, _, device = text.partition(":")
            values |= {f"{prefix}vendor": f"0x{vendor}", f"{prefix}device": f"0x{device}"}
    if link is not None:
        values |= {"link_speed": link.speed, "link_width": str(link.width)}
    return "<pci " + " ".join(f"{key}={quoteattr(value)}" for key, value in values.items())
