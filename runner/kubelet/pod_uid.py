"""The UID of a pod: of a process's pod, from its cgroup path and mounts, and from the name of a directory of logs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from runner.kubelet.pod_cgroups import UID, parse_bare_container, parse_container

_UID = UID % ("[-_]", "[-_]")
_CONTAINER_ID = r"[0-9a-f]{64}"


def parse_pod_uid(cgroup: str, mounted: Iterable[str]) -> str | None:
    """Return the UID of the pod of a container, or ``None`` if neither its cgroup path *cgroup* nor its mounts contain one.

    The kubelet names the pod's cgroup by its UID (:mod:`runner.kubelet.pod_cgroups`), and mounts ``/etc/hosts`` and the
    termination log from ``/var/lib/kubelet/pods/UID``. *mounted* are the roots of the container's mounts, as paths in
    their own file systems (field 4 of ``/proc/PID/mountinfo``).
    """
    container = parse_container(cgroup)
    if container is not None:
        return container.owner
    source = next(filter(None, (re.search(rf"/pods/({_UID})/", path, re.ASCII) for path in mounted)), None)
    return None if source is None else source[1].replace("_", "-")


def parse_container_uid(cgroup: str, mounted: Collection[str]) -> str | None:
    """Return the pod's UID, without a kubelet the container's id, or ``None`` if neither is found.

    The arguments are those of :func:`parse_pod_uid`. docker and podman keep ``/etc/hosts`` in a directory whose name is
    the container's id.
    """
    pod_uid = parse_pod_uid(cgroup, mounted)
    if pod_uid is not None:
        return pod_uid
    for path in (cgroup, *mounted):
        container = parse_bare_container(path)
        if container is not None:
            return container.owner
        directory = re.search(rf"[/-]containers?/({_CONTAINER_ID})/", path, re.ASCII)
        if directory is not None:
            return directory[1]
    return None


def is_container_uid(text: str) -> bool:
    """Tell whether *text* has the form of a pod's UID or of a container's id."""
    return re.fullmatch(rf"{_UID}|{_CONTAINER_ID}", text, re.ASCII) is not None


def parse_log_directory(name: str) -> tuple[str, str] | None:
    """Return the UID of a pod, and its namespace and name, from the *name* of its log directory; ``None`` if it is not one.

    It is ``NAMESPACE_NAME_UID`` (``BuildPodLogsDirectory`` in ``pkg/kubelet/kuberuntime/helpers.go``).
    """
    match name.split("_"):
        case [namespace, pod, pod_uid]:
            return pod_uid, f"{namespace}/{pod}"
        case _:
            return None
