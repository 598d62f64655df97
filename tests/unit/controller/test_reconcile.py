"""Every small case: three CPUs, two pods, and every tree and kubelet state that they can form."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.controller.tree.limits import Limits
from runner.controller.tree.model import (
    ISOLATED,
    MEMBER,
    PARENT,
    ROOT,
    Action,
    Desired,
    Domain,
    Evict,
    Group,
    Kill,
    Make,
    Observed,
    Remove,
    Requested,
    Restrict,
    Seal,
    Unseal,
    Write,
)
from runner.controller.tree.reconcile import (
    desire,
    desire_without_kubelet,
    evictions,
    float_cpus,
    floats_on,
    holders,
    is_resized,
    left_behind,
    reconcile,
    silent_fallbacks,
    stale,
    withheld,
)
from runner.facts.hardware import OnlineCpus
from runner.kubelet.pod_cgroups import FLOAT, VCPUS, float_group, group_uid, instance_uid, vcpus_group
from runner.kubelet.state import CpuState

ALL, NONE = CpuSet([0, 1, 2]), CpuSet()
MEMS = CpuSet([0, 1])
SETS = [CpuSet(cpus) for size in range(4) for cpus in itertools.combinations(ALL, size)]
MACHINE = OnlineCpus(present=ALL, online=ALL, memory_nodes=MEMS)
CPUSET = frozenset({"cpuset"})
LIMITS = Limits(memory_max=64 << 20, pids_max=100, instance_memory=8 << 20, instance_pids_max=10)
BUILT = Observed(CPUSET, CPUSET, exists=True, enabled=CPUSET, cpus=ALL, mems=MEMS)
"""Of a kernel with cpuset alone; the limits have tests of their own."""


def threaded(cpus: CpuSet, *, populated: bool = False, mems: CpuSet = MEMS) -> Group:
    return Group(cpus, mems, cpus or ALL, threaded=True, populated=populated, limits={"cgroup.max.descendants": "0"})


HALF_BUILT = Group(NONE, NONE, ALL, threaded=False, populated=False)
BYSTANDER = "f"
"""A pod that has a float, and nothing else of what the tests are about."""


def tree(base: Observed, vcpus: Mapping[str, Group], *, floats: Group | None = None) -> Observed:
    """Return *base* with the groups *vcpus*, by the pods' UIDs; with *floats* each pod has such a float, a bystander too."""
    below = frozenset({"cpu", "cpuset", "pids"} & base.enabled)
    offered = {
        file: value for file, value in LIMITS.of_domain(8 << 20, gone=False).items() if offers(base.enabled, file)
    }
    domain = Domain(enabled=below, limits=offered)
    groups = {vcpus_group(uid): with_limits_of(below, group) for uid, group in vcpus.items()}
    uids = [*vcpus]
    if floats is not None:
        uids.append(BYSTANDER)
        groups |= {float_group(uid): floats for uid in uids}
        groups[float_group(BYSTANDER)] = attrs.evolve(floats, populated=True)
    return attrs.evolve(base, domains=dict.fromkeys(uids, domain), groups=groups)


def with_limits_of(controllers: frozenset[str], group: Group) -> Group:
    """Return *group* with the limits that it is to have, if it is finished."""
    if not group.threaded:
        return group
    limits = {"cgroup.max.descendants": "0", "cpu.weight": "1", **group.limits}
    return attrs.evolve(group, limits={file: value for file, value in limits.items() if offers(controllers, file)})


def of_floats(observed: Observed) -> CpuSet:
    """Return the CPUs that each float has."""
    [cpus] = {group.cpus for group in observed.floats().values()}
    return cpus


def perform(observed: Observed, action: Action) -> Observed:
    """Do to *observed* what the kernel would do to the tree."""
    if isinstance(action, Seal | Unseal):
        return perform_on_partition(observed, action)
    if isinstance(action, Restrict) and (action.group, action.file) == (ROOT, "cpuset.cpus.exclusive"):
        below = CpuSet.union(domain.exclusive for domain in observed.domains.values())
        assert below <= CpuSet.parse(action.value)
        return attrs.evolve(observed, exclusive=CpuSet.parse(action.value))
    if isinstance(action, Kill | Evict):
        return empty(observed, action)
    if action.group in (PARENT, ROOT):
        return perform_on_root(observed, action)
    if instance_uid(action.group) is not None:
        return perform_on_domain(observed, action)
    return perform_on_group(observed, action)


def perform_on_domain(observed: Observed, action: Action) -> Observed:
    domains = dict(observed.domains)
    uid = instance_uid(action.group)
    assert uid is not None
    below = [path for path in observed.groups if group_uid(path) == uid]
    match action:
        case Make():
            assert uid not in domains
            domains[uid] = Domain()
        case Remove():
            assert not below
            del domains[uid]
        case Write(_, "cgroup.subtree_control", words) | Restrict(_, "cgroup.subtree_control", words):
            enabled = switched(domains[uid].enabled, words)
            assert enabled <= observed.enabled
            domains[uid] = attrs.evolve(domains[uid], enabled=enabled)
        case Restrict(_, "cpuset.cpus.exclusive", value):
            vcpus = observed.groups.get(vcpus_group(uid))
            assert (NONE if vcpus is None else vcpus.exclusive) <= CpuSet.parse(value), "it shrinks from below"
            domains[uid] = attrs.evolve(domains[uid], exclusive=CpuSet.parse(value))
        case Restrict(_, "cpuset.mems", value):
            before, nodes = (each or str(observed.mems) for each in (domains[uid].limits.get("cpuset.mems"), value))
            populated = any(observed.groups[path].populated for path in below)
            assert not populated or CpuSet.parse(before) <= CpuSet.parse(nodes), "its pages would move"
            domains[uid] = attrs.evolve(domains[uid], limits={**domains[uid].limits, "cpuset.mems": value})
        case Restrict(_, file, value) if offers(observed.enabled, file):
            domains[uid] = attrs.evolve(domains[uid], limits={**domains[uid].limits, file: value})
        case _:
            raise AssertionError(action)
    return attrs.evolve(observed, domains=domains)


