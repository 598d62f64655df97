"""The source of a node's CPU assignments: the kubelet's files first, then its PodResources API for anything missing in them.

Under the CPU Manager's policy ``static`` ``cpu_manager_state`` has the CPUs of each container. Under ``none`` the source is the node's
resource claims (:mod:`runner.kubelet.claims`), if a DRA driver gives CPUs to any, and the API for the container of each claim.

The API answers as long as the kubelet runs, 100 times a second at most, to all its clients together
(``pkg/kubelet/apis/podresources/constants.go``). It is asked only if the files do not suffice, so that most nodes do not need it, and each
wait is limited to :attr:`CpuSource.answer_within`.
"""

from __future__ import annotations

import logging
import math
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import attrs
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, RunnerError, SpecError, explain
from runner.base.events import ControllerEvent
from runner.kernel.hardware_reader import read_online_cpus
from runner.kernel.kubelet_files import Frozen, attempt, attempt_claims, is_registered, settled
from runner.kubelet.claims import CDI_FILES, DRIVER_SOCKETS, CpuClaims, claimed_cpu_state, parse_cpu_claims
from runner.kubelet.pod_resources import (
    GET_ALLOCATABLE,
    LIST,
    NO_FIELDS,
    ContainerResources,
    parse_allocatable_cpus,
    parse_pods,
)
from runner.kubelet.state import CpuState
from runner.kubelet.state_files import KubeletFiles, parse_cpu_state, parse_verified_cpu_state

log = logging.getLogger(__name__)


