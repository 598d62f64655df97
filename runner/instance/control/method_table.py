"""The methods of the control socket, a table that the server, its clients and the documents share."""

from __future__ import annotations

from runner.base.values import frozen

PROTOCOL = 1
"""The version of the protocol, ``version`` of each result: it grows when a method, a parameter or a field is removed or changes its
meaning."""


@frozen
class ControlMethod:
    """The parameters and the result of one method, and how it depends on QEMU."""

    result: str
    """The type of its result: the name of the schema (``instance-runner schema``)."""
    params: tuple[str, ...] = ()
    """The parameters that it accepts; any other is refused."""
    keys_of_disk: bool = False
    """Whether it also accepts the keys of a ``[[disk]]``."""
    changes: bool = False
    """Whether it changes the instance, which may wait for the guest; each change has a time limit of its own."""
    needs_qemu: bool = True
    """It is refused while QEMU does not answer."""
    waits_for_qemu: bool = False
    """Whether its client is answered as soon as QEMU falls silent, while the change goes on."""


_QEMU = ("qemu", "digest", "no_way_back")

METHODS = {
    "status": ControlMethod("status", needs_qemu=False),
    "runner": ControlMethod("renewal", needs_qemu=False),
    "upgrade": ControlMethod("done", ("from", "digest"), changes=True, needs_qemu=False),
    "qemu.check": ControlMethod("qemu-check", _QEMU),
    "qemu.update": ControlMethod("qemu-update", _QEMU, changes=True),
    "cpu.list": ControlMethod("vcpus"),
    "cpu.set": ControlMethod("vcpus", ("count",), changes=True, waits_for_qemu=True),
    "disk.list": ControlMethod("disks"),
    "disk.attach": ControlMethod("disk", ("path",), keys_of_disk=True, changes=True, waits_for_qemu=True),
    "disk.detach": ControlMethod("done", ("name",), changes=True, waits_for_qemu=True),
    "disk.grow": ControlMethod("disk", ("name", "size"), changes=True, waits_for_qemu=True),
}
