"""What reports cost the controller: the page of many instances, and the time until all are back after its restart.

    python -m tests.benchmarks.bench_reports [INSTANCES]

The cgroups are fake; sockets, the identification of each peer and the page are real. The instances run in the same process, so that
each figure has their part of the time too.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import trio

from runner.controller.serve.report_methods import LIMITS, report_methods
from runner.controller.serve.socket_file import listening
from runner.kernel.peers import Peers
from runner.protocol.unix_server import UnixServer
from tests.support.fake_node import Controller, Node, controlled
from tests.support.reporting_instances import answer_reports, put_instances

ONE_PEER = attrs.evolve(LIMITS, connections_per_peer=LIMITS.connections, in_flight=LIMITS.connections)
"""All of these instances are one process."""


@asynccontextmanager
async def reporting(node: Node, controller: Controller, uids: list[str]) -> AsyncIterator[None]:
    """Hold a socket that identifies its peers in the machine's /proc, and instances that report to it."""
    callers = attrs.evolve(controller.callers, peers=Peers(Path("/proc")))
    methods = report_methods(callers, controller.loop, controller.reports)
    with listening(node.path / "real.sock") as listener:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(UnixServer(methods, ONE_PEER).accept, listener)
            nursery.start_soon(answer_reports, node.path / "real.sock", uids)
            yield
            nursery.cancel_scope.cancel()


async def measure(count: int, directory: Path) -> None:
    node = Node.new(directory)
    uids = put_instances(node, count)
    for life in ("first start", "restart"):
        async with controlled(node, trusting=True, limit=600) as controller:
            begun = time.monotonic()
            async with reporting(node, controller, uids):
                while len(controller.reports.latest(uids)) < count:
                    await trio.sleep(0.01)
                print(f"{life}: {count} first reports in {time.monotonic() - begun:.2f} s")
                for _ in range(3):
                    pages, cpu, begun = controller.endpoints(), time.process_time(), time.monotonic()
                    text = (await pages.respond("/metrics")).text
                    have = text.count("\ninstance_runner_guest_ready{")
                    print(
                        f"  a page of {len(text) >> 10} KiB, {text.count(chr(10))} lines, {have} instances: "
                        f"{time.monotonic() - begun:.2f} s, {time.process_time() - cpu:.2f} s of CPU"
                    )
                    await trio.sleep(1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        trio.run(measure, int(*sys.argv[1:] or ["300"]), Path(directory))
