"""Disks under the real program with this machine's QEMU: each kind, what guests write, and changes while they run."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from runner.host.facts_reader import read_disk_facts
from runner.plan.disks import plan_disk
from runner.plan.problems import Problems
from runner.spec.instance import DiskSpec
from tests.support.program_runs import GuestFiles, ProgramRun, ProgramStarter, until

MIB = 1 << 20
RUNNER = Path(sys.executable).with_name("instance-runner")
WRITER = (
    bytes.fromhex(
        "31c08ed8bc007cbe807cb80043cd13bea07c72118106887c8000813e887c004072e5be907cbaf803ac84c07403eeebf8f4ebfd"
    ).ljust(0x80, b"\0")
    + bytes.fromhex("1000 0100 007c 0000 8000000000000000")
    + b"WRITTEN\r\n\0".ljust(16, b"\0")
    + b"WRITE FAILED\r\n\0"
)
"""A boot sector that writes itself to every 128th sector of its disk's first 8 MiB, from the 128th on, by the BIOS's
extended write (INT 13h, AH=43h), says on the first serial port how that went, and halts."""


def image(path: Path, content: bytes = b"", size: int = 16 * MIB) -> Path:
    """Make a raw image that is not sparse."""
    path.write_bytes(content.ljust(510, b"\0") + b"\x55\xaa" + b"\1" * (size - 512))
    return path


def derived(path: Path, base: Path, form: str = "raw") -> Path:
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", base, "-F", form, path], check=True)
    return path


def ctl(run: ProgramRun, *words: object) -> subprocess.CompletedProcess[str]:
    """Ask the instance from inside its namespaces, as ``kubectl exec`` would."""
    enter = ("nsenter", "--target", run.pid(), "--mount", "--pid")
    command = (*enter, RUNNER, "ctl", "--state-dir", run.state, *words)
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, timeout=60)


def asked(run: ProgramRun, *words: object) -> Any:
    result = ctl(run, "--json", *words)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def receipt(run: ProgramRun) -> list[dict[str, Any]]:
    threads: list[dict[str, Any]] = json.loads((run.state / "receipt.json").read_text())["threads"]
    return threads


def test_each_kind_of_disk(start: ProgramStarter, tmp_path: Path) -> None:
    base = image(tmp_path / "base", WRITER)
    derived(tmp_path / "top", derived(tmp_path / "middle", base), "qcow2")
    for name in ("kept", "through"):
        image(tmp_path / name)
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", tmp_path / "plain", "16M"], check=True)
    before = {path: path.read_bytes() for path in (base, tmp_path / "middle", tmp_path / "top")}
    spec = f"""