@attrs.define(eq=False)
class CpuSource:
    """The CPU assignments of the node whose kubelet has *files*, on the machine whose sysfs is *sys*."""

    files: KubeletFiles
    sys: Path
    reserved: CpuSet
    """The CPUs of ``--reserved-cpus``. If empty, the kubelet is asked for them when they are needed."""
    answer_within: float = 2.0
    """Seconds that a pass waits for the kubelet's answer."""
    asked_again: float = 1.0
    """Seconds after which the kubelet is asked again for a container missing in its answer, although no file has changed."""
    _reserved_by_kubelet: CpuSet = attrs.field(factory=CpuSet)
    _claims: CpuClaims = attrs.field(factory=CpuClaims)
    """The claims of the last settled state."""
    _containers: tuple[ContainerResources, ...] = ()
    """The kubelet's answer for them: the containers with CPUs from claims."""
    _asked_at: float = -math.inf
    """The time of the last question, on trio's clock."""

    async def settle(self, *, pause: float, readings: int) -> CpuState | Frozen:
        """Return the assignments once two readings, *pause* seconds apart, are equal; at most *readings* readings."""
        state = await self._settle_files(pause, readings)
        if isinstance(state, Frozen):
            return state
        if state.policy != "none":
            self._claims = CpuClaims()
            return state
        return await self._settle_claims(pause, readings)

    def reads(self, name: str) -> bool:
        """Tell whether *name* is one of the files that are read."""
        files = self.files
        return name in (files.cpu_state.name, files.memory_state.name, files.claims.name) or any(
            fnmatchcase(name, pattern) for pattern in CDI_FILES
        )

    @property
    def awaits_containers(self) -> bool:
        """Return whether there are claimed CPUs whose container the kubelet has not listed yet, so that it must be asked again."""
        return bool(self._claims.awaited(self._containers))

    def has_claims(self) -> bool:
        """Tell whether a DRA driver gives CPUs to pods of this node, or may do so."""
        return bool(self._claims.devices) or is_registered(self.files.plugins, DRIVER_SOCKETS)

    async def _settle_files(self, pause: float, readings: int) -> CpuState | Frozen:
        state = await self._settled(pause, readings)
        if not isinstance(state, Frozen) or self.reserved or not self._lacks_reserved():
            return state
        try:
            reserved = await self._ask_for_reserved()
        except RunnerError as error:
            return Frozen(f"{state.reason}; the kubelet itself does not tell: {explain(error)}")
        if reserved == self._reserved_by_kubelet:
            return state
        log.info(ControllerEvent.RESERVED_CPUS_READ, reserved)
        self._reserved_by_kubelet = reserved
        return await self._settled(pause, readings)

    def current(self, state: CpuState) -> CpuState | Frozen:
        """Return *state*, a result of :meth:`settle`, if the files still hold it; otherwise the reason why it must not be used."""
        path = self.files.cpu_state
        now = attempt(path, self._parser())
        if not isinstance(now, Frozen) and now.policy == "none":
            path = self.files.claims
            claims = self._read_claims()
            now = claims if isinstance(claims, Frozen) else self._claimed(claims)
        return now if now == state or isinstance(now, Frozen) else Frozen(f"{path} is changing")

    async def _settle_claims(self, pause: float, readings: int) -> CpuState | Frozen:
        """Return the assignments by claims: read the files, ask the kubelet if they are new, and read them again.

        Each file is replaced as a whole, and has a claim's CPUs before its container is created, so a reading is never inconsistent: one
        suffices if the kubelet was not asked meanwhile. Only two successive claims on the same CPUs may be seen together, until the first
        one's file is removed.
        """
        state: CpuState | Frozen = Frozen("")
        for reading in range(max(1, readings)):
            if reading:
                await trio.sleep(pause)
            claims = self._read_claims()
            if isinstance(claims, Frozen):
                state = claims
                continue
            if self._has_to_ask(claims):
                try:
                    containers = parse_pods(await self._ask(LIST))
                except RunnerError as error:
                    return Frozen(f"cannot tell which containers have the CPUs of resource claims: {explain(error)}")
                self._asked_at = trio.current_time()
                if self._read_claims() != claims:
                    state = Frozen(f"{self.files.claims} changes faster than it can be read")
                    continue
                self._containers = tuple(each for each in containers if claims.pods_of(each.cdi_devices))
            self._claims = claims
            state = self._claimed(claims)
            if not isinstance(state, Frozen):
                break
        return state

    def _has_to_ask(self, claims: CpuClaims) -> bool:
        """Tell whether the kubelet's last answer does not cover *claims*."""
        if not claims.devices:
            return False
        if claims != self._claims:
            return True
        return self.awaits_containers and trio.current_time() >= self._asked_at + self.asked_again

    def _read_claims(self) -> CpuClaims | Frozen:
        return attempt_claims(self.files.claims, self.files.cdi, CDI_FILES, parse_cpu_claims)

    def _claimed(self, claims: CpuClaims) -> CpuState | Frozen:
        try:
            return claimed_cpu_state(
                claims, self._containers, read_online_cpus(self.sys), self.reserved, str(self.files.cdi)
            )
        except SpecError as error:
            return Frozen(f"cannot use {error}")

    async def _settled(self, pause: float, readings: int) -> CpuState | Frozen:
        return await settled(self.files.cpu_state, self._parser(), pause=pause, readings=readings)

    def _parser(self) -> partial[CpuState]:
        reserved = self.reserved or self._reserved_by_kubelet
        return partial(parse_verified_cpu_state, machine=read_online_cpus(self.sys), reserved=reserved)

    def _lacks_reserved(self) -> bool:
        """Tell whether some CPUs are neither in the shared pool nor a pod's, such as reserved ones under ``strict-cpu-reservation``."""
        state = attempt(self.files.cpu_state, parse_cpu_state)
        return (
            not isinstance(state, Frozen)
            and state.policy == "static"
            and not read_online_cpus(self.sys).online <= state.shared_pool | state.exclusive()
        )

    async def _ask_for_reserved(self) -> CpuSet:
        """Return the CPUs that the kubelet gives to no pod. Raises :class:`RunnerError`."""
        allocatable = parse_allocatable_cpus(await self._ask(GET_ALLOCATABLE))
        if not allocatable:  # for a moment at its start (cpu_manager.go, Start)
            raise HostError(f"{self.files.pod_resources} says that no pod may have CPUs of its own")
        return read_online_cpus(self.sys).online - allocatable

    async def _ask(self, method: str) -> bytes:
        from runner.protocol.grpc import call

        with trio.move_on_after(self.answer_within):
            return await call(self.files.pod_resources, method, NO_FIELDS)
        raise HostError(f"{self.files.pod_resources} has not answered within {self.answer_within:g} s")
