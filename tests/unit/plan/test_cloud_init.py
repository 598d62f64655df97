from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import time
import tracemalloc
from functools import partial
from pathlib import Path, PurePosixPath

import attrs
import pytest

from runner.base.errors import HostError
from runner.facts.disk import DocumentFact
from runner.facts.host import HostFacts
from runner.instance.parts.seed import seed_image
from runner.plan.argv.by_hand import pasteable
from runner.plan.cloud_init import Secret, SeedPlan, check_user_data, handled, read_keys
from runner.plan.problems import Problems
from runner.plan.render import plan_json, plan_lines
from runner.spec.document_parser import LARGEST_DOCUMENT
from tests.support.json_schemas import fitting
from tests.support.plans import FACTS, KERNEL, plan_of, problems
from tests.support.user_data import HANDLED, IGNORED, OTHER_READERS, VERSION

MULTIPART = b"Content-Type: multipart/mixed; boundary=b%d\n\n--b%d\n"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0 somebody"
DOCUMENTS = {
    PurePosixPath("/keys"): DocumentFact(
        f'# two\n{KEY}\n\nno-pty,command="a b" ecdsa-sha2-nistp256 AAAAE2VjZHNh\n'.encode()
    ),
    PurePosixPath("/id"): DocumentFact(b"-----BEGIN OPENSSH PRIVATE KEY-----\nb3Blb\n"),
    PurePosixPath("/user"): DocumentFact(b"#!/bin/sh\necho hunter2\n"),
    PurePosixPath("/gone"): DocumentFact(error="No such file or directory"),
    PurePosixPath("/network"): DocumentFact(b"version: 2\n"),
}
READ = attrs.evolve(FACTS, documents=DOCUMENTS)


def seed(text: str, before: str = "") -> SeedPlan:
    found = plan_of(f"{before}{KERNEL}{text}", READ).machine.seed
    assert found is not None
    return found


def test_an_empty_table_is_enough() -> None:
    found = seed("[cloud_init]\n")
    assert found.user_data.content == b"#cloud-config\n"
    assert json.loads(found.meta_data.content) == {"instance-id": "instance", "local-hostname": "instance"}
    assert found.network_config is None, "without networks cloud-init configures its default"
    assert plan_of(KERNEL).machine.seed is None


def test_the_instance_id_is_stable() -> None:
    uuid = "3ceda12c-3ee9-40fa-9f42-61428fe654a6"
    assert seed("[cloud_init]\n", f'[instance]\nname = "a_b"\nuuid = "{uuid}"\n').instance_id == uuid
    in_pod = plan_of(f"{KERNEL}[cloud_init]\n", attrs.evolve(READ, pod_uid="pod-uid")).machine.seed
    assert in_pod is not None
    assert in_pod.instance_id == "pod-uid"
    in_docker = plan_of(f"{KERNEL}[cloud_init]\n", attrs.evolve(READ, container_uid="0123abcd" * 8)).machine.seed
    assert in_docker is not None
    assert in_docker.instance_id == "instance", "the container's id changes with each run"
    assert json.loads(seed("[cloud_init]\n", '[instance]\nname = "a_b"\n').meta_data.content)["local-hostname"] == "a-b"


@pytest.mark.parametrize(
    ("text", "remarked"),
    [
        ("[cloud_init]\n", True),
        ("read_only = true\n[cloud_init]\n", False),
        ("ephemeral = true\n[cloud_init]\n", False),
        ('[instance]\nuuid = "3ceda12c-3ee9-40fa-9f42-61428fe654a6"\n[cloud_init]\n', False),
        ('[cloud_init]\nmeta_data = "instance-id: x"\n', False),
        ("", False),
    ],
)
def test_a_disk_that_outlives_its_pod_is_another_machine_to_cloud_init(text: str, *, remarked: bool) -> None:
    facts = attrs.evolve(READ, pod_uid="pod-uid")
    remarks = plan_of(f'{KERNEL}[[disk]]\npath = "/raw"\n{text}', facts).remarks
    assert any("in its next pod cloud-init runs as on a first boot" in str(each) for each in remarks) is remarked
    assert not any("next pod" in str(each) for each in plan_of(f"{KERNEL}[cloud_init]\n", facts).remarks)


