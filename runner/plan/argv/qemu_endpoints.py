"""The ways in which QEMU reaches files, sockets and devices: descriptors that it inherits when this program starts it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import attrs

from runner.base.values import Fd, frozen
from runner.plan.passthrough_plan import DevicePlan

if TYPE_CHECKING:
    from runner.plan.argv.wires import WireNumbers


class Endpoints(Protocol):
    """The ways in which QEMU reaches files, sockets and devices."""

    def monitor(self) -> Iterator[str]:
        """Yield the options that make a chardev ``qmp`` or another monitor, and the serial console's chardev ``console``."""

    def memory(self, index: int, page_size: int | None) -> str:
        """Return the memory backend, with the properties of the RAM of the guest's NUMA node *index*."""

    def file(self, name: str) -> str:
        """Return the path of the kernel, initial RAM disk or firmware."""

    def image(self, name: str) -> tuple[list[str], str]:
        """Return the options that must come first, and the file name of a block device."""

    def netdev(self, index: int) -> str:
        """Return the kind and properties of network *index*."""

    def share(self, index: int) -> str:
        """Return the chardev properties of share *index*."""

    def agent(self) -> str:
        """Return the chardev properties of the guest agent's channel."""

    def vsock(self) -> str:
        """Return the device properties of the vsock device."""

    def screen(self) -> Iterator[str]:
        """Yield the options of the VNC server."""

    def iommufd(self) -> str:
        """Return further properties of the object ``iommufd``."""

    def passed(self, device: DevicePlan) -> str:
        """Return the properties of ``vfio-pci`` that identify *device*."""


@frozen
class QemuFds:
    """Endpoints as inherited descriptors; *ram*, *wires* and *shares* are by index."""

    qmp: Fd
    console: Fd
    ram: tuple[Fd, ...]
    files: dict[str, Fd] = attrs.field(factory=dict)
    """``kernel``, ``initrd``, ``firmware``, ``firmware-vars``, ``disk0``, …"""
    wires: tuple[WireNumbers, ...] = ()
    shares: tuple[Fd, ...] = ()
    guest_agent_channel: Fd | None = None
    vhost_vsock: tuple[Fd, int] | None = None
    """The descriptor and its context identifier."""
    devices: dict[str, Fd] = attrs.field(factory=dict)
    """PCI address → descriptor of each device that is inherited; ``iommufd`` is ``/dev/iommu``."""

    def numbers(self) -> tuple[int, ...]:
        """Return every descriptor that QEMU inherits."""
        wires = (number for wire in self.wires for number in wire.numbers())
        agent = () if self.guest_agent_channel is None else (self.guest_agent_channel,)
        vsock = () if self.vhost_vsock is None else self.vhost_vsock[:1]
        served = (*wires, *self.shares, *agent, *vsock, *self.devices.values())
        return (self.qmp, self.console, *self.ram, *self.files.values(), *served)

    def monitor(self) -> Iterator[str]:
        yield from ("-chardev", f"socket,id=qmp,fd={self.qmp}")
        yield from ("-mon", "chardev=qmp,mode=control")
        yield from ("-chardev", f"socket,id=console,fd={self.console}")

    def memory(self, index: int, _page_size: int | None) -> str:
        return f"memory-backend-file,mem-path=/proc/self/fd/{self.ram[index]},share=on"

    def file(self, name: str) -> str:
        # QEMU reads these with fopen(3), which knows no fdset.
        return f"/proc/self/fd/{self.files[name]}"

    def image(self, name: str) -> tuple[list[str], str]:
        # The fdset has the number of the descriptor it holds.
        number = self.files[name]
        return ["-add-fd", f"fd={number},set={number},opaque={name}"], f"/dev/fdset/{number}"

    def netdev(self, index: int) -> str:
        return self.wires[index].netdev()

    def share(self, index: int) -> str:
        return f"fd={self.shares[index]}"

    def agent(self) -> str:
        return f"fd={self.guest_agent_channel}"

    def vsock(self) -> str:
        number, cid = self.vhost_vsock or (-1, 0)
        return f"guest-cid={cid},vhostfd={number}"

    def screen(self) -> Iterator[str]:
        # QEMU's VNC server does not listen; it receives connections by QMP add_client.
        yield from ("-vnc", "none")

    def iommufd(self) -> str:
        return f",fd={self.devices['iommufd']}"

    def passed(self, device: DevicePlan) -> str:
        number = self.devices.get(device.address)
        return f"host={device.address}" if number is None else f"fd={number},iommufd=iommufd0"


def comma(value: str) -> str:
    """Escape *value* for QEMU's ``key=value,…`` syntax, where a comma is written twice."""
    return value.replace(",", ",,")
