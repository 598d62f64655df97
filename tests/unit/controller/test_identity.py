from __future__ import annotations

import itertools

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.controller.serve.identity import (
    ContainerIdentity,
    ContainerProcess,
    RequestRefusedError,
    check_agreement,
    check_container,
    identify_container,
)
from runner.kernel.peers import INIT_PID_NAMESPACE, Peer
from runner.kubelet.pod_cgroups import ContainerCgroup
from runner.kubelet.state import CpuPolicy, CpuState

OURS, POD_A, POD_B = 4_026_540_001, 4_026_540_100, 4_026_540_200
A = ContainerCgroup("a", "guaranteed", "/kubepods/poda/1")
B = ContainerCgroup("b", "guaranteed", "/kubepods/podb/2")
ANCHOR_A = ContainerProcess(A, "/kubepods/poda/1/container", POD_A)
ANCHOR_B = ContainerProcess(B, "/kubepods/podb/2", POD_B)
PAUSE_A = ContainerProcess(ContainerCgroup("a", "guaranteed", "/kubepods/poda/0"), "/kubepods/poda/0", 4_026_540_111)


def peer(namespace: int = POD_A, inner: int = 1, cgroup: str = A.path) -> Peer:
    return Peer(pid=4711, inner_pid=inner, pid_namespace=namespace, nested=False, user_id=1000, cgroup=cgroup)


def test_the_init_of_a_pod_is_its_container() -> None:
    assert identify_container(peer(), A, (), "a", OURS) == ContainerIdentity(A, A.path)
    below = f"{A.path}/container"
    assert identify_container(peer(cgroup=below), A, (), "a", OURS) == ContainerIdentity(A, below)


def test_in_float_it_is_identified_by_the_pid_namespace_of_its_anchor() -> None:
    floating = peer(cgroup="/stelia/float")
    assert identify_container(floating, None, (PAUSE_A, ANCHOR_A), "a", OURS) == ContainerIdentity(A, ANCHOR_A.cgroup)
    for residents in ((), (PAUSE_A,), (ANCHOR_B,), (ContainerProcess(A, A.path, None),)):
        with pytest.raises(RequestRefusedError, match="keep the anchor running"):
            identify_container(floating, None, residents, "a", OURS)


@pytest.mark.parametrize("listed_first", ["instance", "debugger"])
def test_beside_a_debugger_in_its_pid_namespace_it_is_the_container_that_was_there_first(listed_first: str) -> None:
    """``kubectl debug --target`` puts the processes of a container of their own into the instance's PID namespace."""
    anchor = attrs.evolve(ANCHOR_A, container_id=70)
    other = ContainerCgroup("a", "guaranteed", "/kubepods/poda/9")
    debugger = ContainerProcess(other, other.path, POD_A, container_id=71)
    residents = (anchor, debugger) if listed_first == "instance" else (debugger, anchor)
    found = identify_container(peer(cgroup="/stelia/float"), None, residents, "a", OURS)
    assert found == ContainerIdentity(A, ANCHOR_A.cgroup)


@pytest.mark.parametrize(
    "above", ["/docker/" + "b" * 64, "/system.slice/docker-" + "b" * 64 + ".scope", "/user.slice/k3s-rootless.service"]
)
def test_a_pod_of_a_kubelet_within_a_container_is_told_apart(above: str) -> None:
    nested = peer(cgroup=f"{above}/kubepods/poda/{'c' * 64}")
    with pytest.raises(
        RequestRefusedError, match=f"its kubelet's pods are in '{above}', .*a cgroup namespace of its own"
    ):
        identify_container(nested, None, (), "a", OURS)


@pytest.mark.parametrize("above", ["", "/system.slice", "/system.slice/containerd.service"])
def test_a_runtime_with_another_driver_than_the_kubelets_is_named(above: str) -> None:
    """A containerd without SystemdCgroup, below a kubelet with cgroupDriver: systemd."""
    misnamed = peer(cgroup=f"{above}/kubepods-poda.slice:cri-containerd:{'c' * 64}")
    with pytest.raises(RequestRefusedError, match=r"is in no pod's: .*; give both the same cgroup driver"):
        identify_container(misnamed, None, (), "a", OURS)


def test_a_process_cannot_act_for_another_pod() -> None:
    with pytest.raises(RequestRefusedError, match="process 4711 belongs to 'a'"):
        identify_container(peer(), A, (), "b", OURS)
    # From float, claiming B: none of B's processes is in A's namespace.
    with pytest.raises(RequestRefusedError, match="keep the anchor"):
        identify_container(peer(cgroup="/stelia/float"), None, (ANCHOR_B,), "b", OURS)


