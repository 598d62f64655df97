"""One instance from start to end, with fake programs: the order of its steps, and every way it can end."""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

import attrs
import pytest
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, PlacementError, RunnerError, Status, explain
from runner.base.events import InstanceEvent
from runner.base.rate_limit import MOST_PEERS
from runner.instance.parts.qemu import GuestEnd
from runner.instance.parts.state_directory import RECEIPT
from runner.instance.supervisor import Supervisor
from runner.kernel import files
from runner.placement.backends import AffinityPlacement
from runner.protocol.logs import text_lines
from tests.support.fake_host import FakeHost

CPUS = len(os.sched_getaffinity(0))


async def wait_for(condition: Callable[[], object]) -> None:
    with trio.fail_after(60):
        while not condition():
            await trio.sleep(0.005)


def ended(result: GuestEnd | RunnerError) -> GuestEnd:
    assert isinstance(result, GuestEnd), explain(result)
    return result


def refused(result: GuestEnd | RunnerError) -> str:
    assert isinstance(result, RunnerError), result
    return explain(result)


def is_left_out(record: logging.LogRecord) -> TypeGuard[LeftOut]:
    """Tell whether *record* has a kind, a peer and the number of messages that were left out."""
    return record.name == "runner.base.rate_limit"


class LeftOut(logging.LogRecord):
    args: tuple[str, object, int]


async def test_a_whole_run_from_start_to_end(fake_host: FakeHost) -> None:
    """The steps are start, receipt, cont, SIGTERM, power button and end; nothing is left."""
    plan = fake_host.plan(fake_host.share() + "[[network]]\n")
    before = fake_host.snapshot()
    receipt: dict[str, Any] = {}

    async def stop_when_it_runs(host: Supervisor) -> None:
        await wait_for(fake_host.guest_runs)
        receipt.update(json.loads((fake_host.root / "state" / "receipt.json").read_text()))
        assert {process.role for process in host.processes} == {"anchor", "dnsmasq", "virtiofsd", "qemu"}
        fake_host.stop.ask("SIGTERM")

    assert ended(await fake_host.run(plan, meanwhile=stop_when_it_runs)) == GuestEnd(
        Status.STOPPED, "the guest powered down when asked to"
    )
    assert fake_host.faults.sentences == []
    assert fake_host.commands() == [
        "qmp_capabilities",
        "query-cpus-fast",
        "cont",
        "set-action",
        "system_powerdown",
        "quit",
    ]
    assert "guest: runs" in (fake_host.root / "state" / "console.log").read_text()
    roles = [thread["role"] for thread in receipt["threads"]]
    assert roles[0] == "runner"
    assert {"anchor", "dnsmasq", "virtiofsd", "emulator", "vcpu"} <= set(roles)
    [vcpu] = [thread for thread in receipt["threads"] if thread["role"] == "vcpu"]
    assert vcpu["allowed_cpus"] == str(plan.placement.cpus)
    others = [CpuSet.parse(thread["allowed_cpus"]) for thread in receipt["threads"] if thread["role"] != "vcpu"]
    assert CPUS == 1 or all(cpus.isdisjoint(plan.placement.cpus) for cpus in others)
    assert fake_host.snapshot() == before


