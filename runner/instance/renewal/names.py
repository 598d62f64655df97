"""The state that one program passes to the next, by name: the contract between two versions of this program.

A document of the state is ``{name: value}``. :mod:`runner.instance.renewal.state_codec` defines the JSON form of each type; the fields of a
class have the names and types of its attributes. A suffix after a colon in a name, as in ``anchor:0``, distinguishes values of one kind.

* A name, or a field with a default, may be added: it gets the number of the next :data:`FORMAT`, and a program that finds an older
  document makes what it needs. A field is left out while it has its default, so that an older program understands.
* A name, a field, or a kind of :data:`KINDS` is neither renamed nor given another meaning. A class or a module may be.
* Recorded documents of each format are in ``tests/data/renewal/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, Never

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError
from runner.base.values import Fd, frozen
from runner.instance.change.running_instance import AttachedDisk
from runner.instance.parts.daemons import RestartedChildRecord
from runner.instance.signs_of_life import Silence
from runner.instance.supervisor import Counters
from runner.instance.watch.foreign_time import ForeignTime
from runner.instance.watch.receipts import PlacedThreads
from runner.kernel.cgroup_fds import CgroupFds
from runner.kernel.child_processes import ProcessRecord
from runner.kernel.inherited_fds import InheritedFd
from runner.kernel.log_file import LogFileRecord
from runner.placement.backends import AffinityPlacement, ControllerPlacement, DelegatedPlacement, Placement
from runner.placement.children import CHILDREN, RESTARTS
from runner.placement.threads import CgroupPaths
from runner.plan.argv.qemu_endpoints import QemuFds
from runner.plan.argv.wires import WireNumbers
from runner.plan.firmware import ForgottenVariables, KeptVariables
from runner.plan.guest_devices import GuestPort
from runner.plan.instance import InstancePlan
from runner.plan.network_plan import BridgedPlan, DhcpPlan, InheritedFdPlan, MacvtapPlan, NetworkPlan, PasstPlan
from runner.plan.passthrough_plan import PassthroughPlan
from runner.protocol.instance_metrics import QemuUpdateOutcome, RenewalOutcome
from runner.protocol.qmp import MonitorRecord
from runner.spec.readiness import AgentSign, ConsoleSign

FORMAT: Final = 2
"""The format of the state that this program writes. Format 1, before the first release, named classes by their modules."""
OLDEST: Final = 2
"""The oldest format that it reads."""


@frozen
class Name:
    """The type of a named value; *since* is the first format that has the name."""

    type: Any
    since: int = 2


NAMES: Final[Mapping[str, Name]] = {
    # the program's outputs
    "log level": Name(str),
    "log format": Name(Literal["text", "json"]),
    "termination log": Name(Fd | None),
    "stdout": Name(bytes),  # not written yet
    "stderr": Name(bytes),
    "console line": Name(bytes),  # guest output not yet shown as JSON: an incomplete line
    # what is run, and how
    "pid1": Name(bool),
    "http address": Name(tuple[str, int] | None),
    "plan": Name(InstancePlan),  # without its remarks, and cloud-init's documents
    "counters": Name(Counters),
    "orphans": Name(int),
    "faults": Name(list[str]),
    # before QEMU
    "inherited descriptors": Name(dict[str, InheritedFd]),
    "state directory": Name(Fd),
    "placement": Name(Placement),  # the one in force
    "registration": Name(tuple[CgroupPaths, CgroupFds]),  # controller
    "pod's cgroup": Name(str),  # delegated
    "controllers": Name(frozenset[str]),  # delegated: of the container's cgroup, before
    "cgroups made": Name(None),  # delegated
    "cgroup descriptors": Name(CgroupFds),  # delegated
    "mask": Name(CpuSet),  # affinity: of this process, before
    "in float": Name(None),  # affinity
    "cgroups": Name(CgroupPaths),
    "vCPU threads": Name(set[int]),
    "nic": Name(int),  # the index of a macvtap
    "networks recovered": Name(None),
    "networks": Name(dict[str, frozenset[str]]),  # sysctl or list of links, before: see `network.build`
    # children
    **{name: Name(RestartedChildRecord if name in RESTARTS else ProcessRecord) for name in CHILDREN},
    "share": Name(ProcessRecord),  # the name of a virtiofsd
    "up": Name(None),  # a child that serves
    # QEMU
    "console": Name(Fd),
    "console log": Name(LogFileRecord),
    "console.sock": Name(Fd),
    "console replay": Name(bytes),
    "console received": Name(bytes),
    "console ended": Name(bool),
    "guest agent": Name(Fd),
    "QMP": Name(Fd),
    "conversation": Name(MonitorRecord),
    "agent listens": Name(bool),
    "QEMU's updates": Name(int),
    "suspended": Name(bool),
    "unplugged": Name(tuple[str, ...]),  # devices that the guest has released
    "QEMU's descriptors": Name(QemuFds),  # copies, for the next QEMU
    "QEMU is up": Name(None),
    "threads": Name(PlacedThreads),
    "seal": Name(str),  # why the vCPUs' CPUs are not sealed, empty if they are
    "placement confirmed": Name(None),
    "vnc.sock": Name(Fd),
    "control.sock": Name(Fd),
    "qmp.sock": Name(Fd),
    "disks": Name(tuple[AttachedDisk, ...]),
    "guest runs": Name(None),
    # the guest
    "awaited sign": Name(str),
    "panic": Name(str),
    "halted": Name(str),
    "sign searched": Name(bool),
    "console searches": Name(tuple[bytes, float]),  # the line that has begun, and seconds of CPU time left
    "silence": Name(Silence | None),
    "console written": Name(bool),
    "running since": Name(float),  # seconds of the monotonic clock
    "http": Name(list[Fd]),
    "foreign time": Name(ForeignTime | None),
}

KINDS: Final[Mapping[type, str]] = {
    ControllerPlacement: "controller",
    DelegatedPlacement: "delegated",
    AffinityPlacement: "affinity",
    BridgedPlan: "bridged",
    MacvtapPlan: "macvtap",
    PasstPlan: "passt",
    InheritedFdPlan: "inherited",
    KeptVariables: "kept",
    ForgottenVariables: "forgotten",
    AgentSign: "agent",
    ConsoleSign: "console",
    GuestPort: "port",
}
"""The class of a value where a field allows several classes → its ``kind``."""

ELSEWHERE: Final = {
    "DhcpPlan": DhcpPlan,
    "NetworkPlan": NetworkPlan,
    "WireNumbers": WireNumbers,
    "SeedPlan": Never,  # it holds secrets, and costs 0.7 MB
    "PassthroughPlan": PassthroughPlan,
    "RenewalOutcome": RenewalOutcome,
    "QemuUpdateOutcome": QemuUpdateOutcome,
}
"""Types that modules name and do not import, because a fresh start needs few of them."""


def name_of(name: str) -> Name:
    """Return the entry of *name*. Raises :exc:`~runner.base.errors.HostError` for a name that this program does not know."""
    try:
        return NAMES[name.partition(":")[0]]
    except KeyError:
        raise HostError(f"cannot take over {name}: nothing here knows it") from None
