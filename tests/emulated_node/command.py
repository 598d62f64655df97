"""``tests/node/run``: pytest files inside the emulated node, or a shell there."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

from tests.emulated_node import artefacts
from tests.emulated_node.artefacts import PROJECT
from tests.emulated_node.cache import EmulatedNodeError, fetch, say
from tests.emulated_node.machine import ALIVE_WITHIN, boot, terminal_size
from tests.emulated_node.shape import Shape
from tests.support.newest_qemu import newest_qemu

RUNS = PROJECT / ".cache" / "node"
KEPT_RUNS = 5
SYSTEMD_TESTS, ARTICLE_TESTS, DEVICE_TESTS = ["tests/node/systemd"], ["tests/node/article"], ["tests/node/devices"]
"""Tests that need systemd as PID 1, 128 CPUs, spare devices or our images as disks have their own folders."""
QEMU_DEVICE_TESTS = ["tests/node/qemu_update/devices"]
"""Tests that need the newest QEMU as a disk, spare devices, and the newest kernel, with KVM."""
QEMU_TESTS = ["tests/node/qemu_update", f"--ignore={QEMU_DEVICE_TESTS[0]}"]
"""Tests that need the newest QEMU as a disk."""
IMAGE_TESTS = ["tests/node/images", "tests/node/containerd", "tests/node/podman"]
OWN_FOLDERS = (*SYSTEMD_TESTS, *ARTICLE_TESTS, *DEVICE_TESTS, QEMU_TESTS[0], *IMAGE_TESTS)
TESTS = ["tests/node", *(f"--ignore={folder}" for folder in OWN_FOLDERS)]
ARTICLE = {"cpus": 128, "numa": 2, "memory": 8192, "boot_timeout": 900.0}
HANGING_SECONDS = 300
"""Seconds after which a test's stack is shown; after three times as long it fails, unless it names a time of its own."""
BOOTS = 2
"""Attempts to boot a node: one emulated boot with 16 CPUs in a few dozen ends before the kernel prints anything. No test has been
run then."""
NEVER_CAME_UP, NO_STATUS, NO_TESTS = 70, 71, 72
"""Exit statuses of ours, above pytest's (0-5): the emulated node failed, so the tests prove nothing."""


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    out = argparse.ArgumentParser(
        prog="tests/node/run",
        description="Run tests/node (or the pytest files given after --) in an emulated Kubernetes node.",
        epilog="What the run leaves (junit.xml, console.log, dmesg.txt, qemu.log) is in .cache/node/last.",
    )
    out.add_argument("--cpus", type=int, default=16, help="CPUs of the node (default 16)")
    out.add_argument("--numa", type=int, default=2, help="NUMA nodes, one socket each (default 2)")
    out.add_argument("--memory", type=int, default=4096, metavar="MIB", help="memory in MiB (default 4096)")
    out.add_argument("--accel", choices=("auto", "kvm", "tcg"), default="auto", help="default: KVM if it works")
    out.add_argument(
        "--emulator",
        type=Path,
        metavar="QEMU",
        help="the program that runs the node (default: the newest of Debian's backports)",
    )
    out.add_argument("--systemd", action="store_true", help="with systemd as PID 1; default tests: tests/node/systemd")
    out.add_argument(
        "--article",
        action="store_true",
        help="a host of 128 CPUs (0-31,64-95 and 32-63,96-127) with an instance of 40 vCPUs on 1-20,65-84: "
        "default tests: tests/node/article, which shows where every thread is; takes minutes",
    )
    out.add_argument(
        "--qemu",
        action="store_true",
        help="with the newest QEMU of Debian's backports as a disk; default tests: tests/node/qemu_update",
    )
    out.add_argument(
        "--devices",
        action="store_true",
        help="with an IOMMU and spare PCI devices on every NUMA node; default tests: tests/node/devices",
    )
    out.add_argument(
        "--kernel",
        choices=artefacts.KERNELS,
        default=artefacts.KERNEL,
        help="Debian's kernel of this version, built with the node's configuration (default %(default)s)",
    )
    out.add_argument("--shell", action="store_true", help="no tests: an interactive shell in the node")
    out.add_argument("--keep", action="store_true", help="after the tests, a shell in the node that ran them")
    out.add_argument("--here", action="store_true", help="run on this machine (root, cgroup v2): no node is booted")
    out.add_argument("--results", type=Path, metavar="DIR", help="default: a fresh one in .cache/node, kept for 5 runs")
    out.add_argument(
        "--disk",
        type=disk,
        action="append",
        default=[],
        metavar="SERIAL=FILE",
        help="a read-only disk; may be repeated",
    )
    out.add_argument("--boot-timeout", type=float, metavar="S", help="default: 60 s and 2 s a CPU")
    out.add_argument("--timeout", type=float, default=3600, metavar="S", help="for the tests (default %(default)s)")
    out.add_argument(
        "--alive-within",
        type=float,
        default=ALIVE_WITHIN,
        metavar="S",
        help="a node that gives no sign of life for so long has hung (default %(default)s)",
    )
    out.add_argument("pytest", nargs="*", metavar="-- PYTEST", help="arguments for pytest (default: tests/node)")
    return out