async def test_a_start_publishes_one_receipt_which_has_the_guarantee(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[dict[str, Any]] = []
    publish = files.publish

    def recorded(path: PurePosixPath, content: bytes) -> None:
        if path.name == RECEIPT:
            published.append(json.loads(content))
        publish(path, content)

    monkeypatch.setattr(files, "publish", recorded)
    ended(await fake_host.run(fake_host.plan(qemu={"at_cont": "shutdown"})))
    assert [each["guarantee_reason"] for each in published] == ["placement 'affinity' has no cgroups"]


async def test_children_start_with_nothing_inherited_but_their_descriptors(fake_host: FakeHost) -> None:
    """No signal is blocked in a child, it has only the descriptors passed to it, and it starts on the CPUs of float."""
    plan = fake_host.plan(fake_host.share(), qemu={"at_cont": "shutdown"})
    signal.pthread_sigmask(signal.SIG_BLOCK, ())
    ended(await fake_host.run(plan))
    [qemu] = fake_host.records("qemu", "start")
    assert qemu["mask"] == []
    named = {int(word.rpartition("fd=")[2].split(",")[0]) for word in qemu["argv"] if "fd=" in word}
    named |= {
        int(word.rpartition("/")[2].split(",")[0])
        for word in " ".join(qemu["argv"]).replace(",", " ").split()
        if "/proc/self/fd/" in word
    }
    assert set(qemu["fds"]) == {0, 1, 2} | named
    assert isinstance(plan.placement, AffinityPlacement)
    assert qemu["cpus"] == list(plan.placement.float_cpus)
    for daemon in ("virtiofsd", "sleep"):
        assert {str(record["mask"]) for record in fake_host.records(daemon, "start")} == {"[]"}


@pytest.mark.parametrize(
    ("at_cont", "status", "detail"),
    [
        ("shutdown", Status.GUEST_SHUTDOWN, "the guest shut itself down"),
        ("panic", Status.GUEST_PANICKED, "the guest's kernel panicked"),
        ("hang", Status.GUEST_HUNG, "the guest hung: it stopped feeding its watchdog"),
        ("exit", Status.MACHINE_DIED, "QEMU exited with status 3"),
        ("abort", Status.MACHINE_DIED, "QEMU was killed by SIGABRT"),
        ("hang up", Status.MACHINE_DIED, "QEMU can no longer be controlled: cannot talk to QEMU: it hung up"),
        ("garbage", Status.MACHINE_DIED, "QEMU can no longer be controlled: cannot understand QEMU: it sent"),
    ],
)
async def test_each_end_has_its_status(fake_host: FakeHost, at_cont: str, status: Status, detail: str) -> None:
    plan = fake_host.plan(fake_host.share(), qemu={"at_cont": at_cont})
    before = fake_host.snapshot()
    result = ended(await fake_host.run(plan))
    assert (result.status, result.detail[: len(detail)]) == (status, detail)
    assert fake_host.faults.sentences == []
    assert fake_host.snapshot() == before


async def test_a_guest_can_neither_flood_the_log_nor_forge_a_line_of_it(
    fake_host: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    plan = fake_host.plan(qemu={"at_cont": "storm"})
    assert ended(await fake_host.run(plan)).status is Status.GUEST_SHUTDOWN
    # The table of the start alone has several lines.
    lines = [text_lines(record).decode() for record in caplog.records if record.msg != InstanceEvent.THREADS_PLACED]
    assert all(line.endswith("\n") and line[:-1].isprintable() for line in lines)
    for words, most in [("was reset", 1), ("was not fed", 1), ("the guest agent", 2), ("has failed to", MOST_PEERS)]:
        assert 1 <= sum(words in line and "left out" not in line for line in lines) <= most, words
    left = {str(record.args[0]): record.args[2] for record in caplog.records if is_left_out(record)}
    assert left["guest_reset"] == left["guest_watchdog_expired"] == 499
    assert left["guest_agent_connected"] == left["guest_agent_disconnected"] == 249
    counts = [record.args[2] for record in caplog.records if is_left_out(record) and record.args[0] == "disk write"]
    assert sum(counts) + sum("has failed to" in line for line in lines) == 500


async def test_a_reboot_ends_the_instance_only_when_asked(fake_host: FakeHost) -> None:
    plan = fake_host.plan(qemu={"at_cont": "reset"})
    exiting = attrs.evolve(plan, machine=attrs.evolve(plan.machine, on_reboot="exit"))
    assert ended(await fake_host.run(exiting)).status is Status.GUEST_RESET

    async def stop_later(_host: Supervisor) -> None:
        await wait_for(lambda: fake_host.commands().count("cont") == 2)
        fake_host.stop.ask("test")

    assert ended(await fake_host.run(plan, meanwhile=stop_later)).status is Status.STOPPED


@pytest.mark.parametrize(
    ("at_powerdown", "status"),
    [
        ("shutdown", Status.STOPPED),
        ("reset", Status.STOPPED),
        ("panic", Status.GUEST_PANICKED),
        ("exit", Status.MACHINE_DIED),
        (None, Status.FORCED_OFF),
        ("no reply", Status.FORCED_OFF),
    ],
)
async def test_power_down_ends_the_guest_in_every_case(
    fake_host: FakeHost, at_powerdown: str | None, status: Status
) -> None:
    plan = fake_host.plan(qemu={"at_powerdown": at_powerdown}, grace=4)

    async def stop(_host: Supervisor) -> None:
        await wait_for(fake_host.guest_runs)
        fake_host.stop.ask("test")
        fake_host.stop.ask("again")

    before = fake_host.snapshot()
    assert ended(await fake_host.run(plan, meanwhile=stop)).status is status
    if at_powerdown is None:
        assert fake_host.commands().count("system_powerdown") > 1, "pressed every second, for 3.6 s"
    assert fake_host.faults.sentences == []
    assert fake_host.snapshot() == before


@pytest.mark.parametrize(
    ("agent", "pressed", "logged"),
    [
        ("answers", False, "the guest agent is asked to shut the guest down"),
        ("refuses", True, "the guest agent refuses to shut the guest down: not today"),
        ("lazy", True, "the guest agent does nothing; pressing the power button"),
        ("deaf", True, "the guest agent does nothing; pressing the power button"),
        ("garbage", True, "the guest agent does nothing; pressing the power button"),
        ("old", True, "the guest agent does nothing; pressing the power button"),
        ("flood", True, "cannot understand the guest agent: it sent a line of more than"),
        (None, True, "asked to stop"),
    ],
)
async def test_the_agent_is_asked_before_the_power_button(
    fake_host: FakeHost, agent: str | None, *, pressed: bool, logged: str
) -> None:
    """An agent that answers shuts down a guest that ignores its button; any other agent costs a bounded time."""
    plan = fake_host.plan(qemu={"agent": agent, "at_powerdown": "shutdown" if pressed else None}, grace=4)
    before = fake_host.snapshot()

    async def stop(_host: Supervisor) -> None:
        await wait_for(
            lambda: fake_host.guest_runs() and (agent is None or "the guest agent is there" in fake_host.logged())
        )
        fake_host.stop.ask("test")

    assert ended(await fake_host.run(plan, meanwhile=stop)).status is Status.STOPPED, (
        "within the guest's share of the grace"
    )
    assert logged in fake_host.logged()
    assert ("is asked to shut the guest down" in fake_host.logged()) is (agent in {"answers", "refuses", "lazy"})
    assert ("system_powerdown" in fake_host.commands()) is pressed
    if agent == "answers":
        synchronise, shut_down = fake_host.records("qemu", "agent")
        assert synchronise["command"] == "guest-sync-delimited"
        assert (shut_down["command"], shut_down["arguments"]) == ("guest-shutdown", {"mode": "powerdown"})
    assert fake_host.faults.sentences == []
    assert fake_host.snapshot() == before


@pytest.mark.parametrize(("at_quit", "at_sigterm"), [(None, "exit"), (None, None), ("exit", None)])
async def test_qemu_is_killed_if_it_does_not_quit(
    fake_host: FakeHost, at_quit: str | None, at_sigterm: str | None
) -> None:
    plan = fake_host.plan(qemu={"at_cont": "shutdown", "at_quit": at_quit, "at_sigterm": at_sigterm}, grace=1)
    before = fake_host.snapshot()
    with trio.fail_after(60):
        assert ended(await fake_host.run(plan)).status is Status.GUEST_SHUTDOWN
    assert fake_host.faults.sentences == []
    assert fake_host.snapshot() == before


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_qemu_stopped_or_killed_from_outside(fake_host: FakeHost, number: int) -> None:
    plan = fake_host.plan(grace=1)

    async def interfere(host: Supervisor) -> None:
        await wait_for(fake_host.guest_runs)
        [qemu] = [process for process in host.processes if process.role == "qemu"]
        qemu.send_signal(number)
        if number == signal.SIGSTOP:
            fake_host.stop.ask("test")

    expected = Status.FORCED_OFF if number == signal.SIGSTOP else Status.MACHINE_DIED
    with trio.fail_after(60):
        assert ended(await fake_host.run(plan, meanwhile=interfere)).status is expected
    assert fake_host.faults.sentences == []


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        (
            {"before_greeting": "exit"},
            "cannot start QEMU: it exited with status 7, saying 'fake-qemu: something is wrong with the fake'",
        ),
        *(
            (
                {"before_greeting": "exit", "says": says},
                (
                    f"cannot start QEMU: it exited with status 7, saying {says!r}; KVM runs no guest here: set cpu.accel to "
                    '"tried", which emulates the guest then, or to "tcg"'
                ),
            )
            for says in (
                "qemu: ../../target/i386/kvm/kvm.c:3183: kvm_buf_set_msrs: Assertion 'ret == nmsrs' failed.",
                "qemu: failed to initialize kvm: Operation not permitted",
                "qemu: -accel kvm: invalid accelerator kvm",
                "qemu: kvm_init_vcpu: kvm_get_vcpu failed (0): Invalid argument",
            )
        ),
        ({"before_greeting": "hang"}, "cannot start QEMU: it has sent nothing on QMP for 2 s"),
        ({"before_greeting": "garbage"}, "cannot start QEMU: cannot understand QEMU: it sent b'SSH-2.0-OpenSSH"),
        ({"before_greeting": "half a line"}, "cannot start QEMU: it exited with status 0"),
        ({"minor": 1}, "cannot use this QEMU: QEMU 7.1.0 is older than 7.2"),
        ({"before_greeting": "long line"}, "cannot start QEMU: cannot understand QEMU: it sent a line of more than"),
        ({"vcpus": 3}, "cannot pin the vCPUs: QEMU has 3 vCPU threads for 1 CPUs"),
        ({"vcpus": 0}, "cannot pin the vCPUs: QEMU has 0 vCPU threads for 1 CPUs"),
        ({"tid": "gone"}, "cannot pin thread 4000000 for vCPU 0: it is not a thread of QEMU"),
        ({"tid": "the runner's"}, f"cannot pin thread {os.getpid()} for vCPU 0: it is not a thread of QEMU"),
    ],
)
async def test_a_start_that_fails_says_why_and_is_reversed(
    fake_host: FakeHost, behaviour: dict[str, object], sentence: str
) -> None:
    plan = attrs.evolve(
        fake_host.plan(fake_host.share(), qemu=behaviour, grace=1),
        start_timeout=2 if "hang" in behaviour.values() else 20,
    )
    before, mask = fake_host.snapshot(), os.sched_getaffinity(0)
    assert refused(await fake_host.run(plan))[: len(sentence)] == sentence
    assert "cont" not in fake_host.commands()
    assert (fake_host.snapshot(), os.sched_getaffinity(0)) == (before, mask)


