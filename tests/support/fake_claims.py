"""What a kubelet and a DRA driver for CPUs write: ``dra_manager_state`` and CDI specifications."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path

import attrs

from tests.support.fake_pod_resources import FakeContainer


@attrs.frozen(init=False)
class FakeClaim:
    """A resource claim of *pods* (their UIDs), which has *cpus*; without them it is for another kind of device.

    Unless it is *prepared*, its driver has its CPUs ready and the kubelet does not know of it yet.
    """

    uid: str
    cpus: str
    pods: tuple[str, ...]
    prepared: bool

    def __init__(self, uid: str, cpus: str = "", *pods: str, prepared: bool = True) -> None:
        self.__attrs_init__(uid, cpus, pods, prepared)

    @property
    def device(self) -> str:
        """The qualified name of its CDI device."""
        return f"dra.k8s.io/cpu=claim-{self.uid}" if self.cpus else f"example.com/gpu={self.uid}"

    def container(self, pod: str, name: str = "instance") -> FakeContainer:
        """Return container *name* of *pod* (``namespace/name``), which has this claim alone."""
        return FakeContainer(pod, name, cdi_devices=(self.device,))


def format_claims(claims: Iterable[FakeClaim]) -> bytes:
    """Return ``dra_manager_state`` as ``NewCheckpoint`` of ``pkg/kubelet/cm/dra/state/checkpoint.go`` makes it."""
    found = [
        {
            "ClaimUID": claim.uid,
            "ClaimName": f"claim-{claim.uid}",
            "Namespace": "default",
            "PodUIDs": {pod: {} for pod in claim.pods},
            "DriverState": {
                "dra.cpu" if claim.cpus else "example.com": {
                    "Devices": [
                        {
                            "PoolName": "node",
                            "DeviceName": "cpudevnuma000",
                            "ShareID": None,
                            "RequestNames": ["cpus"],
                            "CDIDeviceIDs": [claim.device],
                        }
                    ]
                    if claim.prepared
                    else None
                }
            },
        }
        for claim in claims
    ]
    data = json.dumps(
        {
            "kind": "DRACheckpoint",
            "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1",
            "ClaimInfoStateList": found or None,
        },
        separators=(",", ":"),
    )
    return json.dumps({"Data": data, "Checksum": zlib.crc32(data.encode())}, separators=(",", ":")).encode()


def format_specification(claim: FakeClaim) -> bytes:
    """Return the CDI specification as ``AddDevice`` of the driver's ``pkg/driver/cdi.go`` makes it."""
    edits = {"env": [f"DRA_CPUSET_{claim.uid}={claim.cpus}"]}
    device = {"name": f"claim-{claim.uid}", "containerEdits": edits}
    return json.dumps({"cdiVersion": "0.8.0", "kind": "dra.k8s.io/cpu", "devices": [device]}).encode()


def put_claims(kubelet: Path, cdi: Path, claims: Iterable[FakeClaim]) -> None:
    """Write all files of *claims*, the driver's first, and remove the specifications of others, as driver and kubelet do."""
    claims = tuple(claims)
    cdi.mkdir(exist_ok=True)
    wanted = {f"dra.k8s.io-cpu_claim-{claim.uid}.json": claim for claim in claims if claim.cpus}
    for name, claim in wanted.items():
        _replace(cdi / name, format_specification(claim))
    for file in cdi.iterdir():
        if file.name not in wanted:
            file.unlink()
    _replace(kubelet / "dra_manager_state", format_claims(claims))


def _replace(path: Path, text: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(text)
    temporary.rename(path)
