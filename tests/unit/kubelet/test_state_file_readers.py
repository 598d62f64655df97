"""The controller, ``plan --state``, ``check`` and ``inspect`` read one file alike.

The files in ``tests/data/kubelet_state`` are of a node with CPUs 0-7.
"""

from __future__ import annotations

import shutil
from pathlib import Path, PurePosixPath

import pytest
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import SpecError
from runner.check import checker
from runner.check.checks import CheckedHost
from runner.cli import plan_node
from runner.controller.tree.cpu_source import CpuSource
from runner.controller.tree.loop import Intervals
from runner.facts.roots import Roots
from runner.inspect import observe
from runner.inspect.observation import KubeletObservation, Unknown
from runner.kernel.cgroup import Cgroup
from runner.kernel.kubelet_files import Frozen
from runner.kubelet.state import CpuState
from runner.kubelet.state_files import KubeletFiles
from tests.support.fake_cgroupfs import fake_sysfs
from tests.support.fake_claims import FakeClaim, put_claims
from tests.support.fake_pod_resources import FakePodResources, serving

FILES = Path(__file__).parents[2] / "data/kubelet_state"
A, B = "3ceda12c-3ee9-40fa-9f42-61428fe654a6", "416de7c2-21de-472d-817c-fa9d4306cb7d"
POOL = "0-1,5-7"


@pytest.fixture
def kubelet(tmp_path: Path) -> KubeletFiles:
    """Return an empty kubelet directory next to a sysfs and a controller's tree; float has every CPU."""
    fake_sysfs(tmp_path / "sys", cpus="0-7")
    (tmp_path / "stelia/float").mkdir(parents=True)
    (tmp_path / "stelia/float/cpuset.cpus.effective").write_text("0-7\n")
    (tmp_path / "kubelet").mkdir()
    (tmp_path / "var/run").mkdir(parents=True)
    return KubeletFiles(tmp_path / "kubelet", tmp_path / "var/run/cdi")


async def by_controller(kubelet: KubeletFiles) -> CpuState | Frozen:
    root = kubelet.directory.parent
    intervals = Intervals()
    source = CpuSource(kubelet, root / "sys", CpuSet())
    return await source.settle(pause=intervals.pause, readings=intervals.readings)


async def by_check(kubelet: KubeletFiles) -> CpuState | Frozen | None:
    root = kubelet.directory.parent
    host = CheckedHost(root, kubelet.directory, PurePosixPath("/none"), PurePosixPath("/none"), {})
    return await checker._kubelet(host)


async def by_inspect(kubelet: KubeletFiles) -> KubeletObservation | Unknown:
    root = kubelet.directory.parent
    roots = Roots(sys=root / "sys")
    return await observe._kubelet(roots, Cgroup(root / "stelia"), kubelet)


def by_plan(kubelet: KubeletFiles) -> CpuState | None:
    return plan_node._states([str(kubelet.directory)]).cpu


@pytest.mark.parametrize(
    ("name", "pool", "assigned", "unattributed"),
    [
        ("cpu_v1", POOL, {}, "2-4"),
        ("cpu_v2", POOL, {A: "2-4"}, ""),
        ("cpu_v2_bad_checksum", POOL, {A: "2-4"}, ""),
        ("cpu_v2_ended_pod", "0-1,6-7", {A: "2-4", B: "5"}, ""),
        ("cpu_v3_pod", "0-1,6-7", {A: "2-4", B: "5"}, ""),
        ("cpu_v4", POOL, {A: "2-4"}, ""),
        ("cpu_v4_stale_copy", POOL, {A: "2-4"}, ""),
        ("cpu_none", "0-7", {}, ""),
    ],
)
async def test_all_read_the_same_state(
    name: str,
    pool: str,
    assigned: dict[str, str],
    unattributed: str,
    kubelet: KubeletFiles,
    autojump_clock: object,  # noqa: ARG001  # its presence is its effect
) -> None:
    shutil.copy(FILES / name, kubelet.cpu_state)
    state = await by_controller(kubelet)
    assert state == await by_check(kubelet)
    assert isinstance(state, CpuState)
    planned = by_plan(kubelet)
    assert planned == (state if state.policy == "static" else CpuState("none", CpuSet())), "it knows no claims"
    assert (str(state.shared_pool), str(state.unattributed)) == (pool, unattributed)
    assert {uid: str(cpus) for uid, cpus in state.assigned().items()} == assigned
    seen = await by_inspect(kubelet)
    assert isinstance(seen, KubeletObservation)
    if state.policy == "none":
        assert (str(seen.shared_pool), seen.given) == ("0-7", None)
    else:
        assert (seen.shared_pool, seen.given) == (state.shared_pool, state.assigned())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "it is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ('{"policyName":"static","entries":{"a":7}}', "entries.a: must be an object, found 7"),
        ('{"data":"{}"}', "data.policyName: must be 'static' or 'none', found None"),
    ],
)
async def test_all_refuse_the_same_text_with_the_same_reason(
    text: str,
    reason: str,
    kubelet: KubeletFiles,
    autojump_clock: object,  # noqa: ARG001  # its presence is its effect
) -> None:
    kubelet.cpu_state.write_text(text)
    sentence = f"cannot use {kubelet.cpu_state}: {reason}"
    assert await by_controller(kubelet) == await by_check(kubelet) == Frozen(sentence)
    assert await by_inspect(kubelet) == Unknown(sentence)
    with pytest.raises(SpecError) as caught:
        by_plan(kubelet)
    assert str(caught.value) == f"{kubelet.cpu_state}: {reason}"


