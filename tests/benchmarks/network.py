"""Throughput from the guest to its router, compared with the same QEMU started by hand in the same run.

The script by hand is the output of ``instance-runner plan --show-argv``. It lets QEMU open the tap and pins no vCPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.figures import Figure
from tests.benchmarks.instances import BIN, BenchmarkSetup, linux_guest

RUNNER = BIN / "instance-runner"
TIMEOUT = 300
"""Seconds for one guest."""
ALONE = ("unshare", "--fork", "--pid", "--mount", "--mount-proc", "--kill-child")
RECEIVE = """
import socket, time
with socket.create_server(("", 5001)) as listener:
    print("listening", flush=True)
    connection, _ = listener.accept()
    data = bytearray(1 << 20)
    count = connection.recv_into(data)
    begin = time.monotonic()
    while more := connection.recv_into(data):
        count += more
    print(count / (time.monotonic() - begin) / (1 << 20), flush=True)
"""


def spec(guest: Path, mib: int, accel: str) -> str:
    boot = f'kernel = "{guest}/vmlinuz"\ninitrd = "{guest}/initrd"\ncmdline = "console=ttyS0 quiet no_timer_check guest.send={mib}"\n'
    return f'[cpu]\naccel = "{accel}"\n[memory]\nsize = "256MiB"\n[boot]\n{boot}[[network]]\n'


def throughput(argv: list[str | Path]) -> float:
    """Return the MiB/s of one guest, which *argv* starts in a network namespace of its own."""
    name = f"bench{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    inside = ("ip", "netns", "exec", name)
    try:
        receiver = subprocess.Popen([*inside, sys.executable, "-IS", "-c", RECEIVE], stdout=subprocess.PIPE, text=True)
        assert receiver.stdout is not None
        receiver.stdout.readline()
        guest = subprocess.Popen(
            [*inside, *ALONE, *argv], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            output, _ = receiver.communicate(timeout=TIMEOUT)
            return float(output)
        finally:
            for process in (receiver, guest):
                process.kill()
                process.wait()
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def network(setup: BenchmarkSetup) -> Iterator[Figure]:
    path = setup.directory / "network"
    path.mkdir()
    (path / "spec.toml").write_text(spec(linux_guest(), setup.rounds(256, 16), setup.accel))
    argv: list[str | Path] = [RUNNER, "plan", "--show-argv", "--state-dir", path / "state", path / "spec.toml"]
    (path / "by-hand").write_bytes(subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout)
    ways: dict[str, list[str | Path]] = {
        "instance-runner": [
            *("env", "--block-signal=TERM,INT,HUP", RUNNER, "run"),
            *("--termination-log", path / "end", "--state-dir", path / "state", path / "spec.toml"),
        ],
        "by hand": ["bash", path / "by-hand"],
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(setup.rounds(5, 1)):
        for name in ways if number % 2 else reversed(ways):
            found[name].append(throughput(ways[name]))
    ours = found.pop("instance-runner")
    yield Figure("network: guest to router, MiB/s", ours, found)
