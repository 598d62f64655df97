"""A controller on a fake Kubernetes node, and real clients on its real socket."""

from __future__ import annotations

import array
import contextlib
import json
import math
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
import trio

from runner.base.cpuset import CpuSet
from runner.controller.command_line import LimitOptions, choose_limits
from runner.controller.main import RECORDS
from runner.controller.privileged_process import PrivilegedProcess, serve
from runner.controller.privileged_start import DeviceFilter
from runner.controller.serve.callers import Callers
from runner.controller.serve.hang_ups import HangUps
from runner.controller.serve.http_endpoints import HttpEndpoints
from runner.controller.serve.methods import Method, RpcMethods, controller_methods
from runner.controller.serve.node_status import NodeStatus
from runner.controller.serve.registrations import MOST_WAITING, Registrations
from runner.controller.serve.report_methods import LIMITS, report_methods
from runner.controller.serve.reports import ReportIntervals, Reports
from runner.controller.serve.seals import Seals
from runner.controller.serve.seccomp import SeccompCheck
from runner.controller.serve.socket_file import listening
from runner.controller.serve.timeouts import Timeouts
from runner.controller.serve.tuning_passes import TuningPasses
from runner.controller.tree.cgroup_writer import CgroupWriter
from runner.controller.tree.cpu_source import CpuSource
from runner.controller.tree.loop import Intervals, ReconcileLoop
from runner.controller.tree.pods import PodCgroups
from runner.controller.tree.tree import Tree
from runner.controller.tune.cache_tuner import RESCTRL, CacheTuner
from runner.controller.tune.host_tuner import HostTuner, TuningOptions
from runner.controller.tune.tuner_process import TunerProcess, obey
from runner.kernel.hardware_reader import read_promised_pages
from runner.kernel.peers import Peers
from runner.kernel.procfs import Procfs
from runner.kernel.sockets import SO_PASSRIGHTS
from runner.kubelet.state_files import KubeletFiles
from runner.protocol.controller_client import REPORT_SOCKET
from runner.protocol.unix_server import SocketLimits, UnixServer
from tests.support.fake_cgroupfs import FakeCgroup, fake_cgroupfs, fake_sysfs, format_cpu_state, put_cpu_state
from tests.support.fake_host_settings import FakeHostSettings, FakeResctrl
from tests.support.json_schemas import fitting

A, B, C = (
    "3ceda12c-3ee9-40fa-9f42-61428fe654a6",
    "416de7c2-21de-472d-817c-fa9d4306cb7d",
    "b41f38d8-2c21-4168-af77-6d0cc5482dcb",
)
ID = "5baab67f1daf9297c60974e50ad9f94f288077161a7c41376478e79aae671e07"
ENTRIES = {A: {"instance": "0-1,12-13"}, B: {"instance": "14-17"}, C: {"instance": "18-19"}}
SHARED = "2-11"
NO_PIDFD = 9999
"""A socket option that there is not: the kernel answers ENOPROTOOPT, as one before Linux 6.5 does for SO_PEERPIDFD."""
HOST_NAMESPACE = "pid-host"
RAM = 64 << 30
SCHEMAS = {"listInstances": "instances", "getStatus": "controller"}
"""Methods of the controller → the schemas of what they answer, which each answer here is held to."""
ANCHORS = {A: 701, B: 702, C: 703}


def scope_path(uid: str) -> str:
    """Return the path of the container of pod *uid*."""
    return f"/kubepods.slice/kubepods-pod{uid.replace('-', '_')}.slice/cri-containerd-{ID}.scope"


BYSTANDER = "bystander"


