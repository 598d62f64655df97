"""How far a guest can address: the plan's rule beside this machine's QEMU, which is asked for each way of saying it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from pathlib import Path

import pytest

from runner.facts.host import parse_cpu_models
from runner.plan.guest_addresses import guest_address_bits
from runner.plan.machine import Accel
from tests.machine.test_shapes import QmpConnection

KVM = Path("/dev/kvm")
NAMED = [
    f"EPYC{properties}"
    for properties in (
        "",
        ",phys-bits=48",
        ",phys-bits=0",
        ",phys-bits=0x2a",
        ",phys-bits=48,phys-bits=44",
        ",phys_bits=44",
        ",host-phys-bits",
        ",host_phys_bits=yes",
        ",+host-phys-bits,host-phys-bits=off",
        ",-host-phys-bits,host-phys-bits=on",
        ",+host-phys-bits,-host-phys-bits,phys-bits=41",
        ",host-phys-bits=on,host-phys-bits-limit=39",
        ",host-phys-bits=on,phys-bits=41",
        ",host-phys-bits-limit=39",
        ",lm=off",
        ",-lm,-pse36",
    )
]
"""Also under KVM: those of the model ``host`` need more of a host than every KVM has."""


def address_bits(accel: str, model: str) -> int:
    """Return the bits of a physical address that QEMU gives a guest's CPU of *model*."""
    with contextlib.ExitStack() as held:
        ours, qmp = (held.enter_context(end) for end in socket.socketpair())
        machine = ("-M", "q35", "-m", "64M", "-accel", accel, "-cpu", model, "-nodefaults", "-display", "none", "-S")
        monitor = ("-chardev", f"socket,id=qmp,fd={qmp.fileno()}", "-mon", "qmp,mode=control")
        qemu = held.enter_context(
            subprocess.Popen(
                ["qemu-system-x86_64", *machine, *monitor], pass_fds=[qmp.fileno()], stderr=subprocess.DEVNULL
            )
        )
        held.callback(qemu.kill)
        qmp.close()
        connection = QmpConnection(ours, held)
        bits: int = connection.execute("qom-get", path="/machine/unattached/device[0]", property="phys-bits")
        connection.execute("quit")
    return bits


@pytest.mark.parametrize("model", [*NAMED, "max", "max,phys-bits=46", "max,host-phys-bits-limit=39"])
def test_the_rule_is_qemus_under_emulation(model: str) -> None:
    assert guest_address_bits("tcg", model, 52) == address_bits("tcg", model)


def test_the_rule_is_qemus_for_every_model() -> None:
    listed = subprocess.run(["qemu-system-x86_64", "-cpu", "help"], capture_output=True, text=True, check=True).stdout
    models = sorted(parse_cpu_models(listed) - {"host"})
    old = [model for model in models if not model[0].isupper()]  # those of one name only, which are the oldest
    assert {"486", "qemu32", "qemu64", "athlon"} <= set(old)
    accel: Accel = "tcg"
    assert {model: guest_address_bits(accel, model, 52) for model in old} == {
        model: address_bits(accel, model) for model in old
    }


@pytest.mark.skipif(not KVM.exists(), reason="no KVM here")
@pytest.mark.parametrize("model", NAMED)
def test_the_rule_is_qemus_under_kvm(model: str) -> None:
    listed = Path("/proc/cpuinfo").read_text()
    host = int(listed.partition("address sizes\t: ")[2].partition(" ")[0])
    assert guest_address_bits("kvm", model, host) == address_bits("kvm", model)
