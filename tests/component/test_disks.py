"""The files of disks on a real file system: the headers of images, and every error in opening them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
import struct
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import pytest
import trio
from trio.testing import MockClock

from runner.base.errors import HostError, explain
from runner.base.rate_limit import REPORTED_EVERY, LogRateLimit
from runner.facts.disk import LateDiskFacts
from runner.facts.disk_content import DiskContent
from runner.host.facts_reader import read_disk_facts
from runner.instance.parts.disks import opened
from runner.instance.parts.qemu_events import DiskEvents
from runner.kernel import file_prober
from runner.kernel.disk_images import overlay, read_image
from runner.plan.argv.block_nodes import block_nodes
from runner.plan.disks import DiskPlan, content_of, plan_disk
from runner.plan.problems import Problems
from runner.protocol.qmp import QmpEvent
from runner.spec.instance import DiskSpec
from tests.support.sweep import FAULT_INJECTOR

MIB = 1 << 20
F_OFD_SETLK = 37
NAME = -1
"""The offset of the name of the backing file."""


def qemu_img(*words: object) -> None:
    """Run qemu-img; repeat it if its clock was too coarse to choose the work factor of a LUKS key."""
    run = partial(subprocess.run, ["qemu-img", *map(str, words)], check=False, capture_output=True, text=True)
    done = run()
    for _ in range(20):
        if "Unable to get accurate CPU usage" not in done.stderr:
            break
        done = run()
    assert done.returncode == 0, done.stderr


def planned(disk: DiskSpec) -> DiskPlan:
    problems = Problems()
    plan = plan_disk("disk0", disk, facts_of(disk), "disk[0]", problems)
    assert problems.found == []
    return plan


def facts_of(disk: DiskSpec) -> LateDiskFacts:
    return read_disk_facts(disk, PurePosixPath("/"))


def remarks(disk: DiskSpec) -> list[str]:
    problems = Problems()
    plan_disk("disk0", disk, facts_of(disk), "disk[0]", problems)
    assert problems.found == []
    return list(map(str, problems.remarks))


def refused(disk: DiskSpec) -> str:
    problems = Problems()
    plan_disk("disk0", disk, facts_of(disk), "disk[0]", problems)
    [problem] = problems.found
    return str(problem)


def descriptors() -> set[str]:
    return {entry for entry in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{entry}")}  # noqa: PTH110, PTH208


@pytest.fixture
def chain(tmp_path: Path) -> DiskSpec:
    """Make an image above an image above a raw file; the second is named by a relative path, the third by a link."""
    below = tmp_path / "below"
    below.mkdir()
    (below / "base").write_bytes(b"\1" * MIB)
    (below / "link").symlink_to(below / "base")
    qemu_img("create", "-f", "qcow2", "-b", below / "link", "-F", "raw", below / "middle")
    qemu_img("create", "-f", "qcow2", "-b", "below/middle", "-F", "qcow2", tmp_path / "top")
    return DiskSpec(path=PurePosixPath(tmp_path / "top"), format="qcow2", backing=(PurePosixPath(below),))


def test_a_chain_is_found_as_the_headers_say(chain: DiskSpec, tmp_path: Path) -> None:
    plan = planned(chain)
    below = PurePosixPath(tmp_path / "below")
    assert [(layer.path, layer.format) for layer in plan.layers] == [
        (chain.path, "qcow2"),
        (below / "middle", "qcow2"),
        (below / "base", "raw"),
    ]


@pytest.mark.parametrize("ephemeral", [False, True])
def test_every_failed_open_is_refused_and_reversed(chain: DiskSpec, tmp_path: Path, *, ephemeral: bool) -> None:
    plan = planned(DiskSpec(path=chain.path, format="qcow2", backing=chain.backing, ephemeral=ephemeral))
    before = descriptors()
    failed = 0
    while True:
        FAULT_INJECTOR.begin(failed + 1, errno.EMFILE, frozenset({"open", "os.truncate"}))
        reason: HostError | None = None
        try:
            with opened(plan, PurePosixPath(tmp_path)) as numbers:
                FAULT_INJECTOR.end()
                assert list(numbers) == ["disk0", *(name for name, _ in plan.below())]
        except HostError as error:
            reason = error
        finally:
            FAULT_INJECTOR.end()
        assert descriptors() == before
        if reason is None:
            break
        assert os.strerror(errno.EMFILE) in explain(reason)
        failed += 1
    assert failed >= len(plan.layers)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["below", "top"]


def test_a_change_since_planning_is_refused(chain: DiskSpec, tmp_path: Path) -> None:
    plan = planned(chain)
    middle = tmp_path / "below" / "middle"
    secret = tmp_path / "secret"
    middle.rename(secret)
    with pytest.raises(HostError, match=r"cannot open '.*/middle'"), opened(plan, PurePosixPath(tmp_path)):
        pass
    middle.symlink_to(secret)
    with (
        pytest.raises(HostError, match=r"cannot open '.*/middle': it lies at '.*/secret' now"),
        opened(plan, PurePosixPath(tmp_path)),
    ):
        pass


def test_images_of_qemu_img_are_read(tmp_path: Path) -> None:
    path = tmp_path / "image"
    disk = DiskSpec(path=PurePosixPath(path), format="qcow2")
    qemu_img("create", "-f", "qcow2", "-o", "compat=0.10", path, "3M")
    assert facts_of(disk).files[disk.file].image.size == 3 * MIB  # type: ignore[union-attr]
    planned(disk)
    secret = ("--object", "secret,id=s,data=x", "-o", "encrypt.format=luks,encrypt.key-secret=s")
    qemu_img("create", "-f", "qcow2", *secret, path, "3M")
    assert "is encrypted" in refused(disk)
    qemu_img("create", "-f", "qcow2", "-o", f"data_file={tmp_path}/outside", path, "3M")
    assert "takes data from an external data file" in refused(disk)
    qemu_img("create", "-f", "qcow2", path, "3M")
    with path.open("r+b") as file:
        file.seek(79)  # the last byte of the incompatible features
        file.write(b"\2")
    assert "is marked as corrupt" in refused(disk)
    qemu_img("create", "-f", "qcow2", "-b", tmp_path / "elsewhere", "-F", "raw", "-u", path, "3M")
    assert "takes data from '" in refused(disk)
    assert "does not exist" in refused(DiskSpec(path=disk.path, format="qcow2", backing=(PurePosixPath(tmp_path),)))
    vmdk = tmp_path / "image.vmdk"
    vmdk.write_bytes(b"QF\xff")  # shorter than any header
    assert "has 3 bytes" in refused(DiskSpec(path=PurePosixPath(vmdk)))


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (8, b"\x80" + bytes(7), "names a backing file as no image can"),  # its offset, 2^63
        (8, b"\0\0\0\0\0\0\xff\xf9", "names a backing file as no image can"),  # it ends beyond the first cluster
        (16, b"\0\0\x04\0", "names a backing file as no image can"),  # its length, 1024
        (NAME, b"\0", "names a backing file as no image can"),  # in the name
        (24, b"\x20" + bytes(7), "gives a size of 2305843009213693952 bytes"),
    ],
)
def test_a_malformed_image_is_refused_with_a_message(tmp_path: Path, at: int, value: bytes, words: str) -> None:
    path = tmp_path / "image"
    qemu_img("create", "-f", "qcow2", "-b", tmp_path / "elsewhere", "-F", "raw", "-u", path, "3M")
    content = path.read_bytes()
    at = content.index(b"elsewhere") if at == NAME else at
    path.write_bytes(content[:at] + value + content[at + len(value) :])
    disk = DiskSpec(path=PurePosixPath(path), format="qcow2", backing=(PurePosixPath(tmp_path),), ephemeral=True)
    assert words in refused(disk)


FOREIGN = {
    "vmdk": ("vmdk", "a VMDK image"),
    "vmdk -o subformat=streamOptimized": ("vmdk", "a VMDK image"),
    "vmdk -o subformat=monolithicFlat": ("vmdk", "a VMDK image"),
    "vdi": ("vdi", "a VDI image"),
    "vhdx": ("vhdx", "a VHDX image"),
    "vpc": ("vpc", "a VHD image"),
    "vpc -o subformat=fixed": ("vpc", "a VHD image"),
    "qed": ("qed", "a QED image"),
    "parallels": ("parallels", "a Parallels image"),
    "qcow": ("qcow", "a qcow image of version 1"),
}
"""Arguments of ``qemu-img create -f`` → QEMU's driver for the image, and how a refusal calls it."""


