"""Completions and manual pages, tested with the shells and groff themselves."""

from __future__ import annotations

import argparse
import functools
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.cli.commands import program_parser
from runner.cli.parsers import commands_of
from runner.controller.main import command_line
from runner.spec.instance import reference

PROGRAM = (sys.executable, "-m", "runner")
COMMANDS = [*commands_of(program_parser())]
PAGES = ("instance-runner.1", "instance-runner-spec.5", "instance-cgroup-controller.8")

BASH = 'source {script}; cd {here}; COMP_WORDS=({words}); COMP_CWORD={last}; {function}; printf "%s\\n" "${{COMPREPLY[@]}}"'
ZSH = (
    "source {script}; [[ $_comps[{program}] == *{function}* ]] || exit 1; cd {here}; "
    "setopt ksharrays; COMP_WORDS=({words}); COMP_CWORD={last}; compgen -F {function}"
)
FISH = "source {script}; cd {here}; complete -C {line}; true"


@functools.cache
def output_of(*argv: str) -> str:
    return subprocess.run([*PROGRAM, *argv], check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.fixture(params=["bash", "zsh", "fish"])
def shell(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if shutil.which(name) is None:
        pytest.skip(f"{name} is missing: install the package {name}")
    return name


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["instance-runner", ""], {*COMMANDS}),
        (["instance-runner", "in"], {"inspect"}),
        (["instance-runner", "run", "--log-f"], {"--log-format"}),
        (["instance-runner", "run", "--log-format", ""], {"text", "json"}),
        (["instance-runner", "run", "--log-format", "j"], {"json"}),
        (["instance-runner", "run", "--http", ""], set()),
        (["instance-runner", "run", "--not-pid1", "s"], {"spec file.toml"}),
        (["instance-runner", "plan", "--svg", "s"], {"spec file.toml"}),
        (["instance-runner", "completion", "f"], {"fish"}),
        (["instance-cgroup-controller", "--met"], {"--metrics"}),
        (["instance-cgroup-controller", "--log-format", "t"], {"text"}),
    ],
)
def test_a_shell_completes(shell: str, typed: list[str], offered: set[str], tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "spec file.toml").touch()
    script = tmp_path / "script"
    script.write_text(output_of("completion", shell))
    text = {"bash": BASH, "zsh": ZSH, "fish": FISH}[shell].format(
        script=script,
        here=here,
        words=" ".join(shlex.quote(word) for word in typed),
        last=len(typed) - 1,
        line=shlex.quote(" ".join(typed)),
        program=typed[0],
        function="_" + typed[0].replace("-", "_"),
    )
    plain = {"bash": ("--norc",), "zsh": ("-f",), "fish": ("--no-config",)}[shell]
    done = subprocess.run([shell, *plain, "-c", text], capture_output=True, text=True, check=True)
    found = {line.partition("\t")[0].replace("\\ ", " ") for line in done.stdout.splitlines() if line}
    if shell == "zsh":  # zsh itself filters the completions by their beginning
        found = {word for word in found if word.startswith(typed[-1])}
    assert (found - {"-h", "--help", "--version"}, done.stderr) == (offered, "")


def test_a_value_after_an_equals_sign_is_completed(tmp_path: Path) -> None:
    """Bash splits it into three words."""
    script = tmp_path / "script"
    script.write_text(output_of("completion", "bash"))
    words = "instance-runner run --log-format = j"
    text = BASH.format(script=script, here=tmp_path, words=words, last=4, function="_instance_runner")
    assert subprocess.run(["bash", "-c", text], check=True, stdout=subprocess.PIPE, text=True).stdout == "json\n"


@pytest.mark.parametrize("page", PAGES)
def test_man_accepts_a_manual_page(page: str) -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is missing: install the package groff-base")
    argv = ["groff", "-man", "-Tutf8", "-ww", "-P-cbou"]
    done = subprocess.run(argv, input=output_of("manual", page), capture_output=True, text=True, check=True)
    assert done.stderr == ""
    shown = " ".join(done.stdout.replace("\u2010\n", "").split())
    name, section = page.split(".")
    assert f"{name.upper()}({section})" in done.stdout.splitlines()[0]
    keys = {name.rpartition(".")[2] for name, *_ in reference()}
    wanted = {
        "1": {*(f"instance-runner {command}" for command in COMMANDS), "--log-format {text,json}", "13 forced_off"},
        "5": keys | {"[[disk]]", "default: 30"},
        "8": {"--metrics ADDRESS:PORT", "(default: /sys/fs/cgroup/stelia)"},
    }
    assert [word for word in sorted(wanted[section]) if word not in shown] == []


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser, and those of all commands below it."""
    yield parser
    for each in commands_of(parser).values():
        yield from parsers(each)


@pytest.mark.parametrize("parser", [*parsers(program_parser()), command_line()], ids=lambda parser: str(parser.prog))
def test_every_help_ends_in_examples(parser: argparse.ArgumentParser) -> None:
    last = parser.format_help().rstrip().rpartition("\n\n")[2]
    assert last.startswith(("example: ", "examples:\n"))
    assert parser.prog in last
