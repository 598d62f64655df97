"""A whole controller over a fake machine: interrupts, work queues, idle states, frequencies, caches and irqbalance."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping
from pathlib import Path, PurePosixPath

import attrs
import pytest
import trio
import trio.testing

from runner.base.cpuset import CpuSet
from runner.controller.main import RECORDS
from runner.controller.serve.tuning_passes import TUNING
from runner.controller.tune.cache_tuner import RESCTRL
from runner.controller.tune.host_tuner import HostTuner, TuningOptions
from runner.controller.tune.tuner_messages import Tuned, TunedInstance
from runner.kernel.hardware_reader import read_hardware
from runner.kernel.host_settings import DEFAULT_AFFINITY, WORK_QUEUES, d3cold_path, governor_path, latency_path
from tests.support.fake_host_settings import FakeResctrl
from tests.support.fake_node import HOST_NAMESPACE, SHARED, A, B, Client, Controller, Node, Parts, connected, controlled

EVERYTHING = "0-19"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """Return a node whose machine has three interrupts: one with all CPUs, one of B's alone, one that is managed."""
    node = Node.new(tmp_path)
    node.host.add_machine(20)
    node.host.add_interrupt(24, "eth0", EVERYTHING)
    node.host.add_interrupt(25, "ahci", "15", numa_node=1)
    node.host.add_interrupt(26, "nvme0q3", "14-15", managed=True)
    return node


def mask(node: Node, number: int) -> str:
    return (node.host.root / f"proc/irq/{number}/smp_affinity_list").read_text().strip()


def text(node: Node, path: str) -> str:
    return (node.host.root / path).read_text().strip()


def settings(node: Node) -> dict[str, str]:
    return {
        str(path.relative_to(node.host.root)): path.read_text()
        for path in sorted(node.host.root.rglob("*"))
        if path.is_file()
    }


async def settled(controller: Controller) -> None:
    """Let the tuner see the tree as it is."""
    controller.loop.observe()
    await controller.tuning.tune()


async def register(node: Node, client: Client, uid: str, cpus: str) -> None:
    node.become(uid)
    await client.result("registerCgroup", uuid=uid, cpuset=cpus)


async def missing(client: Client, uid: str, **tuning: object) -> list[str]:
    """Ask for *tuning* and return what cannot be had."""
    request = {"jsonrpc": "2.0", "method": "tuneInstance", "params": {"uuid": uid, "tuning": tuning}, "id": 1}
    await client.send(json.dumps(request).encode() + b"\n")
    response = json.loads(await client.line())
    assert "result" in response, response
    reasons = response["result"]["missing"]
    assert isinstance(reasons, list)
    return reasons


async def test_settings_leave_the_cpus_and_come_back(node: Node) -> None:
    before = settings(node)
    async with controlled(node) as controller, connected(node.socket) as client:
        await settled(controller)
        assert settings(node) == before
        assert not (node.path / RECORDS).exists()
        await register(node, client, B, "14-17")
        await settled(controller)
        assert CpuSet.parse_mask(text(node, DEFAULT_AFFINITY)) == CpuSet.parse("0-13,18-19")
        assert CpuSet.parse_mask(text(node, WORK_QUEUES)) == CpuSet.parse("0-13,18-19")
        # One that had none but B's stays on the device's NUMA node.
        assert (mask(node, 24), mask(node, 25), mask(node, 26)) == ("0-13,18-19", "10-13,18-19", "14-15")
        status = await client.result("getStatus")
        assert isinstance(status, dict)
        assert status["disturbances"] is None, "it names other pods and their CPUs"
        node.put_process(os.getpid(), "/", inner=1, namespace=HOST_NAMESPACE)
        status = await client.result("getStatus")
        assert isinstance(status, dict)
        [reason] = status["disturbances"]
        assert reason.startswith("cannot move interrupts 26 (nvme0q3) off CPUs '14-17'")
        assert reason.endswith("boot with `isolcpus=managed_irq,14-17`")
        assert controller.loop.counters.disturbances == {"interrupt": 1}
        node.become(B)
        await client.result("deregisterCgroup", uuid=B)
        await settled(controller)
        assert {path: CpuSet.parse_mask(text(node, path)) for path in (DEFAULT_AFFINITY, WORK_QUEUES)} == {
            path: CpuSet(range(20)) for path in (DEFAULT_AFFINITY, WORK_QUEUES)
        }
        assert (mask(node, 24), mask(node, 25)) == (EVERYTHING, "15")
        assert controller.tuning.reasons == ()