async def test_unexpected_qmp_messages_change_nothing(fake_host: FakeHost) -> None:
    assert (
        ended(await fake_host.run(fake_host.plan(qemu={"noise": True, "at_cont": "shutdown"}))).status
        is Status.GUEST_SHUTDOWN
    )


@pytest.mark.skipif(CPUS < 2, reason="needs two CPUs")
async def test_two_vcpus_on_one_thread_are_refused(fake_host: FakeHost) -> None:
    plan = fake_host.plan("[cpu]\ncount = 2\n", qemu={"tid": "same"})
    assert "cannot pin the vCPUs: QEMU has 2 vCPU threads" in refused(await fake_host.run(plan))


async def test_a_thread_in_the_wrong_place_is_a_failed_start(fake_host: FakeHost) -> None:
    """The receipt is checked: here another child may run on the vCPU's CPU just before."""
    plan = fake_host.plan(fake_host.share())
    if plan.placement.shared:
        pytest.skip("needs two CPUs: everything shares the only one")

    async def move_onto_the_vcpus_cpu(host: Supervisor) -> None:
        await wait_for(lambda: "query-cpus-fast" in fake_host.commands() or fake_host.records("virtiofsd", "start"))
        [daemon] = [process for process in host.processes if process.role == "virtiofsd"]
        os.sched_setaffinity(daemon.pid, set(plan.placement.cpus))

    result = await fake_host.run(plan, meanwhile=move_onto_the_vcpus_cpu)
    assert isinstance(result, PlacementError), result
    assert "virtiofsd (thread" in explain(result)
    assert "cont" not in fake_host.commands()


