"""Where a node's CPU assignments are read: the kubelet's files first, and its PodResources API for what they do not hold.

The API answers as long as the kubelet runs, 100 times a second at most, to all its clients together
(``pkg/kubelet/apis/podresources/constants.go``). It is asked only where a file does not suffice, so that a node where the files
do has no need of it; and no longer than :data:`ANSWER_WITHIN`.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import attrs
import trio

from runner.cpuset import CpuSet
from runner.errors import HostError, RunnerError, explain
from runner.facts.hardware import OnlineCpus
from runner.kernel.kubelet_files import Frozen, attempt, settled
from runner.kernel.sysfs import read_online_cpus
from runner.kubelet.pod_resources import GET_ALLOCATABLE, NO_FIELDS, parse_allocatable_cpus
from runner.kubelet.state import CpuState
from runner.kubelet.state_files import KubeletFiles, parse_cpu_state, parse_verified_cpu_state

log = logging.getLogger(__name__)

ANSWER_WITHIN = 2.0
"""Seconds for which a pass waits for the kubelet's answer."""


@attrs.define(eq=False)
class CpuSource:
    """The CPU assignments of the node whose kubelet has *files*, on the machine whose sysfs is *sys*."""

    files: KubeletFiles
    sys: Path
    reserved: CpuSet
    """The CPUs of ``--reserved-cpus``. Where it is empty and they are needed, the kubelet is asked for them."""
    _reserved_by_kubelet: CpuSet = attrs.field(factory=CpuSet)

    async def settle(self, *, pause: float, readings: int) -> CpuState | Frozen:
        """Return the assignments, read until they are the same twice, *pause* seconds apart, at most *readings* times."""
        state = await self._settled(pause, readings)
        if not isinstance(state, Frozen) or self.reserved or not self._lacks_reserved():
            return state
        try:
            reserved = await self._ask_for_reserved()
        except RunnerError as error:
            return Frozen(f"{state.reason}; the kubelet itself does not tell: {explain(error)}")
        if reserved == self._reserved_by_kubelet:
            return state
        log.info("reserved CPUs read cpus=%s", reserved)
        self._reserved_by_kubelet = reserved
        return await self._settled(pause, readings)

    def current(self, state: CpuState) -> CpuState | Frozen:
        """Return *state* if the files still hold it, which :meth:`settle` has returned; else why no decision can rest on it."""
        now = attempt(self.files.cpu_state, self._parser())
        if now == state or isinstance(now, Frozen):
            return now
        return Frozen(f"{self.files.cpu_state} is changing")

    async def _settled(self, pause: float, readings: int) -> CpuState | Frozen:
        return await settled(self.files.cpu_state, self._parser(), pause=pause, readings=readings)

    def _parser(self) -> partial[CpuState]:
        reserved = self.reserved or self._reserved_by_kubelet
        return partial(parse_verified_cpu_state, machine=self.machine(), reserved=reserved)

    def machine(self) -> OnlineCpus:
        """Read the machine."""
        return read_online_cpus(self.sys)

    def _lacks_reserved(self) -> bool:
        """Tell whether some CPUs are neither in the shared pool nor a pod's, as the reserved ones under ``strict-cpu-reservation``."""
        state = attempt(self.files.cpu_state, parse_cpu_state)
        return (
            not isinstance(state, Frozen)
            and state.policy == "static"
            and not self.machine().online <= state.shared_pool | state.exclusive()
        )

    async def _ask_for_reserved(self) -> CpuSet:
        """Return the CPUs that the kubelet gives to no pod. Raises :class:`RunnerError`."""
        allocatable = parse_allocatable_cpus(await self._ask(GET_ALLOCATABLE))
        if not allocatable:  # for a moment at its start (cpu_manager.go, Start)
            raise HostError(f"{self.files.pod_resources} says that no pod may have CPUs of its own")
        return self.machine().online - allocatable

    async def _ask(self, method: str) -> bytes:
        from runner.protocol.grpc import call

        with trio.move_on_after(ANSWER_WITHIN):
            return await call(self.files.pod_resources, method, NO_FIELDS)
        raise HostError(f"{self.files.pod_resources} has not answered within {ANSWER_WITHIN:g} s")