[[disk]]
path = "{tmp_path}/top"
format = "qcow2"
ephemeral = true
backing = ["{tmp_path}"]
iothread = true
[[disk]]
path = "{tmp_path}/kept"
[[disk]]
path = "{tmp_path}/through"
cache = "writethrough"
discard = false
[[disk]]
path = "{base}"
read_only = true
cache = "writeback"
[[disk]]
path = "{tmp_path}/plain"
format = "qcow2"
detect_zeroes = "unmap"
serial = "plain"
[hotplug]
disks = 1
[shutdown]
grace = 1
"""
    run = start(spec, boot=False)
    run.until("WRITTEN", lambda: run.console)
    disks = asked(run, "status")["disks"]
    assert [(disk["name"], disk["ephemeral"], disk["read_only"]) for disk in disks] == [
        ("disk0", True, False),
        ("disk1", False, False),
        ("disk2", False, False),
        ("disk3", False, True),
        ("disk4", False, False),
    ]
    assert {disk["size"] for disk in disks} == {16 * MIB}

    # The thread that serves a disk has the role iothread and does not run on the vCPUs' CPUs.
    [iothread] = [thread for thread in receipt(run) if thread["role"] == "iothread"]
    [vcpu] = [thread for thread in receipt(run) if thread["role"] == "vcpu"]
    assert iothread["name"] == "IO disk0"
    assert iothread["allowed_cpus"] != vcpu["allowed_cpus"]
    inspected = subprocess.run(
        ["nsenter", "--target", str(run.pid()), "--mount", "--pid", RUNNER, "inspect", "--state-dir", run.state],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    assert any(line.split()[:3] == ["iothread", str(iothread["tid"]), "IO"] for line in inspected.splitlines()), (
        inspected
    )

    # QEMU has opened each file as planned: those it writes to with O_DIRECT, all others without.
    [qemu] = run.descendants()["qemu-system-x86"]
    modes: dict[str, set[tuple[int, bool]]] = {}
    for entry in Path(f"/proc/{qemu}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):
            name = Path(os.readlink(f"/proc/{qemu}/fd/{entry.name}")).name  # noqa: PTH115
            flags = int(entry.read_text().split("flags:")[1].split()[0], 8)
            modes.setdefault(name, set()).add((flags & os.O_ACCMODE, bool(flags & os.O_DIRECT)))
    assert modes["kept"] == {(os.O_RDWR, True)}
    assert modes["through"] == {(os.O_RDWR, False)}
    assert modes["base"] == modes["middle"] == modes["top"] == {(os.O_RDONLY, False)}
    assert modes["plain"] == {(os.O_RDWR, True)}

    # A second instance may not write to a disk in use; it may read one that both only read.
    other = start(f'[[disk]]\npath = "{tmp_path}/kept"\n')
    assert other.wait() == 30
    assert "is in use by another process" in other.log
    sharing = start(f'[[disk]]\npath = "{base}"\nephemeral = true\n[shutdown]\ngrace = 1\n', boot=False)
    sharing.until("WRITTEN", lambda: sharing.console)
    assert sharing.stop() == 13

    assert sorted(path.name for path in run.state.iterdir()) == [
        *("console.log", "console.sock", "control.sock", "qmp.sock", "ready", "receipt.json")
    ]
    assert run.stop() == 13
    assert run.termination_log()["faults"] == []
    assert {path: path.read_bytes() for path in before} == before, "the writes to ephemeral disks go to another file"


@pytest.fixture
def on_4kn(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system on a disk with sectors of 4096 bytes, and yield its directory."""
    backing, place = tmp_path / "4kn", tmp_path / "mounted"
    with backing.open("wb") as file:
        file.truncate(64 * MIB)
    place.mkdir()
    made = subprocess.run(
        ["losetup", "-f", "--show", "-b", "4096", backing], check=True, capture_output=True, text=True
    )
    device = made.stdout.strip()
    try:
        subprocess.run(["mkfs.ext4", "-q", "-b", "4096", device], check=True)
        subprocess.run(["mount", device, place], check=True)
        yield place
    finally:
        subprocess.run(["umount", place], check=False)
        subprocess.run(["losetup", "-d", device], check=True)


@pytest.mark.parametrize(("options", "ready"), [(["-r"], False), ([], True)])
def test_a_block_device_that_takes_no_writes_is_refused_for_a_disk_that_is_written(
    tmp_path: Path, options: list[str], *, ready: bool
) -> None:
    """As QEMU does, which asks the kernel in the same way: an open for writing succeeds."""
    with loop_device(tmp_path, *options) as device:
        assert ready is (qemu_opens(device) == "")
        for read_only in (False, True):
            problems = Problems()
            disk = DiskSpec(path=PurePosixPath(device), read_only=read_only)
            plan_disk("disk0", disk, read_disk_facts(disk, PurePosixPath("/")), "disk[0]", problems)
            assert [str(each) for each in problems.found] == [
                f"disk[0].path: cannot open {device!r}: the device is read-only; set read_only = true if the guest shall not write"
            ] * (not ready and not read_only)


