"""The firmware that starts the machine, and the file that keeps its variables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from runner.base.values import frozen
from runner.facts.disk import MISSING
from runner.facts.file_errors import remedy_of
from runner.facts.file_formats import FORMATS, unusable
from runner.facts.host import HostFacts
from runner.facts.packages import install
from runner.plan.disks import DiskPlan, content_of, remark_lockless
from runner.plan.problems import Problems
from runner.plan.qemu_limits import refuse_too_large_initrd
from runner.spec.instance import BootSpec, FirmwareBuild, InstanceSpec

OVMF = PurePosixPath("/usr/share/OVMF")
EDK2 = PurePosixPath("/usr/share/edk2/ovmf")
ARCH = PurePosixPath("/usr/share/edk2/x64")
SUSE = PurePosixPath("/usr/share/qemu")
BUILDS: dict[FirmwareBuild, tuple[tuple[PurePosixPath, PurePosixPath], ...]] = {
    "uefi": (
        (OVMF / "OVMF_CODE_4M.fd", OVMF / "OVMF_VARS_4M.fd"),
        (OVMF / "OVMF_CODE.fd", OVMF / "OVMF_VARS.fd"),
        (EDK2 / "OVMF_CODE.fd", EDK2 / "OVMF_VARS.fd"),
        (ARCH / "OVMF_CODE.4m.fd", ARCH / "OVMF_VARS.4m.fd"),
        (SUSE / "ovmf-x86_64-code.bin", SUSE / "ovmf-x86_64-vars.bin"),
    ),
    "uefi-secure": (
        (OVMF / "OVMF_CODE_4M.secboot.fd", OVMF / "OVMF_VARS_4M.ms.fd"),
        (OVMF / "OVMF_CODE.secboot.fd", OVMF / "OVMF_VARS.ms.fd"),
        (EDK2 / "OVMF_CODE.secboot.fd", EDK2 / "OVMF_VARS.secboot.fd"),
    ),
}
"""The paths of a firmware and its empty variable store (with Microsoft's keys for the secure one) on Debian, Ubuntu, Alpine, Fedora,
Arch and openSUSE."""


@frozen
class KeptVariables:
    """A file that keeps the firmware's variables."""

    path: PurePosixPath
    template: PurePosixPath | None
    """The file that a new store is copied from; ``None`` if the store exists."""


@frozen
class ForgottenVariables:
    """A copy of *template* in memory, so that the firmware's variables end with QEMU."""

    template: PurePosixPath
    path: None = None


VariablesPlan = KeptVariables | ForgottenVariables


class Firmware(NamedTuple):
    """A firmware image and its store."""

    code: PurePosixPath | None
    """``None`` for SeaBIOS, which is part of QEMU."""
    variables: VariablesPlan | None = None
    secure: bool = False
    """Whether it needs System Management Mode, the only mode in which its store can be written."""


def candidates(boot: BootSpec) -> Iterable[PurePosixPath]:
    """Return the files, besides those in the spec, about which :func:`choose_firmware` needs facts."""
    if isinstance(boot.firmware, str):
        return [path for pair in BUILDS[boot.firmware] for path in pair]
    return [template_of(boot.firmware)] if boot.firmware is not None and boot.firmware_vars is not None else []


def template_of(code: PurePosixPath) -> PurePosixPath:
    """Return the path of the empty store for the firmware *code*: ``OVMF_VARS_4M.fd`` for ``OVMF_CODE_4M.fd``."""
    return code.with_name(code.name.replace("CODE", "VARS"))


def choose_firmware(boot: BootSpec, facts: HostFacts, problems: Problems) -> Firmware:
    """Choose the firmware for *boot*; whether its code can be read is checked where that file is planned."""
    if boot.firmware is None:
        return Firmware(None)

    def size(path: PurePosixPath) -> int | None:
        fact = facts.files.get(path, MISSING)
        return fact.size if fact.kind == "file" and fact.error is None else None

    if isinstance(boot.firmware, str):
        pairs = BUILDS[boot.firmware]
        pair = next((each for each in pairs if all(size(path) is not None for path in each)), None)
        if pair is None:
            problems.refuse(
                "boot.firmware",
                f"cannot find the firmware {boot.firmware!r} as one of {', '.join(str(code) for code, _ in pairs)}, each with its "
                "variable store",
                f"{install('ovmf', facts.os_release)}, or name the files",
            )
            return Firmware(None)
        code, template = pair
    else:
        code, template = boot.firmware, template_of(boot.firmware)
    secure = boot.firmware == "uefi-secure"
    path = boot.firmware_vars
    if path is None:
        if not isinstance(boot.firmware, str):
            return Firmware(code, secure=secure)
        problems.remark(
            "boot.firmware_vars",
            "the firmware's variables, such as the boot order, are lost at the end",
            "name a file in boot.firmware_vars, which keeps them",
        )
        return Firmware(code, ForgottenVariables(template), secure)
    return Firmware(code, _kept(path, template, size(template), facts, problems), secure)


LONGEST_CMDLINE = 2047
"""Bytes of the longest command line of Linux for x86 (``COMMAND_LINE_SIZE`` of ``arch/x86/include/asm/setup.h``)."""


def _remark_long_cmdline(boot: BootSpec, facts: HostFacts, problems: Problems) -> None:
    """Remark a command line whose end a Linux kernel silently cuts off."""
    size = len((boot.cmdline or "").encode())
    format_ = None if boot.kernel is None else facts.files.get(boot.kernel, MISSING).format
    if size > LONGEST_CMDLINE and format_ is not None and format_.name == "bzImage":
        problems.remark(
            "boot.cmdline",
            f"the guest's kernel does not see the last {size - LONGEST_CMDLINE} bytes of boot.cmdline: Linux takes {LONGEST_CMDLINE}",
            "name what must be there first, or write it into the initial RAM disk",
        )


def judge_boot(
    spec: InstanceSpec, memory: int, disks: Sequence[DiskPlan], facts: HostFacts, problems: Problems
) -> None:
    """Judge whether the firmware can boot one of *disks*, as far as their first bytes are known, and the arguments of a kernel.

    A disk with an EFI system partition and no code in its boot sector is never booted by a BIOS, so that is refused. No other firmware is
    chosen instead, because a guest must not be able to change its machine by writing to its disk. A guest that has PCI devices may boot
    from one.
    """
    _remark_long_cmdline(spec.boot, facts, problems)
    if (initrd := spec.boot.initrd) is not None:
        refuse_too_large_initrd(initrd, facts.files.get(initrd, MISSING).size, memory, problems)
    if isinstance(spec.boot.firmware, str) and spec.boot.kernel is None and not disks and not spec.device:
        problems.remark(
            "boot.firmware",
            "the guest boots nothing: it has no disk, and no network here serves what boots",
            "add a [[disk]], or boot.kernel",
        )
    contents = [content_of(disk.layers, facts.files) for disk in disks]
    known = [each[1] for each in contents if each is not None]
    if spec.boot.kernel is not None or spec.device or not disks or len(known) < len(disks):
        return
    listed = " or ".join(repr(str(disk.path)) for disk in disks)
    esp = next((str(disk.path) for disk, content in zip(disks, known, strict=True) if content.esp), None)
    if spec.boot.firmware is None and not any(each.bios for each in known):
        if esp is None:
            cd = any(each.format is not None and each.format.name == "ISO 9660" for each in known)
            problems.remark(
                "boot",
                f"the guest boots nothing: there is no boot sector with code on {listed}",
                'boot.firmware = "uefi" boots a CD image that has a loader for it'
                if cd
                else "see whether the image was written whole, or name a boot.kernel",
            )
        else:
            problems.refuse(
                "boot.firmware",
                f"is missing, so a BIOS would boot the guest, and no disk has boot code for one: {esp!r} has an EFI system partition",
                'set boot.firmware = "uefi"',
            )
    elif spec.boot.firmware is None and esp and not any(each.bios and each.bios_partition for each in known):
        problems.remark(
            "boot.firmware",
            f"the guest probably boots nothing: boot.firmware is missing, so a BIOS boots it, and {esp!r} has an EFI system partition but "
            "none for a BIOS",
            'set boot.firmware = "uefi"',
        )
    if isinstance(spec.boot.firmware, str) and not any(each.efi for each in known):
        for_bios = any(each.bios for each in known)
        problems.remark(
            "boot",
            f"the guest boots nothing: there is no EFI system partition on {listed}",
            "leave boot.firmware out for a disk with boot code for a BIOS" if for_bios else "",
        )


def _kept(
    path: PurePosixPath,
    template: PurePosixPath,
    wanted: int | None,
    facts: HostFacts,
    problems: Problems,
) -> KeptVariables:
    """Check the store at *path*; *wanted* is its right size in bytes, ``None`` if unknown."""
    refuse, where, name, fact = problems.refuse, "boot.firmware_vars", repr(str(path)), facts.files.get(path, MISSING)
    if fact.kind == "missing":
        if facts.files.get(path.parent, MISSING).kind != "directory":
            refuse(where, f"{name} does not exist, and neither does its directory")
        elif wanted is None:
            refuse(where, f"{name} does not exist, and there is no {str(template)!r} to make it from", "copy one there")
        return KeptVariables(path, template)
    if fact.kind != "file":
        refuse(where, f"{name} is a {fact.kind}, not a file" if fact.kind != "other" else f"{name} is not a file")
    elif fact.error is not None:
        refuse(where, f"cannot write {name}: {fact.error}", remedy_of(fact.error_number))
    elif fact.image is not None and fact.image.format != "raw":
        held, command = unusable(next(each for each in FORMATS if each.name == fact.image.format), str(path))
        refuse(where, f"{name} {held}, not the variables as they are in the firmware's flash", command)
    elif wanted not in {None, fact.size}:
        refuse(
            where,
            f"{name} has {fact.size} bytes, but the store of this firmware has the {wanted} of {str(template)!r}: it belongs to "
            "another build",
            "name that one's firmware, or remove the file to begin anew",
        )
    elif fact.image is not None and fact.image.locked:
        refuse(where, f"{name} is in use by another process (QEMU's image lock)", "stop it first")
    elif fact.image is not None:
        remark_lockless("boot.firmware_vars", path, fact.image, problems)
    return KeptVariables(path, None)
