"""The pod of this process, from its cgroup, its mounts and its environment; and the cgroups available here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import PurePosixPath

import attrs

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, explain
from runner.facts.host import CLAIMED_CPUS, IN_A_POD, HostFacts, PodQos
from runner.facts.roots import Roots
from runner.kernel.cgroup import THREADED_CONTROLLERS, Cgroup
from runner.kernel.file_prober import probe_file
from runner.kernel.mounts import read_mounts
from runner.kernel.procfs import Procfs
from runner.kubelet.pod_cgroups import parse_container
from runner.kubelet.pod_uid import is_container_uid, parse_container_uid, parse_pod_uid
from runner.plan.host_checks import qos_of_oom_score_adj
from runner.spec.instance import InstanceSpec


def with_pod(facts: HostFacts, spec: InstanceSpec, roots: Roots) -> HostFacts:
    """Add the facts that the plan needs about the pod, and about the placements that *spec* allows."""
    procfs, placement = Procfs(roots.proc), spec.cpu.placement
    cgroup, pod = procfs.cgroup(), read_pod(procfs, os.environ)
    container_uid, controller_error, controller_remedy = None, None, ""
    if placement in {"auto", "controller"}:
        container_uid, controller_error, controller_remedy = _controller(spec.cpu.controller, procfs, cgroup)
    return attrs.evolve(
        facts,
        pod=pod,
        container_uid=container_uid,
        pod_uid=_pod_uid(procfs, cgroup, of_container=pod is not None or not facts.machines_network),
        controller_error=controller_error,
        controller_remedy=controller_remedy,
        delegation_error=_delegation_error(roots, cgroup) if placement in {"auto", "delegated"} else None,
    )


def read_pod(procfs: Procfs, environment: Mapping[str, str]) -> PodQos | None:
    """Return the QoS class of the pod this process is in, or ``None`` if nothing shows that it is in one.

    In a cgroup namespace of its own its path is ``/``. Then the kubelet's ``oom_score_adj`` tells the QoS class.
    """
    cgroup = procfs.cgroup()
    if "kubepods" in cgroup:
        container = parse_container(cgroup)
        if container is not None:
            return PodQos(container.qos, f"its cgroup is {container.path}", _claimed_cpus(environment))
    if IN_A_POD not in environment:
        return None
    value = procfs.oom_score_adj()
    return PodQos(qos_of_oom_score_adj(value), f"its oom_score_adj is {value}", _claimed_cpus(environment))


def _claimed_cpus(environment: Mapping[str, str]) -> CpuSet:
    """Return the CPUs of the container's resource claims; none if the variables do not come from a DRA driver."""
    try:
        return CpuSet.union(CpuSet.parse(cpus) for name, cpus in environment.items() if name.startswith(CLAIMED_CPUS))
    except ValueError:
        return CpuSet()


def _pod_uid(procfs: Procfs, cgroup: str, *, of_container: bool) -> str | None:
    """Return the pod's UID, never a container's id, which changes with each restart.

    Only the mounts *of_container* are this pod's: a node has those of every pod.
    """
    if "POD_UID" in os.environ or not of_container:
        return os.environ.get("POD_UID") or None
    return parse_pod_uid(cgroup, _mounted_roots(procfs))


def _mounted_roots(procfs: Procfs) -> list[str]:
    return [str(each.root) for each in read_mounts(procfs.root)]


def _controller(socket: PurePosixPath, procfs: Procfs, cgroup: str) -> tuple[str | None, str | None, str]:
    """Return this container's identifier at the controller, the reason why the controller cannot be asked, and the remedy.

    The identifier comes from the Downward API, or else from the container's cgroup and mounts. A controller that does not answer may be
    starting.
    """
    if probe_file(socket.parent).kind != "directory":
        return None, f"its socket's directory {str(socket.parent)!r} is not here", "mount it from the node"
    set_pod_uid = "set the environment variable POD_UID from the Downward API (fieldRef: metadata.uid)"
    container_uid = os.environ.get("POD_UID") or parse_container_uid(cgroup, _mounted_roots(procfs))
    if container_uid is None:
        return None, "the pod's UID is not to be seen here", set_pod_uid
    if not is_container_uid(container_uid):
        return container_uid, f"{container_uid!r} is no pod's UID", set_pod_uid
    return container_uid, None, ""


def _delegation_error(roots: Roots, cgroup: str) -> str | None:
    if not cgroup:
        return "there is no cgroup v2 here"
    try:
        return _undelegated(Cgroup(roots.cgroup).at(cgroup))
    except (HostError, ValueError) as error:
        return explain(error)


def _undelegated(group: Cgroup) -> str | None:
    """Return the reason why a container cannot divide the members of its own cgroup, *group*, among threaded groups below.

    It needs a writable group that has the cpuset controller, enables no domain controller for its children ("Threads" of cgroup-v2.rst),
    and holds no process of a hidden PID namespace.
    """
    if not (group.path / "cgroup.type").exists():
        return f"{group.path} is not a container's cgroup"
    if not os.access(group.path / "cgroup.subtree_control", os.W_OK):
        return f"{group.path} may not be written; a privileged container's may"
    if "cpuset" not in group.controllers():
        return f"{group.path} has no cpuset controller"
    if (kind := group.kind()) not in {"domain", "domain threaded"}:
        return f"{group.path} is {kind!r}"
    if 0 in group.processes():
        return f"processes of others are in {group.path}"
    domain = sorted(group.enabled() - THREADED_CONTROLLERS)
    return f"{group.path} hands down {', '.join(domain)}" if domain else None
