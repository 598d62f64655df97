from __future__ import annotations

import itertools

import pytest

from runner.controller.identity import Home, RefusalError, Resident, check_agreement, check_container, home_of
from runner.cpuset import CpuSet
from runner.host.peers import INIT_PID_NAMESPACE, Peer
from runner.topology.pod_cgroups import Container

OURS, POD_A, POD_B = 4_026_540_001, 4_026_540_100, 4_026_540_200
A = Container("a", "guaranteed", "/kubepods/poda/1")
B = Container("b", "guaranteed", "/kubepods/podb/2")
ANCHOR_A = Resident(A, "/kubepods/poda/1/container", POD_A)
ANCHOR_B = Resident(B, "/kubepods/podb/2", POD_B)
PAUSE_A = Resident(Container("a", "guaranteed", "/kubepods/poda/0"), "/kubepods/poda/0", 4_026_540_111)


def peer(namespace: int = POD_A, inner: int = 1, cgroup: str = A.path) -> Peer:
    return Peer(pid=4711, inner_pid=inner, pid_namespace=namespace, uid=1000, cgroup=cgroup)


def test_the_init_of_a_pod_speaks_for_it() -> None:
    assert home_of(peer(), A, (), "a", OURS) == Home(A, A.path)
    below = f"{A.path}/container"
    assert home_of(peer(cgroup=below), A, (), "a", OURS) == Home(A, below)


def test_from_float_it_is_known_by_the_namespace_it_shares_with_its_anchor() -> None:
    floating = peer(cgroup="/stelia/float")
    assert home_of(floating, None, (PAUSE_A, ANCHOR_A), "a", OURS) == Home(A, ANCHOR_A.cgroup)
    for residents in ((), (PAUSE_A,), (ANCHOR_B,), (Resident(A, A.path, None),)):
        with pytest.raises(RefusalError, match="keep the anchor running"):
            home_of(floating, None, residents, "a", OURS)


def test_nobody_speaks_for_another_pod() -> None:
    with pytest.raises(RefusalError, match="process 4711 belongs to 'a'"):
        home_of(peer(), A, (), "b", OURS)
    # From float, claiming B: none of B's processes is in A's namespace.
    with pytest.raises(RefusalError, match="keep the anchor"):
        home_of(peer(cgroup="/stelia/float"), None, (ANCHOR_B,), "b", OURS)


@pytest.mark.parametrize("namespace", [INIT_PID_NAMESPACE, OURS])
def test_a_pod_in_the_hosts_pid_namespace_is_refused(namespace: int) -> None:
    with pytest.raises(RefusalError, match="hostPID"):
        home_of(peer(namespace), A, (), "a", OURS)


def test_a_shell_or_a_shared_pid_namespace_is_refused() -> None:
    with pytest.raises(RefusalError, match="shareProcessNamespace"):
        home_of(peer(inner=37), A, (), "a", OURS)


def test_who_is_accepted_in_all_small_worlds() -> None:
    """Accepted is exactly: init of a private namespace, in the pod's own group or sharing it with its anchor."""
    for namespace, inner, own, residents in itertools.product(
        (POD_A, POD_B, OURS, INIT_PID_NAMESPACE), (1, 2), (A, B, None), ((), (ANCHOR_A,), (PAUSE_A, ANCHOR_A))
    ):
        allowed = (
            namespace in (POD_A, POD_B)
            and inner == 1
            and (own == A or (own is None and namespace == POD_A and ANCHOR_A in residents))
        )
        if allowed:
            assert home_of(peer(namespace, inner), own, residents, "a", OURS).container == A
        else:
            with pytest.raises(RefusalError) as refused:
                home_of(peer(namespace, inner), own, residents, "a", OURS)
            assert (refused.value.reason, refused.value.lasting) == ("identity", True)


def test_a_controller_in_a_cgroup_namespace_of_its_own_is_told_so() -> None:
    with pytest.raises(RefusalError, match="outside this program's cgroup namespace"):
        home_of(peer(cgroup="/../kubepods/poda/1"), None, (), "a", OURS)


def test_a_sidecar_does_not_end_the_instance_of_its_pod() -> None:
    home = Home(A, A.path)
    check_container(home, CpuSet([4, 5]), CpuSet([4, 5]), "a")
    check_container(home, CpuSet([4, 5, 6]), CpuSet([4, 5]), "a")
    with pytest.raises(RefusalError, match="another container's"):
        check_container(home, CpuSet([0, 1]), CpuSet([4, 5]), "a")


SETS = [CpuSet(), CpuSet([4]), CpuSet([4, 5]), CpuSet([5])]


def test_agreement_in_all_small_worlds() -> None:
    for asked, scope, first, second in itertools.product(SETS[1:], SETS, SETS, SETS):
        choices = {first, second} - {CpuSet()}
        if asked in choices and asked == scope:
            check_agreement(asked, choices, scope, "a")
            continue
        with pytest.raises(RefusalError) as refused:
            check_agreement(asked, choices, scope, "a")
        # Waiting helps as long as the kubelet's two words differ.
        assert refused.value.lasting == (scope in choices)
        assert refused.value.values["requested"] == str(asked)
        assert refused.value.values["scope"] == str(scope)


def test_a_refusal_tells_both_values() -> None:
    with pytest.raises(RefusalError, match=r"'4-5'.*state says '4'.*cpuset.cpus '5'"):
        check_agreement(CpuSet([4, 5]), [CpuSet([4])], CpuSet([5]), "a")
