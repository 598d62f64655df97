"""CPUs from resource claims (Dynamic Resource Allocation): the pod of each, from three sources that only root can write (pure).

Under the CPU Manager's policy ``none`` a DRA driver may give pods CPUs of their own: kubernetes-sigs/dra-driver-cpu, whose
names are known here. Everything else of the node then shares the CPUs that are in no claim.

=============================  =========================================================================================
source                         what it says
=============================  =========================================================================================
``dra_manager_state``          claim → UIDs of its pods, by the kubelet. It holds a claim from before the driver is asked for
                               its CPUs until after they are taken back, when the pod's containers have ended
                               (``PrepareResources`` and ``UnprepareResources`` of ``pkg/kubelet/cm/dra/manager.go``)
the driver's CDI specification  claim → CPUs: the container runtime gives the environment variable in it,
                               ``DRA_CPUSET_<claim uid>``, to the container, and the driver, as a plugin of the runtime
                               (NRI), makes these CPUs the container's ``cpuset.cpus`` (``pkg/driver/cdi.go`` and
                               ``pkg/driver/nri_hooks.go`` of the driver). Release 0.1 has one file for all claims
the PodResources API           container → its CDI devices (:mod:`runner.kubelet.pod_resources`)
=============================  =========================================================================================

The environment of a process is never read, because a pod controls its content. A specification of a claim unknown to the kubelet is a
leftover, and ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import NoReturn

import attrs

from runner.base.cpuset import CpuSet
from runner.base.document_value import Value
from runner.base.errors import Problem, SpecError
from runner.base.values import frozen
from runner.facts.hardware import OnlineCpus
from runner.facts.host import CLAIMED_CPUS
from runner.kubelet.go_json import cpu_set, field, members, one_error, parse_document
from runner.kubelet.pod_resources import ContainerResources
from runner.kubelet.state import CpuState

DRIVER = "dra.cpu"
"""The driver's name, by which it is registered with the kubelet."""
DRIVER_SOCKETS = f"{DRIVER}*-reg.sock"
"""The names of its sockets in ``plugins_registry`` (``draplugin.go`` of ``k8s.io/dynamic-resource-allocation``)."""
CDI_KIND = "dra.k8s.io/cpu"
CDI_FILES = ("dra.k8s.io-cpu_*.json", f"{DRIVER}.json")
"""The names of its specifications: from release 0.2 on, and in 0.1."""
_VERSION = "checkpoint.dra.kubelet.k8s.io/v1"
"""The version of ``dra_manager_state`` in Kubernetes 1.36 (``pkg/kubelet/cm/dra/state/checkpoint.go``)."""


@frozen
class PreparedClaim:
    """A resource claim that pods of this node have, or are about to get."""

    uid: str
    name: str
    """``namespace/name``."""
    pods: frozenset[str]
    """The UIDs of its pods; a driver may forbid more than one, as this one does when it creates their containers."""
    cdi_devices: frozenset[str]
    """The qualified names of its CDI devices; empty until its drivers have answered."""


@frozen
class ClaimedCpus:
    """The CPUs of a claim, as the driver has written them."""

    device: str
    """The qualified name of the CDI device."""
    claim: str
    """The claim's UID."""
    cpus: CpuSet


@frozen
class CpuClaims:
    """The claims of the node that have CPUs, or may get some."""

    claims: tuple[PreparedClaim, ...] = ()
    devices: tuple[ClaimedCpus, ...] = ()
    """The devices of these claims only."""

    def awaited(self, containers: Iterable[ContainerResources]) -> frozenset[str]:
        """Return the pods' CPU devices that none of *containers* has: the kubelet lists only active pods."""
        listed = {device for container in containers for device in container.cdi_devices}
        return frozenset(each.device for each in self.devices if self._ready(each)) - listed

    def pods_of(self, devices: Iterable[str]) -> frozenset[str]:
        """Return the pods that have all claims of *devices*."""
        pods = [self._claim(each).pods for each in self.devices if each.device in devices]
        return functools.reduce(frozenset.__and__, pods) if pods else frozenset()

    def _claim(self, device: ClaimedCpus) -> PreparedClaim:
        return next(claim for claim in self.claims if claim.uid == device.claim)

    def _ready(self, device: ClaimedCpus) -> bool:
        claim = self._claim(device)
        return bool(claim.pods) and device.device in claim.cdi_devices