@pytest.mark.parametrize("keys", [{}, {"read_only": True}, {"ephemeral": True}, {"format": "qcow2"}])
@pytest.mark.parametrize("made", FOREIGN)
def test_an_image_of_another_format_is_refused_with_the_command_that_converts_it(
    tmp_path: Path, made: str, keys: dict[str, Any]
) -> None:
    driver, noun = FOREIGN[made]
    path = tmp_path / "disk.img"
    qemu_img("create", "-f", *made.split(), path, "64M")
    new = tmp_path / "new.qcow2"
    message = refused(DiskSpec(path=PurePosixPath(path), **keys))
    command = f"qemu-img convert -f {driver} -O qcow2 {path} NEW"
    assert message == (f"disk[0].path: '{path}' holds {noun}, which is neither raw nor qcow2; convert it: `{command}`")
    qemu_img(*command.replace("NEW", str(new)).split()[1:])
    planned(DiskSpec(path=PurePosixPath(new), format="qcow2"))


PACKERS = {
    "gzip": ["gzip", "-c"],
    "xz": ["xz", "-c"],
    "bzip2": ["bzip2", "-c"],
    "zstd": ["zstd", "-c"],
    "lz4": ["lz4", "-c"],
    "lzma": ["xz", "-c", "--format=lzma"],
}


