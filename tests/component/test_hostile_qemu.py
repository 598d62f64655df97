"""A QEMU that an attacker controls: in every phase of a run it misbehaves in every way, and the run ends as documented."""

from __future__ import annotations

import itertools
import json
import random
import socket

import attrs
import pytest
import trio

from runner.base.errors import RunnerError, Status, explain
from runner.instance.parts.qemu import GuestEnd
from runner.instance.supervisor import Supervisor
from runner.protocol.qmp import KEPT_EVENTS, Monitor, QmpError
from tests.support.fake_host import FakeHost
from tests.support.soak import SEED, chance, some, times

pytestmark = pytest.mark.soak

STARTING = ("greeting", "qmp_capabilities", "query-cpus-fast", "cont")
RUNNING = ("the guest runs",)
ENDING = ("set-action", "system_powerdown", "quit")
BEHAVIOURS = (
    "exit",  # with status 3
    "abort",
    "hang up",  # close the conversation and live on
    "hang up and ignore SIGTERM",
    "deaf",  # read on, and answer nothing
    "stop reading",
    "garbage",
    "half a line",
    "a line without end",
    "a million brackets",
    "no object",
    "events without end",
    "one event of 3 MiB",
    "a foreign reply",
    "a reply without return",
    "a reply of another type",
    "an error that is none",
    "an error with a forged line",
    "output without end",
    "two greetings",
)
CASES = list(itertools.product((*STARTING, *RUNNING, *ENDING), BEHAVIOURS))

GRACE = 2.0
ENDS_WITHIN = 25.0
"""Seconds for start, grace and kill on a loaded machine; a test that needs them all has found a hang."""


@pytest.mark.parametrize(("phase", "behaviour"), some(CASES, 12))
async def test_a_hostile_qemu_ends_as_documented(fake_host: FakeHost, phase: str, behaviour: str) -> None:
    plan = fake_host.plan(qemu={"hostile": [phase, behaviour]}, grace=GRACE)
    plan = attrs.evolve(plan, start_timeout=1.5)
    before = fake_host.snapshot()

    async def stop(_host: Supervisor) -> None:
        while not fake_host.guest_runs():
            await trio.sleep(0.01)
        while phase == "the guest runs" and not fake_host.records("qemu", "hostile"):
            await trio.sleep(0.01)
        fake_host.stop.ask("SIGTERM")

    with trio.fail_after(ENDS_WITHIN):
        result = await fake_host.run(plan, meanwhile=stop)
    assert fake_host.records("qemu", "hostile"), "it did misbehave"
    status = result.status
    match phase:
        case "greeting" | "qmp_capabilities" | "query-cpus-fast" | "cont":
            assert status in {Status.START_FAILED, Status.STOPPED, Status.MACHINE_DIED}, explain_result(result)
        case "the guest runs":
            assert status in {Status.MACHINE_DIED, Status.STOPPED, Status.FORCED_OFF}, explain_result(result)
        case _:
            assert status in {Status.STOPPED, Status.FORCED_OFF, Status.MACHINE_DIED}, explain_result(result)
    assert explain_result(result).isprintable()
    assert fake_host.faults.sentences == []
    assert fake_host.snapshot() == before


def explain_result(result: GuestEnd | RunnerError) -> str:
    return explain(result) if isinstance(result, RunnerError) else f"{result.status.name} {result.detail}"


def message(source: random.Random, number: str) -> bytes:
    """Return a message of a hostile QEMU, which may answer the command *number*."""
    values: list[object] = [None, True, -1, 1e300, "x\n\x1b", [], {}, [[]], {"class": "x"}, {"class": 1, "desc": {}}]
    keys = ["id", "return", "error", "event", "data", "QMP", "timestamp", "", "\udc80"]
    document = {source.choice(keys): source.choice(values) for _ in range(source.randrange(5))}
    document |= source.choice([{}, {"id": number}, {"id": number, "return": source.choice(values)}, {"event": "RESET"}])
    line = json.dumps(document).encode()
    for _ in range(source.choice([0, 0, 0, 1, 2])):
        place = source.randrange(len(line) + 1)
        line = line[:place] + source.choice([b"\xff", b"\n", b"[" * 2000, b'"', b"\x00", b"}", b""]) + line[place + 1 :]
    return line + b"\r\n"


async def test_messages_of_a_hostile_qemu_are_answers_or_the_one_error() -> None:
    """Whatever it sends, a command returns or raises :exc:`QmpError`, and what is kept is bounded."""
    source = chance()
    sentences: list[str] = []
    for _ in range(times(300)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setblocking(False)
            monitor = Monitor(ours)
            for number in range(1, 40):
                theirs.send(b"".join(message(source, str(number)) for _ in range(source.randrange(1, 6))))
                theirs.send(b'{"return": [], "id": "%d"}\r\n' % number)
                try:
                    with trio.fail_after(60):
                        match number % 4:
                            case 0:
                                await monitor.vcpu_threads()
                            case 1:
                                await monitor.iothreads()
                            case _:
                                await monitor.execute("x")
                except QmpError as error:
                    sentences.append(explain(error))
                    if monitor._failure is not None:
                        break
                assert len(monitor._events) <= KEPT_EVENTS
                assert not monitor._expected
                theirs.recv(1 << 16)
    assert len(sentences) > times(100)
    assert all(sentence.isprintable() for sentence in sentences), SEED
