"""Requests a second to a disk in a Linux guest, compared with the same QEMU started by hand.

The command by hand is the output of ``plan --show-argv``: the same devices and options, with paths instead of
descriptors. Its threads are pinned to the CPUs of the plan, because nothing matters more than the CPU of a thread.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.figures import Figure
from tests.benchmarks.instances import BIN, BenchmarkSetup, linux_guest
from tests.benchmarks.namespaced_init import BenchmarkError

RUNNER = BIN / "instance-runner"
FRESH = ("unshare", "--fork", "--pid", "--mount-proc", "--net", "--kill-child")
DISK = 256 << 20
INIT = r"""#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t devtmpfs devtmpfs /dev 2>/dev/null
/bin/busybox --install -s /bin
export PATH=/bin
while read -r module; do insmod "/modules/$module.ko"; done </modules/order
now() { cut -d' ' -f1 /proc/uptime | tr -d .; }
measure() {
  name=$1 count=$2
  shift 2
  before=$(now)
  dd "$@" count="$count" 2>/dev/null || echo "bench: $name FAILED"
  echo "bench: $name $count $(($(now) - before)) end"
}
for round in 1 2 3; do
  measure read-4k 400 if=/dev/vda of=/dev/null bs=4k iflag=direct
  measure write-4k 400 if=/dev/zero of=/dev/vda bs=4k oflag=direct
  measure read-1m 20 if=/dev/vda of=/dev/null bs=1M iflag=direct
done
poweroff -f
"""
SPEC = """
[cpu]
accel = "{accel}"
[memory]
size = "256MiB"
[boot]
kernel = "{guest}/vmlinuz"
initrd = "{place}/initrd"
cmdline = "console=ttyS0 quiet no_timer_check"
[[disk]]
path = "{place}/disk"
"""


def prepared(place: Path, accel: str) -> Path:
    """Make guest, disk and spec in *place*."""
    guest = linux_guest()
    place.mkdir()
    (place / "init").write_text(INIT)
    (place / "init").chmod(0o755)
    cpio = ["cpio", "-o", "-H", "newc", "--quiet"]
    archive = subprocess.run(cpio, input=b"init", cwd=place, stdout=subprocess.PIPE, check=True).stdout
    (place / "initrd").write_bytes((guest / "initrd").read_bytes() + gzip.compress(archive))
    (place / "disk").write_bytes(b"\1" * DISK)
    spec = place / "spec.toml"
    spec.write_text(SPEC.format(accel=accel, guest=guest, place=place))
    return spec


def rates(console: str) -> dict[str, list[float]]:
    """Return the requests a second of each measurement that the guest reported."""
    found: dict[str, list[float]] = {}
    for name, count, hundredths in re.findall(r"bench: (\S+) (\d+) (\d+) end", console):
        found.setdefault(name, []).append(int(count) / (int(hundredths) / 100))
    if not found or "FAILED" in console:
        raise BenchmarkError(f"the guest has not measured:\n{console[-2000:]}")
    return found


def console_of(*argv: object, pin: int | None = None) -> str:
    """Run *argv* and return the guest's output; *pin* is the CPU of its vCPU where no other program pins it."""
    command = [*FRESH, *map(str, argv)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
        if pin is not None:
            os.sched_setaffinity(vcpu_of(run.pid), {pin})
        return run.communicate()[0].decode(errors="replace")


def vcpu_of(pid: int) -> int:
    """Return the vCPU thread of a descendant of process *pid*, as soon as it exists."""
    while True:
        waiting = [pid]
        while waiting:
            for task in Path(f"/proc/{waiting.pop()}/task").glob("*"):
                with contextlib.suppress(OSError):
                    if (task / "comm").read_text().startswith("CPU 0/"):
                        return int(task.name)
                    waiting += map(int, (task / "children").read_text().split())
        time.sleep(0.01)


def disk(setup: BenchmarkSetup) -> Iterator[Figure]:
    place = setup.directory / "disk"
    spec = prepared(place, setup.accel)
    state = ("--state-dir", place / "state")
    script = place / "by-hand.sh"
    shown = subprocess.run([RUNNER, "plan", "--show-argv", *state, spec], check=True, stdout=subprocess.PIPE)
    script.write_bytes(shown.stdout)
    run = ("env", "--block-signal=TERM,INT,HUP", RUNNER, "run", *state, spec)
    planned = subprocess.run([RUNNER, "plan", "--json", *state, spec], check=True, stdout=subprocess.PIPE)
    placement = json.loads(planned.stdout)["placement"]
    by_hand = ("taskset", "--cpu-list", placement["float_cpus"], "sh", script)
    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    for _ in range(setup.rounds(2, 1)):  # alternately, so that both run under the same load
        for into, console in (
            (ours, console_of(*run)),
            (theirs, console_of(*by_hand, pin=placement["pins"][0])),
        ):
            for name, found in rates(console).items():
                into.setdefault(name, []).extend(found)
    for name, found in ours.items():
        yield Figure(f"disk: {name}, requests/s", found, {"by hand": theirs[name]})