@pytest.mark.parametrize("name", PACKERS)
def test_a_compressed_disk_is_refused_unless_it_is_only_read(tmp_path: Path, name: str) -> None:
    if shutil.which(PACKERS[name][0]) is None:
        pytest.skip(f"{PACKERS[name][0]} is not installed")
    (tmp_path / "raw").write_bytes(b"\1" * MIB)
    path = tmp_path / "disk"
    packed = subprocess.run([*PACKERS[name], tmp_path / "raw"], check=True, stdout=subprocess.PIPE).stdout
    message = ""
    for content in (packed + b"\0", packed.ljust(MIB, b"\0")):  # of any length: longer by `truncate` it were no disk
        path.write_bytes(content)
        message = refused(DiskSpec(path=PurePosixPath(path)))
        assert f"'{path}' holds data packed by {name}, which the guest would see as it is; convert it: `" in message
    assert "or set read_only = true if the guest shall read it as it is" in message
    [remark] = remarks(DiskSpec(path=PurePosixPath(path), read_only=True))
    assert remark.startswith("the guest finds no disk but a file in disk[0]")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "fetch the file itself: `git lfs pull`"),
        (b"\n<!DOCTYPE html>\n<title>404 Not Found</title>", "a page or an answer in HTML or XML"),
        (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "fetch the file itself; see what was"),
        (b"MSWIM\0\0\0\xd0", "holds the files of a Windows installation (WIM), which is neither raw nor qcow2"),
        (b"VMA\0\0\0\0\1", "`vma extract "),
        (b"EVF\t\r\n\xff\0", "holds an EWF image"),
        (b"\x1f\x9d\x90", "packed by compress"),
        (b"LZIP\1", "packed by lzip"),
        (b"\x50\x2a\x4d\x18\2\0\0\0ab\x28\xb5\x2f\xfd", "packed by zstd"),
    ],
)
@pytest.mark.parametrize("size", [0, MIB])
def test_what_was_downloaded_instead_of_a_disk_is_named(tmp_path: Path, content: bytes, words: str, size: int) -> None:
    (tmp_path / "disk").write_bytes(content.ljust(size, b"\0"))
    message = refused(DiskSpec(path=PurePosixPath(tmp_path / "disk")))
    assert words in message
    assert "truncate" not in message


