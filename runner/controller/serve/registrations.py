"""``registerCgroup`` and ``deregisterCgroup``: adding an instance to the tree, and removing it."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial

import attrs
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import explain, explained
from runner.base.events import ControllerEvent
from runner.base.values import frozen
from runner.controller.privileged_start import DeviceFilter
from runner.controller.serve import identity
from runner.controller.serve.callers import Callers, RpcRequest, busy_error
from runner.controller.serve.cpu_checks import check_cpus, check_holders
from runner.controller.serve.identity import ContainerIdentity, RequestRefusedError
from runner.controller.serve.memory_grants import MemoryRequest, memory_granted, most_memory
from runner.controller.serve.parameters import parse_cpuset, parse_number
from runner.controller.serve.seals import unsealed
from runner.controller.serve.seccomp import SeccompCheck
from runner.controller.serve.timeouts import Timeouts
from runner.controller.serve.turns import Turns
from runner.controller.tree.faults import Fault
from runner.controller.tree.loop import ReconcileLoop
from runner.controller.tree.model import Requested
from runner.controller.tree.reconcile import floats_on
from runner.kernel.cgroup import MEMORY_EVENTS, Cgroup, CgroupError
from runner.protocol.controller_client import PROTOCOL
from runner.protocol.jsonrpc import RpcResult

log = logging.getLogger(__name__)

MOST_WAITING = 32
"""Registrations that may wait for the kubelet at a time: half of the connections, so that others remain."""
REST = 10
"""Rest of an instance after a registration, as a multiple of its duration: a registration reads the whole tree, and no request is answered
meanwhile."""


MOST_REMOVED = 32
"""Removed groups of an instance that the kernel may keep. Each takes some 2 KiB for each CPU of the machine (measured with 8 and 16), which
are charged to no cgroup, and there may be as many as the pod holds sockets or ended processes."""


@frozen
class Registrations:
    """Registers the instances of *callers* in the tree of *loop*, and removes them."""

    callers: Callers
    loop: ReconcileLoop
    device_filter: DeviceFilter
    seccomp: SeccompCheck
    timeouts: Timeouts
    own_cpus: CpuSet
    """The CPUs for instances where there is no kubelet."""
    seals_required: bool
    """Whether a client that names no protocol version, and so seals nothing, is refused."""
    most_waiting: int = MOST_WAITING
    _turns: Turns = attrs.field(factory=Turns)
    """Turns by instance."""
    _waits: trio.Semaphore = attrs.field(init=False)

    @_waits.default
    def _none_waits(self) -> trio.Semaphore:
        return trio.Semaphore(self.most_waiting)

    async def register(self, request: RpcRequest) -> RpcResult:
        """Answer ``registerCgroup``."""
        # First, because parsing the list is worthwhile only for a peer that may act.
        caller = await self.callers.identified(request)
        pod_uid, arguments = request.pod_uid, request.arguments
        asked = parse_cpuset(arguments["cpuset"])
        protocol = parse_number(arguments, "protocol", PROTOCOL)
        memory = MemoryRequest(parse_number(arguments, "overhead", 0), charged=arguments.get("charged") is True)
        if protocol < PROTOCOL:
            raise RequestRefusedError(
                identity.HOST,
                f"cannot register instance {pod_uid!r}: its runner is older than this controller (protocol {protocol} "
                f"instead of {PROTOCOL})",
                lasting=True,
                remedy="update its image",
            )
        if "protocol" not in arguments and self.seals_required:
            raise RequestRefusedError(
                identity.HOST,
                f"cannot register instance {pod_uid!r}: its client names no protocol, and so does not seal its CPUs, which "
                "--partitions required demands",
                lasting=True,
                remedy="use instance-runner",
            )
        if (peer := self.callers.peer(request.identify)) is not None:
            self.seccomp.check(peer, pod_uid)
        register_once = partial(self._register_once, request, caller, asked, memory)
        result = await self._agreed(partial(self._in_turn, pod_uid, register_once), caller)
        if caller is not None:
            await self._float_kernel_threads(request, self.callers.pods.mount.at(caller.cgroup))
        return result

    async def _in_turn(self, pod_uid: str, register_once: Callable[[], RpcResult]) -> RpcResult:
        """Register once, after a rest of :data:`REST` times the duration of the instance's last registration."""
        async with self._turns.of(pod_uid):
            await self._turns.rested(pod_uid)
            began = time.perf_counter()
            try:
                return register_once()
            finally:
                self._turns.rest(REST * (time.perf_counter() - began), pod_uid)

    async def _agreed(
        self, register_once: Callable[[], Awaitable[RpcResult]], caller: ContainerIdentity | None
    ) -> RpcResult:
        """Register as soon as the kubelet's state and the container's CPUs agree; both are followed until then."""
        try:
            return await register_once()
        except RequestRefusedError as error:
            if error.lasting:
                raise
            refused = error
        try:
            self._waits.acquire_nowait()
        except trio.WouldBlock:
            reason = f"{self.most_waiting} registrations wait for the kubelet"
            raise busy_error(self.loop.counters, reason) from refused
        deadline = trio.current_time() + self.timeouts.agreement
        scopes = [] if caller is None else [self.callers.pods.mount.at(caller.container.path)]
        try:
            with self.loop.following([each.path / "cpuset.cpus" for each in scopes]):
                while True:
                    with trio.move_on_at(deadline) as timeout:
                        await self.loop.next_pass()
                    try:
                        return await register_once()
                    except RequestRefusedError as again:
                        if again.lasting or timeout.cancelled_caught:
                            raise
        finally:
            self._waits.release()

    def _register_once(
        self, request: RpcRequest, caller: ContainerIdentity | None, asked: CpuSet, memory: MemoryRequest
    ) -> RpcResult:
        """Register without waiting, so that nothing changes between the decision and its effect."""
        pods, tree, pod_uid = self.callers.pods, self.loop.tree, request.pod_uid
        self.callers.peer(request.identify)  # it still lives
        scope = None if caller is None or pods.trusting else pods.mount.at(caller.container.path).cpus()
        check_cpus(self.loop, pod_uid, asked, scope, self.own_cpus)
        observed = check_holders(self.loop, pod_uid, asked, self.timeouts.handover)
        container, limits = None if caller is None else caller.container, self.loop.limits
        most = partial(most_memory, container, asked, memory.overhead, pods, limits, self.loop.machine().online)
        memory_max = memory_granted(pod_uid, memory, most, limits, observed)
        mems = None if caller is None else pods.mount.at(caller.cgroup).effective_mems()
        group = tree.vcpus_of(pod_uid)
        existed = group.exists()
        if not existed and (removed := tree.removed_below(pod_uid)) > MOST_REMOVED:
            raise RequestRefusedError(
                identity.HOST,
                f"cannot register instance {pod_uid!r}: {removed} removed cgroups of it are kept by open sockets or ended processes",
                lasting=True,
                remedy="end the program that has the sockets, or does not wait for its children",
            )
        faults = self.loop.pass_over({pod_uid: Requested(asked, memory_max, mems)}, observed)
        reasons = [*self._reasons_against(pod_uid, asked, faults)]
        effective = group.effective_cpus() if not reasons else CpuSet()
        if effective != asked:
            if not existed:
                group.remove()
            reason = "; ".join(found for found, _ in reasons) or f"the kernel has put '{effective}' into effect"
            raise RequestRefusedError(
                identity.HOST,
                f"cannot register instance {pod_uid!r} with CPUs '{asked}': {reason}",
                lasting=True,
                remedy="; ".join(dict.fromkeys(remedy for _, remedy in reasons if remedy)),
            )
        what = "found" if existed else "registered"
        self.loop.log_limit.log(
            log.info, ControllerEvent.INSTANCE_REGISTERED, what, pod_uid, asked, kind=what, peer=pod_uid
        )
        return self._answer(pod_uid, caller, effective)

    def _reasons_against(self, pod_uid: str, asked: CpuSet, faults: Iterable[Fault]) -> Iterator[tuple[str, str]]:
        """Yield the reasons, each with its remedy, why *pod_uid* cannot run on the CPUs *asked* after a pass with *faults*."""
        found = [
            (fault.reason, fault.remedy)
            for fault in faults
            if fault.pod_uid in (pod_uid, None) and not fault.group_usable
        ]
        others = floats_on(asked, self.loop.recently_observed(), but=pod_uid)
        found += [(f"the float of pod {other!r} could not be shrunk, and runs on them still", "") for other in others]
        if not found and not self.loop.tree.float_of(pod_uid).exists():
            found.append(("no CPU is left for its float", ""))
        yield from found
        if missing := self.device_filter.missing:  # checked after the pass, which recreates a removed root
            yield explained(missing)

    def _answer(self, pod_uid: str, caller: ContainerIdentity | None, effective: CpuSet) -> RpcResult:
        """Return the answer to a registration; the order of the descriptors is that of the protocol (``runner/controller/protocol.md``)."""
        tree = self.loop.tree
        group, float_cgroup, domain = tree.vcpus_of(pod_uid), tree.float_of(pod_uid), tree.domain(pod_uid)
        control_files = [(float_cgroup, "cgroup.procs"), (group, "cgroup.threads")]
        if caller is not None:
            own = self.callers.pods.mount.at(caller.cgroup)
            control_files += [(own, "cgroup.procs"), (float_cgroup, "cgroup.threads")]
            if domain.read_if_there(MEMORY_EVENTS) is not None:
                control_files.append((domain, MEMORY_EVENTS))
        return RpcResult(
            {
                "cgroup_path": str(group.path),
                "float_path": str(float_cgroup.path),
                "cpuset": str(effective),
                "protocol": PROTOCOL,
                "memory": domain.memory_limit(),
            },
            partial(self.loop.held_files.sent.open, control_files),
        )

    async def _float_kernel_threads(self, request: RpcRequest, own: Cgroup) -> None:
        """Move the kernel threads that work for the instance off its CPUs; its runner cannot even see them.

        QEMU starts in its pod's cgroup, to which its memory is charged, and the kernel puts its own threads for QEMU there too
        (``cgroup_attach_task_all``): ``vhost-`` before Linux 6.4, ``kvm-nx-lpage-recovery-`` before 6.13. The runner registers once more
        when QEMU is up.
        """
        limit, pod_uid, procfs = self.loop.log_limit, request.pod_uid, self.callers.pods.procfs

        def move(pid: int) -> None:
            if not procfs.is_kernel_thread(pid):
                return
            try:
                self.loop.tree.float_of(pod_uid).admit(pid)
                limit.log(log.info, ControllerEvent.KERNEL_THREAD_MOVED, pid, peer=pod_uid)
            except CgroupError as error:
                limit.log(log.warning, ControllerEvent.KERNEL_THREAD_NOT_MOVED, pid, explain(error), peer=pod_uid)

        await self.callers.examine_each(own.each_process(), self.callers.peer(request.identify), move)

    async def deregister(self, request: RpcRequest) -> RpcResult:
        """Answer ``deregisterCgroup``."""
        await self.callers.authorize(request)
        pod_uid, group = request.pod_uid, self.loop.tree.vcpus_of(request.pod_uid)
        if not group.exists():
            return RpcResult({"removed": False})
        unsealed(self.loop, pod_uid)
        with trio.move_on_after(self.timeouts.emptying):
            while not group.remove():
                await self.loop.next_pass()  # a change of its cgroup.events starts one
        if not group.remove():
            threads = " ".join(map(str, sorted(group.threads())[:8]))
            raise RequestRefusedError(
                identity.HOST,
                f"cannot deregister instance {pod_uid!r}: threads {threads} are still in {group.path}",
                lasting=True,
                remedy="end them, or move them to the pod's cgroup",
            )
        self.loop.log_limit.log(log.info, ControllerEvent.INSTANCE_DEREGISTERED, pod_uid, peer=pod_uid)
        self.loop.pass_over({})
        return RpcResult({"removed": True})
