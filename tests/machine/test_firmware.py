"""UEFI with a variable store of the instance's own, by this machine's QEMU and OVMF; and firmware that QEMU's user cannot read."""

from __future__ import annotations

from pathlib import Path

from runner.plan.firmware import BUILDS
from runner.spec.instance import FirmwareBuild
from tests.support.program_runs import ProgramStarter

DISK = '[[disk]]\npath = "{}/disk"\n[shutdown]\ngrace = 1\n'


def empty_store(build: FirmwareBuild) -> Path:
    return next(Path(store) for code, store in BUILDS[build] if Path(code).exists() and Path(store).exists())


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
