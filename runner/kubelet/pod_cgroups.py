"""The cgroup paths of pods' containers, parsed and built, and the names of the controller's own cgroups.

The kubelet names a pod's cgroup in two ways (``pkg/kubelet/cm``: ``cgroup_manager_linux.go``, ``helpers_linux.go``),
by its ``cgroupDriver``:

==========  ==========================================================================================
systemd     ``/kubepods.slice/[kubepods-QOS.slice/]kubepods[-QOS]-podUID.slice/RUNTIME-ID.scope``
cgroupfs    ``/kubepods/[QOS/]podUID/ID``
==========  ==========================================================================================

QOS is ``burstable`` or ``besteffort``; a Guaranteed pod has none. Below systemd the UID's hyphens are underscores. From Kubernetes 1.37 on
a kubelet with a ``systemPartition`` (KEP-5894, feature gate ``NodeSystemPartition``) has the pods of some namespaces in the same tree below
``/kubepods/system``: ``/kubepods/system/[QOS/]podUID/ID``, and by systemd
``/kubepods.slice/kubepods-system.slice/[kubepods-system-QOS.slice/]kubepods-system[-QOS]-podUID.slice/RUNTIME-ID.scope``. The kubelet's
``cgroupRoot`` may precede it (kind: ``/kubelet.slice/kubelet-kubepods.slice/…``, by cgroupfs one plain name, ``/k8s/kubepods/…``). No other
cgroup may precede it: below a docker container, a scope or a user's service its owner could make any path, so the pods of a kubelet running
inside one are not recognised. Static pods have UIDs of 32 hexadecimal digits. A container may have groups of its own below (CRI-O with
crun: ``…/container``).

A path is parsed from the left and the *first* match counts: a container can create cgroups below its own whose path
looks like another pod's, but it cannot change the path above its own.
"""

from __future__ import annotations

import re
from itertools import accumulate, product

from runner.base.values import frozen

INSTANCE_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?", re.ASCII)
"""Pattern of an instance's name: a pod's UID, or another name without characters that are special in a path."""

FLOAT, VCPUS = "float", "vcpus"
"""The names of the two cgroups of an instance: of all its threads but the vCPUs, and of these."""
_INSTANCE = "instance-"
NOT_SEALED = "user.instance-runner.not-sealed"
"""The extended attribute of an instance's domain with the reason why the last attempt to make it an isolated partition failed, empty if it
succeeded; it ends with the cgroup."""

KUBEPODS = ("kubepods.slice", "kubelet.slice/kubelet-kubepods.slice", "kubepods", "kubelet/kubepods")
"""The possible paths of the cgroup of all pods, relative to the root of the hierarchy, without a ``cgroupRoot`` of its own."""

UID = r"[0-9a-f]{8}(?:%s[0-9a-f]{4}){3}%s[0-9a-f]{12}|[0-9a-f]{32}"
"""Pattern of a pod's UID, with placeholders for the separators of its parts: hyphens, or underscores in the name of a slice; a static pod's
UID has none."""
_ID = r"[0-9A-Za-z_]{1,128}"
_FLAGS = re.ASCII | re.DOTALL
_RUNTIMES = "cri-containerd|crio|docker|libpod"

# Not compiled here, which takes 4 ms: they are compiled when first used, and `re` caches them.
_SYSTEMD = (
    r"(?P<pod>(?:/[^/]+\.slice)*?/(?P<root>(?:[^/]+-)?)kubepods\.slice"
    r"(?:/(?P=root)kubepods-(?P<system>system)\.slice)?"
    r"(?:/(?P=root)kubepods(?(system)-system)-(?P<qos>burstable|besteffort)\.slice)?"
    rf"/(?P=root)kubepods(?(system)-system)(?(qos)-(?P=qos))-pod(?P<uid>{UID % ('_', '_')})\.slice)"
    rf"/(?:(?P<runtime>{_RUNTIMES})-)?(?P<id>{_ID})\.scope(?P<below>/.*)?"
)
_CGROUPFS = (
    r"(?P<pod>(?:/(?!kubepods/)[0-9A-Za-z_-]+)?/kubepods(?:/system)?(?:/(?P<qos>burstable|besteffort))?"
    rf"/pod(?P<uid>{UID % ('-', '-')}))"
    rf"/(?:(?P<runtime>{_RUNTIMES})-)?(?P<id>{_ID})(?P<below>/.*)?"
)
_NO_KUBELET = (
    r"(?P<pod>)/(?:(?:system|machine)\.slice/(?P<runtime>docker|libpod)-(?P<id>[0-9a-f]{64})\.scope"
    r"|(?:docker|libpod_parent)/(?:libpod-)?(?P<bare>[0-9a-f]{64}))(?P<below>/.*)?"
)


