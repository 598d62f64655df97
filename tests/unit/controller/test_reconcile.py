"""Every small case: three CPUs, two pods, and every tree and kubelet state that they can form."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.controller.tree.limits import Limits
from runner.controller.tree.reconcile import (
    ISOLATED,
    MEMBER,
    ROOT,
    Action,
    Desired,
    Evict,
    Group,
    Make,
    Observed,
    PodGroup,
    Remove,
    Restrict,
    Seal,
    Unseal,
    Write,
    desire,
    desire_without_kubelet,
    evictions,
    holders,
    is_resized,
    reconcile,
    silent_fallbacks,
    stale,
    withheld,
)
from runner.facts.hardware import OnlineCpus
from runner.kubelet.pod_cgroups import FLOAT, float_uid, instance_group, instance_uid
from runner.kubelet.state import CpuState

AnyGroup = TypeVar("AnyGroup", Group, PodGroup)

ALL, NONE = CpuSet([0, 1, 2]), CpuSet()
MEMS = CpuSet([0, 1])
SETS = [CpuSet(cpus) for size in range(4) for cpus in itertools.combinations(ALL, size)]
MACHINE = OnlineCpus(present=ALL, online=ALL, memory_nodes=MEMS)
CPUSET = frozenset({"cpuset"})
LIMITS = Limits(memory_max=64 << 20, memory_high=60 << 20, pids_max=100, pod_pids_max=10, pod_cpu_weight=7)
BUILT = Observed(CPUSET, CPUSET, exists=True, enabled=CPUSET, cpus=ALL, mems=MEMS)
"""Of a kernel with cpuset alone; the limits have tests of their own."""


def threaded(cpus: CpuSet, *, populated: bool = False, mems: CpuSet = MEMS) -> Group:
    return Group("threaded", cpus, mems, cpus or ALL, populated)


HALF_BUILT = Group("domain invalid", NONE, NONE, ALL, populated=False)


def perform(observed: Observed, action: Action) -> Observed:
    """Do to *observed* what the kernel would do to the tree."""
    if isinstance(action, Seal | Unseal):
        return perform_on_partition(observed, action)
    if isinstance(action, Restrict) and (action.group, action.file) == (ROOT, "cpuset.cpus.exclusive"):
        return attrs.evolve(observed, exclusive=CpuSet.parse(action.value))
    if action.group in ("", ".."):
        return perform_on_root(observed, action)
    if float_uid(action.group) is not None or isinstance(action, Evict):
        return perform_in_float(observed, action)
    return perform_on_group(observed, action)


def perform_on_group(observed: Observed, action: Action) -> Observed:
    groups = dict(observed.groups)
    match action:
        case Make(name):
            groups[name] = HALF_BUILT
        case Remove(name):
            assert not groups[name].populated
            assert not groups[name].was_sealed, "its CPUs would come back some time later"
            del groups[name]
        case Write(name, "cgroup.type", "threaded"):
            groups[name] = attrs.evolve(groups[name], kind="threaded")
        case Write(name, "cpuset.cpus", value):
            cpus = CpuSet.parse(value)
            assert cpus, "no cgroup of the controller is left without CPUs"
            in_effect = groups[name].exclusive if groups[name].partition == ISOLATED else cpus
            groups[name] = attrs.evolve(groups[name], cpus=cpus, effective=in_effect)
        case Write(name, "cpuset.cpus.exclusive", value):
            cpus = CpuSet.parse(value)
            assert groups[name].partition == ISOLATED
            assert NONE != cpus <= groups[name].exclusive, "more takes CAP_SYS_ADMIN, and none ends the partition"
            groups[name] = attrs.evolve(groups[name], exclusive=cpus, effective=cpus)
        case Write(name, "cpuset.mems", value):
            groups[name] = attrs.evolve(groups[name], mems=CpuSet.parse(value))
        case Restrict("float", "cgroup.subtree_control", word):
            return attrs.evolve(observed, float_enabled=switched(observed.float_enabled, word))
        case Restrict(name, "pids.max" | "cgroup.max.descendants" as file, value) if offers(observed.enabled, file):
            groups[name] = attrs.evolve(groups[name], limits={**groups[name].limits, file: value})
        case _:
            raise AssertionError(action)
    return attrs.evolve(observed, groups=groups)


def perform_on_partition(observed: Observed, action: Seal | Unseal) -> Observed:
    group = observed.groups[action.group]
    if isinstance(action, Unseal):
        group = attrs.evolve(group, partition=MEMBER, exclusive=NONE, effective=group.cpus)
        return attrs.evolve(observed, groups={**observed.groups, action.group: group})
    assert group.populated
    assert action.cpus == group.cpus
    assert action.cpus <= action.together
    others = [other.cpus for name, other in observed.groups.items() if name != action.group]
    assert all(action.cpus.isdisjoint(cpus) for cpus in others)
    assert group.partition != ISOLATED or group.exclusive <= action.cpus
    group = attrs.evolve(group, partition=ISOLATED, exclusive=action.cpus, effective=action.cpus)
    return attrs.evolve(observed, groups={**observed.groups, action.group: group}, exclusive=action.together)


def perform_in_float(observed: Observed, action: Action) -> Observed:
    groups, pods = dict(observed.groups), dict(observed.pods)
    uid = float_uid(action.group) or instance_uid(action.group)
    assert uid is not None
    match action:
        case Make():
            assert FLOAT in groups
            pods[uid] = PodGroup("domain invalid", populated=False)
        case Remove():
            assert not pods.pop(uid).populated
        case Write(_, "cgroup.type", "threaded"):
            pods[uid] = attrs.evolve(pods[uid], kind="threaded")
        case Restrict(_, file, value) if offers(observed.float_enabled, file):
            pods[uid] = attrs.evolve(pods[uid], limits={**pods[uid].limits, file: value})
        case Evict():
            assert pods[uid].kind == "threaded"
            pods[uid] = attrs.evolve(pods[uid], populated=True)
            groups[action.group] = attrs.evolve(groups[action.group], populated=False)
        case _:
            raise AssertionError(action)
    return attrs.evolve(observed, groups=groups, pods=pods)


def offers(controllers: frozenset[str], file: str) -> bool:
    """Tell whether the children of a group with *controllers* have *file*."""
    return file.partition(".")[0] in {"cgroup", *controllers}


def switched(enabled: frozenset[str], words: str) -> frozenset[str]:
    for word in words.split():
        enabled = enabled | {word[1:]} if word[0] == "+" else enabled - {word[1:]}
    return enabled


def perform_on_root(observed: Observed, action: Action) -> Observed:
    match action:
        case Make(""):
            return attrs.evolve(observed, exists=True)
        case Write("..", "cgroup.subtree_control", word) | Restrict("..", "cgroup.subtree_control", word):
            assert word[1:] in observed.offered
            return attrs.evolve(observed, delegated=switched(observed.delegated, word))
        case Write("", "cgroup.subtree_control", words) | Restrict("", "cgroup.subtree_control", words):
            return attrs.evolve(observed, enabled=switched(observed.enabled, words))
        case Restrict("", file, value) if file.partition(".")[0] in observed.delegated:
            return attrs.evolve(observed, limits={**observed.limits, file: value})
        case Write("", "cpuset.cpus", value):
            return attrs.evolve(observed, cpus=CpuSet.parse(value))
        case Write("", "cpuset.mems", value):
            return attrs.evolve(observed, mems=CpuSet.parse(value))
    raise AssertionError(action)


def run(observed: Observed, actions: Iterable[Action]) -> Observed:
    for action in actions:
        observed = perform(observed, action)
    return observed


def union(sets: Iterable[CpuSet]) -> CpuSet:
    return CpuSet(cpu for cpus in sets for cpu in cpus)


def overlaps(observed: Observed) -> set[tuple[str, str]]:
    return {
        (one, other)
        for one, other in itertools.combinations(sorted(observed.groups), 2)
        if not observed.groups[one].cpus.isdisjoint(observed.groups[other].cpus)
    }


def states() -> Iterator[Desired]:
    for owners in itertools.product("fab", repeat=3):
        cpus = {owner: CpuSet(cpu for cpu in ALL if owners[cpu] == owner) for owner in "fab"}
        if cpus["f"]:
            entries = {uid: {"vm": cpus[uid]} for uid in "ab" if cpus[uid]}
            yield desire(CpuState("static", cpus["f"], entries), MACHINE, LIMITS)


def trees() -> Iterator[Observed]:
    floats = [None, HALF_BUILT, *map(threaded, SETS)]
    instances = [
        None,
        HALF_BUILT,
        *(threaded(cpus, populated=populated) for cpus in SETS for populated in (False, True)),
    ]
    for floating, a, b in itertools.product(floats, instances, instances):
        groups = {FLOAT: floating, "instance-a": a, "instance-b": b}
        yield attrs.evolve(BUILT, groups={name: group for name, group in groups.items() if group is not None})


def check_case(desired: Desired, observed: Observed) -> None:
    actions = reconcile(desired, observed, {})
    before = overlaps(observed)
    orphans = {
        uid: group for uid, group in observed.instances().items() if uid not in desired.choices and group.populated
    }
    after = observed
    for action in actions:
        assert action.group in (FLOAT, "instance-a", "instance-b")
        if isinstance(action, Remove):
            uid = instance_uid(action.group)
            assert uid not in desired.choices
            assert not observed.groups[action.group].populated
        assert instance_uid(action.group) not in orphans  # an instance that outlives its pod is left alone
        after = perform(after, action)
    assert reconcile(desired, after, {}) == (), "one pass is enough"
    held = union(group.cpus for group in orphans.values())
    owned = union(group.cpus for uid, group in after.instances().items() if uid not in orphans)
    blocked = {uid for uid, (cpus, *_) in desired.choices.items() if not cpus.isdisjoint(held)}
    # Two groups share a CPU only where one of them outlives its pod, or had to be left where another program had put it
    # because its own CPUs are not free: they did so before, or float would have no CPU at all.
    for one, other in overlaps(after):
        assert {instance_uid(one), instance_uid(other)} & (set(orphans) | blocked)
        assert (one, other) in before or (one == FLOAT and desired.shared_pool - owned <= held)
    if desired.shared_pool - held and not blocked:
        assert after.groups[FLOAT].cpus == desired.shared_pool - held
    for uid, group in after.instances().items():
        if uid in desired.choices and desired.choices[uid][0].isdisjoint(held):
            assert (group.kind, group.cpus, group.mems) == ("threaded", desired.choices[uid][0], MEMS)


def test_every_small_tree_reaches_the_desired_state_in_one_pass() -> None:
    all_states, cases = list(states()), 0
    for index, observed in enumerate(trees()):
        # Every tree meets a third of the states, every state a third of the trees.
        for desired in all_states[index % 3 :: 3]:
            check_case(desired, observed)
            cases += 1
    assert cases > 19_000


def test_a_crash_after_any_action_does_not_change_the_final_state() -> None:
    all_states = list(states())
    for index, observed in enumerate(itertools.islice(trees(), 0, None, 23)):
        desired = all_states[index % len(all_states)]
        actions = reconcile(desired, observed, {})
        end = run(observed, actions)
        for count in range(len(actions)):
            stopped = run(observed, actions[:count])
            assert run(stopped, reconcile(desired, stopped, {})) == end


def test_no_action_brings_two_groups_onto_one_cpu() -> None:
    """From any tree that this program leaves to any other state, sets that shrink are written first."""
    for before, after in itertools.product(states(), states()):
        grown = run(BUILT, reconcile(before, BUILT, {uid: cpus[0] for uid, cpus in before.choices.items()}))
        assert not overlaps(grown)
        for action in reconcile(after, grown, {uid: cpus[0] for uid, cpus in after.choices.items()}):
            crossing = {FLOAT, *map(instance_group, "ab")} if not _touching(grown, after) else set()
            grown = perform(grown, action)
            assert not {pair for pair in overlaps(grown) if not set(pair) & crossing}


def _touching(observed: Observed, desired: Desired) -> bool:
    """Return whether every group keeps a CPU; only then can CPUs be moved without being shared for a moment."""
    wanted: dict[str, CpuSet] = {FLOAT: desired.shared_pool}
    wanted |= {instance_group(uid): cpus[0] for uid, cpus in desired.choices.items()}
    return all(name not in wanted or not group.cpus.isdisjoint(wanted[name]) for name, group in observed.groups.items())


@pytest.mark.parametrize("delegated", [False, True])
@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("enabled", [set(), {"cpuset"}, {"memory"}, {"cpuset", "hugetlb", "io"}, {"cpu", "cpuset"}])
@pytest.mark.parametrize("cpus", [NONE, CpuSet([1]), ALL, ALL | CpuSet([7])])
def test_the_root_is_finished_from_any_state(*, delegated: bool, exists: bool, enabled: set[str], cpus: CpuSet) -> None:
    found = Observed(CPUSET, CPUSET if delegated else frozenset(), exists=exists)
    if exists:
        found = attrs.evolve(found, enabled=frozenset(enabled), cpus=cpus, mems=NONE)
    desired = next(states())
    after = run(found, reconcile(desired, found, {}))
    assert after.delegated == CPUSET
    assert after.exists
    assert after.enabled - {"cpu"} == {"cpuset"}
    assert after.cpus == ALL | found.cpus  # never less than it has
    assert after.mems == MEMS
    assert after.groups == {FLOAT: threaded(desired.shared_pool)}
    assert reconcile(desired, after, {}) == ()


def test_builds_in_the_order_the_kernel_demands() -> None:
    desired = desire(CpuState("static", CpuSet([0]), {"a": {"vm": CpuSet([1, 2])}}), MACHINE, LIMITS)
    assert reconcile(desired, Observed(CPUSET, frozenset(), exists=False), {"a": CpuSet([1, 2])}) == (
        Write("..", "cgroup.subtree_control", "+cpuset"),
        Make(ROOT),
        Write(ROOT, "cpuset.mems", "0-1"),
        Write(ROOT, "cpuset.cpus", "0-2"),
        Write(ROOT, "cgroup.subtree_control", "+cpuset"),
        Make(FLOAT),
        Write(FLOAT, "cgroup.type", "threaded"),
        Write(FLOAT, "cpuset.mems", "0-1"),
        Make("instance-a"),
        Write("instance-a", "cgroup.type", "threaded"),
        Write("instance-a", "cpuset.mems", "0-1"),
        Write(FLOAT, "cpuset.cpus", "0"),
        Write("instance-a", "cpuset.cpus", "1-2"),
        Restrict("instance-a", "cgroup.max.descendants", "0"),
        Make("float/a"),
        Write("float/a", "cgroup.type", "threaded"),
        Restrict("float/a", "cgroup.max.descendants", "0"),
    )


def test_memory_nodes_are_never_taken_away() -> None:
    wide = CpuSet([0, 1, 2])
    observed = attrs.evolve(
        BUILT,
        mems=wide,
        groups={FLOAT: threaded(CpuSet([0]), mems=wide), "instance-a": threaded(CpuSet([1, 2]), mems=CpuSet([1]))},
    )
    desired = desire(CpuState("static", CpuSet([0]), {"a": {"vm": CpuSet([1, 2])}}), MACHINE, LIMITS)
    assert reconcile(desired, observed, {}) == (
        Write("instance-a", "cpuset.mems", "0-1"),
        Restrict("instance-a", "cgroup.max.descendants", "0"),
    )


@pytest.mark.parametrize(
    ("found", "left"),
    [("1", "1"), ("1-2", "1-2"), ("2", "1-2"), ("0", "1-2"), ("0-1", "1-2"), ("", "1-2")],
)
def test_the_container_of_an_instance_is_inferred_from_its_cpus(found: str, left: str) -> None:
    entries: Mapping[str, Mapping[str, CpuSet]] = {"a": {"vm": CpuSet([1]), "side": CpuSet([1, 2])}}
    desired = desire(CpuState("static", CpuSet([0]), entries), MACHINE, LIMITS)
    observed = attrs.evolve(BUILT, groups={"instance-a": threaded(CpuSet.parse(found), populated=True)})
    assert str(run(observed, reconcile(desired, observed, {})).groups["instance-a"].cpus) == left


def test_nothing_is_stale_while_the_state_does_not_name_pods() -> None:
    observed = attrs.evolve(BUILT, groups={"instance-a": threaded(CpuSet([1]))})
    named = desire(CpuState("static", CpuSet([0, 1, 2])), MACHINE, LIMITS)
    unnamed = desire(CpuState("static", CpuSet([0]), unattributed=CpuSet([1, 2])), MACHINE, LIMITS)
    assert stale(named, observed, {}) == ("a",)
    assert stale(named, observed, {"a": CpuSet([1])}) == ()
    assert stale(unnamed, observed, {}) == ()
    assert stale(desire_without_kubelet(MACHINE, LIMITS), observed, {}) == ()


def test_under_policy_none_only_running_instances_keep_cpus() -> None:
    desired = desire(CpuState("none", NONE), MACHINE, LIMITS)
    observed = attrs.evolve(BUILT, groups={"instance-a": threaded(CpuSet([1]), populated=True)})
    after = run(observed, reconcile(desired, observed, {}))
    assert str(after.groups[FLOAT].cpus) == "0,2"
    assert after.groups["instance-a"] == observed.groups["instance-a"]


def test_float_has_the_reserved_cpus_when_no_other_is_left() -> None:
    desired = desire(CpuState("static", NONE, {"a": {"vm": CpuSet([1, 2])}}), MACHINE, LIMITS)
    assert desired.shared_pool == CpuSet([0])


def test_float_joins_an_orphan_only_where_it_has_no_other_cpu() -> None:
    orphan = attrs.evolve(BUILT, groups={"instance-a": threaded(CpuSet([0]), populated=True)})
    for shared, expected in (("0", "0"), ("0-1", "1")):
        desired = desire(CpuState("static", CpuSet.parse(shared)), MACHINE, LIMITS)
        assert str(run(orphan, reconcile(desired, orphan, {})).groups[FLOAT].cpus) == expected


def test_float_keeps_its_cpus_when_no_cpu_is_left_for_it() -> None:
    desired = desire(CpuState("static", NONE, {"a": {"web": MACHINE.online}}), MACHINE, LIMITS)
    assert reconcile(desired, attrs.evolve(BUILT, groups={FLOAT: threaded(CpuSet([1]))}), {}) == ()


def test_without_a_kubelet_float_has_the_cpus_that_no_instance_holds() -> None:
    desired = desire_without_kubelet(MACHINE, LIMITS)
    observed = attrs.evolve(BUILT, groups={"instance-a": threaded(CpuSet([1]))})
    after = run(observed, reconcile(desired, observed, {"b": CpuSet([2])}))
    assert str(after.groups[FLOAT].cpus) == "0"
    assert str(after.groups["instance-a"].cpus) == "1"


def test_holders_of_a_cpu() -> None:
    observed = attrs.evolve(
        BUILT, groups={FLOAT: threaded(ALL), "instance-a": threaded(CpuSet([1])), "instance-b": HALF_BUILT}
    )
    assert set(holders(CpuSet([1]), observed, but="c")) == {"a", "b"}  # b runs on everything until it has a cpuset
    assert set(holders(CpuSet([1]), observed, but="a")) == {"b"}
    assert set(holders(CpuSet([2]), observed, but="b")) == set()


def test_a_silent_fallback_of_the_kernel_is_detected() -> None:
    lying = Group("threaded", CpuSet([1]), MEMS, ALL, populated=True)
    observed = attrs.evolve(BUILT, groups={"instance-a": lying, FLOAT: threaded(CpuSet([0]))})
    assert set(silent_fallbacks(observed, ALL)) == {"instance-a"}
    offline = Group("threaded", CpuSet([1, 2]), MEMS, CpuSet([1]), populated=True)
    assert silent_fallbacks(attrs.evolve(BUILT, groups={"instance-a": offline}), CpuSet([0, 1])) == {}


# -- limits and pods' groups in float --------------------------------------------------------------------------------

EVERY = frozenset({"cpu", "cpuset", "hugetlb", "memory", "pids"})
LIMITED = attrs.evolve(
    BUILT,
    offered=EVERY,
    delegated=CPUSET | {"cpu", "memory", "pids"},
    enabled=CPUSET | {"cpu", "pids"},
    float_enabled=frozenset({"cpu", "pids"}),
    limits=LIMITS.of_root(),
)


def one_pass(observed: Observed, desired: Desired, grants: Mapping[str, CpuSet]) -> Iterator[Observed]:
    """Yield the tree after each action of a pass, the eviction first."""
    for action in evictions(desired, observed, grants):
        observed = perform(observed, action)
        yield observed
    for action in reconcile(desired, observed, grants):
        observed = perform(observed, action)
        yield observed


def limited_trees() -> Iterator[Observed]:
    """Yield trees with one pod, in every state of its two groups, of its own cgroup and of the limits."""
    instances = [
        None,
        Group("domain invalid", NONE, NONE, ALL, populated=False),
        *(
            attrs.evolve(threaded(CpuSet([1]), populated=populated), limits=limits)
            for populated in (False, True)
            for limits in ({}, {"pids.max": "10"}, {"pids.max": "0"})
        ),
    ]
    pods = [
        None,
        PodGroup("domain invalid", populated=False),
        *(
            PodGroup("threaded", populated, limits)
            for populated in (False, True)
            for limits in (LIMITS.of_pod(gone=False), LIMITS.of_pod(gone=True), {"pids.max": "max"})
        ),
    ]
    enabled = [CPUSET, CPUSET | {"pids"}, LIMITED.enabled]
    for instance, pod, on, gone in itertools.product(instances, pods, enabled, (False, True)):
        below = on - CPUSET if "cpu" in on else frozenset()
        yield attrs.evolve(
            LIMITED,
            enabled=on,
            float_enabled=below,
            groups={
                FLOAT: threaded(CpuSet([0])),
                **({} if instance is None else {"instance-a": with_limits_of(on, instance)}),
            },
            pods={} if pod is None else {"a": with_limits_of(below, pod)},
            gone=frozenset("a" if gone else ""),
        )


def with_limits_of(controllers: frozenset[str], group: AnyGroup) -> AnyGroup:
    limits = {file: value for file, value in group.limits.items() if offers(controllers, file)}
    return attrs.evolve(group, limits=limits)


POD = desire(CpuState("static", CpuSet([0, 2]), {"a": {"vm": CpuSet([1])}}), MACHINE, LIMITS)
NO_POD = desire(CpuState("static", ALL), MACHINE, LIMITS)
UNNAMED = desire(CpuState("static", CpuSet([0]), unattributed=CpuSet([1, 2])), MACHINE, LIMITS)


@pytest.mark.parametrize("desired", [POD, NO_POD, UNNAMED, desire_without_kubelet(MACHINE, LIMITS)])
@pytest.mark.parametrize("grants", [{}, {"a": CpuSet([1])}])
def test_a_crash_at_any_point_of_a_pass_ends_in_the_same_tree(desired: Desired, grants: Mapping[str, CpuSet]) -> None:
    cases = 0
    for observed in limited_trees():
        steps = [observed, *one_pass(observed, desired, grants)]
        # What could not be seen while a controller was off is seen, and a pod's empty group removed, in the next pass.
        end = [steps[-1], *one_pass(steps[-1], desired, grants)][-1]
        assert list(one_pass(end, desired, grants)) == []
        for stopped in steps:
            first = [stopped, *one_pass(stopped, desired, grants)][-1]
            assert [first, *one_pass(first, desired, grants)][-1] == end
        check_pod(observed, end, desired, grants)
        cases += 1
    assert cases == 384


def check_pod(observed: Observed, end: Observed, desired: Desired, grants: Mapping[str, CpuSet]) -> None:
    """Check what became of pod ``a``."""
    before, instance, pod = observed.groups.get("instance-a"), end.groups.get("instance-a"), end.pods.get("a")
    live = "a" in desired.choices or "a" in grants
    assert end.float_enabled == {"cpu", "pids"}
    if "a" in grants:
        assert instance is not None
        assert pod is not None
    if observed.gone and not live:
        assert instance is None, "its CPUs are free"
        assert end.groups[FLOAT].cpus == desired.shared_pool
    elif before is not None and before.populated:
        assert instance is not None
        assert instance.populated, "a pod that has a cgroup is left alone"
    if instance is not None and live:
        assert instance.limits["cgroup.max.descendants"] == "0"
    if pod is not None:
        assert pod.kind == "threaded"
        assert pod.limits == LIMITS.of_pod(gone=bool(observed.gone) and not live)
        assert pod.populated or instance is not None


def test_strangers_cannot_fork_before_they_are_moved() -> None:
    full = attrs.evolve(threaded(CpuSet([1]), populated=True), limits={"pids.max": "10"})
    observed = attrs.evolve(LIMITED, groups={FLOAT: threaded(CpuSet([0, 2])), "instance-a": full}, gone=frozenset("a"))
    assert evictions(NO_POD, observed, {}) == (
        Write("instance-a", "cpuset.cpus", "0,2"),
        Restrict("instance-a", "pids.max", "0"),
        Make("float/a"),
        Write("float/a", "cgroup.type", "threaded"),
        Evict("a"),
    )
    for desired, grants in ((POD, {}), (NO_POD, {"a": CpuSet([1])})):
        assert evictions(desired, observed, grants) == ()
    assert evictions(NO_POD, attrs.evolve(observed, gone=frozenset()), {}) == ()


def test_a_group_that_strangers_fill_again_and_again_follows_float() -> None:
    """They have float's CPUs from the first action on, also while float grows and shrinks; their old ones are free."""

    def refilled(observed: Observed, desired: Desired, grants: Mapping[str, CpuSet]) -> Observed:
        actions = evictions(desired, observed, grants)
        assert isinstance(actions[0], Write) or observed.groups["instance-a"].cpus <= observed.groups[FLOAT].cpus
        observed = run(observed, (action for action in actions if not isinstance(action, Evict)))
        assert "a" not in holders(CpuSet([1]), observed, but="b")
        for action in reconcile(desired, observed, grants):
            observed = perform(observed, action)
            crossing = overlaps(observed) - {(FLOAT, "instance-a")}
            assert not crossing, "nobody else shares a CPU with them"
        return observed

    c = desire(CpuState("static", CpuSet([0]), {"b": {"vm": CpuSet([1, 2])}}), MACHINE, LIMITS)
    for cpus, desired, grants in itertools.product(
        (CpuSet([1]), NONE), (NO_POD, c, desire_without_kubelet(MACHINE, LIMITS)), ({}, {"b": CpuSet([1, 2])})
    ):
        found = attrs.evolve(threaded(cpus, populated=True), limits={"pids.max": "10"})
        groups = {FLOAT: threaded(CpuSet([0, 2])), "instance-a": found}
        observed = attrs.evolve(LIMITED, groups=groups, gone=frozenset("a"))
        for state, granted in ((desired, grants), (NO_POD, {}), (c, {})):
            observed = refilled(observed, state, granted)
            assert observed.groups["instance-a"].cpus == observed.groups[FLOAT].cpus
            assert observed.groups["instance-a"].limits["pids.max"] == "0"
            held = CpuSet() if "instance-b" not in observed.groups else observed.groups["instance-b"].cpus
            assert observed.groups[FLOAT].cpus == state.shared_pool - held


