"""The command ``ctl``: asks a running instance for its state or for a change, through its control socket."""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from runner.base.arguments import HelpFormatter, argument_type, sentence
from runner.base.errors import HostError, Status, escaped
from runner.base.table import aligned, duration
from runner.cli.instance_requests import ask_instance
from runner.cli.options import absolute_path, add_json, add_state_dir, parse_pairs
from runner.instance.control.method_table import METHODS
from runner.spec.rules import format_size

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - it has no other name

QMP_EXAMPLES = """\
examples:
  instance-runner ctl qmp query-commands             the commands that can be executed
  instance-runner ctl qmp qom-list path=/machine
  instance-runner ctl qmp qom-get '{"path": "/machine", "property": "type"}'
  instance-runner ctl qmp --shell                    a prompt, with history and completion
"""


UPGRADE_EXAMPLE = """\
the digest is what this prints in DIR, behind sha256:
  find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum

example: instance-runner ctl upgrade --from /var/lib/instance/runner-0.2.0 --digest sha256:0123...
"""


QEMU_UPDATE_EXAMPLE = """\
examples:
  instance-runner ctl qemu-update --check
  instance-runner ctl qemu-update --qemu /opt/qemu-11.1/bin/qemu-system-x86_64 --digest sha256:0123...
"""


CPUS_EXAMPLES = """\
more: the pod has got more CPUs, and the guest gets vCPUs on them; it must bring them online.
fewer: the guest releases the last ones; do that before the pod gets fewer CPUs.

examples:
  instance-runner ctl cpus
  instance-runner ctl cpus 8
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to *parser*."""
    parser.epilog = (
        "examples:\n"
        "  instance-runner ctl status\n"
        "  instance-runner ctl cpus 8\n"
        "  instance-runner ctl disk attach /dev/data format=raw serial=data iothread=true\n"
        "  instance-runner ctl disk grow disk1 20GiB\n"
        "  instance-runner ctl disk detach disk1\n"
        "  instance-runner ctl qmp query-status\n"
    )
    _add_shared(parser, shown=True)
    parser.set_defaults(keys=[])
    topics = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_command(
        topics,
        "status",
        "show its state: guest, placement, network, console, what is in progress",
        "example: instance-runner ctl status",
    )
    cpus = _add_command(
        topics, "cpus", "show its vCPUs and their CPUs, or change the number of vCPUs", CPUS_EXAMPLES, method="cpu.list"
    )
    cpus.add_argument(
        "count",
        type=argument_type(_count),
        nargs="?",
        metavar="COUNT",
        help="the new number of vCPUs; without it they are shown",
    )
    _add_qmp(topics)
    disk = _add_command(
        topics, "disk", "show, attach, detach or enlarge its disks", "example: instance-runner ctl disk list"
    )
    _add_disk_commands(disk.add_subparsers(required=True, metavar="COMMAND"))
    _add_upgrade(topics)
    _add_qemu_update(topics)


def _add_command(
    commands: _Commands, name: str, purpose: str, epilog: str, method: str = ""
) -> argparse.ArgumentParser:
    """Add the command *name* to *commands*, which also accepts the options of ``ctl`` itself, anywhere on the line.

    It calls the control socket's *method*, by default the one of its name, unless it has commands of its own.
    """
    parser = commands.add_parser(
        name,
        help=purpose,
        description=sentence(purpose),
        epilog=epilog,
        formatter_class=HelpFormatter,
    )
    _add_shared(parser, shown=False)
    parser.set_defaults(method=method or name)
    return parser


def _add_shared(parser: argparse.ArgumentParser, *, shown: bool) -> None:
    add_state_dir(parser, shown=shown)
    add_json(parser, "the answer", shown=shown)


def _add_qmp(commands: _Commands) -> None:
    parser = _add_command(commands, "qmp", "execute QMP commands of its QEMU that change nothing", QMP_EXAMPLES)
    parser.add_argument("--shell", action="store_true", help="read commands from a prompt, or from standard input")
    parser.add_argument(
        "words",
        metavar="COMMAND",
        nargs="*",
        default=[],
        help="a QMP command, and its arguments as KEY=VALUE or a JSON object",
    )


def _add_upgrade(commands: _Commands) -> None:
    purpose = "replace its runner by another version; the guest runs on"
    parser = _add_command(commands, "upgrade", purpose, UPGRADE_EXAMPLE)
    parser.add_argument(
        "--from",
        dest="directory",
        type=absolute_path,
        required=True,
        metavar="DIR",
        help="the directory with the program's packages, which only root may change",
    )
    parser.add_argument(
        "--digest", required=True, metavar="sha256:HEX", help="the digest of all files in DIR, made as below"
    )


