"""What the kubelet's CPU and Memory Managers have decided, from the files they keep.

``cpu_manager_state`` has had four shapes (``pkg/kubelet/cm/cpumanager/state/checkpoint.go``):

====  =======================================================================================================
v1    ``entries``: container id → cpuset (Kubernetes 1.17 and before)
v2    ``entries``: pod uid → container → cpuset
v3    v2 and ``podEntries``: pod uid → ``{"cpuSet": cpuset}``, the set a pod's containers share
v4    v2 or v3 for older kubelets to read, and ``data``, a string of JSON with the same keys, which is what counts
====  =======================================================================================================

The checksums are the kubelet's own affair: it refuses to start on a wrong one, and writes 0 where an older kubelet
shall accept the file. Go decodes keys case-insensitively, so that is done here too.

One reading proves nothing. The kubelet replaces the file twice per allocation, and in between some CPUs are in
neither the shared pool nor an entry; so a reading counts only if it is consistent with the machine and equal to the
one before it (:func:`settled`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import attrs
import trio

from runner.controller.online_cpus import OnlineCpus
from runner.cpuset import CpuSet
from runner.errors import HostError

_LARGEST = 16 * 1024 * 1024
"""A file larger than this is not the kubelet's."""


class StateError(HostError):
    """A file of the kubelet cannot be read, cannot be understood, or contradicts the machine or itself."""


@attrs.frozen
class CpuAssignments:
    """One generation of ``cpu_manager_state``."""

    policy: str
    """``static`` or ``none``."""
    shared_pool: CpuSet
    """``defaultCpuSet``: where everything without exclusive CPUs runs."""
    entries: Mapping[str, Mapping[str, CpuSet]] = attrs.field(factory=dict)
    """Pod uid → container → exclusive CPUs."""
    pods: Mapping[str, CpuSet] = attrs.field(factory=dict)
    """Pod uid → CPUs that the pod's containers share among themselves (pod-level resources)."""
    unattributed: CpuSet = attrs.field(factory=CpuSet)
    """Exclusive CPUs of containers whose pod the file does not name (v1)."""

    def choices(self, uid: str) -> tuple[CpuSet, ...]:
        """Return the cpusets that a container of pod *uid* may have, each once, in the order of their numbers."""
        found = {*self.entries.get(uid, {}).values(), *({self.pods[uid]} if uid in self.pods else ())}
        return tuple(sorted((cpus for cpus in found if cpus), key=list))

    def assigned(self) -> Mapping[str, CpuSet]:
        """Return every pod with exclusive CPUs, and all of them together for each."""
        return {
            uid: _union(*self.entries.get(uid, {}).values(), self.pods.get(uid, CpuSet()))
            for uid in sorted({*self.entries, *self.pods})
        }


@attrs.frozen
class Frozen:
    """There is no state to act on, and *reason* says why: what runs is left as it is."""

    reason: str


@attrs.frozen
class KubeletFiles:
    """Where the kubelet of this node keeps its state (its ``--root-dir``)."""

    directory: Path

    @property
    def cpu_state(self) -> Path:
        """The CPU Manager's file."""
        return self.directory / "cpu_manager_state"

    @property
    def memory_state(self) -> Path:
        """The Memory Manager's file."""
        return self.directory / "memory_manager_state"


def parse_cpu_state(text: bytes) -> CpuAssignments:
    """Parse ``cpu_manager_state`` in any of its four shapes. Raises :class:`StateError`."""
    document = _document(text)
    if "data" in document:  # v4: the rest is for older kubelets, and may be out of date
        data = document["data"]
        if not isinstance(data, str):
            raise StateError(f"'data' is {_kind(data)} instead of a string")
        document = _document(data.encode("utf-8", "surrogatepass"))
    policy = document.get("policyname")
    if policy not in ("static", "none"):
        raise StateError(f"'policyName' is {policy!r} instead of 'static' or 'none'")
    entries: dict[str, Mapping[str, CpuSet]] = {}
    unattributed = CpuSet()
    for key, value in _mapping(document.get("entries"), "entries").items():
        if isinstance(value, str):
            unattributed |= _cpus(value, f"entries.{key}")
        else:
            where = f"entries.{key}"
            entries[key] = {
                container: _cpus(cpus, f"{where}.{container}") for container, cpus in _mapping(value, where).items()
            }
    pods = {
        uid: _cpus(_folded(_mapping(entry, f"podEntries.{uid}")).get("cpuset", ""), f"podEntries.{uid}.cpuSet")
        for uid, entry in _mapping(document.get("podentries"), "podEntries").items()
    }
    return CpuAssignments(
        policy=policy,
        shared_pool=_cpus(document.get("defaultcpuset", ""), "defaultCpuSet"),
        entries=entries,
        pods=pods,
        unattributed=unattributed,
    )