def test_what_could_not_be_moved_keeps_its_cpus() -> None:
    full = attrs.evolve(threaded(CpuSet([1]), populated=True), limits={"pids.max": "0"})
    observed = attrs.evolve(LIMITED, groups={FLOAT: threaded(CpuSet([0, 2])), "instance-a": full}, gone=frozenset("a"))
    assert not [action for action in reconcile(NO_POD, observed, {}) if isinstance(action, Write)]
    assert reconcile(NO_POD, attrs.evolve(observed, groups={FLOAT: threaded(CpuSet([0, 2]))}), {}) == (
        Write(FLOAT, "cpuset.cpus", "0-2"),
    )


def test_limits_are_written_where_the_kernel_offers_them() -> None:
    for offered in (EVERY, CPUSET, CPUSET | {"memory"}, CPUSET | {"pids"}):
        observed = Observed(offered, frozenset(), exists=False)
        *_, end = one_pass(observed, POD, {"a": CpuSet([1])})
        assert end.delegated == offered - {"hugetlb"}
        assert end.enabled == end.delegated - {"memory"}
        assert end.float_enabled == end.enabled - {"cpuset"}
        assert set(end.limits) == {file for file in LIMITS.of_root() if file.partition(".")[0] in offered}
        assert end.limits.items() <= LIMITS.of_root().items()
        assert end.pods["a"].limits.items() <= LIMITS.of_pod(gone=False).items()
        assert (
            ("pids.max" in end.pods["a"].limits)
            == ("pids" in offered)
            == ("pids.max" in end.groups["instance-a"].limits)
        )
        assert list(one_pass(end, POD, {})) == []


