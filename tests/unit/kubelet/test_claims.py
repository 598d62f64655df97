"""CPUs by resource claims: the files of the kubelet and of the driver, as these write them, and who has which CPUs by them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.base.cpuset import CpuSet
from runner.base.errors import SpecError
from runner.facts.hardware import OnlineCpus
from runner.kubelet.claims import (
    CDI_FILES,
    ClaimedCpus,
    CpuClaims,
    PreparedClaim,
    claimed_cpu_state,
    parse_claims,
    parse_cpu_claims,
    parse_cpu_devices,
)
from runner.kubelet.pod_resources import ContainerResources, parse_pods
from runner.kubelet.state import CpuState
from tests.support.fake_claims import FakeClaim, format_claims, format_specification

KUBELETS = (
    rb'{"Data":"{\"kind\":\"DRACheckpoint\",\"apiVersion\":\"checkpoint.dra.kubelet.k8s.io/v1\",\"ClaimInfoStateList\":['
    rb"{\"ClaimUID\":\"067798be-454e-4be4-9047-1aa06aea63f7\",\"ClaimName\":\"example-1\",\"Namespace\":\"default\","
    rb"\"PodUIDs\":{\"139cdb46-f989-4f17-9561-ca10cfb509a6\":{}},\"DriverState\":{\"test-driver.cdi.k8s.io\":{\"Devices\":"
    rb"[{\"PoolName\":\"worker-1\",\"DeviceName\":\"dev-1\",\"ShareID\":null,\"RequestNames\":[\"test request\"],"
    rb"\"CDIDeviceIDs\":[\"example.com/example=cdi-example\"]}]}}},{\"ClaimUID\":\"4cf8db2d-06c0-7d70-1a51-e59b25b2c16c\","
    rb"\"ClaimName\":\"example-2\",\"Namespace\":\"default\",\"PodUIDs\":{\"139cdb46-f989-4f17-9561-ca10cfb509a6\":{}},"
    rb"\"DriverState\":{\"test-driver.cdi.k8s.io\":{\"Devices\":[{\"PoolName\":\"worker-1\",\"DeviceName\":\"dev-2\","
    rb'\"ShareID\":null,\"RequestNames\":null,\"CDIDeviceIDs\":null}]}}}]}","Checksum":2820117767}'
)
"""A file of ``pkg/kubelet/cm/dra/state/checkpointer_test.go`` of Kubernetes 1.36, which the kubelet accepts."""

EMPTY = (
    rb'{"Data":"{\"kind\":\"DRACheckpoint\",\"apiVersion\":\"checkpoint.dra.kubelet.k8s.io/v1\",\"ClaimInfoStateList\":null}",'
    rb'"Checksum":4010664294}'
)
"""What a kubelet writes at its first start."""

REAL = Path(__file__).parents[2] / "data/cpu_claims"
"""The files of a node of ``tests/cluster`` with two instances: Kubernetes 1.36.2's, and those of the driver's release 0.2.0.

