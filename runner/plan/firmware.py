"""Which firmware starts the machine, and where it keeps its variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import PurePosixPath

import attrs

from runner.facts.disk import MISSING
from runner.facts.host import HostFacts
from runner.spec.instance import BootSpec

OVMF = PurePosixPath("/usr/share/OVMF")
EDK2 = PurePosixPath("/usr/share/edk2/ovmf")
BUILDS = {
    "uefi": (
        (OVMF / "OVMF_CODE_4M.fd", OVMF / "OVMF_VARS_4M.fd"),
        (OVMF / "OVMF_CODE.fd", OVMF / "OVMF_VARS.fd"),
        (EDK2 / "OVMF_CODE.fd", EDK2 / "OVMF_VARS.fd"),
    ),
    "uefi-secure": (
        (OVMF / "OVMF_CODE_4M.secboot.fd", OVMF / "OVMF_VARS_4M.ms.fd"),
        (OVMF / "OVMF_CODE.secboot.fd", OVMF / "OVMF_VARS.ms.fd"),
        (EDK2 / "OVMF_CODE.secboot.fd", EDK2 / "OVMF_VARS.secboot.fd"),
    ),
}
"""Where Debian, Ubuntu and Fedora keep a firmware and an empty variable store for it (with Microsoft's keys for the secure one)."""


@attrs.frozen
class VariablesPlan:
    """The firmware's variable store."""

    path: PurePosixPath | None
    """The file that keeps it; ``None``: it is forgotten when QEMU ends."""
    template: PurePosixPath | None
    """What a new one is a copy of; ``None``: the file is there."""


@attrs.frozen
class Firmware:
    """What was decided: a firmware image and its store."""

    code: PurePosixPath | None
    """``None``: SeaBIOS, which QEMU brings along."""
    variables: VariablesPlan | None = None
    secure: bool = False
    """Needs System Management Mode, in which alone the store can be written."""


def candidates(boot: BootSpec) -> Iterable[PurePosixPath]:
    """Return the files beside those the spec names that have to be looked at for :func:`choose_firmware`."""
    if isinstance(boot.firmware, str):
        return [path for pair in BUILDS[boot.firmware] for path in pair]
    return [template_of(boot.firmware)] if boot.firmware is not None and boot.firmware_vars is not None else []


def template_of(code: PurePosixPath) -> PurePosixPath:
    """Return where the empty store for the firmware *code* would be: ``OVMF_VARS_4M.fd`` beside ``OVMF_CODE_4M.fd``."""
    return code.with_name(code.name.replace("CODE", "VARS"))


def choose_firmware(
    boot: BootSpec, facts: HostFacts, refuse: Callable[[str, str], None], remark: Callable[[str], None]
) -> Firmware:
    """Choose the firmware for *boot*; that its code can be read is judged elsewhere."""
    if boot.firmware is None:
        return Firmware(None)

    def size(path: PurePosixPath) -> int | None:
        fact = facts.files.get(path, MISSING)
        return fact.size if fact.kind == "file" and fact.error is None else None

    if isinstance(boot.firmware, str):
        pairs = BUILDS[boot.firmware]
        pair = next((each for each in pairs if all(size(path) is not None for path in each)), None)
        if pair is None:
            refuse(
                "boot.firmware",
                f"cannot find the firmware {boot.firmware!r} as one of {', '.join(str(code) for code, _ in pairs)}, each with its "
                "variable store; install the package ovmf, or name the files",
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
        remark(
            "what the firmware is told to remember, such as the boot order, is forgotten at the end; boot.firmware_vars keeps it"
        )
        return Firmware(code, VariablesPlan(None, template), secure)
    return Firmware(code, _kept(path, template, size(template), facts, refuse), secure)


def _kept(
    path: PurePosixPath,
    template: PurePosixPath,
    wanted: int | None,
    facts: HostFacts,
    refuse: Callable[[str, str], None],
) -> VariablesPlan:
    """Judge the store at *path*, of which *wanted* is the right size if that is known."""
    where, name, fact = "boot.firmware_vars", repr(str(path)), facts.files.get(path, MISSING)
    if fact.kind == "missing":
        if facts.files.get(path.parent, MISSING).kind != "directory":
            refuse(where, f"{name} does not exist, and neither does its directory")
        elif wanted is None:
            refuse(where, f"{name} does not exist, and there is no {str(template)!r} to make it from; copy one there")
        return VariablesPlan(path, template)
    if fact.kind != "file":
        refuse(where, f"{name} is a {fact.kind}, not a file" if fact.kind != "other" else f"{name} is not a file")
    elif fact.error is not None:
        refuse(where, f"cannot write {name}: {fact.error}")
    elif wanted not in {None, fact.size}:
        refuse(
            where,
            f"{name} has {fact.size} bytes, but the store of this firmware has the {wanted} of {str(template)!r}: it belongs to "
            "another build; name that one's firmware, or remove the file to begin anew",
        )
    elif fact.image is not None and fact.image.locked:
        refuse(where, f"{name} is in use by another process (QEMU's image lock); stop it first")
    return VariablesPlan(path, None)
