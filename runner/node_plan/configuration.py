"""The parser of the kubelet's configuration file: ``KubeletConfiguration`` (``kubelet.config.k8s.io/v1beta1``).

Defaults are those of ``pkg/kubelet/apis/config/v1beta1/defaults.go``. A configuration with which the kubelet would not
start raises :class:`KubeletConfigError` in the kubelet's words (``validation.go``, ``cmd/kubelet/app/server.go``); a
document that its decoder would refuse raises :class:`SpecError` with the path.
"""

from __future__ import annotations

import copy
import difflib
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction

import attrs

from runner.base.cpuset import CpuSet
from runner.base.document_value import Value
from runner.base.errors import UsageError
from runner.facts.hardware import Hardware
from runner.kubelet.pod import HUGEPAGES_PREFIX, MEMORY, SYSTEM_CRITICAL_PRIORITY, read_quantity
from runner.node_plan.admission import KubeletConfiguration
from runner.node_plan.feature_gates import POD_LEVEL_MANAGERS, check_gates
from runner.node_plan.machine_info import machine_info
from runner.node_plan.quirks import FROM_SOURCE_MINOR, KubeletConfigError
from runner.node_plan.topology_manager import Policy, Scope
from runner.node_plan.vendor_forms import form_of, no_configuration

KIND = "KubeletConfiguration"
API_VERSION = "kubelet.config.k8s.io/v1beta1"
DEFAULT_MAX_PODS = 110
"""``maxPods`` if the file has none."""
POD_LEVEL_RESOURCES_SINCE = 34
"""Minor version since which the feature gate ``PodLevelResources`` is on."""
DEFAULT_EVICTION = "100Mi"
"""``evictionHard["memory.available"]`` if the file has no ``evictionHard``."""
RECONCILED_WITHIN = 10.0
"""Seconds, the default of ``cpuManagerReconcilePeriod``; the node's controller waits little longer for the kubelet."""

STRING_KEYS = (
    "cpuManagerPolicy",
    "memoryManagerPolicy",
    "topologyManagerPolicy",
    "topologyManagerScope",
    "reservedSystemCPUs",
)
"""Keys whose value is a string."""
TABLE_KEYS = (
    "cpuManagerPolicyOptions",
    "topologyManagerPolicyOptions",
    "kubeReserved",
    "systemReserved",
    "evictionHard",
    "featureGates",
)
"""Keys whose value is a table of strings; of booleans for ``featureGates``."""
NUMBER_KEYS = ("maxPods", "podsPerCore")
"""Keys whose value is a whole number."""
OTHER_KEYS = (
    *("reservedMemory", "mergeDefaultEvictionSettings", "systemReservedCgroup", "kubeReservedCgroup"),
    *("shutdownGracePeriod", "shutdownGracePeriodCriticalPods", "shutdownGracePeriodByPodPriority"),
    "cpuManagerReconcilePeriod",
)
SIMILAR_KEYS = (
    "evictionMaxPodGracePeriod",
    "evictionMinimumReclaim",
    "evictionPressureTransitionPeriod",
    "evictionSoft",
    "evictionSoftGracePeriod",
    "memorySwap",
)
"""Keys without influence on placement whose names resemble keys with influence: they are not reported as misspelled."""

FLAGS = {
    "reservedcpus": "reservedSystemCPUs",
    "systemreservedcpus": "reservedSystemCPUs",
    "cpumanager": "cpuManagerPolicy",
    "memorymanager": "memoryManagerPolicy",
    "topologymanager": "topologyManagerPolicy",
    "cpupolicy": "cpuManagerPolicy",
    "cpumanageroptions": "cpuManagerPolicyOptions",
    "topologymanageroptions": "topologyManagerPolicyOptions",
}
"""Other spellings of keys in files, without hyphens and in lower case: names of flags, and shortened names."""

