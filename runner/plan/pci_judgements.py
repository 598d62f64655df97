"""Judgements about passed-through devices and their paths to the root complex: the guest's disadvantages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from runner.base.judgement import Judgement, Level
from runner.base.table import some
from runner.facts.pci import PciFact, PciLink, is_gpu, is_network
from runner.plan.pci_tree import gigatransfers
from runner.spec.rules import format_size


def device_remarks(facts: Sequence[PciFact]) -> Iterator[Judgement]:
    """Yield remarks about all devices that are passed through, one for each kind and cause."""
    yield from _resets(facts)
    for fact in facts:
        yield from _own_link(fact)
    yield from _idle(facts)
    yield from _uplinks(facts)
    yield from _peer_to_peer(facts)
    yield from _companions(facts)
    yield from _nvlink(facts)
    yield from _small_regions(facts)


def power_remarks(facts: Sequence[PciFact]) -> Iterator[Judgement]:
    """Yield remarks about devices that may lose their power, if no controller of the node prevents it."""
    cold = [fact.address for fact in facts if fact.d3cold and is_gpu(fact.device_class)]
    if cold:
        yield _remark(
            f"the kernel may cut the power of {some(cold)} while the guest leaves it idle (D3cold), and some do not wake again",
            'use placement "controller", which keeps it powered, or write 0 to its d3cold_allowed in sysfs',
        )


def _remark(found: str, remedy: str) -> Judgement:
    return Judgement("device", Level.WARNING, found, "", remedy)


def _named(fact: PciFact) -> str:
    return f"{fact.address} ({fact.name})"


def _resets(facts: Sequence[PciFact]) -> Iterator[Judgement]:
    resettable = {fact.slot for fact in facts if fact.resets}
    for fact in facts:
        if not fact.resets and (fact.slot not in resettable or fact.physical_function):
            yield _remark(
                f"{_named(fact)} cannot be reset by itself: the next guest sees the state that this one leaves in it",
                "see its reset_method in sysfs",
            )


def _own_link(fact: PciFact) -> Iterator[Judgement]:
    """Yield permanent faults of the link of *fact*: an idle GPU lowers only its speed."""
    link, above = fact.link, fact.bridges[-1].link if fact.bridges else None
    if link is None or not link.best_width:
        return
    now, best = f"{link.speed} x{link.width}", f"{link.best_speed} x{link.best_width}"
    reachable = link.best_speed if above is None else min(link.best_speed, above.best_speed, key=_known)
    if link.width < link.best_width:
        yield _remark(
            f"{_named(fact)}: its PCI Express link is {now}, its best is {best}",
            "look at its riser and slot",
        )
    elif above is not None and reachable != link.best_speed:
        yield _remark(
            f"{_named(fact)}: its PCI Express link is {reachable} at most, its best is {best}: the port above it, "
            f"{fact.bridges[-1].address}, is slower",
            "put it into a faster slot, or look at the slot's speed in the firmware's settings",
        )
    elif link.speed != link.best_speed and not is_gpu(fact.device_class) and not _accompanies(fact):
        yield _remark(
            f"{_named(fact)}: its PCI Express link is {now}, its best is {best}",
            "seat it anew, and look for PCIe errors in the kernel's log and for the slot's speed in the firmware's settings",
        )


def _known(speed: str) -> float:
    return gigatransfers(speed) or float("inf")


def _accompanies(fact: PciFact) -> bool:
    """Tell whether it is a further function, such as a GPU's audio, whose link belongs to the first function."""
    return not fact.address.endswith(".0") and not fact.physical_function


def _idle(facts: Sequence[PciFact]) -> Iterator[Judgement]:
    idle = [
        (fact.address, fact.link)
        for fact in facts
        if is_gpu(fact.device_class)
        and fact.link is not None
        and 0 < gigatransfers(fact.link.speed) < gigatransfers(fact.link.best_speed)
    ]
    if idle:
        speeds = sorted({link.speed for _, link in idle}, key=gigatransfers)
        yield _remark(
            f"the PCI Express links of {some(address for address, _ in idle)} are below their best now ({', '.join(speeds)})",
            "an idle GPU lowers its speed, and under load `nvidia-smi -q` or `lspci -vv` in the guest shows the best",
        )