def perform_on_group(observed: Observed, action: Action) -> Observed:
    groups = dict(observed.groups)
    uid = group_uid(action.group)
    assert uid is not None
    domain = observed.domains[uid]
    match action:
        case Make(name):
            groups[name] = HALF_BUILT
        case Remove(name):
            assert not groups[name].populated
            assert not groups[name].was_sealed, "its CPUs would come back some time later"
            del groups[name]
        case Write(name, "cgroup.type", "threaded"):
            groups[name] = attrs.evolve(groups[name], threaded=True)
        case Write(name, "cpuset.cpus", value):
            assert "cpuset" in domain.enabled
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
        case Restrict(name, "cpu.weight" | "cgroup.max.descendants" as file, value) if offers(domain.enabled, file):
            groups[name] = attrs.evolve(groups[name], limits={**groups[name].limits, file: value})
        case _:
            raise AssertionError(action)
    return attrs.evolve(observed, groups=groups)


def perform_on_partition(observed: Observed, action: Seal | Unseal) -> Observed:
    group, uid = observed.groups[action.group], group_uid(action.group)
    assert uid is not None
    domain = observed.domains[uid]
    if isinstance(action, Unseal):
        group = attrs.evolve(group, partition=MEMBER, exclusive=NONE, effective=group.cpus)
        domain = attrs.evolve(domain, exclusive=NONE)
        return attrs.evolve(
            observed, groups={**observed.groups, action.group: group}, domains={**observed.domains, uid: domain}
        )
    assert group.populated
    assert action.cpus == group.cpus
    assert action.cpus <= action.together
    others = [other.cpus for name, other in observed.groups.items() if name != action.group]
    assert all(action.cpus.isdisjoint(cpus) for cpus in others)
    assert group.partition != ISOLATED or group.exclusive <= action.cpus
    group = attrs.evolve(group, partition=ISOLATED, exclusive=action.cpus, effective=action.cpus)
    domain = attrs.evolve(domain, exclusive=action.cpus)
    return attrs.evolve(
        observed,
        groups={**observed.groups, action.group: group},
        domains={**observed.domains, uid: domain},
        exclusive=action.together,
    )


def empty(observed: Observed, action: Kill | Evict) -> Observed:
    groups = dict(observed.groups)
    for path in (vcpus_group(action.pod_uid), float_group(action.pod_uid)):
        if path in groups:
            moved = isinstance(action, Evict) and path.endswith(FLOAT)
            groups[path] = attrs.evolve(groups[path], populated=moved)
    return attrs.evolve(observed, groups=groups)


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


