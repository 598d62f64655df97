"""The pod or container identifier, found in the paths of its cgroup and its mounts."""

from __future__ import annotations

import pytest

from runner.kubelet.pod_uid import is_container_uid, parse_container_uid, parse_log_directory, parse_pod_uid

UID = "3ceda12c-3ee9-40fa-9f42-61428fe654a6"
DASHED = UID.replace("-", "_")
STATIC = "0123456789abcdef0123456789abcdef"
ID = "5baab67f1daf9297c60974e50ad9f94f288077161a7c41376478e79aae671e07"


@pytest.mark.parametrize(
    ("cgroup", "roots", "expected"),
    [
        (f"/kubepods.slice/kubepods-pod{DASHED}.slice/cri-containerd-{ID}.scope", [], UID),
        (f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{DASHED}.slice/crio-{ID}.scope", [], UID),
        (f"/kubepods/pod{UID}/{ID}", [], UID),
        (f"/kubepods/system/burstable/pod{UID}/{ID}", [], UID),
        (f"/kubepods.slice/kubepods-system.slice/kubepods-system-pod{DASHED}.slice/cri-containerd-{ID}.scope", [], UID),
        (f"/kubelet/kubepods/besteffort/pod{UID}/{ID}", [], UID),
        (f"/kubepods.slice/kubepods-pod{STATIC}.slice/cri-containerd-{ID}.scope/container", [], STATIC),
        # in a cgroup namespace of its own, the container's mounts still show it
        ("/", ["/", f"/var/lib/kubelet/pods/{UID}/etc-hosts", "/"], UID),
        ("/", [f"/lib/kubelet/pods/{UID}/containers/main/1a2b3c4d"], UID),
        ("/", [f"/kubelet/pods/{STATIC}/volumes/kubernetes.io~configmap/spec"], STATIC),
        # without a kubelet it is the container
        (f"/system.slice/docker-{ID}.scope", [], ID),
        (f"/machine.slice/libpod-{ID}.scope/container", [], ID),
        ("/", [f"/var/lib/docker/containers/{ID}/hosts"], ID),
        ("/", [f"/containers/storage/overlay-containers/{ID}/userdata/hosts"], ID),
        # the pod counts, whatever else is there
        ("/", [f"/overlay-containers/{ID}/userdata/shm", f"/kubelet/pods/{UID}/etc-hosts"], UID),
        ("", [], None),
        ("/", ["/", "/home", "/pods/somewhere/else"], None),
        ("/user.slice/user-1000.slice/session-1.scope", ["/"], None),
        (f"/system.slice/docker-{ID[:63]}.scope", [], None),
        (f"/kubepods.slice/kubepods-pod{UID[:-1]}.slice/x.scope", [], None),
    ],
)
def test_the_pod_uid_or_the_container_id_is_found(cgroup: str, roots: list[str], expected: str | None) -> None:
    assert parse_container_uid(cgroup, roots) == expected
    assert parse_pod_uid(cgroup, roots) == (None if expected == ID else expected)
    assert expected is None or is_container_uid(expected)


def test_the_directory_of_a_pods_logs_has_its_name() -> None:
    assert parse_log_directory(f"prod_web-1_{UID}") == (UID, "prod/web-1")
    assert parse_log_directory("lost+found") is None
