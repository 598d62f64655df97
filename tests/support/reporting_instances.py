"""Any number of instances on a fake node that report to its controller, each by a connection of its own."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import trio

from runner.protocol.instance_metrics import FAMILIES, Samples, reported
from tests.support.fake_node import Client, Node


def put_instances(node: Node, count: int) -> list[str]:
    """Make the cgroups of *count* instances, as a controller before has left them, and return the uids of their pods."""
    uids = [str(uuid.UUID(int=number)) for number in range(1, count + 1)]
    for uid in uids:
        for group in (node.domain(uid), node.instance(uid)):
            group.create()
        node.instance(uid).populate(True)
    return uids


def full_report(number: int) -> list[tuple[str, Samples]]:
    """Return samples of every family, as many as a report has."""

    def samples(name: str) -> Samples:
        labels = FAMILIES[name].labels
        if any(each.text for each in labels):
            return [(tuple(f"{each.name}-{number}" if each.text else each.values[0] for each in labels), 1)]
        if any(each.is_part for each in labels):
            return [((0,) * len(labels), 123456.789 + number)]
        return [((value,), number) for value in labels[0].values] if labels else [((), 1234567)]

    return [(name, samples(name)) for name in FAMILIES]


async def answer_reports(path: Path, uids: Sequence[str]) -> None:
    """Report for each of *uids* at *path* until cancelled, whenever a report is wanted."""
    requests = [
        json.dumps(
            {
                "jsonrpc": "2.0",
                "method": "reportInstance",
                "params": {"uuid": uid, "report": reported(full_report(number))},
                "id": 1,
            },
            separators=(",", ":"),
        ).encode()
        + b"\n"
        for number, uid in enumerate(uids)
    ]
    with ExitStack() as held:

        async def report(request: bytes) -> None:
            connection = held.enter_context(trio.socket.socket(trio.socket.AF_UNIX))
            while True:
                try:
                    await connection.connect(str(path))
                except BlockingIOError:
                    await trio.sleep(0.005)
                else:
                    break
            client = Client(connection)
            while True:
                await client.send(request)
                assert json.loads(await client.line())["result"] == {}

        async with trio.open_nursery() as nursery:
            for request in requests:
                nursery.start_soon(report, request)
