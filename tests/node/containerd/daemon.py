"""A containerd of our own, next to one that the machine may have: Debian's program, the kubelet's settings, our images."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.node.cgroups import SECONDS, until
from tests.node.containerd.cri import Cri

UNITS = Path("/run/systemd/system")
UNIT = "instance-runner-containerd.service"
PAUSE = "localhost/pause:1"
CONFIGURATION = """
version = 2
root = "{directory}/root"
state = "{directory}/state"
[grpc]
  address = "{directory}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{directory}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/usr/lib/cni"
  conf_dir = "{directory}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  SystemdCgroup = true
"""
CONFIGURATION_2 = """
version = 3
root = "{directory}/root"
state = "{directory}/state"
[grpc]
  address = "{directory}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{directory}/opt"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{pause}"
[plugins."io.containerd.cri.v1.runtime"]
  enable_cdi = true
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["{programs}/cni"]
  conf_dir = "{directory}/cni"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
  SystemdCgroup = true
  BinaryName = "{programs}/runc"
[plugins."io.containerd.nri.v1.nri"]
  plugin_registration_timeout = "60s"
  plugin_request_timeout = "60s"
"""
"""The same for containerd 2, which is more patient with its plugins (5 and 2 s by default) than an emulated machine needs it to be."""
NETWORK = {
    "cniVersion": "1.0.0",
    "name": "pods",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "pods0",
            "isGateway": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": "10.22.0.0/24"}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
    ],
}
"""Each pod's ``eth0`` is one end of a veth; the other end is a port of a bridge of the node."""
UNIT_PROPERTIES = ("Type=notify", "Delegate=yes", "KillMode=process", "Restart=always", "TasksMax=infinity")
"""Those of Debian's ``containerd.service``: the processes it started outlive it."""


@dataclass(frozen=True)
class Containerd:
    """The daemon, a systemd unit, with all of its files in *directory*."""

    directory: Path
    programs: Path = Path("/usr/bin")
    """Where ``containerd`` and ``ctr`` are; elsewhere than there, its shim, runc and CNI plugins too."""
    configuration: str = CONFIGURATION

    @property
    def cri(self) -> Cri:
        """Return the client of its socket."""
        return Cri(self.directory / "containerd.sock", self.directory / "log")

    def start(self) -> None:
        """Start it; it answers when this returns."""
        places = {"directory": self.directory, "programs": self.programs, "pause": PAUSE}
        (self.directory / "config.toml").write_text(self.configuration.format(**places))
        (self.directory / "cni").mkdir()
        (self.directory / "cni" / "10-pods.conflist").write_text(json.dumps(NETWORK))
        argv = (str(self.programs / "containerd"), "--config", str(self.directory / "config.toml"))
        path = f"Environment=PATH={self.programs}:/usr/sbin:/usr/bin:/sbin:/bin"
        run_unit(UNIT, self.cri.log, (*UNIT_PROPERTIES, path), *argv)
        # containerd reads the configuration of CNI some time after its start.
        until(lambda: all(each.get("status") for each in self.conditions()), "containerd and its network")

    def conditions(self) -> list[dict[str, object]]:
        """Return its own condition and that of the network."""
        conditions: list[dict[str, object]] = self.cri("Status")["status"]["conditions"]
        return conditions

    def restart(self) -> None:
        """End it and start it again, as an upgrade does."""
        subprocess.run(["systemctl", "restart", UNIT], check=True)

    def stop(self) -> None:
        """End it."""
        subprocess.run(["systemctl", "stop", UNIT], check=True)

    def take(self, images: Mapping[str, Image]) -> None:
        """Import *images* by their names; the CRI has them when this returns."""
        archive = self.directory / "images.tar"
        archive.write_bytes(archive_of(images))
        argv = [
            str(self.programs / "ctr"),
            "--address",
            str(self.cri.socket),
            "--namespace",
            "k8s.io",
            "images",
            "import",
            str(archive),
        ]
        subprocess.run(argv, check=True, timeout=4 * SECONDS)
        for name in images:
            until(lambda: self.cri("ImageStatus", image={"image": name}), name)  # noqa: B023

    def unpacked(self, file: str) -> Path:
        """Return the directory of the unpacked layer that has *file* at its top."""
        snapshots = self.directory / "root" / "io.containerd.snapshotter.v1.overlayfs" / "snapshots"
        [found] = snapshots.glob(f"*/fs/{file}")
        return found.parent


def run_unit(name: str, log: Path, properties: Sequence[str], *argv: str) -> None:
    """Run a program as a systemd unit that writes to *log*; it can be stopped and started again by its name."""
    command = " ".join('"' + each.replace("%", "%%") + '"' for each in argv)
    lines = (
        "[Service]",
        f"ExecStart={command}",
        *properties,
        f"StandardOutput=append:{log}",
        f"StandardError=append:{log}",
    )
    (UNITS / name).write_text("\n".join([*lines, ""]))
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    subprocess.run(["systemctl", "start", name], check=True)


@dataclass(frozen=True)
class Image:
    """An image of one layer."""

    configuration: Mapping[str, object]
    files: Mapping[str, bytes]


def archive_of(images: Mapping[str, Image]) -> bytes:
    """Return an archive of images as ``docker save`` writes it."""
    manifest = []
    files = {}
    for number, (name, image) in enumerate(images.items()):
        layer = tar(image.files)
        files[f"{number}.tar"] = layer
        files[f"{number}.json"] = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": image.configuration,
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
            }
        ).encode()
        manifest.append({"Config": f"{number}.json", "RepoTags": [name], "Layers": [f"{number}.tar"]})
    return tar({**files, "manifest.json": json.dumps(manifest).encode()})


def pause_program() -> bytes:
    """Return a static program for x86-64 that only waits for signals."""
    code = b"\xb8\x22\0\0\0\x0f\x05\xeb\xf7"  # mov $SYS_pause, %eax; syscall; jmp to the start
    base, headers = 0x400000, 64 + 56
    size = headers + len(code)
    identity = b"\x7fELF\x02\x01\x01"
    executable, x86_64, version = 2, 62, 1
    elf = struct.pack(
        "<16sHHIQQQIHHHHHH", identity, executable, x86_64, version, base + headers, 64, 0, 0, 64, 56, 1, 0, 0, 0
    )
    load, readable_executable = 1, 5
    segment = struct.pack("<IIQQQQQQ", load, readable_executable, 0, base, base, size, size, 0x1000)
    return elf + segment + code


def tar(files: Mapping[str, bytes]) -> bytes:
    """Return an archive of executable files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    return out.getvalue()
