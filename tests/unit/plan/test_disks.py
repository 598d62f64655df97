"""Defaults of each kind of disk: cache, asynchronous I/O and errors."""

from __future__ import annotations

import errno
import json
import os
import shlex
from pathlib import PurePosixPath

import attrs
import pytest

from runner.facts.disk import FileFact, ImageFact
from runner.facts.host import HostFacts
from runner.plan.argv.block_nodes import block_nodes, disk_device
from runner.plan.disks import DiskPlan, Overlay, disk_words, within
from runner.plan.instance import InstancePlan
from tests.support.plans import FACTS, GIB, KERNEL, plan_of, problems


def disk_of(keys: str, **facts: object) -> DiskPlan:
    plan: InstancePlan = plan_of(f"[[disk]]\n{keys}\n", attrs.evolve(FACTS, **facts))  # type: ignore[arg-type]
    return plan.machine.disks[0]


@pytest.mark.parametrize(
    ("keys", "direct", "aio"),
    [
        ('path = "/4kn"', True, "native"),
        ('path = "/raw"', True, "native"),
        ('path = "/sparse"', True, "threads"),  # a write may have to allocate, and io_submit(2) would block
        ('path = "/sparse"\nread_only = true', True, "native"),
        ('path = "/images/golden/base"\nephemeral = true', False, "threads"),
        ('path = "/raw"\ncache = "writeback"', False, "threads"),
        ('path = "/disk"', False, "threads"),  # without O_DIRECT
        ('path = "/raw"\naio = "io_uring"', True, "io_uring"),
        ('path = "/sparse"\naio = "native"', True, "native"),
    ],
)
def test_cache_and_aio_follow_what_the_disk_can_do(keys: str, *, direct: bool, aio: str) -> None:
    disk = disk_of(keys, io_uring_error=None)
    assert (disk.direct, disk.aio) == (direct, aio)


ON_4KN = FileFact("file", GIB + 512, image=ImageFact("raw", GIB + 512), direct=True, alignment=4096)


