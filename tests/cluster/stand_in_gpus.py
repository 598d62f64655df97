"""A device plugin that hands out the node's spare NVMe disks under the name of a GPU, as NVIDIA's plugin for KubeVirt does.

Runs in the emulated node, which has no GPU. The disks are bound to vfio-pci, as GPUs would be from boot on; a pod gets the VFIO
nodes of its own, and their PCI addresses in ``PCI_RESOURCE_NVIDIA_COM_GH100``. It speaks version v1beta1 of the kubelet's device
plugin API (``k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1/api.proto``): gRPC by h2, with a thread for each connection.
"""

from __future__ import annotations

import re
import socketserver
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import trio
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded

from runner.protocol.grpc import call
from tests.node.devices.conftest import BUS, DISK, Spare
from tests.support.fake_pod_resources import field

RESOURCE, VARIABLE = "nvidia.com/GH100", "PCI_RESOURCE_NVIDIA_COM_GH100"
SOCKETS = Path("/var/lib/kubelet/device-plugins")
ENDPOINT = "stand-in-gpus.sock"
LIST, ALLOCATE = "/v1beta1.DevicePlugin/ListAndWatch", "/v1beta1.DevicePlugin/Allocate"
ADDRESS = re.compile(rb"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
CHUNK = 1 << 16


def gpus() -> list[Spare]:
    """Return the spare disks."""
    found = sorted((BUS / "devices").glob("*/class"))
    return [Spare(path.parent.name) for path in found if path.read_text().strip() == DISK]


def listed(spares: list[Spare]) -> bytes:
    """Return a ``ListAndWatchResponse``: every device is healthy, on the NUMA node that the kernel says."""
    return b"".join(
        field(
            1,
            field(1, spare.address)
            + field(2, "Healthy")
            + field(3, field(1, field(1, spare.numa_node) if spare.numa_node else b"")),
        )
        for spare in spares
    )


def allocated(request: bytes) -> bytes:
    """Return an ``AllocateResponse`` for the devices that a request for one container names by their addresses."""
    spares = [Spare(each.decode()) for each in ADDRESS.findall(request)]
    nodes = ["/dev/vfio/vfio", *(str(spare.nodes["legacy"]) for spare in spares)]
    variable = field(1, VARIABLE) + field(2, ",".join(spare.address for spare in spares))
    specs = b"".join(field(3, field(1, node) + field(2, node) + field(3, "rw")) for node in nodes)
    return field(1, field(1, variable) + specs)


class Connection(socketserver.BaseRequestHandler):
    """A connection of the kubelet's; ``ListAndWatch`` goes on for as long as it lives."""

    def handle(self) -> None:
        http = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        http.initiate_connection()
        self.request.sendall(http.data_to_send())
        methods: dict[int, str] = {}
        requests: dict[int, bytes] = {}
        while received := self.request.recv(CHUNK):
            for event in http.receive_data(received):
                match event:
                    case RequestReceived(stream_id=int(stream), headers=headers):
                        methods[stream] = cast("Mapping[str, str]", dict(headers or ()))[":path"]
                    case DataReceived(stream_id=int(stream), data=data, flow_controlled_length=length):
                        requests[stream] = requests.get(stream, b"") + (data or b"")
                        http.acknowledge_received_data(length or 0, stream)
                    case StreamEnded(stream_id=int(stream)):
                        answer(http, stream, methods[stream], requests.get(stream, b""))
            self.request.sendall(http.data_to_send())


def answer(http: H2Connection, stream: int, method: str, request: bytes) -> None:
    """Answer one call; those of which nothing is wanted here get an empty message."""
    message = {LIST: lambda: listed(gpus()), ALLOCATE: lambda: allocated(request)}.get(method, lambda: b"")()
    http.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc")])
    http.send_data(stream, struct.pack(">?I", False, len(message)) + message)
    if method != LIST:
        http.send_headers(stream, [("grpc-status", "0")], end_stream=True)


class Server(socketserver.ThreadingUnixStreamServer):
    """The plugin's socket."""

    daemon_threads = True


def main() -> None:
    """Bind the disks, serve, and have the kubelet know; it is to be started again when the kubelet was."""
    for spare in gpus():
        spare.bind("vfio-pci")
    path = SOCKETS / ENDPOINT
    path.unlink(missing_ok=True)
    with Server(str(path), Connection) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        registration = field(1, "v1beta1") + field(2, ENDPOINT) + field(3, RESOURCE)
        trio.run(call, SOCKETS / "kubelet.sock", "/v1beta1.Registration/Register", registration)
        threading.Event().wait()


if __name__ == "__main__":
    main()