async def test_a_stop_request_while_qemu_starts(fake_host: FakeHost) -> None:
    plan = fake_host.plan(fake_host.share(), qemu={"before_greeting": "hang"}, grace=1)

    async def stop(_host: Supervisor) -> None:
        await wait_for(lambda: fake_host.records("qemu", "start"))
        fake_host.stop.ask("SIGTERM")

    before = fake_host.snapshot()
    with trio.fail_after(60):
        assert ended(await fake_host.run(plan, meanwhile=stop)) == GuestEnd(
            Status.STOPPED, "asked to stop before the guest ran"
        )
    assert fake_host.snapshot() == before


@pytest.mark.parametrize("command", ["query-cpus-fast", "cont"])
@pytest.mark.parametrize("asked", [True, False])
async def test_qemu_hangs_in_the_middle_of_the_start(fake_host: FakeHost, command: str, asked: bool) -> None:  # noqa: FBT001
    plan = attrs.evolve(
        fake_host.plan(fake_host.share(), qemu={"deaf_to": command}, grace=1), start_timeout=20 if asked else 2
    )

    async def stop(_host: Supervisor) -> None:
        await wait_for(lambda: command in fake_host.commands())
        if asked:
            fake_host.stop.ask("SIGTERM")

    before = fake_host.snapshot()
    with trio.fail_after(60):
        result = await fake_host.run(plan, meanwhile=stop)
    if asked:
        assert ended(result).status is Status.STOPPED
    else:
        assert refused(result) == "cannot start QEMU: it has sent nothing on QMP for 2 s"
    assert fake_host.snapshot() == before


