"""The command ``plan --node``: reads the host, the kubelet's files and manifests, and prints the plan of the node.

Only this command imports it, so that PID 1 does not load YAML and the kubelet's managers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs

from runner.base.document_value import Value
from runner.base.errors import HostError, RefusedError, UsageError, escaped, in_shell
from runner.cli.options import read_spec, source_of
from runner.cli.plan_node_files import manifest_notes, read_configuration, read_manifests, read_named
from runner.facts.hardware import Hardware
from runner.kernel.hardware_reader import read_kubelet_hardware
from runner.kernel.kubelet_files import read_state_file
from runner.kubelet.state_files import CPU_STATE, MEMORY_STATE, parse_cpu_state, parse_memory_state
from runner.node_plan.configuration import changed, parse_kubelet_configuration
from runner.node_plan.device_manager import Devices, peak_devices
from runner.node_plan.machine_info import machine_info
from runner.node_plan.manifests import Manifest, parse_manifests
from runner.node_plan.node_plan import (
    Fit,
    KnownPods,
    NodePlan,
    States,
    WhatIf,
    fit_of,
    plan_node,
    start_node,
    unclear_pods,
)
from runner.node_plan.quirks import FROM_SOURCE_MINOR, NEWEST_MINOR, OLDEST_MINOR, KubeletConfigError
from runner.node_plan.report.svg import picture_svg
from runner.node_plan.report.text import hardware_line, node_json, node_lines
from runner.spec.instance import PLACEHOLDER, parse_elsewhere
from runner.spec.yaml import MAX_BYTES

WIDTH = 120
"""Columns of the output if it is no terminal."""


def record(arguments: argparse.Namespace) -> int:
    """Write a record of the host (``--record``)."""
    hardware = read_kubelet_hardware(arguments.sys or Path("/"))
    if arguments.record == "-":
        print(hardware.to_json(), end="")
        return 0
    _write(arguments.record, hardware.to_json())
    print(escaped(f"{arguments.record}: {hardware_line(hardware)}"))
    return 0


def plan(arguments: argparse.Namespace) -> bool:
    """Print the plan for a node (``--node``) and tell whether everything fits."""
    hardware = _hardware(arguments)
    minor = _minor(arguments.kubelet)
    document = read_configuration(arguments.node)
    devices = _devices(arguments.device, machine_info(hardware))
    states = _states(arguments.state)
    pods, on_node = read_manifests(arguments.pod), read_manifests(arguments.running)
    notes = [] if states.memory or not states.cpu else [f"no {MEMORY_STATE} was given: no memory is taken as booked"]

    def planned(configured: Value) -> NodePlan:
        configuration, remarks = parse_kubelet_configuration(configured, hardware, minor)
        manifests, skipped = parse_manifests(pods, pod_level_resources=configuration.pod_level_resources)
        if pods and not manifests:
            raise UsageError(f"cannot plan: no pod is in {', '.join(map(repr, arguments.pod))}")
        skipped += manifest_notes(arguments.pod, pods)
        running = None
        if arguments.running:
            running, left_out = _running(on_node, pod_level_resources=configuration.pod_level_resources)
            skipped += left_out
        before = start_node(hardware, configuration, devices, states, running)
        unclear = {} if arguments.running else unclear_pods(states)
        known: KnownPods = "all" if arguments.running else "exclusive" if states != States() else "none"
        node = plan_node(hardware, configuration, before, manifests, unclear=unclear, known=known)
        return attrs.evolve(node, notes=(*remarks, *skipped, *notes, *node.notes))

    try:
        node = planned(document)
    except KubeletConfigError as error:
        raise RefusedError("cannot plan: this kubelet would not start") from error
    others = []
    for name in arguments.what_if:
        try:
            other = planned(changed(document, _settings(name)))
            refusal = other.before.restart_refusal
            # Another configuration requires a restart, at which the kubelet checks its state files.
            others.append(WhatIf(name, None if refusal else other, refusal))
        except KubeletConfigError as error:
            others.append(WhatIf(name, None, str(error)))
    fit, unset = _fit(next(iter(arguments.spec), None), node)
    node = attrs.evolve(node, what_if=tuple(others), fit=fit, notes=(*node.notes, *unset))
    if arguments.svg:
        _write(arguments.svg, picture_svg(node))
    if arguments.json:
        print(json.dumps(node_json(node), indent=1))
    else:
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size((WIDTH, 0)).columns if terminal else WIDTH
        colour = terminal and not os.environ.get("NO_COLOR")
        print("\n".join(node_lines(node, width=width, colour=colour)))
    return node.fits


def _hardware(arguments: argparse.Namespace) -> Hardware:
    if arguments.host is None:
        return read_kubelet_hardware(arguments.sys or Path("/"))
    return Hardware.from_json(_text(arguments.host, "host record"), arguments.host)


def _running(documents: Iterable[Value], *, pod_level_resources: bool) -> tuple[list[Manifest], list[str]]:
    """Return the pods on the node that have not ended, and a sentence for each other document, or about their devices."""
    manifests, notes = parse_manifests(documents, pod_level_resources=pod_level_resources)
    nodes = sorted({manifest.node_name for manifest in manifests} - {""})
    if len(nodes) > 1:
        raise UsageError(
            f"cannot use --running: its pods are on several nodes ({', '.join(nodes)})",
            remedy=f"list those of one: kubectl get pods -A --field-selector {in_shell('spec.nodeName=' + nodes[0])} -o yaml",
        )
    running = [manifest for manifest in manifests if not manifest.ended]
    for resource in sorted({name for manifest in running for name in peak_devices(manifest.pod)}):
        count = sum(peak_devices(manifest.pod).get(resource, 0) for manifest in running)
        notes.append(
            f"running pods hold {count} of {resource!r}, of unknown NUMA nodes: count only the others in --device"
        )
    return running, notes


def _states(paths: Iterable[str]) -> States:
    """Read state files, recognised by their content; a directory has both, under the kubelet's names."""
    states = States()
    for path in paths:
        files = [Path(path)]
        if files[0].is_dir():
            files = [file for name in (CPU_STATE, MEMORY_STATE) if (file := files[0] / name).exists()]
            if not files:
                raise UsageError(f"cannot use {path!r}: it holds neither {CPU_STATE} nor {MEMORY_STATE}")
        for file in files:
            text = _state_file(file)
            if b"machinestate" in text.lower() or file.name == MEMORY_STATE:
                states = attrs.evolve(states, memory=parse_memory_state(text, str(file)))
            else:
                states = attrs.evolve(states, cpu=parse_cpu_state(text, str(file)))
    return states