@pytest.mark.parametrize("namespace", [INIT_PID_NAMESPACE, OURS])
def test_a_pod_in_the_hosts_pid_namespace_is_refused(namespace: int) -> None:
    with pytest.raises(RequestRefusedError, match="hostPID"):
        identify_container(peer(namespace), A, (), "a", OURS)


def test_a_shell_or_a_shared_pid_namespace_is_refused() -> None:
    with pytest.raises(RequestRefusedError, match="shareProcessNamespace"):
        identify_container(peer(inner=37), A, (), "a", OURS)


def test_only_the_init_of_the_pod_is_accepted_in_every_small_case() -> None:
    """Accepted is only the init of a private PID namespace, in the pod's own cgroup or sharing it with its anchor."""
    for namespace, inner, own, residents in itertools.product(
        (POD_A, POD_B, OURS, INIT_PID_NAMESPACE), (1, 2), (A, B, None), ((), (ANCHOR_A,), (PAUSE_A, ANCHOR_A))
    ):
        allowed = (
            namespace in (POD_A, POD_B)
            and inner == 1
            and (own == A or (own is None and namespace == POD_A and ANCHOR_A in residents))
        )
        if allowed:
            assert identify_container(peer(namespace, inner), own, residents, "a", OURS).container == A
        else:
            with pytest.raises(RequestRefusedError) as refused:
                identify_container(peer(namespace, inner), own, residents, "a", OURS)
            assert (refused.value.reason, refused.value.lasting) == ("identity", True)


def test_a_controller_in_a_cgroup_namespace_of_its_own_is_an_error() -> None:
    with pytest.raises(RequestRefusedError, match="outside this program's cgroup namespace"):
        identify_container(peer(cgroup="/../kubepods/poda/1"), None, (), "a", OURS)


def test_a_sidecar_does_not_end_the_instance_of_its_pod() -> None:
    home = ContainerIdentity(A, A.path)
    check_container(home, CpuSet([4, 5]), CpuSet([4, 5]), "a")
    check_container(home, CpuSet([4, 5, 6]), CpuSet([4, 5]), "a")
    with pytest.raises(RequestRefusedError, match="another container's"):
        check_container(home, CpuSet([0, 1]), CpuSet([4, 5]), "a")


SETS = [CpuSet(), CpuSet([4]), CpuSet([4, 5]), CpuSet([5])]


def test_agreement_in_every_small_case() -> None:
    for asked, scope, first, second in itertools.product(SETS[1:], SETS, SETS, SETS):
        choices = {first, second} - {CpuSet()}
        state = CpuState("static", CpuSet(), {"a": {"first": first, "second": second}})
        if asked in choices and asked == scope:
            check_agreement(asked, state, scope, "a")
            continue
        with pytest.raises(RequestRefusedError) as refused:
            check_agreement(asked, state, scope, "a")
        # Waiting helps as long as the kubelet's state file and the pod's cgroup differ.
        assert refused.value.lasting == (scope in choices)
        assert refused.value.values["requested"] == str(asked)
        assert refused.value.values["scope"] == str(scope)


def test_a_refusal_has_both_values() -> None:
    given = {"a": {"vm": CpuSet([4])}}
    sources: dict[CpuPolicy, str] = {"static": "the kubelet's state has", "none": "the node's resource claims give it"}
    for policy, source in sources.items():
        with pytest.raises(RequestRefusedError, match=rf"'4-5'.*{source} '4'.*cpuset.cpus '5'$"):
            check_agreement(CpuSet([4, 5]), CpuState(policy, CpuSet(), given), CpuSet([5]), "a")


@pytest.mark.parametrize(
    ("policy", "remedy"),
    [
        (
            "static",
            r"state has nothing, .*; ask for whole CPUs in a Guaranteed pod .* gate PodLevelResourceManagers\)$",
        ),
        ("none", "claims give it nothing, .*; name a claim for CPUs in resources.claims"),
    ],
)
def test_the_remedy_is_that_of_the_kind_of_node(policy: CpuPolicy, remedy: str) -> None:
    with pytest.raises(RequestRefusedError, match=remedy):
        check_agreement(CpuSet([4, 5]), CpuState(policy, CpuSet()), CpuSet([4, 5]), "a")