async def test_a_stop_request_before_the_start(fake_host: FakeHost) -> None:
    fake_host.stop.ask("SIGTERM")
    assert ended(await fake_host.run(fake_host.plan())).status is Status.STOPPED
    assert "cont" not in fake_host.commands()


async def test_a_guest_does_not_run_without_its_virtiofsd(fake_host: FakeHost) -> None:
    """One that ends before the guest runs is a failed start, and is named."""
    plan = fake_host.plan(fake_host.share())
    virtiofsd = fake_host.root / "bin" / "virtiofsd"
    virtiofsd.write_text("#!/bin/sh\necho no such share; exit 3\n")
    before = fake_host.snapshot()
    result = await fake_host.run(plan)
    assert refused(result) == "cannot let the guest run: virtiofsd exited with status 3, saying 'no such share'"
    assert "cont" not in fake_host.commands()
    assert fake_host.faults.sentences == []
    assert fake_host.snapshot() == before


async def test_the_death_of_virtiofsd_ends_the_instance(fake_host: FakeHost) -> None:
    plan = fake_host.plan(fake_host.share(), grace=2)

    async def kill(host: Supervisor) -> None:
        await wait_for(fake_host.guest_runs)
        for process in host.processes:
            if process.role == "virtiofsd":
                process.send_signal(signal.SIGKILL)

    before = fake_host.snapshot()
    result = ended(await fake_host.run(plan, meanwhile=kill))
    assert result.status is Status.SERVICE_DIED
    assert result.detail.startswith("virtiofsd was killed by SIG")
    assert "system_powerdown" in fake_host.commands(), "the guest is asked to power down first"
    assert fake_host.faults.sentences == []
    assert fake_host.snapshot() == before


@pytest.mark.parametrize("role", ["anchor", "dnsmasq"])
async def test_dnsmasq_and_the_anchor_are_restarted(fake_host: FakeHost, role: str) -> None:
    """It is killed six times in a row; the guest keeps running, and there are as many children as before."""
    plan = fake_host.plan("[[network]]\n")
    deaths = 6 if role == "anchor" else 2
    spare = 1 if role == "anchor" else 0

    async def kill(host: Supervisor) -> None:
        await wait_for(fake_host.guest_runs)
        fake = "sleep" if role == "anchor" else role
        for count in range(1, deaths + 1):
            await wait_for(partial(started, fake, count + spare))
            process = next(process for process in host.processes if process.role == role)
            process.send_signal(signal.SIGKILL)
            await process.wait()
        await wait_for(partial(started, fake, deaths + spare + 1))
        fake_host.stop.ask("test")

    def started(fake: str, times: int) -> bool:
        return len(fake_host.records(fake, "start")) == times

    before = fake_host.snapshot()
    assert ended(await fake_host.run(plan, meanwhile=kill)).status is Status.STOPPED
    assert fake_host.faults.sentences == []
    assert fake_host.snapshot() == before


async def test_a_dnsmasq_that_never_came_up_is_a_failed_start(fake_host: FakeHost) -> None:
    """Its first start is part of the instance's: a guest without an address must not be called ready."""
    refuses = "dnsmasq: bad command line options: dhcp-option too long"
    plan = fake_host.plan("[[network]]\n", daemon={"dnsmasq": {"refuses": refuses}})
    before = fake_host.snapshot()
    result = await fake_host.run(plan)
    assert isinstance(result, HostError)
    assert str(result) == f"cannot start dnsmasq: it exited with status 1, saying {refuses!r}"
    assert fake_host.records("qemu", "start") == []
    assert len(fake_host.records("dnsmasq", "start")) == 1
    assert not (fake_host.root / "state" / "ready").exists()
    assert fake_host.faults.sentences == []
    assert fake_host.snapshot() == before