async def test_the_controller_refuses_two_owners_of_a_cpu(kubelet: KubeletFiles, autojump_clock: object) -> None:  # noqa: ARG001  # its presence is its effect
    """``plan`` leaves this to the kubelet's own validation of a state that it restores."""
    shutil.copy(FILES / "cpu_v4_two_owners", kubelet.cpu_state)
    frozen = Frozen(f"cannot use {kubelet.cpu_state}: CPUs 2 of {A} are also in the shared pool or another pod's")
    assert await by_controller(kubelet) == await by_check(kubelet) == frozen
    assert await by_inspect(kubelet) == Unknown(frozen.reason)


async def test_all_read_the_same_resource_claims(kubelet: KubeletFiles) -> None:
    """The controller asks the kubelet which container has them; the others, which decide nothing, read the files alone."""
    shutil.copy(FILES / "cpu_none", kubelet.cpu_state)
    claims = (FakeClaim("a0", "2-3", A), FakeClaim("b0", "6", B))
    put_claims(kubelet.directory, kubelet.cdi, claims)
    api = FakePodResources(containers=[claim.container(f"default/{claim.uid}") for claim in claims])
    async with serving(kubelet.pod_resources, api):
        state = await by_controller(kubelet)
    looked = await by_check(kubelet)
    assert isinstance(state, CpuState)
    assert isinstance(looked, CpuState)
    assigned = {A: CpuSet([2, 3]), B: CpuSet([6])}
    assert (str(state.shared_pool), state.assigned()) == ("0-1,4-5,7", assigned)
    assert (looked.shared_pool, looked.assigned()) == (state.shared_pool, assigned)
    seen = await by_inspect(kubelet)
    assert isinstance(seen, KubeletObservation)
    assert (seen.shared_pool, seen.given, seen.by_claims) == (state.shared_pool, assigned, True)


async def test_inspect_waits_for_its_first_reading(
    kubelet: KubeletFiles,
    autojump_clock: object,  # noqa: ARG001  # its presence is its effect
) -> None:
    """On an overloaded node it takes longer than a controller that follows the kubelet may; without it nothing is known."""
    shutil.copy(FILES / "cpu_none", kubelet.cpu_state)

    async def read_slowly() -> KubeletObservation | Unknown:
        await trio.sleep(10 * observe.FOLLOWS_WITHIN)
        return await by_inspect(kubelet)

    assert isinstance(await observe.followed(read_slowly), KubeletObservation)


@pytest.mark.parametrize(("float_cpus", "waits"), [("4-7", False), ("4-5", False), ("2-5", True)])
async def test_inspect_waits_for_a_controller_that_has_not_followed_yet_and_for_no_other(
    float_cpus: str,
    waits: bool,  # noqa: FBT001  # a column of the table
    autojump_clock: object,  # noqa: ARG001  # its presence is its effect
) -> None:
    """Under resource claims float may lack reserved CPUs for good, because no file names them."""
    pool, online, given = CpuSet.parse("4-7"), CpuSet.parse("0-7"), {A: CpuSet.parse("0-3")}
    found = KubeletObservation((CpuSet.parse(float_cpus),), pool, online, {}, given, by_claims=True)

    async def read() -> KubeletObservation:
        await trio.lowlevel.checkpoint()
        return found

    begun = trio.current_time()
    assert await observe.followed(read) == found
    assert (trio.current_time() - begun >= observe.FOLLOWS_WITHIN) == waits
