"""The judgement of the CPU model that a spec names; imported only for such a spec."""

from __future__ import annotations

import difflib

from runner.facts.host import HostFacts
from runner.plan.machine import Accel
from runner.plan.problems import Problems

EVERY_QEMUS_MODELS = frozenset({"host", "max"})
"""CPU models for which QEMU need not be asked; ``host`` needs KVM."""


def model_name(model: str) -> str:
    """Return the name in a CPU *model* with its properties: ``EPYC`` in ``EPYC,-svm``."""
    return model.partition(",")[0]


def refuse_unknown_cpu_model(asked: str, accel: Accel, facts: HostFacts, problems: Problems) -> None:
    """Refuse a CPU model that the QEMU of this host does not list, one with properties that it refuses, and the host's own without KVM."""
    name = model_name(asked)
    if accel == "tcg" and name == "host":
        problems.refuse(
            "cpu.model", "'host' is for KVM, and the guest would be emulated", "leave it out, or name 'max'"
        )
    elif facts.cpu_models and name not in facts.cpu_models and name not in EVERY_QEMUS_MODELS:
        near = difflib.get_close_matches(name.removesuffix("-x86_64-cpu"), sorted(facts.cpu_models), 1)
        known = "`qemu-system-x86_64 -cpu help` lists them"
        problems.refuse(
            "cpu.model",
            f"{facts.qemu} has no CPU model {name!r}",
            f"did you mean {near[0]!r}? {known}" if near else known,
        )
    elif facts.cpu_model_error:
        problems.refuse(
            "cpu.model",
            f"{facts.qemu} takes no {asked!r}: it {facts.cpu_model_error}",
            f"`qemu-system-x86_64 -device {name}-x86_64-cpu,help` lists its properties",
        )