MIB = 1 << 20


@pytest.mark.parametrize(
    ("used", "kept", "held_back"),
    [
        (10 * MIB, 10 * MIB, []),
        (64 * MIB, 50 * MIB, []),
        (65 * MIB, 60 * MIB, ["memory.max"]),  # the page cache that memory.high takes back makes room for it
        (70 * MIB, 61 * MIB, ["memory.high", "memory.max"]),
    ],
)
def test_no_memory_limit_is_lowered_below_what_is_in_use(used: int, kept: int, held_back: list[str]) -> None:
    found = attrs.evolve(
        LIMITED,
        limits={**LIMITED.limits, "memory.max": "max", "memory.high": "max"},
        memory_used=used,
        memory_kept=kept,
    )
    observed = attrs.evolve(found, groups={FLOAT: threaded(ALL)})
    assert [file for file, _ in withheld(NO_POD, observed)] == held_back
    written = [action.file for action in reconcile(NO_POD, observed, {}) if isinstance(action, Restrict)]
    assert sorted(written + held_back) == ["memory.high", "memory.max"]
    assert (
        withheld(NO_POD, attrs.evolve(observed, limits=LIMITED.limits)) == ()
    )  # it is in force: the kernel keeps to it


# -- partitions ------------------------------------------------------------------------------------------------------

