from __future__ import annotations

import itertools

import pytest

from runner.kubelet.pod import Container, ContainerKind, Pod
from runner.node_plan.device_manager import DeviceManager, Devices, DeviceState
from runner.node_plan.quirks import AllocationError, quirks_of
from runner.node_plan.topology_manager import Hint, HintList

pytestmark = pytest.mark.kubelet_model

GPU, NIC = "nvidia.com/gpu", "example.com/nic"
DEVICES: Devices = {GPU: {0: 2, 1: 4}, NIC: {None: 3}}
MANAGER = DeviceManager((0, 1), DEVICES)


def pod(*wanted: int, kinds: tuple[ContainerKind, ...] = ()) -> Pod:
    kinds = kinds or (ContainerKind.APP,) * len(wanted)
    return Pod(
        "p",
        tuple(
            Container(f"c{place}", kind=kind, devices={GPU: count})
            for place, (count, kind) in enumerate(zip(wanted, kinds, strict=True))
        ),
    )


def gpu_hints(manager: DeviceManager, state: DeviceState, asking: Pod) -> list[str]:
    hints = (manager.hints(state, asking, asking.containers[-1]) or {})[GPU]
    return [str(hint) for hint in hints or ()]


@pytest.mark.parametrize(
    ("count", "hints"),
    [
        (1, ["{0} preferred", "{1} preferred", "{0,1}"]),
        (3, ["{1} preferred", "{0,1}"]),
        (5, ["{0,1} preferred"]),
        (7, []),
    ],
)
def test_hints_are_where_enough_devices_are(count: int, hints: list[str]) -> None:
    assert gpu_hints(MANAGER, DeviceState(), pod(count)) == hints


def brute_force(sizes: tuple[int, ...], taken: tuple[int, ...], count: int) -> list[Hint]:
    """Generate hints as the kubelet does, mask by mask."""
    numa_nodes = range(len(sizes))
    fewest, found = len(sizes), []
    for size in range(1, len(sizes) + 1):
        for nodes in itertools.combinations(numa_nodes, size):
            if sum(sizes[each] for each in nodes) >= count:
                fewest = min(fewest, size)
            if sum(sizes[each] - taken[each] for each in nodes) >= count:
                found.append(nodes)
    return [Hint(sum(1 << each for each in nodes), len(nodes) == fewest) for nodes in found]


def test_hints_of_every_small_host() -> None:
    for sizes in itertools.product(range(3), repeat=3):
        devices: Devices = {GPU: dict(enumerate(sizes))}
        manager = DeviceManager((0, 1, 2), devices)
        for taken in itertools.product(*(range(size + 1) for size in sizes)):
            state = DeviceState(held={"other": {GPU: dict(enumerate(taken))}})
            for count in range(1, sum(sizes) - sum(taken) + 1):
                listed = (manager.hints(state, pod(count), pod(count).containers[0]) or {})[GPU]
                assert list(listed or ()) == brute_force(sizes, taken, count)


def test_devices_without_a_numa_node_prefer_none_and_unknown_ones_give_no_hints() -> None:
    container = Container("c", devices={NIC: 1, "example.com/unknown": 1})
    assert MANAGER.hints(DeviceState(), Pod("p", (container,)), container) == {NIC: None}
    given = MANAGER.allocate(DeviceState(), Pod("p", (container,)), container, 1)
    assert given.assignments == {"p": {"c": {NIC: {None: 1}}}}


def test_devices_come_from_the_affinity_first() -> None:
    asking = pod(3)
    given = MANAGER.allocate(DeviceState(), asking, asking.containers[0], 0b10)
    assert given.assignments == {"p": {"c0": {GPU: {1: 3}}}}
    assert MANAGER.free(given, GPU) == {0: 2, 1: 1}
    beyond = MANAGER.allocate(DeviceState(), pod(5), pod(5).containers[0], 0b10)
    assert beyond.assignments == {"p": {"c0": {GPU: {0: 1, 1: 4}}}}
    assert MANAGER.free(MANAGER.without(given, "p"), GPU) == DEVICES[GPU]


def test_too_few_devices_are_refused_with_the_kubelet_s_message() -> None:
    with pytest.raises(AllocationError) as caught:
        MANAGER.allocate(DeviceState(), pod(7), pod(7).containers[0], None)
    assert str(caught.value) == "requested number of devices unavailable for nvidia.com/gpu. Requested: 7, Available: 6"


def test_an_init_container_s_devices_are_used_again() -> None:
    asking = pod(4, 4, kinds=(ContainerKind.INIT, ContainerKind.APP))
    init, app = asking.containers
    state = MANAGER.allocate(DeviceState(), asking, init, 0b10)
    assert MANAGER.hints(state, asking, app) == {GPU: HintList.of([Hint(2, preferred=True), Hint(3, preferred=False)])}
    state = MANAGER.allocate(state, asking, app, 0b10)
    assert MANAGER.free(state, GPU) == {0: 2, 1: 0}
    assert state.assignments["p"]["c1"] == {GPU: {1: 4}}
    # Asked again, as after a restart: the same NUMA nodes.
    assert gpu_hints(MANAGER, state, asking) == ["{1} preferred", "{0,1}"]
    assert MANAGER.pod_hints(DeviceState(), asking) == {
        GPU: HintList.of([Hint(2, preferred=True), Hint(3, preferred=False)])
    }


def test_reusable_devices_of_an_init_container_are_part_of_every_hint() -> None:
    asking = pod(2, 2, kinds=(ContainerKind.INIT, ContainerKind.APP))
    state = MANAGER.allocate(DeviceState(), asking, asking.containers[0], 0b10)
    assert gpu_hints(MANAGER, state, asking) == ["{1} preferred", "{0,1}"]


def test_a_device_of_an_app_container_is_not_used_again() -> None:
    """It counted as free again as soon as a later container got another device of its NUMA node."""
    asking = pod(1, 1)
    state = DeviceState()
    for container in asking.containers:
        state = MANAGER.allocate(state, asking, container, 0b01)
    assert state.assignments == {"p": {"c0": {GPU: {0: 1}}, "c1": {GPU: {0: 1}}}}
    assert MANAGER.free(state, GPU) == {0: 0, 1: 4}


def test_a_sidecar_keeps_the_init_container_s_devices_from_later_ones() -> None:
    asking = pod(1, 1, 2, kinds=(ContainerKind.INIT, ContainerKind.SIDECAR, ContainerKind.APP))
    state = DeviceState()
    for container in asking.containers:
        state = MANAGER.allocate(state, asking, container, 0b10)
    assert state.assignments["p"] == {"c0": {GPU: {1: 1}}, "c1": {GPU: {1: 1}}, "c2": {GPU: {1: 2}}}
    assert MANAGER.free(state, GPU) == {0: 2, 1: 1}


def test_hints_name_numa_nodes_with_devices_only_since_1_36() -> None:
    devices: Devices = {GPU: {1: 2}}
    newer, older = (DeviceManager((0, 1), devices, quirks_of(minor)) for minor in (36, 35))
    assert gpu_hints(newer, DeviceState(), pod(1)) == ["{1} preferred"]
    assert gpu_hints(older, DeviceState(), pod(1)) == ["{1} preferred", "{0,1}"]


def test_a_resource_of_which_the_node_has_no_device_gives_no_hints() -> None:
    manager = DeviceManager((0, 1), {GPU: {1: 0}})
    assert manager.hints(DeviceState(), pod(1), pod(1).containers[0]) == {GPU: None}
