"""The timeouts of requests."""

from __future__ import annotations

from runner.base.values import frozen


@frozen
class Timeouts:
    """Seconds to wait for the kubelet, for threads to end, for an instance to end, and between two seals."""

    agreement: float = 12.0
    """For the kubelet's state and the container's cpuset to agree: its reconcile period is 10 s."""
    emptying: float = 2.0
    """For the last thread of an instance that is being deregistered to end."""
    handover: float = 600.0
    """For an instance to end whose CPUs the kubelet has given to another: ten times the grace period of our example pod."""
    sealed_again: float = 1.0
    """From one seal of an instance to the next: each time the kernel rebuilds its scheduling domains, and no request is answered."""
    seals_apart: float = 0.1
    """Between any two seals on the node: many pods may ask together."""
