"""Hypothesis as it suits machines that are shared, and a gate: the same examples each time, and each takes as long as it takes.

``RUNNER_SOAK`` has it look for new ones.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.support.soak import FACTOR

settings.register_profile(
    "shared machine", deadline=None, derandomize=not FACTOR, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared machine")
