"""The specs that `try` makes of a disk: what its first bytes decide, and that the planner takes each of them."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

import attrs
import pytest

from runner.cli.generated_specs import Login, disk_spec
from runner.facts.disk import FileFact, ImageFact
from runner.facts.disk_content import DiskContent
from runner.spec.instance import InstanceSpec, parse_instance
from runner.spec.yaml import parse_yaml

DISK = PurePosixPath("/images/debian.img")
RAW = FileFact("file", 1 << 30, image=ImageFact("raw", 1 << 30, content=DiskContent(bios=True)))


def made(found: FileFact = RAW, **options: Any) -> InstanceSpec:
    usual = {"cpus": 2, "memory": "2GiB", "ports": (), "login": None}
    return parse_instance("made", json.dumps(disk_spec(DISK, found, **{**usual, **options})).encode())


def with_content(format_: str, content: DiskContent | None) -> FileFact:
    return attrs.evolve(RAW, image=ImageFact(format_, 1 << 30, content=content))


@pytest.mark.parametrize(
    ("found", "format_", "firmware"),
    [
        (RAW, "raw", None),
        (with_content("raw", DiskContent(esp=True, efi=True)), "raw", "uefi"),
        (with_content("qcow2", DiskContent(bios=True, esp=True, efi=True)), "qcow2", "uefi"),
        (with_content("qcow2", DiskContent(bios=True, efi=True)), "qcow2", None),
        (with_content("qcow2", None), "qcow2", None),
        (with_content("vmdk", None), "raw", None),  # which the planner refuses, with its conversion
        (FileFact("missing"), "raw", None),
    ],
)
def test_format_and_firmware_are_those_of_the_first_bytes(found: FileFact, format_: str, firmware: str | None) -> None:
    spec = made(found)
    [disk] = spec.disk
    assert (disk.path, disk.format, disk.ephemeral, spec.boot.firmware) == (DISK, format_, True, firmware)


def test_its_network_has_a_way_out_where_there_is_passt() -> None:
    assert [each.mode for each in made(ports=None).network] == ["private"]
    [network] = made(ports=("2222:22", "8080:80")).network
    assert (network.mode, *map(str, network.forwards)) == ("passt", "127.0.0.1/2222:22", "127.0.0.1/8080:80")


def test_a_login_is_user_data_that_cloud_init_can_read_and_without_one_there_is_no_seed() -> None:
    assert made().cloud_init is None
    seed = made(login=Login("try", "a7b8")).cloud_init
    assert seed is not None
    [document] = parse_yaml("user-data", str(seed.user_data).encode())
    assert isinstance(document.value, dict)
    assert document.value["users"] == [
        "default",
        {"name": "try", "plain_text_passwd": "a7b8", "lock_passwd": False, "sudo": "ALL=(ALL) NOPASSWD:ALL"},
    ]
    assert document.value["ssh_genkeytypes"] == ["ed25519"], "an emulated CPU takes seconds for a key of RSA"
    [issue] = document.value["write_files"]
    assert "log in as 'try' with the password 'a7b8'" in issue["content"]
