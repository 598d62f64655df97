"""What a guest learns of its CPUs by CPUID, read by a guest of a few instructions under this machine's QEMU."""

from __future__ import annotations

import subprocess
from pathlib import Path, PurePosixPath

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.facts.hardware import Hardware
from runner.facts.host import HostFacts
from runner.kernel.files import find_program
from runner.kernel.procfs import Procfs
from runner.placement.guest_topology import GuestTopology
from runner.plan.machine import DEDICATED, choose_cpu_model

KVM_HINTS_REALTIME = 1 << 0
"""EDX of 0x40000001: ``Documentation/virt/kvm/x86/cpuid.rst``, "function: KVM_CPUID_FEATURES"."""
INVARIANT_TSC = 1 << 8
"""EDX of 0x80000007."""
READS_CPUID = """
.code16
start:
    movl $0x40000001, %eax
    call show
    movl $0x80000007, %eax
    call show
    movw $0xf4, %dx             # isa-debug-exit
    outb %al, %dx
    hlt
show:                           # writes the leaf's EDX to QEMU's debug port, the lowest byte first
    cpuid
    movl %edx, %eax
    movw $4, %cx
1:  outb %al, $0xe9
    shrl $8, %eax
    loop 1b
    ret
.org 0xfff0                     # where the CPU starts
    .byte 0xe9
    .word start - (. + 2)
.org 0xffff
    .byte 0
"""
FACTS = HostFacts(CpuSet([0, 1]), Hardware((), ()), CpuSet([0]), 1 << 30, PurePosixPath("/run"))
TOPOLOGY = GuestTopology(sockets=1, dies=1, cores=1, threads=1, numa_nodes=())


@pytest.fixture(scope="module")
def rom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rom")
    (directory / "rom.S").write_text(READS_CPUID)
    subprocess.run(["as", "--32", "-o", "rom.o", "rom.S"], check=True, cwd=directory)
    subprocess.run(["objcopy", "-O", "binary", "rom.o", "rom"], check=True, cwd=directory)
    return directory / "rom"


def read_leaves(rom: Path, accel: str, model: str) -> tuple[int, int] | None:
    """Return EDX of both leaves, as a guest of *model* reads them; ``None`` where it does not run."""
    qemu = find_program("qemu-system-x86_64")
    assert qemu is not None
    argv = [
        *(str(qemu), "-M", "q35", "-accel", accel, "-cpu", model, "-m", "32M", "-nodefaults", "-no-user-config"),
        *("-display", "none", "-no-reboot", "-bios", str(rom), "-debugcon", "stdio"),
        *("-device", "isa-debug-exit,iobase=0xf4,iosize=1"),
    ]
    try:
        ran = subprocess.run(argv, check=False, stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    except subprocess.TimeoutExpired:
        return None
    hints, power = ran.stdout[:4], ran.stdout[4:]
    return (int.from_bytes(hints, "little"), int.from_bytes(power, "little")) if len(ran.stdout) == 8 else None


def test_a_guest_reads_under_kvm_that_its_cpus_are_its_own(rom: Path) -> None:
    """Where KVM runs it, which a machine in a cloud may not have; TCG has nothing in that leaf, whatever it is asked for."""
    assert read_leaves(rom, "tcg", f"max,{DEDICATED}=on") == (0, 0)
    without_msr = "arch-capabilities=off"  # nested KVM may refuse the register (IA32_ARCH_CAPABILITIES)
    if read_leaves(rom, "kvm", f"host,{without_msr}") is None:
        return
    facts = attrs.evolve(FACTS, invariant_tsc=Procfs(Path("/proc")).has_invariant_tsc())
    for exclusive in (False, True):
        model = choose_cpu_model(None, "kvm", TOPOLOGY, facts, exclusive=exclusive)
        found = read_leaves(rom, "kvm", f"{model},{without_msr}")
        assert found is not None
        assert (found[0] & KVM_HINTS_REALTIME, found[1] & INVARIANT_TSC) == (
            exclusive * KVM_HINTS_REALTIME,
            facts.invariant_tsc * INVARIANT_TSC,
        )