``pod_resources`` is the kubelet's answer to ``List``.
"""

MACHINE = OnlineCpus(CpuSet.parse("0-19"), CpuSet.parse("0-18"), CpuSet([0]))
NONE = CpuSet()


def cpus(text: str) -> CpuSet:
    return CpuSet.parse(text)


def container(pod: str, name: str, *claims: str) -> ContainerResources:
    return ContainerResources(pod, name, NONE, frozenset(f"dra.k8s.io/cpu=claim-{claim}" for claim in claims))


def state_of(
    claims: Sequence[FakeClaim], containers: Sequence[ContainerResources] | None, reserved: str = ""
) -> CpuState:
    found = parse_cpu_claims(
        format_claims(claims), "dra", {f"{each.uid}.json": format_specification(each) for each in claims if each.cpus}
    )
    return claimed_cpu_state(found, containers, MACHINE, cpus(reserved), "cdi")


# --- the files --------------------------------------------------------------------------------------------------------


def test_a_file_that_the_kubelet_wrote() -> None:
    pods = frozenset({"139cdb46-f989-4f17-9561-ca10cfb509a6"})
    assert parse_claims(KUBELETS, "x") == (
        PreparedClaim(
            "067798be-454e-4be4-9047-1aa06aea63f7",
            "default/example-1",
            pods,
            frozenset({"example.com/example=cdi-example"}),
        ),
        PreparedClaim("4cf8db2d-06c0-7d70-1a51-e59b25b2c16c", "default/example-2", pods, frozenset()),
    )
    assert parse_claims(EMPTY, "x") == ()


def test_the_files_of_a_real_node() -> None:
    specifications = {file.name: file.read_bytes() for file in (REAL / "cdi").iterdir()}
    assert all(any(fnmatchcase(name, pattern) for pattern in CDI_FILES) for name in specifications)
    claims = parse_cpu_claims((REAL / "dra_manager_state").read_bytes(), "x", specifications)
    assert [claim.name for claim in claims.claims] == [
        "instances/instance-second-cpus-b74cp",
        "instances/instance-cpus-h9tpp",
    ]
    containers = parse_pods((REAL / "pod_resources").read_bytes())
    assert not claims.awaited(containers)
    machine = OnlineCpus(cpus("0-11"), cpus("0-11"), CpuSet([0]))
    assert claimed_cpu_state(claims, containers, machine, cpus("0,6"), "x") == CpuState(
        "none",
        cpus("5,11"),
        {
            "8c69e474-b0cd-4265-accc-411f89483b1a": {"instances/instance/instance": cpus("1-2,7-8")},
            "bd8ead52-0c6e-41ad-9e57-17a05cb43352": {"instances/instance-second/instance": cpus("3-4,9-10")},
        },
    )


def test_a_file_of_another_version_is_refused() -> None:
    """Else the claims that it has in another form would be none, and their CPUs shared."""
    with pytest.raises(
        SpecError, match=r"apiVersion: must be 'checkpoint.dra.kubelet.k8s.io/v1', found 'checkpoint.*/v2'"
    ):
        parse_claims(KUBELETS.replace(b"kubelet.k8s.io/v1", b"kubelet.k8s.io/v2"), "x")


def test_the_kubelets_file_is_of_no_interest_without_a_claim_for_cpus() -> None:
    assert parse_cpu_claims(b"{", "x", {}) == CpuClaims()


def test_a_specification_that_the_driver_wrote() -> None:
    """The document is of the driver's ``AddDevice``; release 0.1 has all claims in one, as here."""
    text = """{
      "cdiVersion": "0.8.0",
      "kind": "dra.k8s.io/cpu",
      "devices": [
        {"name": "claim-1b2c", "containerEdits": {"env": ["DRA_CPUSET_1b2c=4-7,12"]}},
        {"name": "claim-3d4e", "containerEdits": {"env": ["DRA_CPUSET_3d4e=8"]}}
      ]
    }"""
    assert parse_cpu_devices(text.encode(), "x") == (
        ClaimedCpus("dra.k8s.io/cpu=claim-1b2c", "1b2c", cpus("4-7,12")),
        ClaimedCpus("dra.k8s.io/cpu=claim-3d4e", "3d4e", cpus("8")),
    )
    assert parse_cpu_devices(b'{"cdiVersion":"0.8.0","kind":"dra.k8s.io/cpu","devices":[]}', "x") == ()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "nvidia.com/gpu"}, "kind: must be 'dra.k8s.io/cpu', found 'nvidia.com/gpu'"),
        ({"devices": [{"name": "a"}]}, "env: must have one variable DRA_CPUSET_…, found 0"),
        (
            {"devices": [{"name": "a", "containerEdits": {"env": ["DRA_CPUSET_a"]}}]},
            "devices[0].containerEdits.env[0]: must be DRA_CPUSET_<claim uid>=<CPUs>, found 'DRA_CPUSET_a'",
        ),
        (
            {"devices": [{"name": "a", "containerEdits": {"env": ["DRA_CPUSET_a=4-x"]}}]},
            "devices[0].containerEdits.env[0]: '4-x' is not a list of CPUs",
        ),
        (
            {"devices": [{"name": "a", "containerEdits": {"env": ["DRA_CPUSET_a=4", "DRA_CPUSET_b=5"]}}]},
            "must have one variable DRA_CPUSET_…, found 2",
        ),
    ],
)
def test_a_specification_of_another_form_is_refused(changes: dict[str, object], reason: str) -> None:
    document = {"cdiVersion": "0.8.0", "kind": "dra.k8s.io/cpu", "devices": []}
    with pytest.raises(SpecError) as caught:
        parse_cpu_devices(json.dumps({**document, **changes}).encode(), "x")
    assert reason.partition(": '4-x'")[0] in str(caught.value)


@given(st.binary(max_size=80), st.integers(0, len(KUBELETS)), st.integers(0, 30))
def test_a_damaged_file_is_read_or_refused(junk: bytes, at: int, length: int) -> None:
    good = format_specification(FakeClaim("a", "4-5"))
    for text in (KUBELETS, good):
        damaged = text[:at] + junk + text[at + length :]
        with contextlib.suppress(SpecError):
            parse_claims(damaged, "x")
        with contextlib.suppress(SpecError):
            parse_cpu_devices(damaged, "x")


# --- who has which CPUs -----------------------------------------------------------------------------------------------


def test_a_container_has_the_cpus_of_all_its_claims() -> None:
    claims = [FakeClaim("one", "2-3", "A"), FakeClaim("two", "6", "A"), FakeClaim("three", "8-9", "A")]
    containers = [
        container("prod/a", "vm", "one", "two"),
        container("prod/a", "side", "three"),
        container("prod/b", "x"),
    ]
    state = state_of(claims, containers)
    assert state.choices("A") == (cpus("2-3,6"), cpus("8-9"))
    assert state.shared_pool == cpus("0-1,4-5,7,10-18")
    assert (state.policy, state.unattributed) == ("none", NONE)