def parse_memory_nodes(text: bytes) -> CpuSet:
    """Return the NUMA nodes that ``memory_manager_state`` names, none under policy None. Raises :class:`StateError`.

    Its newest shape keeps the authoritative part in the string ``data``, like ``cpu_manager_state``.
    """
    document = _document(text)
    if isinstance(data := document.get("data"), str):
        document = _document(data.encode("utf-8", "surrogatepass"))
    nodes = _mapping(document.get("machinestate"), "machineState")
    try:
        return CpuSet(int(node) for node in nodes)
    except ValueError as error:
        raise StateError(f"'machineState' names {sorted(nodes)} instead of NUMA nodes") from error


def verify(state: CpuAssignments, machine: OnlineCpus, reserved: CpuSet) -> None:
    """Check that *state* says of every CPU of *machine* exactly once whose it is. Raises :class:`StateError`.

    *reserved* CPUs may be in no set (``strict-cpu-reservation`` takes them out of the shared pool). CPUs that are
    named but offline are the kubelet's to notice. Containers of one pod may share CPUs: the main container takes
    over those of an init container that has ended.
    """
    if state.policy == "none":
        return
    taken = state.shared_pool
    for uid, cpus in (*state.assigned().items(), ("another container", state.unattributed)):
        if not taken.isdisjoint(cpus):
            raise StateError(f"CPUs {taken & cpus} of {uid} are also in the shared pool or another pod's")
        taken |= cpus
    if not taken <= machine.present:
        raise StateError(f"CPUs {taken - machine.present} do not exist: this machine has {machine.present}")
    if not machine.online - taken <= reserved:
        raise StateError(
            f"CPUs {machine.online - taken - reserved} are neither in the shared pool nor any pod's; under "
            "strict-cpu-reservation say so with --reserved-cpus"
        )


def read_cpu_state(path: Path, machine: OnlineCpus, reserved: CpuSet) -> CpuAssignments:
    """Read *path* once and check it against *machine*. Raises :class:`StateError`, with *path* in its sentence."""
    try:
        state = parse_cpu_state(_read(path))
        verify(state, machine, reserved)
    except StateError as error:
        raise StateError(f"cannot use {path}: {error}") from error.__cause__
    return state


def read_memory_nodes(path: Path) -> CpuSet:
    """Read the NUMA nodes that *path* names; none if it is not there or not to be understood: sysfs knows them too."""
    try:
        return parse_memory_nodes(_read(path))
    except StateError:
        return CpuSet()


def attempt_cpu_state(path: Path, machine: OnlineCpus, reserved: CpuSet) -> CpuAssignments | Frozen:
    """Read *path* once; what is wrong with it becomes a value."""
    try:
        return read_cpu_state(path, machine, reserved)
    except StateError as error:
        cause = error.__cause__
        return Frozen(f"{error}: {cause.strerror}" if isinstance(cause, OSError) else str(error))


async def settled(
    path: Path, machine: OnlineCpus, reserved: CpuSet, *, pause: float, readings: int
) -> CpuAssignments | Frozen:
    """Return what *path* says as soon as two readings in a row, *pause* seconds apart, are consistent and equal.

    After *readings* it gives up: then the file is unusable, or changes faster than it can be believed.
    """
    last = attempt_cpu_state(path, machine, reserved)
    left = readings - 1
    while True:
        await trio.sleep(pause)
        reading = attempt_cpu_state(path, machine, reserved)
        if reading == last and isinstance(reading, CpuAssignments):
            return reading
        last = reading
        left -= 1
        if left <= 0:
            break
    if isinstance(last, CpuAssignments):
        return Frozen(f"cannot use {path}: no two of {readings} readings in a row were equal")
    return last


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            text = stream.read(_LARGEST + 1)
    except OSError as error:
        raise StateError("it cannot be read") from error
    if len(text) > _LARGEST:
        raise StateError(f"it is larger than {_LARGEST} bytes")
    return text


def _document(text: bytes) -> Mapping[str, object]:
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_object)
    except RecursionError as error:
        raise StateError("it is nested too deeply") from error
    except ValueError as error:
        raise StateError(f"it is not JSON: {error}" if text.strip() else "it is empty") from None
    return _folded(_mapping(found, "the document"))


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise StateError("a key appears twice in one object")
    return found


def _folded(mapping: Mapping[str, object]) -> Mapping[str, object]:
    return _object([(key.lower(), value) for key, value in mapping.items()])


def _mapping(value: object, where: str) -> Mapping[str, object]:
    if value is None:  # what Go writes for an empty map, and leaves out under omitempty
        return {}
    if not isinstance(value, dict):
        raise StateError(f"{where!r} is {_kind(value)} instead of an object")
    return value


def _cpus(value: object, where: str) -> CpuSet:
    if not isinstance(value, str):
        raise StateError(f"{where!r} is {_kind(value)} instead of a cpuset like '0-3'")
    if value != value.strip():
        raise StateError(f"{where!r} is {value!r}, with white space around it")
    try:
        return CpuSet.parse(value)
    except ValueError as error:
        raise StateError(f"{where!r}: {error}") from None


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _union(*sets: CpuSet) -> CpuSet:
    total = CpuSet()
    for cpus in sets:
        total |= cpus
    return total