async def test_an_interrupt_that_refuses_but_is_delivered_elsewhere_is_no_disturbance(node: Node) -> None:
    """As that of the timer, or a queue's whose mask has other CPUs, too."""
    node.host.put("proc/irq/26/effective_affinity_list", "5")
    async with controlled(node) as controller, connected(node.socket) as client:
        await register(node, client, B, "14-17")
        await settled(controller)
        assert mask(node, 26) == "14-15"
        assert controller.tuning.reasons == ()


async def test_the_work_queues_of_others_partitions_stay_out(node: Node) -> None:
    """Since Linux 6.8 there are two more files; what is written must not have CPUs that another program has isolated."""
    node.host.put(f"{WORK_QUEUES}_requested", "fffff")
    node.host.put(f"{WORK_QUEUES}_isolated", "3")
    async with controlled(node) as controller, connected(node.socket) as client:
        await register(node, client, B, "14-17")
        await settled(controller)
        assert CpuSet.parse_mask(text(node, WORK_QUEUES)) == CpuSet.parse("2-13,18-19")
        node.host.put(f"{WORK_QUEUES}_requested", CpuSet.parse("2-13,18-19").mask())
        await client.result("deregisterCgroup", uuid=B)
        await settled(controller)
        assert CpuSet.parse_mask(text(node, WORK_QUEUES)) == CpuSet.parse("2-19")
        node.host.put(f"{WORK_QUEUES}_requested", CpuSet.parse("2-19").mask())
        node.host.put(f"{WORK_QUEUES}_isolated", "0")
        await settled(controller)
        assert CpuSet.parse_mask(text(node, WORK_QUEUES)) == CpuSet.parse("0-19")


async def test_the_loop_itself_sees_instances_come_and_go(node: Node) -> None:
    async with controlled(node) as controller, connected(node.socket) as client:
        await register(node, client, B, "14-17")
        await controller.eventually(lambda: mask(node, 24) == "0-13,18-19")
        await client.result("deregisterCgroup", uuid=B)
        await controller.eventually(lambda: mask(node, 24) == EVERYTHING)


async def test_an_instance_that_ends_during_a_pass_leaves_nothing(node: Node) -> None:
    """It had also ended when that pass was asked for, so that nothing seems to have changed in between."""
    begun, go_on, blocked = deque[Mapping[str, TunedInstance]](), threading.Semaphore(0), threading.Event()

    class BlockedTuner(HostTuner):
        def tune(self, instances: Mapping[str, TunedInstance]) -> Tuned:
            if blocked.is_set():
                begun.append(instances)
                go_on.acquire()
            return super().tune(instances)

    async with (
        controlled(node, parts=Parts(host_tuner=BlockedTuner)) as controller,
        connected(node.socket) as client,
        trio.open_nursery() as nursery,
    ):
        await register(node, client, B, "14-17")
        await controller.eventually(lambda: mask(node, 24) == "0-13,18-19")
        blocked.set()
        try:
            nursery.start_soon(controller.tuning.tune)
            await controller.eventually(lambda: len(begun) == 1)
            await client.result("deregisterCgroup", uuid=B)
            await controller.loop.next_pass()
            await trio.testing.wait_all_tasks_blocked()  # the tuner, which has seen it, waits for the end of that pass
            await register(node, client, B, "14-17")
            go_on.release()
            await controller.eventually(lambda: len(begun) == 2)
            assert list(begun[1]) == [B]
            await client.result("deregisterCgroup", uuid=B)
        finally:
            go_on.release(1000)
        await controller.eventually(lambda: mask(node, 24) == EVERYTHING)