def test_a_block_device_that_the_machine_has_for_itself_is_remarked(tmp_path: Path) -> None:
    place = tmp_path / "mounted"
    place.mkdir()
    with loop_device(tmp_path) as device:
        subprocess.run(["mkfs.ext4", "-q", device], check=True)
        disk = DiskSpec(path=PurePosixPath(device))
        for mounted in (False, True):
            if mounted:
                subprocess.run(["mount", device, place], check=True)
            try:
                problems = Problems()
                plan_disk("disk0", disk, read_disk_facts(disk, PurePosixPath("/")), "disk[0]", problems)
            finally:
                if mounted:
                    subprocess.run(["umount", place], check=True)
            destroyed = [each for each in map(str, problems.remarks) if "destroy what the other writes" in each]
            assert (problems.found, bool(destroyed)) == ([], mounted)


@contextmanager
def loop_device(tmp_path: Path, *options: str) -> Iterator[str]:
    """Yield the name of a loop device of 64 MiB."""
    backing = tmp_path / "backing"
    with backing.open("wb") as file:
        file.truncate(64 * MIB)
    add = ["losetup", "-f", "--show", *options, str(backing)]
    device = subprocess.run(add, check=True, capture_output=True, text=True).stdout.strip()
    try:
        yield device
    finally:
        subprocess.run(["losetup", "-d", device], check=True)


def qemu_opens(device: str) -> str:
    """Return what QEMU says of a disk that is written; nothing if it opens it."""
    argv = ["qemu-system-x86_64", "-accel", "tcg", "-display", "none", "-nodefaults", "-S", "-monitor", "stdio"]
    drive = f"if=virtio,format=raw,file={device}"
    done = subprocess.run([*argv, "-drive", drive], check=False, capture_output=True, text=True, input="quit\n")
    return done.stderr


def test_a_raw_file_that_ends_within_a_sector_is_written_through_the_page_cache(
    start: ProgramStarter, on_4kn: Path
) -> None:
    image(on_4kn / "raw", WRITER, 16 * MIB + 512)
    spec = f'[[disk]]\npath = "{on_4kn}/raw"\n{{}}\n[shutdown]\ngrace = 1\n'
    (on_4kn / "hole").touch()
    os.truncate(on_4kn / "hole", 16 * MIB + 512)
    sparse = start(spec.format('cache = "none"').replace("/raw", "/hole"), boot=False)
    assert sparse.wait() == 30
    assert f"`truncate -s %4096 {on_4kn}/hole` makes it longer" in sparse.log
    refused = start(spec.format('cache = "none"'), boot=False)
    assert refused.wait() == 30
    assert f"`truncate -s %4096 {on_4kn}/raw` makes it longer" in refused.log
    run = start(spec.format(""), boot=False)
    run.until("WRITTEN", lambda: run.console)
    assert "takes room in the page cache" in run.log
    assert run.stop() == 13
    os.truncate(on_4kn / "raw", 16 * MIB + 4096)
    run = start(spec.format('cache = "none"'), boot=False)
    run.until("WRITTEN", lambda: run.console)
    assert run.stop() == 13


def test_a_full_disk_is_a_write_error_in_the_guest_and_in_the_log(start: ProgramStarter, tmp_path: Path) -> None:
    base = image(tmp_path / "base", WRITER)
    run = start(
        f'[[disk]]\npath = "{base}"\nephemeral = true\nephemeral_size = "1MiB"\n[shutdown]\ngrace = 1\n', boot=False
    )
    run.until("WRITE FAILED", lambda: run.console)
    run.until("the disk disk0 has failed to write: No space left on device; the guest got the error", lambda: run.log)
    assert asked(run, "status")["guest"] == "running"
    assert run.stop() == 13