def disk(text: str) -> tuple[str, Path]:
    """Read the value of ``--disk``."""
    serial, _, file = text.partition("=")
    if not serial or not Path(file).is_file():
        raise ValueError(text)
    return serial, Path(file)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = parser()
    if arguments.parse_args(argv).article:
        arguments.set_defaults(**ARTICLE)
    options = arguments.parse_args(argv)
    chosen = {"article": ARTICLE_TESTS, "systemd": SYSTEMD_TESTS, "devices": DEVICE_TESTS, "qemu": QEMU_TESTS}
    default = next((tests for name, tests in chosen.items() if getattr(options, name)), TESTS)
    if options.qemu and options.devices:
        default = QEMU_DEVICE_TESTS
    options.pytest = pytest_arguments(options.pytest, default)
    try:
        if options.here:
            here(options.pytest)
        return in_node(options)
    except EmulatedNodeError as error:
        say(str(error))
        return NEVER_CAME_UP
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def pytest_arguments(given: Sequence[str], default: Sequence[str]) -> list[str]:
    """Return pytest's arguments: the ones given, and the *default* ones if no file or folder is among them."""
    named = any(not each.startswith("-") and (PROJECT / each.split("::")[0]).exists() for each in given)
    return ["-p", "no:cacheprovider", *given, *([] if named else default)]


def environment() -> dict[str, str]:
    """Return the variables of our environment that concern the tests."""
    return {name: value for name, value in os.environ.items() if name.startswith("RUNNER_") and "CACHE" not in name}


def here(arguments: Sequence[str]) -> None:
    """Become pytest on this machine."""
    os.chdir(PROJECT)
    if "RUNNER_NODE_ROM" not in os.environ:
        os.environ["RUNNER_NODE_ROM"] = str(fetch(artefacts.rom()))
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])


