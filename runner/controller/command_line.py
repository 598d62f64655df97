"""The command line of ``instance-cgroup-controller``, and the limits that follow from it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

from runner.base.arguments import LOG_FORMATS, CommandLine, HelpFormatter, add_version, argument_type
from runner.base.cpuset import CpuSet
from runner.base.errors import UsageError
from runner.controller.serve.timeouts import Timeouts
from runner.controller.tree.limits import (
    INSTANCE_MEMORY,
    Limits,
    default_memory,
    default_pod_memory,
    default_processes,
    parse_memory,
    parse_processes,
    parse_weight,
)
from runner.controller.tree.pods import PodCgroups
from runner.facts.hardware import hugetlb_name
from runner.facts.roots import CONTROLLER_CGROUP, CONTROLLER_SOCKET, KUBELET_DIRECTORY
from runner.kernel.device_filter import DeviceRule
from runner.protocol.http import parse_address

Default = Literal["default"]
"""The value of a limit's option that is not on the command line."""


Partitions = Literal["auto", "required", "off"]
"""Whether instances get isolated partitions: if the kernel can make them; always, or the instance is refused; or never."""


class LimitOptions(argparse.Namespace):
    """The limits of the command line, checked; ``None`` stands for no limit."""

    memory_max: int | Default | None = "default"
    pids_max: int | Default | None = "default"
    cpu_weight: int | Default = "default"
    pod_memory: int | Default | None = "default"
    pod_pids_max: int | None = Limits().instance_pids_max


class Options(LimitOptions):
    """The command line, checked."""

    root: Path
    cgroupfs: Path
    socket: Path
    state_dir: Path
    kubelet_dir: Path
    cdi_dir: Path
    cpus: CpuSet | None
    """``None`` if there is a kubelet."""
    reserved_cpus: CpuSet
    """Empty if none are on the command line."""
    metrics: tuple[str, int] | None
    insecure_trust_peer: bool
    handover: float
    move_interrupts: bool
    move_work_queues: bool
    low_latency: bool
    cache_groups: bool
    no_device_filter: bool
    allow_device: list[DeviceRule]
    allow_macvtap: bool
    require_seccomp: bool
    partitions: Partitions
    sysfs: Path
    procfs: Path
    log_format: str
    debug: bool


def choose_limits(options: LimitOptions, pods: PodCgroups, page_sizes: Iterable[int]) -> Limits:
    """Return the limits of the tree, by default those that fit this machine. Raises :class:`UsageError`."""
    memory_max, pids_max = options.memory_max, options.pids_max
    if memory_max == "default":
        memory_max = default_memory(pods.procfs.memory_total(), pods.memory_limit())
    pod_memory = options.pod_memory
    if pod_memory == "default":
        pod_memory = default_pod_memory(memory_max)
    if pod_memory is None or (memory_max is not None and pod_memory > memory_max):
        raise UsageError("cannot use --pod-memory: it must be a size, and no more than --memory-max")
    if pids_max == "default":
        pids_max = default_processes(*(pods.procfs.setting(f"kernel/{name}") for name in ("pid_max", "threads-max")))
    return Limits(
        memory_max=memory_max,
        cpu_weight=pods.cpu_weight() if options.cpu_weight == "default" else options.cpu_weight,
        pids_max=pids_max,
        instance_memory=pod_memory,
        ram=pods.procfs.memory_total(),
        instance_pids_max=options.pod_pids_max,
        huge_page_sizes=tuple(map(hugetlb_name, page_sizes)),
        swap=pods.procfs.has_swap(),
    )


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, HelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        """Return the help text, with the default value if there is one."""
        return super()._get_help_string(action) if str(action.default or "") else action.help