def with_file(fact: FileFact, **facts: object) -> HostFacts:
    return attrs.evolve(FACTS, files={**FACTS.files, PurePosixPath("/d"): fact}, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize("keys", ["", "read_only = true", "ephemeral = true"])
def test_the_guest_does_not_write_to_a_backing_file_of_another_disk(keys: str) -> None:
    """QEMU refuses it where the file system has locks."""
    chain = '[[disk]]\npath = "/top"\nformat = "qcow2"\nbacking = ["/images"]\n'
    base = f'[[disk]]\npath = "/images/golden/base"\n{keys}\n'
    for index, text in enumerate((base + chain, chain + base)):
        if keys:
            plan_of(text)
        else:
            [problem] = problems(text)
            assert problem.startswith(
                f"disk[{index}].path: '/images/golden/base' is a backing file of disk{1 - index}, and"
            )


@pytest.mark.parametrize(
    ("fact", "command"),
    [
        (FileFact("file", 0, image=ImageFact("raw")), "`truncate -s 10G {}` makes it a disk of 10 GiB"),
        (FileFact("file", 700, image=ImageFact("raw")), "`truncate -s %512 {}` makes it longer"),
        (FileFact("file", GIB, image=ImageFact("vdi")), "convert it: `qemu-img convert -f vdi -O qcow2 {} NEW`"),
        (
            FileFact("file", GIB, image=ImageFact("qcow2", backing=PurePosixPath("/x"))),
            "`qemu-img convert -O qcow2 {} NEW`",
        ),
    ],
)
def test_a_path_in_a_command_is_one_word_of_a_shell(fact: FileFact, command: str) -> None:
    path = PurePosixPath("/images/$(reboot); it's")
    form = "qcow2" if fact.image is not None and fact.image.format == "qcow2" else "raw"
    [problem] = problems(
        f'[[disk]]\npath = "{path}"\nformat = "{form}"\n', attrs.evolve(FACTS, files={**FACTS.files, path: fact})
    )
    assert command.format(shlex.quote(str(path))) in problem


def test_the_end_of_a_raw_file_must_be_writable_past_the_page_cache() -> None:
    """QEMU refuses one whose size is no multiple of what ``O_DIRECT`` takes there, such as 4096 bytes."""
    plan = plan_of('[[disk]]\npath = "/d"\n', with_file(ON_4KN))
    assert not plan.machine.disks[0].direct
    assert [str(remark) for remark in plan.remarks if "page cache" in str(remark)] == [
        (
            "what the guest writes to '/d' takes room in the page cache: its 1073742336 bytes are no multiple of the 4096 of its disk's "
            "sectors; `truncate -s %4096 /d` makes it longer"
        )
    ]
    for keys in ('cache = "none"', 'aio = "native"'):
        [problem] = problems(f'[[disk]]\npath = "/d"\n{keys}\n', with_file(ON_4KN))
        assert "cannot be written past the page cache" in problem
        assert problem.endswith("`truncate -s %4096 /d` makes it longer")
    for keys in ("read_only = true", 'cache = "writeback"', "ephemeral = true"):
        assert not any(
            "page cache" in str(each) for each in plan_of(f'[[disk]]\npath = "/d"\n{keys}\n', with_file(ON_4KN)).remarks
        )
    assert plan_of('[[disk]]\npath = "/d"\n', with_file(attrs.evolve(ON_4KN, size=GIB))).machine.disks[0].direct


def test_ephemeral_disks_that_can_fill_their_volume_are_remarked() -> None:
    two = '[[disk]]\npath = "/raw"\nephemeral = true\n[[disk]]\npath = "/sparse"\nephemeral = true\nephemeral_size = "256MiB"\n'
    room = 2 * GIB
    found = [str(remark) for remark in plan_of(two, attrs.evolve(FACTS, free_space=GIB)).remarks]
    assert [remark.partition(",")[0] for remark in found if "state directory" in remark] == [
        "the guest gets write errors"
    ]
    assert any("disk0 and disk1, which may take 1345MiB" in remark for remark in found)
    for free in (room, None):
        assert not any(
            "write errors" in str(each) for each in plan_of(two, attrs.evolve(FACTS, free_space=free)).remarks
        )


@pytest.mark.parametrize(
    ("number", "keys", "remedy"),
    [
        (errno.EROFS, "", "set read_only = true if the guest shall not write, or mount its file system for writing"),
        (errno.EACCES, "", "set read_only = true if the guest shall not write"),
        (errno.ETXTBSY, "", "it runs as a program, or is swap space of this machine: end that first"),
        (errno.ELOOP, "read_only = true", "its symbolic links lead in a circle: name the file itself"),
        (errno.EACCES, "read_only = true", "let the user of this process read it"),
        (errno.EIO, "", "the storage below it fails: `dmesg` says which"),
    ],
)
def test_the_remedy_belongs_to_the_error(number: int, keys: str, remedy: str) -> None:
    reason = os.strerror(number)
    unread = None if number in {errno.EROFS, errno.ETXTBSY} or (number == errno.EACCES and not keys) else reason
    fact = FileFact("file", GIB, reason, unread, error_number=number)
    [problem] = problems(f'[[disk]]\npath = "/d"\n{keys}\n', with_file(fact))
    assert problem == f"disk[0].path: cannot open '/d': {reason}; {remedy}"


def test_only_writable_disks_bypass_the_page_cache() -> None:
    """Other guests read the same base: the page cache holds it once for all of them."""
    disk = disk_of('path = "/top"\nformat = "qcow2"\nbacking = ["/images"]')
    nodes = {str(node["node-name"]): node for node in block_nodes(disk, lambda name: f"/{name}")}
    assert nodes["disk0-file"]["cache"] == {"direct": True}
    assert [name for name, node in nodes.items() if node.get("read-only") is False] == ["disk0-file", "disk0"]
    for below in ("disk0-base1-file", "disk0-base2-file"):
        assert nodes[below]["read-only"] is True
        assert "cache" not in nodes[below]
    assert [nodes[name]["backing"] for name in ("disk0", "disk0-base1")] == ["disk0-base1", "disk0-base2"]


def test_backing_files_in_headers_are_never_followed() -> None:
    disk = disk_of('path = "/d,isk.qcow2"\nformat = "qcow2"')
    [_, image] = block_nodes(disk, str)
    assert "backing" in image
    assert image["backing"] is None


def test_block_nodes_are_created_after_the_nodes_below_them() -> None:
    disk = disk_of('path = "/top"\nformat = "qcow2"\nephemeral = true\nbacking = ["/images"]')
    nodes = list(block_nodes(disk, str))
    made = [str(node["node-name"]) for node in nodes]
    for number, node in enumerate(nodes):
        below = {str(node[key]) for key in ("file", "backing") if node.get(key) is not None}
        assert below <= set(made[:number])
    assert json.dumps(nodes).count("/images/") == 0, "files are passed as descriptors, not as paths"


def test_an_ephemeral_disk_needs_room_for_everything_the_guest_can_write() -> None:
    disk = disk_of('path = "/raw"\nephemeral = true')
    assert disk.overlay is not None
    assert disk.overlay.size == GIB
    assert disk.overlay.limit > GIB
    assert not disk.written
    limited = disk_of('path = "/raw"\nephemeral = true\nephemeral_size = "3MiB"')
    assert limited.overlay == Overlay(GIB, 3 << 20)
    assert disk_words(limited) == "/raw, raw, ephemeral (at most 3MiB written), cache writeback, aio threads"


def test_an_error_of_the_file_never_stops_the_guest() -> None:
    device = disk_device(disk_of('path = "/raw"\nserial = "a"'), bus="slot0", boot_index=0)
    assert (device["werror"], device["rerror"], device["bus"], device["bootindex"]) == ("report", "report", "slot0", 0)


def test_within_compares_whole_path_components() -> None:
    images = [PurePosixPath("/images")]
    assert within(PurePosixPath("/images/a/b"), images)
    assert not within(PurePosixPath("/images"), images)
    assert not within(PurePosixPath("/images2/a"), images)


def test_native_aio_that_the_machine_has_no_requests_for_is_remarked() -> None:
    """Each thread of QEMU that serves such a disk takes 1024 of the machine's: two iothreads, and the main thread for the others."""
    disks = "".join(
        f'[[disk]]\npath = "/raw{number}"\naio = "native"\niothread = {each}\n'
        for number, each in enumerate(("true", "true", "false", "false"))
    )
    images = {
        PurePosixPath(f"/raw{number}"): FileFact("file", GIB, image=ImageFact("raw", GIB), direct=True)
        for number in range(4)
    }
    facts = attrs.evolve(FACTS, files={**FACTS.files, **images})
    for free, short in ((3072, None), (3000, 72), (None, None)):
        plan = plan_of(KERNEL + disks, attrs.evolve(facts, aio_free=free))
        remarks = [each for each in map(str, plan.remarks) if "aio" in each]
        assert len(remarks) == (short is not None)
        if short is not None:
            assert 'aio "native" takes 3072 requests of the kernel\'s, and the machine has 3000 left' in remarks[0]
            assert f"raise fs.aio-max-nr on the node by {short} at least" in remarks[0]