INVALID = "isolated invalid (Cpu list in cpuset.cpus not exclusive)"
PARTITIONS = [
    (partition, exclusive)
    for partition in (MEMBER, ISOLATED, INVALID)
    for exclusive in (NONE, CpuSet([1]), CpuSet([2]))
]


def partitioned() -> Iterator[Observed]:
    """Yield trees on a kernel with partitions: two instances in every state that a crash or another program can leave."""
    states = [
        attrs.evolve(threaded(CpuSet([cpu]), populated=populated), partition=partition, exclusive=exclusive)
        for cpu in (1, 2)
        for populated in (False, True)
        for partition, exclusive in PARTITIONS
    ]
    for exclusive, (a, b) in itertools.product((NONE, CpuSet([1, 2])), itertools.product(states, states)):
        if a.cpus != b.cpus:
            groups = {FLOAT: threaded(CpuSet([0])), "instance-a": a, "instance-b": b}
            yield attrs.evolve(BUILT, groups=groups, exclusive=exclusive)


@pytest.mark.parametrize(
    "entries", [{}, {"a": {"vm": CpuSet([1])}}, {"a": {"vm": CpuSet([1])}, "b": {"vm": CpuSet([2])}}]
)
def test_what_was_sealed_and_runs_is_sealed_in_one_pass_and_nothing_else(
    entries: Mapping[str, Mapping[str, CpuSet]],
) -> None:
    shared = ALL - union(cpus for each in entries.values() for cpus in each.values())
    desired = desire(CpuState("static", shared, entries), MACHINE, LIMITS)
    for observed in partitioned():
        after = run(observed, reconcile(desired, observed, {}))
        assert reconcile(desired, after, {}) == (), "one pass is enough"
        sealed = {name for name, group in observed.groups.items() if group.populated and group.was_sealed}
        assert {name for name, group in after.groups.items() if group.was_sealed} == sealed
        assert all(after.groups[name].exclusive == after.groups[name].cpus for name in sealed)
        assert after.exclusive == union(after.groups[name].cpus for name in sealed)


