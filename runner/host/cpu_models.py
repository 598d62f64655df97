"""The words of the installed QEMU about the CPU model of a spec: the models that it lists, and why it refuses properties.

Imported only for a spec that names a model.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import PurePosixPath

import attrs
import trio

from runner.base.errors import HostError
from runner.facts.host import HostFacts, parse_cpu_models
from runner.kernel.child_processes import Command, Processes
from runner.kernel.files import memory
from runner.plan.argv.qemu import SANDBOX
from runner.plan.cpu_models import EVERY_QEMUS_MODELS, model_name
from runner.spec.instance import CpuSpec

ANSWERS_WITHIN = 5.0
"""Seconds that QEMU may take to list its models, or to make a machine; 0.05 and 0.1 are usual."""

HELD = 'exec "$0" "$@" <<end\nquit\nend\n'
"""A shell's command that gives QEMU's monitor the command to end, which it executes when the machine is there."""


async def with_cpu_model(facts: HostFacts, cpu: CpuSpec, model: str, processes: Processes) -> HostFacts:
    """Add the facts about *model* of *cpu*: two questions to QEMU, which a model that each QEMU has does not need."""
    qemu = facts.qemu
    if qemu is not None and model_name(model) not in EVERY_QEMUS_MODELS:
        facts = attrs.evolve(facts, cpu_models=await _listed(processes, qemu))
    if qemu is not None and "," in model:
        accel = "tcg" if cpu.accel == "tcg" or facts.kvm.error is not None else "kvm"
        facts = attrs.evolve(facts, cpu_model_error=await _why_refused(processes, qemu, accel, model))
    return facts


async def _listed(processes: Processes, qemu: PurePosixPath) -> frozenset[str]:
    """Return QEMU's CPU models; empty if they cannot be read."""
    with memory("cpu-models", 0) as listing:
        # In a file, because the lines of a child's output are logged, and too many of them dropped.
        script = f'exec "$0" -cpu help >/proc/self/fd/{listing}'
        command = Command("qemu-cpu-help", ("/bin/sh", "-c", script, str(qemu)), (listing,), level=logging.DEBUG)
        with contextlib.suppress(HostError):  # the start reports the error
            async with processes.daemon(command, 0) as process:
                with trio.move_on_after(ANSWERS_WITHIN):
                    await process.wait()
        return parse_cpu_models(os.pread(listing, 1 << 20, 0).decode(errors="replace"))


async def _why_refused(processes: Processes, qemu: PurePosixPath, accel: str, model: str) -> str:
    """Return the reason why *qemu* makes no machine with a CPU of *model*; empty if it does, or for a crash, which has other reasons."""
    machine = ("-machine", "q35", "-m", "32M", "-accel", accel, "-cpu", model, "-S", "-sandbox", SANDBOX)
    argv = (str(qemu), "-nodefaults", "-no-user-config", "-display", "none", "-monitor", "stdio", *machine)
    with contextlib.suppress(HostError):  # the start reports the error
        async with processes.daemon(
            Command("qemu-cpu", ("/bin/sh", "-c", HELD, *argv), level=logging.DEBUG), 0
        ) as process:
            with trio.move_on_after(ANSWERS_WITHIN):
                await process.wait()
            if (process.returncode or 0) > 0:
                return process.how_it_ended()
    return ""
