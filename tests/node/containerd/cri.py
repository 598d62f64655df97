"""The kubelet's side of the Container Runtime Interface: calls to containerd's socket, answers as dictionaries.

Debian has no crictl, and a gRPC library would be a compiled dependency for a dozen calls. These calls need little of
HTTP/2: a connection with one stream, literal headers, and the message, a protocol buffer. The message of a refusal comes
in compressed headers; containerd writes the same text into its log, which is shown instead.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.node.cgroups import SECONDS

Message = dict[str, Any]

API = """
VersionRequest { string version = 1 }
VersionResponse { string version = 1; string runtime_name = 2; string runtime_version = 3 }
StatusRequest { bool verbose = 1 }
StatusResponse { RuntimeStatus status = 1 }
RuntimeStatus { repeated RuntimeCondition conditions = 1 }
RuntimeCondition { string type = 1; bool status = 2; string reason = 3; string message = 4 }

RunPodSandboxRequest { PodSandboxConfig config = 1 }
RunPodSandboxResponse { string pod_sandbox_id = 1 }
PodSandboxStatusRequest { string pod_sandbox_id = 1; bool verbose = 2 }
PodSandboxStatusResponse { PodSandboxStatus status = 1; map info = 2 }
PodSandboxStatus { PodSandboxNetworkStatus network = 5; map labels = 7 }
PodSandboxNetworkStatus { string ip = 1 }
StopPodSandboxRequest { string pod_sandbox_id = 1 }
StopPodSandboxResponse { }
RemovePodSandboxRequest { string pod_sandbox_id = 1 }
RemovePodSandboxResponse { }
PodSandboxConfig { PodSandboxMetadata metadata = 1; string hostname = 2; string log_directory = 3;
  DNSConfig dns_config = 4; map labels = 6; map annotations = 7; LinuxPodSandboxConfig linux = 8 }
PodSandboxMetadata { string name = 1; string uid = 2; string namespace = 3; int attempt = 4 }
DNSConfig { repeated string servers = 1; repeated string searches = 2; repeated string options = 3 }
LinuxPodSandboxConfig { string cgroup_parent = 1; LinuxSandboxSecurityContext security_context = 2 }
LinuxSandboxSecurityContext { NamespaceOption namespace_options = 1; bool privileged = 6;
  SecurityProfile seccomp = 9 }
NamespaceOption { int network = 1; int pid = 2; int ipc = 3 }
SecurityProfile { int profile_type = 1 }

ImageStatusRequest { ImageSpec image = 1 }
ImageStatusResponse { Image image = 1 }
Image { string id = 1 }

CreateContainerRequest { string pod_sandbox_id = 1; ContainerConfig config = 2;
  PodSandboxConfig sandbox_config = 3 }
CreateContainerResponse { string container_id = 1 }
StartContainerRequest { string container_id = 1 }
StartContainerResponse { }
StopContainerRequest { string container_id = 1; int timeout = 2 }
StopContainerResponse { }
ContainerStatusRequest { string container_id = 1; bool verbose = 2 }
ContainerStatusResponse { ContainerStatus status = 1; map info = 2 }
ContainerStatus { string id = 1; int state = 3; int exit_code = 7; string reason = 10; map labels = 12;
  string log_path = 15 }
ListContainersRequest { ContainerFilter filter = 1 }
ListContainersResponse { repeated Container containers = 1 }
ContainerFilter { ContainerStateValue state = 2; map label_selector = 4 }
ContainerStateValue { int state = 1 }
Container { string id = 1; int state = 6; map labels = 8 }
UpdateContainerResourcesRequest { string container_id = 1; LinuxContainerResources linux = 2 }
UpdateContainerResourcesResponse { }
ExecSyncRequest { string container_id = 1; repeated string cmd = 2; int timeout = 3 }
ExecSyncResponse { bytes stdout = 1; bytes stderr = 2; int exit_code = 3 }
ContainerConfig { ContainerMetadata metadata = 1; ImageSpec image = 2; repeated string command = 3;
  repeated string args = 4; repeated KeyValue envs = 6; repeated Mount mounts = 7; repeated Device devices = 8;
  map labels = 9; map annotations = 10; string log_path = 11; LinuxContainerConfig linux = 15 }
ContainerMetadata { string name = 1; int attempt = 2 }
ImageSpec { string image = 1 }
KeyValue { string key = 1; string value = 2 }
Mount { string container_path = 1; string host_path = 2; bool readonly = 3 }
Device { string container_path = 1; string host_path = 2; string permissions = 3 }
LinuxContainerConfig { LinuxContainerResources resources = 1;
  LinuxContainerSecurityContext security_context = 2 }
LinuxContainerResources { int cpu_shares = 3; int memory_limit_in_bytes = 4; int oom_score_adj = 5;
  string cpuset_cpus = 6; string cpuset_mems = 7 }
LinuxContainerSecurityContext { Capability capabilities = 1; bool privileged = 2;
  NamespaceOption namespace_options = 3; bool readonly_rootfs = 7; bool no_new_privs = 11;
  repeated string masked_paths = 13; repeated string readonly_paths = 14; SecurityProfile seccomp = 15 }