@pytest.mark.parametrize(
    "text", [b"404: Not Found", b'{"errors": [{"code": "DENIED"}]}\n', "\u2714 d41d8cd9  disk.raw\n".encode()]
)
def test_a_short_text_is_no_disk_that_lacks_bytes(tmp_path: Path, text: bytes) -> None:
    """``curl`` without ``--fail`` saves the server's answer."""
    path = tmp_path / "disk"
    path.write_bytes(text)
    assert "holds nothing but text, which the guest would see as it is; fetch the file itself" in refused(
        DiskSpec(path=PurePosixPath(path))
    )
    path.write_bytes(text.ljust(512, b"\n"))
    planned(DiskSpec(path=PurePosixPath(path)))


def archive(path: Path, member: str) -> None:
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo(member))


@pytest.mark.parametrize(
    ("member", "held"),
    [
        *((each, "an archive with a disk image") for each in ("machine.ovf", "ova.xml", "disk.raw")),
        *((each, "a container image") for each in ("disk/", "blobs/", "oci-layout", f"{'0a' * 32}/layer.tar")),
    ],
)
def test_an_archive_of_a_disk_is_refused_and_one_of_other_files_is_a_raw_disk(
    tmp_path: Path, member: str, held: str
) -> None:
    path = tmp_path / "disk"
    archive(path, member)
    assert f"holds {held}, which" in refused(DiskSpec(path=PurePosixPath(path)))
    archive(path, "etc/passwd")
    planned(DiskSpec(path=PurePosixPath(path)))


def make_raw(kind: str, path: Path) -> None:
    """Make a raw disk of *kind* as its own program makes it."""
    with path.open("wb") as file:
        file.truncate(64 * MIB)
    sbin = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    commands: dict[str, list[str | Path]] = {
        "gpt": ["sh", "-c", f"printf 'label: gpt\n,,L\n' | sfdisk -q {path}"],
        "mbr": ["sh", "-c", f"printf 'label: dos\n,,L\n' | sfdisk -q {path}"],
        "ext4": ["mkfs.ext4", "-q", path],
        "swap": ["mkswap", path],
    }
    if kind in commands:
        subprocess.run(commands[kind], check=True, env=sbin, stdout=subprocess.DEVNULL)
    marks = {
        "lvm": (512, b"LABELONE"),
        "luks": (0, b"LUKS\xba\xbe\0\2"),
        "iso": (0x8001, b"CD001"),
        "xfs": (0, b"XFSB"),
    }
    if kind in marks:
        with path.open("r+b") as file:
            file.seek(marks[kind][0])
            file.write(marks[kind][1])


@pytest.mark.parametrize("kind", ["zeroes", "gpt", "mbr", "ext4", "swap", "lvm", "luks", "iso", "xfs"])
def test_what_disks_hold_is_a_raw_disk_also_within_qcow2(tmp_path: Path, kind: str) -> None:
    raw, image = tmp_path / "raw", tmp_path / "image.qcow2"
    make_raw(kind, raw)
    assert remarks(DiskSpec(path=PurePosixPath(raw))) == []
    for options in ([], ["-c"], ["-o", "cluster_size=4k"], ["-o", "compat=0.10"], ["-o", "extended_l2=on"]):
        qemu_img("convert", "-O", "qcow2", *options, raw, image)
        disk = DiskSpec(path=PurePosixPath(image), format="qcow2")
        assert remarks(disk) == []
        within, bare = content(disk), content(DiskSpec(path=PurePosixPath(raw)))
        assert (within.bios, within.esp, within.sector) == (bare.bios, bare.esp, bare.sector), options


def test_no_header_of_an_image_is_too_broken_to_be_judged(tmp_path: Path) -> None:
    """It may end anywhere, and claim anything: a customer brings it."""
    chance, path = random.Random(1), tmp_path / "disk"  # noqa: S311 - no secret
    for length in (*range(4, 120), *(chance.randrange(4, 4096) for _ in range(200))):
        header = bytearray(b"QFI\xfb" + struct.pack(">I", chance.choice((2, 3))) + chance.randbytes(4096))
        header[20:24] = struct.pack(">I", chance.choice((9, 16, 21, 63)))
        header[32:36] = bytes(4)  # not encrypted
        header[72:80] = struct.pack(">Q", chance.choice((0, 8, 16, 24)))  # a type of compression, extended entries
        path.write_bytes(header[:length])
        with path.open("rb") as file:
            head = file.read()
            fact = read_image(PurePosixPath(path), file.fileno(), length, (head, b""), write=False)
        assert fact.format == "qcow2"


