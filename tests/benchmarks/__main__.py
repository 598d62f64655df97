"""The project's figures, measured in the same run as those of its peers."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.benchmarks.bench_memory import taking
from tests.benchmarks.disk import disk
from tests.benchmarks.figures import Figure, markdown
from tests.benchmarks.idle import idle, memory
from tests.benchmarks.instances import BenchmarkSetup, build, cpus
from tests.benchmarks.namespaced_init import BenchmarkError
from tests.benchmarks.network import network
from tests.benchmarks.reap import reap
from tests.benchmarks.renewal import renewal
from tests.benchmarks.start import start
from tests.benchmarks.stop import stop

PARTS: dict[str, Callable[[BenchmarkSetup], Iterator[Figure]]] = {
    "start": start,
    "memory": memory,
    "idle": idle,
    "stop": stop,
    "renewal": renewal,
    "reap": reap,
    "taking": taking,
    "disk": disk,
    "network": network,
}

QUIET = 0.25
"""Load average per CPU below which a machine is called quiet."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/benchmarks/run", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the same numbers, with every sample, for machines")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it works; some two minutes")
    parser.add_argument("--only", choices=PARTS, action="append", metavar="NAME", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--accel", choices=("tcg", "kvm"), default="tcg", help="default: %(default)s")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        Path(directory).chmod(0o755)  # QEMU may run as a user of its own
        build(Path(directory))
        setup = BenchmarkSetup(Path(directory), arguments.accel, arguments.quick, *cpus())
        try:
            return 0 if report(setup, arguments.only or list(PARTS), as_json=arguments.json) else 1
        except KeyboardInterrupt:
            return 128 + signal.SIGINT


def report(setup: BenchmarkSetup, parts: list[str], *, as_json: bool) -> bool:
    """Measure *parts*, print their figures, and return whether all of them could be measured.

    When a part fails, only its own figures are missing.
    """
    whole = True
    host, before = facts(setup), os.getloadavg()[0]
    figures: list[Figure] = []
    for part in parts:
        begun = time.monotonic()
        try:
            figures += list(PARTS[part](setup))
        except (BenchmarkError, subprocess.SubprocessError, OSError, ValueError) as error:
            print(f"tests/benchmarks/run: {part} could not be measured: {error}", file=sys.stderr)
            whole = False
        print(f"{part}: {time.monotonic() - begun:.0f} s", file=sys.stderr)
    host["load average"] += f" before, {os.getloadavg()[0]:.1f} after"
    quiet = before < QUIET * len(os.sched_getaffinity(0))
    remarks = () if quiet else ("This machine was not quiet: times are too long and differ from run to run.",)
    if as_json:
        print(json.dumps({"host": host, "figures": [figure.to_json() for figure in figures]}, indent=1))
        return whole
    print("Measured on " + ", ".join(f"{name} {value}" for name, value in host.items()) + ".")
    print(" ".join(("Medians; ratio = instance-runner ÷ each of the others.", *remarks)) + "\n")
    print("\n".join(markdown(figures)))
    missed = [figure for figure in figures if figure.met is False]
    print(f"\n{sum(figure.met is True for figure in figures)} goals met, {len(missed)} missed.")
    for figure in missed:
        print(f"Missed: {figure.name}: {figure.median:.1f}, goal {figure.goal}.")
    return whole


def facts(setup: BenchmarkSetup) -> dict[str, str]:
    """Return the machine and the versions of the programs."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = next((line.split(": ")[1] for line in cpuinfo.splitlines() if line.startswith("model name")), "?")
    qemu = subprocess.run(("qemu-system-x86_64", "--version"), check=True, capture_output=True, text=True).stdout
    return {
        "CPU": f"{model}, {len(os.sched_getaffinity(0))} CPUs",
        "Linux": platform.release(),
        "QEMU": f"{qemu.split()[3]} ({setup.accel})",
        "Python": platform.python_version(),
        "vCPU": f"on CPU {setup.cpu}",
        "everything else": f"on {setup.others}",
        "orphans": str(setup.orphans),
        "load average": f"{os.getloadavg()[0]:.1f}",
    }


if __name__ == "__main__":
    sys.exit(main())