def command_line() -> argparse.ArgumentParser:
    """Return the parser of this program's arguments."""
    parser = CommandLine(
        prog="instance-cgroup-controller",
        description="Keeps the cgroups of this node's instances as the kubelet shares out the CPUs.",
        epilog="It needs the node's PID namespace, the cgroup v2 hierarchy writable, the kubelet's directory readable, and "
        "SYS_ADMIN and SYS_PTRACE at its start, which it gives away. SIGTERM ends it; instances do not notice.\n\n"
        "examples:\n"
        "  instance-cgroup-controller --metrics :9440\n"
        "  instance-cgroup-controller --cpus 4-15    on a machine without a kubelet",
        formatter_class=_Formatter,
    )
    add_version(parser)
    add = parser.add_argument
    for option, path, text in (
        ("--root", CONTROLLER_CGROUP, "the tree's own cgroup"),
        ("--cgroupfs", "/sys/fs/cgroup", "where cgroup v2 is mounted"),
        (
            "--state-dir",
            "/var/lib/instance-cgroup-controller",
            "for the record of the machine's settings; no pod may reach it",
        ),
        ("--kubelet-dir", KUBELET_DIRECTORY, "the kubelet's --root-dir"),
        (
            "--cdi-dir",
            "/var/run/cdi",
            "where a DRA driver for CPUs puts its CDI specifications; read under the CPU Manager's policy none",
        ),
        ("--sysfs", "/sys", "where sysfs is mounted"),
        ("--procfs", "/proc", "where procfs is mounted"),
    ):
        add(option, type=Path, default=Path(path), metavar="DIR", help=text)
    add("--socket", type=Path, default=Path(CONTROLLER_SOCKET), metavar="PATH", help="where runners connect")
    add(
        "--cpus",
        type=argument_type(_some_cpus),
        metavar="LIST",
        help="this machine has no kubelet; instances may have these CPUs, first come, first served (example: 4-15)",
    )
    add(
        "--reserved-cpus",
        type=argument_type(CpuSet.parse),
        default=CpuSet(),
        metavar="LIST",
        help="the kubelet's reservedSystemCPUs, or the CPUs that a DRA driver gives to no pod; unless they are named, the kubelet "
        "is asked for them where its option strict-cpu-reservation hides them",
    )
    address = argument_type(parse_address)
    add("--metrics", type=address, metavar="ADDRESS:PORT", help="serve /metrics, /healthz and /readyz here")
    add(
        "--handover",
        type=argument_type(_seconds),
        default=Timeouts().handover,
        metavar="SECONDS",
        help="how long an instance waits for CPUs that the kubelet has given to it while another instance still runs on them, which "
        "then shares float's: at least the longest terminationGracePeriodSeconds on this node; with 0 neither waits nor shares",
    )
    _add_limits(parser.add_argument_group("limits of what instances run outside of their pods' cgroups"))
    _add_tuning(parser.add_argument_group("what else disturbs the CPUs of instances, and is put back at their end"))
    add(
        "--allow-device",
        type=argument_type(DeviceRule.parse),
        action="append",
        default=[],
        metavar="RULE",
        help="a device that processes of instances may use besides the ones that they need: kind, major:minor, access "
        "(examples: 'c 195:* rw', 'b 8:16 r'); may be repeated",
    )
    add(
        "--partitions",
        choices=get_args(Partitions),
        default="auto",
        help="isolated partitions, by which the kernel keeps everything else off an instance's CPUs: auto is where the kernel "
        "can (Linux 6.7), required refuses instances where it cannot",
    )
    add(
        "--log-format",
        choices=LOG_FORMATS,
        default="text",
        help="the log on standard error: for people, or one JSON object a line",
    )
    add(
        "--allow-macvtap",
        action="store_true",
        help="a process of an instance that may make device nodes (MKNOD) may use any macvtap of the node, also another pod's; "
        "use it only on nodes where no pod with MKNOD belongs to a stranger. It is not needed for a pod whose container may use "
        "its own macvtap",
    )
    for option, text in (
        (
            "--require-seccomp",
            "refuse an instance whose process runs without a seccomp profile and could write the files of its cgroups",
        ),
        ("--no-device-filter", "for development only: leave the tree without a device filter"),
        ("--insecure-trust-peer", "for development only: believe every peer that it is the instance it names"),
        ("--debug", "log every action"),
    ):
        add(option, action="store_true", help=text)
    return parser


def _add_limits(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    defaults = LimitOptions()
    add(
        "--memory-max",
        type=argument_type(parse_memory),
        default=argparse.SUPPRESS,
        metavar="SIZE",
        help="memory.max of all together, such as 8G, or max (default: what the kubelet's pods may not have, at least an "
        "eighth of the machine's)",
    )
    add(
        "--pod-memory",
        type=argument_type(parse_memory),
        default=argparse.SUPPRESS,
        metavar="SIZE",
        help="memory.max of a pod's instance until its guest's memory is charged to the pod; then it gets what the pod's own limit "
        f"leaves, if that is more (default: {INSTANCE_MEMORY >> 20}M, on a small machine a quarter of --memory-max)",
    )
    add(
        "--cpu-weight",
        type=argument_type(parse_weight),
        default=argparse.SUPPRESS,
        metavar="WEIGHT",
        help="cpu.weight of all instances together (default: that of all pods, kubepods)",
    )
    add(
        "--pids-max",
        type=argument_type(parse_processes),
        default=argparse.SUPPRESS,
        metavar="COUNT",
        help="processes and threads of all together, or max (default: half of what the kernel can have)",
    )
    add(
        "--pod-pids-max",
        type=argument_type(parse_processes),
        default=defaults.pod_pids_max,
        metavar="COUNT",
        help="processes and threads of a pod's instance, or max",
    )


def _add_tuning(group: argparse._ArgumentGroup) -> None:
    for option, text in (
        ("--move-interrupts", "keep interrupts off these CPUs, also by irqbalance where it runs"),
        ("--move-work-queues", "keep the kernel's unbound work queues off these CPUs"),
        ("--low-latency", 'obey cpu.latency = "low" of a spec: idle states, and the frequency governor'),
        ("--cache-groups", "obey cpu.cache_ways and cpu.memory_bandwidth of a spec, by resctrl"),
    ):
        group.add_argument(option, action=argparse.BooleanOptionalAction, default=True, help=text)


def _some_cpus(text: str) -> CpuSet:
    cpus = CpuSet.parse(text)
    if not cpus:
        raise ValueError("the list is empty")
    return cpus


def _seconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}", text, re.ASCII):
        raise ValueError(f"{text!r} is not a number of seconds such as 600")
    return float(text)
