"""What QEMU refuses is refused by the plan; ``tests/machine/test_qemu_limits.py`` asks QEMU itself at each border."""

from __future__ import annotations

import time
from pathlib import PurePosixPath

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.facts.disk import FileFact
from runner.facts.host import HostFacts, Kvm, parse_version
from runner.placement.guest_topology import GuestTopology
from runner.plan.argv.by_hand import Paths
from runner.plan.argv.qemu import qemu_argv
from runner.plan.firmware import LONGEST_CMDLINE
from runner.plan.qemu_limits import last_apic_id
from tests.support.plans import EPYC, GIB, KERNEL, plan_of, problems, recorded

BIG = attrs.evolve(
    EPYC,
    allowed_cpus=CpuSet(range(512)),
    hardware=recorded("epyc-9754-2s-nps4-cxl"),
    memory=6144 * GIB,
    memory_nodes=CpuSet(range(8)),
    qemu_version="10.0.2",
    address_bits=52,
)
EMULATED = attrs.evolve(BIG, kvm=Kvm("not found"), qemu_version="7.2.22")


def text(count: int, cpu: str = "", size: str = "64GiB", more: str = "") -> str:
    return f'{KERNEL}[cpu]\ncount = {count}\nplacement = "affinity"\n{cpu}\n[memory]\nsize = "{size}"\n{more}'


@pytest.mark.parametrize(("version", "refused"), [("7.2.22", True), ("10.0.8", True), ("10.1", False), ("", False)])
def test_a_qemu_that_cannot_be_replaced_under_its_guest_is_refused(version: str, *, refused: bool) -> None:
    document = text(2, more="[hotplug]\nqemu = true\n")
    if not refused:
        plan_of(document, attrs.evolve(BIG, qemu_version=version))
        return
    [problem] = problems(document, attrs.evolve(BIG, qemu_version=version))
    assert problem == (
        f"hotplug.qemu: needs QEMU 10.1, and /usr/bin/qemu-system-x86_64 is {version}; install another one, or leave it out"
    )


@pytest.mark.parametrize(
    ("initrd", "memory", "remedy"),
    [
        (9 << 20, "32MiB", None),
        (32 << 20, "32MiB", "raise memory.size, or compress it"),
        (32 << 20, "64MiB", None),
        (3 * GIB, "2815MiB", "raise memory.size, or compress it"),
        (3 * GIB, "64GiB", "compress it, or put what it holds on a disk"),
    ],
)
def test_an_initial_ram_disk_that_has_no_room_is_refused(initrd: int, memory: str, remedy: str | None) -> None:
    """QEMU puts it below 4 GiB, where a large guest has 2 GiB of its RAM."""
    facts = attrs.evolve(BIG, files={**BIG.files, PurePosixPath("/boot/initrd"): FileFact("file", initrd)})
    document = f'{KERNEL}initrd = "/boot/initrd"\n[cpu]\nplacement = "affinity"\n[memory]\nsize = "{memory}"\n'
    if remedy is None:
        plan_of(document, facts)
        return
    [problem] = problems(document, facts)
    assert problem.startswith(f"boot.initrd: '/boot/initrd' has {initrd} bytes, and QEMU has room for ")
    assert problem.endswith(f"; {remedy}")


@pytest.mark.parametrize(
    ("topology", "last"),
    [((1, 1, 256, 1), 255), ((2, 3, 5, 2), 0b1_10_100_1), ((3, 1, 65, 1), 0b10_1000000), ((1, 1, 1, 1), 0)],
)
def test_apic_ids_have_whole_bits_for_each_level(topology: tuple[int, int, int, int], last: int) -> None:
    assert last_apic_id(GuestTopology(*topology, ()), topology[2]) == last


@pytest.mark.parametrize(
    ("keys", "remapped"),
    [
        (text(8), False),
        (text(255, 'topology = "flat"'), False),
        (text(256, 'topology = "flat"'), True),
        (text(300), True),
        (text(1, 'topology = "flat"', more="[hotplug]\ncpus = 256\n"), True),
    ],
)
def test_interrupts_are_remapped_for_apic_ids_beyond_254_under_kvm(keys: str, *, remapped: bool) -> None:
    plan = plan_of(keys, BIG)
    argv = qemu_argv(plan.machine, Paths(plan))
    assert ("intel-iommu,intremap=on,eim=on,dma-translation=off" in argv) is remapped
    assert any("kernel-irqchip=split" in word for word in argv) is remapped
    if remapped:  # QEMU makes devices in their order, and the IOMMU must come before those it serves
        assert next(word for word in argv if word.startswith(("intel-iommu", "pvpanic"))).startswith("intel-iommu")


