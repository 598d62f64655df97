"""Cancel a run at every step, and fail every acquisition; afterwards everything is as before.

The steps and system operations are counted, not sampled: every one of them is tried, of a run with everything and of one other.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import attrs
import pytest
import trio

from runner.base.errors import RunnerError, explain
from runner.host.facts_reader import read_disk_facts
from runner.instance.parts.qemu import GuestEnd
from runner.instance.supervisor import Faults
from runner.plan.disks import plan_disk
from runner.plan.instance import InstancePlan
from runner.plan.network_plan import PasstPlan
from runner.plan.problems import Problems
from runner.spec.instance import DiskSpec
from tests.support.fake_host import FakeHost, link_names
from tests.support.fake_pci import with_devices
from tests.support.soak import some
from tests.support.sweep import FAULT_INJECTOR, CancelAtStep

SPECS = {
    "bare": "",
    "with everything": "[memory]\nprealloc = true\n[[network]]\n[display]\nvnc = true\n[cloud_init]\n",
    "with devices": "",
}
DAEMONS = {"bare": set(), "with everything": {"dnsmasq", "passt", "virtiofsd"}, "with devices": {"virtiofsd"}}
"""The daemons that each run must have started; otherwise the test would not cover them."""
EACH = pytest.mark.parametrize("spec", ["with everything", *some(["bare", "with devices"], 1)])


def planned(fake_host: FakeHost, spec: str) -> InstancePlan:
    share = "" if spec == "bare" else fake_host.share()
    plan = fake_host.plan(SPECS[spec] + share, qemu={"at_cont": "shutdown"}, grace=1)
    if spec == "with devices":
        return with_devices(plan, fake_host.root, "legacy", "iommufd")
    if spec == "bare":
        return plan
    (fake_host.root / "disk").write_bytes(bytes(1 << 20))
    disk = DiskSpec(path=PurePosixPath(fake_host.root / "disk"), ephemeral=True, iothread=True)
    passt = PasstPlan("52:54:00:00:00:77", 65520, 1, fake_host.program("passt", "fake_daemon.py"))
    networks = (*plan.networks, passt)
    problems = Problems()
    disks = (plan_disk("disk0", disk, read_disk_facts(disk, PurePosixPath("/")), "disk[0]", problems),)
    assert problems.found == []
    machine = attrs.evolve(plan.machine, networks=networks, disks=disks)
    return attrs.evolve(plan, machine=machine)


async def cancelled_run(fake_host: FakeHost, plan: InstancePlan, n: int) -> int:
    """Run *plan* until it ends or is cancelled at step *n*, and return the number of its steps."""
    with trio.CancelScope() as scope:
        instrument = CancelAtStep(scope, n)
        trio.lowlevel.add_instrument(instrument)
        try:
            with trio.fail_after(60):
                await fake_host.run(plan)
        finally:
            trio.lowlevel.remove_instrument(instrument)
    return instrument.steps


@pytest.fixture
def fault_injector(fake_host: FakeHost) -> Iterator[None]:
    """End fault injection when a run is over; afterwards delete the links that a teardown with a fault left behind."""
    before = set(link_names())
    fake_host.when_over = FAULT_INJECTOR.end
    yield
    FAULT_INJECTOR.end()
    for name in set(link_names()) - before:
        subprocess.run(["ip", "link", "delete", name], check=True)


@pytest.mark.soak
@EACH
async def test_a_run_cancelled_at_any_step_leaves_nothing(fake_host: FakeHost, spec: str) -> None:
    plan = planned(fake_host, spec)
    before = fake_host.snapshot()
    steps = await cancelled_run(fake_host, plan, sys.maxsize)
    assert steps > 30
    daemons = {role for role in ("dnsmasq", "passt", "virtiofsd") if fake_host.records(role, "start")}
    assert daemons == DAEMONS[spec]
    n = 1
    while n <= steps:
        steps = max(steps, await cancelled_run(fake_host, plan, n))
        assert fake_host.snapshot() == before, f"cancelled at step {n} of {steps}"
        assert fake_host.faults.sentences == [], f"cancelled at step {n} of {steps}"
        n += 1


@pytest.mark.soak
@EACH
@pytest.mark.usefixtures("fault_injector")
async def test_a_failure_of_any_acquisition_leaves_nothing(fake_host: FakeHost, spec: str) -> None:
    """Every operation that fails before `cont` is a refused start with the reason, and the start is reversed."""
    plan = planned(fake_host, spec)
    before = fake_host.snapshot()
    await fake_host.run(plan)  # once without a fault, so that nothing is imported later
    refused = 0
    n = 1
    while True:
        fake_host.faults.sentences.clear()
        fake_host.log_file.unlink(missing_ok=True)
        FAULT_INJECTOR.begin(n)
        with trio.fail_after(60):
            result = await fake_host.run(plan)
        reached = FAULT_INJECTOR.count
        if isinstance(result, RunnerError):
            refused += 1
            assert "cont" not in fake_host.commands()
            assert os.strerror(errno.EMFILE) in explain(result), explain(result)
            assert fake_host.faults.sentences == [], f"operation {n}: {explain(result)}"
        else:
            assert isinstance(result, GuestEnd)
            if "cont" in fake_host.commands() and fake_host.faults.sentences:
                break  # from here on only the teardown fails
        assert fake_host.snapshot() == before, f"operation {n} failed: {result}"
        if reached < n:
            break
        n += 1
    assert refused > 30, f"{refused} of {n} operations"


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM])
@pytest.mark.usefixtures("fault_injector")
async def test_a_failure_of_any_fork_leaves_nothing(fake_host: FakeHost, number: int) -> None:
    """A fork fails with EAGAIN at the pod's pids.max."""
    plan = fake_host.plan(fake_host.share(), qemu={"at_cont": "shutdown"}, grace=1)
    before = fake_host.snapshot()
    for n, role in enumerate(("anchor", "anchor", "virtiofsd", "qemu"), 1):
        FAULT_INJECTOR.begin(n, number, frozenset({"subprocess.Popen"}))
        with trio.fail_after(60):
            result = await fake_host.run(plan)
        assert isinstance(result, RunnerError)
        assert f"cannot start {role} (" in explain(result)
        assert os.strerror(number) in explain(result)
        assert fake_host.faults.sentences == []
        assert fake_host.snapshot() == before