@frozen
class ContainerCgroup:
    """The cgroup of one container."""

    owner: str
    """The pod's UID; without a kubelet the container's id."""
    qos: str
    """``guaranteed``, ``burstable``, ``besteffort``, or empty without a kubelet."""
    path: str
    """The path of the container's own cgroup, without any cgroup that the container has created below it."""


def parse_container(path: str) -> ContainerCgroup | None:
    """Return the container of *path* (as in ``/proc/PID/cgroup``), or ``None`` if it belongs to no pod."""
    match = re.fullmatch(_SYSTEMD, path, _FLAGS) or re.fullmatch(_CGROUPFS, path, _FLAGS)
    if match is None:
        return None
    below = match["below"] or ""
    return ContainerCgroup(
        owner=match["uid"].replace("_", "-"),
        qos=match["qos"] or "guaranteed",
        path=path.removesuffix(below) if below else path,
    )


def parse_bare_container(path: str) -> ContainerCgroup | None:
    """Return the container of *path* on a machine without a kubelet, where docker or podman starts containers."""
    match = re.fullmatch(_NO_KUBELET, path, _FLAGS)
    if match is None:
        return None
    below = match["below"] or ""
    return ContainerCgroup(owner=match["id"] or match["bare"], qos="", path=path.removesuffix(below) if below else path)


def instance_group(pod_uid: str) -> str:
    """Return the name of the domain of the instance in pod *pod_uid*; the inverse of :func:`instance_uid`."""
    return f"{_INSTANCE}{pod_uid}"


def instance_uid(group: str) -> str | None:
    """Return the pod UID in the name *group* of an instance's domain; ``None`` if it is none."""
    pod_uid = group.removeprefix(_INSTANCE)
    return pod_uid if pod_uid != group and INSTANCE_NAME.fullmatch(pod_uid) else None


def float_group(pod_uid: str) -> str:
    """Return the path, below the controller's root, of the cgroup of all threads of pod *pod_uid* but the vCPUs."""
    return f"{instance_group(pod_uid)}/{FLOAT}"


def vcpus_group(pod_uid: str) -> str:
    """Return the path, below the controller's root, of the cgroup of the vCPU threads of pod *pod_uid*."""
    return f"{instance_group(pod_uid)}/{VCPUS}"


def group_uid(group: str) -> str | None:
    """Return the pod UID of the domain, the float or the vCPUs' cgroup with the path *group*; ``None`` if it is none of these."""
    domain, _, below = group.partition("/")
    return instance_uid(domain) if below in {"", FLOAT, VCPUS} else None


def is_pod_uid(name: str) -> bool:
    """Tell whether *name* is a UID that the kubelet gives pods, so that :func:`pod_groups` names their cgroups."""
    return re.fullmatch(UID % ("-", "-"), name, re.ASCII) is not None


def is_container_id(name: str) -> bool:
    """Tell whether *name* is an id that docker and podman give containers, for :func:`bare_groups`."""
    return re.fullmatch(r"[0-9a-f]{64}", name, re.ASCII) is not None


def pod_groups(pod_uid: str) -> tuple[str, ...]:
    """Return the possible paths of the cgroup of pod *pod_uid*, relative to the root of the hierarchy."""
    underscored = pod_uid.replace("-", "_")
    paths = []
    for partition, qos in product(((), ("system",)), ((), ("burstable",), ("besteffort",))):
        names = ("kubepods", *partition, *qos)
        for above in ((), ("kubelet",)):
            slices = list(accumulate((*above, *names, f"pod{underscored}"), "{}-{}".format))
            paths.append("/".join(f"{each}.slice" for each in slices))
            paths.append("/".join((*above, *names, f"pod{pod_uid}")))
    return tuple(paths)


def bare_groups(container: str) -> tuple[str, ...]:
    """Return the possible paths of the cgroup of *container* (an id) under docker or podman, without a kubelet."""
    scopes = (
        f"{above}.slice/{name}-{container}.scope" for above in ("system", "machine") for name in ("docker", "libpod")
    )
    plain = (f"{above}/{name}{container}" for above in ("docker", "libpod_parent") for name in ("", "libpod-"))
    return (*scopes, *plain)
