"""Completions, tested with the shells themselves, and the texts of ``--help``."""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from runner.cli.commands import program_parser
from runner.controller.command_line import command_line


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the subcommands' parsers by name, in their order; empty for a program without any."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


PROGRAM = (sys.executable, "-m", "runner")
COMMANDS = [*commands_of(program_parser())]

BASH = (
    'source "$1"; cd "$2"; complete -p "${3%% *}" >/dev/null || exit 1; COMP_LINE=$3 COMP_POINT=${#3} COMP_TYPE=9; '
    '_python_argcomplete "${3%% *}"; printf "%s\\n" "${COMPREPLY[@]}"'
)
"""Runs the function that the script registers, with the variables that bash sets for it."""
FISH = "source $argv[1]; cd $argv[2]; complete -C $argv[3]; true"
ZSH = r"""
zmodload zsh/zpty
zpty inner zsh -f -i
zpty -w inner "PROMPT= RPS1=; setopt no_beep; source ${(q)1}; cd ${(q)2}"
zpty -w inner 'mark () { echo -E - $'"'"'\0'"'"' }; compprefuncs=(mark); comppostfuncs=(mark exit)
compadd () {
  if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\ * ]]; then builtin compadd "$@"; return; fi
  typeset -a hits
  builtin compadd -A hits "$@"
  print -rl -- $hits
}
bindkey "^I" complete-word
print READ""Y'
zpty -r -m inner seen '*READY*'
zpty -w -n inner "$3"$'\t'
zpty -r -m inner seen $'*\0*\0*'
print -r -- "${${seen#*$'\0'}%$'\0'*}"
"""
"""Types into an interactive zsh, whose ``compadd`` prints what it is given."""


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
        ("instance-runner ", {*COMMANDS}),
        ("instance-runner in", {"inspect"}),
        ("instance-runner run --log-f", {"--log-format"}),
        ("instance-runner run --log-format ", {"text", "json"}),
        ("instance-runner run --log-format j", {"json"}),
        ("instance-runner run --log-format=j", {"json"}),
        ("instance-runner run --http ", set()),
        ("instance-runner run --not-pid1 s", {"spec file.toml"}),
        ("instance-runner plan --svg s", {"spec file.toml"}),
        ("instance-runner ctl ", {*commands_of(commands_of(program_parser())["ctl"])}),
        ("instance-runner ctl disk ", {"list", "attach", "detach", "grow"}),
        ("instance-runner ctl --json disk d", {"detach"}),
        ("instance-runner ctl disk attach s", {"spec file.toml"}),
        ("instance-runner completion f", {"fish"}),
        ("instance-cgroup-controller --met", {"--metrics"}),
        ("instance-cgroup-controller --log-format t", {"text"}),
    ],
)
def test_a_shell_completes(shell: str, typed: str, offered: set[str], tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "spec file.toml").touch()
    script = tmp_path / "script"
    script.write_text(output_of("completion", shell))
    text = tmp_path / "test"
    text.write_text({"bash": BASH, "zsh": ZSH, "fish": FISH}[shell])
    plain = {"bash": "--norc", "zsh": "-f", "fish": "--no-config"}[shell]
    programs = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    argv = (shell, plain, text, script, here, typed)
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=programs)
    found = {line.partition("\t")[0].replace("\\ ", " ").strip() for line in done.stdout.splitlines()} - {""}
    assert ({word.removeprefix("--log-format=") for word in found}, done.stderr) == (offered, "")


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


@pytest.mark.parametrize("parser", [*parsers(program_parser()), command_line()], ids=lambda parser: str(parser.prog))
def test_every_help_fits_a_terminal_and_breaks_no_path(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    lines = parser.format_help().splitlines()
    assert [line for line in lines if len(line) > 120 or re.search(r"\w-$", line)] == []


@pytest.mark.parametrize("parser", [*parsers(program_parser()), command_line()], ids=lambda parser: str(parser.prog))
def test_every_help_says_what_the_command_does_and_no_option_has_the_default_none(
    parser: argparse.ArgumentParser,
) -> None:
    first, _, rest = (parser.description or "").partition(" ")
    assert first not in {"", "In", "Its", "QMP", "The", "What", "Without"}, "a verb is first"
    assert rest
    assert "None" not in parser.format_help()
