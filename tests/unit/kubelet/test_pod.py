from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.kubelet.pod import Container, ContainerKind, Pod, format_bytes, parse_quantity, peak


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("40", 40),
        ("500m", Fraction(1, 2)),
        ("1.5Gi", 3 << 29),
        (".5", Fraction(1, 2)),
        ("1e3", 1000),
        ("12E", 12 * 10**18),
        ("100n", Fraction(1, 10**7)),
        ("-1k", -1000),
        ("3Ei", 3 << 60),
    ],
)
def test_quantities(text: str, value: Fraction) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "1gi", "1KB", "1Gie3", "0x10", "1_000", "NaN", "１"])  # noqa: RUF001
def test_malformed_quantities(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity like"):
        parse_quantity(text)


@given(st.integers(0, 1 << 62))
def test_bytes_are_written_and_parsed_back(amount: int) -> None:
    assert parse_quantity(format_bytes(amount)) == amount


def test_the_peak_of_a_pod() -> None:
    init, sidecar, app = ContainerKind.INIT, ContainerKind.SIDECAR, ContainerKind.APP

    def most(*containers: tuple[ContainerKind, int]) -> int:
        pod = Pod("p", tuple(Container(str(place), cpus, {}, kind) for place, (kind, cpus) in enumerate(containers)))
        return peak(pod, lambda container: container.millicpus)

    assert most((init, 5), (app, 2), (app, 2)) == 5
    assert most((init, 3), (app, 2), (app, 2)) == 4
    assert most((init, 5), (sidecar, 1), (app, 4)) == 5
    assert most((sidecar, 1), (init, 5), (app, 4)) == 6
    assert most((sidecar, 1), (sidecar, 2)) == 3


def test_a_quantity_of_very_many_digits_is_the_largest_one() -> None:
    assert parse_quantity("1" * 400) == parse_quantity("9" * 50 + "Gi") == 2**63 - 1
    assert parse_quantity("0" * 20 + "4") == 4
