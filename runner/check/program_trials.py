"""Runs the programs that an instance starts, each with a harmless question, and judges what they answer."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial

import attrs
import trio

from runner.base.errors import HostError, explain
from runner.check import programs
from runner.check.finding import Check, Finding
from runner.check.programs import Program
from runner.host.discover import SYSTEM_DIRECTORIES, find_virtiofsd
from runner.kernel.files import find_program
from runner.kernel.processes import Command, Processes
from runner.kernel.small_files import read_os_release
from runner.plan.argv.qemu import SANDBOX

TIMEOUT = 20.0
"""Seconds that a program may take to answer: a busy machine is slow, not broken."""


async def try_programs(processes: Processes) -> list[Finding]:
    """Return the findings about all programs, which run at the same time."""
    findings: list[Finding] = []
    os_release = read_os_release()

    async def judged(check: Check, name: str, trial: Callable[[], Awaitable[Program]]) -> None:
        findings.append(programs.judge_program(check, name, await trial(), os_release))

    async def virtiofsd() -> None:
        try:
            found, reason = await find_virtiofsd(processes)
        except HostError as error:
            found, reason = None, explain(error)
        findings.append(programs.judge_virtiofsd(found, reason, os_release))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(judged, programs.QEMU, "qemu-system-x86_64", partial(_qemu, processes))
        nursery.start_soon(judged, programs.DNSMASQ, "dnsmasq", partial(_dnsmasq, processes))
        nursery.start_soon(virtiofsd)
    sleep = find_program("sleep", SYSTEM_DIRECTORIES)
    findings.append(programs.judge_program(programs.SLEEP, "sleep", Program(sleep), os_release))
    return sorted(findings, key=lambda finding: finding.check)


async def _qemu(processes: Processes) -> Program:
    qemu = await _run(processes, "qemu-system-x86_64", "--version")
    reason = qemu.error
    if qemu.path is not None and reason is None:
        reason = programs.qemu_error(qemu.output)
    if qemu.path is not None and reason is None:
        # Some builds lack one of these: the sandbox of every guest, the device of every share.
        parts = ("-sandbox", SANDBOX, "-machine", "none", "-device", "vhost-user-fs-pci,help")
        reason = (await _run(processes, "qemu-system-x86_64", *parts)).error
    return attrs.evolve(qemu, error=reason)


async def _dnsmasq(processes: Processes) -> Program:
    dnsmasq = await _run(processes, "dnsmasq", "--version")
    return attrs.evolve(dnsmasq, error=dnsmasq.error or programs.dnsmasq_error(dnsmasq.output))


async def _run(processes: Processes, name: str, *arguments: str) -> Program:
    """Find the program *name* and run it with *arguments*; return its first two lines, or why it did not end well."""
    path = find_program(name, SYSTEM_DIRECTORIES)
    if path is None:
        return Program(None)
    command = Command(name, (str(path), *arguments), level=logging.DEBUG)
    status: int | None = None
    try:
        async with processes.daemon(command, 0) as process:
            with trio.move_on_after(TIMEOUT):
                status = await process.wait()
    except HostError as error:
        return Program(path, error=explain(error))
    if status is None:
        return Program(path, error=f"has not answered for {TIMEOUT:g} s")
    if status != 0:
        return Program(path, error=f"{process.how_it_ended()} when asked for {' '.join(arguments)}")
    return Program(path, " ".join(list(process.last_lines)[:2]))
