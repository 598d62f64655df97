"""The table of commands, and the program's parser made of it.

Each command is the module ``runner.cli.<name>`` with ``add_arguments(parser)`` and ``main(arguments)``, which returns the exit status. A
module is imported only for its own command, so that PID 1 loads only ``run``.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from importlib import import_module

from runner.base.arguments import CommandLine, HelpFormatter, add_version, sentence
from runner.cli.options import STATUS_HELP, add_state_dir, default_state_directory

COMMANDS = {
    "try": "boot a guest with its console on this terminal: the demo, a spec, or a disk image of yours",
    "run": "run an instance as PID 1, until it ends or SIGTERM ends it",
    "plan": "say what run would do here, or what a Kubernetes node would do with a pod; touches nothing",
    "inspect": "say where every thread of a running instance is, and judge it",
    "check": "say whether this node, pod or machine is fit for instances, and what fixes it; changes nothing",
    "ctl": "show or change a running instance, from inside its container: state, vCPUs, disks, QMP, upgrades",
    "schema": "print the JSON Schema of a spec, for editors and other tools",
    "completion": "print what makes a shell complete this command and the controller's",
    "manual": "print the reference of the spec's keys or of the log's events",
    "console": "attach this terminal to the serial console of the instance in this container",
    "logs": "print what the guest has written to its serial console",
}
"""Name → the command's line in ``--help``."""


def program_parser(complete: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Return the parser of the program: every command by name and help, those in *complete* with their arguments.

    The parsed arguments have the command's name as ``command``.
    """
    parser = CommandLine(
        prog="instance-runner",
        description="Runs one virtual machine in one pod, every vCPU alone on its own CPU.",
        epilog=f"{STATUS_HELP}\n\n"
        "examples:\n"
        "  instance-runner check /etc/instance/spec.toml\n"
        "  instance-runner plan /etc/instance/spec.toml\n"
        "  env --block-signal=TERM,INT,HUP instance-runner run /etc/instance/spec.toml",
        formatter_class=HelpFormatter,
    )
    add_version(parser)
    add_state_dir(parser)
    parser.set_defaults(state_dir=default_state_directory())
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=sentence(purpose), formatter_class=HelpFormatter)
        if name in complete:
            import_module(f"runner.cli.{name}").add_arguments(command)
    return parser
