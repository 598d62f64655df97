"""What the plan says of user-data, compared with the cloud-init of the emulated node."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path

import pytest

from runner.cli.plan_document_only import yaml_problems
from runner.plan.cloud_init import handled
from tests.support.plans import KERNEL, plan_of
from tests.support.user_data import HANDLED, IGNORED, OTHER_READERS, YAML_NOT_READ, YAML_READ

JUDGE = """
import base64, json, logging, sys
from cloudinit import helpers, user_data
logging.disable(logging.CRITICAL)
found = {}
for name, data in json.load(sys.stdin).items():
    processor = user_data.UserDataProcessor(helpers.Paths({"cloud_dir": "/nowhere", "run_dir": "/nowhere"}))
    parts = processor.process(base64.b64decode(data)).walk()
    kinds = [part.get_content_type() for part in parts if not part.is_multipart()]
    found[name] = not {"text/plain", "text/x-not-multipart"}.issuperset(kinds)
json.dump(found, sys.stdout)
"""
"""A program for the Python that has cloud-init's package: user-data by name → whether some of it is handled."""


READ = """
import base64, json, logging, sys
from cloudinit import util
logging.disable(logging.CRITICAL)
found = {}
for name, data in json.load(sys.stdin).items():
    content = base64.b64decode(data)
    kind = list if b"archive" in content else dict
    try:
        found[name] = util.load_yaml(content, default=False, allowed=(kind,)) is not False
    except UnicodeDecodeError:
        found[name] = False
json.dump(found, sys.stdout)
"""
"""The same for user-data in YAML: whether it can be read."""

PYTHON = "/usr/bin/python3"
CONVERT = """
import runpy, sys
sys.modules["netplan"] = None
for renderer in sys.argv[1:]:
    sys.argv = ["net-convert", "-p", "given", "-k", "yaml", "-D", "debian", "-O", renderer, "-d", renderer]
    runpy.run_module("cloudinit.cmd.devel.net_convert", run_name="__main__")
"""
"""Writes for each renderer, into a directory of its name, what cloud-init would. With netplan's own package, newer versions write into
the machine's /etc."""
RENDERERS = {
    "netplan": "dhcp6: true",
    "networkd": "DHCP=yes",
    "eni": "inet6 dhcp",
    "network-manager": "[ipv6]\nmethod=auto",
}
"""Renderer of cloud-init → what it writes for an interface that asks for IPv6 addresses, too."""


@pytest.fixture(autouse=True)
def needs_cloud_init() -> None:
    if subprocess.run([PYTHON, "-c", "import cloudinit.user_data"], check=False, capture_output=True).returncode:
        pytest.skip("cloud-init is missing; the emulated node has it")


@pytest.mark.parametrize("ipv6", [pytest.param(False, marks=pytest.mark.node_only), True])
def test_the_networks_ask_for_the_addresses_that_they_have(tmp_path: Path, *, ipv6: bool) -> None:
    """One process for all renderers: most of its time it imports cloud-init."""
    seed = plan_of(f"{KERNEL}[cloud_init]\n[[network]]\n" + "ipv6 = true\n" * ipv6).machine.seed
    assert seed is not None
    assert seed.network_config is not None
    (tmp_path / "given").write_bytes(seed.network_config.content)
    subprocess.run([PYTHON, "-c", CONVERT, *RENDERERS], check=True, capture_output=True, cwd=tmp_path)
    for renderer, asks in RENDERERS.items():
        made = "".join(path.read_text() for path in (tmp_path / renderer).rglob("*") if path.is_file())
        assert "52:54:00" in made, renderer
        assert (asks in made) is ipv6, made


def test_cloud_init_handles_what_the_plan_accepts() -> None:
    given = {**HANDLED, **IGNORED, **OTHER_READERS}
    assert judged(JUDGE, given) == {name: handled(data) for name, data in given.items()}


def test_cloud_init_reads_the_yaml_that_the_plan_accepts() -> None:
    given = {**YAML_READ, **YAML_NOT_READ}
    assert judged(READ, given) == {name: not [*yaml_problems({"user_data": data})] for name, data in given.items()}


def judged(program: str, given: dict[str, bytes]) -> object:
    """Return what *program* says of user-data by name."""
    text = json.dumps({name: base64.b64encode(data).decode() for name, data in given.items()})
    return json.loads(
        subprocess.run([PYTHON, "-c", program], input=text, capture_output=True, text=True, check=True).stdout
    )
