"""The command ``ctl``: asks a running instance for its state or for a change, through its control socket."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import trio

from runner.cli.options import absolute_path, add_state_dir
from runner.errors import UsageError
from runner.kernel.sockets import CONTROL_SOCKET
from runner.protocol.controller_client import ask
from runner.table import aligned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give *parser* what this command takes."""
    parser.epilog = (
        "examples:\n"
        "  instance-runner ctl status\n"
        "  instance-runner ctl disk attach /dev/data format=raw serial=data iothread=true\n"
        "  instance-runner ctl disk grow disk1 20GiB\n"
        "  instance-runner ctl disk detach disk1\n"
        "  instance-runner ctl qmp query-status\n"
    )
    add_state_dir(parser)
    parser.add_argument("--json", action="store_true", help="the answer as JSON")
    parser.set_defaults(keys=[])
    topics = parser.add_subparsers(required=True, metavar="WHAT")
    status = topics.add_parser("status", help="what it is and does", epilog="example: instance-runner ctl status")
    status.set_defaults(method="status")
    cpus = topics.add_parser(
        "cpus",
        help="the number of vCPUs, which cannot change while the guest runs",
        epilog="example: instance-runner ctl cpus 8",
    )
    cpus.add_argument("count", type=int, metavar="COUNT")
    cpus.set_defaults(method="cpu.set")
    _add_qmp(
        topics.add_parser(
            "qmp",
            help="QMP commands to its QEMU, as far as they only show",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    _add_disk(topics.add_parser("disk", help="its disks", epilog="example: instance-runner ctl disk list"))


def _add_qmp(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "examples:\n"
        "  instance-runner ctl qmp query-commands             the commands that can be executed\n"
        "  instance-runner ctl qmp qom-list path=/machine\n"
        '  instance-runner ctl qmp qom-get \'{"path": "/machine", "property": "type"}\'\n'
        "  instance-runner ctl qmp --shell                    a prompt, with history and completion\n"
    )
    parser.add_argument("--shell", action="store_true", help="read commands from a prompt, or from standard input")
    parser.add_argument(
        "words", metavar="COMMAND", nargs="*", help="a QMP command, and its arguments as KEY=VALUE or a JSON object"
    )
    parser.set_defaults(method="qmp")


def _add_disk(parser: argparse.ArgumentParser) -> None:
    disk = parser.add_subparsers(required=True, metavar="DO")
    listing = disk.add_parser("list", help="the disks it has", epilog="example: instance-runner ctl disk list")
    listing.set_defaults(method="disk.list")
    attach = disk.add_parser(
        "attach",
        help="attach a file or block device, checked as one of the spec",
        epilog="example: instance-runner ctl disk attach /dev/data serial=data iothread=true",
    )
    attach.add_argument("path", metavar="PATH", type=absolute_path)
    attach.add_argument("keys", metavar="KEY=VALUE", nargs="*", help="other keys of a [[disk]]")
    attach.set_defaults(method="disk.attach")
    detach = disk.add_parser(
        "detach",
        help="take away a disk that was attached; the guest must release it",
        epilog="example: instance-runner ctl disk detach disk1",
    )
    detach.add_argument("name", metavar="NAME")
    detach.set_defaults(method="disk.detach")
    grow = disk.add_parser(
        "grow",
        help="make a disk larger, or tell the guest that its block device is",
        epilog="example: instance-runner ctl disk grow disk1 20GiB",
    )
    grow.add_argument("name", metavar="NAME")
    grow.add_argument(
        "size", metavar="SIZE", nargs="?", help="such as 20GiB; of a block device all there is without it"
    )
    grow.set_defaults(method="disk.grow")


def main(arguments: argparse.Namespace) -> int:
    """Send the request and print the answer."""
    if arguments.method == "qmp":
        from runner.cli.qmp import run  # here, because no other command needs asyncio

        run(Path(arguments.state_dir), arguments.words, shell=arguments.shell)
        return 0
    given = {name: getattr(arguments, name, None) for name in ("path", "name", "size", "count")}
    params = {name: value if name == "count" else str(value) for name, value in given.items() if value is not None}
    answer = trio.run(control, arguments.state_dir, arguments.method, {**parse_keys(arguments.keys), **params})
    print(json.dumps(answer, indent=1) if arguments.json else "\n".join(answer_lines(answer)))
    return 0


async def control(state_directory: PurePosixPath, method: str, params: Mapping[str, object]) -> object:
    """Return the answer of the instance whose *state_directory* this is.

    Raises :exc:`~runner.errors.RunnerError` when no instance listens there, or it refuses the request.
    """
    return await ask("the instance", state_directory / CONTROL_SOCKET, method, params)


def parse_keys(words: Iterable[str]) -> dict[str, object]:
    """Return the keys of a ``[[disk]]`` given as ``key=value``: values as in TOML, words also without quotes.

    Raises :exc:`~runner.errors.UsageError`.
    """
    found: dict[str, object] = {}
    for word in words:
        name, sign, text = word.partition("=")
        if not sign or not name or name in found:
            raise UsageError(f"cannot understand {word!r}: keys of a disk are given once each, as key=value")
        try:
            found[name] = tomllib.loads(f"value = {text}")["value"]
        except ValueError:
            found[name] = text
    return found


def answer_lines(answer: Any) -> Iterator[str]:
    """Yield the lines that show *answer* to a person: disks as a table."""
    match answer:
        case {"disks": list(disks), **rest}:
            yield from (f"{key:<11} {value}" for key, value in rest.items() if value is not None)
            yield from _table(disks)
        case [*disks]:
            yield from _table(disks)
        case {"name": str(), "path": str()}:
            yield from _table([answer])
        case dict() if not answer:
            pass
        case _:
            yield json.dumps(answer)


def _table(disks: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    rows = [("DISK", "SIZE", "FORMAT", "MODE", "ATTACHED", "PATH")]
    for disk in disks:
        mode = "ephemeral" if disk["ephemeral"] else "read-only" if disk["read_only"] else "writable"
        since = "released" if disk["released"] else "later" if disk["attached"] else "at start"
        rows.append((disk["name"], str(disk["size"]), disk["format"], mode, since, disk["path"]))
    return aligned(rows)
