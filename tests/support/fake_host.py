"""A host whose programs are fakes that the plan names, and snapshots of everything that a run must restore."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, cast

import attrs
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import RunnerError
from runner.base.rate_limit import LogRateLimit
from runner.facts.disk import FileFact
from runner.facts.file_formats import identify
from runner.facts.host import HostFacts, Kvm, User, Virtiofsd
from runner.facts.roots import Roots
from runner.instance.change.disk_hotplug import DiskHotplug
from runner.instance.gate import Changes, StopRequest
from runner.instance.init import figures_shown
from runner.instance.lifecycle import EnterCgroups, run_instance
from runner.instance.optional_parts import entered_cgroups
from runner.instance.parts.qemu import GuestEnd, Qemu
from runner.instance.supervisor import Faults, Supervisor, open_supervisor
from runner.instance.timeouts import InstanceTimeouts
from runner.kernel.child_processes import Process
from runner.kernel.hardware_reader import read_hardware
from runner.kernel.inherited_fds import InheritedFd
from runner.kernel.nonblocking_writer import NonBlockingWriter
from runner.kernel.procfs import Procfs
from runner.placement.threads import Receipt
from runner.plan.instance import InstancePlan, plan_instance
from runner.protocol.qmp import Monitor
from runner.spec.instance import parse_instance
from tests.support.fake_kernel import FAKE_KERNEL

FAKES = Path(__file__).parents[1] / "component" / "fakes"


@attrs.frozen
class Snapshot:
    """Everything that a run must restore."""

    processes: frozenset[str]
    descriptors: frozenset[tuple[int, str]]
    links: frozenset[str]
    files: frozenset[str]
    """Paths, each with its owner."""
    cpus: CpuSet


def descendants(pid: int) -> Iterator[str]:
    """Yield "pid state name" of each descendant of the process *pid*."""
    children: dict[int, list[tuple[int, str, str]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(
                    (int(entry.name), fields[0], (entry / "comm").read_text().strip())
                )
            except (FileNotFoundError, ProcessLookupError):
                continue
    waiting = [pid]
    while waiting:
        for child, state, name in children.get(waiting.pop(), []):
            waiting.append(child)
            yield f"{child} {state} {name}"


@attrs.define
class FakeHost:
    """The fake programs, the plan made of them, and their log."""

    root: Path
    stop: StopRequest = attrs.field(factory=StopRequest)
    faults: Faults = attrs.field(factory=Faults)
    timeouts: InstanceTimeouts = attrs.field(factory=partial(InstanceTimeouts, metrics_kept=0))
    """Tests ask for the metrics of this moment."""
    roots: Roots = attrs.field(factory=Roots)
    enter: EnterCgroups = entered_cgroups
    """Enters the placement of an instance."""
    when_over: Callable[[], None] = lambda: None
    """Called when the instance has ended, before the result is inspected."""
    logged: Callable[[], str] = str
    """Returns the text of the log."""

    @property
    def log_file(self) -> Path:
        return self.root / "log"

    def program(self, name: str, fake: str, **behaviour: object) -> PurePosixPath:
        """Write a fake program and return its path."""
        directory = self.root / "bin"
        directory.mkdir(exist_ok=True)
        path = directory / name
        source = (FAKES / fake).read_text()
        head = f"#!{sys.executable} -IS\nNAME = {name!r}\nLOG = {str(self.log_file)!r}\nBEHAVIOUR = {behaviour!r}\n"
        path.write_text(head + source)
        path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        return PurePosixPath(path)

    def records(self, fake: str, what: str) -> list[dict[str, Any]]:
        """Return the records of kind *what* that a fake wrote; not a last one of which the file has only a part yet."""
        if not self.log_file.exists():
            return []
        everything = [json.loads(line) for line in self.log_file.read_text().split("\n")[:-1]]
        return [record for record in everything if record["fake"] == fake and record["what"] == what]

    def guest_runs(self) -> bool:
        """Return whether the start is over: QEMU has not only received ``cont``, but answered it."""
        return "the guest runs" in self.logged()

    async def act_while_it_runs(self, act: Callable[[], Awaitable[None]], *, stop: bool = True) -> None:
        """Wait until the guest runs and *act*, within 30 s in all; then *stop* it."""
        try:
            with trio.fail_after(30):
                while not self.guest_runs():
                    await trio.sleep(0.005)
                await act()
        finally:
            if stop:
                self.stop.ask("test")

    def commands(self) -> list[str]:
        """Return the QMP commands that the fake QEMU received."""
        return [record["command"] for record in self.records("qemu", "command")]

    def plan(
        self,
        spec: str = "",
        *,
        qemu: dict[str, object] | None = None,
        daemon: dict[str, object] | None = None,
        preallocator: dict[str, object] | None = None,
        virtiofsd: tuple[int, ...] = (1, 13),
        grace: float = 10,
    ) -> InstancePlan:
        """Plan an instance whose programs are fakes with the given behaviour."""
        kernel = self.root / "kernel"
        kernel.write_bytes(b"kernel")
        share = self.root / "share"
        share.mkdir(exist_ok=True)
        daemons = daemon or {}
        facts = HostFacts(
            allowed_cpus=CpuSet(os.sched_getaffinity(0)),
            hardware=read_hardware(),
            memory_nodes=Procfs().memory_nodes(),
            memory=1 << 40,
            state_directory=PurePosixPath(self.root / "state"),
            preallocator=(str(self.program("preallocator", "fake_preallocator.py", **(preallocator or {}))),),
            qemu=self.program("qemu", "fake_qemu.py", **(qemu or {})),
            dnsmasq=self.program("dnsmasq", "fake_daemon.py", **cast("dict[str, object]", daemons.get("dnsmasq", {}))),
            sleep=self.program("sleep", "fake_daemon.py", **cast("dict[str, object]", daemons.get("sleep", {}))),
            virtiofsd=Virtiofsd(
                self.program("virtiofsd", "fake_daemon.py", **cast("dict[str, object]", daemons.get("virtiofsd", {}))),
                rust=True,
                version=virtiofsd,
            ),
            files={
                PurePosixPath(kernel): FileFact("file", 6, format=identify(FAKE_KERNEL)),
                PurePosixPath(share): FileFact("directory"),
            },
            users={"root": User("root", 0, 0), "nobody": User("nobody", 65534, 65534)},
            kvm=Kvm("not in this test"),
        )
        text = f'[instance]\nuser = "root"\n[boot]\nkernel = "{kernel}"\n[shutdown]\ngrace = {grace}\n{spec}'
        return plan_instance("spec.toml", parse_instance("spec.toml", text.encode()), facts)

    def share(self) -> str:
        return f'[[share]]\ntag = "share"\npath = "{self.root / "share"}"\n'

    async def run(
        self,
        plan: InstancePlan,
        *,
        meanwhile: Callable[[Supervisor], Awaitable[None]] | None = None,
        inherited_fds: Mapping[str, InheritedFd] | None = None,
        http: tuple[str, int] | None = None,
    ) -> GuestEnd | RunnerError:
        """Run *plan* on a fresh host with its *inherited_fds*; *meanwhile* runs at the same time, with figures shown at *http*."""
        with NonBlockingWriter(1) as stdout:
            async with open_supervisor(self.stop, self.faults, timeouts=self.timeouts, roots=self.roots) as bare:
                supervisor = attrs.evolve(bare, inherited_fds=inherited_fds or {})
                nobody = nullcontext[Callable[[Receipt], None]](lambda _: None)
                try:
                    async with nobody if http is None else figures_shown(supervisor, plan, http) as count_from:
                        if meanwhile is not None:
                            supervisor.nursery.start_soon(meanwhile, supervisor)
                        ended: GuestEnd | RunnerError = await run_instance(
                            plan, supervisor, stdout.write, count_from, self.enter
                        )
                except RunnerError as error:
                    ended = error
                self.when_over()
                await settled(supervisor)
        return ended

    def snapshot(self) -> Snapshot:
        """Return everything that a run might leave behind."""
        descriptors = set()
        for entry in Path("/proc/self/fd").iterdir():
            try:
                descriptors.add((int(entry.name), str(entry.readlink())))
            except FileNotFoundError:
                continue
        ours = {(number, name) for number, name in descriptors if not name.startswith("/proc/")}
        kept = {self.log_file, self.root / "state" / "console.log", self.root / "state"}
        return Snapshot(
            processes=frozenset(descendants(os.getpid())),
            descriptors=frozenset(ours),
            links=frozenset(link_names()),
            files=frozenset(f"{path} {path.lstat().st_uid}" for path in self.root.rglob("*") if path not in kept),
            cpus=CpuSet(os.sched_getaffinity(0)),
        )


def hotplug_of(
    plan: InstancePlan, ours: socket.socket, in_pod_cgroup: Callable[[], AbstractContextManager[None]] = nullcontext
) -> DiskHotplug:
    """Return the disks of a QEMU that has no process, and whose monitor is at the other end of *ours*."""
    changes, monitor = Changes(StopRequest()), Monitor(ours)
    machine = Qemu(cast("Process", None), monitor, None, changes, LogRateLimit())
    return DiskHotplug(
        plan, machine, changes, trio.lowlevel.checkpoint, in_pod_cgroup, InstanceTimeouts().disk_released
    )


def link_names() -> Iterator[str]:
    """Yield the links of our network namespace; /sys shows those of the namespace in which it was mounted."""
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        yield line.partition(":")[0].strip()


async def settled(supervisor: Supervisor) -> None:
    """Wait until all zombies are reaped: a killed grandchild becomes our zombie a moment later."""
    with trio.move_on_after(60):
        while any(line.split()[1] == "Z" for line in descendants(os.getpid())):
            await trio.sleep(0.005)
    assert list(supervisor.processes) == []