FIVE = CpuSet(range(5))
FIVE_CPUS = OnlineCpus(present=FIVE, online=FIVE, memory_nodes=MEMS)


def resizable() -> Iterator[Desired]:
    """Yield every state of the kubelet in which two pods and the shared pool divide five CPUs."""
    for owners in itertools.product("fab", repeat=5):
        cpus = {owner: CpuSet(cpu for cpu in FIVE if owners[cpu] == owner) for owner in "fab"}
        if all(cpus.values()):
            yield desire(CpuState("static", cpus["f"], {uid: {"vm": cpus[uid]} for uid in "ab"}), FIVE_CPUS, LIMITS)


def running(desired: Desired, sealed: Iterable[str]) -> Observed:
    """Return the tree of *desired* with both instances running, of which some are *sealed*."""
    grants = {uid: cpus for uid, (cpus,) in desired.choices.items()}
    found = run(
        attrs.evolve(BUILT, cpus=FIVE, exclusive=NONE), reconcile(desired, attrs.evolve(BUILT, cpus=FIVE), grants)
    )
    groups = {
        name: attrs.evolve(group, populated=instance_uid(name) is not None) for name, group in found.groups.items()
    }
    found = attrs.evolve(found, groups=groups, exclusive=NONE)
    return run(found, reconcile(desired, found, {}, dict.fromkeys(sealed, True)))


