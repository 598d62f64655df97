"""The longest time that the end of an instance takes: the sum of the bounds of its steps."""

from __future__ import annotations

import attrs

from runner.instance import console, daemons
from runner.instance.cgroups import controller, delegated
from runner.spec.instance import ShutdownSpec

BELOW = 10
"""Seconds by which the documents keep the grace below the pod's."""


def test_the_steps_after_the_grace_fit_into_the_reserved_time() -> None:
    """This holds even if a daemon ignores SIGTERM, and the controller does not answer or a cgroup stays populated."""
    placement = max(controller.DEREGISTERED_WITHIN, delegated.EMPTY_WITHIN + 1)
    worst = console.FLUSHED_WITHIN + daemons.STOPPED_WITHIN + placement
    assert worst <= BELOW
    documented = repr(attrs.fields(ShutdownSpec).grace.metadata)
    assert f"keep it {BELOW} s below terminationGracePeriodSeconds" in documented