@pytest.mark.parametrize("key", [KEY.replace(" ", "  "), KEY.replace(" ", "\t"), KEY + "\r"])
def test_a_key_may_have_any_blanks(key: str) -> None:
    """As sshd(8) takes them."""
    found = Problems()
    assert read_keys("ssh_keys[0]", PurePosixPath("/k"), key.encode(), found) == [key.strip()]
    assert found.found == []


def test_keys_host_name_and_networks() -> None:
    found = seed(
        f'[cloud_init]\nssh_keys = ["{KEY} two", "/keys"]\nhostname = "web.example.org"\n'
        '[[network]]\nmac = "52:54:00:00:00:01"\n[[network]]\nmode = "bridge"\n'
    )
    metadata = json.loads(found.meta_data.content)
    assert metadata["public-keys"] == [f"{KEY} two", KEY, 'no-pty,command="a b" ecdsa-sha2-nistp256 AAAAE2VjZHNh']
    assert metadata["local-hostname"] == "web.example.org"
    assert found.network_config is not None
    network = json.loads(found.network_config.content)
    assert [each["match"]["macaddress"] for each in network["ethernets"].values()] == [
        "52:54:00:00:00:01",
        "0a:58:0a:f4:01:05",
    ]
    assert all(each["dhcp4"] for each in network["ethernets"].values())
    assert "dhcp6" not in found.network_config.content.decode()
    six = seed("[cloud_init]\n[[network]]\n[[network]]\nipv6 = true\n").network_config
    assert six is not None
    ipv6 = [(each.get("dhcp6"), each.get("accept-ra")) for each in json.loads(six.content)["ethernets"].values()]
    assert ipv6 == [(None, None), (True, True)]
    given = seed('[cloud_init]\nnetwork_config = "/network"\nmeta_data = "instance-id: x"\n[[network]]\n')
    assert given.network_config is not None
    assert (given.network_config.content, given.meta_data.content) == (b"version: 2\n", b"instance-id: x")


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ('user_data = "/gone"', "cloud_init.user_data: cannot read '/gone': No such file or directory"),
        (
            'user_data = "hostname: web"',
            "cloud_init.user_data: begins with 'hostname: web', which cloud-init would ignore; begin it",
        ),
        (
            'user_data = "# cloud-config\\n"',
            "cloud_init.user_data: begins with '# cloud-config', which cloud-init would ignore; its first",
        ),
        ('ssh_keys = ["/id"]', "cloud_init.ssh_keys[0]: '/id' has a private key, which must stay secret"),
        ('ssh_keys = ["ssh-rsa"]', "cloud_init.ssh_keys[0]: is 'ssh-rsa', which is no public key; one looks like"),
        ('ssh_keys = ["/user"]', "cloud_init.ssh_keys[0]: '/user' has 'echo hunter2', which is no public key"),
        (
            'ssh_keys = ["/network", "/gone"]',
            "cloud_init.ssh_keys[0]: '/network' has 'version: 2', which is no public key",
        ),
        (
            f'ssh_keys = ["{KEY}"]\nmeta_data = "a: b"',
            "cloud_init.ssh_keys: contradicts cloud_init.meta_data, which must contain it",
        ),
        ('hostname = "a_b"', 'cloud_init.hostname: found the string "a_b"; it takes a host name'),
        (f'hostname = "{"a" * 64}"', 'cloud_init.hostname: found the string "aaa'),
        ('hostname = "a..b"', 'cloud_init.hostname: found the string "a..b"; it takes a host name'),
        ('user_data = ""', 'cloud_init.user_data: found the string ""'),
        ("ssh_keys = [1]", "cloud_init.ssh_keys: found the integer 1"),
    ],
)
def test_an_invalid_table_is_refused(table: str, expected: str) -> None:
    assert problems(f"{KERNEL}[cloud_init]\n{table}\n", READ)[0][: len(expected)] == expected


