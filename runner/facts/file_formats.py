"""The formats of files by their bytes: one table for disks and their content, kernels, initial RAM disks and firmware.

Sources are each format's specification, and the function ``…_probe`` of QEMU's driver in ``block/`` for disk images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from runner.base.errors import in_shell

HEAD = 36 << 10
"""Bytes at the beginning of a file that the table examines; the signature of an ISO 9660 image is at 32 KiB."""
TAIL = 512
"""Bytes at the end of a file that the table examines: the size of the footers of VHD and DMG images."""

FormatKind = Literal["image", "packed", "text", "kernel", "program", "ramdisk", "disk", "firmware", "other"]
"""``image``: a disk image that only its own format's driver can read; ``packed``: compressed, or an archive with an image; ``text``: text
that a server or a checkout returned instead of the file; ``kernel``: QEMU starts it by ``-kernel``; ``program``: other code; ``ramdisk``:
Linux unpacks it; ``disk``: content of a raw disk; ``firmware``, ``other``."""


class FileFormat(NamedTuple):
    """A row of the table. It is a named tuple, because each attrs class costs PID 1 some time."""

    name: str
    kind: FormatKind
    noun: str
    """The content of a file of this format, as a noun phrase."""
    marks: tuple[tuple[int, bytes], ...] = ()
    """Bytes at an offset, negative from the end of the file; a file of this format has all of them."""
    command: str = ""
    """The command that makes a usable file NEW from FILE, or for a text fetches the file; empty if there is none."""
    also: Callable[[bytes], bool] | None = None
    """A further condition on the first bytes, besides the marks."""


def _image(name: str, noun: str, *marks: tuple[int, bytes]) -> FileFormat:
    return FileFormat(name, "image", noun, marks, f"qemu-img convert -f {name} -O qcow2 FILE NEW")


def _packed(name: str, *marks: tuple[int, bytes], by: str) -> FileFormat:
    return FileFormat(name, "packed", f"data packed by {name}", marks, by)


_INSIDE = (b".ovf", b"ova.xml", b".raw", b".img", b".qcow2", b".vmdk", b".vdi", b".vhd", b".vhdx")
"""The ends of names of an archive's first member that make it one of a disk image: an OVA begins with its ``.ovf``."""
_MULTIBOOT_WITHIN = 8192
"""Bytes among which a multiboot header lies on a multiple of four (Multiboot 0.6.96, 3.1)."""
_MOST_HEADERS, _MOST_NOTES = 64, 64
"""Program headers of an ELF file, and notes in one of them, that are examined: a kernel has ten, and a few. A guest can write an ELF
file to its disk, which is examined as well: each of its headers could name the same many notes."""
_PVH_NOTE = 18
"""``XEN_ELFNOTE_PHYS32_ENTRY`` (``include/xen/interface/elfnote.h``): the entry point at which QEMU starts an ELF kernel."""


def _is_descriptor(head: bytes) -> bool:
    return head.lstrip()[:21].lower() == b"# disk descriptorfile"


def _holds_image(head: bytes) -> bool:
    return head[:100].partition(b"\0")[0].lower().endswith(_INSIDE)


def _is_container_image(head: bytes) -> bool:
    """Tell whether an archive's first member belongs to a container image: to its layout, or to a container disk's directory."""
    name = head[:100].partition(b"\0")[0]
    return name.startswith((b"blobs/", b"oci-layout", b"index.json", b"manifest.json", b"disk/")) or (
        len(name) > 64 and all(each in b"0123456789abcdef" for each in name[:64])  # noqa: PLR2004 - a digest of a layer
    )


def _is_plain_text(head: bytes) -> bool:
    """Tell whether the whole file is text: shorter than the examined bytes, and not a whole number of sectors, as a disk is."""
    try:
        text = head.decode()
    except UnicodeDecodeError:
        return False
    return bool(len(head) % 512) and all(each.isprintable() or each in "\t\r\n" for each in text)


