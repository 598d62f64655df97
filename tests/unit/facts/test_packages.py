"""What a missing program is installed by, on the distribution that os-release(5) describes."""

from __future__ import annotations

import pytest

from runner.facts.packages import DISTRIBUTIONS, install

UBUNTU = 'PRETTY_NAME="Ubuntu 24.04.1 LTS"\nID=ubuntu\nVERSION_ID="24.04"\nID_LIKE=debian\n'
ROCKY = 'NAME="Rocky Linux"\nID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.4"\n'
FEDORA = "NAME='Fedora Linux'\nVERSION_ID=42\nID=fedora\n"
LEAP = 'ID="opensuse-leap"\nID_LIKE="suse opensuse"\nVERSION_ID="15.6"\n'


@pytest.mark.parametrize(
    ("os_release", "name", "expected"),
    [
        ('ID=debian\nVERSION_ID="13"\n', "virtiofsd", "apt-get install virtiofsd"),
        ('ID=debian\nVERSION_ID="12"\n', "virtiofsd", "apt-get install qemu-system-common"),
        ('ID=debian\nVERSION_ID="12"\n', "passt", "apt-get install passt"),
        ("ID=debian\n", "dnsmasq", "apt-get install dnsmasq-base"),
        (UBUNTU, "ovmf", "apt-get install ovmf"),
        ('ID=linuxmint\nID_LIKE="ubuntu debian"\n', "qemu-system-x86_64", "apt-get install qemu-system-x86"),
        (FEDORA, "ovmf", "dnf install edk2-ovmf"),
        (FEDORA, "qemu-system-x86_64", "dnf install qemu-system-x86-core"),
        (ROCKY, "ovmf", "dnf install edk2-ovmf"),
        (ROCKY, "qemu-system-x86_64", "install qemu-system-x86_64"),
        ("# a comment\nID=arch\nBUILD_ID=rolling\n", "ovmf", "pacman -S edk2-ovmf"),
        ("ID=manjaro\nID_LIKE=arch\n", "unshare", "pacman -S util-linux"),
        ("ID=alpine\nVERSION_ID=3.22.0\n", "qemu-system-x86_64", "apk add qemu-system-x86_64"),
        (LEAP, "ovmf", "zypper install qemu-ovmf-x86_64"),
        ("ID=nixos\n", "passt", "install passt"),
        ("", "passt", "install passt"),
        ('ID="damaged\n', "passt", "install passt"),
    ],
)
def test_a_package_is_named_as_this_distribution_calls_it(os_release: str, name: str, expected: str) -> None:
    assert install(name, os_release) == expected


def test_every_distribution_has_what_every_other_has() -> None:
    names = {name: frozenset(packages) for name, (_, packages) in DISTRIBUTIONS.items() if name != "rhel"}
    assert len(set(names.values())) == 1, names
