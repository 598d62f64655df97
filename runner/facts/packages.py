"""The packages with the programs of an instance, by distribution: one table for all messages that recommend one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_COMMON = dict.fromkeys(("setpriv", "unshare", "nsenter"), "util-linux") | {
    "dnsmasq": "dnsmasq",
    "passt": "passt",
    "sleep": "coreutils",
    "virtiofsd": "virtiofsd",
}
_DEBIAN = {**_COMMON, "dnsmasq": "dnsmasq-base", "ovmf": "ovmf", "qemu-system-x86_64": "qemu-system-x86"}
_RHEL = {**_COMMON, "ovmf": "edk2-ovmf"}

DISTRIBUTIONS: dict[str, tuple[str, Mapping[str, str]]] = {
    "debian-12": ("apt-get install", {**_DEBIAN, "virtiofsd": "qemu-system-common"}),
    "debian": ("apt-get install", _DEBIAN),
    "rhel": ("dnf install", _RHEL),  # its QEMU is /usr/libexec/qemu-kvm, which has none of the devices of others
    "fedora": ("dnf install", {**_RHEL, "qemu-system-x86_64": "qemu-system-x86-core"}),
    "arch": ("pacman -S", {**_COMMON, "ovmf": "edk2-ovmf", "qemu-system-x86_64": "qemu-system-x86"}),
    "alpine": ("apk add", {**_COMMON, "ovmf": "ovmf", "qemu-system-x86_64": "qemu-system-x86_64"}),
    "suse": ("zypper install", {**_COMMON, "ovmf": "qemu-ovmf-x86_64", "qemu-system-x86_64": "qemu-x86"}),
}
"""``ID`` of os-release(5), or ``ID-VERSION_ID`` where a release differs → the command that installs, and program → package."""


def install(name: str, os_release: str) -> str:
    """Return the way to install the program or firmware *name* on the distribution of *os_release*, the text of os-release(5).

    That is a command; for a distribution that is not in the table, or has no such package, it is ``install`` and the name.
    """
    for known in _distributions(os_release):
        command, packages = DISTRIBUTIONS.get(known, ("", {}))
        if name in packages:
            return f"{command} {packages[name]}"
        if command:
            break
    return f"install {name}"


def _distributions(os_release: str) -> Iterator[str]:
    """Yield the names of a distribution: its own, then those that it derives from."""
    pairs = (line.partition("=") for line in os_release.splitlines() if not line.startswith("#"))
    values = {name: _unquoted(value) for name, _, value in pairs}
    own = values.get("ID", "linux")
    yield f"{own}-{values.get('VERSION_ID', '')}"
    yield own
    yield from values.get("ID_LIKE", "").split()


def _unquoted(value: str) -> str:
    import shlex  # here, because only a refusal needs it

    try:
        return " ".join(shlex.split(value))
    except ValueError:  # it is damaged
        return value
