from __future__ import annotations

from pathlib import PurePosixPath

import attrs
import pytest

from runner.facts.disk import FileFact, ImageFact
from runner.facts.disk_content import DiskContent
from runner.facts.file_formats import FORMATS
from runner.plan.argv.by_hand import pasteable
from runner.plan.firmware import ForgottenVariables, KeptVariables, VariablesPlan
from runner.plan.render import plan_lines
from tests.support.plans import FACTS, KERNEL, plan_of, problems

DISK = '[[disk]]\npath = "/disk"\n'
CODE, TEMPLATE = PurePosixPath("/fw/OVMF_CODE_4M.fd"), PurePosixPath("/fw/OVMF_VARS_4M.fd")
DEBIAN = PurePosixPath("/usr/share/OVMF")
HERE = {
    CODE: FileFact("file", 3 << 20),
    TEMPLATE: FileFact("file", 540672),
    DEBIAN / "OVMF_CODE_4M.fd": FileFact("file", 3 << 20),
    DEBIAN / "OVMF_VARS_4M.fd": FileFact("file", 540672),
    PurePosixPath("/vars.fd"): FileFact("file", 540672),
    PurePosixPath("/vars"): FileFact("directory"),
    PurePosixPath("/old.fd"): FileFact("file", 131072),
    PurePosixPath("/locked.fd"): FileFact("file", 540672, image=ImageFact("raw", locked=True)),
    PurePosixPath("/ro.fd"): FileFact("file", 540672, "Read-only file system"),
    PurePosixPath("/bare/CODE.fd"): FileFact("file", 3 << 20),
}
FOUND = attrs.evolve(FACTS, files={**FACTS.files, **HERE})


@pytest.mark.parametrize(
    ("boot", "code", "variables"),
    [
        ('firmware = "uefi"', DEBIAN / "OVMF_CODE_4M.fd", ForgottenVariables(DEBIAN / "OVMF_VARS_4M.fd")),
        (
            'firmware = "uefi"\nfirmware_vars = "/vars/web.fd"',
            DEBIAN / "OVMF_CODE_4M.fd",
            KeptVariables(PurePosixPath("/vars/web.fd"), DEBIAN / "OVMF_VARS_4M.fd"),
        ),
        (f'firmware = "{CODE}"\nfirmware_vars = "/vars.fd"', CODE, KeptVariables(PurePosixPath("/vars.fd"), None)),
        (
            f'firmware = "{CODE}"\nfirmware_vars = "/vars/web.fd"',
            CODE,
            KeptVariables(PurePosixPath("/vars/web.fd"), TEMPLATE),
        ),
        (f'firmware = "{CODE}"', CODE, None),
    ],
)
def test_the_file_of_the_firmware_variables(boot: str, code: PurePosixPath, variables: VariablesPlan | None) -> None:
    plan = plan_of(f"[boot]\n{boot}\n{DISK}", FOUND)
    assert plan.machine.firmware is not None
    assert plan.machine.firmware.path == code
    assert plan.machine.firmware_vars == variables
    forgotten = variables is not None and variables.path is None
    assert any("are lost at the end" in remark for remark in map(str, plan.remarks)) is forgotten
    script = pasteable(plan, None)
    assert ("cp -n" in script) is (variables is not None and variables.template is not None)
    if variables is not None:
        assert any("firmware variables" in line for line in plan_lines(plan))


@pytest.mark.parametrize(
    ("boot", "expected"),
    [
        ('firmware = "uefi-secure"', None),
        ('firmware = "uefi-secured"', "boot.firmware: found"),
        (
            f'firmware = "{CODE}"\nfirmware_vars = "/old.fd"',
            "boot.firmware_vars: '/old.fd' has 131072 bytes, but the store of this",
        ),
        (
            f'firmware = "{CODE}"\nfirmware_vars = "/locked.fd"',
            "boot.firmware_vars: '/locked.fd' is in use by another process",
        ),
        (
            f'firmware = "{CODE}"\nfirmware_vars = "/ro.fd"',
            "boot.firmware_vars: cannot write '/ro.fd': Read-only file system",
        ),
        (
            f'firmware = "{CODE}"\nfirmware_vars = "/dev/null"',
            "boot.firmware_vars: '/dev/null' is a character, not a file",
        ),
        (
            f'firmware = "{CODE}"\nfirmware_vars = "/none/a.fd"',
            "boot.firmware_vars: '/none/a.fd' does not exist, and neither",
        ),
        (
            'firmware = "/bare/CODE.fd"\nfirmware_vars = "/vars/a.fd"',
            "boot.firmware_vars: '/vars/a.fd' does not exist, and there is no '/bare/VARS.fd' to make it from",
        ),
        ('firmware_vars = "/vars.fd"', "boot.firmware_vars: needs boot.firmware"),
    ],
)
def test_unusable_firmware_is_refused(boot: str, expected: str | None) -> None:
    text = f"[boot]\n{boot}\n{DISK}"
    if expected is None:
        assert plan_of(text, FOUND).machine.secure_boot
    else:
        assert [each[: len(expected)] for each in problems(text, FOUND)] == [expected]


