# ruff: noqa: N999 - each command's module has its name
"""The command ``try``: a guest with its console on this terminal, in namespaces of its own: the demo, a spec, or a disk."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from runner.base.arguments import argument_type
from runner.base.errors import UsageError
from runner.cli.generated_specs import LOCALHOST
from runner.cli.options import STATUS_HELP
from runner.spec.instance import LEAST_MEMORY
from runner.spec.ports import parse_ports
from runner.spec.rules import Rule, WrongValueError, integer, size

DEMO_GUEST = Path("/usr/share/instance-runner/demo")
"""Its directory in the image."""

OF_A_DISK = ("memory", "cpus", "login", "port")
"""The options that require ``--disk``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to *parser*."""
    parser.epilog = (
        "A guest is in namespaces of its own, which end with it; the machine's network is not changed. --disk needs no spec: its "
        "format and its firmware (UEFI if it has an EFI system partition, else BIOS) are those of its first bytes. The file is only "
        "read: what the guest writes is in memory, and lost at its end. It reaches what this machine reaches where passt is installed.\n\n"
        f"{STATUS_HELP}\n\n"
        "examples:\n"
        "  instance-runner try                                  in the image: docker run -it --rm --privileged gpu-instance try\n"
        "  instance-runner try --guest .cache/quickstart/guest  as examples/quickstart/run does, which makes the guest\n"
        "  instance-runner try --disk debian.qcow2 --login --port 2222:22\n"
        "  instance-runner try --disk debian.qcow2 --print-spec >spec.json; instance-runner try spec.json"
    )
    add = parser.add_argument
    add("spec", metavar="SPEC", nargs="?", help="the spec of the guest (default: the demo guest's)")
    add(
        "--guest",
        type=Path,
        metavar="DIR",
        help="where vmlinuz and initrd of the demo guest are, as examples/quickstart/make-guest makes them "
        f"(default: {DEMO_GUEST})",
    )
    add("--disk", type=Path, metavar="FILE", help="boot this disk image instead, raw or qcow2, or a block device")
    add("--memory", type=argument_type(_memory), metavar="SIZE", help="the guest's memory with --disk (default: 2GiB)")
    add(
        "--cpus",
        type=argument_type(_count),
        metavar="COUNT",
        help="the guest's vCPUs with --disk (default: 2, or 1 on a machine of one CPU)",
    )
    add(
        "--login",
        action="store_true",
        help="let cloud-init in the guest of --disk make a user; the prompt shows its password",
    )
    add(
        "--port",
        action="append",
        type=argument_type(_port),
        default=[],
        metavar="OURS:GUEST'S",
        help="forward a TCP port of 127.0.0.1 on this machine to one of the guest of --disk, by passt (repeatable)",
    )
    add("--print-spec", action="store_true", help="print the spec that is made for the demo or for --disk, and end")


def _ruled(rule: Rule[object], text: str, value: object) -> None:
    """Check *value*, written as *text*, by the rule of the spec's key. Raises ``ValueError``."""
    try:
        rule.parse(value)
    except ValueError as error:
        meant = error.suggestion.strip('"') if isinstance(error, WrongValueError) else ""
        question = f"did you mean {meant}? It takes" if meant else "it takes"
        raise ValueError(f"{text!r}: {question} {rule.allowed}") from None


def _memory(text: str) -> str:
    _ruled(size(LEAST_MEMORY), text, text)
    return text


def _count(text: str) -> int:
    number = int(text) if re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) else text
    _ruled(integer(1, 1024), text, number)
    return int(number)


def _port(text: str) -> str:
    forward = parse_ports(f"{LOCALHOST}/{text}") if ":" in text else None
    if forward is None or forward.count > 1 or forward.protocol != "tcp":
        raise ValueError(f"{text!r}: it takes a port of this machine and one of the guest, such as 2222:22")
    return text


def main(arguments: argparse.Namespace) -> int:
    """Run the guest until its console is detached, and return the exit status of ``run``."""
    _refuse_contradictions(arguments)
    from runner.cli import tried_guest  # here, because it imports much more than a parser needs

    if arguments.spec is not None:
        return tried_guest.run_spec(_absolute(arguments.spec))
    if arguments.disk is None:
        trial = tried_guest.demo(_absolute(arguments.guest or DEMO_GUEST))
    else:
        trial = tried_guest.of_disk(
            _absolute(arguments.disk),
            cpus=arguments.cpus,
            memory=arguments.memory or "2GiB",
            ports=arguments.port,
            login=arguments.login,
        )
    if arguments.print_spec:
        print(trial.text)
        return 0
    return tried_guest.run_trial(trial)


def _absolute(path: str | Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100 - a link stays what it is


def _refuse_contradictions(arguments: argparse.Namespace) -> None:
    """Raise :exc:`~runner.base.errors.UsageError` for arguments that do not go together, before any file is read."""
    guests = {"SPEC": arguments.spec, "--disk": arguments.disk, "--guest": arguments.guest}
    given = [name for name, value in guests.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"cannot try {' and '.join(given)} at once: each is a guest", remedy="leave one of them out")
    if arguments.spec == "-":
        raise UsageError("cannot read the spec from standard input: the guest's console has it", remedy="name a file")
    if arguments.disk is None:
        named = next((name for name in OF_A_DISK if getattr(arguments, name)), None)
        if named is not None:
            where = "write it into SPEC" if arguments.spec else "name the disk of a guest of yours with --disk"
            raise UsageError(f"cannot use --{named} without --disk: {where}")
    if arguments.spec is not None and arguments.print_spec:
        raise UsageError("cannot print the spec that is made: SPEC is used as it is", remedy="leave --print-spec out")