async def test_a_controller_that_is_killed_forgets_nothing(node: Node) -> None:
    """What one has changed the next gives back, though the instance ended while there was none."""
    async with controlled(node) as controller, connected(node.socket) as client:
        await register(node, client, B, "14-17")
        assert await missing(client, B, latency="low") == []
        await settled(controller)
    async with controlled(node) as controller:
        await settled(controller)
        assert (mask(node, 24), text(node, latency_path(14)), text(node, governor_path(14))) == (
            "0-13,18-19",
            "2",
            "performance",
        )
    node.instance(B).remove()
    node.put_state("2-11,14-17", {A: {"instance": "0-1,12-13"}})
    async with controlled(node) as controller:
        await settled(controller)
        assert (mask(node, 24), mask(node, 25)) == (EVERYTHING, "15")
        assert (text(node, latency_path(14)), text(node, governor_path(14))) == ("0", "powersave")


async def test_the_vectors_of_a_passed_through_device_stay_near_it(node: Node) -> None:
    node.host.add_interrupt(30, "vfio-msix[0](0000:81:00.0)", EVERYTHING, numa_node=1)
    async with controlled(node) as controller, connected(node.socket) as client:
        await register(node, client, B, "14-17")
        await settled(controller)
        assert mask(node, 30) == "10-13,18-19"
        await client.result("deregisterCgroup", uuid=B)
        await settled(controller)
        assert mask(node, 30) == EVERYTHING


async def test_low_latency_is_for_the_cpus_that_ask_for_it(node: Node) -> None:
    async with controlled(node) as controller, connected(node.socket) as client:
        await register(node, client, A, "0-1,12-13")
        await settled(controller)
        await register(node, client, B, "14-17")
        assert await missing(client, B, latency="low") == []
        assert text(node, latency_path(0)) == "0"
        assert {text(node, latency_path(cpu)) for cpu in range(14, 18)} == {"2"}
        assert {text(node, governor_path(cpu)) for cpu in range(14, 18)} == {"performance"}
        assert await missing(client, B) == []
        assert {text(node, latency_path(cpu)) for cpu in range(20)} == {"0"}
        assert {text(node, governor_path(cpu)) for cpu in range(20)} == {"powersave"}


async def test_a_frequency_policy_of_several_cpus_follows_all_of_them(node: Node) -> None:
    """CPUs 12 and 13 are A's and 14 is B's; 13 and 14 have one policy here."""
    (node.host.root / governor_path(14)).parent.unlink()
    (node.host.root / governor_path(14)).parent.symlink_to("../cpufreq/policy12")
    async with controlled(node) as controller, connected(node.socket) as client:
        await register(node, client, A, "0-1,12-13")
        assert await missing(client, A, latency="low") == []
        await register(node, client, B, "14-17")
        assert await missing(client, B, latency="low") == []
        recorded = json.loads((node.path / RECORDS).read_text())["settings"]
        policies = [path.split("/")[-2] for path in recorded if path.endswith("scaling_governor")]
        assert policies == ["policy0", "policy12", "policy14", "policy16"]
        await client.result("deregisterCgroup", uuid=B)
        await settled(controller)
        assert (text(node, governor_path(13)), text(node, governor_path(16))) == ("performance", "powersave")
        node.become(A)
        await client.result("deregisterCgroup", uuid=A)
        await settled(controller)
        assert {text(node, governor_path(cpu)) for cpu in range(20)} == {"powersave"}


GPU, OTHER, NVME = "0000:41:00.0", "0000:42:00.0", "0000:01:00.0"


async def test_a_device_of_an_instance_stays_powered_until_no_instance_has_it(node: Node) -> None:
    node.host.add_pci_device(GPU, passthrough=True)
    node.host.add_pci_device(OTHER, passthrough=True, d3cold="0")
    node.host.add_pci_device(NVME, passthrough=False)

    def power() -> list[str]:
        return [text(node, d3cold_path(address)) for address in (GPU, OTHER, NVME)]

    async with controlled(node) as controller, connected(node.socket) as client:
        await register(node, client, A, "0-1,12-13")
        gone = "0000:ff:00.0"
        assert await missing(client, A, devices=[GPU, OTHER, NVME, gone]) == [], "a pod has no say over other devices"
        assert power() == ["0", "0", "1"]
        await register(node, client, B, "14-17")
        assert await missing(client, B, devices=[GPU]) == []
        node.become(A)
        await client.result("deregisterCgroup", uuid=A)
        await settled(controller)
        assert power() == ["0", "0", "1"], "B has it still"
        node.become(B)
        await client.result("deregisterCgroup", uuid=B)
        await settled(controller)
        assert power() == ["1", "0", "1"]