class FaultyRelease(Faults):
    """Faults of a run in which release number *n* ends with a fault of this program, and not with one of the host's."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n
        self.released: list[str] = []

    @contextlib.contextmanager
    def recorded(self, what: str) -> Iterator[None]:
        with super().recorded(what):
            yield
        self.released.append(what)
        if len(self.released) == self.n:
            raise LookupError(what)


@pytest.mark.parametrize("spec", SPECS)
async def test_a_fault_of_this_program_in_any_release_leaves_nothing(fake_host: FakeHost, spec: str) -> None:
    """What is held is released all the same, in its order: everything, unless the fault was during the start."""
    plan = planned(fake_host, spec)
    before = fake_host.snapshot()
    faults = fake_host.faults = FaultyRelease(0)
    await fake_host.run(plan)
    releases = faults.released
    assert len(releases) >= 5
    for n, what in enumerate(releases, 1):
        fake_host.log_file.unlink()
        faults = fake_host.faults = FaultyRelease(n)
        with pytest.raises(BaseExceptionGroup) as caught:
            await fake_host.run(plan)
        assert caught.group_contains(LookupError, match=re.escape(what))
        assert [each for each in releases if each in faults.released] == faults.released
        if "cont" in fake_host.commands():  # a device is only looked at, after those before it
            skipped = [each for each in releases if each not in faults.released]
            assert [each for each in skipped if not each.startswith("get the device")] == []
        assert faults.sentences == []
        assert fake_host.snapshot() == before, what


async def test_a_run_with_too_few_descriptors_leaves_nothing(fake_host: FakeHost) -> None:
    """The kernel's own limit, not the fault injector: EMFILE at the first descriptor beyond it."""
    plan = fake_host.plan(fake_host.share(), qemu={"at_cont": "shutdown"}, grace=1)
    before = fake_host.snapshot()
    taken = {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}
    used = next(number for number in range(1 << 10) if number not in taken)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    outcomes = []
    try:
        for limit in range(used, used + 40):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            try:
                result: GuestEnd | RunnerError | BaseExceptionGroup[BaseException] = await fake_host.run(plan)
            except BaseExceptionGroup as group:  # trio itself could not get a descriptor
                result = group
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert fake_host.snapshot() == before, f"limit {limit}"
            outcomes.append(result)
            if isinstance(result, GuestEnd):
                break
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert isinstance(outcomes[-1], GuestEnd)
    assert sum(isinstance(outcome, RunnerError) for outcome in outcomes) >= 5