async def test_a_stop_is_heard_while_dnsmasq_comes_up(fake_host: FakeHost) -> None:
    plan = fake_host.plan("[[network]]\n", daemon={"dnsmasq": {"silent": True}})

    async def stop(_: Supervisor) -> None:
        await wait_for(lambda: bool(fake_host.records("dnsmasq", "start")))
        fake_host.stop.ask("test")

    assert ended(await fake_host.run(plan, meanwhile=stop)).status is Status.STOPPED
    assert fake_host.faults.sentences == []


async def test_a_crash_loop_costs_little_and_ends_with_the_instance(fake_host: FakeHost) -> None:
    """A dnsmasq dies at every start: the guest runs, the pauses grow, and no process is left."""
    plan = fake_host.plan("[[network]]\n", daemon={"dnsmasq": {"dies_after": 0.001}})

    async def stop_later(_host: Supervisor) -> None:
        await wait_for(lambda: len(fake_host.records("dnsmasq", "start")) >= 4)
        fake_host.stop.ask("test")

    before = fake_host.snapshot()
    started = trio.current_time()
    assert ended(await fake_host.run(plan, meanwhile=stop_later)).status is Status.STOPPED
    assert trio.current_time() - started > 0.1 + 0.2 + 0.4, "pauses of 0.1, 0.2, 0.4 s lie between the first four"
    assert fake_host.faults.sentences == []
    assert fake_host.snapshot() == before


async def test_a_daemon_that_ignores_sigterm_is_killed(fake_host: FakeHost) -> None:
    plan = fake_host.plan(
        fake_host.share(), qemu={"at_cont": "shutdown"}, daemon={"virtiofsd": {"ignores_sigterm": True}}
    )
    before = fake_host.snapshot()
    with trio.fail_after(60):
        ended(await fake_host.run(plan))
    assert fake_host.snapshot() == before


async def test_a_grandchild_that_keeps_the_output_open(fake_host: FakeHost) -> None:
    """QEMU's end is seen by its status, not by the end of its output, and we reap the orphan."""
    plan = fake_host.plan(qemu={"daemonize": True, "at_cont": "shutdown"})
    result: list[GuestEnd | RunnerError] = []
    before = fake_host.snapshot()
    with trio.fail_after(60):
        try:
            result.append(await fake_host.run(plan))
        finally:
            for line in set(fake_host.snapshot().processes) - set(before.processes):
                os.kill(int(line.split()[0]), signal.SIGKILL)
                os.waitpid(int(line.split()[0]), 0)  # noqa: ASYNC222 - it is dead
    assert ended(result[0]).status is Status.GUEST_SHUTDOWN


@pytest.mark.parametrize("missing", ["qemu", "virtiofsd", "dnsmasq", "sleep"])
async def test_a_program_that_cannot_be_started(fake_host: FakeHost, missing: str) -> None:
    plan = fake_host.plan(fake_host.share() + "[[network]]\n")
    program: Path = fake_host.root / "bin" / missing
    program.chmod(0o644)
    before = fake_host.snapshot()
    role = "anchor" if missing == "sleep" else missing
    assert refused(await fake_host.run(plan)) == f"cannot start {role} ({str(program)!r}): Permission denied"
    assert fake_host.snapshot() == before


async def test_the_state_directory_cannot_be_made(fake_host: FakeHost) -> None:
    plan = fake_host.plan()
    (fake_host.root / "state").write_text("a file in its place")
    assert "cannot make the directory" in refused(await fake_host.run(plan))
    assert fake_host.records("sleep", "start") == []


async def test_the_console_goes_to_a_file_and_the_state_directory_is_removed(fake_host: FakeHost) -> None:
    log = fake_host.root / "elsewhere"
    plan = fake_host.plan(f'[console]\nlog = "{log}"\nstdout = false\n', qemu={"at_cont": "shutdown"})
    ended(await fake_host.run(plan))
    assert log.read_text() == "guest: runs\n"
    assert not (fake_host.root / "state").exists()