@pytest.mark.parametrize(
    ("keys", "facts", "expected"),
    [
        (
            text(289),
            attrs.evolve(BIG, qemu_version="7.2.22"),
            "cpu.count: QEMU 7.2.22 has machines of at most 288 vCPUs, not 289; lower it to 288",
        ),
        (
            text(1, 'topology = "flat"', more="[hotplug]\ncpus = 1024\n"),
            attrs.evolve(BIG, kvm=Kvm(None, 104, 0o660, most_vcpus=710)),
            "hotplug.cpus: KVM of this kernel has at most 710 vCPUs for a guest, not 1024; lower it to 710",
        ),
        (
            text(256, 'topology = "flat"'),
            EMULATED,
            (
                "cpu.count: QEMU 7.2.22 emulates no x2APIC, without which the last APIC ID is 254; 256 vCPUs in this topology have IDs up "
                "to 255; lower it to 255"
            ),
        ),
        (
            text(8, 'model = "EPYC-Rome"', "1536GiB"),
            BIG,
            (
                "memory.size: 1536GiB of RAM and 32GiB for devices end at 2590GiB, "
                "and the guest's CPU has addresses of 40 bits, up to 1TiB; "
                "add host-phys-bits=on to cpu.model, or leave cpu.model out"
            ),
        ),
        (
            text(8, "", "1000GiB"),
            EMULATED,
            (
                "memory.size: 1000GiB of RAM and 32GiB for devices end at 2054GiB, "
                "and the guest's CPU has addresses of 40 bits, up to 1TiB; "
                "at most 978GiB fit"
            ),
        ),
        (
            text(8, "", "1536GiB"),
            attrs.evolve(BIG, address_bits=39),
            (
                "memory.size: 1536GiB of RAM and 32GiB for devices end at 2590GiB, "
                "and the guest's CPU has addresses of 39 bits, up to 512GiB; "
                "at most 478GiB fit"
            ),
        ),
        (
            text(8, 'model = "qemu32"', "64GiB"),
            EMULATED,
            (
                "memory.size: 64GiB of RAM and 32GiB for devices end at 98GiB, "
                "and the guest's CPU has addresses of 32 bits, up to 4GiB; "
                "take another cpu.model, or at most 28GiB"
            ),
        ),
        (
            text(8, 'model = "max,host-phys-bits=off,phys-bits=99999999999"', "2TiB"),
            BIG,
            (
                "memory.size: 2TiB of RAM and 32GiB for devices end at 3102GiB, "
                "and the guest's CPU has addresses of 40 bits, up to 1TiB; "
                "add host-phys-bits=on to cpu.model, or leave cpu.model out"
            ),
        ),
        (
            text(1, 'model = "host,migratable=off"', "1GiB"),
            EMULATED,
            "cpu.model: 'host' is for KVM, and the guest would be emulated; leave it out, or name 'max'",
        ),
    ],
)
def test_what_does_not_fit_the_machine_is_refused(keys: str, facts: HostFacts, expected: str) -> None:
    assert problems(keys, facts) == [expected]


def test_memory_beyond_every_machine_takes_no_time_to_refuse() -> None:
    begun = time.process_time()
    assert problems(text(8, "", "4096TiB"), BIG)[-1].endswith("; at most 4193250GiB fit")
    [problem] = problems(text(8, "", "4097TiB"), BIG)
    assert problem.startswith(
        'memory.size: found the string "4097TiB"; it takes a size in whole MiB, at least 32MiB and at most 4096TiB, such as '
    )
    assert time.process_time() - begun < 2  # half a minute, where each GiB is tried


@pytest.mark.parametrize("bits", ["30", "-30", "53", "0x7fffffffffffffff"])
def test_bits_that_qemu_refuses_are_left_to_it(bits: str) -> None:
    for key in ("phys-bits", "host-phys-bits=on,host-phys-bits-limit"):
        plan_of(text(8, f'model = "max,{key}={bits}"', "64GiB"), BIG)


def test_what_fits_is_planned() -> None:
    for keys, facts in (
        (text(8, 'model = "EPYC-Rome,host-phys-bits=on"', "1536GiB"), BIG),
        (text(8, "", "1536GiB"), BIG),
        (text(8, "", "978GiB"), EMULATED),
        (text(300), attrs.evolve(EMULATED, qemu_version="9.0.0")),
        (text(255, 'topology = "flat"'), EMULATED),
    ):
        plan_of(keys, facts)


@pytest.mark.parametrize(("length", "cut"), [(LONGEST_CMDLINE, 0), (LONGEST_CMDLINE + 9, 9)])
def test_a_command_line_that_linux_cuts_is_remarked(length: int, cut: int) -> None:
    keys = text(1, "", "1GiB").replace("[boot]\n", f'[boot]\ncmdline = "{"x" * length}"\n')
    found = [str(each) for each in plan_of(keys, BIG).remarks if "cmdline" in str(each)]
    assert [f"does not see the last {cut} bytes of boot.cmdline" in each for each in found] == [True] * bool(cut)


def test_a_version_is_two_numbers() -> None:
    assert [parse_version(each) for each in ("7.2.22", "10.0", "", "of its own", "9" * 5000 + ".0")] == [
        (7, 2),
        (10, 0),
        (),
        (),
        (),
    ]