@pytest.mark.parametrize(
    ("partitions", "found"),
    [
        (",32M,U\n,,L\n", False),
        (",1M,21686148-6449-6E6F-744E-656564454649\n,32M,U\n", True),
        (",1M,83BD6B9D-7F41-11DC-BE0B-001560B84F0F\n,32M,U\n", True),
        ('start=2048, size=65536, type=U\ntype=L, attrs="LegacyBIOSBootable"\n', True),
    ],
)
def test_boot_code_for_which_there_is_no_partition(tmp_path: Path, partitions: str, *, found: bool) -> None:
    """Windows writes boot code to a disk that UEFI alone boots, in front of the GUID partition table."""
    path = tmp_path / "disk"
    with path.open("wb") as file:
        file.truncate(64 * MIB)
    sbin = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    subprocess.run(["sfdisk", "-q", path], input=f"label: gpt\n{partitions}".encode(), check=True, env=sbin)
    with path.open("r+b") as file:
        file.write(b"\x33\xc0\x8e\xd0")
    disk = DiskSpec(path=PurePosixPath(path))
    seen = content(disk)
    assert (seen.bios, seen.esp, seen.bios_partition) == (True, True, found)
    with path.open("r+b") as file:
        file.seek(446)
        file.write(b"\x80")
    assert content(disk).bios_partition, "an active one in the boot sector"


def content(disk: DiskSpec) -> DiskContent:
    found = content_of(planned(disk).layers, facts_of(disk).files)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("options", [[], ["-c"], ["-o", "cluster_size=512"]])
@pytest.mark.parametrize("driver", ["vmdk", "vdi", "qcow2"])
def test_an_image_within_an_image_is_refused(tmp_path: Path, driver: str, options: list[str]) -> None:
    """``qemu-img convert -f raw`` of an image that is not raw makes them; the image below may be in a backing file."""
    inner, outer, top = (tmp_path / name for name in ("inner", "outer", "top"))
    qemu_img("create", "-f", driver, inner, "64M")
    qemu_img("convert", "-f", "raw", "-O", "qcow2", *options, inner, outer)
    qemu_img("create", "-f", "qcow2", "-b", outer, "-F", "qcow2", top)
    for disk in (
        DiskSpec(path=PurePosixPath(outer), format="qcow2"),
        DiskSpec(path=PurePosixPath(top), format="qcow2", backing=(PurePosixPath(tmp_path),)),
    ):
        message = refused(disk)
        assert (
            f"'{outer}', a qcow2 image, holds a {driver.upper() if driver != 'qcow2' else driver} image as its disk"
            in message
        )
        assert (
            f"`qemu-img convert -f qcow2 -O raw {outer} RAW`, then convert it: `qemu-img convert -f {driver}" in message
        )


def test_a_name_that_promises_another_format_is_remarked(tmp_path: Path) -> None:
    for name, promised in (("disk.qcow2", True), ("disk.vmdk", True), ("disk-flat.vmdk", False), ("disk.raw", False)):
        (tmp_path / name).write_bytes(bytes(MIB))
        found = remarks(DiskSpec(path=PurePosixPath(tmp_path / name)))
        assert [remark.partition(":")[0] for remark in found] == (
            ["the guest finds a damaged or an empty disk in disk[0]"] if promised else []
        )
    (tmp_path / "empty.qcow2").write_bytes(b"")
    assert "it is empty: make it with `qemu-img create`" in refused(
        DiskSpec(path=PurePosixPath(tmp_path / "empty.qcow2"), format="qcow2")
    )


