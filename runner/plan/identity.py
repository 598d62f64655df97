"""The identity of an instance, the source of all derived values that must be unique."""

from __future__ import annotations

from runner.base.values import frozen
from runner.facts.host import HostFacts
from runner.spec.instance import InstanceSpec


@frozen
class Identity:
    """A text that no other instance has, and that is the same after restarts of the pod and after renewals."""

    value: str = ""
    origin: str = ""
    """Its source, as words of a message."""
    repeated: bool = False
    """Whether another container of this machine may have the same text: one with the same state directory and name."""


def identify(spec: InstanceSpec, facts: HostFacts) -> Identity:
    """Return the identity of the instance: the UUID in its spec, or else that of its pod or state directory.

    Its name alone does not suffice, because the pods of one manifest share it. A container's id changes with each `docker run`.
    """
    name = spec.instance.name
    if spec.instance.uuid is not None:
        return Identity(spec.instance.uuid, "instance.uuid")
    if facts.pod_uid is not None:
        return Identity(f"{facts.pod_uid}/{name}", "the pod's UID")
    machine = "this machine's id and " if facts.machine_id else ""
    return Identity(
        f"{facts.machine_id}/{facts.state_directory}/{name}",
        f"{machine}the state directory, without a pod",
        repeated=not facts.machines_network,  # directories of the machine itself are unique
    )
