"""What a guest finds at the beginning of a disk: partitions, boot code, or a file that was never meant as a disk."""

from __future__ import annotations

from collections.abc import Iterator

from runner.base.values import frozen
from runner.facts.file_formats import FileFormat, identify

_ESP = bytes.fromhex("28732ac11ff8d211ba4b00a0c93ec93b")
"""The type of an EFI system partition, C12A7328-F81F-11D2-BA4B-00A0C93EC93B, as a GPT has it (UEFI 2.10, 5.3.3)."""
_MBR_ESP = 0xEF
_MBR_FAT = {0x01, 0x04, 0x06, 0x0B, 0x0C, 0x0E}
"""Types of partitions with FAT, in which a UEFI firmware looks for a boot loader, too."""
_MOST_PARTITIONS = 128
_CODE = 440
"""Bytes of boot code in a boot sector; the disk's signature and the partitions follow."""


@frozen
class DiskContent:
    """The beginning of a disk as the guest sees it, which for a qcow2 image is not the beginning of the file."""

    format: FileFormat | None = None
    """The format of these bytes; ``None`` if no row of the table fits."""
    bios: bool = False
    """Whether a BIOS finds a boot sector with code."""
    esp: bool = False
    """Whether there is an EFI system partition."""
    efi: bool = False
    """Whether a UEFI firmware finds a file system that it can read: such a partition, FAT or a CD image."""
    sector: int | None = None
    """Bytes of a sector to the program that made the GUID partition table; ``None`` without one."""


def parse_content(head: bytes, tail: bytes) -> DiskContent:
    """Parse the first and last bytes of a disk, as many as :mod:`runner.facts.file_formats` says."""
    format_ = identify(head, tail)
    signed = head[510:512] == b"\x55\xaa"
    sector = next((size for size in (512, 4096) if head.startswith(b"EFI PART", size)), None)
    types = set(head[450:512:16]) if signed else set()
    esp = _MBR_ESP in types if sector is None else _ESP in _gpt_types(head, sector)
    fat = signed and (head[54:57] == b"FAT" or head[82:85] == b"FAT" or (sector is None and bool(types & _MBR_FAT)))
    return DiskContent(
        format=format_,
        bios=signed and any(head[:_CODE]),
        esp=esp,
        efi=esp or fat or (format_ is not None and format_.name == "ISO 9660"),
        sector=sector,
    )


def _gpt_types(head: bytes, sector: int) -> Iterator[bytes]:
    """Yield the types of the partitions in a GUID partition table."""
    header = head[sector : sector + 92]
    start = int.from_bytes(header[72:80], "little") * sector
    number, size = (int.from_bytes(header[at : at + 4], "little") for at in (80, 84))
    for index in range(min(number, _MOST_PARTITIONS)):
        yield head[start + index * size :][:16]
