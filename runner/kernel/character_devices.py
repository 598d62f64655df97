"""The kernel's character devices that QEMU uses: KVM, tap and macvtap, vhost-net, vhost-vsock."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

from runner.base.errors import HostError, doing
from runner.facts.host import Kvm
from runner.kernel.files import Descriptor, closing, owned
from runner.kernel.limits import limit_behind

_KVM_GET_API_VERSION = 0xAE00
_KVM_CREATE_VM = 0xAE01
_KVM_CHECK_EXTENSION, _KVM_CAP_MAX_VCPUS = 0xAE03, 66
_KVM_API_VERSION = 12
_VHOST_VSOCK_SET_GUEST_CID = 0x4008AF60
_CIDS_TRIED = 256
_TUNSETIFF, TUNGETIFF = 0x400454CA, 0x800454D2  # include/uapi/linux/if_tun.h
IFF_TAP, IFF_MULTI_QUEUE, IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x0100, 0x1000, 0x4000


def probe_kvm(device: Path) -> Kvm:
    """Return the kernel's KVM API version and its maximum of vCPUs (``Documentation/virt/kvm/api.rst``, 4.1 and 4.4)."""
    try:
        status = device.stat()
        fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return Kvm(f"{device}: {error.strerror}")
    with closing(fd):
        try:
            version = fcntl.ioctl(fd, _KVM_GET_API_VERSION)
            most = fcntl.ioctl(fd, _KVM_CHECK_EXTENSION, _KVM_CAP_MAX_VCPUS)
        except OSError as error:
            return Kvm(f"{device}: {error.strerror}")
    if version != _KVM_API_VERSION:
        return Kvm(f"{device}: API version {version} instead of {_KVM_API_VERSION}")
    return Kvm(None, status.st_gid, stat.S_IMODE(status.st_mode), most_vcpus=most)


_OTHER_HYPERVISOR = "another hypervisor (VirtualBox, VMware) has the CPUs' virtualization until its guests have ended"
"""``kvm_arch_enable_virtualization_cpu`` of ``arch/x86/kvm/vmx/vmx.c``: VMX is on already."""


def try_kvm(device: Path) -> str | None:
    """Create a virtual machine without vCPUs and destroy it; return the reason if that fails, ``None`` if it works.

    An answer of the API proves little: without hardware virtualisation, or while another hypervisor uses it, only this
    fails (``Documentation/virt/kvm/api.rst``, 4.2).
    """
    try:
        fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
        with closing(fd):
            os.close(fcntl.ioctl(fd, _KVM_CREATE_VM, 0))
    except OSError as error:
        return why_no_machine(error)
    return None


def why_no_machine(error: OSError) -> str:
    """Return the reason why ``KVM_CREATE_VM`` fails with *error*, and its likely cause."""
    why = _OTHER_HYPERVISOR if error.errno == errno.EBUSY else limit_behind(error.errno or 0, "file")
    return f"{error.strerror}: {why}" if why else str(error.strerror)


def why_not_opened(device: Path) -> str | None:
    """Return the reason why the character device cannot be opened for reading and writing, ``None`` if it can."""
    try:
        mode = device.stat().st_mode
        if not stat.S_ISCHR(mode):
            return "it is not a character device"
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return error.strerror
    return None


@contextmanager
def tap(name: str, queues: int = 1, device: Path = Path("/dev/net/tun")) -> Iterator[tuple[Descriptor, ...]]:
    """Hold a descriptor for each queue of the tap interface *name*, which lives until every copy of them is closed.

    See ``Documentation/networking/tuntap.rst``. ``IFF_VNET_HDR`` lets the guest leave checksums and segmentation to
    the host.
    """
    flags = IFF_TAP | IFF_NO_PI | _IFF_VNET_HDR | (IFF_MULTI_QUEUE if queues > 1 else 0)
    request = struct.pack("16sH22x", name.encode(), flags)
    with ExitStack() as stack:
        found = []
        for _ in range(queues):
            with doing(f"open {str(device)!r}", remedy="give the pod the device"):
                fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            found.append(stack.enter_context(owned(fd)))
            with doing(f"make the tap interface {name!r}", remedy="it takes CAP_NET_ADMIN and an unused name"):
                fcntl.ioctl(fd, _TUNSETIFF, request)
        yield tuple(found)