def _add_qemu_update(commands: _Commands) -> None:
    purpose = "replace its QEMU by another version; the guest runs on"
    parser = _add_command(commands, "qemu-update", purpose, QEMU_UPDATE_EXAMPLE, method="qemu.update")
    parser.add_argument(
        "--check", action="store_true", help="print the reasons why it could not be done, and change nothing"
    )
    parser.add_argument(
        "--qemu",
        type=absolute_path,
        metavar="PROGRAM",
        help="the QEMU that takes over, which only root may change (default: the one of the start)",
    )
    parser.add_argument(
        "--digest",
        metavar="sha256:HEX",
        help="refuse a QEMU with another digest than this, which `sha256sum PROGRAM` prints",
    )
    parser.add_argument(
        "--no-way-back",
        action="store_true",
        help="update also with devices, although a failed update then ends the guest",
    )


def _count(text: str) -> int:
    if re.fullmatch(r"[0-9]{1,4}", text, re.ASCII) is None:
        raise ValueError(f"{text!r} is no number of vCPUs such as 4")
    return int(text)


def _add_disk_commands(commands: _Commands) -> None:
    _add_command(commands, "list", "show its disks", "example: instance-runner ctl disk list", method="disk.list")
    attach = _add_command(
        commands,
        "attach",
        "attach a file or block device; it is checked as a disk of the spec is",
        "example: instance-runner ctl disk attach /dev/data serial=data iothread=true",
        method="disk.attach",
    )
    attach.add_argument("path", metavar="PATH", type=absolute_path, help="the file or block device")
    attach.add_argument("keys", metavar="KEY=VALUE", nargs="*", default=[], help="other keys of a [[disk]]")
    detach = _add_command(
        commands,
        "detach",
        "detach a disk that was attached here; the guest must release it",
        "example: instance-runner ctl disk detach disk1",
        method="disk.detach",
    )
    detach.add_argument("name", metavar="NAME", help="its name in `ctl disk list`")
    grow = _add_command(
        commands,
        "grow",
        "make a disk larger, or tell the guest that its block device has become larger",
        "example: instance-runner ctl disk grow disk1 20GiB",
        method="disk.grow",
    )
    grow.add_argument("name", metavar="NAME", help="its name in `ctl disk list`")
    grow.add_argument(
        "size", metavar="SIZE", nargs="?", help="its new size, such as 20GiB (default: all of a block device)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Send the request and print the answer."""
    if arguments.method == "qmp":
        from runner.cli.ctl_qmp import run  # here, because no other command needs asyncio

        run(Path(arguments.state_dir), arguments.words, shell=arguments.shell)
        return 0
    if arguments.method == "cpu.list" and arguments.count is not None:
        arguments.method = "cpu.set"
    if arguments.method == "qemu.update" and arguments.check:
        arguments.method = "qemu.check"
    if arguments.method == "upgrade":
        from runner.cli.ctl_upgrade import upgrade  # here, because it is seldom used

        answer = trio.run(upgrade, arguments.state_dir, arguments.directory, arguments.digest)
    else:
        given = {name: getattr(arguments, name) for name in METHODS[arguments.method].params}
        params = {
            name: value if isinstance(value, int) else str(value) for name, value in given.items() if value is not None
        }
        answer = trio.run(ask_instance, arguments.state_dir, arguments.method, {**parse_keys(arguments.keys), **params})
    try:
        lines = [json.dumps(answer, indent=1)] if arguments.json else [*map(escaped, answer_lines(answer))]
        status = _status_of(arguments.method, answer)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        sentence = f"cannot understand the instance: it answered {arguments.method!r} with {answer!r:.200}"
        raise HostError(sentence, remedy="see whether the runner of its container has another version") from error
    print("\n".join(lines))
    return status


def _status_of(method: str, answer: Any) -> int:
    if method == "status" and answer.get("qemu", {}).get("error"):
        return Status.FAILED
    return Status.REFUSED if answer.get("refused") else 0


def parse_keys(words: Iterable[str]) -> dict[str, object]:
    """Return the keys of a ``[[disk]]`` given as ``key=value``: values as in TOML, words even without quotes.

    Raises :exc:`~runner.base.errors.UsageError`.
    """

    def value(text: str) -> object:
        try:
            parsed = tomllib.loads(f"value = {text}")["value"]
            json.dumps(parsed)
        except (RecursionError, TypeError, ValueError):  # a word, and a date, which the instance refuses as a text
            return text
        return parsed

    return parse_pairs(words, value, "keys of a disk are given once each, as key=value")


def answer_lines(answer: Any) -> Iterator[str]:
    """Yield the lines that show *answer* to a person: a state, disks as a table."""
    match answer:
        case {"disks": list(disks), "placement": dict()}:
            yield from aligned(list(_state(answer)))
            if disks:
                yield ""
                yield from _table(disks)
        case {"vcpus": list(vcpus), "unused": str()}:
            yield from _vcpus(vcpus, answer)
        case {"disks": [*disks]}:
            yield from _table(disks)
        case {"name": str(), "path": str()}:
            yield from _table([answer])
        case {"version": int(), **rest} if not rest:
            pass
        case _:
            yield from _program_lines(answer)


def _program_lines(answer: Any) -> Iterator[str]:
    """Yield lines that describe a program that has taken over, or could do so."""
    match answer:
        case {"runner": {"generation": int(generation), "digest": str(digest)}}:
            yield from aligned([("generation", str(generation)), ("program", digest or "the image's")])
        case {
            "running": str(running),
            "program": str(program),
            "program_version": str(version),
            "refused": list(reasons),
        }:
            yield from aligned([("running", running), ("program", f"{program}, {version or 'of unknown version'}")])
            yield from (f"refused: {reason}" for reason in reasons)
            if not reasons:
                yield "QEMU can be updated"
        case {"from": str(before), "to": str(version), "pause_ms": int(pause)}:
            yield f"QEMU {before} is updated to {version}; the guest paused for {pause} ms"
        case _:
            yield json.dumps(answer)


def _state(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield pairs of a label and a value that describe an instance."""
    yield "name", status["name"]
    pod = status["pod"]
    if pod["name"]:
        yield "pod", f"{pod['namespace']}/{pod['name']}" + (f" on node {pod['node']}" if pod["node"] else "")
    uptime = status["uptime"]
    yield "guest", status["guest"] + ("" if uptime is None else f" for {duration(uptime)}")
    yield "ready", "yes" if status["ready"] else f"no: {escaped(status['not_ready'])}"
    placement = status["placement"]
    most = status.get("most_vcpus")  # an older runner cannot have more
    yield "vCPUs", f"{status['vcpus']} on CPUs {placement['cpus']}" + ("" if most is None else f", at most {most}")
    yield "memory", format_size(status["memory"])
    yield "accelerator", f"{status['accelerator']}, CPU model {status['cpu_model']}"
    reason = f" ({escaped(placement['guarantee_reason'])})" if placement["guarantee_reason"] else ""
    misplaced = "; ".join(map(escaped, placement["misplaced"]))
    holds = misplaced or f"every thread is in its place, the others on CPUs {placement['float_cpus']}"
    yield "placement", f"{placement['backend']}, guarantee {placement['guarantee']}{reason}: {holds}"
    for network in status["networks"]:
        addresses = ", ".join(network["addresses"]) or "address not known here"
        yield "network", f"{addresses} ({network['mode']}, {network['mac']})"
    yield "guest agent", status["agent"]
    yield "restarts", ", ".join(f"{role} {count}" for role, count in status["restarts"].items()) or "none"
    yield "console log", status["console_log"]
    if (written := status.get("console_bytes")) is not None:  # an older runner does not count it
        yield (
            "console",
            f"{written} bytes since the start" + (f"; {mute}" if (mute := status["console_silent"]) else ""),
        )
        resets = status["resets"]
        yield "resets", f"{resets['total']}, {resets['last_minute']} in the last minute" if resets["total"] else "none"
    yield "disk slots", f"{status['free_slots']} free"
    if change := status.get("change"):
        yield "in progress", f"{escaped(change['what'])}, for {duration(change['seconds'])}"
    if runner := status.get("runner"):  # an older runner does not report it
        yield "runner", runner["version"] + (f", {_renewal(runner)}" if runner["outcome"] else "")


def _renewal(runner: Mapping[str, Any]) -> str:
    program = runner["digest"] or "the image's"
    words = {"renewed": "renewed", "fell_back": "not renewed", "resumed": "resumed after a fault"}
    last = words.get(runner["outcome"], runner["outcome"])
    reason = f": {escaped(runner['reason'])}" if runner["reason"] else ""
    return f"{program}, generation {runner['generation']}, {last}{reason}"


def _vcpus(vcpus: Iterable[Mapping[str, Any]], answer: Mapping[str, Any]) -> Iterator[str]:
    rows = [("VCPU", "THREAD", "CPU", "PLUGGED")]
    for each in vcpus:
        since = "later" if each["plugged_later"] else "at start"
        rows.append((str(each["vcpu"]), str(each["thread"]), str(each["cpu"]), since))
    yield from aligned(rows)
    yield ""
    yield from aligned([("unused CPUs", answer["unused"] or "none"), ("most vCPUs", str(answer["most"]))])
    if pause := answer.get("pause_ms"):
        yield f"the guest paused for {pause:g} ms"


def _table(disks: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    rows = [("DISK", "SIZE", "FORMAT", "MODE", "ATTACHED", "PATH")]
    for disk in disks:
        mode = "ephemeral" if disk["ephemeral"] else "read-only" if disk["read_only"] else "writable"
        since = "released" if disk["released"] else "later" if disk["attached"] else "at start"
        size = "?" if disk["size"] is None else format_size(disk["size"])
        rows.append((disk["name"], size, disk["format"], mode, since, disk["path"]))
    return aligned(rows)