@pytest.mark.parametrize("sealed", ["", "a", "ab"])
def test_a_resize_gives_no_cpu_to_two_groups_and_opens_none_that_is_sealed(sealed: str) -> None:
    """Whatever the kubelet gives, takes and exchanges, after each action, and also where the controller dies there."""
    cases = 0
    all_states = list(resizable())
    trees = [running(before, sealed) for before in all_states]
    for started, after in itertools.product(trees, all_states):
        if not _touching(started, after):
            continue
        cases += 1
        observed, actions = started, reconcile(after, started, {})
        assert not any(isinstance(action, Unseal) for action in actions)
        for number, action in enumerate(actions):
            observed = perform(observed, action)
            reached = {name: group.effective | group.cpus for name, group in observed.groups.items()}
            assert all(one.isdisjoint(other) for one, other in itertools.combinations(reached.values(), 2))
            for uid in sealed:
                was, group = started.groups[instance_group(uid)], observed.groups[instance_group(uid)]
                assert group.partition == ISOLATED
                assert group.exclusive >= was.exclusive & after.choices[uid][0], "what it keeps stays its own"
            if number % 2:
                assert run(observed, reconcile(after, observed, {})) == run(observed, actions[number + 1 :])
        assert reconcile(after, observed, {}) == (), "one pass is enough"
        for uid in sealed:
            assert observed.groups[instance_group(uid)].exclusive == after.choices[uid][0]
    assert cases > 2000