USER_DATA = KERNEL + '[cloud_init]\nuser_data = "/a"\n'


def having(content: bytes) -> HostFacts:
    return attrs.evolve(READ, documents={PurePosixPath("/a"): DocumentFact(content)})


@pytest.mark.parametrize("name", HANDLED)
def test_user_data_that_cloud_init_handles_is_accepted(name: str) -> None:
    assert not any("user-data" in str(remark) for remark in plan_of(USER_DATA, having(HANDLED[name])).remarks)


@pytest.mark.parametrize(
    ("content", "refused"),
    [
        (b"x" + b" " * (1 << 20), True),
        (VERSION + b"".join(MULTIPART % (number, number) for number in range(2000)), False),
        (gzip.compress(VERSION + b"".join(MULTIPART % (n, n) for n in range(300)) + b"x\n" * (4 << 20)), False),
        (VERSION + b'Content-Type: multipart/mixed; "' + b";" * (250 << 10) + b"\n\nx\n", False),
    ],
    ids=["spaces", "parts in parts", "many lines in parts in parts", "semicolons in quotation marks"],
)
def test_user_data_of_any_form_is_judged_in_seconds(content: bytes, *, refused: bool) -> None:
    begun, found = time.process_time(), Problems()
    check_user_data(content, found)
    assert (bool(found.found), time.process_time() - begun < 10) == (refused, True)


def test_user_data_of_comments_alone_is_refused_in_little_memory() -> None:
    content, found = gzip.compress(b"#\n" * (8 << 20)), Problems()
    tracemalloc.start()
    check_user_data(content, found)
    assert tracemalloc.get_traced_memory()[1] < 128 << 20
    tracemalloc.stop()
    assert found.found


@pytest.mark.parametrize("boundary", [b"boundary*" + b"9" * 5000 + b"=a", b"boundary*=x\0'x'%ff"])
def test_user_data_that_pythons_parser_fails_for_may_be_handled(boundary: bytes) -> None:
    assert handled(VERSION + b"Content-Type: multipart/mixed; " + boundary + b"\n\n--a\n\nx\n--a--\n")


@pytest.mark.parametrize("name", IGNORED)
def test_user_data_that_cloud_init_ignores_is_refused(name: str) -> None:
    [found] = problems(USER_DATA, having(IGNORED[name]))
    assert found.startswith("cloud_init.user_data: begins with ")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("a byte order mark", "save it as UTF-8 without a byte order mark"),
        ("two bytes a letter", "save it as UTF-8 without a byte order mark"),
        ("base64", "it is base64, as a Secret"),
        ("base64 of gzip", "it is base64, as a Secret"),
        ("another packer", "it is packed by bzip2; cloud-init unpacks gzip alone"),
        ("JSON of another program", "Ignition, of Fedora CoreOS and Flatcar, reads no such seed"),
        ("Butane", "Ignition, of Fedora CoreOS and Flatcar, reads no such seed"),
        ("a network's configuration", "a configuration of the network is for cloud_init.network_config"),
        ("a space in the header", "its first line must be '#cloud-config'"),
        ("a comment before the header", "the line '#cloud-config' or '#!…' must be its first"),
        ("the marker of a YAML document", "the line '#cloud-config' or '#!…' must be its first"),
        ("YAML without the header", "begin it with '#cloud-config' or '#!/bin/sh'"),
    ],
)
def test_user_data_that_is_ignored_has_the_remedy_of_its_cause(name: str, remedy: str) -> None:
    [found] = problems(USER_DATA, having(IGNORED[name]))
    assert f"which cloud-init would ignore; {remedy}" in found


@pytest.mark.parametrize("name", OTHER_READERS)
def test_user_data_of_another_reader_is_remarked(name: str) -> None:
    """The seed is read by cloudbase-init in Windows as well."""
    reader = "Talos" if name.startswith("Talos") else "cloudbase-init (Windows)"
    remarks = list(map(str, plan_of(USER_DATA, having(OTHER_READERS[name])).remarks))
    assert any("ignores the user-data" in remark and f"which {reader} takes" in remark for remark in remarks)


