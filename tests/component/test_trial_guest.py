"""The trial guest: with this machine's QEMU, and with QEMUs that hang, end otherwise or are not there."""

from __future__ import annotations

import subprocess
from pathlib import Path, PurePosixPath

import attrs
import pytest
import trio
from trio.testing import MockClock

from runner.base.judgement import Judgement
from runner.check.checker import check_host
from runner.facts.host import HostFacts, Kvm
from runner.facts.roots import Roots
from runner.host import trial_guest
from runner.host.facts_reader import read_host_facts
from runner.host.trial_guest import ENDS_WITHIN, TRIAL_GUEST, GuestTrial, try_guest
from runner.kernel.character_devices import probe_kvm, try_kvm
from runner.kernel.child_processes import open_processes
from runner.kernel.files import find_program
from runner.spec.instance import parse_instance
from tests.component.test_check import here

SOURCE = Path(trial_guest.__file__).with_suffix(".S")


def test_its_bytes_are_its_source(tmp_path: Path) -> None:
    commands = [line.strip("#\n ") for line in SOURCE.read_text().splitlines() if line.startswith("#   as ")]
    [command] = commands
    subprocess.run(["sh", "-c", command.replace(SOURCE.name, str(SOURCE))], check=True, cwd=tmp_path)
    assert (tmp_path / "trial_guest").read_bytes() == TRIAL_GUEST


def fake(tmp_path: Path, script: str) -> PurePosixPath:
    """Write a QEMU that records its arguments in the file ``calls``, and then does *script*."""
    program = tmp_path / "bin" / "qemu-system-x86_64"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\n{script}\n')
    program.chmod(0o755)
    return PurePosixPath(program)


def calls(tmp_path: Path) -> list[str]:
    path = tmp_path / "calls"
    return path.read_text().splitlines() if path.exists() else []


def trials(tmp_path: Path) -> list[str]:
    """Return the calls that start a guest: a plan asks the program for its version besides."""
    return [call for call in calls(tmp_path) if call != "--version"]


async def test_it_runs_to_its_end_with_a_real_qemu() -> None:
    qemu = find_program("qemu-system-x86_64")
    assert qemu is not None
    async with open_processes() as processes:
        trial = await try_guest(processes, qemu, "tcg", None)
    assert trial.error is None, trial
    assert 0 < trial.seconds < ENDS_WITHIN


async def test_one_that_stays_silent_is_given_up_and_killed(tmp_path: Path, mock_clock: MockClock) -> None:
    mock_clock.rate = 1
    qemu = fake(tmp_path, "trap '' TERM; exec sleep 1000")
    async with open_processes() as processes, trio.open_nursery() as nursery:
        trials: list[GuestTrial] = []

        async def attempt() -> None:
            trials.append(await try_guest(processes, qemu, "kvm", None))

        nursery.start_soon(attempt)
        while not calls(tmp_path):
            await trio.sleep(0.005)
        mock_clock.jump(ENDS_WITHIN)
    [trial] = trials
    assert trial.error == "a trial guest has not run to its end within 10 s"
    assert trial.seconds >= ENDS_WITHIN
    assert "-accel kvm -cpu host" in calls(tmp_path)[0]


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("echo 'kvm_buf_set_msrs: Assertion failed'; kill -ABRT $$", "QEMU was killed by SIGABRT, saying 'kvm_buf_set"),
        ("exit 0", "QEMU exited with status 0"),
    ],
)
async def test_one_that_ends_otherwise_has_failed(tmp_path: Path, script: str, error: str) -> None:
    async with open_processes() as processes:
        trial = await try_guest(processes, fake(tmp_path, script), "tcg", "EPYC")
    assert trial.error is not None
    assert trial.error.startswith(error)
    assert "-accel tcg -cpu EPYC" in calls(tmp_path)[0]


async def test_a_qemu_that_cannot_be_started_has_failed(tmp_path: Path) -> None:
    async with open_processes() as processes:
        trial = await try_guest(processes, PurePosixPath(tmp_path / "none"), "tcg", None)
    assert trial.error is not None
    assert trial.error.startswith("cannot start trial-guest")


async def finding(tmp_path: Path, accel: str, *, asked: bool = True) -> Judgement | None:
    host = attrs.evolve(here(Path("/")), state_directory=PurePosixPath(tmp_path / "state"), try_guest=asked)
    text = f'[cpu]\naccel = "{accel}"\nplacement = "affinity"\n[boot]\nfirmware = "{tmp_path}/firmware"\n'
    report = await check_host(host, ("spec.toml", text.encode()))
    return next((each for each in report.judgements if each.subject == "trial-guest"), None)


async def test_check_boots_it_where_that_is_asked_for_and_says_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = await finding(tmp_path, "tcg")
    assert good is not None
    assert good.level.value == "ok"
    assert good.found.startswith("a trial guest ran under TCG to its end in ")
    assert await finding(tmp_path, "tcg", asked=False) is None
    path = fake(tmp_path, '[ "$1" = --version ] && echo QEMU emulator version 9.9; exit 0')
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/sbin:/usr/bin:/sbin:/bin")
    bad = await finding(tmp_path, "tcg")
    assert bad is not None
    assert (bad.level.value, bad.found) == ("error", "QEMU emulates no guest here: QEMU exited with status 0")
    assert bad.remedy == "install the packages of QEMU and SeaBIOS again"


async def facts_of(tmp_path: Path, roots: Roots, accel: str) -> HostFacts:
    spec = parse_instance("spec.toml", f'[cpu]\naccel = "{accel}"\n[boot]\nkernel = "/k"\n'.encode(), {})
    async with open_processes() as processes:
        return await read_host_facts(spec, processes, roots, PurePosixPath(tmp_path / "state"), None)


async def test_only_an_accelerator_that_is_to_be_tried_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where KVM makes virtual machines; elsewhere nothing is tried, whatever is asked for."""
    roots = Roots()
    works = probe_kvm(roots.dev / "kvm").error is None and try_kvm(roots.dev / "kvm") is None
    path = fake(tmp_path, "exit 7")
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/sbin:/usr/bin:/sbin:/bin")
    for accel in ("auto", "kvm", "tcg"):
        assert (await facts_of(tmp_path, roots, accel)).kvm.guest is None
    assert trials(tmp_path) == []
    tried = await facts_of(tmp_path, roots, "tried")
    assert tried.kvm.guest == ("QEMU exited with status 7" if works else None)
    assert len(trials(tmp_path)) == works
    assert isinstance(tried.kvm, Kvm)