@attrs.frozen
class Node:
    """A fake Kubernetes node of 20 CPUs and 2 NUMA nodes."""

    path: Path
    mount: FakeCgroup

    @classmethod
    def new(cls, path: Path, entries: dict[str, dict[str, str]] | None = None, shared: str = SHARED) -> Node:
        """Write a node with three Guaranteed pods, whose containers have their cpusets."""
        mount = fake_cgroupfs(path / "cgroup", cpus="0-19", mems="0-1")
        mount.write("cgroup.subtree_control", "+cpuset")
        fake_sysfs(path / "sys", cpus="0-19", mems="0-1")
        node = cls(path, mount)
        node.kubelet.mkdir()
        node.put_state(shared, ENTRIES if entries is None else entries)
        for uid, containers in ENTRIES.items():
            group = mount
            for part in scope_path(uid).strip("/").split("/"):
                group = group.child(part)
                group.create()
                if not part.endswith(".scope"):
                    group.write("cgroup.subtree_control", "+cpuset")
            group.write("cpuset.cpus", containers["instance"])
        node.put_bystander()
        for pid in (1, os.getpid()):
            node.put_process(pid, "/", inner=1, namespace=HOST_NAMESPACE)
        (node.proc / "meminfo").write_text(f"MemTotal: {RAM >> 10} kB\n")
        (node.proc / "sys/kernel").mkdir(parents=True)
        (node.proc / "sys/kernel/pid_max").write_text("4194304\n")
        (node.proc / "sys/kernel/threads-max").write_text("500000\n")
        (node.proc / "swaps").touch()
        (node.proc / "self").symlink_to(str(os.getpid()))
        for kind in ("nr", "free", "resv"):
            file = path / "sys/kernel/mm/hugepages/hugepages-2048kB" / f"{kind}_hugepages"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("0\n")
        return node

    @property
    def kubelet(self) -> Path:
        return self.path / "kubelet"

    @property
    def cdi(self) -> Path:
        """Return where DRA drivers put their CDI specifications (:mod:`tests.support.fake_claims`)."""
        return self.path / "cdi"

    @property
    def pod_resources(self) -> Path:
        """Return where the kubelet's PodResources API listens (:mod:`tests.support.fake_pod_resources`)."""
        return self.kubelet / "pod-resources/kubelet.sock"

    @property
    def proc(self) -> Path:
        return self.path / "proc"

    @property
    def host(self) -> FakeHostSettings:
        """Return the settings of the machine, of which there are none before a test makes some."""
        return FakeHostSettings(self.path / "host")

    @property
    def root(self) -> FakeCgroup:
        return self.mount.child("stelia")

    @property
    def float_cgroup(self) -> FakeCgroup:
        """Return the float of a pod that is no pod of the kubelet's, and has nothing but that (:meth:`put_bystander`)."""
        return self.pod(BYSTANDER)

    @property
    def socket(self) -> Path:
        return self.path / "controller.sock"

    def domain(self, uid: str) -> FakeCgroup:
        return self.root.child(f"instance-{uid}")

    def instance(self, uid: str) -> FakeCgroup:
        """Return the cgroup of the vCPUs of pod *uid*."""
        return self.domain(uid).child("vcpus")

    def pod(self, uid: str) -> FakeCgroup:
        """Return the float of pod *uid*."""
        return self.domain(uid).child("float")

    def put_bystander(self) -> None:
        """Make a domain in whose float something runs: it follows the shared pool, whatever instances there are."""
        for group in (self.root, self.domain(BYSTANDER)):
            group.create()
            group.write("cgroup.subtree_control", "+cpuset")
        self.float_cgroup.create()
        self.float_cgroup.write("cgroup.type", "threaded")
        self.float_cgroup.populate(True)

    def end_pod(self, uid: str) -> None:
        """Remove the pod's own cgroups, as the kubelet does when its last container has ended."""
        self.scope(uid).remove()
        self.scope(uid).parent.remove()

    def move_pod(self, uid: str, qos: str) -> FakeCgroup:
        """Have the pod be one of the class *qos*, and return its scope."""
        cpus = self.scope(uid).cpus()
        self.end_pod(uid)
        path = scope_path(uid).replace("/kubepods-pod", f"/kubepods-{qos}.slice/kubepods-{qos}-pod")
        group = self.mount
        for part in path.strip("/").split("/"):
            group = group.child(part)
            group.create()
            if not part.endswith(".scope"):
                group.write("cgroup.subtree_control", "+cpuset +memory")
        group.write("cpuset.cpus", str(cpus))
        for pid in (os.getpid(), ANCHORS[uid]):
            (self.proc / str(pid) / "cgroup").write_text(f"0::{path}\n")
        (group.path / "cgroup.procs").write_text(f"{ANCHORS[uid]}\n")
        return group

    def scope(self, uid: str) -> FakeCgroup:
        return self.mount.at(scope_path(uid))

    def put_state(self, shared: str, entries: dict[str, dict[str, str]], *, policy: str = "static") -> None:
        put_cpu_state(self.kubelet, format_cpu_state(shared, entries, policy=policy))

    def put_process(
        self, pid: int, cgroup: str, *, inner: int, namespace: str, name: str = "x", leader: int | None = None
    ) -> None:
        """Describe process *pid* in the fake ``/proc``, the only place where the controller reads processes.

        With *leader* it is a thread of that process.
        """
        directory = self.proc / str(pid)
        (directory / "ns").mkdir(parents=True, exist_ok=True)
        for kind, file in (("pid", self.path / namespace), ("cgroup", self.path / "cgroup-host")):
            file.touch()
            (directory / "ns" / kind).unlink(missing_ok=True)
            (directory / "ns" / kind).symlink_to(file)
        (directory / "stat").write_text(f"{pid} (a) b) S {' '.join(['1'] * 18)} 1 0\n")
        (directory / "comm").write_text(f"{name}\n", newline="")
        (directory / "status").write_text(f"Name:\tx\nTgid:\t{leader or pid}\nPPid:\t0\nNSpid:\t{pid}\t{inner}\n")
        (directory / "cgroup").write_text(f"1:name=systemd:/\n0::{cgroup}\n")

    def set_parent(self, pid: int, parent: int) -> None:
        """Make process *pid* a child of *parent*."""
        status = self.proc / str(pid) / "status"
        status.write_text(status.read_text().replace("PPid:\t0", f"PPid:\t{parent}"))

    def expose(self, pid: int, *, seccomp: int = 0, uid_map: str = "0 0 4294967295") -> None:
        """Give process *pid* a seccomp mode, and a user namespace with *uid_map*."""
        status = self.proc / str(pid) / "status"
        status.write_text(f"{status.read_text()}Seccomp:\t{seccomp}\n")
        (self.proc / str(pid) / "uid_map").write_text(f"{uid_map}\n")

    def nest(self, pid: int, namespace: str) -> None:
        """Put process *pid* into a PID namespace below the one it is in, as its init."""
        status = self.proc / str(pid) / "status"
        status.write_text(f"{status.read_text().rstrip()}\t1\n")
        (self.path / namespace).touch()
        (self.proc / str(pid) / "ns" / "pid").unlink()
        (self.proc / str(pid) / "ns" / "pid").symlink_to(self.path / namespace)

    def become(self, uid: str, *, cgroup: str | None = None, inner: int = 1, namespace: str | None = None) -> None:
        """Describe this process as the init of pod *uid*'s container; its anchor is in the pod's scope."""
        namespace = namespace or f"pid-{uid}"
        self.put_process(os.getpid(), cgroup or scope_path(uid), inner=inner, namespace=namespace)
        # The controller's own namespace stays the host's.
        (self.proc / "self").unlink()
        (self.proc / "self").symlink_to("1")
        self.put_process(ANCHORS[uid], scope_path(uid), inner=2, namespace=namespace)
        (self.scope(uid).path / "cgroup.procs").write_text(f"{ANCHORS[uid]}\n")

    def snapshot(self) -> dict[str, tuple[int, str]]:
        """Return every file of the controller's tree with its modification time in nanoseconds and its content."""
        return {
            str(path.relative_to(self.root.path)): (path.stat().st_mtime_ns, path.read_text())
            for path in sorted(self.root.path.rglob("*"))
            if path.is_file()
        }