def overlaps(observed: Observed) -> set[tuple[str, str]]:
    """Return the pairs of groups with a CPU in common; floats have all theirs in common, and are one here, with the name of all."""
    named = {
        FLOAT if path.endswith(FLOAT) else path: group
        for path, group in observed.groups.items()
        if not path.endswith(FLOAT) or group.cpus
    }
    return {
        (one, other)
        for one, other in itertools.combinations(sorted(named), 2)
        if not named[one].cpus.isdisjoint(named[other].cpus)
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
    for float_cgroup, a, b in itertools.product(floats, instances, instances):
        vcpus = {uid: group for uid, group in (("a", a), ("b", b)) if group is not None}
        yield tree(BUILT, vcpus, floats=float_cgroup)


def check_case(desired: Desired, observed: Observed) -> None:
    actions = reconcile(desired, observed, {})
    before = overlaps(observed)
    orphans = {
        uid: group for uid, group in observed.instances().items() if uid not in desired.choices and group.populated
    }
    after = observed
    for action in actions:
        assert group_uid(action.group) is not None
        if isinstance(action, Remove) and action.group.endswith(VCPUS):
            assert group_uid(action.group) not in desired.choices
        if isinstance(action, Remove) and action.group in observed.groups:
            assert not observed.groups[action.group].populated
        # An instance that outlives its pod is left alone.
        assert not (action.group.endswith(VCPUS) and group_uid(action.group) in orphans)
        after = perform(after, action)
    assert reconcile(desired, after, {}) == (), "one pass is enough"
    held = CpuSet.union(group.cpus for group in orphans.values())
    owned = CpuSet.union(group.cpus for uid, group in after.instances().items() if uid not in orphans)
    blocked = {uid for uid, (cpus, *_) in desired.choices.items() if not cpus.isdisjoint(held)}
    # Two groups share a CPU only where one of them outlives its pod, or had to be left where another program had put it
    # because its own CPUs are not free: they did so before, or float would have no CPU at all.
    for one, other in overlaps(after):
        assert {group_uid(one), group_uid(other)} & (set(orphans) | blocked)
        assert (one, other) in before or (one == FLOAT and desired.shared_pool - owned <= held)
    if desired.shared_pool - held and not blocked and after.floats():
        assert of_floats(after) == desired.shared_pool - held == float_cpus(desired, observed)
    for uid, group in after.instances().items():
        if uid in desired.choices and desired.choices[uid][0].isdisjoint(held):
            assert (group.threaded, group.cpus, group.mems) == (True, desired.choices[uid][0], MEMS)
    assert set(after.domains) == {group_uid(path) for path in after.groups}


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
        check_crashes(observed, lambda stopped, desired=desired: reconcile(desired, stopped, {}))  # type: ignore[misc]


def check_crashes(observed: Observed, decide: Callable[[Observed], tuple[Action, ...]]) -> Observed:
    """Check that passes end in the same tree, wherever the program dies after an action that it has decided; return that tree."""
    actions = decide(observed)
    reached = run(observed, actions)
    end = run(reached, decide(reached))
    assert decide(end) == ()
    for number, action in enumerate(actions, 1):
        observed = perform(observed, action)
        again = decide(observed)
        if again != actions[number:]:  # otherwise they reach the same tree
            first = run(observed, again)
            assert first == end or (reached != end and run(first, decide(first)) == end)
    return end


def test_no_action_brings_two_groups_onto_one_cpu() -> None:
    """From any tree that this program leaves to any other state, sets that shrink are written first."""
    for before, after in itertools.product(states(), states()):
        grown = run(BUILT, reconcile(before, BUILT, {uid: Requested(cpus[0]) for uid, cpus in before.choices.items()}))
        assert not overlaps(grown)
        unavoidable, found = _fewest_overlaps(grown, after), set[tuple[str, str]]()
        for action in reconcile(after, grown, {uid: Requested(cpus[0]) for uid, cpus in after.choices.items()}):
            grown = perform(grown, action)
            found |= overlaps(grown)
        assert len(found) == unavoidable


def _fewest_overlaps(observed: Observed, desired: Desired) -> int:
    """Return how many pairs of groups have a CPU in common on the way, in the best order; only an exchange has any."""
    wanted = {FLOAT: desired.shared_pool, **{vcpus_group(uid): cpus[0] for uid, cpus in desired.choices.items()}}
    now = {FLOAT if path.endswith(FLOAT) else path: group.cpus for path, group in observed.groups.items()}
    kept = {name: now.get(name, NONE) & target or now.get(name, NONE) for name, target in wanted.items()}
    fewest = len(wanted) ** 2
    for order in itertools.permutations(wanted):
        reached, shared = dict(kept), set[tuple[str, str]]()
        for name in order:
            reached[name] = wanted[name]
            pairs = itertools.combinations(sorted(reached), 2)
            shared |= {(one, other) for one, other in pairs if not reached[one].isdisjoint(reached[other])}
        fewest = min(fewest, len(shared))
    return fewest


def _touching(observed: Observed, desired: Desired) -> bool:
    """Return whether every group keeps a CPU; only then can CPUs be moved without being shared for a moment."""
    wanted: dict[str, CpuSet] = {float_group(uid): desired.shared_pool for uid in observed.domains}
    wanted |= {vcpus_group(uid): cpus[0] for uid, cpus in desired.choices.items()}
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
    assert after.enabled == {"cpuset", *(enabled if exists else ())}
    assert after.cpus == ALL | found.cpus  # never less than it has
    assert after.mems == MEMS
    assert not after.groups
    assert not after.domains
    assert reconcile(desired, after, {}) == ()


def test_builds_in_the_order_the_kernel_demands() -> None:
    desired = desire(CpuState("static", CpuSet([0]), {"a": {"vm": CpuSet([1, 2])}}), MACHINE, LIMITS)
    assert reconcile(desired, Observed(CPUSET, frozenset(), exists=False), {"a": Requested(CpuSet([1, 2]))}) == (
        Write("..", "cgroup.subtree_control", "+cpuset"),
        Make(ROOT),
        Write(ROOT, "cpuset.mems", "0-1"),
        Write(ROOT, "cpuset.cpus", "0-2"),
        Write(ROOT, "cgroup.subtree_control", "+cpuset"),
        Make("instance-a"),
        Restrict("instance-a", "cgroup.max.descendants", "2"),
        Write("instance-a", "cgroup.subtree_control", "+cpuset"),
        Make("instance-a/float"),
        Write("instance-a/float", "cgroup.type", "threaded"),
        Write("instance-a/float", "cpuset.mems", "0-1"),
        Make("instance-a/vcpus"),
        Write("instance-a/vcpus", "cgroup.type", "threaded"),
        Write("instance-a/vcpus", "cpuset.mems", "0-1"),
        Write("instance-a/float", "cpuset.cpus", "0"),
        Write("instance-a/vcpus", "cpuset.cpus", "1-2"),
        Restrict("instance-a/float", "cgroup.max.descendants", "0"),
        Restrict("instance-a/vcpus", "cgroup.max.descendants", "0"),
    )


def test_memory_nodes_are_never_taken_away() -> None:
    wide = CpuSet([0, 1, 2])
    observed = tree(
        attrs.evolve(BUILT, mems=wide),
        {"a": threaded(CpuSet([1, 2]), mems=CpuSet([1]))},
        floats=threaded(CpuSet([0]), mems=wide),
    )
    desired = desire(CpuState("static", CpuSet([0]), {"a": {"vm": CpuSet([1, 2])}}), MACHINE, LIMITS)
    assert reconcile(desired, observed, {}) == (Write("instance-a/vcpus", "cpuset.mems", "0-1"),)


@pytest.mark.parametrize(
    ("found", "wanted", "if_empty", "if_populated"),
    [
        ("", "0-1", "", ""),  # the pod has all
        ("", "", "", ""),  # its cgroup has no cpuset controller
        ("", "0", "0", ""),  # an earlier controller has made the domain
        ("0", "0", "0", "0"),
        ("0", "1", "1", "0-1"),
        ("0", "0-1", "", "0-1"),
        ("0-1", "0", "0", "0-1"),
        ("0", None, "0", "0"),  # another instance is registered
    ],
)
def test_a_domain_has_the_memory_nodes_of_its_pod_and_no_page_of_a_guest_moves(
    found: str, wanted: str | None, if_empty: str, if_populated: str
) -> None:
    """A process that moves between its pod's own cgroup and its float keeps its pages where they are."""
    requests = {} if wanted is None else {"a": Requested(CpuSet([1]), memory_nodes=CpuSet.parse(wanted))}
    limits = {"cgroup.max.descendants": "2", "cpuset.mems": found}
    for in_float, vcpus in ((False, False), (True, False), (False, True)):
        groups = {
            float_group("a"): threaded(CpuSet([0, 2]), populated=in_float),
            vcpus_group("a"): threaded(CpuSet([1]), populated=vcpus),
        }
        observed = attrs.evolve(BUILT, domains={"a": Domain(CPUSET, limits=limits)}, groups=groups)
        after = run(observed, reconcile(POD, observed, requests))
        assert after.domains["a"].limits["cpuset.mems"] == (if_populated if in_float or vcpus else if_empty)
        assert {group.mems for group in after.groups.values()} == {MEMS}, "all that the domain has"
        assert reconcile(POD, after, requests) == reconcile(POD, after, {}) == ()


def test_a_domain_gets_its_memory_nodes_before_anything_can_enter_it() -> None:
    actions = reconcile(POD, BUILT, {"a": Requested(CpuSet([1]), memory_nodes=CpuSet([1]))})
    written = actions.index(Restrict("instance-a", "cpuset.mems", "1"))
    assert actions.index(Make("instance-a")) < written < actions.index(Make("instance-a/float"))
    request = {"a": Requested(CpuSet([1]), memory_nodes=CpuSet([1]))}
    check_crashes(BUILT, partial(reconcile, POD, requests=request))  # a registration that was cut off is made again


@pytest.mark.parametrize(
    ("found", "left"),
    [("1", "1"), ("1-2", "1-2"), ("2", "1-2"), ("0", "1-2"), ("0-1", "1-2"), ("", "1-2")],
)
def test_the_container_of_an_instance_is_inferred_from_its_cpus(found: str, left: str) -> None:
    entries: Mapping[str, Mapping[str, CpuSet]] = {"a": {"vm": CpuSet([1]), "side": CpuSet([1, 2])}}
    desired = desire(CpuState("static", CpuSet([0]), entries), MACHINE, LIMITS)
    observed = tree(BUILT, {"a": threaded(CpuSet.parse(found), populated=True)})
    assert str(run(observed, reconcile(desired, observed, {})).groups["instance-a/vcpus"].cpus) == left


def test_nothing_is_stale_while_the_state_does_not_name_pods() -> None:
    observed = tree(BUILT, {"a": threaded(CpuSet([1]))})
    named = desire(CpuState("static", CpuSet([0, 1, 2])), MACHINE, LIMITS)
    unnamed = desire(CpuState("static", CpuSet([0]), unattributed=CpuSet([1, 2])), MACHINE, LIMITS)
    assert stale(named, observed, {}) == ("a",)
    assert stale(named, observed, {"a": Requested(CpuSet([1]))}) == ()
    assert stale(unnamed, observed, {}) == ()
    assert stale(desire_without_kubelet(MACHINE, LIMITS), observed, {}) == ()


def test_under_policy_none_only_running_instances_keep_cpus() -> None:
    desired = desire(CpuState("none", NONE), MACHINE, LIMITS)
    observed = tree(BUILT, {"a": threaded(CpuSet([1]), populated=True)}, floats=threaded(ALL))
    after = run(observed, reconcile(desired, observed, {}))
    assert str(of_floats(after)) == "0,2"
    assert after.groups["instance-a/vcpus"] == observed.groups["instance-a/vcpus"]


def test_float_has_the_reserved_cpus_when_no_other_is_left() -> None:
    desired = desire(CpuState("static", NONE, {"a": {"vm": CpuSet([1, 2])}}), MACHINE, LIMITS)
    assert desired.shared_pool == CpuSet([0])


def test_float_joins_an_orphan_only_where_it_has_no_other_cpu() -> None:
    orphan = tree(BUILT, {"a": threaded(CpuSet([0]), populated=True)}, floats=threaded(ALL))
    for shared, expected in (("0", "0"), ("0-1", "1")):
        desired = desire(CpuState("static", CpuSet.parse(shared)), MACHINE, LIMITS)
        assert str(of_floats(run(orphan, reconcile(desired, orphan, {})))) == expected


def test_float_keeps_its_cpus_when_no_cpu_is_left_for_it() -> None:
    desired = desire(CpuState("static", NONE, {"a": {"web": MACHINE.online}}), MACHINE, LIMITS)
    assert reconcile(desired, tree(BUILT, {}, floats=threaded(CpuSet([1]))), {}) == ()


def test_without_a_kubelet_float_has_the_cpus_that_no_instance_holds() -> None:
    desired = desire_without_kubelet(MACHINE, LIMITS)
    observed = tree(BUILT, {"a": threaded(CpuSet([1]))}, floats=threaded(ALL))
    after = run(observed, reconcile(desired, observed, {"b": Requested(CpuSet([2]))}))
    assert str(of_floats(after)) == "0"
    assert str(after.groups["instance-a/vcpus"].cpus) == "1"


def test_holders_of_a_cpu() -> None:
    observed = tree(BUILT, {"a": threaded(CpuSet([1])), "b": HALF_BUILT}, floats=threaded(ALL))
    assert set(holders(CpuSet([1]), observed, but="c")) == {"a", "b"}  # b runs on everything until it has a cpuset
    assert set(holders(CpuSet([1]), observed, but="a")) == {"b"}
    assert set(holders(CpuSet([2]), observed, but="b")) == set()


def test_a_silent_fallback_of_the_kernel_is_detected() -> None:
    lying = Group(CpuSet([1]), MEMS, ALL, threaded=True, populated=True)
    observed = tree(BUILT, {"a": lying}, floats=threaded(CpuSet([0])))
    assert set(silent_fallbacks(observed, ALL)) == {"instance-a/vcpus"}
    offline = Group(CpuSet([1, 2]), MEMS, CpuSet([1]), threaded=True, populated=True)
    assert silent_fallbacks(tree(BUILT, {"a": offline}), CpuSet([0, 1])) == {}


# -- limits and pods' groups in float --------------------------------------------------------------------------------

EVERY = frozenset({"cpu", "cpuset", "hugetlb", "memory", "pids"})
LIMITED = attrs.evolve(
    BUILT,
    offered=EVERY,
    delegated=CPUSET | {"cpu", "memory", "pids"},
    enabled=CPUSET | {"cpu", "memory", "pids"},
    limits=LIMITS.of_root(),
)


def one_pass(observed: Observed, desired: Desired, requests: Mapping[str, Requested]) -> tuple[Action, ...]:
    """Return the actions of a pass, those that evict first."""
    first = evictions(desired, observed, requests)
    return (*first, *reconcile(desired, run(observed, first), requests))


def limited_trees() -> Iterator[Observed]:
    """Yield trees with one pod, in every state of its two groups, of its domain, of its own cgroup and of the limits."""
    instances = [None, HALF_BUILT, *(threaded(CpuSet([1]), populated=populated) for populated in (False, True))]
    floats = [
        None,
        HALF_BUILT,
        *(threaded(cpus, populated=populated) for cpus in (CpuSet([0]), CpuSet([0, 1])) for populated in (False, True)),
    ]
    whole = LIMITS.of_domain(8 << 20, gone=False)
    limits: list[Mapping[str, str]] = [{}, {"pids.max": "10"}, whole, LIMITS.of_domain(12 << 20, gone=True)]
    enabled = [CPUSET, CPUSET | {"pids"}, LIMITED.enabled]
    for vcpus, float_cgroup, found, on, gone in itertools.product(instances, floats, limits, enabled, (False, True)):
        below = on & {"cpu", "cpuset", "pids"}
        groups = {vcpus_group("a"): vcpus, float_group("a"): float_cgroup}
        domain = Domain(below, limits={file: value for file, value in found.items() if offers(on, file)})
        yield attrs.evolve(
            LIMITED,
            enabled=on,
            domains={"a": domain},
            groups={path: group for path, group in groups.items() if group is not None},
            gone=frozenset("a" if gone else ""),
        )


POD = desire(CpuState("static", CpuSet([0, 2]), {"a": {"vm": CpuSet([1])}}), MACHINE, LIMITS)
NO_POD = desire(CpuState("static", ALL), MACHINE, LIMITS)
UNNAMED = desire(CpuState("static", CpuSet([0]), unattributed=CpuSet([1, 2])), MACHINE, LIMITS)


@pytest.mark.parametrize("desired", [POD, NO_POD, UNNAMED, desire_without_kubelet(MACHINE, LIMITS)])
@pytest.mark.parametrize("requests", [{}, {"a": Requested(CpuSet([1]))}])
def test_a_crash_at_any_point_of_a_pass_ends_in_the_same_tree(
    desired: Desired, requests: Mapping[str, Requested]
) -> None:
    cases = 0
    for observed in limited_trees():
        # What could not be seen while a controller was off is seen, and a pod's empty group removed, in the next pass.
        end = check_crashes(observed, partial(one_pass, desired=desired, requests=requests))
        check_pod(observed, end, desired, requests)
        cases += 1
    assert cases == 576


def check_pod(observed: Observed, end: Observed, desired: Desired, requests: Mapping[str, Requested]) -> None:
    """Check what became of pod ``a``."""
    before = observed.instances().get("a")
    instance, float_cgroup, domain = end.instances().get("a"), end.floats().get("a"), end.domains.get("a")
    live = "a" in desired.choices or "a" in requests
    if "a" in requests:
        assert instance is not None
        assert float_cgroup is not None
    if observed.gone and not live:
        # Without a kubelet what cannot be moved, for want of a float, stays.
        assert instance is None or (not desired.kills and float_cgroup is None), "its CPUs are free"
        assert domain is None or not desired.kills
    elif before is not None and before.populated:
        assert instance is not None
        assert instance.populated, "a pod that has a cgroup is left alone"
    if instance is not None and live:
        assert instance.limits == {"cgroup.max.descendants": "0", "cpu.weight": "1"}
    if domain is not None:
        assert (float_cgroup, instance) != (None, None)
        assert domain.enabled == {"cpu", "cpuset", "pids"}
        found = observed.domains["a"].memory_max
        assert domain.limits == LIMITS.of_domain(found or 8 << 20, gone=bool(observed.gone) and not live)


def test_what_is_left_of_a_pod_cannot_fork_before_it_is_ended() -> None:
    full = threaded(CpuSet([1]), populated=True)
    observed = attrs.evolve(tree(LIMITED, {"a": full}, floats=threaded(CpuSet([0, 2]))), gone=frozenset("a"))
    actions = (
        Write("instance-a/vcpus", "cpuset.cpus", "0,2"),
        Restrict("instance-a", "pids.max", "0"),
    )
    assert evictions(NO_POD, observed, {}) == (*actions, Kill("a"))
    assert evictions(desire_without_kubelet(MACHINE, LIMITS), observed, {}) == (*actions, Evict("a"))
    for desired, requests in ((POD, {}), (NO_POD, {"a": Requested(CpuSet([1]))})):
        assert evictions(desired, observed, requests) == ()
    assert evictions(NO_POD, attrs.evolve(observed, gone=frozenset()), {}) == ()


def test_what_hides_in_the_float_of_a_pod_that_has_gone_is_ended() -> None:
    """Without a kubelet it is not: there the guest may run in a container whose cgroup was lost."""
    observed = attrs.evolve(tree(LIMITED, {}, floats=threaded(CpuSet([0, 2]))), gone=frozenset(BYSTANDER))
    assert evictions(NO_POD, observed, {}) == (Restrict("instance-f", "pids.max", "0"), Kill(BYSTANDER))
    assert evictions(desire_without_kubelet(MACHINE, LIMITS), observed, {}) == ()


def test_a_group_that_strangers_fill_again_and_again_follows_float() -> None:
    """They have float's CPUs from the first action on, also while float grows and shrinks; their old ones are free."""

    def refilled(observed: Observed, desired: Desired, requests: Mapping[str, Requested]) -> Observed:
        actions = evictions(desired, observed, requests)
        assert isinstance(actions[0], Write) or observed.shares_float("a")
        observed = run(observed, (action for action in actions if not isinstance(action, Evict | Kill)))
        assert "a" not in holders(CpuSet([1]), observed, but="b")
        for action in reconcile(desired, observed, requests):
            observed = perform(observed, action)
            crossing = overlaps(observed) - {(FLOAT, vcpus_group("a"))}
            assert not crossing, "nobody else shares a CPU with them"
        return observed

    c = desire(CpuState("static", CpuSet([0]), {"b": {"vm": CpuSet([1, 2])}}), MACHINE, LIMITS)
    for cpus, desired, requests in itertools.product(
        (CpuSet([1]), NONE),
        (NO_POD, c, desire_without_kubelet(MACHINE, LIMITS)),
        ({}, {"b": Requested(CpuSet([1, 2]))}),
    ):
        found = tree(LIMITED, {"a": threaded(cpus, populated=True)}, floats=threaded(CpuSet([0, 2])))
        observed = attrs.evolve(found, gone=frozenset("a"))
        for state, granted in ((desired, requests), (NO_POD, {}), (c, {})):
            observed = refilled(observed, state, granted)
            assert observed.groups["instance-a/vcpus"].cpus == of_floats(observed)
            assert observed.domains["a"].limits["pids.max"] == "0"
            held = observed.instances()["b"].cpus if "b" in observed.instances() else CpuSet()
            assert of_floats(observed) == state.shared_pool - held


def test_an_overdue_instance_goes_to_float_once_and_nothing_of_it_is_ended() -> None:
    """Its pod has a cgroup: what is left of it may be its guest, or another pod's threads that come back again and again."""
    c = desire(CpuState("static", CpuSet([0, 2]), {"b": {"vm": CpuSet([1])}}), MACHINE, LIMITS)
    found = tree(LIMITED, {"a": threaded(CpuSet([1]), populated=True)}, floats=threaded(CpuSet([0, 2])))
    assert evictions(c, found, {}) == ()
    assert [*holders(CpuSet([1]), found, but="b")] == ["a"]
    observed = attrs.evolve(found, overdue=frozenset("a"))
    actions = evictions(c, observed, {})
    assert actions == (Write("instance-a/vcpus", "cpuset.cpus", "0,2"), Evict("a"))
    filled = run(observed, actions[:1])
    assert evictions(c, filled, {}) == reconcile(c, filled, {}) == ()
    assert not holders(CpuSet([1]), filled, but="b")
    grown = run(filled, reconcile(NO_POD, filled, {}))
    assert grown.groups["instance-a/vcpus"].cpus == of_floats(grown) == ALL, "it follows float"
    emptied = run(observed, (*actions, *reconcile(c, run(observed, actions), {})))
    assert "a" not in emptied.instances()
    assert evictions(POD, observed, {}) == (), "the kubelet names it again"


def test_what_could_not_be_moved_keeps_its_cpus() -> None:
    full = threaded(CpuSet([1]), populated=True)
    observed = tree(LIMITED, {"a": full}, floats=threaded(CpuSet([0, 2])))
    observed = attrs.evolve(observed, gone=frozenset("a"))
    assert not [action for action in reconcile(NO_POD, observed, {}) if isinstance(action, Write)]
    without = tree(LIMITED, {}, floats=threaded(CpuSet([0, 2])))
    assert reconcile(NO_POD, without, {}) == (Write("instance-f/float", "cpuset.cpus", "0-2"),)


def test_limits_are_written_where_the_kernel_offers_them() -> None:
    for offered in (EVERY, CPUSET, CPUSET | {"memory"}, CPUSET | {"pids"}):
        observed = Observed(offered, frozenset(), exists=False)
        end = run(observed, one_pass(observed, POD, {"a": Requested(CpuSet([1]))}))
        assert end.delegated == end.enabled == offered - {"hugetlb"}
        assert end.domains["a"].enabled == end.enabled - {"memory"}
        assert set(end.limits) == {file for file in LIMITS.of_root() if file.partition(".")[0] in offered}
        assert end.limits.items() <= LIMITS.of_root().items()
        wanted = LIMITS.of_domain(8 << 20, gone=False)
        assert end.domains["a"].limits == {file: wanted[file] for file in wanted if offers(offered, file)}
        assert one_pass(end, POD, {}) == ()


# -- memory of domains -----------------------------------------------------------------------------------------------


def test_all_domains_together_never_get_more_memory_than_the_tree_has() -> None:
    requests = {uid: Requested(CpuSet([1])) for uid in "abcdefghij"}  # ten, and there is memory for eight
    after = run(LIMITED, reconcile(NO_POD, LIMITED, requests))
    found = [after.domains[uid].memory_max for uid in requests]
    assert found == [8 << 20] * 8 + [0, 0]
    assert LIMITS.memory_max == 64 << 20


def test_a_domain_gets_more_when_its_pod_leaves_more_and_keeps_that() -> None:
    observed = tree(LIMITED, {"a": threaded(CpuSet([1]), populated=True)}, floats=threaded(CpuSet([0, 2])))
    actions = reconcile(POD, observed, {"a": Requested(CpuSet([1]), memory=20 << 20)})
    assert actions == (Restrict("instance-a", "memory.max", str(20 << 20)),)
    after = run(observed, actions)
    assert reconcile(POD, after, {"a": Requested(CpuSet([1]))}) == ()
    cut = run(observed, reconcile(POD, observed, {"a": Requested(CpuSet([1]), memory=100 << 20)}))
    assert cut.domains["a"].memory_max == (64 - 8) << 20, "the bystander has the rest"


def test_a_domain_stays_for_the_memory_that_is_charged_to_it_and_for_nothing_else() -> None:
    """It has no CPUs for itself, so that the root need have none either."""
    left = Domain(exclusive=CpuSet([1]), limits={"memory.max": str(20 << 20)}, charged=(5 << 20) + 1)
    observed = attrs.evolve(LIMITED, domains={"a": left}, exclusive=CpuSet([1]))
    actions = reconcile(POD, observed, {})
    assert actions == (
        Restrict("instance-a", "cpuset.cpus.exclusive", ""),
        Restrict(ROOT, "cpuset.cpus.exclusive", ""),
    )
    assert reconcile(POD, run(observed, actions), {}) == ()
    assert left_behind(POD, observed) == {}, "its pod may register again"
    for gone in (attrs.evolve(observed, gone=frozenset("a")), attrs.evolve(observed, domains={"other": left})):
        assert Remove(f"instance-{next(iter(gone.domains))}") in reconcile(POD, gone, {})
        more = attrs.evolve(gone, domains={uid: attrs.evolve(left, charged=17 << 20) for uid in gone.domains})
        assert left_behind(POD, more) == {}, "some of it may be page cache that the kernel takes back"
        more = attrs.evolve(more, reclaimed=frozenset(gone.domains))
        assert left_behind(POD, more) == dict.fromkeys(gone.domains, 17 << 20)
        assert not any(isinstance(action, Remove) for action in reconcile(POD, more, {}))


def test_a_domain_stays_for_the_processes_that_count_in_it_while_its_pod_may_register_again() -> None:
    """After its removal they would count in the root alone, and the next domain would begin with none; the same holds for groups."""
    observed = attrs.evolve(LIMITED, domains={"a": Domain(processes=1)})
    assert Remove("instance-a") not in reconcile(POD, observed, {})
    assert Remove("instance-a") not in reconcile(POD, attrs.evolve(LIMITED, domains={"a": Domain(removed=1)}), {})
    for gone in (attrs.evolve(observed, gone=frozenset("a")), attrs.evolve(observed, domains={"a": Domain()})):
        assert Remove("instance-a") in reconcile(POD, gone, {})


@pytest.mark.parametrize(("most", "kept"), [("max", 16), (str(20 << 20), 20)])
def test_no_domain_gets_less_than_may_be_charged_to_it(most: str, kept: int) -> None:
    """The writer would wait while the kernel looks for what it can take back; the pod can change what is charged."""
    left = Domain(limits={"memory.max": most}, charged=(15 << 20) + 1)
    observed = attrs.evolve(LIMITED, domains={"a": left})
    request = Requested(CpuSet([1]), memory=8 << 20)
    for desired, requests in ((POD, {}), (NO_POD, {}), (POD, {"a": request})):
        after = run(observed, reconcile(desired, observed, requests)).domains.get("a")
        assert after is None or after.memory_max in (None, kept << 20)


# -- threaded groups directly below the root -------------------------------------------------------------------------


def test_threaded_groups_beside_domains_are_removed_when_they_are_empty_and_left_alone_before() -> None:
    observed = attrs.evolve(LIMITED, outdated={"float": False, "instance-a": False})
    assert reconcile(NO_POD, observed, {})[:2] == (Remove("float"), Remove("instance-a"))
    used = attrs.evolve(observed, outdated={"float": False, "instance-a": True}, gone=frozenset("a"))
    for requests in ({}, {"b": Requested(CpuSet([1]))}):
        assert reconcile(NO_POD, used, requests) == evictions(NO_POD, used, requests) == ()


def test_floats_that_could_not_be_shrunk_are_named() -> None:
    observed = tree(LIMITED, {"a": threaded(CpuSet([1]))}, floats=threaded(CpuSet([0, 2])))
    assert floats_on(CpuSet([2]), observed, but="a") == (BYSTANDER,)
    assert floats_on(CpuSet([1]), observed, but="a") == ()


MIB = 1 << 20


@pytest.mark.parametrize(
    ("used", "given", "held_back"),
    [
        (10, 8, []),
        (64, 64, []),
        (65, 8, ["memory.max"]),
        (10, 65, ["memory.max"]),
    ],
)
def test_no_memory_limit_is_lowered_below_what_is_or_may_be_used(used: int, given: int, held_back: list[str]) -> None:
    """Otherwise a pod that uses what it was given could have the kernel end a process of another one."""
    found = attrs.evolve(
        LIMITED,
        limits={**LIMITED.limits, "memory.max": "max"},
        memory_used=used * MIB,
    )
    observed = tree(found, {}, floats=threaded(ALL))
    [(uid, domain)] = observed.domains.items()
    domain = attrs.evolve(domain, limits={**domain.limits, "memory.max": str(given * MIB)})
    observed = attrs.evolve(observed, domains={uid: domain})
    assert [file for file, _ in withheld(NO_POD, observed)] == held_back
    written = [action.file for action in reconcile(NO_POD, observed, {}) if isinstance(action, Restrict)]
    assert written + held_back == ["memory.max"]
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
            found = tree(BUILT, {"a": a, "b": b}, floats=threaded(CpuSet([0])))
            for together in (False, True):  # as another program may have left it
                domains = {
                    uid: attrs.evolve(
                        domain,
                        exclusive=found.groups.get(vcpus_group(uid), HALF_BUILT).exclusive if together else exclusive,
                    )
                    for uid, domain in found.domains.items()
                }
                yield attrs.evolve(found, domains=domains, exclusive=exclusive)


@pytest.mark.parametrize(
    "entries", [{}, {"a": {"vm": CpuSet([1])}}, {"a": {"vm": CpuSet([1])}, "b": {"vm": CpuSet([2])}}]
)
def test_what_was_sealed_and_runs_is_sealed_in_one_pass_and_nothing_else(
    entries: Mapping[str, Mapping[str, CpuSet]],
) -> None:
    shared = ALL - CpuSet.union(cpus for each in entries.values() for cpus in each.values())
    desired = desire(CpuState("static", shared, entries), MACHINE, LIMITS)
    for observed in partitioned():
        after = run(observed, reconcile(desired, observed, {}))
        assert reconcile(desired, after, {}) == (), "one pass is enough"
        sealed = {name for name, group in observed.groups.items() if group.populated and group.was_sealed}
        assert {uid for uid, domain in after.domains.items() if domain.exclusive} == {*map(group_uid, sealed)}
        assert {name for name, group in after.groups.items() if group.was_sealed} == sealed
        assert all(after.groups[name].exclusive == after.groups[name].cpus for name in sealed)
        assert after.exclusive == CpuSet.union(after.groups[name].cpus for name in sealed)


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
    requests = {uid: Requested(cpus) for uid, (cpus,) in desired.choices.items()}
    found = run(
        attrs.evolve(BUILT, cpus=FIVE, exclusive=NONE), reconcile(desired, attrs.evolve(BUILT, cpus=FIVE), requests)
    )
    groups = {name: attrs.evolve(group, populated=True) for name, group in found.groups.items()}
    found = attrs.evolve(found, groups=groups, exclusive=NONE)
    return run(found, reconcile(desired, found, dict.fromkeys(sealed, Requested(sealed=True))))


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
            del reached[float_group("b")]  # both floats have the same
            assert all(one.isdisjoint(other) for one, other in itertools.combinations(reached.values(), 2))
            for uid in sealed:
                was, group = started.groups[vcpus_group(uid)], observed.groups[vcpus_group(uid)]
                assert group.partition == ISOLATED
                assert group.exclusive >= was.exclusive & after.choices[uid][0], "what it keeps stays its own"
            if number % 2:
                again = reconcile(after, observed, {})
                assert again == actions[number + 1 :] or run(observed, again) == run(started, actions)
        assert reconcile(after, observed, {}) == (), "one pass is enough"
        for uid in sealed:
            assert observed.groups[vcpus_group(uid)].exclusive == after.choices[uid][0]
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
    assert [type(action) for action in actions if action.group == "instance-a/vcpus"] == [Unseal, Write, Seal]
    assert str(run(started, actions).groups["instance-a/vcpus"].exclusive) == "3"
    for action in actions:
        started = perform(started, action)
        assert not overlaps(started), "float waits for CPU 1"


def test_cpus_that_go_round_by_several_groups_are_left_before_they_are_taken() -> None:
    before = desire(
        CpuState("static", CpuSet([0, 3, 4]), {"a": {"vm": CpuSet([1])}, "b": {"vm": CpuSet([2])}}), FIVE_CPUS, LIMITS
    )
    after = desire(
        CpuState("static", CpuSet([0, 1]), {"a": {"vm": CpuSet([2])}, "b": {"vm": CpuSet([3, 4])}}), FIVE_CPUS, LIMITS
    )
    assert reconcile(after, running(before, ""), {}) == (
        Write("instance-a/float", "cpuset.cpus", "0"),
        Write("instance-b/float", "cpuset.cpus", "0"),
        Write("instance-b/vcpus", "cpuset.cpus", "3-4"),
        Write("instance-a/vcpus", "cpuset.cpus", "2"),
        Write("instance-a/float", "cpuset.cpus", "0-1"),
        Write("instance-b/float", "cpuset.cpus", "0-1"),
    )


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
    shared = FIVE - CpuSet.union(entries["a"].values())
    desired = desire(CpuState("static", shared, entries), FIVE_CPUS, LIMITS)
    observed = tree(attrs.evolve(BUILT, cpus=FIVE), {"a": threaded(CpuSet.parse(current), populated=True)})
    assert str(run(observed, reconcile(desired, observed, {})).groups["instance-a/vcpus"].cpus) == found


def test_an_init_container_that_has_ended_does_not_keep_lost_cpus_for_the_instance() -> None:
    """Its entry stays in the kubelet's state, and had the same CPUs."""
    observed = tree(attrs.evolve(BUILT, cpus=FIVE), {"a": threaded(CpuSet([1, 2]), populated=True)})
    entries = {"a": {"init": CpuSet([1, 2]), "vm": CpuSet([1])}}
    for shared, others in ((FIVE - CpuSet([1]), {}), (CpuSet([0]), {"b": {"vm": CpuSet([2, 3])}})):
        desired = desire(CpuState("static", shared, entries | others), FIVE_CPUS, LIMITS)
        assert str(run(observed, reconcile(desired, observed, {})).groups["instance-a/vcpus"].cpus) == "1"


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
        CpuSet([1, 2]), MEMS, CpuSet([1]), threaded=True, populated=True, exclusive=CpuSet([1]), partition=ISOLATED
    )
    assert silent_fallbacks(tree(BUILT, {"a": group}), ALL) == {}


