"""The command ``plan``: prints what ``run`` would do on this host; with ``--node``, what a Kubernetes node would do."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import trio

from runner.cli.options import add_spec, read_spec
from runner.errors import Status, UsageError
from runner.instance.init import plan_here
from runner.plan.argv.qemu import pasteable
from runner.plan.cloud_init import SeedPlan
from runner.plan.render import plan_json, plan_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give *parser* what this command takes."""
    parser.epilog = (
        "examples:\n"
        "  instance-runner plan spec.toml --show-argv > by-hand.sh\n"
        "  instance-runner plan --record host.json\n"
        "  instance-runner plan --node kubelet.yaml --host host.json --pod pod.yaml --svg node.svg\n"
        "  instance-runner plan --node kubelet.yaml --pod pod.yaml --state /var/lib/kubelet \\\n"
        "    --what-if topologyManagerPolicy=restricted --what-if cpuManagerPolicyOptions.full-pcpus-only=true\n"
    )
    add_spec(parser, nargs="?")
    parser.add_argument("--json", action="store_true", help="the plan as JSON")
    parser.add_argument("--show-argv", action="store_true", help="the machine of SPEC as a shell script to paste")
    _add_node_arguments(parser)
    host = parser.add_argument_group("the host, without which it is this one")
    source = host.add_mutually_exclusive_group()
    source.add_argument("--host", metavar="FILE", help="a recorded host")
    source.add_argument("--sys", metavar="ROOT", type=Path, help="the directory that has its sys and proc (default: /)")
    host.add_argument("--record", metavar="FILE", help="write the host down, for --host; - is standard output")


def _add_node_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("a Kubernetes node").add_argument
    add("--node", metavar="FILE", help="the kubelet's configuration (KubeletConfiguration, YAML)")
    add("--pod", metavar="FILE", action="append", default=[], help="manifests, in the order the pods come (repeatable)")
    add(
        "--state",
        metavar="PATH",
        action="append",
        default=[],
        help="cpu_manager_state or memory_manager_state, or the kubelet's directory with both; a pod that is in only one "
        "of the two files is taken as ended, and a note says so (repeatable)",
    )
    add("--kubelet", metavar="VERSION", help="the kubelet's version (default: the newest that is known)")
    add(
        "--device",
        metavar="RESOURCE=COUNT@NUMA_NODE",
        action="append",
        default=[],
        help="devices of this host, such as nvidia.com/gpu=4@0 (repeatable)",
    )
    add(
        "--what-if",
        metavar="KEY=VALUE[,KEY=VALUE]",
        action="append",
        default=[],
        help="compare with other values in the kubelet's configuration (repeatable)",
    )
    add("--svg", metavar="FILE", help="draw the node there")


def main(arguments: argparse.Namespace) -> int:
    """Print the plan, or write the host to ``--record``; return ``FINDINGS`` if the pods do not fit the node."""
    _refuse_contradictions(arguments)
    if arguments.record or arguments.node:
        from runner.cli import plan_node

        if arguments.record:
            return plan_node.record(arguments)
        return 0 if plan_node.plan(arguments) else Status.FINDINGS
    plan = trio.run(plan_here, arguments.spec, read_spec(arguments.spec), arguments.state_dir)
    if arguments.show_argv:
        print(pasteable(plan, _seed_image(plan.machine.seed)), end="")
    elif arguments.json:
        print(json.dumps(plan_json(plan), indent=1))
    else:
        print("\n".join(plan_lines(plan)))
    return 0


def _seed_image(seed: SeedPlan | None) -> bytes | None:
    if seed is None:
        return None
    from runner.instance.seed import seed_image  # here, because most plans need no image

    return seed_image(seed)


def _refuse_contradictions(arguments: argparse.Namespace) -> None:
    """Raise :exc:`~runner.errors.UsageError` for arguments that do not go together, before any file is read."""
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
