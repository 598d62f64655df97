"""QEMU is replaced under a real guest that counts, writes to a disk and pings.

`QEMU_UPDATES=20 GUEST_MEMORY=2GiB pytest -s tests/machine/test_qemu_update.py` replaces it so many times, and prints the pauses;
`GUEST_PAGES=2MiB` has the memory in huge pages, which the host must have.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runner.plan.nccl import FW_CFG
from tests.emulated_node.cache import fetch
from tests.machine.test_renewal import inside, ticks, type_in, upgrade
from tests.support.newest_qemu import mounted, newest_qemu
from tests.support.program_runs import RUNNER, ProgramRun, ProgramStarter, until
from tests.support.renewals import make_program

TICKING = (
    "(i=0; while :; do echo tick $i; echo $i | dd of=/dev/vda bs=512 conv=notrunc,fsync 2>/dev/null;"
    " i=$((i+1)); usleep 50000; done) &\n"
    "ping 192.168.77.1 >/tmp/pings &\n"
)


@pytest.fixture(scope="module")
def newest() -> Iterator[Path]:
    with mounted(fetch(newest_qemu())) as program:
        yield program


UPDATES = int(os.environ.get("QEMU_UPDATES", "3"))

F_OFD_GETLK = 36
"""Of ``asm-generic/fcntl.h``; Python has no name for it."""


CONNECTED = "(i=0; while :; do echo $i; i=$((i+1)); usleep 50000; done) | nc 192.168.77.1 7777 &\n"
SERVER = """
import socket, sys
with socket.create_server(("192.168.77.1", 7777)) as listener, open(sys.argv[1], "wb", 0) as file:
    print(flush=True)
    connection, _ = listener.accept()
    while data := connection.recv(4096):
        file.write(data)
"""
"""What writes all that it receives by one connection to a file."""


@contextmanager
def serving(run: ProgramRun, file: Path) -> Iterator[None]:
    """Run :data:`SERVER` in the network namespace of *run*."""
    argv = ("nsenter", f"--target={run.pid()}", "--net", sys.executable, "-c", SERVER, str(file))
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            yield
        finally:
            server.kill()


def ctl(run: ProgramRun, *words: str) -> subprocess.CompletedProcess[str]:
    argv = (*inside(run), str(RUNNER), "ctl", "--state-dir", str(run.state), "--json", *words)
    return subprocess.run(argv, check=False, capture_output=True, text=True)


def holds_its_lock(disk: Path) -> bool:
    """Tell whether QEMU has the image locked against other programs (``raw_apply_lock_bytes`` of QEMU)."""
    with disk.open("r+b") as file:
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 100, 200, 0)
        found: bytes = fcntl.fcntl(file, F_OFD_GETLK, lock)
    return bool(struct.unpack("hhqqi4x", found)[0] != fcntl.F_UNLCK)


FAILING = {
    "it ends at once": ("exit 7", "it exited with status 7"),
    "it shows another CPU": ('exec {newest} "$@" -cpu qemu64', "shows the guest another CPU"),
    "it has another machine": ('exec {newest} "$@" -machine pc-q35-9.0', "cannot update QEMU"),
}
"""What the second QEMU is, and why it does not get the guest."""


def other_qemu(path: Path, newest: Path, script: str) -> Path:
    """Make at *path* a QEMU that says that it is *newest*, and is *script*."""
    version = "[ $1 = --version ] && echo QEMU emulator version 11.1.3 && exit"
    path.write_text(f"#!/bin/sh\n{version}\n{script.format(newest=newest)}\n")
    path.chmod(0o755)
    return path


def counting(start: ProgramStarter, newest: Path, spec: str, typed: str) -> ProgramRun:
    """Start a guest with the *newest* QEMU, type at its shell, and wait until it has counted to 5."""
    path = {"PATH": f"{newest.parent}:{os.environ['PATH']}"}
    run = start(f"{spec}[hotplug]\nqemu = true\n", "guest.then=shell", environment=path)
    run.until_done()
    run.until("guest# ", lambda: run.console)
    type_in(run, typed)
    run.until("tick 5", lambda: run.console)
    return run


def ticking(start: ProgramStarter, newest: Path, disk: Path, more: str) -> ProgramRun:
    """Start a guest that counts, writes to *disk* and pings."""
    disk.write_bytes(bytes(1 << 20))
    return counting(start, newest, f'{more}[[network]]\n[[disk]]\npath = "{disk}"\n', TICKING)


def ticks_on(run: ProgramRun) -> None:
    """Wait until the guest counts on, and check that it has left nothing out."""
    seen = len(ticks(run))
    until(lambda: len(ticks(run)) > seen, "the guest to tick on", 60)
    found = ticks(run)
    assert found == list(range(len(found)))


def test_a_guest_runs_on_where_another_qemu_cannot_have_it(start: ProgramStarter, newest: Path, tmp_path: Path) -> None:
    run = ticking(start, newest, tmp_path / "disk", '[instance]\nuser = "root"\n')
    before = run.descendants()
    for number, (script, reason) in enumerate(FAILING.values()):
        program = other_qemu(tmp_path / f"qemu{number}", newest, script)
        ended = ctl(run, "qemu-update", "--qemu", str(program))
        assert ended.returncode == 4, ended.stdout
        assert reason in ended.stderr
        assert "; the one before continues" in ended.stderr
        ticks_on(run)
        assert run.descendants() == before
        assert holds_its_lock(tmp_path / "disk")
    ended = ctl(run, "qemu-update")
    assert ended.returncode == 0, ended.stderr + run.log
    ticks_on(run)
    assert holds_its_lock(tmp_path / "disk")
    assert run.stop() == 0, run.log


def test_one_more_file_of_the_firmware_configuration_is_no_obstacle(
    start: ProgramStarter, newest: Path, tmp_path: Path
) -> None:
    """As where a runner was renewed by one that gives the guest NCCL's file: it is not in what the first QEMU hands over."""
    run = counting(
        start, newest, '[instance]\nuser = "root"\n', "(i=0; while :; do echo tick $i; i=$((i+1)); sleep 1; done) &\n"
    )
    program = other_qemu(tmp_path / "qemu", newest, f'exec {{newest}} "$@" -fw_cfg name={FW_CFG},string=later')
    ended = ctl(run, "qemu-update", "--qemu", str(program))
    assert ended.returncode == 0, ended.stderr + run.log
    ticks_on(run)
    type_in(
        run, f"rmmod qemu_fw_cfg; insmod /modules/qemu_fw_cfg.ko; cat /sys/firmware/qemu_fw_cfg/by_name/{FW_CFG}/raw\n"
    )
    run.until("later", lambda: run.console)