async def test_a_console_log_that_is_an_unread_fifo_is_refused(fake_host: FakeHost) -> None:
    fifo = fake_host.root / "fifo"
    os.mkfifo(fifo)
    plan = fake_host.plan(f'[console]\nlog = "{fifo}"\n')
    with trio.fail_after(60):
        assert f"cannot write '{fifo}': No such device or address" in refused(await fake_host.run(plan))


async def test_a_state_directory_that_others_may_write_is_refused(fake_host: FakeHost) -> None:
    state = fake_host.root / "state"
    state.mkdir()
    state.chmod(0o1777)
    assert "others may write there" in refused(await fake_host.run(fake_host.plan()))
    state.chmod(0o777)
    (state / "foreign").touch()
    assert "others may write there" in refused(await fake_host.run(fake_host.plan()))
    assert stat.S_IMODE(state.stat().st_mode) == 0o777


@pytest.mark.parametrize("mode", [0o777, 0o2777])
async def test_an_empty_state_directory_open_to_all_is_used_and_its_mode_restricted(
    fake_host: FakeHost, mode: int
) -> None:
    """An emptyDir volume of Kubernetes has these modes, without and with an fsGroup."""
    state = fake_host.root / "state"
    state.mkdir()
    state.chmod(mode)
    log = state / "console.log"
    ended(await fake_host.run(fake_host.plan(f'[console]\nlog = "{log}"\n', qemu={"at_cont": "shutdown"})))
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert log.read_text() == "guest: runs\n"


async def test_a_failed_release_is_recorded_and_the_rest_released(fake_host: FakeHost) -> None:
    plan = fake_host.plan(fake_host.share())

    async def interfere(_host: Supervisor) -> None:
        await wait_for(fake_host.guest_runs)
        (fake_host.root / "state" / "receipt.json").unlink()
        fake_host.stop.ask("test")

    before = fake_host.snapshot()
    assert ended(await fake_host.run(plan, meanwhile=interfere)).status is Status.STOPPED
    assert fake_host.faults.sentences == [
        f"could not remove the receipt: cannot remove '{fake_host.root}/state/receipt.json': No such file or directory"
    ]
    assert fake_host.snapshot() == before


async def test_a_full_disk_for_the_console_does_not_end_the_instance(fake_host: FakeHost) -> None:
    plan = fake_host.plan('[console]\nlog = "/dev/full"\n', qemu={"at_cont": "shutdown"})
    assert ended(await fake_host.run(plan)).status is Status.GUEST_SHUTDOWN


async def test_sockets_that_cannot_be_removed_are_recorded(fake_host: FakeHost) -> None:
    state = fake_host.root / "state"

    async def interfere(_host: Supervisor) -> None:
        await wait_for(fake_host.guest_runs)
        for name in (
            "console.sock",
            "control.sock",
            "qmp.sock",
        ):  # a file system that turns read-only refuses in the same place
            (state / name).unlink()
            (state / name).mkdir()
        fake_host.stop.ask("test")

    assert ended(await fake_host.run(fake_host.plan(), meanwhile=interfere)).status is Status.STOPPED
    assert fake_host.faults.sentences == [
        "could not remove the socket 'qmp.sock': something else has taken its place, and is left",
        "could not remove the socket 'control.sock': something else has taken its place, and is left",
        "could not remove the socket 'console.sock': something else has taken its place, and is left",
    ]


@pytest.mark.parametrize("role", ["anchor", "dnsmasq"])
async def test_the_receipt_is_true_after_a_restart(fake_host: FakeHost, role: str) -> None:
    def published() -> set[int]:
        receipt = json.loads((fake_host.root / "state" / "receipt.json").read_text())
        return {thread["tid"] for thread in receipt["threads"] if thread["role"] == role}

    async def kill(host: Supervisor) -> None:
        await wait_for(fake_host.guest_runs)
        process = next(process for process in host.processes if process.role == role)
        process.send_signal(signal.SIGKILL)
        await process.wait()
        try:
            await wait_for(lambda: published() == {each.pid for each in host.processes if each.role == role})
        finally:
            fake_host.stop.ask("test")

    plan = fake_host.plan("[[network]]\n")
    before = fake_host.snapshot()
    assert ended(await fake_host.run(plan, meanwhile=kill)).status is Status.STOPPED
    assert fake_host.snapshot() == before
