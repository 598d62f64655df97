"""What the plan says of user-data, compared with the cloud-init of the emulated node."""

from __future__ import annotations

import base64
import json
import subprocess

import pytest

from runner.plan.cloud_init import handled
from tests.support.user_data import HANDLED, IGNORED, OTHER_READERS

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


def test_cloud_init_handles_what_the_plan_accepts() -> None:
    python = "/usr/bin/python3"
    if subprocess.run([python, "-c", "import cloudinit.user_data"], check=False, capture_output=True).returncode:
        pytest.skip("cloud-init is missing; the emulated node has it")
    given = {**HANDLED, **IGNORED, **OTHER_READERS}
    text = json.dumps({name: base64.b64encode(data).decode() for name, data in given.items()})
    judged = subprocess.run([python, "-c", JUDGE], input=text, capture_output=True, text=True, check=True).stdout
    assert json.loads(judged) == {name: handled(data) for name, data in given.items()}