def received_numbers(file: Path) -> list[int]:
    """Return the numbers that have arrived whole."""
    return [int(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def test_a_guest_that_counts_misses_nothing(start: ProgramStarter, newest: Path, tmp_path: Path) -> None:
    size, pages = os.environ.get("GUEST_MEMORY", "256MiB"), os.environ.get("GUEST_PAGES")
    memory = f'[memory]\nsize = "{size}"\n' + (f'hugepages = "{pages}"\n' if pages else "")
    run = ticking(start, newest, tmp_path / "disk", memory)
    pauses, received_file = [], tmp_path / "received"
    with serving(run, received_file):
        type_in(run, CONNECTED)
        for number in range(1, UPDATES + 1):
            sent = len(received_numbers(received_file))
            ended = ctl(run, "qemu-update")
            assert ended.returncode == 0, ended.stderr + run.log
            pauses.append(json.loads(ended.stdout)["pause_ms"])
            ticks_on(run)
            until(lambda: len(received_numbers(received_file)) > sent + 1, "the connection to go on", 60)  # noqa: B023
            receipt = json.loads((run.state / "receipt.json").read_text())
            assert receipt["qemu_generation"] == number
            assert holds_its_lock(tmp_path / "disk")
    found = received_numbers(received_file)
    assert found == list(range(len(found))), "one connection has carried everything, in order"
    print(f"pauses in ms: {pauses}")
    type_in(run, "killall -INT ping; sleep 1; cat /tmp/pings\n")
    run.until("packet loss", lambda: run.console)
    sent, received = re.findall(r"([0-9]+) packets (?:transmitted|received)", run.console)
    assert int(sent) - int(received) <= len(pauses), "a packet that comes in the pause may be lost, and no second one"
    assert run.stop() == 0, run.log


WRITING = (
    "mkdir /mnt/below\n"
    "(exec 3>/mnt/below/open; mv /mnt/below /mnt/moved; i=0; while :; do echo tick $i; echo $i >&3 && echo $i >>/mnt/ticks"
    " || echo LOST; i=$((i+1)); usleep 50000; done) &\n"
)
"""The guest writes to a file that it has opened before, in a directory that was moved since, and to one that it opens again."""


def test_a_guest_that_writes_to_a_share_loses_nothing(start: ProgramStarter, newest: Path, tmp_path: Path) -> None:
    """Also where the runner has been renewed in between, and where a QEMU that has the share cannot have the guest."""
    share = tmp_path / "share"
    share.mkdir()
    program = make_program(tmp_path / "program")
    spec = f'[instance]\nuser = "root"\n[[share]]\ntag = "share"\npath = "{share}"\n'
    run = counting(start, newest, spec, WRITING)
    lost = run.console.count("LOST")  # in what was typed
    other = other_qemu(tmp_path / "other", newest, FAILING["it shows another CPU"][0])
    daemons = run.descendants()["virtiofsd"]

    ended = ctl(run, "qemu-update", "--qemu", str(other))
    assert ended.returncode == 4, ended.stdout
    assert "shows the guest another CPU" in ended.stderr
    ticks_on(run)
    assert run.descendants()["virtiofsd"] == daemons

    type_in(run, "exec 4>/mnt/gone; rm /mnt/gone; echo de''leted\n")
    run.until("deleted", lambda: run.console)
    ended = ctl(run, "qemu-update")
    assert ended.returncode == 4, ended.stdout
    assert "Migration source has lost inode" in ended.stderr
    assert "; the one before continues" in ended.stderr
    assert "Inode deleted (/gone)" in run.log
    ticks_on(run)
    assert run.descendants()["virtiofsd"] == daemons
    type_in(run, "exec 4>&-; echo clo''sed\n")
    run.until("closed", lambda: run.console)

    pauses = []
    for number in range(UPDATES):
        ended = ctl(run, "qemu-update")
        assert ended.returncode == 0, ended.stderr + run.log
        pauses.append(json.loads(ended.stdout)["pause_ms"])
        [daemon] = run.descendants()["virtiofsd"]
        assert daemon not in daemons
        daemons.append(daemon)
        if number == 0:
            assert upgrade(run, program)["runner"]["generation"] == 1
        ticks_on(run)
        assert run.descendants()["virtiofsd"] == [daemon]
    print(f"pauses in ms: {pauses}")
    assert run.console.count("LOST") == lost
    counted = len(ticks(run))
    for path in ("ticks", "moved/open"):
        written = [int(line) for line in (share / path).read_text().split()]
        assert written == list(range(len(written)))
        assert len(written) >= counted - 1
    assert run.stop() == 0, run.log
    assert run.termination_log()["faults"] == []