async def test_a_device_whose_power_cannot_be_kept_is_named(node: Node) -> None:
    node.host.add_pci_device(GPU, passthrough=True)
    async with controlled(node), connected(node.socket) as client:
        await register(node, client, B, "14-17")
        node.host.put(f"sys/bus/pci/devices/{GPU}/managed", "")
        [reason] = await missing(client, B, devices=[GPU])
        assert reason == f"cannot write '0' to /{d3cold_path(GPU)}: Input/output error"


async def test_without_a_driver_for_frequencies_the_rest_is_set(node: Node) -> None:
    for cpu in range(20):
        (node.host.root / governor_path(cpu)).parent.unlink()
    async with controlled(node), connected(node.socket) as client:
        await register(node, client, B, "14-17")
        assert await missing(client, B, latency="low") == []
        assert text(node, latency_path(14)) == "2"


@pytest.fixture
def resctrl(node: Node) -> FakeResctrl:
    """Mount resctrl on a machine with an L3 cache for each half of the CPUs."""
    (node.host.root / "sys/devices/system").mkdir(parents=True, exist_ok=True)
    system = node.host.root / "sys/devices/system"
    for path, content in (
        ("cpu/online", EVERYTHING),
        ("cpu/present", EVERYTHING),
        ("node/online", "0-1"),
        *((f"node/node{each}/distance", "10 20") for each in (0, 1)),
        *((f"node/node{each}/meminfo", f"Node {each} MemTotal: 1024 kB") for each in (0, 1)),
        *((f"cpu/cpu{cpu}/cache/index3/level", "3") for cpu in range(20)),
        *((f"cpu/cpu{cpu}/cache/index3/id", str(cpu // 10)) for cpu in range(20)),
        *((f"cpu/cpu{cpu}/cache/index3/shared_cpu_list", "0-9" if cpu < 10 else "10-19") for cpu in range(20)),
    ):
        node.host.put(str(system.relative_to(node.host.root) / path), content)
    assert {cpu.l3 for cpu in read_hardware(node.host.root).cpus} == {0, 1}
    resctrl = FakeResctrl(node.host.root / RESCTRL)
    resctrl.mount(CpuSet(range(20)), caches=2)
    return resctrl


async def test_an_instance_gets_ways_that_all_others_lose(node: Node, resctrl: FakeResctrl) -> None:
    before = resctrl.groups_there()
    async with controlled(node), connected(node.socket) as client:
        await register(node, client, B, "14-17")
        assert await missing(client, B, cache_ways=4, memory_bandwidth=45) == []
        groups = resctrl.groups_there()
        assert groups[f"instance-{B}"] == {"L3": {0: "fff", 1: "f00"}, "MB": {0: "100", 1: "50"}}
        assert groups[""]["L3"] == {0: "fff", 1: "ff"}
        assert resctrl.cpus(f"instance-{B}") == CpuSet.parse("14-17")
        [reason] = await missing(client, B, cache_ways=7)
        assert reason == f"cannot give instance '{B}' 7 ways of the L3 cache: it may have from 1 to 6 of 12"
        assert resctrl.groups_there().keys() == {""}
    async with controlled(node), connected(node.socket) as client:
        await register(node, client, B, "14-17")
        assert await missing(client, B, cache_ways=2) == []
    node.instance(B).remove()
    async with controlled(node) as controller:
        await settled(controller)
        assert resctrl.groups_there() == before
        assert resctrl.cpus("") == CpuSet(range(20))


async def test_memory_bandwidth_in_another_unit_than_percent_is_not_limited(node: Node, resctrl: FakeResctrl) -> None:
    """AMD counts eighths of a GB/s up to 2048: what is meant as half would be a fortieth."""
    resctrl.mount(CpuSet(range(20)), caches=2, bandwidth="2048")
    async with controlled(node), connected(node.socket) as client:
        await register(node, client, B, "14-17")
        [reason] = await missing(client, B, memory_bandwidth=50)
        assert "to 50 percent: resctrl has no percent here, its schemata have up to 2048" in reason
        assert resctrl.groups_there().keys() == {""}
        assert await missing(client, B, cache_ways=4) == []


async def test_a_resctrl_with_ways_for_code_and_for_data_is_named(node: Node, resctrl: FakeResctrl) -> None:
    (resctrl.root / "info/L3").rename(resctrl.root / "info/L3CODE")
    async with controlled(node), connected(node.socket) as client:
        await register(node, client, B, "14-17")
        [reason] = await missing(client, B, cache_ways=4)
        assert reason.endswith("resctrl has separate ones for code and data; mount it without the option cdp")


async def test_without_resctrl_the_answer_names_the_remedy(node: Node) -> None:
    async with controlled(node), connected(node.socket) as client:
        await register(node, client, B, "14-17")
        [reason] = await missing(client, B, cache_ways=4)
        assert "/etc/fstab" in reason


async def test_passes_are_some_time_apart_and_are_shared(node: Node) -> None:
    async with controlled(node, tuned_every=0.2) as controller:
        tuning = controller.tuning
        await tuning.tune()
        begun, earliest = tuning._begun, tuning._turns._rested[""]
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(tuning.tune)
        assert tuning._begun == begun + 1
        assert trio.current_time() >= earliest


async def test_what_the_options_forbid_is_not_touched(node: Node, resctrl: FakeResctrl) -> None:
    before = settings(node)
    off = TuningOptions(interrupts=False, work_queues=False, latency=False, caches=False)
    async with controlled(node, tuning=off) as controller, connected(node.socket) as client:
        await register(node, client, B, "14-17")
        reasons = await missing(client, B, latency="low", cache_ways=2)
        assert [word for word in ("--no-low-latency", "--no-cache-groups") if word in " ".join(reasons)] == [
            "--no-low-latency",
            "--no-cache-groups",
        ]
        await settled(controller)
        assert settings(node) == before
        assert resctrl.groups_there().keys() == {""}


async def test_switched_off_later_it_is_given_back(node: Node) -> None:
    async with controlled(node) as controller, connected(node.socket) as client:
        await register(node, client, B, "14-17")
        await settled(controller)
        assert mask(node, 24) != EVERYTHING
    async with controlled(node, tuning=TuningOptions(interrupts=False)) as controller:
        await settled(controller)
        assert (mask(node, 24), CpuSet.parse_mask(text(node, WORK_QUEUES))) == (
            EVERYTHING,
            CpuSet.parse("0-13,18-19"),
        )


async def test_nothing_is_changed_that_could_not_be_recorded(node: Node) -> None:
    before = settings(node)
    (node.path / f"{RECORDS}.new").mkdir()
    async with controlled(node) as controller, connected(node.socket) as client:
        await register(node, client, B, "14-17")
        await settled(controller)
        assert settings(node) == before
        [reason] = controller.tuning.reasons
        assert str(reason).startswith("the machine's settings stay as they are: cannot write")


async def test_settings_are_given_back_while_no_record_can_be_written(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """The kubelet evicts pods when the disk is full: their CPUs are nobody's then."""
    before = settings(node)
    async with controlled(node) as controller, connected(node.socket) as client:
        await register(node, client, B, "14-17")
        assert await missing(client, B, latency="low") == []
        (node.path / f"{RECORDS}.new").mkdir()
        await client.result("deregisterCgroup", uuid=B)
        await settled(controller)
        assert settings(node) == before
        assert controller.tuning.reasons == ()
        await settled(controller)
        assert caplog.text.count("records of the machine's settings are not up to date") == 1
        (node.path / f"{RECORDS}.new").rmdir()
        await settled(controller)
        assert (settings(node), json.loads((node.path / RECORDS).read_text())["settings"]) == (before, {})


@pytest.mark.parametrize("readable", [True, False])
async def test_a_machine_without_any_of_it_runs_instances(tmp_path: Path, *, readable: bool) -> None:
    node = Node.new(tmp_path)
    if readable:
        (node.host.root / "proc").mkdir(parents=True)
    async with controlled(node) as controller, connected(node.socket) as client:
        await register(node, client, B, "14-17")
        await settled(controller)
        expected = [f"cannot read {node.host.root}: No such file or directory"] * (not readable)
        assert [reason.partition(";")[0] for reason in controller.tuning.reasons] == expected


async def test_a_damaged_file_of_records_is_replaced(node: Node) -> None:
    (node.path / RECORDS).write_text("{")
    async with controlled(node) as controller, connected(node.socket) as client:
        await register(node, client, B, "14-17")
        await settled(controller)
        assert mask(node, 24) == "0-13,18-19"
        records = json.loads((node.path / RECORDS).read_text())["settings"]
        assert records["proc/irq/24/smp_affinity_list"]["before"] == EVERYTHING


async def test_a_record_that_was_never_a_value_is_discarded(node: Node) -> None:
    settings = {
        path: {"before": "no list", "ours": ["0-1"], "owner": owner}
        for path, owner in (("proc/irq/24/smp_affinity_list", "eth0"), (DEFAULT_AFFINITY, ""))
    }
    async with controlled(node) as controller, connected(node.socket) as client:
        boot = controller.host_tuner.procfs.setting("kernel/random/boot_id")
        (node.path / RECORDS).write_text(json.dumps({"boot": boot, "settings": settings}))
        await register(node, client, B, "14-17")
        await settled(controller)
        assert not [reason for reason in controller.tuning.reasons if "stay as they are" in reason]
        assert mask(node, 24) == "0-13,18-19"
        records = json.loads((node.path / RECORDS).read_text())["settings"]
        assert {record["before"] for record in records.values()}.isdisjoint({"no list"})


async def test_the_directory_of_the_records_is_made_for_root_alone(node: Node) -> None:
    async with controlled(node) as controller, connected(node.socket) as client:
        store = node.path / "state" / RECORDS
        controller.host_tuner.store = PurePosixPath(store)
        await register(node, client, B, "14-17")
        await settled(controller)
        assert store.parent.stat().st_mode & 0o777 == 0o700
        assert json.loads(store.read_text())["settings"]


async def test_only_its_own_container_may_tune_an_instance(node: Node) -> None:
    async with controlled(node), connected(node.socket) as client:
        await register(node, client, B, "14-17")
        assert (await client.refusal("tuneInstance", uuid=B, tuning="{}"))["code"] == -32602
        node.become(A)
        request = {"jsonrpc": "2.0", "method": "tuneInstance", "params": {"uuid": B, "tuning": {}}, "id": 1}
        await client.send(json.dumps(request).encode() + b"\n")
        assert json.loads(await client.line())["error"]["data"]["reason"] == "identity"
        request["params"] = {"uuid": A, "tuning": {}}
        await client.send(json.dumps(request).encode() + b"\n")
        assert "register it first" in json.loads(await client.line())["error"]["message"]


@pytest.mark.parametrize("written", [b'{"latency": "lowest"}', b"[" * 2000, b"\xff", b"9" * 3000])
async def test_what_a_pod_writes_into_its_cgroup_is_no_tuning(node: Node, written: bytes) -> None:
    async with controlled(node) as controller, connected(node.socket) as client:
        await register(node, client, B, "14-17")
        os.setxattr(node.instance(B).path, TUNING, written)
        await settled(controller)
        assert text(node, latency_path(14)) == "0"


@attrs.define
class FakeIrqbalance:
    """An irqbalance, as far as its socket goes ("SOCKET API" of irqbalance(1)); it takes effect at once."""

    banned: str = "00000000"
    commands: list[str] = attrs.field(factory=list)

    async def accept(self, listener: trio.SocketListener) -> None:
        while True:
            async with await listener.accept() as connection:
                command = (await connection.receive_some(4096)).decode().rstrip("\0")
                self.commands.append(command)
                if command == "setup":
                    await connection.send_all(f"SLEEP 10 BANNED {self.banned}".encode())
                elif command.startswith("settings cpus "):
                    cpus = command.removeprefix("settings cpus ")
                    self.banned = "0" if cpus == "NULL" else CpuSet.parse(cpus).mask()


IRQBALANCE = 800


def put_irqbalance(node: Node, *, namespace: str = HOST_NAMESPACE, user: int = 0) -> None:
    """Describe a process with the name of irqbalance, whose status can be read if it is in the host's PID *namespace*."""
    node.put_process(IRQBALANCE, "/", inner=IRQBALANCE, namespace=namespace, name="irqbalance")
    status = node.proc / str(IRQBALANCE) / "status"
    if namespace == HOST_NAMESPACE:
        status.write_text(f"Name:\tirqbalance\nUid:\t{user}\t{user}\t{user}\t{user}\n")
    else:
        status.write_text("not to be read")


@contextlib.asynccontextmanager
async def irqbalance(node: Node, pid: int = IRQBALANCE) -> AsyncIterator[FakeIrqbalance]:
    put_irqbalance(node)
    directory = node.proc / str(pid) / "root/run/irqbalance"
    directory.mkdir(parents=True, exist_ok=True)
    found = FakeIrqbalance()
    fd = os.open(directory, os.O_PATH)  # its own path is longer than an address may be
    try:
        with trio.socket.socket(trio.socket.AF_UNIX) as listening:
            await listening.bind(f"/proc/self/fd/{fd}/irqbalance{pid}.sock")
            listening.listen()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(found.accept, trio.SocketListener(listening))
                yield found
                nursery.cancel_scope.cancel()
    finally:
        os.close(fd)


async def test_irqbalance_is_told_and_told_again(node: Node) -> None:
    async with irqbalance(node) as daemon, controlled(node) as controller, connected(node.socket) as client:
        daemon.banned = CpuSet([7]).mask()
        await register(node, client, B, "14-17")
        await settled(controller)
        assert CpuSet.parse_mask(daemon.banned) == CpuSet.parse("7,14-17")
        assert set(daemon.commands) == {"setup", "settings cpus 7,14-17"}
        await client.result("deregisterCgroup", uuid=B)
        await settled(controller)
        assert CpuSet.parse_mask(daemon.banned) == CpuSet([7])


async def test_a_setting_that_cannot_be_read_for_a_while_is_given_back_beside_irqbalance(node: Node) -> None:
    file = node.host.root / "proc/irq/24/smp_affinity_list"
    async with irqbalance(node), controlled(node) as controller, connected(node.socket) as client:
        await register(node, client, B, "14-17")
        await settled(controller)
        content = file.read_text()
        file.unlink()
        file.mkdir()
        await register(node, client, A, "0-1,12-13")
        await settled(controller)
        file.rmdir()
        file.write_text(content)
        for uuid in (A, B):
            node.become(uuid)
            await client.result("deregisterCgroup", uuid=uuid)
        await settled(controller)
        assert mask(node, 24) == EVERYTHING


@pytest.mark.parametrize(("namespace", "user"), [("pid-b", 0), (HOST_NAMESPACE, 1000)])
async def test_a_process_that_only_has_its_name_is_not_asked(node: Node, namespace: str, user: int) -> None:
    async with irqbalance(node) as daemon, controlled(node) as controller, connected(node.socket) as client:
        await settled(controller)
        put_irqbalance(node, namespace=namespace, user=user)
        daemon.commands.clear()
        await register(node, client, B, "14-17")
        await settled(controller)
        assert daemon.commands == []
        assert mask(node, 24) == "0-13,18-19"


async def test_an_irqbalance_that_answers_nonsense_is_named(node: Node) -> None:
    async with irqbalance(node) as daemon, controlled(node) as controller, connected(node.socket) as client:
        daemon.banned = "1,,2"
        await register(node, client, B, "14-17")
        await settled(controller)
        assert "cannot understand irqbalance" in controller.tuning.reasons[1]
        assert mask(node, 24) == "0-13,18-19"


async def test_an_irqbalance_that_cannot_be_reached_is_named(node: Node) -> None:
    put_irqbalance(node)
    async with controlled(node) as controller, connected(node.socket) as client:
        await settled(controller)
        assert controller.tuning.reasons == ()
        await register(node, client, B, "14-17")
        await settled(controller)
        assert len(controller.tuning.reasons) == 2
        assert "IRQBALANCE_BANNED_CPULIST" in controller.tuning.reasons[1]


async def test_float_has_the_shared_pool_all_the_same(node: Node) -> None:
    async with controlled(node), connected(node.socket) as client:
        await register(node, client, B, "14-17")
        assert str(node.float_cgroup.cpus()) == SHARED