BOTH, WINDOWS, CD, BIOS, EFI, EMPTY = (
    DiskContent(bios=True, esp=True, efi=True),
    DiskContent(bios=True, bios_partition=False, esp=True, efi=True),
    DiskContent(format=next(each for each in FORMATS if each.name == "ISO 9660"), efi=True),
    DiskContent(bios=True),
    DiskContent(esp=True, efi=True),
    DiskContent(),
)
UEFI = '[boot]\nfirmware = "uefi"\n'


@pytest.mark.parametrize(
    ("contents", "boot", "words"),
    [
        ([BOTH], "", None),
        ([BIOS], "", None),
        ([EFI, BIOS], "", None),
        (
            [EFI],
            "",
            "boot.firmware: is missing, so a BIOS would boot the guest, and no disk has boot code for one: '/0' has an EFI",
        ),
        (
            [EMPTY, EFI],
            "",
            "boot.firmware: is missing, so a BIOS would boot the guest, and no disk has boot code for one: '/1' has",
        ),
        (
            [EMPTY],
            "",
            "the guest boots nothing: there is no boot sector with code on '/0'; see whether the image was written",
        ),
        (
            [CD],
            "",
            "the guest boots nothing: there is no boot sector with code on '/0'; boot.firmware = \"uefi\" boots a CD image",
        ),
        (
            [EMPTY, WINDOWS],
            "",
            "the guest probably boots nothing: boot.firmware is missing, so a BIOS boots it, and '/1' has an EFI system",
        ),
        ([WINDOWS, BIOS], "", None),
        (
            [],
            UEFI + "[[network]]\n",
            "the guest boots nothing: it has no disk, and no network here serves what boots; add a [[disk]]",
        ),
        ([], KERNEL, None),
        ([WINDOWS], UEFI, None),
        ([EFI, None], "", None),
        ([EFI], KERNEL, None),
        ([EFI], UEFI, None),
        ([BOTH], UEFI, None),
        (
            [BIOS],
            UEFI,
            "the guest boots nothing: there is no EFI system partition on '/0'; leave boot.firmware out",
        ),
        ([BIOS], f'[boot]\nfirmware = "{CODE}"\n', None),
    ],
)
def test_what_the_firmware_cannot_boot_is_said(
    contents: list[DiskContent | None], boot: str, words: str | None
) -> None:
    files = {
        PurePosixPath(f"/{index}"): FileFact("file", 1 << 30, image=ImageFact("raw", 1 << 30, content=content))
        for index, content in enumerate(contents)
    }
    text = boot + "".join(f'[[disk]]\npath = "{path}"\n' for path in files)
    facts = attrs.evolve(FOUND, files={**FOUND.files, **files})
    if words is not None and words.startswith("boot."):
        assert [problem[: len(words)] for problem in problems(text, facts)] == [words]
        return
    found = [str(remark) for remark in plan_of(text, facts).remarks if "boots nothing" in str(remark)]
    assert [remark[: len(words or "")] for remark in found] == ([] if words is None else [words])


def test_without_any_firmware_the_searched_directories_are_named() -> None:
    text = f'[boot]\nfirmware = "uefi"\n{DISK}'
    [problem] = problems(text)
    assert problem.startswith(
        "boot.firmware: cannot find the firmware 'uefi' as one of /usr/share/OVMF/OVMF_CODE_4M.fd, "
    )
    assert problem.endswith("; install ovmf, or name the files")
    [problem] = problems(text, attrs.evolve(FACTS, os_release="ID=fedora"))
    assert problem.endswith("; dnf install edk2-ovmf, or name the files")
