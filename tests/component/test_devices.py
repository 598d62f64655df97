"""Fake PCI devices and a fake QEMU: passed descriptors, temporary access to nodes, and devices that are not released."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

import attrs
import pytest
import trio

from runner.base.errors import PlacementError, SpecError, Status
from runner.facts.roots import Roots
from runner.host.facts_reader import read_host_facts
from runner.instance.parts.passthrough import devices_returned
from runner.instance.supervisor import Supervisor
from runner.kernel.child_processes import open_processes
from runner.plan.instance import plan_instance
from runner.plan.passthrough_plan import VfioBackend
from runner.spec.instance import parse_instance
from tests.support.fake_host import FakeHost
from tests.support.fake_pci import with_devices


def put_driver(path: Path, driver: str) -> None:
    (path / "driver").unlink()
    target = path.parents[1] / "drivers" / driver
    target.mkdir()
    (path / "driver").symlink_to(target)


async def test_qemu_gets_descriptors_and_temporary_access_to_nodes(fake_host: FakeHost) -> None:
    lent = fake_host.root / "dev/vfio/50"
    plan = with_devices(
        fake_host.plan(qemu={"records_owners_of": [str(lent)], "at_cont": "shutdown"}),
        fake_host.root,
        "legacy",
        "iommufd",
    )
    [legacy, by_iommufd] = plan.machine.passthrough.devices
    assert str(legacy.group_node) == str(lent)
    assert (await fake_host.run(plan)).status is Status.GUEST_SHUTDOWN
    [start] = fake_host.records("qemu", "start")
    assert {str(by_iommufd.device_node), str(fake_host.root / "dev/iommu")} <= set(start["held"])
    assert not {str(legacy.group_node), str(by_iommufd.group_node)} & set(start["held"])
    assert f"vfio-pci,id=device0,bus=port0,host={legacy.address},rombar=0" in start["argv"]
    assert start["owners"] == [65534]
    assert lent.stat().st_uid == 0
    assert fake_host.faults.sentences == []


async def test_devices_of_a_claim_are_found_by_the_files_in_the_container(tmp_path: Path) -> None:
    """The recorded files; of this machine everything else is real, and it does not have those devices."""
    roots = attrs.evolve(Roots(), claims=Path(__file__).parents[1] / "data" / "claims")
    text = '[boot]\nkernel = "/k"\n[[device]]\nclaim = "gpus"\nrequest = "gpu"\n[[device]]\nclaim = "others"\n'
    spec = parse_instance("spec.toml", text.encode())
    async with open_processes() as processes:
        facts = await read_host_facts(spec, processes, roots, PurePosixPath(tmp_path / "state"), None)
    with pytest.raises(SpecError) as caught:
        plan_instance("spec.toml", spec, facts)
    found = [str(problem) for problem in caught.value.problems if problem.path.startswith("device")]
    assert [each.split(";")[0] for each in found] == [
        "device[1].claim: the container has no file about the devices of a claim 'others'",
        *(f"device[0]: there is no PCI device {each} here" for each in ("0000:1b:00.0", "0000:9d:00.0")),
    ]


async def test_each_device_that_is_not_released_is_a_fault(fake_host: FakeHost) -> None:
    six: list[VfioBackend] = ["iommufd"] * 6
    plan = with_devices(fake_host.plan(), fake_host.root, *six, devices_back=8)
    paths = [Path(device.sysfs) for device in plan.machine.passthrough.devices]

    async def break_them(_host: Supervisor) -> None:
        while not fake_host.guest_runs():
            await trio.sleep(0.01)
        put_driver(paths[0], "nouveau")
        (paths[1] / "config").write_bytes(b"\xff" * 64)
        paths[2].rename(fake_host.root / "gone")
        Path(str(plan.machine.passthrough.devices[3].group_node)).unlink()
        (paths[4] / "current_link_width").write_text("0\n")
        (paths[4] / "reset").mkdir()
        (paths[5] / "config").write_bytes(b"\xff" * 64)
        (paths[5] / "reset_method").write_text("\n")
        fake_host.stop.ask("the test is over")

    assert (await fake_host.run(plan, meanwhile=break_them)).status is Status.STOPPED
    assert (paths[1] / "reset").read_text() == "1\n"
    assert not (paths[5] / "reset").exists()
    dead = "it is wedged: it does not answer: its configuration space reads as nothing but ones"
    remedy = "switch the machine off and on: until then it is refused to every instance"
    node = plan.machine.passthrough.devices[3].group_node
    reasons = (
        "it is bound to 'nouveau' now, not to 'vfio-pci'",
        f"{dead}, also after its reset (flr bus); {remedy}",
        "it has gone from the bus",
        f"{node}: No such file or directory",
        f"it is wedged: its PCI Express link is down, and its reset (flr bus) did not work: *{paths[4]}/reset: Is a directory; {remedy}",
        f"{dead}, and has no reset of its own; {remedy}",
    )
    for device, reason, found in zip(
        plan.machine.passthrough.devices, reasons, fake_host.faults.sentences, strict=True
    ):
        assert fnmatchcase(found, f"could not get the device {device.address} back: {reason}"), found


async def test_a_node_that_cannot_be_tried_as_there_is_no_way_back_to_float_is_a_fault(fake_host: FakeHost) -> None:
    plan = with_devices(fake_host.plan(), fake_host.root, "iommufd", devices_back=0)
    [device] = plan.machine.passthrough.devices

    @contextmanager
    def without_a_way_back() -> Iterator[None]:
        yield
        raise PlacementError("cannot return to float")

    async def take_back(supervisor: Supervisor) -> None:
        async with devices_returned(supervisor, plan, without_a_way_back):
            pass
        fake_host.stop.ask("the test is over")

    await fake_host.run(plan, meanwhile=take_back)
    assert fake_host.faults.sentences == [f"could not get the device {device.address} back: cannot return to float"]


async def test_a_device_that_is_released_late_is_waited_for(fake_host: FakeHost) -> None:
    plan = with_devices(fake_host.plan(), fake_host.root, "iommufd", devices_back=60)
    [path] = [Path(device.sysfs) for device in plan.machine.passthrough.devices]

    async def reset(_host: Supervisor) -> None:
        while not fake_host.guest_runs():
            await trio.sleep(0.01)
        (path / "config").write_bytes(b"\xff" * 64)
        fake_host.stop.ask("the test is over")
        while "quit" not in fake_host.commands():
            await trio.sleep(0.01)
        await trio.sleep(0.5)  # the kernel resets it, and meanwhile it does not answer
        (path / "config").write_bytes(bytes(64))

    assert (await fake_host.run(plan, meanwhile=reset)).status is Status.STOPPED
    assert fake_host.faults.sentences == []


async def test_a_device_that_the_kernels_own_reset_has_not_brought_back_is_reset_once_more(fake_host: FakeHost) -> None:
    plan = with_devices(fake_host.plan(), fake_host.root, "iommufd", devices_back=60)
    [path] = [Path(device.sysfs) for device in plan.machine.passthrough.devices]
    os.mkfifo(path / "reset")
    resets = []

    def reset() -> None:
        resets.append((path / "reset").read_text())
        (path / "config").write_bytes(bytes(64))

    async def wedge(_host: Supervisor) -> None:
        while not fake_host.guest_runs():
            await trio.sleep(0.01)
        (path / "config").write_bytes(b"\xff" * 64)
        fake_host.stop.ask("the test is over")
        await trio.to_thread.run_sync(reset)

    assert (await fake_host.run(plan, meanwhile=wedge)).status is Status.STOPPED
    assert resets == ["1\n"]
    assert fake_host.faults.sentences == []


LIMITED = """
import resource
from runner.kernel.limits import lockable, read_lockable
limit = lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 20))
assert read_lockable(()) == 1 << 20
assert read_lockable((24,)) is None
with lockable(1 << 19):
    assert limit() == (1 << 20, 1 << 20), "as far as the hard limit allows"
with lockable(1 << 12):
    assert limit() == (1 << 16, 1 << 20), "a sufficient limit is kept"
assert limit() == (1 << 16, 1 << 20)
"""


def test_the_limit_of_locked_memory_is_raised_for_a_while() -> None:
    """The test runs in its own process, because a lowered hard limit cannot be raised again."""
    subprocess.run([sys.executable, "-c", LIMITED], check=True, cwd=Path(__file__).parents[2])
