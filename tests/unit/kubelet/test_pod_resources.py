"""The messages of the PodResources API: those that the kubelet's own server sent, and damaged ones."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.base.cpuset import CpuSet
from runner.base.errors import SpecError
from runner.kubelet.pod_resources import ContainerResources, parse_allocatable_cpus, parse_pods
from tests.support.fake_pod_resources import FakeContainer, field, packed, varint

LISTED = (
    b"\n\xc1\x02\n\x04vm-0\x12\x04prod\x1a\xe8\x01\n\x08instance\x12$\n\x0envidia.com/gpu\x12\x05GPU-1\x12\x05GPU-2\x1a\x04"
    b'\n\x02\x08\x01\x1a\x04\x04\x05\x96\x01"\x17\n\x06memory\x10\x80\x80\x80\x80\x80 \x1a\x06\n\x00\n\x02\x08\x03*\x96\x01'
    b'\x12\x05claim\x1a\x04prod">\n\x18\n\x16dra.k8s.io/cpu=claim-0\x12\x07dra.cpu\x1a\x04node"\rcpudevnuma000*\x04aaaa"G\n'
    b'\x18\n\x16dra.k8s.io/cpu=claim-0\n\x13\n\x11other.example/x=1\x12\rother.example\x1a\x04node"\x01d\x1aH\n\x07sidecar'
    b'\x12$\n\x0envidia.com/gpu\x12\x05GPU-1\x12\x05GPU-2\x1a\x04\n\x02\x08\x01"\x17\n\x06memory\x10\x80\x80\x80\x80\x80 '
    b"\x1a\x06\n\x00\n\x02\x08\x03\nV\n\x03web\x12\x07default\x1aF\n\x05nginx\x12$\n\x0envidia.com/gpu\x12\x05GPU-1\x12\x05"
    b'GPU-2\x1a\x04\n\x02\x08\x01"\x17\n\x06memory\x10\x80\x80\x80\x80\x80 \x1a\x06\n\x00\n\x02\x08\x03'
)
ALLOCATABLE = (
    b"\n$\n\x0envidia.com/gpu\x12\x05GPU-1\x12\x05GPU-2\x1a\x04\n\x02\x08\x01\x12\x12\x02\x03\x04\x05\x06\x07\x08\t\n\x0b\x0c"
    b"\r\x0e\x0f\x10\x11\x12\x13\x1a\x17\n\x06memory\x10\x80\x80\x80\x80\x80 \x1a\x06\n\x00\n\x02\x08\x03"
)
"""Answers of ``NewV1PodResourcesServer`` of Kubernetes 1.36.2, with providers that have two pods."""


def test_what_the_kubelets_own_server_sent() -> None:
    devices = frozenset({"dra.k8s.io/cpu=claim-0", "other.example/x=1"})
    assert parse_pods(LISTED) == (
        ContainerResources("prod/vm-0", "instance", CpuSet([4, 5, 150]), devices),
        ContainerResources("prod/vm-0", "sidecar", CpuSet(), frozenset()),
        ContainerResources("default/web", "nginx", CpuSet(), frozenset()),
    )
    assert parse_allocatable_cpus(ALLOCATABLE) == CpuSet.parse("2-19")


def test_an_empty_message_is_nothing() -> None:
    assert parse_pods(b"") == ()
    assert parse_allocatable_cpus(b"") == CpuSet()


def test_the_numbers_of_a_repeated_field_come_alone_or_together() -> None:
    assert parse_allocatable_cpus(field(2, 3) + packed(2, [5, 300]) + field(2, 3)) == CpuSet([3, 5, 300])


def test_fields_of_a_newer_kubelet_are_skipped() -> None:
    fixed = varint(900 << 3 | 1) + bytes(8) + varint(901 << 3 | 5) + bytes(4)
    assert parse_allocatable_cpus(field(77, "new") + fixed + packed(2, [1]) + field(78, 5)) == CpuSet([1])


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"\x80", "a number in it has no end"),
        (b"\xff" * 11, "a number in it has no end"),
        (b"\x10", "a number in it has no end"),
        (b"\x12\x05\x01", "its field 2 ends 4 bytes behind it"),
        (b"\x11\x01", "its field 2 ends 7 bytes behind it"),
        (b"\x13", "it has a field of wire type 3"),
        (b"\x02\x00", "it has a field of number 0"),
        (field(2, 8192), "its field 'cpu_ids' holds CPU numbers go from 0 to 8191, found 8192 to 8192"),
        (field(2, 2**64 - 1), "its field 'cpu_ids' holds CPU numbers go from 0 to 8191, found 1844674407370955"),
        (field(2, b"\x80"), "a number in it has no end"),
    ],
)
def test_a_malformed_answer_is_refused_with_its_reason(message: bytes, reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_allocatable_cpus(message)
    assert str(caught.value).startswith(f"the kubelet's PodResources API: {reason}")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (field(1, 7), "its field 'pod_resources' is a number"),
        (field(1, field(1, b"\xff")), r"its field 'name' is not UTF-8: b'\xff'"),
    ],
)
def test_a_malformed_pod_is_refused_with_its_reason(message: bytes, reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_pods(message)
    assert [each.message for each in caught.value.problems] == [reason]


names = st.text(alphabet="abc-0", min_size=1, max_size=5)
containers = st.builds(
    FakeContainer,
    st.builds("{}/{}".format, names, names),
    names,
    st.lists(st.integers(0, 8191), max_size=4).map(tuple),
    st.lists(names, max_size=3).map(tuple),
)


@given(st.lists(containers, max_size=4))
def test_what_is_encoded_is_read_again(listed: list[FakeContainer]) -> None:
    assert parse_pods(b"".join(field(1, each.encoded()) for each in listed)) == tuple(
        ContainerResources(each.pod, each.name, CpuSet(each.cpus), frozenset(each.cdi_devices)) for each in listed
    )


@given(st.binary(max_size=200), st.integers(0, len(LISTED)), st.integers(0, 30))
def test_a_damaged_answer_is_read_or_refused(junk: bytes, at: int, length: int) -> None:
    for message in (junk, LISTED[:at], LISTED[:at] + junk + LISTED[at + length :]):
        for parse in (parse_pods, parse_allocatable_cpus):
            with contextlib.suppress(SpecError):
                parse(message)
