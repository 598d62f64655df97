"""Checks of the programs that an instance starts: each is run with a harmless option. Not on a node, whose programs are not the image's."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import PurePosixPath

import trio

from runner.base.judgement import Judgement
from runner.check.checks import OFF_NODE, TIMEOUT, Check, CheckContext, check
from runner.facts.host import Virtiofsd, format_version
from runner.facts.packages import install
from runner.host.facts_reader import SYSTEM_DIRECTORIES, ask_qemu_version, find_virtiofsd, version_output
from runner.host.trial_guest import try_guest
from runner.kernel.child_processes import Command, Processes
from runner.kernel.files import find_program
from runner.kernel.small_files import read_os_release
from runner.plan.argv.qemu import SANDBOX

QEMU = "qemu-system-x86_64"
NEEDED = {QEMU, "sleep"}
"""Programs without which no instance can start."""


def judge_program(
    check: Check, name: str, path: PurePosixPath | None, version: str, error: str | None, remedy: str
) -> Judgement:
    """Judge the program *name*: its *path*, ``None`` if it was not found, and the *error* that makes it unusable."""
    bad = check.error if name in NEEDED else check.warning
    if path is None:
        return bad(f"cannot find the program {name!r} in PATH", remedy)
    return check.ok(f"{path} {version}".rstrip()) if error is None else bad(f"{path}: {error}", remedy)


@check("qemu", "it runs the virtual machine", *OFF_NODE)
async def qemu(context: CheckContext) -> Sequence[Judgement]:
    """Ask QEMU for its version, and for the parts that some builds lack: the sandbox of every guest, the device of every share."""
    path, version, error = find_program(QEMU, SYSTEM_DIRECTORIES), "", None
    if path is not None:
        version, error = await ask_qemu_version(context.processes, path)
        error = error or await _missing_parts(context.processes, path)
    return [judge_program(qemu, QEMU, path, version, error, install(QEMU, read_os_release()))]


async def _missing_parts(processes: Processes, path: PurePosixPath) -> str | None:
    """Return the error if the QEMU at *path* lacks a part that instances use; ``None`` if it has all."""
    parts = ("-sandbox", SANDBOX, "-machine", "none", "-device", "vhost-user-fs-pci,help")
    status: int | None = None
    async with processes.daemon(Command("qemu-parts", (str(path), *parts), level=logging.DEBUG), 0) as process:
        with trio.move_on_after(TIMEOUT):
            status = await process.wait()
    if status is None:
        return f"has not answered for {TIMEOUT:g} s"
    return f"{process.how_it_ended()} when asked for {' '.join(parts)}" if status else None


@check("dnsmasq", "each [[network]] has one: it gives the guest its address", *OFF_NODE)
async def dnsmasq(context: CheckContext) -> Sequence[Judgement]:
    """Ask dnsmasq for its version and its compile-time options."""
    path, output, error = find_program("dnsmasq", SYSTEM_DIRECTORIES), "", ""
    if path is not None:
        output, error = await version_output(context.processes, "dnsmasq", path)
    return [judge_dnsmasq(path, output, error or None, install("dnsmasq", read_os_release()))]


def judge_dnsmasq(path: PurePosixPath | None, output: str, error: str | None, remedy: str) -> Judgement:
    """Judge the dnsmasq at *path* by the *output* of ``--version``."""
    if re.search(r"\bno-DHCP\b", output):
        error = "it was built without DHCP"
    version = re.search(r"version (\S+)", output)
    return judge_program(dnsmasq, "dnsmasq", path, version[1] if version else "", error, remedy)


@check("virtiofsd", "each [[share]] is served by one", *OFF_NODE)
async def virtiofsd(context: CheckContext) -> Sequence[Judgement]:
    """Find the virtiofsd that a share would get."""
    program, reason = await find_virtiofsd(context.processes)
    return [judge_virtiofsd(program, reason, install("virtiofsd", read_os_release()))]


def judge_virtiofsd(program: Virtiofsd | None, reason: str, remedy: str) -> Judgement:
    """Judge the virtiofsd that a share would get; *reason* is the reason if there is none."""
    if program is None:
        return virtiofsd.warning(f"cannot use virtiofsd: {reason}", remedy)
    kind = "in Rust" if program.rust else "in C"
    return virtiofsd.ok(
        f"{program.path} {format_version(program.version)} ({kind}){'' if program.read_only else '; it cannot share read-only'}"
    )


@check("sleep", "it is the anchor that keeps the pod's cgroup from being removed", *OFF_NODE)
def sleep(_: CheckContext) -> Sequence[Judgement]:
    """Find the program."""
    path = find_program("sleep", SYSTEM_DIRECTORIES)
    return [judge_program(sleep, "sleep", path, "", None, install("sleep", read_os_release()))]


@check("trial-guest", "where the accelerator runs no guest, an instance starts and its guest stays silent")
async def trial_guest(context: CheckContext) -> Sequence[Judgement]:
    """Boot the trial guest with the accelerator of an instance, if the command line requests it."""
    if not context.host.try_guest:
        return []
    program = find_program(QEMU, SYSTEM_DIRECTORIES)
    if program is None:
        return [trial_guest.unknown("no QEMU was found to boot it with")]
    usable = context.asked.accel != "tcg" and context.kvm.error is None and context.kvm.trial is None
    trial = await try_guest(context.processes, program, "kvm" if usable else "tcg", context.asked.model)
    return [judge_trial_guest(trial.accel, trial.error, trial.seconds)]


def judge_trial_guest(accel: str, error: str | None, seconds: float) -> Judgement:
    """Judge the result of a trial guest: *error* is the reason if it did not run to its end, ``None`` if it did within *seconds*."""
    if error is None:
        return trial_guest.ok(f"a trial guest ran under {accel.upper()} to its end in {seconds:.1f} s")
    if accel == "kvm":
        return trial_guest.error(
            f"KVM runs no guest here: {error}", 'set cpu.accel = "tcg", or "tried" for KVM where it works'
        )
    return trial_guest.error(f"QEMU emulates no guest here: {error}", "install the packages of QEMU and SeaBIOS again")
