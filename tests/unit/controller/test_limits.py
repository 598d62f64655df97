from __future__ import annotations

import pytest

from runner.controller.tree.limits import (
    FLOAT_LIMITS,
    MOST_PROCESSES,
    VCPUS_LIMITS,
    Limits,
    default_memory,
    default_pod_memory,
    default_processes,
    memory_for,
    parse_memory,
    parse_processes,
    parse_weight,
    share_of,
)

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40


@pytest.mark.parametrize(
    ("ram", "pods", "expected"),
    [
        (GIB, None, GIB // 2),
        (2 * GIB, None, GIB),
        (4 * GIB, 4 * GIB, GIB),  # a kubelet that reserves nothing
        (16 * GIB, None, 2 * GIB),
        (16 * GIB, 12 * GIB, 4 * GIB),
        (TIB, TIB - 2 * GIB, 128 * GIB),
        (TIB, TIB * 3 // 4, 256 * GIB),
        (8 * GIB + 12345, 6 * GIB, 2 * GIB),  # as the kernel rounds to pages, it is a whole number of MiB
        (8 * GIB, 9 * GIB, GIB),  # a limit of a machine that has shrunk
    ],
)
def test_the_default_of_memory_fits_the_machine(ram: int, pods: int | None, expected: int) -> None:
    assert default_memory(ram, pods) == expected


def test_the_default_of_what_an_instance_gets_at_first() -> None:
    found = [default_pod_memory(most) for most in (96 * MIB, GIB, 2 * GIB, 32 * GIB, None)]
    assert found == [24 * MIB, 256 * MIB, 320 * MIB, 320 * MIB, 320 * MIB]


@pytest.mark.parametrize(
    ("wanted", "others", "expected"), [(8, 0, 8), (8, 56, 8), (8, 60, 4), (8, 64, 0), (8, 80, 0), (100, 10, 54)]
)
def test_an_instance_gets_no_more_than_is_left(wanted: int, others: int, expected: int) -> None:
    assert memory_for(wanted * MIB, Limits(memory_max=64 * MIB), others * MIB) == expected * MIB
    assert memory_for(wanted * MIB, Limits(), others * MIB) == wanted * MIB


@pytest.mark.parametrize(
    ("pod", "expected"),
    [(512 * GIB, 64 * GIB), (128 * GIB, 16 * GIB), (8 * GIB, GIB), (2 * GIB, 256 * MIB), (0, 0)],
)
def test_a_pods_share_is_that_of_its_limit_in_the_machine(pod: int, expected: int) -> None:
    assert share_of(pod, TIB, Limits(memory_max=128 * GIB)) == expected


def test_without_a_limit_of_all_a_pod_has_no_share() -> None:
    assert share_of(GIB, TIB, Limits()) is None
    assert share_of(GIB, None, Limits(memory_max=GIB)) is None


def test_the_default_of_processes_is_half_of_what_the_kernel_can_have() -> None:
    assert default_processes("4194304", "15793") == 7896
    assert default_processes("32768", "8000000") == 16384
    assert default_processes("", "1000") == 500
    assert default_processes("", "") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max", None), ("1M", MIB), ("512M", 512 * MIB), ("8G", 8 * GIB), ("1T", TIB), ("2049K", 2 * MIB)],
)
def test_sizes(text: str, expected: int | None) -> None:
    assert parse_memory(text) == expected


@pytest.mark.parametrize("text", ["", "M", "0M", "1023K", "8", "8GiB", "-1G", "1.5G", "٣G", "8g", "8 G"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="such as 8G"):
        parse_memory(text)


@pytest.mark.parametrize("text", ["", "0", "-1", "4194305", "max ", "1e3", "٣"])
def test_wrong_numbers_of_processes(text: str) -> None:
    with pytest.raises(ValueError, match=f"from 1 to {MOST_PROCESSES}"):
        parse_processes(text)


def test_numbers() -> None:
    assert (parse_processes("max"), parse_processes("1"), parse_processes("4194304")) == (None, 1, MOST_PROCESSES)
    assert (parse_weight("1"), parse_weight("10000")) == (1, 10_000)
    for text in ("0", "10001", "max", ""):
        with pytest.raises(ValueError, match="from 1 to 10000"):
            parse_weight(text)


def test_what_is_left_of_a_pod_that_has_gone_cannot_fork_and_gets_the_least_time() -> None:
    limits = Limits(instance_pids_max=None)
    assert limits.of_domain(MIB, gone=False) == {
        "memory.max": str(MIB),
        "memory.high": "max",
        "pids.max": "max",
        "cpu.weight": "100",
        "cgroup.max.descendants": "2",
    }
    assert limits.of_domain(MIB, gone=True)["cpu.weight"] == "1"
    assert limits.of_domain(MIB, gone=True)["pids.max"] == "0"


def test_vcpus_leave_the_share_of_their_instance_to_float() -> None:
    assert VCPUS_LIMITS["cpu.weight"] == "1"
    assert "cpu.weight" not in FLOAT_LIMITS
    assert VCPUS_LIMITS["cgroup.max.descendants"] == FLOAT_LIMITS["cgroup.max.descendants"] == "0"


def test_no_huge_page_of_any_size_is_taken_or_reserved_in_float() -> None:
    limits = Limits(huge_page_sizes=("2MB", "1GB"))
    files = [f"hugetlb.{size}.{kind}" for size in ("2MB", "1GB") for kind in ("max", "rsvd.max")]
    for found in (limits.of_root(), limits.of_domain(MIB, gone=False)):
        assert {file: value for file, value in found.items() if file.startswith("hugetlb.")} == dict.fromkeys(
            files, "0"
        )
    assert limits.controllers == ("cpu", "hugetlb", "memory", "pids")
    assert Limits(swap=True).of_root()["memory.swap.max"] == "0", "the kubelet gives Guaranteed pods none"
    assert Limits().controllers == ("cpu", "memory", "pids"), (
        "a kernel without huge pages need not have their controller"
    )