_ALPHA, _BETA, _STABLE = "Alpha", "Beta", ""
_SINCE: Mapping[str, Mapping[str, tuple[tuple[int, str], ...]]] = {
    "CPU": {
        "full-pcpus-only": ((33, _STABLE),),
        "distribute-cpus-across-numa": ((33, _BETA),),
        "align-by-socket": ((25, _ALPHA),),
        "distribute-cpus-across-cores": ((31, _ALPHA),),
        "strict-cpu-reservation": ((32, _BETA), (35, _STABLE)),
        "prefer-align-cpus-by-uncorecache": ((32, _ALPHA), (34, _BETA), (36, _STABLE)),
    },
    "Topology": {
        "prefer-closest-numa-nodes": ((32, _STABLE),),
        "max-allowable-numa-nodes": ((31, _BETA), (35, _STABLE)),
    },
}
"""Manager → option → (minor version, maturity since then) (``policy_options.go``)."""


def configuration_among(documents: Iterable[Value]) -> Value:
    """Return the kubelet's configuration among the *documents* of one file.

    It may also be the answer of a running kubelet at ``/configz``, which includes flags and drop-in files.
    There is at least one document. Raises :class:`UsageError` unless exactly one of them is a configuration.
    """
    documents = list(documents)
    configurations = []
    for document in documents:
        if isinstance(document.value, dict) and document.value.get("kind") == KIND:
            configurations.append(document)
        elif isinstance(document.value, dict) and document.value.keys() == {"kubeletconfig"}:
            running = document.get("kubeletconfig")
            running.members()
            head = {"apiVersion": API_VERSION, "kind": KIND}
            configurations.append(Value({**head, **running.value}, running.source, running.path))
    if len(configurations) != 1:
        kinds = (
            ", ".join(repr(each.value.get("kind")) for each in documents if isinstance(each.value, dict)) or "nothing"
        )
        source = documents[0].source.partition(" (document")[0]
        form = "" if configurations else next(filter(None, map(form_of, documents)), "")
        raise no_configuration(source, kinds, form)
    return configurations[0]


def parse_kubelet_configuration(
    document: Value, hardware: Hardware, minor: int
) -> tuple[KubeletConfiguration, tuple[str, ...]]:
    """Parse the settings of *document* that decide about placement, for kubelet 1.*minor* on *hardware*.

    The second element holds notes for the operator, as sentences. Keys without influence on placement are ignored.
    *document* comes from :func:`configuration_among`; *hardware* is needed for percentages of memory and reserved CPUs.
    """
    if document.get("apiVersion").value != API_VERSION:
        document.get("apiVersion").fail(f"must be {API_VERSION!r}, found {document.get('apiVersion').value!r}")
    words = {word: _word(document, word) for word in STRING_KEYS}
    gates = {gate.key: gate.flag() for gate in document.get("featureGates", {}).members()}
    cpu_options = _strings(document.get("cpuManagerPolicyOptions", {}))
    topology_options = _strings(document.get("topologyManagerPolicyOptions", {}))
    _check_words(words)
    check_gates(gates, minor)
    reserved_cpus = _reserved_cpus(document, words["reservedSystemCPUs"], hardware)
    if words["topologyManagerPolicy"] not in {"", Policy.NONE.value}:  # NewManager looks at them after this policy
        _check_options("Topology", topology_options, gates, minor)
    cpu_policy = words["cpuManagerPolicy"] or "none"
    if cpu_policy == "none" and cpu_options:
        listed = " ".join(f"{name}:{value}" for name, value in sorted(cpu_options.items()))
        raise KubeletConfigError(f"None policy: received unsupported options=map[{listed}]")
    _check_options("CPU", cpu_options, gates, minor)
    reserved = [_reserved(document.get(key, {})) for key in ("kubeReserved", "systemReserved")]
    millicpus = math.ceil(sum(each.get("cpu", Fraction()) for each in reserved) * 1000)
    memory = math.ceil(sum(each.get(MEMORY, Fraction()) for each in reserved)) + _eviction(document, hardware)
    configuration = KubeletConfiguration(
        minor=minor,
        cpu_manager_policy=cpu_policy,
        cpu_manager_policy_options=cpu_options,
        reserved_cpus=reserved_cpus,
        reserved_millicpus=1000 * len(reserved_cpus) or millicpus,
        memory_manager_policy=words["memoryManagerPolicy"] or "None",
        reserved_memory=_reserved_memory(document, hardware),
        node_allocatable_memory=memory,
        topology_manager_policy=words["topologyManagerPolicy"] or Policy.NONE.value,
        topology_manager_scope=words["topologyManagerScope"] or Scope.CONTAINER.value,
        topology_manager_policy_options=topology_options,
        max_pods=_count(document, "maxPods", DEFAULT_MAX_PODS),
        pods_per_core=_count(document, "podsPerCore", 0),
        shutdown_graces=_shutdown_graces(document),
        pod_level_resources=gates.get("PodLevelResources", minor >= POD_LEVEL_RESOURCES_SINCE),
        pod_level_resource_managers=gates.get(POD_LEVEL_MANAGERS, False),
    )
    return configuration, tuple(_notes(document, configuration, gates, millicpus))


