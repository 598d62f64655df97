from __future__ import annotations

import pytest

from runner.kubelet.pod_cgroups import (
    INSTANCE_NAME,
    bare_groups,
    float_group,
    group_uid,
    instance_group,
    instance_uid,
    is_container_id,
    is_pod_uid,
    parse_bare_container,
    parse_container,
    pod_groups,
    vcpus_group,
)

UID = "416de7c2-21de-472d-817c-fa9d4306cb7d"
OTHER = "3ceda12c-3ee9-40fa-9f42-61428fe654a6"
STATIC = "0123456789abcdef0123456789abcdef"
ID = "5baab67f1daf9297c60974e50ad9f94f288077161a7c41376478e79aae671e07"
U = UID.replace("-", "_")


@pytest.mark.parametrize(
    ("path", "owner", "qos"),
    [
        (f"/kubepods.slice/kubepods-pod{U}.slice/cri-containerd-{ID}.scope", UID, "guaranteed"),
        (f"/kubepods.slice/kubepods-pod{U}.slice/crio-{ID}.scope", UID, "guaranteed"),
        (f"/kubepods.slice/kubepods-pod{U}.slice/docker-{ID}.scope", UID, "guaranteed"),
        (
            f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{U}.slice/cri-containerd-{ID}.scope",
            UID,
            "burstable",
        ),
        (f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{U}.slice/{ID}.scope", UID, "besteffort"),
        (f"/kubepods.slice/kubepods-pod{STATIC}.slice/cri-containerd-{ID}.scope", STATIC, "guaranteed"),
        (
            f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{U}.slice/cri-containerd-{ID}.scope",
            UID,
            "guaranteed",
        ),
        (f"/kubepods/pod{UID}/{ID}", UID, "guaranteed"),
        (f"/kubepods/burstable/pod{UID}/{ID}", UID, "burstable"),
        (f"/kubepods/besteffort/pod{STATIC}/crio-{ID}", STATIC, "besteffort"),
        (f"/kubelet/kubepods/pod{UID}/{ID}", UID, "guaranteed"),
        (f"/kubelet/kubepods/burstable/pod{UID}/{ID}", UID, "burstable"),
        # the system partition of the node (KEP-5894), the three classes of its "Proposed Hierarchy"
        (f"/kubepods/system/pod{UID}/{ID}", UID, "guaranteed"),
        (f"/kubepods/system/burstable/pod{UID}/{ID}", UID, "burstable"),
        (f"/kubepods/system/besteffort/pod{STATIC}/crio-{ID}", STATIC, "besteffort"),
        (
            f"/kubepods.slice/kubepods-system.slice/kubepods-system-pod{U}.slice/cri-containerd-{ID}.scope",
            UID,
            "guaranteed",
        ),
        (
            (
                "/kubepods.slice/kubepods-system.slice/kubepods-system-burstable.slice"
                f"/kubepods-system-burstable-pod{U}.slice/cri-containerd-{ID}.scope"
            ),
            UID,
            "burstable",
        ),
        (
            (
                "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-system.slice"
                "/kubelet-kubepods-system-besteffort.slice"
                f"/kubelet-kubepods-system-besteffort-pod{STATIC}.slice/crio-{ID}.scope"
            ),
            STATIC,
            "besteffort",
        ),
    ],
)
def test_knows_the_kubelets_paths(path: str, owner: str, qos: str) -> None:
    container = parse_container(path)
    assert container is not None
    assert (container.owner, container.qos, container.path) == (owner, qos, path)
    below = parse_container(f"{path}/container/{UID}")
    assert below == container
    assert path.rpartition("/")[0].removeprefix("/") in pod_groups(owner)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/stelia/float",
        "/system.slice/ssh.service",
        "/kubepods.slice",
        f"/kubepods.slice/kubepods-pod{U}.slice",
        f"/kubepods.slice/kubepods-pod{U}.slice/crio-conmon-{ID}.scope",
        f"/kubepods/pod{UID}/crio-conmon-{ID}",
        f"/kubepods.slice/kubepods-pod{UID}.slice/cri-containerd-{ID}.scope",
        f"/kubepods.slice/kubepods-pod{U.upper()}.slice/cri-containerd-{ID}.scope",
        f"/kubepods.slice/kubepods-burstable.slice/kubepods-pod{U}.slice/cri-containerd-{ID}.scope",
        f"/kubepods.slice/kubepods-burstable-pod{U}.slice/cri-containerd-{ID}.scope",
        f"/kubepods.slice/kubepods-pod{U}.slice/cri-containerd-{ID}.scope (deleted)",
        f"/kubepods.slice/kubepods-system.slice/kubepods-pod{U}.slice/cri-containerd-{ID}.scope",
        f"/kubepods.slice/kubepods-system-pod{U}.slice/cri-containerd-{ID}.scope",
        f"/kubepods.slice/kubepods-system.slice/kubepods-burstable.slice/kubepods-burstable-pod{U}.slice/{ID}.scope",
        f"/kubepods.slice/kubepods-burstable.slice/kubepods-system.slice/kubepods-system-pod{U}.slice/{ID}.scope",
        f"/kubepods/burstable/system/pod{UID}/{ID}",
        f"/kubepods/system/system/pod{UID}/{ID}",
        f"/../kubepods.slice/kubepods-pod{U}.slice/cri-containerd-{ID}.scope",
        f"/user.slice/user-1000.slice/user@1000.service/kubepods.slice/kubepods-pod{U}.slice/crio-{ID}.scope",
        f"/system.slice/docker-{ID}.scope/kubepods/pod{UID}/{ID}",
        # paths that a container, or a user with a delegated cgroup, can make
        f"/docker/{ID}/kubepods/pod{UID}/{ID}",
        f"/lxc.payload.box/kubepods/pod{UID}/{ID}",
        f"/lxc/box/kubepods/pod{UID}/{ID}",
        f"/machine.slice/libpod-{ID}.scope/container/kubepods/pod{UID}/{ID}",
        f"/kubepods/kubepods/pod{UID}/{ID}",
    ],
)
def test_other_paths_belong_to_no_container(path: str) -> None:
    assert parse_container(path) is None