def test_user_data_is_never_printed() -> None:
    plan = plan_of(f'{KERNEL}[cloud_init]\nuser_data = "/user"\n', READ)
    shown = "\n".join(plan_lines(plan)) + json.dumps(plan_json(plan)) + repr(plan) + repr(READ)
    assert "hunter2" not in shown
    assert "user-data of 23 bytes" in shown
    assert fitting("plan", plan_json(plan))["machine"]["seed"]["user_data"] == "23 bytes, not shown"


def read_back(image: Path) -> dict[str, bytes]:
    """Return the files of *image* by their Rock Ridge names, as isoinfo reads them."""
    listed = subprocess.run(["isoinfo", "-R", "-f", "-i", image], check=True, stdout=subprocess.PIPE, text=True).stdout
    return {
        name.removeprefix("/"): subprocess.run(
            ["isoinfo", "-R", "-x", name, "-i", image], check=True, stdout=subprocess.PIPE
        ).stdout
        for name in listed.splitlines()
    }


def test_the_script_to_paste_makes_the_same_seed(tmp_path: Path) -> None:
    facts = attrs.evolve(READ, state_directory=PurePosixPath(tmp_path))
    plan = plan_of(f'{KERNEL}[cloud_init]\nuser_data = "/user"\n', facts)
    found = plan.machine.seed
    assert found is not None
    script = pasteable(plan, seed_image(found)).partition("/usr/bin/qemu")[0]
    subprocess.run(["sh", "-e"], input=script, text=True, check=True)
    expected = {"user-data": found.user_data.content, "meta-data": found.meta_data.content}
    assert read_back(tmp_path / "seed.iso") == expected


@pytest.mark.parametrize(("seconds", "year"), [(-2_300_000_000, 1897), (5_900_000_000, 2156)])
def test_a_clock_that_no_cd_can_have_is_refused(monkeypatch: pytest.MonkeyPatch, seconds: int, year: int) -> None:
    monkeypatch.setattr(time, "localtime", partial(time.gmtime, seconds))
    with pytest.raises(
        HostError, match=f"the clock says that it is the year {year}, .*1900 to 2155; set the host's clock"
    ):
        seed_image(SeedPlan("", Secret(b""), Secret(b""), None))


def test_the_image_is_a_cd_with_that_label(tmp_path: Path) -> None:
    """A kernel reads its files in tests/machine/test_cloud_init.py."""
    documents = {"user-data": b"x" * LARGEST_DOCUMENT, "meta-data": b"", "network-config": b"y"}
    secrets = {name: Secret(content) for name, content in documents.items()}
    path = tmp_path / "seed"
    path.write_bytes(seed_image(SeedPlan("", secrets["user-data"], secrets["meta-data"], secrets["network-config"])))
    assert path.stat().st_size % 512 == 0, "QEMU's block size"
    assert read_back(path) == documents
    joliet = subprocess.run(["isoinfo", "-J", "-f", "-i", path], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert {*joliet.splitlines()} == {f"/{name}" for name in documents}
    blkid = shutil.which("blkid", path="/usr/sbin:/sbin:/usr/bin:/bin")
    assert blkid is not None
    probed = subprocess.run([blkid, "-p", "-o", "export", path], check=True, capture_output=True, text=True).stdout
    assert {"LABEL=CIDATA", "TYPE=iso9660", "VERSION=Joliet\\ Extension"} <= set(probed.splitlines())


def test_a_long_message_is_judged_if_that_takes_no_time() -> None:
    message = b"MIME-Version: 1.0\nContent-Type: text/plain\n\n" + b"hello\n" * 3000
    assert not handled(message)
    assert handled(message.replace(b"text/plain", b"text/cloud-config"))
    assert handled(message + b"boundary\n" * 1000), "it may"
