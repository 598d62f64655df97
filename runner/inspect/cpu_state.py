"""The assignment of a Kubernetes node's CPUs from its files alone, for programs that only report."""

from __future__ import annotations

from functools import partial

from runner.base.cpuset import CpuSet
from runner.base.errors import SpecError
from runner.facts.hardware import OnlineCpus
from runner.kernel.kubelet_files import Frozen, attempt_claims, settled
from runner.kubelet.claims import CDI_FILES, claimed_cpu_state, parse_cpu_claims
from runner.kubelet.state import CpuState
from runner.kubelet.state_files import KubeletFiles, parse_verified_cpu_state


async def settled_cpu_state(
    files: KubeletFiles, machine: OnlineCpus, *, pause: float, readings: int
) -> CpuState | Frozen:
    """Return the content of *files* once two readings, *pause* seconds apart, are equal; after *readings* the reason why not.

    Under the CPU Manager's policy ``none`` the pods' CPUs are those of their resource claims. Reserved CPUs may be in no set,
    because no file names them.
    """
    parse = partial(parse_verified_cpu_state, machine=machine, reserved=machine.present)
    state = await settled(files.cpu_state, parse, pause=pause, readings=readings)
    if isinstance(state, Frozen) or state.policy != "none":
        return state
    claims = attempt_claims(files.claims, files.cdi, CDI_FILES, parse_cpu_claims)
    if isinstance(claims, Frozen):
        return claims
    try:
        return claimed_cpu_state(claims, None, machine, CpuSet(), str(files.cdi))
    except SpecError as error:
        return Frozen(f"cannot use {error}")