def test_a_root_of_the_operator_s_own_may_precede_it_by_either_driver() -> None:
    for path in (
        f"/k8s/kubepods/pod{UID}/{ID}",
        f"/k8s.slice/k8s-kubepods.slice/k8s-kubepods-pod{U}.slice/cri-containerd-{ID}.scope",
    ):
        container = parse_container(f"{path}/below")
        assert container is not None
        assert (container.owner, container.path) == (UID, path)
    mine, theirs = f"/k8s/kubepods/pod{UID}/{ID}", f"/k8s/kubepods/pod{OTHER}/{ID}"
    imitated = parse_container(mine + theirs)
    assert imitated is not None
    assert (imitated.owner, imitated.path) == (UID, mine)


@pytest.mark.parametrize("system", ["", "kubepods-system.slice/kubepods-system-"])
def test_a_container_that_imitates_another_pod_below_itself_is_recognised(system: str) -> None:
    mine = f"/kubepods.slice/kubepods-pod{U}.slice/crio-{ID}.scope"
    theirs = f"/kubepods.slice/{system or 'kubepods-'}pod{OTHER.replace('-', '_')}.slice/crio-{ID}.scope"
    container = parse_container(mine + theirs)
    assert container is not None
    assert (container.owner, container.path) == (UID, mine)


@pytest.mark.parametrize(
    "path",
    [
        f"/system.slice/docker-{ID}.scope",
        f"/docker/{ID}",
        f"/machine.slice/libpod-{ID}.scope",
        f"/libpod_parent/libpod-{ID}",
    ],
)
def test_without_a_kubelet_a_container_is_its_own_owner(path: str) -> None:
    container = parse_bare_container(f"{path}/container")
    assert container is not None
    assert (container.owner, container.path) == (ID, path)
    assert path.removeprefix("/") in bare_groups(ID)
    assert parse_bare_container(f"/user.slice{path}") is None
    assert parse_container(path) is None
    assert INSTANCE_NAME.fullmatch(ID)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../x",
        "a/b",
        "a" * 65,
        "a" * 256,
        "a\0",
        "a\n",
        "A",
        UID.upper(),
        "cgroup.procs",
        ".",
        "..",
        "-a",
        "a-",
        "a_b",
        "a b",
        "\u0430",
        "\uff41",
        "\u0661",
    ],
)
def test_names_that_no_instance_has(name: str) -> None:
    assert INSTANCE_NAME.fullmatch(name) is None


@pytest.mark.parametrize("name", ["123", "a", UID, STATIC, "a" * 64])
def test_names_that_instances_have(name: str) -> None:
    assert INSTANCE_NAME.fullmatch(name)


def test_only_well_formed_names_are_instances() -> None:
    assert instance_uid(instance_group("a-1")) == "a-1"
    for name in ("instance-", "instance-A", "instance-a\n", "instance-a/b", "instance-..", "instances", "float", "x"):
        assert instance_uid(name) is None
    for group in (instance_group, float_group, vcpus_group):
        assert group_uid(group("a-1")) == "a-1"
    for name in (
        "float",
        "instance-a/a",
        "instance-a/float/x",
        "instance-A/float",
        "instance-a/..",
        "x/float",
        "/float",
    ):
        assert group_uid(name) is None


def test_the_names_of_pods_and_containers_are_told_from_others() -> None:
    """Only for these the end of a pod is known from the absence of its cgroup."""
    for name, pod, container in ((UID, True, False), (STATIC, True, False), (ID, False, True), ("123", False, False)):
        assert (is_pod_uid(name), is_container_id(name)) == (pod, container)
    for name in (f"{UID}\n", UID.upper(), U, UID[:-1], f"x{UID}", ""):
        assert not is_pod_uid(name)
    for name in (f"{ID}\n", ID.upper(), ID[1:], ""):
        assert not is_container_id(name)


@pytest.mark.parametrize("above", ["system.slice", "machine.slice", "docker", "libpod_parent"])
@pytest.mark.parametrize("runtime", ["docker", "libpod"])
def test_every_path_that_names_a_container_is_looked_for_when_it_may_have_gone(above: str, runtime: str) -> None:
    """One that was not looked for would be taken for the end of its container."""
    names = [f"{runtime}-{ID}.scope"] if above.endswith(".slice") else [ID, f"libpod-{ID}"]
    for name in names:
        assert parse_bare_container(f"/{above}/{name}") is not None
        assert f"{above}/{name}" in bare_groups(ID)