def test_an_instance_that_keeps_none_of_its_cpus_is_sealed_anew() -> None:
    before = desire(
        CpuState("static", CpuSet([0, 3]), {"a": {"vm": CpuSet([1])}, "b": {"vm": CpuSet([2])}}), FIVE_CPUS, LIMITS
    )
    after = desire(
        CpuState("static", CpuSet([0, 1]), {"a": {"vm": CpuSet([3])}, "b": {"vm": CpuSet([2])}}), FIVE_CPUS, LIMITS
    )
    started = running(before, "a")
    actions = reconcile(after, started, {})
    assert [type(action) for action in actions if action.group == "instance-a"] == [Unseal, Write, Seal]
    assert str(run(started, actions).groups["instance-a"].exclusive) == "3"


@pytest.mark.parametrize(
    ("current", "resized", "side", "found"),
    [
        ("1-2", "1", "3", "1"),
        ("1", "1-2", "3", "1-2"),
        ("1-2", "1,3", "0", "1,3"),
        ("0", "1", "2", "1-2"),
        ("1-3", "1-2", "3-4", "1-2"),  # the other one has got CPUs of this one
        ("1-2", "1", "2,4", "1-2"),  # nobody knows
    ],
)
def test_the_container_that_was_resized_keeps_some_of_its_cpus(
    current: str, resized: str, side: str, found: str
) -> None:
    """The pod's other container has a CPU of its own, which the instance must not get."""
    entries = {"a": {"vm": CpuSet.parse(resized), "side": CpuSet.parse(side)}}
    shared = FIVE - union(entries["a"].values())
    desired = desire(CpuState("static", shared, entries), FIVE_CPUS, LIMITS)
    observed = attrs.evolve(BUILT, cpus=FIVE, groups={"instance-a": threaded(CpuSet.parse(current), populated=True)})
    assert str(run(observed, reconcile(desired, observed, {})).groups["instance-a"].cpus) == found