def test_partitions_for_other_sectors_are_remarked(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    with path.open("wb") as file:
        file.truncate(MIB)
        file.seek(4096)
        file.write(b"EFI PART")
    [remark] = remarks(DiskSpec(path=PurePosixPath(path)))
    assert remark.startswith("the guest finds no partitions in disk[0]: the partition table in")
    assert "is for sectors of 4096 bytes, and the guest sees 512;" in remark


@pytest.mark.parametrize("table", ["label: gpt\n,32M,U\n,,L\n", "label: gpt\n,,L\n", "label: dos\n,32M,ef\n,,L\n"])
@pytest.mark.parametrize("format_", ["raw", "qcow2"])
def test_a_disk_that_was_cut_is_remarked(tmp_path: Path, table: str, format_: Literal["raw", "qcow2"]) -> None:
    """By a download that broke off, or by `qemu-img resize --shrink`: what its partitions hold ends behind it."""
    whole, disk = tmp_path / "whole", tmp_path / "disk"
    with whole.open("wb") as file:
        file.truncate(64 * MIB)
    sbin = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    subprocess.run(["sfdisk", "-q", whole], input=table.encode(), check=True, env=sbin)
    for size in (64, 40):
        with whole.open("r+b") as file:
            file.truncate(size * MIB)
        qemu_img("convert", "-f", "raw", "-O", format_, whole, disk)
        found = [
            each for each in remarks(DiskSpec(path=PurePosixPath(disk), format=format_)) if "a damaged disk" in each
        ]
        assert len(found) == (size == 40)
        assert all("and it has 40MiB; see whether it was copied as a whole" in each for each in found)


@pytest.mark.parametrize("kind", ["FAT", "NTFS", "nothing"])
def test_a_boot_sector_without_partitions_says_nothing_of_an_end(tmp_path: Path, kind: str) -> None:
    """Code stands where others have partitions: of mkfs.fat and of Windows it is text."""
    code = {
        "FAT": b"This is not a bootable disk.  Please insert a bootable floppy",
        "NTFS": b"BOOTMGR is missing\xff",
        "nothing": b"",
    }
    path = tmp_path / "disk"
    path.write_bytes(
        (b"\xeb\x58\x90".ljust(440, b"\x90") + code[kind][:64].ljust(70, b"\0") + b"\x55\xaa").ljust(MIB, b"\0")
    )
    assert content(DiskSpec(path=PurePosixPath(path))).end == 0


@pytest.mark.parametrize(
    "name",
    [
        "{directory}/base.raw",
        "base.raw",
        "./base.raw",
        "file:base.raw",
        "file:{directory}/base.raw",
        'json:{{"driver":"raw","file":{{"driver":"file","filename":"{directory}/base.raw"}}}}',
        'json:{{"driver":"raw","file.driver":"file","file.filename":"{directory}/base.raw"}}',
    ],
)
def test_names_of_backing_files_are_parsed_as_qemu_does(tmp_path: Path, name: str) -> None:
    base, top = tmp_path / "base.raw", tmp_path / "top"
    base.write_bytes(b"\1" * MIB)
    qemu_img("create", "-f", "qcow2", "-u", "-b", name.format(directory=tmp_path), "-F", "raw", top, "1M")
    plan = planned(DiskSpec(path=PurePosixPath(top), format="qcow2", backing=(PurePosixPath(tmp_path),)))
    assert [layer.path for layer in plan.layers] == [PurePosixPath(top), PurePosixPath(base)]
    read = subprocess.run(
        ["qemu-io", "-f", "qcow2", "-r", "-c", "read -P 1 0 64k", top],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "verification failed" not in read.stdout, "QEMU finds the same file"


@pytest.mark.parametrize(
    "name",
    [
        "nbd://127.0.0.1/x",
        "nbd:127.0.0.1:10809",
        "https://example.org/base.qcow2",
        "rbd:pool/image",
        "ssh://host/base.raw",
        "host:base.raw",
        'json:{"driver":"raw","offset":512,"file":{"driver":"file","filename":"/base.raw"}}',
        'json:{"driver":"raw","file":{"driver":"nbd","host":"127.0.0.1"}}',
        'json:{"driver":"file","filename":"/base.raw"}',
        "json:[]",
        "json:{",
        'json:{"driver":"raw","file.filename":"/base\\u0000.raw"}',
        'json:{"driver":"raw","file.filename":"/base\\ud800.raw"}',
        'json:{"driver":["raw"],"file.filename":"/base.raw"}',
    ],
)
def test_a_backing_file_that_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    below, top = tmp_path / "below", tmp_path / "top"
    qemu_img("create", "-f", "qcow2", below, "1M")
    header = bytearray(below.read_bytes())
    header[8:20] = struct.pack(">QI", 512, len(name))  # of the backing file's name: its offset and length
    header[512 : 512 + len(name)] = name.encode()
    below.write_bytes(header)
    qemu_img("create", "-f", "qcow2", "-u", "-b", below, "-F", "qcow2", top, "1M")
    message = refused(DiskSpec(path=PurePosixPath(top), format="qcow2", backing=(PurePosixPath(tmp_path),)))
    assert message == (
        f"disk[0].path: '{below}' takes data from {name!r}, which is no file here; flatten it with "
        f"`qemu-img convert -O qcow2 {below} NEW` where QEMU reaches that"
    )


def test_an_error_of_a_backing_file_names_the_image_that_needs_it(tmp_path: Path) -> None:
    base, top = tmp_path / "base", tmp_path / "top"
    disk = DiskSpec(path=PurePosixPath(top), format="qcow2", backing=(PurePosixPath(tmp_path),))
    qemu_img("create", "-f", "vdi", base, "1M")
    qemu_img("create", "-f", "qcow2", "-u", "-b", base, "-F", "raw", top, "1M")
    assert refused(disk).startswith(f"disk[0].path: '{top}' takes data from '{base}': '{base}' holds a VDI image")
    base.write_bytes(b"\1" * 700)
    planned(disk)  # QEMU shows zeroes beyond its end
    base.unlink()
    assert refused(disk) == (
        f"disk[0].path: '{top}' takes data from '{base}': '{base}' does not exist; flatten it with "
        f"`qemu-img convert -O qcow2 {top} NEW`"
    )


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_without_locks_a_disk_is_used_and_remarked(tmp_path: Path, number: int) -> None:
    path = tmp_path / "disk"
    path.write_bytes(bytes(MIB))
    FAULT_INJECTOR.begin(1, number, frozenset({"fcntl.fcntl"}))
    try:
        [remark] = remarks(DiskSpec(path=PurePosixPath(path)))
    finally:
        FAULT_INJECTOR.end()
    assert remark == (
        f"nothing keeps another QEMU from using '{path}' at the same time, which destroys it: its file system takes "
        f"no locks ({os.strerror(number)}); see that no other instance has it, or keep it on a file system with locks"
    )


@contextmanager
def mounted_again(directory: Path, *, read_only: bool) -> Iterator[None]:
    """Mount *directory* onto itself."""
    subprocess.run(["mount", "--bind", directory, directory], check=True)
    try:
        options = f"remount,bind,{'ro' if read_only else 'rw'}"
        subprocess.run(["mount", "-o", options, directory], check=True)
        yield
    finally:
        subprocess.run(["umount", directory], check=True)


@pytest.mark.parametrize("mounted_read_only", [False, True])
def test_locks_of_other_readers_keep_no_one_from_a_read_only_mount(tmp_path: Path, *, mounted_read_only: bool) -> None:
    """Whoever may read an image may lock it: a QEMU under its guest's control could keep all others from starting with it."""
    path = tmp_path / "base"
    path.write_bytes(bytes(MIB))
    base = DiskSpec(path=PurePosixPath(path), read_only=True)
    with mounted_again(tmp_path, read_only=mounted_read_only), path.open("rb") as hostile:
        nodes = list(block_nodes(planned(base), lambda _: str(path)))
        every_permission = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 100, 200, 0)
        fcntl.fcntl(hostile, F_OFD_SETLK, every_permission)
        words = [word for node in nodes for word in ("-blockdev", json.dumps(node))]
        machine = ("-M", "q35", "-accel", "tcg", "-nodefaults", "-display", "none", "-S", "-monitor", "stdio")
        qemu = subprocess.run(
            ["qemu-system-x86_64", *machine, *words, "-device", "virtio-blk-pci,drive=disk0"],
            input="quit\n",
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if mounted_read_only:
            assert (qemu.returncode, planned(base).layers[0].lockless) == (0, True), qemu.stderr
        else:
            assert 'Failed to get "consistent read" lock' in qemu.stderr
            assert "is in use by another process (QEMU's image lock)" in refused(base)


@pytest.mark.parametrize("size", [MIB, 3 << 30, 2 << 40])
def test_qemu_accepts_our_overlays(tmp_path: Path, size: int) -> None:
    with overlay(PurePosixPath(tmp_path), size, 64 * MIB) as fd:
        assert list(tmp_path.iterdir()) == [], "it never has a name"
        path = f"/proc/{os.getpid()}/fd/{fd}"
        found = subprocess.run(["qemu-img", "info", path], check=True, capture_output=True, text=True).stdout
        assert f"({size} bytes)" in found
        assert "backing" not in found
        qemu_img("check", path)
        subprocess.run(
            ["qemu-io", "-f", "qcow2", "-c", f"write -P 7 {size - 65536} 64k", path],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        qemu_img("check", path)


def test_features_of_a_file_system_are_probed(tmp_path: Path) -> None:
    (tmp_path / "whole").write_bytes(b"\1" * MIB)
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(MIB)
    whole, holes = (file_prober.probe_file(PurePosixPath(tmp_path / name), image=True) for name in ("whole", "holes"))
    assert (whole.sparse, holes.sparse) == (False, True)
    assert whole.direct == holes.direct
    # A file of the kernel that cannot be read with O_DIRECT.
    assert not file_prober.probe_file(PurePosixPath("/proc/self/status"), image=True).direct


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("size", [MIB, MIB + 512])
def test_qemu_takes_the_disks_that_are_written_past_the_page_cache(tmp_path: Path, size: int, *, sparse: bool) -> None:
    """A file that begins with a hole must be a multiple of 4096 bytes for QEMU, whatever the sectors of its disk are."""
    path = tmp_path / "disk"
    path.write_bytes(b"" if sparse else b"\1" * size)
    os.truncate(path, size)
    problems = Problems()
    disk = DiskSpec(path=PurePosixPath(path), cache="none")
    plan_disk("disk0", disk, facts_of(disk), "disk[0]", problems)
    node = {"driver": "file", "node-name": "file", "filename": str(path), "cache": {"direct": True}}
    machine = ("-M", "q35", "-accel", "tcg", "-nodefaults", "-display", "none", "-S", "-monitor", "stdio")
    qemu = subprocess.run(
        ["qemu-system-x86_64", *machine, "-blockdev", json.dumps(node), "-device", "virtio-blk-pci,drive=file"],
        input="quit\n",
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert bool(problems.found) is bool(qemu.returncode), (problems.found, qemu.stderr)


async def test_errors_are_logged_once_and_counted(caplog: pytest.LogCaptureFixture, autojump_clock: MockClock) -> None:
    del autojump_clock  # it is the clock
    news = DiskEvents(LogRateLimit())
    failed = {"node-name": "disk0", "operation": "write", "reason": "Input/output error"}
    for _ in range(1000):
        news.handle(QmpEvent("BLOCK_IO_ERROR", failed))
    news.handle(QmpEvent("BLOCK_IO_ERROR", {**failed, "operation": "read"}))
    await trio.sleep(REPORTED_EVERY + 1)
    news.handle(QmpEvent("BLOCK_IO_ERROR", failed))
    assert [record.getMessage() for record in caplog.records] == [
        "the disk disk0 has failed to write: Input/output error; the guest got the error",
        "the disk disk0 has failed to read: Input/output error; the guest got the error",
        "the disk disk0 has failed to write: Input/output error (999 more since the last report); the guest got the error",
    ]


def test_devices_that_were_never_attached_are_not_remembered() -> None:
    """A QEMU that is the guest's may name devices without end: 15 s of it took 3.7 GB."""
    news = DiskEvents(LogRateLimit())
    news.watch("disk1")
    for number in range(1000):
        news.handle(QmpEvent("DEVICE_DELETED", {"device": f"x{number}", "path": f"/machine/x{number}"}))
    news.handle(QmpEvent("DEVICE_DELETED", {"path": "/machine/unnamed"}))
    assert len(news._unplugged) == 1
    assert not news.unplugged("disk1").is_set()
    news.handle(QmpEvent("DEVICE_DELETED", {"device": "disk1", "path": "/machine/peripheral/disk1"}))
    assert news.all_unplugged == ("disk1",)
    news.watch("disk1")
    assert not news.unplugged("disk1").is_set()