def _uplinks(facts: Sequence[PciFact]) -> Iterator[Judgement]:
    """Yield switches whose own link has fewer lanes, or is slower, than both of its ends support."""
    seen: set[str] = set()
    for fact in facts:
        for index in range(1, len(fact.bridges)):
            above, below = fact.bridges[index - 1 : index + 1]
            if below.address in seen or below.link is None or above.link is None or not fact.begins_switch(index):
                continue
            seen.add(below.address)
            best = min(below.link.best_speed, above.link.best_speed, key=_known)
            lanes = min(below.link.best_width, above.link.best_width)
            if 0 < below.link.width < lanes or 0 < gigatransfers(below.link.speed) < gigatransfers(best):
                yield _remark(
                    f"all devices behind the switch {below.address} share a link of {_link(below.link)}, where both of its ends "
                    f"can do {best} x{lanes}",
                    "look at the cabling or riser of the switch, and for PCIe errors in the kernel's log",
                )


def _link(link: PciLink) -> str:
    return f"{link.speed} x{link.width}"


def _peer_to_peer(facts: Sequence[PciFact]) -> Iterator[Judgement]:
    """Yield causes that send traffic between devices behind one switch through the root complex, and NICs that cannot avoid it.

    The kernel puts devices behind one switch into groups of their own only if its ports redirect (``REQ_ACS_FLAGS`` in
    ``drivers/iommu/iommu.c``); so groups show it if the ports' own registers cannot be read.
    """
    ports: list[str] = []
    untranslated: list[str] = []
    for one, other in combinations(facts, 2):
        redirecting = list(_redirecting(one, other))
        ports += redirecting
        if redirecting:
            untranslated += [
                fact.address for fact in (one, other) if fact.ats is False and is_network(fact.device_class)
            ]
    if not ports:
        return
    yield _remark(
        "traffic between devices behind a switch (GPUDirect) goes up to the root complex and back, since its ports redirect it "
        f"(ACS): {some(ports)}",
        "let translated requests pass (ECAP_ACS+6.w bit 6), with ATS on the NIC",
    )
    if untranslated:
        yield _remark(
            f"the requests of {some(untranslated)} are translated by the IOMMU alone, and go up as well: the NIC shows no ATS",
            "enable it in the NIC's firmware (mlxconfig -d ADDRESS set ATS_ENABLED=true), and reset the NIC",
        )


def _redirecting(one: PciFact, other: PciFact) -> Iterator[str]:
    """Yield the ports between two devices behind one switch that redirect the traffic between them."""
    common = sum(first.address == second.address for first, second in zip(one.bridges, other.bridges, strict=False))
    if not any(map(one.begins_switch, range(common))) or one.slot == other.slot:
        return
    for fact, peer in ((one, other), (other, one)):
        for index, bridge in enumerate(fact.bridges[common:], common):
            if bridge.acs is not None:
                if bridge.acs.redirects and not (bridge.acs.direct_translated and fact.ats):
                    yield bridge.address
            elif bridge.kind is None and not fact.begins_switch(index) and fact.group != peer.group:
                yield bridge.address


def _companions(facts: Sequence[PciFact]) -> Iterator[Judgement]:
    passed = {fact.address for fact in facts}
    left = [
        member.address
        for fact in facts
        for member in fact.members
        if not member.bridge and member.driver is None and member.address not in passed
    ]
    if left:
        yield _remark(
            f"nothing else can use {some(left)} meanwhile: an IOMMU group is one guest's, and theirs has devices that are passed",
            "pass them too, or have the device plugin give whole groups",
        )


def _nvlink(facts: Sequence[PciFact]) -> Iterator[Judgement]:
    """Yield a judgement that NVLink does not work by itself if NVSwitches stay with the host."""
    passed = {fact.address for fact in facts}
    gpus = [fact for fact in facts if fact.nvswitches]
    missing = [address for address in (gpus[0].nvswitches if gpus else ()) if address not in passed]
    if not missing:
        return
    some_passed = len(missing) < len(gpus[0].nvswitches)
    yield _remark(
        f"the GPUs have no NVLink to each other, or CUDA does not start: {'not all' if some_passed else 'none'} of the board's "
        f"NVSwitches are passed ({some(missing)} missing)",
        "pass the whole board, or use a partition of Fabric Manager (FABRIC_MODE=1)",
    )


def _small_regions(facts: Sequence[PciFact]) -> Iterator[Judgement]:
    for fact in facts:
        for bar in fact.bars:
            if is_gpu(fact.device_class) and 0 < bar.size < bar.largest:
                yield _remark(
                    f"{_named(fact)}: the CPU and other devices reach {format_size(bar.size)} of its memory at a time, where "
                    f"its region can have {format_size(bar.largest)}",
                    "enable resizable BAR in the host's firmware, or write the size to its resourceN_resize before the start",
                )