@attrs.frozen
class Client:
    """One connection to the controller."""

    connection: trio.socket.SocketType
    buffer: bytearray = attrs.field(factory=bytearray)

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        while data:
            data = data[await self.connection.send(data) :]

    async def line(self) -> bytes:
        """Return the next line, or the rest before the end of the stream."""
        await trio.lowlevel.checkpoint()
        while b"\n" not in self.buffer:
            data = await self.connection.recv(65536)
            if not data:
                break
            self.buffer.extend(data)
        line, _, rest = bytes(self.buffer).partition(b"\n")
        self.buffer[:] = rest
        return line

    async def ask(self, method: str, **params: object) -> dict[str, object]:
        """Call *method* and return the whole response."""
        await self.send(json.dumps({"jsonrpc": "2.0", "method": method, "params": params, "id": 1}).encode() + b"\n")
        response = json.loads(await self.line())
        assert isinstance(response, dict)
        return response

    async def result(self, method: str, **params: object) -> object:
        response = await self.ask(method, **params)
        assert "result" in response, response
        return fitting(SCHEMAS[method], response["result"]) if method in SCHEMAS else response["result"]

    async def instances(self) -> list[Any]:
        """Return the instances that the caller may know of."""
        found = await self.result("listInstances")
        assert isinstance(found, dict)
        return list(found["instances"])

    async def refusal(self, method: str, **params: object) -> dict[str, object]:
        """Call *method*, which must be refused, and return the error's data with its message."""
        response = await self.ask(method, **params)
        error = response["error"]
        assert isinstance(error, dict)
        return {"message": error["message"], "code": error["code"], **error.get("data", {})}

    async def receive_fds(self) -> tuple[bytes, list[int]]:
        """Return the next bytes and the descriptors that came with them."""
        data, ancillary, _, _ = await self.connection.recvmsg(65536, socket.CMSG_SPACE(64 * 4))
        fds = array.array("i")
        for level, kind, content in ancillary:
            assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
            fds.frombytes(content)
        return data, list(fds)


