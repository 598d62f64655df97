"""What a runner of each format has held, as it was recorded: this program reads it, asks for all of it, and writes the same.

``RECORD=1 pytest tests/component/test_recorded_states.py`` records the format of today, which is done once for each format: with
every part of an instance, a disk that was attached, and a QEMU that has taken another one's place. What differs with the
placement is recorded of each, with cgroups that are described and were not made.
"""

from __future__ import annotations

import json
import os
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from runner.base.cpuset import CpuSet
from runner.cli.instance_requests import ask_instance
from runner.instance.gate import StopRequest
from runner.instance.init import figures_shown
from runner.instance.parts.qemu import GuestEnd
from runner.instance.renewal.names import FORMAT, NAMES, OLDEST, name_of
from runner.instance.renewal.state_codec import to_document
from runner.instance.renewal.upgrade import _document, running_program, state_of
from runner.instance.supervisor import Faults, Supervisor, open_supervisor
from runner.kernel.cgroup_fds import CgroupFds
from runner.kernel.files import Descriptor
from runner.placement.backends import ControllerPlacement, DelegatedPlacement, Placement
from runner.placement.threads import CgroupPaths
from runner.plan.instance import InstancePlan
from tests.component.test_qemu_update import NEW, run
from tests.support.fake_host import FakeHost

RECORDED = Path(__file__).parents[1] / "data" / "renewal"
SPEC = """
[[network]]
[hotplug]
disks = 2
qemu = true
[display]
vnc = true
[guest]
agent = true
ready = "console:up"
"""
FILES = sorted(RECORDED.glob("*/*.json"))
_CPUS: Any = {"cpus": CpuSet([2, 3]), "pins": (2, 3)}
_PATHS = CgroupPaths("/pod", "/stelia/instance-a/float", "/stelia/instance-a/vcpus")
_CONTROLLER = ControllerPlacement(**_CPUS, socket=PurePosixPath("/run/controller.sock"), pod_uid="a")
_DELEGATED = DelegatedPlacement(**_CPUS, float_cpus=CpuSet([0, 1]), shared=False)


def other_placements() -> dict[str, dict[str, Any]]:
    """Return what is held with the other placements in place of the names ``mask`` and ``in float``, by the placement."""
    fds = CgroupFds(*map(Descriptor, range(80, 85)))
    return {
        "controller": {
            "placement": _CONTROLLER,
            "registration": (_PATHS, fds),
            "cgroups": _PATHS,
            "seal": "an old kernel",
        },
        "delegated": {
            "placement": _DELEGATED,
            "pod's cgroup": "/pod",
            "controllers": frozenset({"cpu"}),
            "cgroups made": None,
            "cgroup descriptors": fds,
            "cgroups": _PATHS,
        },
    }


def record(document: dict[str, Any]) -> None:
    """Write *document* as that of this format, once for each placement."""
    plain = {key: document[key] for key in ("format", "state")}
    for placement, held in {"affinity": {}, **other_placements()}.items():
        state = dict(plain["state"])
        if held:
            del state["mask"], state["in float"]
            state |= {name: to_document(each, NAMES[name].type, []) for name, each in held.items()}
        path = RECORDED / str(FORMAT) / f"{placement}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**plain, "state": state}, indent=1) + "\n")


async def test_the_nest_asks_for_what_was_recorded(fake_host: FakeHost) -> None:
    """A name that it does not ask for, or asks for without its being there, is no place to commit."""
    plan = fake_host.plan(SPEC + fake_host.share(), qemu=NEW)
    held: dict[str, Any] = {}
    (fake_host.root / "late.img").write_bytes(bytes(1 << 20))

    async def act(supervisor: Supervisor) -> None:
        await ask_instance(plan.state_directory, "qemu.update", {})
        disk = {"path": str(fake_host.root / "late.img"), "format": "raw"}
        await ask_instance(plan.state_directory, "disk.attach", disk)
        held.update(_document(supervisor, [running_program("")], "upgrade"))

    ended = await run(fake_host, plan, act)
    assert isinstance(ended, GuestEnd)
    if "RECORD" in os.environ:
        held["state"] |= {**OUTPUTS, "plan": to_document(plan, InstancePlan, [])}
        record(json.loads(json.dumps(held).replace(str(fake_host.root), "/instance")))
    asked = held["state"].keys() | OUTPUTS.keys() | {"plan"}
    for path in sorted(RECORDED.glob("*/affinity.json")):
        document = json.loads(path.read_text())
        recorded = document["state"].keys()
        assert recorded <= asked
        assert {name for name in asked - recorded if name_of(name).since <= document["format"]} == set()
        assert document["state"]["disks"][0]["plan"]["name"] == "disk0"
        assert document["state"]["QEMU's updates"] == 1


OUTPUTS: dict[str, Any] = {
    "log level": "info",
    "log format": "text",
    "termination log": 90,
    "stdout": "",
    "stderr": "",
    "console line": "",
    "http address": ["127.0.0.1", 9441],
    "pid1": True,
    "faults": [],
    "inherited descriptors": {"disk1": {"descriptor": 91, "declared": "file"}},
    "http": [92],
    "foreign time": {"threads": [[0, {"pid": 7, "tid": 8, "cpu": 2}]], "before": [[0, 5]], "highest": [[0, 6]]},
}
"""What is held outside of the nest, as documents."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_what_was_recorded_is_read_and_would_be_written_again(path: Path) -> None:
    document = json.loads(path.read_text())
    assert OLDEST <= document["format"] == int(path.parent.name) <= FORMAT
    found = state_of(document)
    assert isinstance(found["placement"], Placement)
    descriptors: list[int] = []
    again = {name: to_document(each, name_of(name).type, descriptors) for name, each in found.items()}
    assert json.loads(json.dumps(again)) == document["state"]
    assert len(descriptors) == len(set(descriptors)) > 10


def test_the_format_of_today_is_recorded_with_each_placement() -> None:
    assert [each.stem for each in FILES if each.parent.name == str(FORMAT)] == ["affinity", "controller", "delegated"]


async def test_who_shows_no_figures_holds_their_name_all_the_same(fake_host: FakeHost) -> None:
    """Another program of this format asks for it, or has held it: a name that only some know is the end of a renewal between them."""
    async with (
        open_supervisor(StopRequest(), Faults()) as supervisor,
        figures_shown(supervisor, fake_host.plan(SPEC), None),
    ):
        assert "foreign time" in _document(supervisor, [running_program("")], "upgrade")["state"]