def parse_claims(text: bytes, source: str) -> tuple[PreparedClaim, ...]:
    """Parse ``dra_manager_state`` (``pkg/kubelet/cm/dra/state/state.go``); *source* is its name in :class:`SpecError`."""
    with one_error(source):
        document = parse_document(text, source)
        version = field(document, "apiVersion")
        if version.value != _VERSION:  # an unknown format must not be read as "no claims"
            version.fail(f"must be {_VERSION!r}, found {version.value!r}")
        return tuple(
            PreparedClaim(
                field(claim, "ClaimUID").text(),
                f"{field(claim, 'Namespace').text()}/{field(claim, 'ClaimName').text()}",
                frozenset(pod.key for pod in members(field(claim, "PodUIDs"))),
                frozenset(_cdi_devices(claim)),
            )
            for claim in field(document, "ClaimInfoStateList", []).elements()
        )


def _cdi_devices(claim: Value) -> Iterator[str]:
    for driver in members(field(claim, "DriverState")):
        for device in field(driver, "Devices", []).elements():
            for name in field(device, "CDIDeviceIDs", []).elements():
                yield name.text()


def parse_cpu_devices(text: bytes, source: str) -> tuple[ClaimedCpus, ...]:
    """Parse a CDI specification of the driver's; *source* is its name in :class:`SpecError`."""
    with one_error(source):
        document = parse_document(text, source)
        kind = field(document, "kind")
        if kind.text() != CDI_KIND:
            kind.fail(f"must be {CDI_KIND!r}, found {kind.value!r}")
        return tuple(_claimed(device) for device in field(document, "devices", []).elements())


def _claimed(device: Value) -> ClaimedCpus:
    environment = field(field(device, "containerEdits", {}), "env", [])
    variables = [each for each in environment.elements() if each.text().startswith(CLAIMED_CPUS)]
    if len(variables) != 1:
        environment.fail(f"must have one variable {CLAIMED_CPUS}…, found {len(variables)}")
    claim, equals, cpus = variables[0].text().removeprefix(CLAIMED_CPUS).partition("=")
    if not claim or not equals:
        variables[0].fail(f"must be {CLAIMED_CPUS}<claim uid>=<CPUs>, found {variables[0].value!r}")
    name = f"{CDI_KIND}={field(device, 'name').text()}"
    return ClaimedCpus(name, claim, cpu_set(attrs.evolve(variables[0], value=cpus)))


def parse_cpu_claims(state: bytes | None, source: str, specifications: Mapping[str, bytes]) -> CpuClaims:
    """Parse ``dra_manager_state``, ``None`` for a kubelet without it, and the driver's *specifications* by their names.

    Without a specification no claim has CPUs, and the kubelet's file is not needed.
    """
    if not specifications:
        return CpuClaims()
    claims = () if state is None else parse_claims(state, source)
    known = {claim.uid for claim in claims}
    devices = (device for name in sorted(specifications) for device in parse_cpu_devices(specifications[name], name))
    # After an update of the driver, a claim is in the files of two releases.
    return CpuClaims(claims, tuple(dict.fromkeys(device for device in devices if device.claim in known)))


def claimed_cpu_state(
    claims: CpuClaims,
    containers: Iterable[ContainerResources] | None,
    machine: OnlineCpus,
    reserved: CpuSet,
    source: str,
) -> CpuState:
    """Return the CPUs assigned by *claims*: each of *containers* has the CPUs of all its claims.

    If *containers* is ``None`` (in a program that only reports), each claim counts separately. CPUs without a known container are
    unattributed. The shared pool has all others, except the *reserved* ones, which the driver does not assign either. Raises
    :class:`SpecError` with *source* if two claims have a CPU, or one has a CPU that *machine* has not.
    """

    def fail(reason: str) -> NoReturn:
        raise SpecError(source, [Problem("", reason)])

    taken = CpuSet()
    for each in claims.devices:
        if not taken.isdisjoint(each.cpus):
            fail(f"CPUs {taken & each.cpus} of the claim {each.claim} are given away twice")
        if not each.cpus <= machine.present:
            fail(
                f"CPUs {each.cpus - machine.present} of the claim {each.claim} do not exist: this machine has {machine.present}"
            )
        taken |= each.cpus
    assignments: dict[str, dict[str, CpuSet]] = {}
    attributed = CpuSet()
    for name, devices in _holders(claims, containers):
        cpus = CpuSet.union(each.cpus for each in claims.devices if each.device in devices)
        for pod_uid in claims.pods_of(devices) if cpus else ():
            assignments.setdefault(pod_uid, {})[name] = cpus
            attributed |= cpus
    shared = machine.online - taken
    return CpuState(
        "none", shared - reserved or shared, dict(sorted(assignments.items())), unattributed=taken - attributed
    )


def _holders(
    claims: CpuClaims, containers: Iterable[ContainerResources] | None
) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield a name and the CDI devices of each container, or of each claim."""
    if containers is None:
        yield from ((each.claim, frozenset({each.device})) for each in claims.devices)
    else:
        yield from ((f"{each.pod}/{each.name}", each.cdi_devices) for each in containers)
