"""The timeouts and intervals of an instance, as one value that is given to it."""

from __future__ import annotations

from runner.base.values import frozen


@frozen
class InstanceTimeouts:
    """The timeouts and intervals, in seconds."""

    vcpu_released: float = 15.0
    """For the guest to release a vCPU; Linux 6.1 took 0.8 s, emulated (measured)."""
    disk_released: float = 15.0
    """For the guest to release a disk; Linux takes up to 5 s by PCI Express, and no time by ACPI."""
    vcpu_looked: float = 0.5
    """Between two checks whether a vCPU is gone, in case its event came before the wait began."""
    guest_runs: float = 5.0
    """For QEMU to continue the guest after any failure, and for the second QEMU of an update to start it."""
    next_qemu: float = 60.0
    """From the second QEMU's start until the guest is stopped for it: as long as QEMU may take at the instance's start."""
    takeover: float = 20.0
    """From then until the second QEMU could run the guest; otherwise the first one continues. 0.3 are usual for both."""
    cpus_looked: float = 1.0
    """Between two checks whether the container has the vCPUs' CPUs; a check takes 0.1 ms with 40 vCPUs (measured)."""
    displaced: float = 3.0
    """During which threads must be off their CPUs although the container's file still names these: another program may have changed the
    cgroup, which the controller repairs within 1 s."""
    qemu_silent: float = 20.0
    """For a reply of QEMU in the middle of a change, which may wait for storage; after that its client gets an error."""
    metrics_kept: float = 0.1
    """During which the same metrics answer all clients: each reading takes some milliseconds, and the network may ask without end."""
    cause: float = 2.0
    """For QEMU to end after a child without which it cannot run: within that time, QEMU's end is the cause."""
    controller_asked: float = 0.25
    """Between two attempts to reach an absent controller."""
    holder_asked: float = 10.0
    """After which the controller is asked again while another instance holds the CPUs; the end of that instance is reported at once."""
