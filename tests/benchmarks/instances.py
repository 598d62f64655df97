"""The measured instance, run by instance-runner and by a shell script that starts the same processes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.namespaced_init import BenchmarkError
from tests.support.program_runs import GuestFiles

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
UP = "guest up"
"""The output of the guest's first instructions."""

GRACE = 3
"""Seconds an instance has to end."""

Argv = tuple[str | Path, ...]


@dataclass(frozen=True)
class BenchmarkSetup:
    """The directory, the CPUs and the options of all measurements."""

    directory: Path
    accel: str
    quick: bool
    cpu: int
    """The CPU of the vCPU; everything else runs on *others*."""
    others: str

    @property
    def orphans(self) -> int:
        return self.rounds(20000, 4000)

    def rounds(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def spec(self, name: str, *, network: bool = True, share: bool = True, guest: str = "guest") -> Path:
        """Write an instance's spec and return its path."""
        lines = [
            "[cpu]",
            f'accel = "{self.accel}"',
            f'cpus = "{self.cpu}"',
            "[memory]",
            'size = "128MiB"',
            "[boot]",
            f'firmware = "{self.directory / guest}.rom"',
            "[shutdown]",
            f"grace = {GRACE}",
        ]
        if network:
            lines.append("[[network]]")
        if share:
            lines += ["[[share]]", 'tag = "share"', f'path = "{self.directory / "share"}"']
        path = self.directory / f"{name}.toml"
        path.write_text("\n".join(lines) + "\n")
        return path

    def runner(self, spec: Path, *options: str) -> Argv:
        """Return the command of instance-runner, as it is documented."""
        state = self.directory / f"{spec.stem}.state"
        blocked = ("env", "--block-signal=TERM,INT,HUP")
        return (*blocked, BIN / "instance-runner", "run", "--state-dir", state, *options, spec)

    def runner_by_phase(self, spec: Path) -> Argv:
        """Return the same through ``phased.py``, which prints when Python is up and when everything is imported."""
        env, block, _, *arguments = self.runner(spec, "--log-level", "debug")
        return (env, block, sys.executable, HERE / "phased.py", *arguments)

    def bare(self, spec: Path) -> Argv:
        """Return the script that starts the same children with the same arguments, and does nothing more."""
        directory = self.directory / f"{spec.stem}.bare"
        directory.mkdir(exist_ok=True)
        by_hand = subprocess.run(
            (BIN / "instance-runner", "plan", "--show-argv", "--state-dir", directory, spec),
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for name, text in _parts(by_hand).items():
            (directory / name).write_text(text)
        return ("bash", HERE / "bare.sh", directory, str(self.cpu), self.others)


def linux_guest() -> Path:
    """Return the directory of the quickstart's guest, a kernel and an initrd, made if they are not there."""
    return GuestFiles.made().kernel.parent


def _parts(by_hand: str) -> dict[str, str]:
    """Cut what ``plan --show-argv`` prints into the files of ``bare.sh``."""
    *lines, qemu = by_hand.replace("\\\n", "").splitlines()
    argv = shlex.split(qemu)
    console, monitor = ("-chardev", "stdio,id=console,mux=on,signal=off"), ("-mon", "chardev=console,mode=readline")
    _replace(argv, console, ("-chardev", "file,id=console,path=/proc/self/fd/7"))
    _replace(argv, monitor, ("-chardev", "stdio,id=qmp,signal=off", "-mon", "chardev=qmp,mode=control", "-S"))
    sockets = re.findall(r"--socket-path=(\S+)", by_hand)
    return {
        "networks.sh": "".join(f"{line}\n" for line in lines if line.startswith("ip ")),
        "daemons.sh": "".join(f"rm -f {socket}\n" for socket in sockets)
        + "".join(f"{line}\n" for line in lines if line.endswith("&")),
        "sockets": "".join(f"{socket}\n" for socket in sockets),
        "qemu.sh": f"exec {shlex.join(argv)}\n",
    }


def _replace(argv: list[str], old: tuple[str, str], new: tuple[str, ...]) -> None:
    at = next((at for at in range(len(argv)) if tuple(argv[at : at + 2]) == old), None)
    if at is None:
        raise BenchmarkError(f"instance-runner plan --show-argv prints no {shlex.join(old)!r}")
    argv[at : at + 2] = new


def build(directory: Path) -> None:
    """Make the programs and guests."""
    (directory / "share").mkdir()
    for name, options in (("guest", ()), ("without-button", ("--defsym", "NO_BUTTON=1"))):
        code = directory / f"{name}.o"
        subprocess.run(("as", "--32", *options, "-o", code, HERE / "guest.S"), check=True)
        linked = ("-Ttext", "0", "--oformat", "binary", "-o", directory / f"{name}.rom", code)
        subprocess.run(("ld", "-m", "elf_i386", *linked), check=True)
    subprocess.run(("gcc", "-O2", "-Wall", "-Wextra", "-o", directory / "storm", HERE / "storm.c"), check=True)


def cpus() -> tuple[int, str]:
    """Return the CPU for the vCPU and a list of the others."""
    *others, last = sorted(os.sched_getaffinity(0))
    return last, ",".join(map(str, others or [last]))