def test_an_instance_is_sealed_and_unsealed_when_it_asks() -> None:
    entries = {"a": {"vm": CpuSet([1])}, "b": {"vm": CpuSet([2])}}
    desired = desire(CpuState("static", CpuSet([0]), entries), MACHINE, LIMITS)
    sealed = attrs.evolve(threaded(CpuSet([2]), populated=True), partition=ISOLATED, exclusive=CpuSet([2]))
    vcpus = {"a": threaded(CpuSet([1]), populated=True), "b": sealed}
    observed = attrs.evolve(tree(BUILT, vcpus, floats=threaded(CpuSet([0]))), exclusive=CpuSet([2]))
    observed = run(observed, reconcile(desired, observed, {}))
    actions = reconcile(desired, observed, {"a": Requested(sealed=True)})
    assert actions == (Seal("instance-a/vcpus", CpuSet([1]), CpuSet([1, 2])),)
    both = run(observed, actions)
    assert reconcile(desired, both, {"b": Requested(sealed=False)}) == (
        Unseal("instance-b/vcpus"),
        Restrict(ROOT, "cpuset.cpus.exclusive", "1"),
    )


def test_without_partitions_none_is_made_and_what_is_left_of_them_is_ended() -> None:
    desired = desire(CpuState("static", CpuSet([0, 2]), {"a": {"vm": CpuSet([1])}}), MACHINE, LIMITS)
    group = attrs.evolve(threaded(CpuSet([1]), populated=True), partition=ISOLATED, exclusive=CpuSet([1]))
    old = tree(BUILT, {"a": group}, floats=threaded(CpuSet([0, 2])))
    off = attrs.evolve(old, exclusive=CpuSet([1]))
    ending = reconcile(attrs.evolve(desired, partitions=False), off, {})
    assert [action for action in ending if isinstance(action, Unseal | Seal)] == [Unseal("instance-a/vcpus")]
    assert Restrict(ROOT, "cpuset.cpus.exclusive", "") in ending
    before = tree(BUILT, {"a": threaded(CpuSet([1]), populated=True)}, floats=threaded(CpuSet([0, 2])))
    assert not [
        action for action in reconcile(desired, before, {"a": Requested(sealed=True)}) if isinstance(action, Seal)
    ]


def test_an_instance_without_a_pod_is_unsealed_before_it_gets_floats_cpus() -> None:
    desired = desire(CpuState("static", ALL), MACHINE, LIMITS)
    group = attrs.evolve(threaded(CpuSet([1]), populated=True), partition=ISOLATED, exclusive=CpuSet([1]))
    found = tree(BUILT, {"a": group}, floats=threaded(CpuSet([0, 2])))
    observed = attrs.evolve(found, exclusive=CpuSet([1]), gone=frozenset("a"))
    actions = evictions(desired, observed, {})
    assert actions[:2] == (Unseal("instance-a/vcpus"), Write("instance-a/vcpus", "cpuset.cpus", "0,2"))
    after = run(observed, actions)
    assert run(after, reconcile(desired, after, {})).exclusive == NONE
