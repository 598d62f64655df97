"""How long the end of an instance takes at worst, reckoned from the bounds of its parts."""

from __future__ import annotations

import attrs

from runner.instance import console, daemons
from runner.instance.cgroups import controller, delegated
from runner.spec.instance import ShutdownSpec

BELOW = 10
"""Seconds that the documents say the grace is to be kept below the pod's."""


def test_what_follows_the_grace_fits_into_what_is_kept_for_it() -> None:
    """Even where one daemon ignores SIGTERM, and the controller does not answer or a cgroup does not become empty."""
    placement = max(controller.DEREGISTERED_WITHIN, delegated.EMPTY_WITHIN + 1)
    worst = console.FLUSHED_WITHIN + daemons.STOPPED_WITHIN + placement
    assert worst <= BELOW
    documented = repr(attrs.fields(ShutdownSpec).grace.metadata)
    assert f"keep it {BELOW} s below terminationGracePeriodSeconds" in documented