WATCHER = r"""#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t devtmpfs devtmpfs /dev 2>/dev/null
/bin/busybox --install -s /bin
export PATH=/bin
while read -r module; do insmod "/modules/$module.ko"; done </modules/order
seen=none
while :; do
  now=$(for disk in /sys/block/vd*; do [ -e "$disk" ] && echo "$(cat "$disk/serial")=$(cat "$disk/size")"; done | tr '\n' ' ')
  [ "$now" = "$seen" ] || echo "watcher: disks ${now:-none} end"
  case $now in
    *later=65536*)
      grep -q done /tmp/discarded 2>/dev/null || {
        dd if=/dev/zero bs=1M count=4 of=/dev/vda conv=notrunc 2>/dev/null
        sync; blkdiscard /dev/vda && echo "watcher: discarded"; echo done >/tmp/discarded
      } ;;
  esac
  seen=$now
  sleep 0.1
done
"""


@pytest.fixture
def watcher(guest: GuestFiles, tmp_path: Path) -> Path:
    """Make an initial RAM disk whose init prints the disks it sees whenever they change."""
    place = tmp_path / "initrd.d"
    place.mkdir()
    (place / "init").write_text(WATCHER)
    (place / "init").chmod(0o755)
    archive = subprocess.run(
        ["cpio", "-o", "-H", "newc", "--quiet"], input=b"init", cwd=place, stdout=subprocess.PIPE, check=True
    )
    path = tmp_path / "initrd"
    path.write_bytes(guest.initrd.read_bytes() + gzip.compress(archive.stdout))
    return path


@pytest.mark.heart
def test_disks_come_grow_and_go_while_a_linux_guest_runs(
    start: ProgramStarter, guest: GuestFiles, watcher: Path, tmp_path: Path
) -> None:
    later = image(tmp_path / "later")
    boot = f'[boot]\nkernel = "{guest.kernel}"\ninitrd = "{watcher}"\ncmdline = "console=ttyS0 quiet no_timer_check"\n'
    run = start(boot + "[hotplug]\ndisks = 2\n[shutdown]\ngrace = 1\n", boot=False)
    run.until("watcher: disks none end", lambda: run.console)

    attached = asked(run, "disk", "attach", later, "serial=later", "iothread=true")
    assert (attached["name"], attached["attached"], attached["size"]) == ("disk0", True, 16 * MIB)
    run.until("watcher: disks later=32768  end", lambda: run.console)
    assert [thread["name"] for thread in receipt(run) if thread["role"] == "iothread"] == ["IO disk0"]

    refused = ctl(run, "disk", "attach", later)
    assert refused.returncode == 4
    assert "is in use by another process" in refused.stderr
    refused = ctl(run, "disk", "attach", "/nowhere", "serial=later", "formt=raw")
    assert "disk.formt: unknown key; did you mean 'format'?" in refused.stderr
    refused = ctl(run, "disk", "attach", tmp_path)
    assert f"disk.path: '{tmp_path}' is a directory, not a file or block device" in refused.stderr

    assert asked(run, "disk", "grow", "disk0", "32MiB")["size"] == 32 * MIB
    assert later.stat().st_size == 32 * MIB
    run.until("watcher: disks later=65536  end", lambda: run.console)
    assert "a disk never shrinks" in ctl(run, "disk", "grow", "disk0", "16MiB").stderr
    run.until("watcher: discarded", lambda: run.console)
    until(lambda: later.stat().st_blocks * 512 < MIB, "what the guest discards to become a hole")

    seen = run.console.count("watcher: disks none end")
    assert asked(run, "disk", "detach", "disk0") == {"version": 1}
    until(lambda: run.console.count("watcher: disks none end") > seen, "the guest to see it go")
    assert asked(run, "disk", "list")["disks"] == []
    assert [thread for thread in receipt(run) if thread["role"] == "iothread"] == []
    [qemu] = run.descendants()["qemu-system-x86"]
    assert not any(os.readlink(entry) == str(later) for entry in Path(f"/proc/{qemu}/fd").iterdir())  # noqa: PTH115
    # Its slot is free again, and so is its serial number.
    assert asked(run, "disk", "attach", later, "serial=later", "read_only=true")["name"] == "disk0"
    refused = ctl(run, "cpus", 2)
    assert (refused.returncode, "cannot change the number of vCPUs" in refused.stderr) == (4, True)
    assert run.stop() == 13
    assert run.termination_log()["faults"] == []


