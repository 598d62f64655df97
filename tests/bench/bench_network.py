#!/usr/bin/env python3
"""Throughput from the guest to its router, beside the same QEMU started by hand with the same options in the same run.

The hand is the script of ``instance-runner plan --show-argv``. What differs is who opens the tap and who pins the vCPUs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).parents[2]
RUNNER = Path(sys.executable).with_name("instance-runner")
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


def spec(guest: Path, mib: int, vcpus: int, accel: str) -> str:
    boot = f'kernel = "{guest}/vmlinuz"\ninitrd = "{guest}/initrd"\ncmdline = "console=ttyS0 quiet guest.send={mib}"\n'
    return f'[cpu]\ncount = {vcpus}\naccel = "{accel}"\n[memory]\nsize = "256MiB"\n[boot]\n{boot}[[network]]\n'


def throughput(argv: list[str | Path], patience: float) -> float:
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
            said, _ = receiver.communicate(timeout=patience)
            return float(said)
        finally:
            for process in (receiver, guest):
                process.kill()
                process.wait()
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def main() -> None:
    """Measure in turns, and print medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=256, help="what each guest sends")
    parser.add_argument("--vcpus", type=int, default=1)
    parser.add_argument("--accel", choices=("auto", "kvm", "tcg"), default="auto")
    parser.add_argument("--patience", type=float, default=300, help="seconds for one guest")
    arguments = parser.parse_args()
    guest = Path(os.environ.get("RUNNER_GUEST_CACHE") or Path.home() / ".cache" / "instance-runner" / "guest")
    subprocess.run([PROJECT / "examples" / "quickstart" / "make-guest", guest], check=True)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        (path / "spec.toml").write_text(spec(guest, arguments.mib, arguments.vcpus, arguments.accel))
        script = subprocess.run(
            [RUNNER, "plan", "--show-argv", "--state-dir", path / "state", path / "spec.toml"],
            check=True,
            stdout=subprocess.PIPE,
        ).stdout
        (path / "by-hand").write_bytes(script)
        ways: dict[str, list[str | Path]] = {
            "instance-runner": [
                *("env", "--block-signal=TERM,INT,HUP", RUNNER, "run"),
                *("--termination-log", path / "end", "--state-dir", path / "state", path / "spec.toml"),
            ],
            "by hand": ["bash", path / "by-hand"],
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(arguments.rounds):
            for name in ways if number % 2 else reversed(ways):
                found[name].append(throughput(ways[name], arguments.patience))
                print(f"{name}: {found[name][-1]:.0f} MiB/s", flush=True)
    medians = {name: statistics.median(values) for name, values in found.items()}
    for name, values in found.items():
        print(f"{name:16} median {medians[name]:6.0f} MiB/s, from {min(values):.0f} to {max(values):.0f}")
    print(f"ratio {medians['instance-runner'] / medians['by hand']:.2f}")


if __name__ == "__main__":
    main()
