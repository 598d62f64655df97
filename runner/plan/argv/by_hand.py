"""A shell script that runs the machine of a plan by hand: QEMU reaches everything by paths, and the console is the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from runner.base.values import frozen
from runner.plan.argv.qemu import qemu_argv
from runner.plan.argv.qemu_endpoints import comma
from runner.plan.argv.virtiofsd import virtiofsd_argv
from runner.plan.disks import DiskPlan
from runner.plan.instance import InstancePlan
from runner.plan.passthrough_plan import DevicePlan
from runner.spec.rules import MIB

SEED = "seed.iso"


@frozen
class Paths:
    """Endpoints as paths and a terminal, for a person who runs the command."""

    plan: InstancePlan

    def monitor(self) -> Iterator[str]:
        # Console and human monitor share the terminal, Ctrl-A c switches.
        yield from ("-chardev", "stdio,id=console,mux=on,signal=off")
        yield from ("-mon", "chardev=console,mode=readline")

    def memory(self, _index: int, page_size: int | None) -> str:
        huge = "" if page_size is None else f",hugetlb=on,hugetlbsize={page_size // MIB}M"
        return f"memory-backend-memfd,share=on{huge}"

    def file(self, name: str) -> str:
        machine = self.plan.machine
        plan = {"kernel": machine.kernel, "initrd": machine.initrd}[name]
        return "" if plan is None else str(plan.path)

    def image(self, name: str) -> tuple[list[str], str]:
        machine = self.plan.machine
        paths: dict[str, PurePosixPath | None] = {}
        for disk in machine.disks:
            paths[disk.name] = disk.path if disk.overlay is None else _overlay(self.plan, disk)
            paths |= {below: layer.path for below, layer in disk.below()}
        paths["firmware"] = None if machine.firmware is None else machine.firmware.path
        paths["firmware-vars"] = _variables_path(self.plan)
        paths["seed"] = self.plan.state_directory / SEED
        return [], str(paths[name])

    def netdev(self, index: int) -> str:
        from runner.plan.argv.networks import netdev_by_hand

        return netdev_by_hand(index, self.plan.networks[index])

    def share(self, index: int) -> str:
        return f"path={comma(str(_share_socket(self.plan, index)))}"

    def agent(self) -> str:
        # Any program may connect there.
        return f"path={comma(str(self.plan.state_directory / 'agent.sock'))},server=on,wait=off"

    def vsock(self) -> str:
        vsock = self.plan.machine.guest.vsock
        return f"guest-cid={0 if vsock is None else vsock.cid}"

    def screen(self) -> Iterator[str]:
        yield from ("-vnc", f"unix:{comma(str(self.plan.state_directory / 'vnc.sock'))}")

    def iommufd(self) -> str:
        return ""

    def passed(self, device: DevicePlan) -> str:
        return f"host={device.address}" + (",iommufd=iommufd0" if device.vfio_backend == "iommufd" else "")


def _overlay(plan: InstancePlan, disk: DiskPlan) -> PurePosixPath:
    return plan.state_directory / f"{disk.name}.qcow2"


def _share_socket(plan: InstancePlan, index: int) -> PurePosixPath:
    return plan.state_directory / f"share{index}.sock"


def _variables_path(plan: InstancePlan) -> PurePosixPath | None:
    variables = plan.machine.firmware_vars
    return None if variables is None else variables.path or plan.state_directory / "firmware-vars.fd"


_WITHOUT_VALUE = {"-nodefaults", "-no-user-config", "-S"}
"""Options without a value; the value of any other option may also begin with a dash."""


def _made_first(plan: InstancePlan, seed: bytes | None) -> Iterator[str]:
    """Yield the commands that make the files which this program keeps in memory, or creates if missing."""
    import shlex

    machine, directory = plan.machine, shlex.quote(str(plan.state_directory))
    if machine.guest.agent or machine.vnc or seed is not None or machine.firmware_vars is not None:
        yield f"mkdir -p {directory}"
    if machine.firmware_vars is not None and machine.firmware_vars.template is not None:
        yield shlex.join(("cp", "-n", str(machine.firmware_vars.template), str(_variables_path(plan))))
    if seed is not None:
        import base64  # here, because no instance needs them
        import zlib

        packer = zlib.compressobj(wbits=31)  # gzip
        packed = base64.b64encode(packer.compress(seed) + packer.flush()).decode()
        yield f"base64 -d <<'END' | gzip -d >{shlex.quote(str(plan.state_directory / SEED))}"
        yield from (packed[start : start + 100] for start in range(0, len(packed), 100))
        yield "END"


def pasteable(plan: InstancePlan, seed: bytes | None) -> str:
    """Return a shell script that runs the same machine by hand: the same devices, with paths instead of descriptors, not pinned.

    *seed* is the image of the plan's cloud-init seed, ``None`` for a plan without one. The script needs no
    ``instance-runner``; it must be run as root when there are networks or shares.
    """
    import shlex  # here, because no instance needs them

    from runner.plan.argv.networks import dnsmasq_argv, network_by_hand

    lines = [
        "# The same machine by hand: paths instead of descriptors, console and monitor on the terminal (Ctrl-A c), not pinned."
    ]
    lines += _made_first(plan, seed)
    overlays = [(disk, disk.overlay) for disk in plan.machine.disks if disk.overlay is not None]
    if plan.shares or overlays:
        lines.append(f"mkdir -p {shlex.quote(str(plan.state_directory))}")
    for disk, overlay in overlays:
        path = shlex.quote(str(_overlay(plan, disk)))
        lines.append(f"qemu-img create -q -f qcow2 {path} {overlay.size} && truncate -s {overlay.limit} {path}")
    for index, network in enumerate(plan.networks):
        lines += network_by_hand(index, network)
    lines += [f"{shlex.join(dnsmasq_argv(dhcp))} &" for dhcp in plan.dhcp]
    for index, share in enumerate(plan.shares):
        lines.append(f"{shlex.join(virtiofsd_argv(share, f'--socket-path={_share_socket(plan, index)}'))} &")
        lines.append(f"until [ -S {shlex.quote(str(_share_socket(plan, index)))} ]; do sleep 0.1; done")
    program, *options = qemu_argv(plan.machine, Paths(plan), paused=False)
    words, line = iter(options), shlex.quote(program)
    for option in words:
        line += f" \\\n  {shlex.join([option] if option in _WITHOUT_VALUE else [option, next(words)])}"
    lines.append(line)
    return "\n".join(lines) + "\n"
