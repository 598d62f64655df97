"""The files of disks on a real file system: the headers of images, and every error in opening them."""

from __future__ import annotations

import errno
import os
import subprocess
from functools import partial
from pathlib import Path, PurePosixPath

import pytest
import trio
from trio.testing import MockClock

from runner.errors import HostError, explain
from runner.instance.discover import read_disk_facts
from runner.instance.disks import DiskEvents, opened
from runner.kernel import files
from runner.kernel.disk_images import overlay
from runner.plan.disks import DiskPlan, plan_disk
from runner.plan.problems import Problems
from runner.protocol.qmp import QmpEvent
from runner.protocol.rate_limit import REPORTED_EVERY, LogRateLimit
from runner.spec.instance import DiskSpec
from tests.support.sweep import FAULT_INJECTOR

MIB = 1 << 20
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
    plan = plan_disk("disk0", disk, read_disk_facts(disk), "disk[0]", problems)
    assert problems.found == []
    return plan


def refused(disk: DiskSpec) -> str:
    problems = Problems()
    plan_disk("disk0", disk, read_disk_facts(disk), "disk[0]", problems)
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
    assert read_disk_facts(disk).files[disk.file].image.size == 3 * MIB  # type: ignore[union-attr]
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
    vmdk.write_bytes(b"QFI")  # shorter than any header
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
    whole, holes = (files.probe_file(PurePosixPath(tmp_path / name), image=True) for name in ("whole", "holes"))
    assert (whole.sparse, holes.sparse) == (False, True)
    assert whole.direct == holes.direct
    # A file of the kernel that cannot be read with O_DIRECT.
    assert not files.probe_file(PurePosixPath("/proc/self/status"), image=True).direct


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
