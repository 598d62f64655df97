"""The probes and metrics of an instance over real HTTP: its state, its misplaced threads, its restarted children."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from importlib import metadata
from ipaddress import IPv4Interface
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import trio
from prometheus_client.metrics_core import Metric

from runner.base.cpuset import CpuSet
from runner.facts.host import PodName
from runner.facts.network import Interface
from runner.host.facts_reader import read_pod_name
from runner.instance.init import figures_shown
from runner.instance.parts.qemu import GuestEnd
from runner.instance.supervisor import Supervisor, open_supervisor
from runner.instance.watch.figures import READ_AGAIN
from runner.instance.watch.metrics import _disks
from runner.plan.instance import InstancePlan
from runner.plan.network_plan import BridgedPlan
from runner.protocol.qmp import Monitor
from tests.support.exposition import families, figures
from tests.support.fake_host import FakeHost

Ask = Callable[[str], Awaitable[tuple[int, str]]]
TARGET_LABELS = {"instance", "job", "namespace", "pod", "node", "container", "endpoint", "service", "prometheus"}
"""Labels that Prometheus and its operator give to a target; they rename ours of the same names to ``exported_…``."""
POD = PodName("web-1", "prod", 'a "node"', "3ceda12c-3ee9-40fa-9f42-61428fe654a6")


async def wait_for(condition: Callable[[], object]) -> None:
    with trio.fail_after(60):
        while not condition():
            await trio.sleep(0.005)


async def ask(port: int, target: str) -> tuple[int, str]:
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head, _, body = b"".join([data async for data in stream]).decode().partition("\r\n\r\n")
    return int(head.split()[1]), body


def labels_of(page: str) -> set[str]:
    """Return the names of all labels on a page of metrics."""
    samples = (sample for metric in families(page, "instance_runner_").values() for sample in metric.samples)
    return {name for sample in samples for name in sample.labels}


async def run_and_inspect(
    fake_host: FakeHost, plan: InstancePlan, inspect: Callable[[Supervisor, Ask], Awaitable[None]]
) -> GuestEnd:
    """Run *plan* with its HTTP server, call *inspect* while it runs, and return how the run ended."""
    seen = []

    async def meanwhile(host: Supervisor) -> None:
        port = int(fake_host.logged().rpartition("port=")[2].split()[0])
        await inspect(host, lambda target: ask(port, target))
        seen.append(True)

    with trio.fail_after(40):
        ended = await fake_host.run(plan, meanwhile=meanwhile, http=("127.0.0.1", 0))
    assert seen, "the run was over before the inspection"
    assert isinstance(ended, GuestEnd), ended
    return ended


async def a_vcpu_starts_a_thread(host: Supervisor, get: Ask, cpu: CpuSet) -> None:
    """Without cgroups no task moves misplaced threads: the probe itself moves the thread back."""
    [qemu] = [process for process in host.processes if process.role == "qemu"]
    before = os.sched_getaffinity(qemu.pid)
    os.sched_setaffinity(qemu.pid, set(cpu))  # a thread that a vCPU thread starts begins with its mask
    await trio.sleep(READ_AGAIN)
    assert await get("/readyz") == (200, "ok\n")
    assert os.sched_getaffinity(qemu.pid) == before
    assert host.counters.swept == 1


def has_foreign_time(metric: Metric) -> None:
    """Check the metric of other tasks' time on the one vCPU's CPU."""
    assert [sample.value >= 0 for sample in metric.samples] == [True] * Path("/proc/schedstat").exists()


async def test_probes_and_metrics_while_the_guest_runs(fake_host: FakeHost) -> None:
    plan = attrs.evolve(fake_host.plan(grace=4, qemu={"at_powerdown": None}), pod=POD)
    ready = Path(plan.state_directory) / "ready"
    cpu, other = plan.placement.cpus, set(os.sched_getaffinity(0)) - set(plan.placement.cpus)

    async def inspect(host: Supervisor, get: Ask) -> None:
        await wait_for(ready.exists)
        assert await get("/readyz") == (200, "ok\n")
        assert await get("/healthz") == (200, "running\n")
        assert (await get("/else"))[0] == 404
        status, text = await get("/metrics")
        assert status == 200
        found, vcpu = figures(text), f'{{cpu="{cpu}",vcpu="0"}}'
        assert (
            f'info{{name="instance",node_name="a "node"",placement="{plan.placement.backend}",pod_name="web-1",pod_namespace="prod"}}'
            in found
        )
        assert (found["placement_holds"], found["placement_strays"]) == (1, 0)
        assert [found[f'child_restarts_total{{role="{role}"}}'] for role in ("anchor", "dnsmasq")] == [0, 0]
        assert (found['guest_state{state="running"}'], found['guest_state{state="starting"}']) == (1, 0)
        assert not labels_of(text) & TARGET_LABELS
        types = {name: metric.type for name, metric in families(text, "instance_runner_").items()}
        assert {types[name] for name in ("info", "guest_state", "guest_uptime_seconds", "placement_holds")} == {"gauge"}
        assert {types[name] for name in ("console_bytes", "child_restarts", "vcpu_steal_seconds", "swept")} == {
            "counter"
        }
        assert (found["console_bytes_total"], found[f"vcpu_cpu_seconds_total{vcpu}"] > 0) == (
            len("guest: runs\r\n"),
            True,
        )
        for name in ("run_delay_seconds", "steal_seconds", "involuntary_switches"):
            assert found[f"vcpu_{name}_total{vcpu}"] >= 0
        has_foreign_time(families(text, "instance_runner_")["vcpu_foreign_seconds"])
        await moved_away(host, get)
        await a_vcpu_starts_a_thread(host, get, cpu)
        await a_child_dies(host, get)
        fake_host.stop.ask("test")
        await wait_for(lambda: not ready.exists())
        assert await get("/readyz") == (503, "stopping\n")
        assert figures((await get("/metrics"))[1])['guest_state{state="stopping"}'] == 1

    async def moved_away(host: Supervisor, get: Ask) -> None:
        [qemu] = [process for process in host.processes if process.role == "qemu"]
        [tid] = [each for each in host.procfs.threads(qemu.pid) if each.cpus == cpu]
        os.sched_setaffinity(tid.tid, other)
        await trio.sleep(READ_AGAIN)  # the last reading is shown for so long
        status, text = await get("/readyz")
        assert (status, "vcpu 0" in text) == (503, True)
        assert figures((await get("/metrics"))[1])["placement_holds"] == 0
        os.sched_setaffinity(tid.tid, set(cpu))
        await trio.sleep(READ_AGAIN)
        assert await get("/readyz") == (200, "ok\n")

    async def a_child_dies(host: Supervisor, get: Ask) -> None:
        anchor = next(process for process in host.processes if process.role == "anchor")
        anchor.send_signal(signal.SIGKILL)
        await wait_for(lambda: host.counters.restarts["anchor"])
        assert figures((await get("/metrics"))[1])['child_restarts_total{role="anchor"}'] == 1

    before = fake_host.snapshot()
    ended = await run_and_inspect(fake_host, plan, inspect)
    assert ended.status == 13, ended
    assert fake_host.snapshot() == before


async def test_the_same_metrics_answer_all_who_ask_at_a_time(fake_host: FakeHost) -> None:
    """Any host of the network may ask for them without end; each reading takes some milliseconds of PID 1."""
    fake_host.timeouts = attrs.evolve(fake_host.timeouts, metrics_kept=60)
    texts = list[str]()

    async def inspect(host: Supervisor, get: Ask) -> None:
        await wait_for(lambda: host.guest_state.phase == "running")

        async def scrape() -> None:
            texts.append((await get("/metrics"))[1])

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(scrape)
        await scrape()
        assert await get("/healthz") == (200, "running\n")
        fake_host.stop.ask("test")

    await run_and_inspect(fake_host, fake_host.plan(), inspect)
    assert "guest_uptime_seconds" in texts[0]
    assert set(texts) == {texts[0]}, "the uptime is another at each reading"


async def test_metrics_say_what_the_guest_has_received_and_why_it_is_not_ready(fake_host: FakeHost) -> None:
    """The fake QEMU reads no packet from the tap: those that the kernel sends to it are dropped when its queue is full."""
    plan = fake_host.plan("[[network]]\n", grace=4)
    [network] = plan.networks
    assert isinstance(network, BridgedPlan)

    async def inspect(_host: Supervisor, get: Ask) -> None:
        await wait_for(fake_host.guest_runs)
        tap = next(
            line
            for line in Path("/proc/self/net/dev").read_text().splitlines()
            if line.strip().startswith(f"{network.tap}:")
        )
        fields = [int(field) for field in tap.partition(":")[2].split()]
        found = figures((await get("/metrics"))[1])
        for way, at in (("receive", 8), ("transmit", 0)):
            for unit, field in (("bytes", at), ("packets", at + 1), ("dropped", at + 3)):
                assert found[f'network_{way}_{unit}_total{{network="0"}}'] >= fields[field]
        unready = {name: value for name, value in found.items() if name.startswith("guest_unready")}
        assert {*unready} >= {f'guest_unready{{reason="{reason}"}}' for reason in ("panicked", "silent", "awaits_sign")}
        assert not any(unready.values())
        assert f'build_info{{digest="",version="{metadata.version("instance-runner")}"}}' in found
        assert found["emulated"] == (plan.machine.accel == "tcg")
        fake_host.stop.ask("test")

    ended = await run_and_inspect(fake_host, plan, inspect)
    assert ended.status == 0, ended


async def test_files_of_a_killed_runner_are_no_sign_of_a_running_guest(fake_host: FakeHost) -> None:
    plan = fake_host.plan(qemu={"before_greeting": "hang"}, grace=1)
    directory = Path(plan.state_directory)
    directory.mkdir(mode=0o700)
    for name in ("ready", "receipt.json"):
        (directory / name).touch()

    async def inspect(_host: Supervisor, get: Ask) -> None:
        await wait_for(lambda: fake_host.records("qemu", "start"))
        assert not (directory / "ready").exists()
        assert not (directory / "receipt.json").exists()
        assert await get("/readyz") == (503, "starting\n")
        assert await get("/healthz") == (200, "starting\n")
        assert "placement_holds" not in figures((await get("/metrics"))[1])
        fake_host.stop.ask("test")

    ended = await run_and_inspect(fake_host, plan, inspect)
    assert ended.status == 0, ended


async def test_a_guest_with_the_pods_address_is_warned_of(fake_host: FakeHost) -> None:
    address, gateway = IPv4Interface("10.0.0.7/24"), IPv4Interface("169.254.9.1/30")
    pod = Interface("eth0", "0a:58:0a:f4:01:05", 1450, (address,))
    network = BridgedPlan(pod.mac, 1450, 1, "br0", "tap0", gateway, address, None, (), (), (), pod, None, vhost=False)
    plan = fake_host.plan()
    plan = attrs.evolve(plan, machine=attrs.evolve(plan.machine, networks=(network,)))
    async with open_supervisor(fake_host.stop, fake_host.faults) as host, figures_shown(host, plan, ("127.0.0.1", 0)):
        assert (
            "the guest has the address of eth0: connections to it reach the guest, and not --http" in fake_host.logged()
        )


async def test_the_log_and_the_receipt_name_the_pod(fake_host: FakeHost) -> None:
    plan = attrs.evolve(fake_host.plan(), pod=POD)

    async def inspect(_host: Supervisor, _get: Ask) -> None:
        await wait_for(fake_host.guest_runs)
        receipt = json.loads((Path(plan.state_directory) / "receipt.json").read_text())
        assert receipt["instance"] == "instance"
        assert receipt["pod"] == {"name": "web-1", "namespace": "prod", "node": 'a "node"', "uid": POD.pod_uid}
        fake_host.stop.ask("test")

    await run_and_inspect(fake_host, plan, inspect)


def test_the_pods_name_comes_from_the_downward_api() -> None:
    environment = {"POD_NAME": "a", "POD_NAMESPACE": "b", "NODE_NAME": "c", "POD_UID": "d", "HOSTNAME": "x"}
    assert read_pod_name(environment) == PodName("a", "b", "c", "d")
    assert read_pod_name({"HOSTNAME": "x"}) == PodName()


async def test_the_disks_are_the_plans_and_their_counters_are_numbers() -> None:
    """QEMU may be the guest's: each name would be new series, and no number but a whole one can be added up."""
    plan: Any = SimpleNamespace(machine=SimpleNamespace(disks=[SimpleNamespace(name="disk0")], slots=2))
    supervisor: Any = SimpleNamespace(guest_state=SimpleNamespace(qemu_silent=""))
    ours, theirs = socket.socketpair()

    async def asked(*replies: object) -> list[dict[str, Any]]:
        found = []
        machine: Any = SimpleNamespace(monitor=monitor)
        for reply in replies:
            number = str(len(numbers) + 1)
            numbers.append(number)
            theirs.sendall(json.dumps({"return": reply, "id": number}).encode() + b"\n")
            samples = await _disks(supervisor, plan, machine)
            found.append({name: dict(values) for name, values in samples})
        return found

    def stats(name: str, **values: object) -> dict[str, object]:
        return {"qdev": f"/machine/peripheral/{name}/virtio-backend", "stats": values}

    with ours, theirs:
        monitor, numbers = Monitor(ours), list[str]()
        [good] = await asked([stats("disk0", rd_bytes=7), stats("made up", rd_bytes=8), {"stats": {}}])
        bad: tuple[object, ...] = (True, "7", -1, 1e400, 10**400, [], None)
        nothing = await asked(3, [7], *([stats("disk0", rd_bytes=value)] for value in bad))
    assert (good["disk_read_bytes_total"], good["disk_writes_total"]) == ({("disk0",): 7}, {})
    assert nothing == [{}] * (2 + len(bad))


async def test_metrics_queue_no_commands_for_a_qemu_that_does_not_answer() -> None:
    plan: Any = SimpleNamespace(machine=SimpleNamespace(disks=[], slots=0))
    supervisor: Any = SimpleNamespace(guest_state=SimpleNamespace(qemu_silent=""))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        machine: Any = SimpleNamespace(monitor=Monitor(ours))
        for _ in range(3):
            assert await _disks(supervisor, plan, machine) == []
            await trio.sleep(0.1)  # QEMU has owed the reply for longer than a scrape waits
        assert theirs.recv(1 << 16).count(b"\n") == 1