def test_without_claims_all_cpus_are_shared() -> None:
    assert state_of([], []) == CpuState("none", cpus("0-18"))
    assert parse_cpu_claims(None, "x", {}) == CpuClaims()


def test_the_cpus_of_other_pods_claims_are_shared_with_nobody() -> None:
    claims = [FakeClaim("one", "2-3", "A"), FakeClaim("two", "4-5", "B")]
    state = state_of(claims, [container("prod/a", "vm", "one"), container("prod/b", "web", "two")])
    assert state.assigned() == {"A": cpus("2-3"), "B": cpus("4-5")}
    assert state.shared_pool.isdisjoint(cpus("2-5"))


def test_cpus_that_no_container_is_known_to_have_are_neither_shared_nor_a_pods() -> None:
    """The claim is being prepared, or its pod is no longer active, or the kubelet has only just started."""
    for claim, containers in (
        (FakeClaim("one", "2-3", "A", prepared=False), []),
        (FakeClaim("one", "2-3", "A"), [container("prod/a", "vm")]),
        (FakeClaim("one", "2-3"), [container("prod/a", "vm", "one")]),
    ):
        state = state_of([claim], containers)
        assert (state.assigned(), state.unattributed) == ({}, cpus("2-3"))
        assert state.shared_pool.isdisjoint(cpus("2-3"))


def test_a_container_with_the_claims_of_two_pods_has_the_cpus_of_neither() -> None:
    claims = [FakeClaim("one", "2-3", "A"), FakeClaim("two", "4-5", "B")]
    state = state_of(claims, [container("prod/a", "vm", "one", "two")])
    assert (state.assigned(), state.unattributed) == ({}, cpus("2-5"))


def test_a_shared_claim_is_a_choice_of_each_of_its_pods() -> None:
    """Which of them has it, its container's cpuset.cpus says: the driver creates no second one."""
    state = state_of(
        [FakeClaim("one", "2-3", "A", "B")], [container("prod/a", "vm", "one"), container("prod/b", "vm", "one")]
    )
    assert state.choices("A") == state.choices("B") == (cpus("2-3"),)


def test_a_specification_that_was_left_behind_counts_for_nothing() -> None:
    left = FakeClaim("left", "2-3", "A")
    found = parse_cpu_claims(format_claims([]), "dra", {"left.json": format_specification(left)})
    assert claimed_cpu_state(found, [container("prod/a", "vm", "left")], MACHINE, NONE, "cdi") == CpuState(
        "none", cpus("0-18")
    )


def test_a_claim_in_the_files_of_two_releases_is_one_claim() -> None:
    claim = FakeClaim("one", "2-3", "A")
    specification = format_specification(claim)
    found = parse_cpu_claims(format_claims([claim]), "dra", {"dra.cpu.json": specification, "one.json": specification})
    assert claimed_cpu_state(found, [container("prod/a", "vm", "one")], MACHINE, NONE, "cdi").assigned_to("A") == cpus(
        "2-3"
    )


def test_reserved_cpus_are_not_shared_as_long_as_there_are_others() -> None:
    assert state_of([FakeClaim("one", "4-18", "A")], [], "0-1").shared_pool == cpus("2-3")
    assert state_of([FakeClaim("one", "2-18", "A")], [], "0-1").shared_pool == cpus("0-1")


def test_a_program_that_decides_nothing_counts_each_claim_for_itself() -> None:
    state = state_of([FakeClaim("one", "2-3", "A"), FakeClaim("two", "6", "A")], None)
    assert state.assigned() == {"A": cpus("2-3,6")}


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ([FakeClaim("one", "2-4", "A"), FakeClaim("two", "4-5", "B")], "CPUs 4 of the claim two are given away twice"),
        ([FakeClaim("one", "18-21", "A")], "CPUs 20-21 of the claim one do not exist: this machine has 0-19"),
    ],
)
def test_claims_that_cannot_be_are_refused(claims: list[FakeClaim], reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        state_of(claims, [])


def test_only_prepared_claims_of_pods_are_awaited() -> None:
    claims = [
        FakeClaim("one", "2", "A"),
        FakeClaim("two", "3", "A", prepared=False),
        FakeClaim("three", "4"),
        FakeClaim("gpu"),
    ]
    found = parse_cpu_claims(
        format_claims(claims), "dra", {f"{each.uid}.json": format_specification(each) for each in claims if each.cpus}
    )
    assert found.awaited([]) == {"dra.k8s.io/cpu=claim-one"}
    assert found.awaited([container("prod/a", "vm", "one")]) == frozenset()