Capability { repeated string add_capabilities = 1; repeated string drop_capabilities = 2 }
"""
"""The part of ``runtime.v1`` (``api.proto`` of k8s.io/cri-api) that is used here; ``int`` is any integer."""

FIELDS: dict[str, dict[str, tuple[int, str, bool]]] = {
    message: {
        name: (int(number), kind, bool(repeated) or kind == "map")
        for repeated, kind, name, number in re.findall(r"(repeated )?(\w+) (\w+) = (\d+)", declared)
    }
    for message, declared in re.findall(r"(\w+) \{(.*?)\}", API, re.DOTALL)
}
"""Message → its fields' names → number, type, and whether there may be several."""

VARINT, LENGTH = 0, 2
"""Wire types: an integer, or a length and as many bytes."""
DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
"""HTTP/2's frames (RFC 9113)."""
ACK = END_STREAM = 1
END_HEADERS = 4
WINDOW = 1 << 20
"""Bytes that containerd may send without an update of the window; no answer is as long."""


class RefusedError(Exception):
    """containerd refused a call."""


def varint(value: int) -> bytes:
    """Return an integer in groups of seven bits, the lowest first; a negative one is one of 64 bits."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def encode(message: str, values: Mapping[str, Any]) -> bytes:
    """Return *values* as a protocol buffer; a name that *message* does not have is a ``KeyError``."""
    out = b""
    for name, given in values.items():
        number, kind, repeated = FIELDS[message][name]
        if kind == "map":
            kind, given = "KeyValue", [{"key": key, "value": value} for key, value in given.items()]  # noqa: PLW2901
        for each in given if repeated else [given]:
            if kind in {"int", "bool"}:
                out += varint(number << 3 | VARINT) + varint(each)
            else:
                content = each.encode() if kind == "string" else encode(kind, each)
                out += varint(number << 3 | LENGTH) + varint(len(content)) + content
    return out


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a protocol buffer by their numbers."""
    at = 0

    def integer() -> int:
        nonlocal at
        start = at
        while data[at] > 0x7F:
            at += 1
        at += 1
        return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(data[start:at]))

    while at < len(data):
        tag, value = integer(), integer()
        if tag & 7 == VARINT:
            yield tag >> 3, value
        else:
            assert tag & 7 == LENGTH, f"a field of wire type {tag & 7}"
            yield tag >> 3, data[at : at + value]
            at += value


def decode(message: str, data: bytes) -> Message:
    """Return the fields of a protocol buffer that :data:`API` declares; those that are empty, zero or false are absent."""
    known = {number: (name, kind, repeated) for name, (number, kind, repeated) in FIELDS[message].items()}
    out: Message = {}
    for number, found in fields(data):
        if number in known:
            name, kind, repeated = known[number]
            value: Any = found
            if isinstance(found, bytes) and kind != "bytes":
                value = found.decode() if kind == "string" else decode("KeyValue" if kind == "map" else kind, found)
            if kind == "map":
                out.setdefault(name, {})[value["key"]] = value.get("value", "")
            elif repeated:
                out.setdefault(name, []).append(value)
            else:
                out[name] = value
    return out


def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    """Return a frame of HTTP/2."""
    return struct.pack("!I", len(content))[1:] + struct.pack("!BBI", kind, flags, stream) + content


def request(method: str, message: bytes) -> bytes:
    """Return a whole call: HTTP/2's greeting, then headers and message on the first stream."""

    def text(value: str) -> bytes:
        return bytes([len(value)]) + value.encode()

    service = "ImageService" if method.startswith("Image") else "RuntimeService"
    # RFC 7541: POST and http by their numbers in the static table, then literals that are not indexed.
    headers = b"".join(
        (
            b"\x83\x86",
            b"\x04" + text(f"/runtime.v1.{service}/{method}"),
            b"\x01" + text("localhost"),
            b"\x0f\x10" + text("application/grpc"),
            b"\x00" + text("te") + text("trailers"),
        )
    )
    return b"".join(
        (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            frame(SETTINGS, 0, 0, struct.pack("!HI", 4, WINDOW)),  # SETTINGS_INITIAL_WINDOW_SIZE
            frame(WINDOW_UPDATE, 0, 0, struct.pack("!I", WINDOW)),
            frame(HEADERS, END_HEADERS, 1, headers),
            frame(DATA, END_STREAM, 1, b"\0" + struct.pack("!I", len(message)) + message),
        )
    )


def frames(connection: socket.socket) -> Iterator[tuple[int, int, bytes]]:
    """Yield kind, flags and content of each received frame until the connection is closed."""
    with connection.makefile("rb") as stream:
        while header := stream.read(9):
            yield header[3], header[4], stream.read(int.from_bytes(header[:3], "big"))


@dataclass(frozen=True)
class Cri:
    """A client of a container runtime's socket."""

    socket: Path
    log: Path

    def __call__(self, method: str, *, seconds: float = SECONDS, **values: Any) -> Message:
        """Call *method* with *values* and return the answer, which must come within *seconds*."""
        reply = b""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(seconds)
            connection.connect(str(self.socket))
            connection.sendall(request(method, encode(f"{method}Request", values)))
            for kind, flags, content in frames(connection):
                if kind in {SETTINGS, PING} and not flags & ACK:
                    connection.sendall(frame(kind, ACK, 0, content if kind == PING else b""))
                elif kind == DATA:
                    reply += content
                elif kind == HEADERS and flags & END_STREAM:
                    break
        if not reply:  # not even the five bytes in front of an empty message
            lines = [line for line in self.log.read_text().splitlines() if "level=error" in line]
            raise RefusedError(f"{method}: {lines[-1] if lines else 'the log has no error'}")
        return decode(f"{method}Response", reply[5:])