@contextlib.contextmanager
def connected(run: ProgramRun) -> Iterator[socket.socket]:
    """Hold a connection to the control socket from this process, which is in another PID namespace."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(str(run.state / "control.sock"))
        yield connection


def test_clients_of_the_control_socket_that_are_refused_or_disconnect(start: ProgramStarter, tmp_path: Path) -> None:
    """The guest is a BIOS, which never releases a disk, so that a detach waits for ever."""
    base = image(tmp_path / "base", WRITER)
    disks = [image(tmp_path / f"later{number}") for number in range(3)]
    run = start(
        f'[[disk]]\npath = "{base}"\nephemeral = true\n[hotplug]\ndisks = 2\n[shutdown]\ngrace = 1\n', boot=False
    )
    run.until("WRITTEN", lambda: run.console)
    stranger = subprocess.run(
        [RUNNER, "ctl", "--state-dir", run.state, "status"], capture_output=True, text=True, check=False
    )
    assert "cannot see the client" in stranger.stderr
    run.state.chmod(0o711)
    (run.state / "control.sock").chmod(0o666)
    status = json.dumps({"jsonrpc": "2.0", "method": "status", "id": 1})
    unprivileged = (
        f"import os, socket; os.chdir({str(run.state)!r}); os.setresuid(65534, 65534, 65534); "
        f"s = socket.socket(socket.AF_UNIX); s.connect('control.sock'); "
        f"s.sendall({status.encode() + chr(10).encode()!r}); print(s.recv(4096))"
    )
    inside = ["nsenter", "--target", str(run.pid()), "--mount", "--pid"]
    output = subprocess.run(
        [*inside, sys.executable, "-c", unprivileged], capture_output=True, text=True, check=True
    ).stdout
    assert "own PID namespace may ask" in output

    # Two clients ask at the same time, and both disks are attached. A third one disconnects at once after its request.
    enter: list[str | Path] = [*inside, RUNNER, "ctl", "--state-dir", run.state, "disk"]
    first = subprocess.Popen([*enter, "attach", disks[0]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    second = subprocess.Popen([*enter, "attach", disks[1]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert (first.wait(60), second.wait(60)) == (0, 0)
    question = json.dumps({"jsonrpc": "2.0", "method": "disk.detach", "params": {"name": "disk1"}, "id": 1})
    vanishing = (
        f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({str(run.state / 'control.sock')!r}); "
        f"s.sendall({question.encode() + chr(10).encode()!r})"
    )
    subprocess.run([*inside, sys.executable, "-c", vanishing], check=True)
    # The detach waits for the guest; meanwhile `list` is answered, and other requests to change disks are refused.
    assert len(asked(run, "disk", "list")["disks"]) == 3
    refused = ctl(run, "disk", "attach", disks[2])
    assert "all 2 slots are taken" in refused.stderr
    refused = ctl(run, "disk", "detach", "disk0")
    assert "the machine was started with it" in refused.stderr
    refused = ctl(run, "disk", "detach", "disk9")
    assert "cannot find the disk 'disk9'; there are: disk0, disk1, disk2" in refused.stderr
    assert "cannot grow 'disk0': it is ephemeral" in ctl(run, "disk", "grow", "disk0", "1GiB").stderr

    for nonsense in (b"nonsense\n", b'{"jsonrpc": "2.0", "method": "disk.list"}\n', b"x" * 70_000):
        with connected(run) as connection:
            connection.sendall(nonsense)
            assert b"error" in connection.recv(4096)
    assert run.stop() == 13, run.log
    assert run.termination_log()["faults"] == []