@contextmanager
def macvtap(
    name: str,
    index: int,
    queues: int,
    sysfs: Path = Path("/sys"),
    devices: Path = Path("/dev"),
    in_pod_cgroup: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[tuple[Descriptor, ...]]:
    """Hold a descriptor for each queue of the macvtap link *name*, whose index is *index*; the link remains afterwards.

    udev names its device node by an index that is not unique among network namespaces, and no container has the node. So a node is made by
    the numbers in this namespace's sysfs, in ``/dev``, which is never mounted ``nodev``, and removed once it is open. It is made
    *in_pod_cgroup*, where no device filter forbids that, and opened there if the container may use the device; otherwise in the caller's
    cgroup, float, where the controller may allow all macvtaps. Afterwards the descriptor is checked to belong to *name*.
    """
    numbers = sysfs / "class" / "net" / name / f"tap{index}" / "dev"
    try:
        major, minor = map(int, numbers.read_text().split(":"))
    except (OSError, ValueError) as error:
        raise HostError(
            f"cannot find the device of the macvtap {name!r} in {str(numbers)!r}",
            remedy="/sys must be of this network namespace",
        ) from error
    node = devices / f".instance-runner-{os.urandom(8).hex()}"
    with ExitStack() as stack:
        try:
            with in_pod_cgroup():
                with doing(f"make a device node for the macvtap {name!r}", remedy="it takes CAP_MKNOD"):
                    os.mknod(node, stat.S_IFCHR | 0o600, os.makedev(major, minor))
                found = tuple(_opened_queues(stack, node, queues))
            if len(found) < queues:
                found = tuple(_opened_queues(stack, node, queues))
        finally:
            node.unlink(missing_ok=True)
        if len(found) < queues:
            raise HostError(
                f"cannot open the macvtap {name!r}: Operation not permitted",
                remedy=f"let the container use it (`--device-cgroup-rule 'c {major}:* rw'`), or every pod of the node every "
                "macvtap (the controller's --allow-macvtap, with the module macvtap loaded before)",
            )
        for descriptor in found:
            _use_macvtap(descriptor.number, name, several=queues > 1)
        yield found


def _opened_queues(stack: ExitStack, node: Path, queues: int) -> Iterator[Descriptor]:
    """Open *node* as many times as there are *queues*, or never, if a device filter forbids it."""
    for _ in range(queues):
        try:
            fd = os.open(node, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except PermissionError:
            return
        except OSError as error:
            raise HostError(f"cannot open the macvtap at {str(node)!r}") from error
        yield stack.enter_context(owned(fd))


def _use_macvtap(fd: int, name: str, *, several: bool) -> None:
    flags = IFF_TAP | IFF_NO_PI | _IFF_VNET_HDR | (IFF_MULTI_QUEUE if several else 0)
    with doing(f"use the macvtap {name!r}"):
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", b"", flags))
        found = os.fsdecode(fcntl.ioctl(fd, TUNGETIFF, bytes(40))[:16].rstrip(b"\0"))
    if found != name:  # the kernel does not check a name passed to TUNSETIFF
        raise HostError(f"cannot use the macvtap {name!r}: its device node is of {found!r}")


def may_open(device: Path) -> bool:
    """Tell whether this process may open *device* for reading and writing, by its mode alone."""
    return os.access(device, os.R_OK | os.W_OK)


@contextmanager
def vhost_net(device: Path = Path("/dev/vhost-net")) -> Iterator[Descriptor]:
    """Hold a descriptor of vhost-net for one queue pair."""
    with doing(f"open {str(device)!r}"):
        fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    with owned(fd) as descriptor:
        yield descriptor


@contextmanager
def vhost_vsock(cid: int, *, exact: bool, device: Path = Path("/dev/vhost-vsock")) -> Iterator[tuple[int, int]]:
    """Hold a descriptor of vhost-vsock and the context identifier that is reserved until it is closed.

    That is *cid*, or without *exact* the next free one: each belongs to one guest of the host (``drivers/vhost/vsock.c``:
    ``EADDRINUSE``). QEMU sets it again on the same descriptor, which changes nothing.
    """
    with doing(f"open {str(device)!r}"):
        fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    with closing(fd):
        for each in range(cid, cid + (1 if exact else _CIDS_TRIED)):
            try:
                fcntl.ioctl(fd, _VHOST_VSOCK_SET_GUEST_CID, struct.pack("Q", each))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise HostError(f"cannot take the vsock context identifier {each}") from error
            break
        else:
            raise HostError(
                f"cannot take the vsock context identifier {cid}: another guest of this node has it",
                remedy='name another one, or say guest.vsock = "auto"',
            )
        yield fd, each
