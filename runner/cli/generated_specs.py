"""The specs that ``try`` generates: for the demo guest, and for a disk that a person names (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from runner.base.values import frozen
from runner.facts.disk import FileFact

Spec = Mapping[str, object]

LOCALHOST = "127.0.0.1"
"""The address whose ports are forwarded to a tried guest: reachable only from this machine."""


@frozen
class Login:
    """A user that cloud-init makes in the guest."""

    user: str
    password: str


def demo_spec(guest: Path, share: PurePosixPath, terminal: tuple[int, int] | None) -> Spec:
    """Return the spec of the demo guest in the directory *guest*, with the directory *share*.

    *terminal* is the number of columns and lines of its terminal, ``None`` if it has none, and zeros if it is unknown.
    """
    cmdline = "console=ttyS0 quiet no_timer_check guest.then=shell"
    if terminal is not None and all(terminal):
        columns, rows = terminal
        cmdline += f" guest.rows={rows} guest.columns={columns}"
    return {
        "instance": {"name": "try"},
        "cpu": {"count": 1, "accel": "tried"},
        "memory": {"size": "256MiB"},
        "boot": {"kernel": str(guest / "vmlinuz"), "initrd": str(guest / "initrd"), "cmdline": cmdline},
        "network": [{"mode": "private"}],
        "share": [{"tag": "share", "path": str(share)}],
        "shutdown": {"grace": 8, "poweroff_status": 0},
    }


def disk_spec(
    disk: PurePosixPath,
    fact: FileFact,
    *,
    cpus: int,
    memory: str,
    ports: Sequence[str] | None,
    login: Login | None,
) -> Spec:
    """Return the spec of a guest that boots *disk*, of which *fact* is known; it is only read.

    *ports* are this machine's ports that passt forwards to the guest, ``None`` if there is no passt.
    """
    qcow2 = fact.image is not None and fact.image.format == "qcow2"
    esp = fact.image is not None and fact.image.content is not None and fact.image.content.esp
    network: dict[str, object] = {"mode": "private" if ports is None else "passt"}
    if ports:
        network["ports"] = [f"{LOCALHOST}/{each}" for each in ports]
    spec: dict[str, object] = {
        "instance": {"name": "try"},
        "cpu": {"count": cpus, "accel": "tried"},
        "memory": {"size": memory},
        "disk": [{"path": str(disk), "format": "qcow2" if qcow2 else "raw", "ephemeral": True}],
        "network": [network],
        "shutdown": {"poweroff_status": 0},
    }
    if esp:
        spec["boot"] = {"firmware": "uefi"}
    if login is not None:
        spec["cloud_init"] = {"user_data": _user_data(login)}
    return spec


def _user_data(login: Login) -> str:
    """Return the user-data that creates the user of *login*, and shows at the prompt how to log in (agetty(8)).

    Only the fast kind of sshd's host keys is generated: an emulated CPU takes seconds to find an RSA key's primes.
    """
    return (
        "#cloud-config\n"
        "users:\n"
        "- default\n"
        f"- {{name: {login.user}, plain_text_passwd: '{login.password}', lock_passwd: false, "
        "sudo: 'ALL=(ALL) NOPASSWD:ALL'}\n"
        "ssh_pwauth: true\n"
        "ssh_genkeytypes: [ed25519]\n"
        "manage_etc_hosts: localhost\n"
        "write_files:\n"
        "- path: /etc/issue.d/try.issue\n"
        f"  content: \"\\nlog in as '{login.user}' with the password '{login.password}'; `sudo -i` makes you root\\n\\n\"\n"
    )