def _is_lzma(head: bytes) -> bool:
    return len(head) > 13 and head[5:13] == b"\xff" * 8  # noqa: PLR2004 - the length of its header; the size is not known


def _is_markup(head: bytes) -> bool:
    return head.lstrip(b"\xef\xbb\xbf \t\r\n")[:14].lower().startswith((b"<!doctype html", b"<html", b"<?xml "))


def _is_zstd_after_frame(head: bytes) -> bool:
    """Tell whether zstd's data follow a frame that decoders skip (RFC 8878, 3.1.2), as pzstd writes it."""
    size = int.from_bytes(head[4:8], "little")
    return bool(head) and head[0] & 0xF0 == 0x50 and head[8 + size :][:4] == b"\x28\xb5\x2f\xfd"  # noqa: PLR2004


def _is_multiboot(head: bytes) -> bool:
    return any(head[at : at + 4] == b"\x02\xb0\xad\x1b" for at in range(0, min(len(head), _MULTIBOOT_WITHIN), 4))


def _has_pvh_entry(head: bytes) -> bool:
    """Tell whether an ELF file for x86 has the note by which QEMU (``load_elfboot``) finds its entry.

    Notes beyond the examined bytes are assumed to have it, because the linker may put them anywhere.
    """
    wide = head[4:5] == b"\2"
    machine = int.from_bytes(head[18:20], "little")
    if head[5:6] != b"\1" or machine not in {3, 62}:  # EM_386, EM_X86_64; little endian
        return False
    at = int.from_bytes(head[32:40] if wide else head[28:32], "little")
    entry, number = (int.from_bytes(head[start : start + 2], "little") for start in ((54, 56) if wide else (42, 44)))
    for index in range(min(number, _MOST_HEADERS)):
        header = head[at + index * entry :][:56]
        if int.from_bytes(header[:4], "little") != 4:  # noqa: PLR2004 - PT_NOTE
            continue
        start = int.from_bytes(header[8:16] if wide else header[4:8], "little")
        length = int.from_bytes(header[32:40] if wide else header[16:20], "little")
        if start + length > len(head) or _has_note(head[start : start + length]):
            return True
    return False