def in_node(options: argparse.Namespace) -> int:
    """Boot a node for *options* and return the status of what ran in it."""
    shape = Shape(options.cpus, options.numa, options.memory)
    interactive = options.shell or options.keep
    if interactive and not sys.stdin.isatty():
        raise EmulatedNodeError("cannot give a shell: standard input is not a terminal")
    run = new_run() if options.results is None else options.results.resolve()
    run.mkdir(parents=True, exist_ok=True)
    shutil.copy(fetch(artefacts.rom()), run / "rom")
    kernel = fetch(artefacts.kernel(options.kernel))
    (run / "guest-kernel").write_bytes(artefacts.guest_kernel(kernel))
    (run / "guest-initrd").write_bytes(artefacts.guest_initrd())
    columns, lines = terminal_size()
    variables = {
        **environment(),
        "COLUMNS": str(columns),
        "LINES": str(lines),
        "PYTHONPATH": "/project",
        "RUNNER_NODE": "emulated",
        "RUNNER_NODE_ROM": "/results/rom",
        "RUNNER_NODE_GUEST_KERNEL": "/results/guest-kernel",
        "RUNNER_NODE_GUEST_INITRD": "/results/guest-initrd",
    }
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    if not options.shell:
        command = [
            # so that it shows what failed before, and where it is
            *(() if interactive else ("timeout", "--signal=INT", f"{0.95 * options.timeout:g}")),
            *("python3", "-m", "pytest", "--junitxml=/results/junit.xml"),
            *("-o", f"faulthandler_timeout={HANGING_SECONDS}", "-o", f"timeout={3 * HANGING_SECONDS}"),
            f"--color={'yes' if sys.stdout.isatty() else 'no'}",
            *options.pytest,
        ]
        (run / "job").write_text(f"cd /project\n{exports}exec {shlex.join(command)}\n")
    if interactive:
        term = shlex.quote(os.environ.get("TERM", "linux"))
        (run / "shell").write_text(f"{exports}stty rows {lines} cols {columns}\nexport PS1='node:\\w# ' TERM={term}\n")
    for more in reversed(range(BOOTS)):
        outcome = boot(
            shape,
            options.accel,
            run,
            kernel=kernel,
            disks=dict(options.disk) | ({"qemu": fetch(newest_qemu())} if options.qemu else {}),
            interactive=interactive,
            systemd=options.systemd,
            devices=options.devices,
            emulator=options.emulator,
            boot_seconds=options.boot_timeout or (60 + 2 * shape.cpus) * (2 if options.systemd else 1),
            job_seconds=options.timeout,
            alive_within=options.alive_within,
        )
        if outcome.up_after is not None:
            break
        output = last_lines(run / "qemu.log", run / "console.log")
        say(f"the node never came up{', once more' if more else ''}; its last output:\n{output}")
    else:
        return NEVER_CAME_UP
    if outcome.status is None:
        say(f"the node gave no status; its kernel's last output:\n{last_lines(run / 'qemu.log', run / 'console.log')}")
        return NO_STATUS
    if outcome.status == 0 and not options.shell and executed(run / "junit.xml") == 0:
        say("no test was executed: that is not a pass")
        return NO_TESTS
    return outcome.status


def new_run(runs: Path = RUNS) -> Path:
    """Return a fresh directory for a run's results, locked while this process lives; remove all but the last few others."""
    runs.mkdir(parents=True, exist_ok=True)
    run = runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    run.mkdir()
    # Its descriptor is this process's until its end.
    fcntl.flock(os.open(run, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_SH)
    last = runs / f".last-{os.getpid()}"
    last.symlink_to(run.name)
    last.rename(runs / "last")
    for old in sorted(path for path in runs.iterdir() if path.is_dir() and not path.is_symlink())[:-KEPT_RUNS]:
        remove_run(old)
    return run


def remove_run(run: Path) -> None:
    """Remove the results of *run* unless it still goes on."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError):
        fd = os.open(run, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(run, ignore_errors=True)
        finally:
            os.close(fd)


def executed(report: Path) -> int:
    """Return how many tests of a JUnit report were run, that is, neither skipped nor deselected."""
    try:
        suites = list(ET.parse(report).getroot().iter("testsuite"))  # noqa: S314 - pytest's own report
    except (FileNotFoundError, ET.ParseError):
        return 0
    return sum(int(suite.get("tests", "0")) - int(suite.get("skipped", "0")) for suite in suites)


def last_lines(*logs: Path, count: int = 30) -> str:
    """Return the end of each log, without QEMU's warning for each CPU feature that TCG does not emulate."""
    return "\n".join(
        line
        for log in logs
        if log.exists()
        for line in [
            line
            for line in log.read_text(errors="replace").replace("\r", "").splitlines()
            if "TCG doesn't support requested feature" not in line
        ][-count:]
    )


if __name__ == "__main__":
    sys.exit(main())
