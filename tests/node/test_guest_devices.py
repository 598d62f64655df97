"""Devices of the guest with QEMU 10 on a real kernel: vsock and its identifiers, watchdog, seed, variable store."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import struct
from pathlib import Path

import pytest

from runner.base.errors import HostError, explain
from runner.kernel.character_devices import vhost_vsock
from tests.node.cgroups import SECONDS, until
from tests.node.test_runner import ROM, running

SET_GUEST_CID = 0x4008AF60


def test_an_identifier_has_one_guest() -> None:
    with vhost_vsock(4242, exact=True) as (_, first):
        with pytest.raises(HostError) as refused, vhost_vsock(4242, exact=True):
            pass
        assert "another guest of this node has it; name another one, or say guest.vsock" in explain(refused.value)
        with vhost_vsock(4242, exact=False) as (fd, second):
            assert (first, second) == (4242, 4243)
            fcntl.ioctl(fd, SET_GUEST_CID, struct.pack("Q", second))  # as QEMU does
    with vhost_vsock(4242, exact=True) as (_, again):
        assert again == 4242, "it is free again at once"


@pytest.mark.parametrize("vsock", [pytest.param("4242", marks=pytest.mark.node_only), '"auto"'])
def test_a_machine_with_everything(tmp_path: Path, vsock: str) -> None:
    """QEMU accepts the descriptors of vsock, seed and agent; its user may not open their paths."""
    (tmp_path / "user-data").write_text("#cloud-config\n")
    (tmp_path / "user-data").chmod(0o600)
    spec = tmp_path / "spec.toml"
    spec.write_text(
        f'[cpu]\naccel = "tcg"\n[memory]\nsize = "64MiB"\n[boot]\nfirmware = "{ROM}"\n[guest]\nvsock = {vsock}\n'
        f'watchdog = "exit"\nclock = "localtime"\n[cloud_init]\nuser_data = "{tmp_path}/user-data"\n[shutdown]\ngrace = 20\n'
    )
    with running(spec, tmp_path) as (pid, output, process):
        until(lambda: "ROM-GUEST-UP" in output() or process.poll() is not None, "the guest to be up")
        cid = int(output().partition("the guest's vsock context identifier is ")[2].split()[0])
        fd = os.open("/dev/vhost-vsock", os.O_RDWR)
        try:
            with pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
                fcntl.ioctl(fd, SET_GUEST_CID, struct.pack("Q", cid))
        finally:
            os.close(fd)
        os.kill(pid, signal.SIGTERM)
        assert process.wait(SECONDS) == 0, output()
    assert vsock == '"auto"' or cid == 4242


def test_uefi_by_name(tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    (tmp_path / "disk").write_bytes(bytes(1 << 20))
    spec.write_text(
        f'[cpu]\naccel = "tcg"\n[boot]\nfirmware = "uefi"\nfirmware_vars = "{tmp_path}/store.fd"\n'
        f'[[disk]]\npath = "{tmp_path}/disk"\n[shutdown]\ngrace = 1\n'
    )
    with running(spec, tmp_path) as (pid, output, process):
        until(lambda: "the guest runs" in output() or process.poll() is not None, "the guest runs")
        assert "made the firmware's variable store" in output()
        os.kill(pid, signal.SIGTERM)
        assert process.wait(SECONDS) in {0, 13}, output()
    assert (tmp_path / "store.fd").stat().st_size == 540672
