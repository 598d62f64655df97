"""The content at the beginning of a disk: partitions, boot code, or a file that is no disk image at all."""

from __future__ import annotations

from collections.abc import Iterator

from runner.base.values import frozen
from runner.facts.file_formats import FileFormat, identify

_ESP = bytes.fromhex("28732ac11ff8d211ba4b00a0c93ec93b")
"""The type of an EFI system partition, C12A7328-F81F-11D2-BA4B-00A0C93EC93B, as a GPT has it (UEFI 2.10, 5.3.3)."""
_BIOS_BOOT = {
    bytes.fromhex("4861682149646f6e744e656564454649"),  # of GRUB, 21686148-6449-6E6F-744E-656564454649
    bytes.fromhex("9d6bbd83417fdc11be0b001560b84f0f"),  # of FreeBSD, 83BD6B9D-7F41-11DC-BE0B-001560B84F0F
}
"""Types of partitions with the code that the boot sector of a disk with a GUID partition table loads."""
_LEGACY_BOOT = 1 << 2
"""An attribute of the partition that the boot code of syslinux and NetBSD loads (UEFI 2.10, 5.3.3: "Legacy BIOS Bootable")."""
_MBR_ESP, _MBR_GPT = 0xEF, 0xEE
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
    bios_partition: bool = True
    """Whether that code finds a partition to load; ``False`` with a GUID partition table that has none for it.

    Windows and others write boot code to each disk, even to those that only UEFI boots.
    """
    esp: bool = False
    """Whether there is an EFI system partition."""
    efi: bool = False
    """Whether a UEFI firmware finds a file system that it can read: an EFI system partition, FAT or a CD image."""
    sector: int | None = None
    """The sector size in bytes assumed by the GUID partition table; ``None`` without one."""
    end: int = 0
    """The least size in bytes of a disk that contains all of its partitions; 0 without any."""


def parse_content(head: bytes, tail: bytes) -> DiskContent:
    """Parse the first and last bytes of a disk, as many as :mod:`runner.facts.file_formats` defines."""
    format_ = identify(head, tail)
    signed = head[510:512] == b"\x55\xaa"
    sector = next((size for size in (512, 4096) if head.startswith(b"EFI PART", size)), None)
    types = set(head[450:512:16]) if signed else set()
    partitions = [] if sector is None else list(_gpt_partitions(head, sector))
    esp = _MBR_ESP in types if sector is None else any(type_ == _ESP for type_, _, _ in partitions)
    fat = signed and (head[54:57] == b"FAT" or head[82:85] == b"FAT" or (sector is None and bool(types & _MBR_FAT)))
    return DiskContent(
        format=format_,
        bios=signed and any(head[:_CODE]),
        # A BIOS also boots a partition marked as active in the boot sector, and the code of a CD image.
        bios_partition=sector is None
        or head.startswith(b"CD001", 0x8001)
        or any(each & 0x80 for each in head[446:510:16])
        or any(type_ in _BIOS_BOOT or attributes & _LEGACY_BOOT for type_, attributes, _ in partitions),
        esp=esp,
        efi=esp or fat or (format_ is not None and format_.name == "ISO 9660"),
        sector=sector,
        end=_mbr_end(head) if signed and sector is None else max((end for _, _, end in partitions), default=0),
    )


def _mbr_end(head: bytes) -> int:
    """Return the end in bytes of the last partition in the boot sector's table; 0 without a table (``msdos_partition``)."""
    entries = [head[at : at + 16] for at in range(446, 510, 16)]
    if any(entry[0] not in {0, 0x80} for entry in entries):
        return 0
    used = (entry for entry in entries if entry[4] not in {0, _MBR_GPT})
    return max((512 * (_little(entry[8:12]) + _little(entry[12:])) for entry in used), default=0)


def _little(value: bytes) -> int:
    return int.from_bytes(value, "little")


def _gpt_partitions(head: bytes, sector: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield type, attributes and end in bytes of each partition in a GUID partition table."""
    header = head[sector : sector + 92]
    start = _little(header[72:80]) * sector
    number, size = (_little(header[at : at + 4]) for at in (80, 84))
    for index in range(min(number, _MOST_PARTITIONS)):
        entry = head[start + index * size :][:56]
        if any(entry[:16]):
            yield entry[:16], _little(entry[48:56]), sector * (_little(entry[40:48]) + 1)
