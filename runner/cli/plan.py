"""The command ``plan``: prints the steps of ``run`` on this host; with ``--node``, the decisions of a Kubernetes node."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import trio

from runner.base.errors import Status, UsageError, escaped
from runner.cli.options import DEFAULT_SPEC, add_json, add_spec, read_spec, source_of
from runner.instance.init import plan_here
from runner.plan.argv.by_hand import pasteable
from runner.plan.cloud_init import SeedPlan
from runner.plan.instance import InstancePlan
from runner.plan.render import plan_json, plan_lines

NODE_OPTIONS = ("pod", "state", "running", "device", "what_if", "svg", "kubelet", "host", "sys")
"""The options that need ``--node``; ``--sys`` also goes with ``--record``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to *parser*."""
    parser.epilog = (
        "examples:\n"
        "  instance-runner plan spec.toml --show-argv > by-hand.sh\n"
        "  instance-runner plan --document-only specs/*.toml\n"
        "  instance-runner plan --record host.json\n"
        "  instance-runner plan --node kubelet.yaml --host host.json --pod pod.yaml --svg node.svg\n"
        "  instance-runner plan --node kubelet.yaml --pod pod.yaml --state /var/lib/kubelet \\\n"
        "    --what-if topologyManagerPolicy=restricted --what-if cpuManagerPolicyOptions.full-pcpus-only=true\n"
    )
    add_spec(parser, nargs="*", otherwise=f"default: {DEFAULT_SPEC}, and none with --node")
    parser.add_argument(
        "--document-only",
        action="store_true",
        help="check any number of SPECs without a host, as on a laptop or in CI",
    )
    add_json(parser, "the plan")
    parser.add_argument(
        "--show-argv", action="store_true", help="print a shell script that boots the machine of SPEC by hand"
    )
    parser.add_argument(
        "--nccl",
        action="store_true",
        help="print the topology file for NCCL in the guest, or for RCCL if its GPUs are AMD's",
    )
    _add_node_arguments(parser)
    host = parser.add_argument_group("the host (default: this machine)")
    source = host.add_mutually_exclusive_group()
    source.add_argument("--host", metavar="FILE", help="a host recorded by --record, as JSON")
    source.add_argument(
        "--sys", metavar="ROOT", type=Path, help="the directory with the host's sys and proc (default: /)"
    )
    host.add_argument("--record", metavar="FILE", help="record the host into FILE, for --host; - is standard output")


def _add_node_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("a Kubernetes node").add_argument
    add_repeatable = partial(add, action="append", default=[])
    add("--node", metavar="FILE", help="the kubelet's configuration (KubeletConfiguration, YAML)")
    add_repeatable(
        "--pod",
        metavar="FILE",
        help="the pods' manifests, in the order in which they arrive: a file, a directory, or - for standard input (repeatable)",
    )
    add_repeatable(
        "--state",
        metavar="PATH",
        help="cpu_manager_state, memory_manager_state, or the kubelet's directory with both (repeatable). A pod that is in "
        "only one of the two has ended. Without --running the others are the node's running pods",
    )
    add_repeatable(
        "--running",
        metavar="FILE",
        help="all pods of the node, whose requests count: a file, a directory, or - for standard input (repeatable), from "
        "kubectl get pods -A -o yaml --field-selector spec.nodeName=NAME",
    )
    add("--kubelet", metavar="VERSION", help="the kubelet's version (default: the newest that is known)")
    add_repeatable(
        "--device",
        metavar="RESOURCE=COUNT@NUMA_NODE",
        help="devices of the host, such as nvidia.com/gpu=4@0 (repeatable)",
    )
    add_repeatable(
        "--what-if",
        metavar="KEY=VALUE[,KEY=VALUE]",
        help="compare with other values in the kubelet's configuration (repeatable)",
    )
    add("--svg", metavar="FILE", help="draw the node as a picture into FILE")


def main(arguments: argparse.Namespace) -> int:
    """Print the plan, or write the host to ``--record``; return ``FINDINGS`` if the pods do not fit the node."""
    if arguments.document_only:
        from runner.cli import plan_document_only

        _refuse_without_document(arguments)
        return plan_document_only.check_documents(arguments.spec, as_json=arguments.json)
    _refuse_contradictions(arguments)
    if arguments.record or arguments.node:
        from runner.cli import plan_node

        if arguments.record:
            return plan_node.record(arguments)
        return 0 if plan_node.plan(arguments) else Status.FINDINGS
    spec = arguments.spec[0] if arguments.spec else DEFAULT_SPEC
    plan = trio.run(plan_here, source_of(spec), read_spec(spec), arguments.state_dir)
    if plan.machine.seed is not None:
        from runner.cli import plan_document_only

        plan_document_only.refuse_broken_seed(source_of(spec), plan.machine.seed)
    if arguments.show_argv:
        print(pasteable(plan, _seed_image(plan.machine.seed)), end="")
    elif arguments.nccl:
        print_nccl(plan)
    elif arguments.json:
        print(json.dumps(plan_json(plan), indent=1))
    else:
        print("\n".join(map(escaped, plan_lines(plan))))
    return 0


def _refuse_without_document(arguments: argparse.Namespace) -> None:
    """Raise :exc:`~runner.base.errors.UsageError` for arguments that ``--document-only`` does not allow."""
    others = (*NODE_OPTIONS, "record", "node", "show_argv", "nccl")
    if any(getattr(arguments, name) for name in others):
        raise UsageError("cannot use other options with --document-only: it takes SPECs and --json")
    if not arguments.spec:
        raise UsageError("cannot check nothing: name SPECs with --document-only")
    if arguments.spec.count("-") > 1:
        raise UsageError("cannot read standard input twice: name a file for a SPEC")


def print_nccl(plan: InstancePlan) -> None:
    """Print NCCL's topology file of the guest. Raises :exc:`~runner.base.errors.UsageError` if it has none."""
    from runner.plan.nccl import nccl_topology  # here, because few guests have GPUs

    topology = nccl_topology(plan.machine)
    if not topology:
        raise UsageError("cannot make a topology for NCCL: the instance has no GPU, or nothing beside it")
    print(topology, end="")


