"""The files about the devices of resource claims, written by the kubelet plugin library of Kubernetes 1.36 (``tests/data/claims``)."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.base.errors import SpecError
from runner.facts.pci import ClaimedDevice
from runner.host.devices import read_claim
from runner.kubelet.device_metadata import LARGEST, parse_device_metadata

CLAIMS = Path(__file__).parents[2] / "data" / "claims"
GPU = "metadata.resource.k8s.io/v1beta1"


def stream(*versions: str, **device: Any) -> bytes:
    """Return a file with one device, in several versions of the API."""
    described = {"driver": "gpu.example.com", "pool": "node-1", "name": "gpu-0", **device}
    objects = (
        {"kind": "DeviceMetadata", "apiVersion": each, "requests": [{"name": "gpu", "devices": [described]}]}
        for each in versions
    )
    return "\n".join(map(json.dumps, objects)).encode()


@pytest.mark.parametrize("claim", ["two-gpus", "gpus"])
def test_the_files_of_a_claim_that_the_library_wrote(claim: str) -> None:
    """A claim that the pod names directly, and one that is made from a template."""
    gpu, spare = read_claim(CLAIMS, claim)
    assert (gpu.request, gpu.error, spare.request, spare.error) == ("gpu", None, "spare", None)
    assert [(each.address, each.numa_node) for each in gpu.devices] == [("0000:1b:00.0", 0), ("0000:9d:00.0", 1)]
    [small] = spare.devices
    assert (small.driver, small.name, small.address) == ("gpu.example.com", "gpu-vfio-2", "0000:43:00.0")
    assert small.attributes == (
        *("driverVersion", "isVF", "productName"),
        *(f"resource.kubernetes.io/{name}" for name in ("numaNode", "pciBusID", "pcieRoot")),
        "type",
    )


def test_a_claim_without_files_has_none(tmp_path: Path) -> None:
    assert read_claim(CLAIMS, "others") == ()
    assert read_claim(tmp_path / "missing", "gpus") == ()


def test_what_is_no_file_of_a_driver_is_left_out_and_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    request = tmp_path / "resourceclaims/gpus/gpu"
    request.mkdir(parents=True)
    (request.parent / "note").touch()
    (request / "lost+found").mkdir()
    (request / "a-metadata.json").write_bytes(b"x" * (LARGEST + 1))
    (request / "b-metadata.json").mkdir()
    (request / "c-metadata.json").write_text("{")
    (request / "d-metadata.json").write_bytes(stream(GPU))
    files = read_claim(tmp_path, "gpus")
    assert [each.path.name[0] for each in files] == ["a", "b", "c", "d"]
    assert [(each.error or "").split(":")[0] for each in files] == [
        f"it has {LARGEST + 1} bytes, of which at most {LARGEST} are taken",
        "it is not a file",
        "it is no JSON",
        "",
    ]


@pytest.mark.parametrize(
    "versions",
    [("v1beta1",), ("v1alpha1",), ("v1beta1", "v1alpha1"), ("v1000", "v1beta1"), ("v1", "v1beta2", "v1alpha1", "v0")],
)
def test_the_first_version_that_is_known_is_read(versions: tuple[str, ...]) -> None:
    attributes = {"resource.kubernetes.io/pciBusID": {"string": "0000:AB:00.1"}}
    data = stream(*(f"metadata.resource.k8s.io/{each}" for each in versions), attributes=attributes)
    assert parse_device_metadata("file", data) == (
        ClaimedDevice("gpu.example.com", "gpu-0", tuple(attributes), "0000:ab:00.1", None),
    )


def test_many_unknown_versions_take_no_longer_than_their_reading_and_are_few_in_the_message() -> None:
    begun = time.process_time()
    with pytest.raises(SpecError) as caught:
        parse_device_metadata("file", b"".join(b'{"apiVersion": "x/%d"}' % number for number in range(40_000)))
    assert str(caught.value).endswith("found x/0, x/1, x/2, x/3 and 39996 more")
    with pytest.raises(SpecError) as caught:
        parse_device_metadata("file", json.dumps({"apiVersion": ["x" * 100_000]}).encode())
    assert len(str(caught.value)) < 500
    assert time.process_time() - begun < 2.5  # 6 s, where the rest is copied after each


def test_what_follows_the_version_that_is_read_does_not_count() -> None:
    assert parse_device_metadata("file", stream(GPU) + b" {")
    assert parse_device_metadata("file", b'{"apiVersion": "x/v9", "requests": 1}' + stream(GPU))


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        (None, None),
        ({"int": 1}, 1),
        ({"ints": [6, 4, 5, 7]}, 6),
        ({"ints": []}, None),
        ({"strings": ["a kind of value of later versions"]}, None),
    ],
)
def test_the_numa_node_is_a_number_or_the_first_of_a_list(attribute: object, expected: int | None) -> None:
    [device] = parse_device_metadata("file", stream(GPU, attributes={"resource.kubernetes.io/numaNode": attribute}))
    assert device.numa_node == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"\xff", "it is no JSON: 'utf-8' codec"),
        (b'{"apiVersion": ', "it is no JSON: Expecting value"),
        (b"[" * 100_000, "it is no JSON: "),
        (b"[]", "must be an object, found []"),
        (b"{}", "apiVersion: must be a string, found None"),
        (stream("metadata.resource.k8s.io/v2"), "must be metadata.resource.k8s.io/v1beta1 or metadata.resource.k8s.io/v1alpha1"),
        (stream(GPU).replace(b"DeviceMetadata", b"Other"), "kind: must be DeviceMetadata, found 'Other'"),
        (stream(GPU, driver=1), "requests[0].devices[0].driver: must be a string"),
        (stream(GPU, attributes=[]), "requests[0].devices[0].attributes: must be an object"),
        (
            stream(GPU, attributes={"resource.kubernetes.io/pciBusID": {"int": 3}}),
            "requests[0].devices[0].attributes.resource.kubernetes.io/pciBusID.string: must be a string, found None",
        ),
        (
            stream(GPU, attributes={"resource.kubernetes.io/numaNode": {"int": -1}}),
            "requests[0].devices[0].attributes.resource.kubernetes.io/numaNode.int: must be a whole number, found -1",
        ),
    ],
)  # fmt: skip
def test_a_malformed_file_is_refused(data: bytes, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_device_metadata("file", data)
    [problem] = caught.value.problems
    assert expected in str(problem)


@given(st.binary() | st.text().map(str.encode))
def test_no_content_is_anything_but_devices_or_an_error(data: bytes) -> None:
    with contextlib.suppress(SpecError):
        assert isinstance(parse_device_metadata("file", data), tuple)


KINDS = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
VALUES = st.recursive(KINDS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner))


@given(st.sampled_from(["requests", "devices", "attributes", "address", "numa"]), VALUES)
def test_no_value_in_the_place_of_another_is_anything_but_devices_or_an_error(place: str, value: object) -> None:
    attributes: Any = {
        "resource.kubernetes.io/pciBusID": value if place == "address" else {"string": "0000:01:00.0"},
        "resource.kubernetes.io/numaNode": value if place == "numa" else {"int": 0},
    }
    device = {"driver": "d", "pool": "p", "name": "n", "attributes": value if place == "attributes" else attributes}
    request = {"name": "gpu", "devices": value if place == "devices" else [device]}
    whole = {"apiVersion": GPU, "kind": "DeviceMetadata", "requests": value if place == "requests" else [request]}
    with contextlib.suppress(SpecError):
        assert isinstance(parse_device_metadata("file", json.dumps(whole).encode()), tuple)