def _word(document: Value, key: str) -> str:
    value = document.get(key)
    return value.text() if value else ""


def _count(document: Value, key: str, default: int) -> int:
    value = document.get(key)
    if type(value.value) is int and value.value < 0:
        flag = {"maxPods": "--max-pods", "podsPerCore": "--pods-per-core"}[key]
        raise KubeletConfigError(f"invalid configuration: {key} ({flag}) {value.value} must not be a negative number")
    # The defaults take the place of 0 (defaults.go).
    return (value.number() if value else 0) or default


_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def _duration(value: Value) -> float:
    """Read a duration of Go, such as ``1m30s``, in seconds; missing for 0."""
    text = value.text() if value else "0"
    part = r"([0-9]{1,12}(?:\.[0-9]{0,12})?)(h|ms|us|µs|ns|m|s)"
    if text != "0" and not re.fullmatch(f"(?:{part})+", text, re.ASCII):
        value.fail(f"must be a duration like '30s' or '1m30s', found {text!r}")
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(part, text, re.ASCII))


def _shutdown_graces(document: Value) -> tuple[tuple[int, float], ...]:
    """Return the seconds that pods have at a shutdown of the node, by their lowest priority, ascending; none without it.

    ``shutdownGracePeriod`` is divided in two (``nodeshutdown_manager_linux.go``, ``migrateConfig``).
    """
    listed = document.get("shutdownGracePeriodByPodPriority")
    if listed:
        graces = []
        for entry in listed.elements():
            priority = entry.get("priority")
            if type(priority.value) is not int:
                priority.fail(f"must be a whole number, found {priority.value!r}")
            graces.append((priority.value, float(entry.get("shutdownGracePeriodSeconds").number())))
        return tuple(sorted(graces))
    whole, critical = (
        _duration(document.get(key)) for key in ("shutdownGracePeriod", "shutdownGracePeriodCriticalPods")
    )
    if critical > whole:
        raise KubeletConfigError(
            f"invalid configuration: shutdownGracePeriodCriticalPods {critical:g}s must be <= shutdownGracePeriod {whole:g}s"
        )
    return ((0, whole - critical), (SYSTEM_CRITICAL_PRIORITY, critical)) if whole else ()


def _strings(table: Value) -> dict[str, str]:
    return {value.key: value.text() for value in table.members()}


def _check_words(words: Mapping[str, str]) -> None:
    policy, scope = words["topologyManagerPolicy"], words["topologyManagerScope"]
    policies = [each.value for each in Policy]
    if policy and policy not in policies:
        listed = " ".join(f'"{each}"' for each in policies)
        raise KubeletConfigError(
            f'invalid configuration: topologyManagerPolicy (--topology-manager-policy) "{policy}" must be one of: [{listed}]'
        )
    if scope and scope not in {each.value for each in Scope}:
        raise KubeletConfigError(
            f'invalid configuration: topologyManagerScope (--topology-manager-scope) "{scope}" must be one of: "container", or "pod"'
        )


def _check_options(manager: str, options: Iterable[str], gates: Mapping[str, bool], minor: int) -> None:
    """Check that the feature gates allow each of *options* (``CheckPolicyOptionAvailable``).

    Unknown options are left to :class:`CpuPolicyOptions` and to the Topology Manager.
    """
    for option in options:
        levels = [level for since, level in _SINCE[manager].get(option, ()) if since <= minor]
        level = levels[-1] if levels else _STABLE
        if level and not gates.get(f"{manager}ManagerPolicy{level}Options", level == _BETA):
            raise KubeletConfigError(
                f'{manager} Manager Policy {level}-level Options not enabled, but option "{option}" provided'
                f" (featureGates: {manager}ManagerPolicy{level}Options)"
            )