def _seed_image(seed: SeedPlan | None) -> bytes | None:
    if seed is None:
        return None
    from runner.instance.parts.seed import seed_image  # here, because most plans need no image

    return seed_image(seed)


def _refuse_contradictions(arguments: argparse.Namespace) -> None:
    """Raise :exc:`~runner.base.errors.UsageError` for arguments that do not go together, before any file is read."""
    given = [name for name in NODE_OPTIONS if getattr(arguments, name)]
    if len(arguments.spec) > 1:
        raise UsageError("cannot plan several instances at once: name one SPEC, or check them by --document-only")
    options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
    if arguments.record:
        others = [name for name in ("spec", "node", "show_argv", "nccl", "json") if getattr(arguments, name)]
        if others or set(given) - {"sys"}:
            raise UsageError("cannot plan while recording: --record takes nothing but --sys beside it")
    elif arguments.node:
        if arguments.show_argv or arguments.nccl:
            raise UsageError(
                "cannot show the machine of an instance on another node",
                remedy="leave --show-argv, --nccl or --node out",
            )
        if [*arguments.spec, *arguments.pod, *arguments.running].count("-") > 1:
            raise UsageError("cannot read standard input twice: name a file for the SPEC, for --pod or for --running")
    elif given:
        raise UsageError(f"cannot use {options} alone: name the kubelet's configuration with --node")
    elif sum((arguments.json, arguments.show_argv, arguments.nccl)) > 1:
        raise UsageError("cannot give more than one of --json, --show-argv and --nccl", remedy="leave the others out")