def test_an_init_container_that_has_ended_does_not_keep_lost_cpus_for_the_instance() -> None:
    """Its entry stays in the kubelet's state, and had the same CPUs."""
    observed = attrs.evolve(BUILT, cpus=FIVE, groups={"instance-a": threaded(CpuSet([1, 2]), populated=True)})
    entries = {"a": {"init": CpuSet([1, 2]), "vm": CpuSet([1])}}
    for shared, others in ((FIVE - CpuSet([1]), {}), (CpuSet([0]), {"b": {"vm": CpuSet([2, 3])}})):
        desired = desire(CpuState("static", shared, entries | others), FIVE_CPUS, LIMITS)
        assert str(run(observed, reconcile(desired, observed, {})).groups["instance-a"].cpus) == "1"


@pytest.mark.parametrize(
    ("current", "asked", "others", "resized"),
    [
        ("4-7", "4-5", ["8-9"], True),
        ("4-7", "4-9", [], True),
        ("4-7", "6,8-9", ["4-5"], False),
        ("4-7", "8-9", ["4-5"], False),
        ("4-7", "4-5", ["4-7"], True),
        ("4-7", "4-5", ["6-7"], False),
    ],
)
def test_only_the_container_that_keeps_most_of_its_cpus_was_resized(
    current: str, asked: str, others: list[str], *, resized: bool
) -> None:
    wanted = CpuSet.parse(asked)
    assert is_resized(CpuSet.parse(current), wanted, (wanted, *map(CpuSet.parse, others))) is resized


def test_a_partition_that_is_not_extended_yet_is_no_silent_fallback() -> None:
    group = Group(
        "threaded", CpuSet([1, 2]), MEMS, CpuSet([1]), populated=True, exclusive=CpuSet([1]), partition=ISOLATED
    )
    assert silent_fallbacks(attrs.evolve(BUILT, groups={"instance-a": group}), ALL) == {}


def test_an_instance_is_sealed_and_unsealed_when_it_asks() -> None:
    entries = {"a": {"vm": CpuSet([1])}, "b": {"vm": CpuSet([2])}}
    desired = desire(CpuState("static", CpuSet([0]), entries), MACHINE, LIMITS)
    groups = {FLOAT: threaded(CpuSet([0])), "instance-a": threaded(CpuSet([1]), populated=True)}
    groups["instance-b"] = attrs.evolve(
        threaded(CpuSet([2]), populated=True), partition=ISOLATED, exclusive=CpuSet([2])
    )
    observed = attrs.evolve(BUILT, groups=groups, exclusive=CpuSet([2]))
    observed = run(observed, reconcile(desired, observed, {}))
    actions = reconcile(desired, observed, {}, {"a": True})
    assert actions == (Seal("instance-a", CpuSet([1]), CpuSet([1, 2])),)
    both = run(observed, actions)
    assert reconcile(desired, both, {}, {"b": False}) == (
        Unseal("instance-b"),
        Restrict(ROOT, "cpuset.cpus.exclusive", "1"),
    )


def test_without_partitions_none_is_made_and_what_is_left_of_them_is_ended() -> None:
    desired = desire(CpuState("static", CpuSet([0, 2]), {"a": {"vm": CpuSet([1])}}), MACHINE, LIMITS)
    group = attrs.evolve(threaded(CpuSet([1]), populated=True), partition=ISOLATED, exclusive=CpuSet([1]))
    old = attrs.evolve(BUILT, groups={FLOAT: threaded(CpuSet([0, 2])), "instance-a": attrs.evolve(group)})
    off = attrs.evolve(old, exclusive=CpuSet([1]))
    ending = reconcile(attrs.evolve(desired, partitions=False), off, {})
    assert [action for action in ending if isinstance(action, Unseal | Seal)] == [Unseal("instance-a")]
    assert Restrict(ROOT, "cpuset.cpus.exclusive", "") in ending
    before = attrs.evolve(old, groups={**old.groups, "instance-a": threaded(CpuSet([1]), populated=True)})
    assert not [action for action in reconcile(desired, before, {}, {"a": True}) if isinstance(action, Seal)]


def test_an_instance_without_a_pod_is_unsealed_before_it_gets_floats_cpus() -> None:
    desired = desire(CpuState("static", ALL), MACHINE, LIMITS)
    group = attrs.evolve(threaded(CpuSet([1]), populated=True), partition=ISOLATED, exclusive=CpuSet([1]))
    groups = {FLOAT: threaded(CpuSet([0, 2])), "instance-a": group}
    observed = attrs.evolve(BUILT, groups=groups, exclusive=CpuSet([1]), gone=frozenset("a"))
    actions = evictions(desired, observed, {})
    assert actions[:2] == (Unseal("instance-a"), Write("instance-a", "cpuset.cpus", "0,2"))
    after = run(observed, actions)
    assert run(after, reconcile(desired, after, {})).exclusive == NONE