@contextlib.asynccontextmanager
async def connected(path: Path) -> AsyncIterator[Client]:
    with trio.socket.socket(socket.AF_UNIX) as connection:
        await connection.connect(str(path))
        yield Client(connection)
        await trio.lowlevel.checkpoint()


@attrs.frozen
class Controller:
    node: Node
    loop: ReconcileLoop
    server: UnixServer
    device_filter: DeviceFilter
    methods: RpcMethods
    callers: Callers
    processes: tuple[PrivilegedProcess, ...]
    seccomp: SeccompCheck
    reports: Reports
    """The latest ones of instances."""
    tuning: TuningPasses
    host_tuner: HostTuner
    """What is in a process of its own, and here in a thread."""

    def endpoints(self, device_filter: DeviceFilter | None = None) -> HttpEndpoints:
        """Return what the port for metrics shows, which nothing has asked for yet."""
        return HttpEndpoints(self.loop, device_filter or self.device_filter, self.processes, self.reports, self.seccomp)

    async def eventually(self, condition: Callable[[], bool]) -> None:
        """Wait until *condition* holds, which no event signals: request passes, and test it after each."""
        await trio.lowlevel.checkpoint()
        while not condition():
            self.loop.request_pass()
            await self.loop.next_pass()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until *condition* holds after a pass."""
        await trio.lowlevel.checkpoint()
        while not condition():
            await self.loop.next_pass()


QUICK, LONG = Timeouts(agreement=0.4, emptying=0.4), Timeouts(agreement=50, emptying=50)
"""For tests in which what is waited for never comes, and for all others."""


@contextlib.contextmanager
def in_a_thread(obey: Callable[[bytes], bytes]) -> Iterator[socket.socket]:
    """Give the controller's end of a connection to what obeys in a process of its own, and here in a thread."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.settimeout(60)

    def serve_until_the_end() -> None:
        with its, contextlib.suppress(OSError):
            serve(its, obey)

    thread = threading.Thread(target=serve_until_the_end)
    thread.start()
    try:
        with ours:
            yield ours
    finally:
        thread.join()


@attrs.frozen
class Parts:
    """What makes the parts of a controller: a test may give subclasses, which watch or replace a step of theirs."""

    host_tuner: Callable[..., HostTuner] = HostTuner
    loop: Callable[..., ReconcileLoop] = ReconcileLoop
    methods: Callable[[Mapping[str, Method]], Mapping[str, Method]] = dict
    """Returns the methods that this controller knows, of all."""
    pods: Callable[..., PodCgroups] = PodCgroups
    procfs: Callable[[Path], Procfs] = Procfs
    seals: Callable[..., Seals] = Seals
    seccomp: Callable[..., SeccompCheck] = SeccompCheck
    source: Callable[[KubeletFiles, Path, CpuSet], CpuSource] = CpuSource
    tree: Callable[..., Tree] = Tree


