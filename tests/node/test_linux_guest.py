"""The Linux guest, for the few tests that need one. Emulated CPUs take a minute to boot it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

KERNEL = os.environ.get("RUNNER_NODE_GUEST_KERNEL", "")
INITRD = os.environ.get("RUNNER_NODE_GUEST_INITRD", "")
SECONDS = 180


@pytest.fixture(autouse=True)
def _built() -> None:
    if not Path(KERNEL).is_file() or not Path(INITRD).is_file():
        pytest.skip("the Linux guest is missing: tests/node/run builds it and names it in RUNNER_NODE_GUEST_KERNEL")


def test_it_boots_answers_and_powers_off(tmp_path: Path) -> None:
    serial, theirs = socket.socketpair()
    # QEMU maps the kernel while it loads it; from the share that is slow
    kernel = tmp_path / "kernel"
    kernel.write_bytes(Path(KERNEL).read_bytes())
    argv = [
        *("qemu-system-x86_64", "-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "Skylake-Server", "-m", "128M"),
        *("-smp", "2", "-nodefaults", "-no-user-config", "-display", "none", "-kernel", str(kernel), "-initrd", INITRD),
        *("-append", "console=ttyS0 quiet"),
        *("-chardev", f"socket,id=serial,fd={theirs.fileno()}", "-serial", "chardev:serial"),
        *("-monitor", "stdio"),
    ]
    with (
        serial,
        serial.makefile("rwb", 0) as console,
        subprocess.Popen(
            argv,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as qemu,
    ):
        theirs.close()
        serial.settimeout(SECONDS)
        try:
            line = b""
            end = time.monotonic() + SECONDS
            while b"LINUX-GUEST-UP" not in line:
                assert time.monotonic() < end
                line = console.readline()
                assert line, "the guest ended"
            assert b" cpus=0-1 numa_nodes=0 " in line
            console.write(b"echo $((6 * 7))\n")
            assert console.readline().strip() == b"42"
            assert console.readline().strip() == b"LINUX-GUEST-DONE 0"
            assert qemu.stdin is not None
            qemu.stdin.write(b"system_powerdown\n")
            qemu.stdin.flush()
            assert console.readline().strip() == b"LINUX-GUEST-POWER-BUTTON"
            assert qemu.wait(SECONDS) == 0
        finally:
            qemu.kill()
