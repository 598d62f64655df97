"""The links and addresses of this network namespace, for specs whose networks use them or must not collide with them."""

from __future__ import annotations

import attrs

from runner.facts.host import HostFacts
from runner.facts.roots import Roots
from runner.kernel.network import read_addresses, read_interfaces
from runner.spec.instance import InstanceSpec


def with_interfaces(facts: HostFacts, spec: InstanceSpec, roots: Roots) -> HostFacts:
    """Add the facts that the plan needs about them."""
    names = sorted({each.interface or "eth0" for each in spec.network if each.mode in {"bridge", "macvtap"}})
    return attrs.evolve(
        facts,
        interfaces=read_interfaces(names, roots) if names else {},
        addresses=read_addresses() if any(each.mode == "private" for each in spec.network) else {},
    )
