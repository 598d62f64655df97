"""UEFI with a variable store of the instance's own, by this machine's QEMU and OVMF; and firmware that QEMU's user cannot read."""

from __future__ import annotations

import subprocess
from pathlib import Path

from runner.plan.firmware import BUILDS
from runner.spec.instance import FirmwareBuild
from tests.support.program_runs import ProgramStarter

DISK = '[[disk]]\npath = "{}/disk"\n[shutdown]\ngrace = 1\n'


def empty_store(build: FirmwareBuild) -> Path:
    return next(Path(store) for code, store in BUILDS[build] if Path(code).exists() and Path(store).exists())


SPEAKER = (
    bytes.fromhex(
        "31c08ed88ec08ed0bc007cbe407ce81900b8004fbf0080cd10be507c83f84f7403be607ce80300f4ebfdac84c07409b40ebb0700cd10ebf2c3"
    ).ljust(0x40, b"\0")
    + b"BY THE BIOS\r\n\0".ljust(16, b"\0")
    + b"VIDEO MODES\r\n\0".ljust(16, b"\0")
    + b"NO VIDEO\r\n\0"
)
"""A boot sector that writes by the BIOS alone (INT 10h, AH=0Eh), and says whether there are video modes (AX=4F00h), which
GRUB's graphical menu waits for."""


def test_a_bios_and_its_boot_loaders_speak_on_the_console(start: ProgramStarter, tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(SPEAKER.ljust(510, b"\0") + b"\x55\xaa" + bytes(1 << 20))
    run = start(DISK.format(tmp_path), boot=False)
    run.until("VIDEO MODES", lambda: run.console)
    assert "BY THE BIOS" in run.console
    assert "Booting from Hard Disk" in run.console
    assert run.stop() == 13

    (tmp_path / "disk").write_bytes(bytes(1 << 20))
    run = start(DISK.format(tmp_path), boot=False)
    run.until("No bootable device", lambda: run.console)
    assert f"the guest boots nothing: there is no boot sector with code on '{tmp_path}/disk'" in run.log
    assert run.stop() == 13


def test_a_disk_for_uefi_alone_is_refused_without_its_firmware(start: ProgramStarter, tmp_path: Path) -> None:
    with (tmp_path / "disk").open("wb") as file:
        file.truncate(100 << 20)
    layout = b"label: gpt\nsize=64M, type=U\n,,L\n"
    subprocess.run(["sfdisk", "-q", tmp_path / "disk"], input=layout, check=True)
    run = start(DISK.format(tmp_path), boot=False)
    assert run.wait() == 30
    assert f"'{tmp_path}/disk' has an EFI system partition; set boot.firmware = \"uefi\"" in run.log
    run = start('[boot]\nfirmware = "uefi"\n' + DISK.format(tmp_path), boot=False)
    run.until("BdsDxe", lambda: run.console)
    assert "boots nothing" not in run.log
    assert run.stop() in {0, 13}


def test_the_store_is_made_once_and_one_instance_has_it(start: ProgramStarter, tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(bytes(1 << 20))
    store, template = tmp_path / "store.fd", empty_store("uefi")
    text = f'[boot]\nfirmware = "uefi"\nfirmware_vars = "{store}"\n' + DISK.format(tmp_path)
    run = start(text, boot=False)
    run.until("BdsDxe", lambda: run.console)
    assert f"made the firmware's variable store {store}" in run.log
    assert (store.stat().st_size, store.stat().st_mode & 0o777) == (template.stat().st_size, 0o600)
    (tmp_path / "disk").rename(tmp_path / "taken")
    (tmp_path / "disk").write_bytes(bytes(1 << 20))
    second = start(text, boot=False)
    assert second.wait() == 30
    assert f"boot.firmware_vars: '{store}' is in use by another process" in second.log
    assert run.stop() in {0, 13}
    written = store.read_bytes()
    assert written != template.read_bytes(), "OVMF stores what it found at its first boot"
    assert sorted(path.name for path in tmp_path.glob("store*")) == ["store.fd"]

    third = start(text, boot=False)
    third.until_runs()
    assert "made the firmware's variable store" not in third.log
    assert third.stop() in {0, 13}


def test_secure_boot_starts(start: ProgramStarter, tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(bytes(1 << 20))
    empty_store("uefi-secure")
    run = start('[boot]\nfirmware = "uefi-secure"\n' + DISK.format(tmp_path), boot=False)
    run.until("BdsDxe", lambda: run.console)
    assert "are lost at the end" in run.log
    assert run.stop() in {0, 13}


def test_firmware_that_qemus_user_may_not_read(start: ProgramStarter, tmp_path: Path) -> None:
    """QEMU gets a copy in memory, opened read-only, because the block device that it becomes is read-only."""
    (tmp_path / "disk").write_bytes(bytes(1 << 20))
    code = next(Path(code) for code, _ in BUILDS["uefi"] if Path(code).exists())
    for path in (code, empty_store("uefi")):
        (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / path.name).chmod(0o600)
    text = f'[boot]\nfirmware = "{tmp_path}/{code.name}"\nfirmware_vars = "{tmp_path}/store.fd"\n'
    run = start(text + DISK.format(tmp_path), boot=False)
    run.until_runs()
    assert run.stop() in {0, 13}
