"""Each border of :mod:`runner.plan.qemu_limits` with this machine's QEMU, which starts on one side of it and not on the other."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path, PurePosixPath

import attrs
import pytest

from runner.facts.host import Version, parse_version
from runner.placement.guest_topology import GuestTopology
from runner.plan.firmware import BUILDS
from runner.plan.guest_addresses import refuse_too_much_memory
from runner.plan.problems import Problems
from runner.plan.qemu_limits import (
    ACPI_DATA,
    FLASH_SECTOR,
    GIB,
    LOW_RAM,
    MOST_FLASH,
    MOST_VCPUS,
    SPLIT_FROM,
    X2APIC_EMULATED_SINCE,
    refuse_too_large_initrd,
    refuse_too_many_vcpus,
)
from runner.spec.instance import parse_instance
from tests.support.plans import FACTS
from tests.support.program_runs import GuestFiles

KVM = Path("/dev/kvm")


@pytest.fixture(scope="module")
def version() -> str:
    output = subprocess.run(["qemu-system-x86_64", "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"version ([0-9.]+)", output)
    assert found is not None
    return found[1]


def refusal(*words: object) -> str:
    """Return the words with which QEMU refuses a machine, empty if it starts."""
    machine = ("-accel", "tcg", "-nodefaults", "-display", "none", "-S", "-monitor", "stdio")
    done = subprocess.run(
        ["qemu-system-x86_64", *map(str, (*machine, *words))],
        input="quit\n",
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize(
    ("sockets", "dies", "cores", "threads"),
    [
        (1, 1, 254, 1),
        (1, 1, 255, 1),
        (1, 1, 256, 1),
        (2, 1, 127, 1),
        (3, 1, 63, 1),
        (3, 1, 65, 1),
        (2, 5, 8, 2),
        (2, 9, 8, 1),
    ],
)
def test_apic_ids(version: str, sockets: int, dies: int, cores: int, threads: int) -> None:
    topology = GuestTopology(sockets, dies, cores, threads, ())
    spec = parse_instance("spec.toml", f'[cpu]\ncount = {topology.vcpus}\n[boot]\nkernel = "/k"\n'.encode())
    problems = Problems()
    refuse_too_many_vcpus(spec, topology, "tcg", attrs.evolve(FACTS, qemu_version=version), problems)
    shape = f"1,maxcpus={topology.vcpus},sockets={sockets},dies={dies},cores={cores},threads={threads}"
    assert bool(problems.found) is bool(refusal("-M", "q35", "-smp", shape)), problems.found


@pytest.mark.parametrize(
    ("memory", "most"), [(64 << 20, (64 << 20) - ACPI_DATA - 2), (SPLIT_FROM, LOW_RAM - ACPI_DATA - 2)]
)
def test_the_initial_ram_disk_has_no_more_bytes(guest: GuestFiles, tmp_path: Path, memory: int, most: int) -> None:
    path = tmp_path / "initrd"
    for size, fits in ((most, True), (most + 1, False)):
        path.write_bytes(b"")
        os.truncate(path, size)
        problems = Problems()
        refuse_too_large_initrd(PurePosixPath(path), size, memory, problems)
        words = refusal("-M", "q35", "-m", f"{memory >> 20}M", "-kernel", guest.kernel, "-initrd", path)
        assert (not problems.found, not words) == (fits, fits), words


def test_the_machine_has_no_more_vcpus(version: str) -> None:
    parsed = parse_version(version)
    assert parsed is not None
    most = next(number for since, number in MOST_VCPUS if parsed >= since)
    assert f"is {most}" in refusal("-M", "q35", "-smp", f"1,maxcpus={most + 1}")
    emulated: Version = X2APIC_EMULATED_SINCE
    assert ("X2APIC" in refusal("-M", "q35", "-smp", f"1,maxcpus={most}")) is (parsed < emulated)


@pytest.mark.parametrize("model", ["EPYC-Rome", "Skylake-Server", "max", "qemu64", "kvm64", "Opteron_G5", "athlon"])
def test_memory_fits_into_the_addresses_of_the_cpu(model: str, tmp_path: Path) -> None:
    def judged(gib: int) -> bool:
        spec = parse_instance("spec.toml", f'[cpu]\nmodel = "{model}"\n[boot]\nkernel = "/k"\n'.encode())
        problems = Problems()
        refuse_too_much_memory(spec, gib * GIB, "tcg", FACTS, problems)
        return bool(problems.found)

    border = next(gib for gib in range(20, 1100) if judged(gib))
    for gib, refused in ((border - 1, False), (border, True)):
        with (tmp_path / "ram").open("wb") as file:
            file.truncate(gib * GIB)
        memory = f"memory-backend-file,id=ram,mem-path={tmp_path}/ram,size={gib}G,share=on"
        words = refusal("-M", "q35,memory-backend=ram", "-m", f"{gib}G", "-object", memory, "-cpu", model)
        assert ("phys-bits too low" in words) is refused, (model, gib, words)


@pytest.mark.parametrize(
    ("size", "refused"),
    [
        (FLASH_SECTOR, False),
        (FLASH_SECTOR - 512, True),
        (0, True),
        (MOST_FLASH, False),
        (MOST_FLASH + FLASH_SECTOR, True),
    ],
)
def test_firmware_has_the_size_of_a_flash(size: int, *, refused: bool, tmp_path: Path) -> None:
    with (tmp_path / "firmware").open("wb") as file:
        file.truncate(size)
    node = f"driver=file,node-name=firmware,filename={tmp_path}/firmware,read-only=on"
    assert bool(refusal("-M", "q35,pflash0=firmware", "-blockdev", node)) is refused


def test_each_build_of_the_firmware_is_one_for_qemu() -> None:
    found = [code for pairs in BUILDS.values() for code, _ in pairs if Path(code).exists()]
    assert found != []
    for code in found:
        node = f"driver=file,node-name=firmware,filename={code},read-only=on"
        assert refusal("-M", "q35,pflash0=firmware", "-blockdev", node) == ""


def test_interrupts_are_remapped_where_kvm_splits_the_irqchip() -> None:
    """Without KVM QEMU knows the words and names what they need."""
    words = ("-M", "q35,kernel-irqchip=split", "-device", "intel-iommu,intremap=on,eim=on,dma-translation=off")
    assert "eim=on requires accel=kvm,kernel-irqchip=split" in refusal(*words, "-smp", "1")


def test_the_hosts_own_cpu_model_is_for_kvm() -> None:
    assert "CPU model 'host' requires KVM" in refusal("-machine", "q35", "-cpu", "host")
    assert not refusal("-machine", "q35", "-cpu", "max")
