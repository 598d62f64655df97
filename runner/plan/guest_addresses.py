"""The physical addresses of the guest's CPU: how many there are, and whether RAM and the window for devices above it fit.

Sources are QEMU's ``hw/i386`` and ``target/i386``; ``tests/machine/test_cpu_addresses.py`` asks this machine's QEMU.
"""

from __future__ import annotations

import re
from bisect import bisect_right

from runner.facts.host import HostFacts
from runner.plan.machine import Accel
from runner.plan.problems import Problems
from runner.plan.qemu_limits import ALWAYS_FITS, GIB, HOLE, LOW_RAM
from runner.spec.instance import InstanceSpec
from runner.spec.rules import format_size

EMULATED_BITS = 40
"""Bits of physical addresses of every CPU model without ``phys-bits`` (``target/i386/cpu.h``)."""
POSSIBLE_BITS = range(32, 53)
"""Bits of physical addresses that QEMU lets a CPU have (``x86_cpu_realizefn``)."""
LEGACY_BITS, PSE36_BITS = 32, 36
"""Bits of physical addresses of a CPU without 64-bit mode, and of one of them with PSE-36."""
WITHOUT_PSE36 = frozenset({"486", "base", "coreduo", "n270", "pentium", "qemu32"})
WITHOUT_LONG_MODE = WITHOUT_PSE36 | {"athlon", "kvm32", "pentium2", "pentium3"}
"""QEMU's CPU models without 64-bit mode."""
HYPERTRANSPORT = 1012 * GIB
"""The first address that devices of an AMD machine cannot reach; QEMU moves all RAM above 4 GiB to 1 TiB for it (``pc.c``)."""
_AMD_MODELS = re.compile(r"max\b|qemu64\b|EPYC|Opteron|phenom\b|athlon\b")
"""The models that are AMD's when emulated; under KVM each has the host's vendor."""


def round_up(value: int, grain: int) -> int:
    """Return the least multiple of *grain* that is not less than *value*."""
    return -(-value // grain) * grain


def top_of_addresses(memory: int, window: int, *, amd: bool) -> int:
    """Return the end address of *window* above *memory* bytes of RAM; OVMF places it at a multiple of its size."""
    ram = 4 * GIB + max(0, memory - LOW_RAM)
    top = round_up(ram, window) + window
    if amd and top > HYPERTRANSPORT:
        top = round_up(1024 * GIB + max(0, memory - LOW_RAM), window) + window
    return top


def refuse_too_much_memory(spec: InstanceSpec, size: int, accel: Accel, facts: HostFacts, problems: Problems) -> None:
    """Refuse *size* bytes of RAM if they and the usual window above them do not fit into the addresses of the guest's CPU.

    QEMU 7.1 and later compare both (``pc_memory_init``). A larger window is checked with the devices that need it.
    """
    model = spec.cpu.model
    bits = guest_address_bits(accel, model, facts.address_bits)
    amd = facts.cpu_vendor == "AuthenticAMD" if accel == "kvm" else _AMD_MODELS.match(model or "max") is not None

    def top(memory: int) -> int:
        above = round_up(max(0, memory - LOW_RAM), GIB) + HOLE
        return 4 * GIB + above if not amd or 4 * GIB + above <= HYPERTRANSPORT else 1024 * GIB + above

    if not bits or top(size) <= 1 << bits:
        return
    fits = bisect_right(range(GIB, size, GIB), 1 << bits, key=top) * GIB
    wider = accel == "kvm" and (facts.address_bits == 0 or top(size) <= 1 << facts.address_bits)
    problems.refuse(
        "memory.size",
        f"{format_size(size)} of RAM and 32GiB for devices end at {format_size(top(size))}, and the guest's CPU has addresses of {bits} "
        f"bits, up to {format_size(1 << bits)}",
        "add host-phys-bits=on to cpu.model, or leave cpu.model out"
        if wider
        else f"at most {format_size(fits)} fit"
        if fits
        else f"take another cpu.model, or at most {format_size(ALWAYS_FITS)}",
    )


def guest_address_bits(accel: Accel, model: str | None, host: int) -> int:
    """Return the number of bits of a physical address in the guest; 0 if unknown. *host* is the number on the host.

    QEMU's rules are those of ``target/i386/host-cpu.c`` (only under KVM) and ``x86_cpu_realizefn``: ``host-phys-bits``,
    which the models ``host`` and ``max`` have, comes before ``phys-bits``, and ``host-phys-bits-limit`` counts only with it.
    """
    name, properties = _cpu_properties(model or ("host" if accel == "kvm" else "max"))
    base = re.sub(r"-v[0-9]+$", "", name)
    if not _is_on(properties.get("lm"), otherwise=base not in WITHOUT_LONG_MODE):
        return PSE36_BITS if _is_on(properties.get("pse36"), otherwise=base not in WITHOUT_PSE36) else LEGACY_BITS
    if accel == "kvm" and _is_on(properties.get("host-phys-bits"), otherwise=name in {"host", "max"}):
        limit = _number(properties.get("host-phys-bits-limit"))
        return min(filter(None, (host, limit)), default=0)
    return _number(properties.get("phys-bits")) or EMULATED_BITS


def _cpu_properties(model: str) -> tuple[str, dict[str, str]]:
    """Return the name and the properties in QEMU's CPU *model* (``x86_cpu_parse_featurestr``).

    The last value of a property counts, but one with ``+`` comes after all values, and one with ``-`` after those.
    """
    name, *words = model.split(",")
    values: dict[str, str] = {}
    signed: dict[str, dict[str, str]] = {"+": {}, "-": {}}
    for word in filter(None, words):
        key, _, value = word.lstrip("+-").partition("=")
        found = signed.get(word[0], values)
        found[key.replace("_", "-")] = {"+": "on", "-": "off"}.get(word[0], value or "on")
    return name, values | signed["+"] | signed["-"]


def _is_on(value: str | None, *, otherwise: bool) -> bool:
    return otherwise if value is None else value in {"on", "yes", "true", "y"}


def _number(value: str | None) -> int:
    """Return the number in *value*, also in hexadecimal; 0 for none, and for values that QEMU refuses itself or that change nothing."""
    try:
        bits = int(value or "0", 0)
    except ValueError:
        return 0
    return bits if bits in POSSIBLE_BITS else 0
