"""CPUs that change hands between three pods: every order in which the kubelet, the pods and the controller can act."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.controller.serve.handover import Handover, HandoverPendingError, handovers, pending_handovers
from runner.controller.tree.model import Observed, Requested
from runner.controller.tree.reconcile import desire, holders, reconcile
from runner.kubelet.pod_cgroups import float_group, vcpus_group
from runner.kubelet.state import CpuState
from tests.unit.controller.test_reconcile import ALL, BUILT, LIMITS, MACHINE, overlaps, perform, threaded, tree

WANTED = {"a": CpuSet([1, 2]), "b": CpuSet([1, 2]), "c": CpuSet([2])}
"""Pod → its CPUs; CPU 0 is always float's."""


@frozen
class NodeState:
    """The kubelet's entries and the tree; *given* are the pods that have had CPUs, for each gets them once."""

    entries: Mapping[str, CpuSet]
    observed: Observed
    given: frozenset[str] = frozenset()

    @property
    def state(self) -> CpuState:
        shared = ALL
        for cpus in self.entries.values():
            shared -= cpus
        return CpuState("static", shared, {pod: {"vm": cpus} for pod, cpus in self.entries.items()})

    @property
    def key(self) -> object:
        groups = {name: (str(group.cpus), group.populated) for name, group in self.observed.groups.items()}
        return tuple(sorted(self.entries)), tuple(sorted(self.given)), tuple(sorted(groups.items()))

    def passed(self, requests: Mapping[str, Requested]) -> NodeState:
        """Make a pass, and check after each of its actions what must always hold."""
        observed = self.observed
        running = {pod: group.cpus for pod, group in observed.instances().items() if group.populated}
        for action in reconcile(desire(self.state, MACHINE, LIMITS), observed, requests):
            observed = perform(observed, action)
            assert not overlaps(observed)
            assert {pod: observed.instances()[pod].cpus for pod in running} == running
        return attrs.evolve(self, observed=observed)

    def populated(self, pod: str, *, populated: bool) -> NodeState:
        groups = dict(self.observed.groups)
        for path in (vcpus_group(pod), float_group(pod)):
            groups[path] = attrs.evolve(groups[path], populated=populated)
        return attrs.evolve(self, observed=attrs.evolve(self.observed, groups=groups))

    def registered(self, pod: str) -> NodeState | None:
        """Register *pod* as the controller does; ``None`` while it waits."""
        cleared = self.passed({})
        pending = list(pending_handovers(pod, WANTED[pod], cleared.observed))
        theirs = [
            group.cpus & WANTED[pod]
            for other, group in self.observed.instances().items()
            if other != pod and group.populated and group.cpus & WANTED[pod]
        ]
        assert [each.cpus for each in pending] == theirs, "it waits for those that run on its CPUs, and no others"
        assert set(pending) <= set(handovers(self.state, cleared.observed))
        if pending:
            return None
        assert not holders(WANTED[pod], cleared.observed, but=pod)
        after = cleared.passed({pod: Requested(WANTED[pod])})
        assert after.observed.instances()[pod].cpus == WANTED[pod]
        return after

    def next(self) -> Iterator[NodeState]:
        instances = self.observed.instances()
        taken = {cpu for cpus in self.entries.values() for cpu in cpus}
        for pod, cpus in WANTED.items():
            if pod not in self.given and cpus.isdisjoint(CpuSet(taken)):
                yield attrs.evolve(self, entries={**self.entries, pod: cpus}, given=self.given | {pod})
            if pod in self.entries:
                yield attrs.evolve(self, entries={name: each for name, each in self.entries.items() if name != pod})
                if (registered := self.registered(pod)) is not None:
                    yield registered
            if pod in instances and (pod in self.entries or instances[pod].populated):
                yield self.populated(pod, populated=not instances[pod].populated)
        yield self.passed({})


def test_no_cpu_is_ever_two_instances_in_any_order() -> None:
    """What runs keeps its CPUs until it has ended, float has none of them, and the newcomer gets them then."""
    start = NodeState({}, tree(BUILT, {}, floats=threaded(ALL))).passed({})
    states, left = {start.key: start}, [start]
    waited = 0
    while left:
        state = left.pop()
        for pod in state.entries:
            waited += state.registered(pod) is None
        for following in state.next():
            if following.key not in states:
                states[following.key] = following
                left.append(following)
    assert waited > 10
    assert len(states) > 100
    for state in states.values():
        after = state
        for ended in state.observed.instances():
            after = after.populated(ended, populated=False)
        for pod in state.entries:
            assert after.registered(pod) is not None


def test_the_refusal_names_the_holders_their_cpus_and_the_remedy() -> None:
    pending = [Handover("new", "old", CpuSet([1])), Handover("new", "older", CpuSet([2, 3]))]
    error = HandoverPendingError("new", CpuSet([1, 2, 3]), pending, 600)
    assert str(error).startswith(
        "cannot register instance 'new' with CPUs '1-3': instance 'old' still runs on '1' and instance 'older' still runs on "
        "'2-3', and the kubelet has taken them from"
    )
    assert "`crictl ps --label io.kubernetes.pod.uid=old`" in str(error)
    assert error.values == {"requested": "1-3", "holder": "old", "within": 600}
