"""The timeouts and intervals of an instance, as one value that is given to it."""

from __future__ import annotations

from runner.base.values import frozen


@frozen
class InstanceTimeouts:
    """Seconds."""

    vcpu_released: float = 15.0
    """For the guest to release a vCPU; Linux 6.1 took 0.8 s, emulated (measured)."""
    vcpu_looked: float = 0.5
    """Between two looks whether a vCPU is gone, in case its event came before it was waited for."""
    guest_runs: float = 5.0
    """For QEMU to let the guest run on, whatever has failed; for the second QEMU of an update as well."""
    next_qemu: float = 20.0
    """From the second QEMU's start until it could run the guest, after which the first one continues; 0.3 are usual."""
    cpus_looked: float = 1.0
    """Between two looks whether the container has the vCPUs' CPUs; one takes 0.1 ms with 40 vCPUs (measured)."""
    displaced: float = 3.0
    """For which threads must be kept off their CPUs while the container's file still names these: another program may have
    changed the cgroup, which the controller puts right within 1 s."""
    qemu_silent: float = 20.0
    """For which QEMU may owe a reply in the middle of a change, which may wait for storage, until its client is not kept waiting."""
    cause: float = 2.0
    """For QEMU to end after a child without which it cannot run: then its end is the cause."""
    controller_asked: float = 0.25
    """Between two attempts to reach a controller that is not there."""
    holder_asked: float = 10.0
    """After which the controller is asked again while another instance holds the CPUs, whose end is reported at once."""
