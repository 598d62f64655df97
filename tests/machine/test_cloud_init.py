"""The example of a server: by UEFI to its empty disk, and with a real Debian from nothing to an SSH login."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.emulated_node import artefacts
from tests.emulated_node.cache import fetch
from tests.emulated_node.cpio import Entry, archive
from tests.support.program_runs import ProgramStarter, until

HERE = Path(__file__).parent
EXAMPLE = (HERE.parents[1] / "examples" / "instances" / "block-disk-server.toml").read_text()


def server(replaced: Mapping[str, str]) -> str:
    """Return the example with each text in *replaced* replaced by its value, and with an emulated CPU."""
    text = EXAMPLE
    for old, new in {"[cpu]\n": '[cpu]\naccel = "tcg"\n', **replaced}.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "user@example.com", "-f", path], check=True)
    return path


@pytest.fixture
def initrd(tmp_path: Path) -> Path:
    """Make the initramfs that mounts a writable layer over a read-only Debian and then starts its systemd."""
    path = tmp_path / "initrd"
    entries = [Entry.directory(name) for name in ("bin", "dev")]
    entries.append(Entry.device("dev/console", 5, 1))
    entries.append(Entry.file("bin/busybox", Path("/bin/busybox").read_bytes(), mode=0o755))
    entries.append(Entry.file("init", (HERE / "cloud-guest-init").read_bytes(), mode=0o755))
    path.write_bytes(archive(entries))
    return path


def test_the_example_starts_by_uefi(start: ProgramStarter, tmp_path: Path, key: Path) -> None:
    """Start the example with other paths; an empty file takes the place of the block device."""
    (tmp_path / "disk").write_bytes(bytes(1 << 20))
    text = server(
        {
            "/var/lib/instance/uefi-variables.fd": f"{tmp_path}/variables.fd",
            "/dev/vm-disk": f"{tmp_path}/disk",
            "/etc/instance/authorized_keys": f"{key}.pub",
            "grace = 60": "grace = 1",
        }
    )
    run = start(text, boot=False)
    run.until("BdsDxe", lambda: run.console)
    assert f"made the firmware's variable store {tmp_path}/variables.fd" in run.log
    assert run.stop() in {0, 13}
    assert run.termination_log()["faults"] == []


@pytest.mark.timeout(1800)  # without KVM, on a busy machine, after the Debian was made
def test_from_nothing_to_an_ssh_login(start: ProgramStarter, tmp_path: Path, key: Path, initrd: Path) -> None:
    """With a real cloud-init, sshd and guest agent, as Debian ships them; the guest ignores the power button.

    The disk is the emulated node's Debian. It has no boot loader, so that its kernel is started directly.
    """
    cmdline = "console=ttyS0 quiet no_timer_check systemd.mask=systemd-logind.service systemd.show_status=0"
    text = server(
        {
            'firmware = "uefi"\n': f'kernel = "{fetch(artefacts.kernel())}"\ninitrd = "{initrd}"\ncmdline = "{cmdline}"\n',
            'firmware_vars = "/var/lib/instance/uefi-variables.fd"': "",
            "/dev/vm-disk": str(fetch(artefacts.root())),
            'serial = "root"\n': "read_only = true\n",
            "/etc/instance/authorized_keys": f"{key}.pub",
            # Linux prefers the Rock Ridge names; without them it reads the seed as Windows does. The modules that cloud-init
            # runs after the login works are not tested: they take long.
            "ssh_genkeytypes:": "bootcmd: [[mkdir, /run/seed], [mount, -t, iso9660, -o, 'ro,norock', /dev/vdb, /run/seed]]\n"
            "cloud_config_modules: []\ncloud_final_modules: []\nssh_genkeytypes:",
        }
    )
    run = start(text, boot=False)

    def ssh(command: str) -> str:
        known = (f"-oUserKnownHostsFile={tmp_path}/known", "-oStrictHostKeyChecking=no")
        login = ("ssh", "-i", key, *known, "-oBatchMode=yes", "-oConnectTimeout=10", "debian@192.168.77.2")
        argv = ("nsenter", f"--target={run.pid()}", "--net", *login, command)
        try:
            return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60).stdout
        except subprocess.TimeoutExpired:  # sshd accepts connections before it can start a session
            return ""

    def logged_in() -> str:
        assert run.process.poll() is None, run.log
        return ssh("hostname; cat /etc/motd /run/cloud-init/cloud-id /var/lib/cloud/data/instance-id; ls /run/seed")

    uuid = "3ceda12c-3ee9-40fa-9f42-61428fe654a6"
    output = until(logged_in, "an SSH login", 600).split("\n")
    assert output == ["web-1", "written by user-data", "nocloud", uuid, "meta-data", "network-config", "user-data", ""]
    until(lambda: "the guest is ready sign=port:22" in run.log, "its next attempt to connect", 60)
    until(lambda: "the guest agent is there" in run.log, "the guest agent", 120)
    assert run.stop() == 0, run.log
    assert "the guest agent is asked to shut the guest down" in run.log
    assert "pressing the power button" not in run.log
    assert run.termination_log()["faults"] == []