def _devices(listed: Iterable[str], hardware: Hardware) -> Devices:
    """Read ``nvidia.com/gpu=4@0``: four devices on NUMA node 0; without ``@`` the plugin names no NUMA node."""
    numa_nodes = {node.id for node in hardware.numa_nodes}
    devices: dict[str, dict[int | None, int]] = {}
    for text in listed:
        match = re.fullmatch(r"([^\s=@]+/[^\s=@]+)=([0-9]{1,6})(?:@([0-9]{1,4}))?", text, re.ASCII)
        if match is None:
            raise UsageError(
                f"cannot use --device {text!r}: it takes RESOURCE=COUNT@NUMA_NODE, such as nvidia.com/gpu=4@0"
            )
        numa_node = None if match[3] is None else int(match[3])
        if numa_node is not None and numa_node not in numa_nodes:
            raise UsageError(f"cannot use --device {text!r}: the host has no NUMA node {numa_node}")
        places = devices.setdefault(match[1], {})
        places[numa_node] = places.get(numa_node, 0) + int(match[2])
    return devices


def _minor(version: str | None) -> int:
    if version is None:
        return NEWEST_MINOR
    match = re.fullmatch(r"v?1\.([0-9]{1,3})(?:\.[0-9]+.*)?", version, re.ASCII)
    if match is None:
        raise UsageError(
            f"cannot use --kubelet {version!r}: it takes a version, from 1.{OLDEST_MINOR} to 1.{FROM_SOURCE_MINOR}"
        )
    return int(match[1])


def _settings(text: str) -> Mapping[str, str]:
    """Split ``key=value,key=value``; a comma that is not followed by a key belongs to the value."""
    settings = {}
    for setting in re.split(r",(?=[A-Za-z][\w.-]*=)", text):
        key, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(
                f"cannot use --what-if {text!r}: it takes KEY=VALUE, such as topologyManagerPolicy=restricted"
            )
        settings[key] = value
    return settings


def _fit(path: str | None, node: NodePlan) -> tuple[Fit | None, tuple[str, ...]]:
    """Return the fit of the spec, and the assumptions made for it: its variables are set in the pod, not here."""
    if path is None:
        return None, ()
    source = source_of(path)
    spec, unset = parse_elsewhere(source, read_spec(path), os.environ)
    if spec is None:
        raise UsageError(
            f"cannot plan with {source}: it needs the values of {', '.join(unset)}", remedy="set these variables"
        )
    notes = (f"{source}: {', '.join(unset)} are not set here, and taken as {PLACEHOLDER!r}",) if unset else ()
    return fit_of(spec.cpu.count, spec.cpu.cpus, node, spare=spec.cpu.placement != "controller"), notes


def _text(path: str, what: str) -> str:
    data = read_named(path, what)
    if len(data) > MAX_BYTES:
        raise UsageError(f"cannot read the {what} {path!r}: it has more than {MAX_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read the {what} {path!r}: it is not UTF-8 at byte {error.start}") from None


def _state_file(path: Path) -> bytes:
    try:
        return read_state_file(path)
    except HostError as error:
        raise UsageError(f"cannot read the state file {str(path)!r}") from error.__cause__ or error


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path!r}") from error