@contextlib.asynccontextmanager
async def controlled(
    node: Node,
    *,
    trusting: bool = False,
    own_cpus: str = "",
    reserved: str = "",
    limits: SocketLimits | None = None,
    timeouts: Timeouts = LONG,
    intervals: Intervals | None = None,
    limit_options: LimitOptions | None = None,
    device_filter: DeviceFilter | None = None,
    partition_writer: CgroupWriter | None = None,
    partitions_required: bool = False,
    tuning: TuningOptions | None = None,
    tuned_every: float = 0,
    counted_every: float = math.inf,
    require_seccomp: bool = False,
    most_waiting: int = MOST_WAITING,
    parts: Parts = Parts(),
    report_intervals: ReportIntervals | None = None,
    report_limits: SocketLimits = LIMITS,
    passes_fds: bool = False,
    limit: float = 60,
) -> AsyncIterator[Controller]:
    """Run a controller on *node* for at most *limit* seconds; with *own_cpus* the node has no kubelet.

    With *passes_fds* the kernel refuses no descriptors, as before Linux 6.16.
    """
    pods = parts.pods(node.mount, parts.procfs(node.proc), kubelet=not own_cpus, trusting=trusting)
    device_filter = device_filter or DeviceFilter(node.root.path)
    loop = parts.loop(
        tree=parts.tree(node.root, partition_writer),
        source=None
        if own_cpus
        else parts.source(KubeletFiles(node.kubelet, node.cdi), node.path / "sys", CpuSet.parse(reserved)),
        sys=node.path / "sys",
        intervals=attrs.evolve(
            intervals or Intervals(pause=0.005, readings=10, least=0.01), processes=counted_every, mount=counted_every
        ),
        limits=choose_limits(limit_options or LimitOptions(), pods, read_promised_pages(node.path)),
        pods=pods,
        cgroup_writer=partition_writer,
    )
    host_tuner = parts.host_tuner(
        procfs=Procfs(node.proc),
        sys=node.path / "sys",
        host=node.host,
        caches=CacheTuner(node.host.root, FakeResctrl(node.host.root / RESCTRL)),
        store=PurePosixPath(node.path / RECORDS),
        options=tuning or TuningOptions(),
    )
    callers = Callers(Peers(node.proc, NO_PIDFD), pods, loop.tree)  # /proc/self/fdinfo is the machine's
    seccomp = parts.seccomp(loop.tree, pods.procfs, loop.log_limit, require_seccomp)
    seals = parts.seals(callers, loop, timeouts, partitions_required)
    cpus = CpuSet.parse(own_cpus)
    registrations = Registrations(
        callers, loop, device_filter, seccomp, timeouts, cpus, partitions_required, most_waiting
    )
    reports = Reports(report_intervals or ReportIntervals())
    hang_up = HangUps().hang_up
    report_server = UnixServer(report_methods(callers, loop, reports), report_limits, hang_up)
    with trio.fail_after(limit), in_a_thread(partial(obey, host_tuner)) as connection:
        tuning_passes = TuningPasses(loop, TunerProcess(connection), least=tuned_every)
        processes: tuple[PrivilegedProcess, ...] = (tuning_passes.process,)
        if partition_writer is not None:
            processes += (partition_writer,)
        status = NodeStatus(callers, loop, device_filter, processes, seccomp, reports, tuning_passes)
        methods = controller_methods(callers, loop, registrations, seals, tuning_passes, status)
        methods = attrs.evolve(methods, methods=parts.methods(methods.methods))
        server = UnixServer(methods, limits or SocketLimits(), hang_up)
        async with loop.running():
            with listening(node.socket) as listener, listening(node.socket.with_name(REPORT_SOCKET)) as for_reports:
                if passes_fds:
                    for each in (listener, for_reports):
                        each.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 1)
                async with trio.open_nursery() as nursery:
                    await trio.lowlevel.checkpoint()
                    nursery.start_soon(tuning_passes.follow)
                    nursery.start_soon(server.accept, listener)
                    nursery.start_soon(report_server.accept, for_reports)
                    try:
                        yield Controller(
                            node=node,
                            loop=loop,
                            server=server,
                            device_filter=device_filter,
                            methods=methods,
                            callers=callers,
                            processes=processes,
                            seccomp=seccomp,
                            reports=reports,
                            tuning=tuning_passes,
                            host_tuner=host_tuner,
                        )
                    finally:
                        nursery.cancel_scope.cancel()


def register_beforehand(node: Node) -> None:
    """Have another controller build the tree and register an instance: the program itself cannot make groups of plain directories."""

    async def register() -> None:
        node.become(B)
        async with controlled(node), connected(node.socket) as client:
            await client.result("registerCgroup", uuid=B, cpuset="14-17")

    trio.run(register)
    node.instance(B).populate(True)
