"""A pod as the kubelet's managers see it (its containers in their order with their requests), and Kubernetes quantities."""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

import attrs

from runner.base.document_value import Value
from runner.base.values import frozen

CPU = "cpu"
MEMORY = "memory"
EPHEMERAL_STORAGE = "ephemeral-storage"
HUGEPAGES_PREFIX = "hugepages-"
SYSTEM_CRITICAL_PRIORITY = 2_000_000_000
"""``spec.priority`` from which on a pod is critical (``scheduling.SystemCriticalPriority``)."""

_SUFFIXES = (
    {"n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "": Fraction(1)}
    | {letter: Fraction(1000**power) for power, letter in enumerate("kMGTPE", start=1)}
    | {f"{letter}i": Fraction(1024**power) for power, letter in enumerate("KMGTPE", start=1)}
)
_QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))([a-zA-Z]{0,2})(?:[eE]([+-]?[0-9]{1,3}))?", re.ASCII)


LARGEST = Fraction(2**63 - 1)
"""The largest quantity with more than :data:`EXACT_DIGITS` digits: larger ones become this value (``maxAllowed``)."""
EXACT_DIGITS = 18
"""Digits up to which Kubernetes keeps a quantity unchanged (``maxInt64Factors``)."""


def parse_quantity(text: str) -> Fraction:
    """Parse a Kubernetes quantity (``resource.ParseQuantity``): ``"500m"`` is 1/2, ``"1Gi"`` 2^30.

    A quantity with very many digits is limited to :data:`LARGEST`. Raises ``ValueError`` for a text that Kubernetes does not accept.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in _SUFFIXES or (match[2] and match[3]):
        raise ValueError(f"{text!r} is not a quantity like '4', '500m' or '1Gi'")
    amount = Fraction(match[1]) * _SUFFIXES[match[2]] * Fraction(10) ** int(match[3] or 0)
    return min(amount, LARGEST) if len(match[1]) > EXACT_DIGITS else amount


def read_quantity(value: Value) -> Fraction:
    """Read *value*, a string or a number, as a quantity; :class:`SpecError` if it is malformed or negative."""
    if isinstance(value.value, bool) or not isinstance(value.value, str | int | float):
        value.fail(f"must be a quantity like '4', '500m' or '1Gi', found {value.value!r}")
    try:
        quantity = parse_quantity(str(value.value))
    except ValueError as error:
        value.fail(str(error))
    if quantity < 0:
        value.fail(f"must not be negative, found {value.value!r}")
    return quantity


def format_bytes(amount: int) -> str:
    """Write *amount* bytes as Kubernetes does (``BinarySI``): ``"1Gi"``, ``"1536Mi"``, ``"0"``."""
    power = 0
    while amount and amount % 1024 == 0 and power < len("KMGTPE"):
        amount //= 1024
        power += 1
    return f"{amount}{' KMGTPE'[power]}i" if power else str(amount)


class ContainerKind(enum.Enum):
    """The kind of a container, which decides when it runs."""

    INIT = "init"
    """An init container: it ends before the next container starts."""
    SIDECAR = "sidecar"
    """A restartable init container: it starts at its place in the order and runs until the pod ends."""
    APP = "app"
    """A container of ``spec.containers``; all app containers of a pod run together."""


@frozen
class Container:
    """The requests of one container."""

    name: str
    millicpus: int = 0
    """Thousandths of a CPU."""
    memory: Mapping[str, int] = attrs.field(factory=dict)
    """``memory`` and each ``hugepages-<size>`` → bytes."""
    kind: ContainerKind = ContainerKind.APP
    devices: Mapping[str, int] = attrs.field(factory=dict)
    """Resource of a device plugin → number of devices."""
    ephemeral_storage: int = 0
    """Bytes."""
    guaranteed: bool = True
    """Whether it requests CPUs and memory, and both equal its limits (``IsContainerEquivalentQOSGuaranteed``).

    It matters only in a pod with :attr:`Pod.pod_level_managed`: in other Guaranteed pods it is true for every container.
    """

    @property
    def requests(self) -> Mapping[str, int]:
        """The requests without devices: thousandths of CPUs, and bytes."""
        return {CPU: self.millicpus, **self.memory, EPHEMERAL_STORAGE: self.ephemeral_storage}


class QosClass(enum.Enum):
    """``status.qosClass`` of a pod."""

    GUARANTEED = "Guaranteed"
    BURSTABLE = "Burstable"
    BEST_EFFORT = "BestEffort"


@frozen
class Pod:
    """One pod."""

    pod_uid: str
    containers: tuple[Container, ...]
    """In the order in which they are admitted: init containers and sidecars first."""
    qos: QosClass = QosClass.GUARANTEED
    pod_level_resources: bool = False
    """Whether ``spec.resources`` names a resource; the static policies then assign nothing, unless *pod_level_managed*, or
    the kubelet is an older one (:meth:`~runner.node_plan.admission.Kubelet.seen_by_managers`)."""
    pod_level_requests: Mapping[str, int] = attrs.field(factory=dict)
    """``spec.resources.requests``, in the units of :attr:`Container.requests`; they count instead of the containers'."""
    overhead: Mapping[str, int] = attrs.field(factory=dict)
    """``spec.overhead`` of its RuntimeClass, in the same units."""
    pod_level_managed: bool = False
    """Whether the managers consider its pod-level resources (gate ``PodLevelResourceManagers``). It is not taken from the manifest:
    :meth:`~runner.node_plan.admission.Kubelet.seen_by_managers` sets it."""
    priority: int | None = None
    """``spec.priority``."""
    static: bool = False
    """Whether the kubelet read it from a file or a URL, not from the API server."""

    @property
    def guaranteed(self) -> bool:
        """Return whether its QoS class is Guaranteed: limits of CPU and memory equal the requests."""
        return self.qos is QosClass.GUARANTEED

    @property
    def critical(self) -> bool:
        """Return whether other pods are preempted for it (``types.IsCriticalPod``)."""
        return self.static or (self.priority is not None and self.priority >= SYSTEM_CRITICAL_PRIORITY)

    @property
    def requests(self) -> Mapping[str, int]:
        """The requests of the pod as a whole, without devices (``PodRequests``); units as :attr:`Container.requests`."""
        resources = dict.fromkeys(resource for container in self.containers for resource in container.requests)
        total = {resource: peak(self, functools.partial(_requested, resource)) for resource in resources}
        total.update(self.pod_level_requests)
        for resource, amount in self.overhead.items():
            total[resource] = total.get(resource, 0) + amount
        return total

    @property
    def init_containers(self) -> tuple[Container, ...]:
        """Init containers and sidecars, in order."""
        return tuple(container for container in self.containers if container.kind is not ContainerKind.APP)


def _requested(resource: str, container: Container) -> int:
    return container.requests.get(resource, 0)


def peak(pod: Pod, asked: Callable[[Container], int]) -> int:
    """Return the largest amount that *pod* uses at one time; *asked* returns the amount of one container.

    Sidecars run together with every later init container and with all app containers.
    """
    sidecars = most_at_start = apps = 0
    for container in pod.containers:
        amount = asked(container)
        if container.kind is ContainerKind.SIDECAR:
            sidecars += amount
        elif container.kind is ContainerKind.INIT:
            most_at_start = max(most_at_start, sidecars + amount)
        else:
            apps += amount
    return max(most_at_start, sidecars + apps)