def _reserved_cpus(document: Value, text: str, hardware: Hardware) -> CpuSet:
    if not text:
        return CpuSet()
    for key in ("systemReservedCgroup", "kubeReservedCgroup"):
        if document.get(key).value:
            raise KubeletConfigError(
                "invalid configuration: can't use reservedSystemCPUs (--reserved-cpus) with systemReservedCgroup"
                " (--system-reserved-cgroup) or kubeReservedCgroup (--kube-reserved-cgroup)"
            )
    cpus = document.get("reservedSystemCPUs").cpu_set()
    if not cpus <= hardware.online:
        raise KubeletConfigError(f"reserved-cpus: {text} is not a subset of online-cpus: {hardware.online}")
    return cpus


def _reserved(table: Value) -> dict[str, Fraction]:
    """Read ``kubeReserved`` or ``systemReserved`` (``parseResourceList``)."""
    reserved = {}
    for value in table.members():
        if value.key not in {"cpu", MEMORY, "ephemeral-storage", "pid"}:
            raise KubeletConfigError(f'cannot reserve "{value.key}" resource')
        value.text()
        reserved[value.key] = read_quantity(value)
    return reserved


def _eviction(document: Value, hardware: Hardware) -> int:
    """Return the bytes of free memory below which the kubelet evicts pods; they are reserved (``hardEvictionReservation``)."""
    thresholds = document.get("evictionHard")
    merged = bool(document.get("mergeDefaultEvictionSettings")) and document.get("mergeDefaultEvictionSettings").flag()
    found = _strings(thresholds) if thresholds else {}
    # The defaults take the place of a missing table only, not of an empty one (defaults.go).
    if thresholds and "memory.available" not in found and not merged:
        return 0
    threshold = found.get("memory.available", DEFAULT_EVICTION)
    if threshold in {"0%", "100%"}:
        return 0
    value = attrs.evolve(document.get("evictionHard", {}).get("memory.available"), value=threshold)
    if not threshold.endswith("%"):
        amount = math.ceil(read_quantity(value))
        if not amount:
            raise KubeletConfigError(f"eviction threshold memory.available must be positive: {threshold}")
        return amount
    try:
        share = float(threshold.removesuffix("%"))
    except ValueError:
        value.fail(f"must be a quantity or a percentage, found {threshold!r}")
    if not 0 <= share <= 100:  # noqa: PLR2004 - percent
        value.fail(f"must be a percentage from 0 to 100, found {threshold!r}")
    # The kubelet keeps it as a float32.
    (narrow,) = struct.unpack("f", struct.pack("f", share))
    (narrow,) = struct.unpack("f", struct.pack("f", narrow / 100))
    return int(hardware.total_memory * narrow)


def _reserved_memory(document: Value, hardware: Hardware) -> dict[int, dict[str, int]]:
    """Read ``reservedMemory`` (``validateReservedMemoryConfiguration``, ``getTotalMemoryTypeReserved``)."""
    reserved: dict[int, dict[str, int]] = {}
    listed = document.get("reservedMemory")
    numa_nodes = {node.id for node in machine_info(hardware).numa_nodes}
    for entry in listed.elements() if listed else ():
        numa_node = entry.get("numaNode").number() if entry.get("numaNode") else 0
        for limit in entry.get("limits", {}).members():
            resource, amount = limit.key, math.ceil(read_quantity(limit))
            if resource != MEMORY and not resource.startswith(HUGEPAGES_PREFIX):
                raise KubeletConfigError(
                    f'invalid configuration: the limit type "{resource}" for NUMA node {numa_node} is not supported,'
                    " only [memory hugepages-<HugePageSize>] is accepted"
                )
            if amount == 0:
                raise KubeletConfigError(
                    f"invalid configuration: reserved memory may not be zero for NUMA node {numa_node} and resource"
                    f' "{resource}"'
                )
            if resource in reserved.setdefault(numa_node, {}):
                raise KubeletConfigError(
                    f"invalid configuration: the reserved memory has a duplicate value for NUMA node {numa_node} and"
                    f' resource "{resource}"'
                )
            reserved[numa_node][resource] = amount
        if numa_node not in numa_nodes and document.get("memoryManagerPolicy").value == "Static":
            raise KubeletConfigError(
                f"the reserved memory configuration references a NUMA node {numa_node} that does not exist on this machine"
            )
    return reserved