def _has_note(notes: bytes) -> bool:
    for _ in range(_MOST_NOTES):
        if len(notes) < 12:  # noqa: PLR2004 - three numbers before each note
            break
        name, content, kind = (int.from_bytes(notes[start : start + 4], "little") for start in (0, 4, 8))
        if kind == _PVH_NOTE and notes[12:16] == b"Xen\0":
            return True
        notes = notes[12 + -(-name // 4) * 4 + -(-content // 4) * 4 :]
    return False


FORMATS: tuple[FileFormat, ...] = (
    FileFormat(
        "qcow",
        "image",
        "a qcow image of version 1",
        ((0, b"QFI\xfb\0\0\0\1"),),
        "qemu-img convert -f qcow -O qcow2 FILE NEW",
    ),
    FileFormat("qcow2", "image", "a qcow2 image", ((0, b"QFI\xfb"),), "qemu-img convert -f qcow2 -O raw FILE NEW"),
    _image("vmdk", "a VMDK image", (0, b"KDMV")),
    _image("vmdk", "a VMDK image", (0, b"COWD")),
    _image("vmdk", "the description of a VMDK image", (0, b""))._replace(also=_is_descriptor),
    _image("vdi", "a VDI image", (0x40, b"\x7f\x10\xda\xbe")),
    _image("vhdx", "a VHDX image", (0, b"vhdxfile")),
    _image("vpc", "a VHD image", (0, b"conectix")),
    _image("vpc", "a VHD image of fixed size", (-512, b"conectix"), (-452, b"\0\0\0\2")),
    _image("qed", "a QED image", (0, b"QED\0")),
    _image("parallels", "a Parallels image", (0, b"WithoutFreeSpace")),
    _image("parallels", "a Parallels image", (0, b"WithouFreSpacExt")),
    _image("dmg", "a DMG image", (-512, b"koly\0\0\0\4\0\0\2\0")),
    _image("cloop", "a cloop image", (0, b"#!/bin/sh\n#V2.0 Format\n")),
    _image("bochs", "a Bochs image", (0, b"Bochs Virtual HD Image")),
    FileFormat("sparse", "image", "a sparse image of Android", ((0, b"\x3a\xff\x26\xed"),), "simg2img FILE NEW"),
    FileFormat("wim", "image", "the files of a Windows installation (WIM)", ((0, b"MSWIM\0\0\0"),)),
    FileFormat("vma", "image", "a backup of Proxmox (VMA)", ((0, b"VMA\0"),), "vma extract FILE NEW"),
    FileFormat("ewf", "image", "an EWF image", ((0, b"EVF\t\r\n\xff\0"),), "ewfexport -t NEW FILE"),
    FileFormat("asif", "image", "a sparse image of macOS", ((0, b"shdw"),)),
    FileFormat(
        "Git LFS",
        "text",
        "a pointer to a file that Git LFS has not fetched",
        ((0, b"version https://git-lfs.github.com/spec/"),),
        "git lfs pull",
    ),
    FileFormat("markup", "text", "a page or an answer in HTML or XML", (), "", _is_markup),
    _packed("gzip", (0, b"\x1f\x8b\x08"), by="gzip -dc FILE >NEW"),
    _packed("compress", (0, b"\x1f\x9d"), by="gzip -dc FILE >NEW"),
    _packed("lzip", (0, b"LZIP\1"), by="lzip -dc FILE >NEW"),
    _packed("lrzip", (0, b"LRZI\0"), by="lrzip -d -o NEW FILE"),
    _packed("cabinet", (0, b"MSCF\0\0\0\0"), by="cabextract -p FILE >NEW"),
    _packed("xz", (0, b"\xfd7zXZ\0"), by="xz -dc FILE >NEW"),
    _packed("zstd", (0, b"\x28\xb5\x2f\xfd"), by="zstd -dc FILE >NEW"),
    _packed("zstd", (1, b"\x2a\x4d\x18"), by="zstd -dc FILE >NEW")._replace(also=_is_zstd_after_frame),
    _packed("bzip2", (0, b"BZh"), (4, b"\x31\x41\x59\x26\x53\x59"), by="bzip2 -dc FILE >NEW"),
    _packed("lz4", (0, b"\x04\x22\x4d\x18"), by="lz4 -dc FILE >NEW"),
    _packed("lz4 -l", (0, b"\x02\x21\x4c\x18"), by="lz4 -dc FILE >NEW"),
    _packed("lzop", (0, b"\x89LZO\0\r\n\x1a\n"), by="lzop -dc FILE >NEW"),
    _packed("lzma", (0, b"\x5d\0\0"), by="xz -dc --format=lzma FILE >NEW")._replace(also=_is_lzma),
    _packed("7z", (0, b"7z\xbc\xaf\x27\x1c"), by="7z e -so FILE >NEW"),
    _packed("zip", (0, b"PK\3\4"), by="unzip -p FILE >NEW"),
    _packed("rar", (0, b"Rar!\x1a\7"), by="unrar p -inul FILE >NEW"),
    FileFormat("ova", "packed", "an archive with a disk image", ((257, b"ustar"),), "tar -xf FILE", _holds_image),
    FileFormat("oci", "packed", "a container image", ((257, b"ustar"),), "tar -xf FILE", _is_container_image),
    FileFormat("tar", "other", "a tar archive", ((257, b"ustar"),)),
    FileFormat("store", "other", "a store of firmware variables", ((0x28, b"_FVH"), (-16, b"\xff" * 16))),
    FileFormat("volume", "firmware", "a firmware volume", ((0x28, b"_FVH"),)),
    *(FileFormat("cpio", "ramdisk", "a cpio archive", ((0, magic),)) for magic in (b"07070", b"\xc7\x71", b"\x71\xc7")),
    FileFormat("bzImage", "kernel", "a kernel", ((0x202, b"HdrS"),)),
    FileFormat("PVH", "kernel", "a kernel", ((0, b"\x7fELF"),), "", _has_pvh_entry),
    FileFormat("multiboot", "kernel", "a multiboot kernel", (), "", _is_multiboot),
    FileFormat("ELF", "program", "an ELF file without a PVH entry", ((0, b"\x7fELF"),)),
    FileFormat("arm64", "program", "a kernel for arm64", ((0x38, b"ARM\x64"),)),
    FileFormat("riscv", "program", "a kernel for RISC-V", ((0x38, b"RSC\5"),)),
    FileFormat("zboot", "program", "a compressed EFI kernel for another architecture", ((0, b"MZ"), (4, b"zimg"))),
    FileFormat("PE", "program", "a program for UEFI or Windows", ((0, b"MZ"),), "objcopy -O binary -j .linux FILE NEW"),
    FileFormat("cramfs", "ramdisk", "a file system", ((0, b"\x45\x3d\xcd\x28"),)),
    FileFormat("romfs", "ramdisk", "a file system", ((0, b"-rom1fs-"),)),
    FileFormat("squashfs", "ramdisk", "a file system", ((0, b"hsqs"),)),
    FileFormat("ext", "ramdisk", "a file system", ((0x438, b"\x53\xef"),)),
    FileFormat("LUKS", "disk", "a LUKS volume", ((0, b"LUKS\xba\xbe"),)),
    FileFormat("LVM", "disk", "an LVM volume", ((512, b"LABELONE"),)),
    FileFormat("XFS", "disk", "a file system", ((0, b"XFSB"),)),
    FileFormat("swap", "disk", "swap space", ((4086, b"SWAPSPACE2"),)),
    FileFormat("GPT", "disk", "a disk with partitions", ((512, b"EFI PART"),)),
    FileFormat("MBR", "disk", "a disk with a boot sector", ((510, b"\x55\xaa"),)),
    FileFormat("ISO 9660", "disk", "an ISO 9660 image", ((0x8001, b"CD001"),)),
    FileFormat("plain text", "text", "nothing but text", (), "", _is_plain_text),
    *(
        FileFormat("no code", "other", "nothing in its last 16 bytes", ((-16, value * 16),))
        for value in (b"\0", b"\xff")
    ),
)
"""The first matching row determines the format. Rows with longer marks come before those whose marks they contain."""


def identify(head: bytes, tail: bytes = b"") -> FileFormat | None:
    """Return the format of a file that begins with *head* and ends with *tail*; ``None`` if no row of the table matches.

    *head* is :data:`HEAD` bytes, *tail* :data:`TAIL` bytes, or all that the file has.
    """

    def has(at: int, mark: bytes) -> bool:
        return head.startswith(mark, at) if at >= 0 else len(tail) >= -at and tail.startswith(mark, len(tail) + at)

    return next(
        (
            each
            for each in FORMATS
            if all(has(at, mark) for at, mark in each.marks) and (each.also is None or each.also(head))
        ),
        None,
    )


SUFFIXES = {
    "qcow2": "qcow2",
    "vmdk": "vmdk",
    "vdi": "vdi",
    "vhdx": "vhdx",
    "vhd": "vpc",
    "qed": "qed",
    "hdd": "parallels",
    "gz": "gzip",
    "xz": "xz",
    "zst": "zstd",
    "bz2": "bzip2",
    "lz": "lzip",
    "wim": "wim",
    "vma": "vma",
    "zip": "zip",
    "7z": "7z",
    "ova": "ova",
}
"""File name suffixes that indicate a format."""


def unusable(format_: FileFormat, file: str) -> tuple[str, str]:
    """Return the content of *file* as a clause, and the command that makes it usable, empty if none is known."""
    command = format_.command.replace("FILE", in_shell(file))
    remedy = command and f"convert it: `{command}`"
    if format_.kind == "text":
        remedy = "fetch the file itself" + (f": `{command}`" if command else "; see what was downloaded")
    return f"holds {format_.noun}", remedy
