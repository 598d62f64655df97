"""Which ways of which cache instances get, and what everything else keeps."""

from __future__ import annotations

from collections.abc import Mapping

from runner.base.cpuset import CpuSet
from runner.controller.tune.cache_groups import CachePlan, CacheRequest, plan_cache_groups
from runner.controller.tune.disturbances import Unset
from runner.controller.tune.tuner_messages import Tuning
from runner.kernel.resctrl import CacheCapabilities, CacheGroup

CACHES = {0: CpuSet(range(8)), 1: CpuSet(range(8, 16))}
TWELVE_WAYS = CacheCapabilities(all_ways=0xFFF, fewest_ways=1, least_bandwidth=10, bandwidth_step=10)
EVERYTHING = CacheGroup(CpuSet(range(16)), {"L3": {0: "fff", 1: "fff"}, "MB": {0: "100", 1: "100"}})


def request(uid: str, cpus: str, ways: int | None = None, bandwidth: int | None = None) -> CacheRequest:
    return CacheRequest(uid, CpuSet.parse(cpus), Tuning("default", ways, bandwidth))


def planned(
    *requests: CacheRequest,
    groups: Mapping[str, CacheGroup] | None = None,
    capabilities: CacheCapabilities = TWELVE_WAYS,
) -> CachePlan:
    return plan_cache_groups(requests, {"": EVERYTHING, **(groups or {})}, capabilities, CACHES)


def test_ways_are_given_from_the_highest_on_in_the_caches_of_its_cpus() -> None:
    plan = planned(request("a", "2-3", 2), request("b", "4-5,8", 3))
    assert plan.groups == {
        "instance-a": CacheGroup(CpuSet.parse("2-3"), {"L3": {0: "c00"}}),
        "instance-b": CacheGroup(CpuSet.parse("4-5,8"), {"L3": {0: "380", 1: "e00"}}),
    }
    assert plan.lowest_given == {0: 7, 1: 9}
    assert (plan.removed, plan.unmet) == ((), ())


def test_an_instance_keeps_its_ways_when_another_ends() -> None:
    both = planned(request("a", "2-3", 2), request("b", "4-5", 3))
    plan = planned(request("b", "4-5", 3), groups=both.groups)
    assert plan.removed == ("instance-a",)
    assert plan.groups == {"instance-b": both.groups["instance-b"]}
    third = planned(request("b", "4-5", 3), request("c", "6", 2), groups=plan.groups)
    assert third.groups["instance-c"].values == {"L3": {0: "c00"}}


def test_half_of_a_cache_stays_with_everything_else() -> None:
    plan = planned(request("a", "2-3", 4), request("b", "4-5", 4))
    assert plan.groups.keys() == {"instance-a"}
    reason = "cannot give instance 'b' 4 ways of L3 cache 0: other instances have them"
    assert plan.unmet == (Unset("cache", "instance-b", reason),)
    [unset] = planned(request("a", "2-3", 7)).unmet
    assert unset.reason == "cannot give instance 'a' 7 ways of the L3 cache: it may have from 1 to 6 of 12"


def test_memory_bandwidth_is_rounded_up_to_what_the_cpus_can() -> None:
    assert planned(request("a", "2-3", None, 41)).groups["instance-a"].values == {"MB": {0: "50"}}
    assert planned(request("a", "2-3", None, 1)).groups["instance-a"].values == {"MB": {0: "10"}}


def test_cpus_that_cannot_are_named_and_the_rest_is_given() -> None:
    no_ways = CacheCapabilities(all_ways=0, fewest_ways=1, least_bandwidth=10, bandwidth_step=10)
    plan = planned(request("a", "2-3", 2, 50), capabilities=no_ways)
    reason = "cannot give instance 'a' ways of the L3 cache: this machine's CPUs cannot"
    assert plan.unmet == (Unset("cache", "instance-a", reason),)
    assert plan.groups["instance-a"].values == {"MB": {0: "50"}}
    no_bandwidth = CacheCapabilities(all_ways=0xFFF, fewest_ways=1, least_bandwidth=0, bandwidth_step=1)
    plan = planned(request("a", "2-3", 2, 50), capabilities=no_bandwidth)
    reason = "cannot limit the memory bandwidth of instance 'a': this machine's CPUs cannot"
    assert plan.unmet == (Unset("cache", "instance-a", reason),)
    assert plan.groups["instance-a"].values == {"L3": {0: "c00"}}


def test_groups_of_others_are_left_alone_and_named() -> None:
    plan = planned(request("a", "2-3", 2), groups={"database": EVERYTHING})
    assert (plan.groups, plan.removed, plan.lowest_given) == ({}, (), {})
    assert "database" in plan.unmet[0].reason


def test_without_requests_nothing_is_left_of_ours() -> None:
    before = planned(request("a", "2-3", 2)).groups
    groups = {**before, "database": EVERYTHING}
    assert planned(groups=groups) == CachePlan(removed=("instance-a",), present={"": EVERYTHING, **groups})
