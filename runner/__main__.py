"""The command line: arguments → command → exit status. The only exit, the only logging set-up."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path, PurePosixPath

import trio

from runner.arguments import argument_type
from runner.errors import RunnerError, Status, UsageError, explain
from runner.instance.init import ASK_TO_STOP, ExitReport, Streams, plan_here, run_as_init
from runner.kernel.nonblocking_writer import NonBlockingWriter, dropped_message
from runner.plan.argv.qemu import pasteable
from runner.plan.render import plan_json, plan_lines
from runner.protocol.logs import FORMATS, JsonConsole, LogHandler, json_of_dropped

log = logging.getLogger("runner")

TERMINATION_LOG = Path("/dev/termination-log")
"""Where Kubernetes looks for a container's last words (``terminationMessagePath``)."""

STATUS_HELP = "exit statuses:\n" + "\n".join(f"  {status.value:3} {status.name.lower()}" for status in Status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that *argv* names and return its exit status."""
    _fill_standard_descriptors()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale without arrows is no reason to fail
            stream.reconfigure(errors="backslashreplace")
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.command(arguments)
        print(end="", flush=True)  # here, where it is known what to do when nobody reads on
    except RunnerError as error:
        print(f"{parser.prog}: {explain(error)}", file=sys.stderr)
        return error.status
    except BrokenPipeError:  # whoever read our output has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"{parser.prog}: cannot write the output: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where what is still buffered goes
        return Status.USAGE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return status


def _fill_standard_descriptors() -> None:
    """Open /dev/null where descriptor 0, 1 or 2 is closed, before something of ours gets that number and is written to."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # noqa: PLR2004 - standard error
        os.set_inheritable(fd, True)
    os.close(fd)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="instance-runner",
        description="Runs one virtual machine in one pod, every vCPU alone on its own CPU.",
        epilog=f"{STATUS_HELP}\n\n"
        "examples:\n"
        "  instance-runner check /etc/instance/spec.toml\n"
        "  instance-runner plan /etc/instance/spec.toml\n"
        "  env --block-signal=TERM,INT,HUP instance-runner run /etc/instance/spec.toml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        help="run an instance as PID 1, until it ends or SIGTERM ends it",
        epilog=f"{STATUS_HELP}\n\n"
        "example: env --block-signal=TERM,INT,HUP instance-runner run /etc/instance/spec.toml --http :9441",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_spec(run)
    run.add_argument(
        "--not-pid1", action="store_true", help="run although this is not PID 1 (development): become a subreaper"
    )
    run.add_argument(
        "--termination-log",
        type=Path,
        metavar="FILE",
        help=f"write how it ended there, as one JSON line (default: {TERMINATION_LOG} if it exists)",
    )
    run.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="what is logged (default: info)",
    )
    run.add_argument(
        "--log-format",
        choices=FORMATS,
        default="text",
        help="events on standard error and the console on standard output as they are, or each line of both as a JSON object "
        "(default: text)",
    )
    run.add_argument(
        "--http",
        type=argument_type(_address),
        metavar="ADDRESS:PORT",
        help="answer /healthz, /readyz and /metrics there; :PORT is every address, also the one where a guest in mode private "
        "finds its gateway (default: nowhere)",
    )
    run.set_defaults(command=_run)

    _add_plan(commands)
    _add_inspect(commands.add_parser("inspect", help="say where every thread of a running instance is, and judge it"))
    _add_check(commands)
    _add_ctl(commands)
    _add_words(commands)
    _add_console(commands)
    return parser


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser(
        "plan",
        help="say what run would do here, or what a Kubernetes node would do with a pod; touches nothing",
        epilog="examples:\n"
        "  instance-runner plan spec.toml --show-argv > by-hand.sh\n"
        "  instance-runner plan --record host.json\n"
        "  instance-runner plan --node kubelet.yaml --host host.json --pod pod.yaml --svg node.svg\n"
        "  instance-runner plan --node kubelet.yaml --pod pod.yaml --state /var/lib/kubelet \\\n"
        "    --what-if topologyManagerPolicy=restricted --what-if cpuManagerPolicyOptions.full-pcpus-only=true\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_spec(plan, nargs="?")
    plan.add_argument("--json", action="store_true", help="the plan as JSON")
    plan.add_argument("--show-argv", action="store_true", help="the machine of SPEC as a shell script to paste")
    node = plan.add_argument_group("a Kubernetes node")
    node.add_argument("--node", metavar="FILE", help="the kubelet's configuration (KubeletConfiguration, YAML)")
    node.add_argument(
        "--pod", metavar="FILE", action="append", default=[], help="manifests, in the order the pods come (repeatable)"
    )
    node.add_argument(
        "--state",
        metavar="PATH",
        action="append",
        default=[],
        help="cpu_manager_state or memory_manager_state, or the kubelet's directory with both (repeatable)",
    )
    node.add_argument("--kubelet", metavar="VERSION", help="the kubelet's version (default: the newest that is known)")
    node.add_argument(
        "--device",
        metavar="RESOURCE=COUNT@NUMA_NODE",
        action="append",
        default=[],
        help="devices of this host, such as nvidia.com/gpu=4@0 (repeatable)",
    )
    node.add_argument(
        "--what-if",
        metavar="KEY=VALUE[,KEY=VALUE]",
        action="append",
        default=[],
        help="compare with other values in the kubelet's configuration (repeatable)",
    )
    node.add_argument("--svg", metavar="FILE", help="draw the node there")
    host = plan.add_argument_group("the host, without which it is this one")
    where = host.add_mutually_exclusive_group()
    where.add_argument("--host", metavar="FILE", help="a recorded host")
    where.add_argument("--sys", metavar="ROOT", type=Path, help="the directory that has its sys and proc (default: /)")
    host.add_argument("--record", metavar="FILE", help="write the host down, for --host; - is standard output")
    plan.set_defaults(command=_plan)


def _add_inspect(inspect: argparse.ArgumentParser) -> None:
    inspect.description = (
        "In an instance's container: that instance. On the node, as root: every instance that the controller placed. "
        f"The exit status is {Status.FINDINGS.value} if a rule is violated, and 0 if not, also where one cannot be judged."
    )
    inspect.epilog = (
        "examples:\n"
        "  kubectl exec POD -- instance-runner inspect\n"
        "  instance-runner inspect --watch 2\n"
        "  instance-runner inspect 3ceda12c --json"
    )
    inspect.formatter_class = argparse.RawDescriptionHelpFormatter
    add = inspect.add_argument
    add("instance", metavar="UUID", nargs="?", default="", help="on the node: only instances whose uuid begins so")
    add("--json", action="store_true", help="the report as JSON")
    add(
        "--watch",
        type=_seconds,
        nargs="?",
        const=5.0,
        metavar="SECONDS",
        help="again and again until Ctrl-C (default: every 5 s); where the output is no terminal, only what changes",
    )
    _add_state_dir(inspect)
    add("--root", type=Path, default=Path("/sys/fs/cgroup/stelia"), metavar="DIR", help="the controller's cgroup")
    add("--cgroupfs", type=Path, default=Path("/sys/fs/cgroup"), metavar="DIR", help="where cgroup v2 is mounted")
    add("--kubelet-dir", type=Path, default=Path("/var/lib/kubelet"), metavar="DIR", help="the kubelet's --root-dir")
    inspect.set_defaults(command=_inspect)


def _add_words(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    completion = commands.add_parser(
        "completion",
        help="print what makes a shell complete this command and the controller's",
        epilog="examples:\n"
        "  source <(instance-runner completion bash)      in ~/.bashrc\n"
        "  source <(instance-runner completion zsh)       in ~/.zshrc\n"
        "  instance-runner completion fish > ~/.config/fish/completions/instance-runner.fish",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="which shell")
    completion.set_defaults(command=_completion)
    manual = commands.add_parser(
        "manual",
        help="print a manual page, in the language of man",
        epilog="example: instance-runner manual instance-runner-spec.5 | man -l -",
    )
    manual.add_argument(
        "page",
        nargs="?",
        choices=("instance-runner.1", "instance-runner-spec.5", "instance-cgroup-controller.8"),
        default="instance-runner.1",
        help="which page (default: %(default)s)",
    )
    manual.set_defaults(command=_manual)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.1 <= (seconds := float(text)) <= 86400:  # noqa: PLR2004 - nobody watches more often, or only once a day
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 86400")


def _add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    check = commands.add_parser(
        "check",
        help="say whether this node, pod or machine is fit for instances, and what mends it; changes nothing",
        epilog=f"exit status: 0, or {Status.FINDINGS.value} when something keeps an instance from starting; warnings do not.\n\n"
        "examples:\n"
        "  instance-runner check\n"
        "  instance-runner check /etc/instance/spec.toml --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_spec(check, nargs="?")
    check.add_argument("--json", action="store_true", help="the findings as JSON")
    check.add_argument(
        "--kubelet-dir",
        type=Path,
        default=Path("/var/lib/kubelet"),
        metavar="DIR",
        help="the kubelet's --root-dir (default: %(default)s)",
    )
    check.add_argument(
        "--socket",
        type=_absolute,
        metavar="PATH",
        help="where the controller listens (default: the spec's cpu.controller)",
    )
    check.set_defaults(command=_check)


def _add_ctl(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    ctl = commands.add_parser(
        "ctl",
        help="ask a running instance, from inside its container: its state, disks that come, go and grow",
        epilog="examples:\n"
        "  instance-runner ctl status\n"
        "  instance-runner ctl disk attach /dev/data format=raw serial=data iothread=true\n"
        "  instance-runner ctl disk grow disk1 20GiB\n"
        "  instance-runner ctl disk detach disk1\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_state_dir(ctl)
    ctl.add_argument("--json", action="store_true", help="the answer as JSON")
    ctl.set_defaults(command=_ctl, keys=[])
    topics = ctl.add_subparsers(required=True, metavar="WHAT")
    topics.add_parser("status", help="what it is and does", epilog="example: instance-runner ctl status").set_defaults(
        method="status"
    )
    cpus = topics.add_parser(
        "cpus",
        help="the number of vCPUs, which cannot change while the guest runs",
        epilog="example: instance-runner ctl cpus 8",
    )
    cpus.add_argument("count", type=int, metavar="COUNT")
    cpus.set_defaults(method="cpu.set")
    disks = topics.add_parser("disk", help="its disks", epilog="example: instance-runner ctl disk list")
    disk = disks.add_subparsers(required=True, metavar="DO")
    disk.add_parser("list", help="the disks it has", epilog="example: instance-runner ctl disk list").set_defaults(
        method="disk.list"
    )
    attach = disk.add_parser(
        "attach",
        help="attach a file or block device, checked as one of the spec",
        epilog="example: instance-runner ctl disk attach /dev/data serial=data iothread=true",
    )
    attach.add_argument("path", metavar="PATH", type=_absolute)
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


def _ctl(arguments: argparse.Namespace) -> int:
    from runner.cli.ctl import answer_lines, control, parse_keys

    given = {name: getattr(arguments, name, None) for name in ("path", "name", "size", "count")}
    params = {name: value if name == "count" else str(value) for name, value in given.items() if value is not None}
    answer = trio.run(control, arguments.state_dir, arguments.method, {**parse_keys(arguments.keys), **params})
    print(json.dumps(answer, indent=1) if arguments.json else "\n".join(answer_lines(answer)))
    return 0


def _add_console(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    console = commands.add_parser(
        "console",
        help="attach this terminal to the serial console of the instance in this container",
        epilog="example: kubectl exec -it POD -- instance-runner console",
    )
    mode = console.add_mutually_exclusive_group()
    mode.add_argument("--read-only", action="store_true", help="type nothing")
    mode.add_argument(
        "--steal", action="store_true", help="write in the place of whoever does; that one goes on reading"
    )
    console.add_argument(
        "--detach-key", default="ctrl-]", metavar="KEY", help="what ends it, the guest runs on (default: %(default)s)"
    )
    _add_state_dir(console)
    console.set_defaults(command=_console)


class _Version(argparse.Action):
    """Says the version; what reads it is imported only now, because that takes as long as the rest of this command line."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata

        print(parser.prog, metadata.version("instance-runner"))
        parser.exit()


def _add_spec(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    parser.add_argument(
        "spec",
        metavar="SPEC",
        nargs=nargs,
        help="the instance's document, TOML or JSON; but for run, - is standard input",
    )
    _add_state_dir(parser)


def _add_state_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state-dir",
        type=_absolute,
        default=PurePosixPath("/run/instance-runner"),
        metavar="DIR",
        help="where receipt.json and console.log are (default: %(default)s)",
    )


def _address(text: str) -> tuple[str, int]:
    from runner.protocol.http import parse_address  # here, because few ask for pages

    return parse_address(text)


def _absolute(text: str) -> PurePosixPath:
    return PurePosixPath(os.path.abspath(text))  # noqa: PTH100 - pure afterwards


def _whole(path: Path) -> bytes:
    """Read a file, and nothing that could keep us waiting."""
    if not path.exists() or path.is_file():
        return path.read_bytes()
    raise UsageError(f"cannot read the spec {str(path)!r}: it is not a file")


def _read(spec: str, *, waiting: bool = True) -> bytes:
    if spec == "-" and not waiting:
        raise UsageError(
            "cannot read the spec from standard input: whoever holds that could keep PID 1 waiting; name a file"
        )
    try:
        return sys.stdin.buffer.read() if spec == "-" else _whole(Path(spec))
    except OSError as error:
        raise UsageError(f"cannot read the spec {spec!r}") from error


def _plan(arguments: argparse.Namespace) -> int:
    _check_plan(arguments)
    if arguments.record or arguments.node:
        from runner.cli import plan_node

        if arguments.record:
            return plan_node.record(arguments)
        return 0 if plan_node.plan(arguments) else Status.FINDINGS
    plan = trio.run(plan_here, arguments.spec, _read(arguments.spec), arguments.state_dir)
    if arguments.show_argv:
        print(pasteable(plan), end="")
    elif arguments.json:
        print(json.dumps(plan_json(plan), indent=1))
    else:
        print("\n".join(plan_lines(plan)))
    return 0


def _check_plan(arguments: argparse.Namespace) -> None:
    """Refuse arguments of ``plan`` that do not go together, before anything is read."""
    given = [
        name
        for name in ("pod", "state", "device", "what_if", "svg", "kubelet", "host", "sys")
        if getattr(arguments, name)
    ]
    options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
    if arguments.record:
        others = [name for name in ("spec", "node", "show_argv", "json") if getattr(arguments, name)]
        if others or set(given) - {"sys"}:
            raise UsageError("cannot plan while recording: --record takes nothing but --sys beside it")
    elif arguments.node:
        if arguments.show_argv:
            raise UsageError(
                "cannot show the command line of a machine on another node; leave --show-argv or --node out"
            )
    elif given:
        raise UsageError(f"cannot use {options} alone: name the kubelet's configuration with --node")
    elif arguments.spec is None:
        raise UsageError("cannot plan nothing: name a SPEC, or a kubelet's configuration with --node")
    elif arguments.json and arguments.show_argv:
        raise UsageError("cannot give both --json and --show-argv; leave one out")


def _inspect(arguments: argparse.Namespace) -> int:
    from runner.inspect.command import Screen, Where, inspect
    from runner.inspect.observe import MountedHost
    from runner.inspect.rules import InspectionReport
    from runner.kernel.cgroup import Cgroup

    where = Where(
        receipt=Path(arguments.state_dir / "receipt.json"),
        root=Cgroup(arguments.root),
        kubelet=arguments.kubelet_dir,
        machine=MountedHost(cgroupfs=arguments.cgroupfs),
        wanted=arguments.instance,
    )
    watching = arguments.watch is not None
    screen = Screen(arguments.json, redraw=sys.stdout.isatty(), repeated=watching)

    def show(report: InspectionReport) -> None:
        print(screen.text(report), end="", flush=True)

    try:
        trio.run(inspect, where, arguments.watch, show)
    except KeyboardInterrupt:
        if not watching:
            raise
    return screen.status


def _check(arguments: argparse.Namespace) -> int:
    from runner.check.finding import Level
    from runner.check.host_reader import Here, check_here
    from runner.check.report import report_json, report_lines

    document = None if arguments.spec is None else (arguments.spec, _read(arguments.spec))
    here = Here(Path("/"), arguments.kubelet_dir, arguments.socket, arguments.state_dir, dict(os.environ))
    report = trio.run(check_here, here, document)
    if arguments.json:
        print(json.dumps(report_json(report), indent=1))
    else:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print("\n".join(report_lines(report, colour=colour)))
    return Status.FINDINGS if report.verdict is Level.FATAL else 0


def _console(arguments: argparse.Namespace) -> int:
    from runner.cli.console import AttachRequest, attach

    wish = AttachRequest(write=not arguments.read_only, steal=arguments.steal)
    return attach(Path(arguments.state_dir), wish, arguments.detach_key)


def _completion(arguments: argparse.Namespace) -> int:
    from runner.cli.completion import completion
    from runner.controller.main import command_line

    print(completion(arguments.shell, (_parser(), command_line())), end="")
    return 0


def _manual(arguments: argparse.Namespace) -> int:
    from importlib import metadata

    from runner.cli.manual import command_page, spec_page
    from runner.controller.main import command_line

    version = metadata.version("instance-runner")
    pages = ("instance-runner(1)", "instance-runner-spec(5)", "instance-cgroup-controller(8)")
    name, section = arguments.page.split(".")
    others = [page for page in pages if page != f"{name}({section})"]
    if section == "5":
        print(spec_page(version, others), end="")
    else:
        parser = _parser() if section == "1" else command_line()
        print(command_page(parser, int(section), version, others), end="")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    # For an entry point that forgot `env --block-signal`: late, but better than never.
    signal.pthread_sigmask(signal.SIG_BLOCK, ASK_TO_STOP)
    json_lines = arguments.log_format == "json"
    dropped = json_of_dropped if json_lines else dropped_message
    with NonBlockingWriter(1, dropped) as stdout, NonBlockingWriter(2, dropped) as stderr:
        console = JsonConsole(stdout).write if json_lines else stdout.write
        _set_up_logging(stderr, arguments)
        try:
            data = _read(arguments.spec, waiting=False)
            run = partial(
                run_as_init,
                arguments.spec,
                data,
                arguments.state_dir,
                Streams(stdout, stderr, console, arguments.http),
                pid1=not arguments.not_pid1,
            )
            verdict = trio.run(run)
        except RunnerError as error:
            verdict = ExitReport(error.status, error.status.name.lower(), explain(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is ours
            import traceback

            log.error("this is a bug of instance-runner:\n%s", "".join(traceback.format_exception(error)))  # noqa: TRY400
            verdict = ExitReport(Status.BUG, "bug", f"{type(error).__name__}: {error}")
        level = logging.INFO if verdict.status == Status.STOPPED else logging.ERROR
        for line in verdict.detail.splitlines():
            log.log(level, "%s", line)
        log.info("ended outcome=%s status=%d faults=%d", verdict.outcome, verdict.status, len(verdict.faults))
        _leave_word(arguments.termination_log, verdict)
    return int(verdict.status)


def _leave_word(path: Path | None, verdict: ExitReport) -> None:
    """Write the termination log: without *path*, where Kubernetes put one."""
    try:
        if path is not None or TERMINATION_LOG.exists():
            fd = os.open(path or TERMINATION_LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644)
            with open(fd, "w") as file:  # noqa: PTH123 - a descriptor
                file.write(json.dumps(verdict.to_json()) + "\n")
    except OSError as error:
        log.warning("cannot write the termination log: %s", error.strerror)


def _set_up_logging(stderr: NonBlockingWriter, arguments: argparse.Namespace) -> None:
    root = logging.getLogger()
    root.addHandler(LogHandler(stderr.write, arguments.log_format))
    root.setLevel(arguments.log_level.upper())


def entry() -> None:
    """Be the program ``instance-runner``."""
    status = main()
    for stream in (sys.stdout, sys.stderr):
        print(end="", file=stream, flush=True)
    # Taking the interpreter apart is 20 to 30 ms of every stop, and everything this process held has been released.
    os._exit(status)


if __name__ == "__main__":
    entry()