def _notes(
    document: Value, configuration: KubeletConfiguration, gates: Mapping[str, bool], millicpus: int
) -> Iterator[str]:
    for value in document.members():
        meant = _meant(value.key)
        if meant:
            yield f"{value.path}: the kubelet has no such key and we ignore it; did you mean {meant!r}?"
    if len(configuration.reserved_cpus) and millicpus:
        yield (
            f"reservedSystemCPUs ({len(configuration.reserved_cpus)} CPUs) takes the place of kubeReserved.cpu and"
            f" systemReserved.cpu ({millicpus}m together), which count for nothing"
        )
    if configuration.cpu_manager_policy == "none":
        yield (
            "cpuManagerPolicy is 'none': the kubelet gives no container exclusive CPUs; set it to 'static', unless a DRA driver"
            " gives them, of which nothing is known here"
        )
    period = _duration(document.get("cpuManagerReconcilePeriod"))
    if configuration.cpu_manager_policy != "none" and period > RECONCILED_WITHIN:
        yield (
            f"cpuManagerReconcilePeriod is {period:g} s: a container that starts with CPUs that are no longer its own"
            f" (kubernetes#138731) keeps them as long, but the node's controller waits 12 s, and its instance then ends with status"
            f" 31 and is started again; leave the key out, for {RECONCILED_WITHIN:g} s"
        )
    if configuration.minor >= FROM_SOURCE_MINOR:
        yield (
            f"kubelet 1.{configuration.minor} is planned from its source, by the changes that were merged for it: no kubelet of"
            " this version was asked"
        )
    if gates.get(POD_LEVEL_MANAGERS):
        yield (
            "featureGates.PodLevelResourceManagers is alpha, and planned as kubelet 1.36.2 has it; what 1.37 changes is not"
            " known here"
        )


def _meant(key: str) -> str:
    """Return the key that the unknown *key* stands for: that of a flag, or the nearest one; empty if there is none."""
    known = (*STRING_KEYS, *TABLE_KEYS, *NUMBER_KEYS, *OTHER_KEYS, *SIMILAR_KEYS)
    if key in known:
        return ""
    spellings = {each.lower(): each for each in known} | FLAGS
    near = difflib.get_close_matches(re.sub("[-_]", "", key).lower(), spellings, 1, 0.85)
    return spellings[near[0]] if near else ""


def changed(document: Value, settings: Mapping[str, str]) -> Value:
    """Return *document* with changed *settings*, such as ``topologyManagerPolicy`` or ``cpuManagerPolicyOptions.full-pcpus-only``.

    An empty value removes the key. Raises :class:`UsageError` for a key that cannot be set this way.
    """
    contents = copy.deepcopy(document.value)
    for path, value in settings.items():
        key, _, inner = path.partition(".")
        if inner and key in TABLE_KEYS:
            table = contents.get(key) or {}
            contents[key] = table
        elif not inner and key in STRING_KEYS:
            table, inner = contents, key
        else:
            known = ", ".join((*STRING_KEYS, *(f"{each}.KEY" for each in TABLE_KEYS)))
            near = difflib.get_close_matches(key, (*STRING_KEYS, *TABLE_KEYS), 1)
            hint = f"did you mean {near[0]!r}? " if near and near[0] != key else ""
            raise UsageError(f"cannot change {path!r} by --what-if: {hint}it takes {known}")
        if not isinstance(table, dict):
            document.get(key).members()
        if value:
            table[inner] = {"true": True, "false": False}.get(value, value) if key == "featureGates" else value
        else:
            table.pop(inner, None)
    return Value(contents, document.source, document.path)
