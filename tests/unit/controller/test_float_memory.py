"""Whom the memory guard chooses, in small worlds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from runner.controller.tree.float_memory import (
    MemoryByKind,
    PodMemory,
    charged_memory,
    choose_pod,
    choose_processes,
    is_decided,
    unreclaimable,
)

MIB, GIB = 1 << 20, 1 << 30
ROOT = MemoryByKind(4 * GIB, 4 * GIB, GIB)
LEAST = 256 * MIB


def pod(
    name: str, found: MemoryByKind, charged: MemoryByKind, *processes: MemoryByKind, elsewhere: bool = True
) -> PodMemory:
    return PodMemory(name, found, charged, dict(enumerate(processes, start=1)), elsewhere)


def honest(name: str, *, private_ram: bool = False) -> PodMemory:
    """Return an instance with 100 GiB for its guest, which its own pod is charged for."""
    ram = MemoryByKind(100 * GIB, 0, 200 * MIB) if private_ram else MemoryByKind(0, 100 * GIB, 200 * MIB)
    init, qemu = MemoryByKind(40 * MIB), ram.plus(MemoryByKind(60 * MIB))
    return pod(name, init.plus(qemu), ram, init, qemu)


def test_a_guests_memory_is_its_pods_and_not_the_roots() -> None:
    for guest in (honest("a"), honest("a", private_ram=True)):
        assert guest.of_root(ROOT) == MemoryByKind(100 * MIB)
        assert choose_pod([guest], ROOT, LEAST) is None


def test_the_pod_that_holds_most_of_the_root_is_chosen() -> None:
    own = MemoryByKind(300 * MIB)
    for hoard in (MemoryByKind(GIB), MemoryByKind(0, GIB), MemoryByKind(0, 0, GIB)):
        hoarder = pod("b", hoard.plus(own), own, hoard)
        less = pod("c", MemoryByKind(GIB // 2), MemoryByKind(), MemoryByKind(GIB // 2))
        assert choose_pod([honest("a"), hoarder, less], ROOT, LEAST) == hoarder
        assert choose_pod([honest("a"), hoarder, less], ROOT, 2 * GIB) is None


def test_memory_without_processes_cannot_be_given_back_by_ending_any() -> None:
    left = pod("b", MemoryByKind(0, GIB), MemoryByKind(), elsewhere=False)
    assert choose_pod([left], ROOT, LEAST) is None
    passed_on = pod("b", MemoryByKind(0, GIB), MemoryByKind())
    assert choose_pod([left, passed_on], ROOT, LEAST) == passed_on


def test_one_that_hides_its_processes_is_chosen_first() -> None:
    hidden = PodMemory("a", MemoryByKind(), MemoryByKind(), {}, elsewhere=True, hidden=True)
    hoarder = pod("b", ROOT, MemoryByKind(), ROOT)
    assert choose_pod([hidden, hoarder], ROOT, LEAST) == hidden


def test_what_is_counted_twice_is_no_more_than_there_is() -> None:
    forked = pod("b", MemoryByKind(50 * GIB), MemoryByKind(), *[MemoryByKind(GIB)] * 50)
    assert forked.of_root(ROOT) == MemoryByKind(4 * GIB)


def test_the_largest_processes_end_and_as_few_as_it_takes() -> None:
    sizes = MemoryByKind(10 * MIB), MemoryByKind(300 * MIB), MemoryByKind(100 * MIB), MemoryByKind(200 * MIB)
    hoarder = pod("b", MemoryByKind(610 * MIB), MemoryByKind(), *sizes)
    assert choose_processes(hoarder, ROOT, 250 * MIB) == (2,)
    assert choose_processes(hoarder, ROOT, 301 * MIB) == (2, 4)
    assert choose_processes(hoarder, ROOT, 10 * GIB) == (2, 4, 3, 1)


def test_a_large_program_beside_a_guest_ends_before_the_guest() -> None:
    for private_ram in (False, True):
        guest = honest("a", private_ram=private_ram)
        program = MemoryByKind(0, 2 * GIB) if not private_ram else MemoryByKind(2 * GIB)
        processes = [*guest.processes.values(), program]
        both = pod("a", guest.found.plus(program), guest.charged, *processes)
        assert choose_processes(both, ROOT, GIB) == (3,)


def test_a_hoarder_that_shares_pages_with_its_parent_ends_before_it() -> None:
    """As seen: it holds more than the pod holds of the root, because the pod is charged for its parent's."""
    parent, child = MemoryByKind(10 * MIB), MemoryByKind(206 * MIB)
    hoarder = pod("b", parent.plus(child), MemoryByKind(11 * MIB), parent, child)
    assert hoarder.of_root(ROOT).total < child.total
    assert choose_processes(hoarder, ROOT, 4 * MIB) == (2,)


def test_what_the_kernel_says() -> None:
    stat: Mapping[str, int] = {
        "anon": 1,
        "shmem": 2,
        "pagetables": 4,
        "kernel_stack": 8,
        "file": 48,
        "active_file": 16,
        "inactive_file": 32,
        "slab_reclaimable": 64,
        "unevictable": 128,
    }
    assert charged_memory(stat) == MemoryByKind(1, 2, 12)
    assert unreclaimable(200, stat) == 88
    assert unreclaimable(10, stat) == 0
    assert charged_memory({}) == MemoryByKind()


def test_shared_memory_is_searched_for_unless_it_cannot_change_the_choice() -> None:
    large, small = (pod(name, MemoryByKind(size), MemoryByKind()) for name, size in (("a", GIB), ("b", MIB)))
    for shared, decided in ((0, True), (GIB - MIB, True), (GIB, False)):
        assert is_decided([small, large], MemoryByKind(4 * GIB, shared)) is decided
    assert is_decided([], MemoryByKind())
    assert not is_decided([small], MemoryByKind(4 * GIB, 2 * MIB)), "a pod that is not measured may hold it"


SMALL = [MemoryByKind(*sizes) for sizes in ((0, 0, 0), (3, 0, 0), (0, 4, 0), (1, 1, 5), (9, 9, 9))]


def test_no_pod_below_its_minimum_is_chosen_and_no_other_holds_more() -> None:
    """In all small worlds of two pods."""
    worlds = [pod("x", held.plus(held), charged, held, held) for held in SMALL for charged in SMALL]
    chosen_in = 0
    for both, root, least in itertools.product(itertools.combinations(worlds, 2), SMALL[1:], (1, 4, 8)):
        chosen = choose_pod(both, root, least)
        most = max(each.of_root(root).total for each in both)
        assert (chosen is None) == (most < least)
        if chosen is not None:
            chosen_in += 1
            assert chosen.of_root(root).total == most
            assert len(set(choose_processes(chosen, root, 100))) == len(chosen.processes)
            assert choose_processes(chosen, root, 0) == ()
    assert chosen_in > 100
