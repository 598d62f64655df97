"""The command ``completion``: prints the script that makes a shell complete both programs, made from their parsers.

The bash script also serves zsh, by zsh's own ``bashcompinit``. A metavar such as FILE says that a value is a file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from runner.cli.commands import program_parser
from runner.cli.parsers import about, actions_of, commands_of, help_of
from runner.controller.main import command_line

SHELLS = ("bash", "zsh", "fish")

_FILES = frozenset({"DIR", "FILE", "PATH", "ROOT", "SPEC"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give *parser* what this command takes."""
    parser.epilog = (
        "examples:\n"
        "  source <(instance-runner completion bash)      in ~/.bashrc\n"
        "  source <(instance-runner completion zsh)       in ~/.zshrc\n"
        "  instance-runner completion fish > ~/.config/fish/completions/instance-runner.fish"
    )
    parser.add_argument("shell", choices=SHELLS, help="which shell")


def main(arguments: argparse.Namespace) -> int:
    """Print the script."""
    print(completion(arguments.shell, (program_parser(), command_line())), end="")
    return 0


def completion(shell: str, parsers: Sequence[argparse.ArgumentParser]) -> str:
    """Return the script that makes *shell* complete the commands of *parsers*, each with or without subcommands."""
    if shell == "fish":
        return "\n".join(line for parser in parsers for line in _fish(parser)) + "\n"
    script = "\n".join(line for parser in parsers for line in _bash(parser)) + "\n"
    if shell == "zsh":
        return f"autoload -Uz compinit bashcompinit\n(( $+functions[compdef] )) || compinit\nbashcompinit\n{script}"
    return script


def _takes_files(action: argparse.Action) -> bool:
    return action.nargs != 0 and str(action.metavar) in _FILES


def _each(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    commands = commands_of(parser)
    if commands:
        yield from commands.items()
    else:
        yield "", parser


def _bash(parser: argparse.ArgumentParser) -> Iterator[str]:
    commands = commands_of(parser)
    function = "_" + parser.prog.replace("-", "_")
    yield f"{function}() {{"
    yield "    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[$((COMP_CWORD - 1))]} word"
    yield "    local command='' words='' files='' IFS=$' \\n'"
    yield '    if [ "$current" = "=" ]; then current=; fi'
    yield '    if [ "$previous" = "=" ]; then previous=${COMP_WORDS[$((COMP_CWORD - 2))]}; fi'
    if commands:
        yield '    for word in "${COMP_WORDS[@]:1:$((COMP_CWORD - 1))}"; do'
        yield f'        case "$word" in {"|".join(commands)}) command=$word; break ;; esac'
        yield "    done"
    yield '    case "$command $previous" in'
    for name, each in _each(parser):
        for action in actions_of(each):
            patterns = "|".join(f'"{name} {option}"' for option in action.option_strings)
            if not patterns or action.nargs == 0:
                continue
            if action.choices is not None:
                yield f'        {patterns}) words="{" ".join(action.choices)}" ;;'
            elif _takes_files(action):
                yield f"        {patterns}) files=yes ;;"
            elif action.nargs != "?":
                yield f"        {patterns}) return ;;"
    yield '        *) case "$command" in'
    if commands:
        options = (option for action in actions_of(parser) for option in action.option_strings)
        yield f'            "") words="{" ".join([*commands, *options])}" ;;'
    for name, each in _each(parser):
        positional = [action for action in actions_of(each) if not action.option_strings]
        words = [option for action in actions_of(each) for option in action.option_strings]
        words += [choice for action in positional for choice in action.choices or ()]
        files = " files=yes" if any(_takes_files(action) for action in positional) else ""
        yield f'            "{name}") words="{" ".join(words)}"{files} ;;'
    yield "        esac ;;"
    yield "    esac"
    yield '    COMPREPLY=($(compgen -W "$words" -- "$current"))'
    yield "    IFS=$'\\n'"  # file names may contain blanks
    yield '    if [ -n "$files" ]; then COMPREPLY+=($(compgen -f -- "$current")); fi'
    yield "}"
    yield f"complete -o filenames -F {function} {parser.prog}"


def _fish(parser: argparse.ArgumentParser) -> Iterator[str]:
    commands = commands_of(parser)
    yield f"complete -c {parser.prog} -f"
    for name in commands:
        yield f"complete -c {parser.prog} -n __fish_use_subcommand -a {name} -d {_quoted(about(parser, name))}"
    for name, each in _each(parser):
        where = f" -n '__fish_seen_subcommand_from {name}'" if name else ""
        for action in actions_of(each):
            names = "".join(f" -l {o[2:]}" if o.startswith("--") else f" -s {o[1:]}" for o in action.option_strings)
            takes = _fish_values(action)
            if names or takes:
                yield f"complete -c {parser.prog}{where}{names}{takes} -d {_quoted(help_of(action, each))}"


def _fish_values(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if _takes_files(action):
        return " -r -F" if action.option_strings else " -F"
    needed = " -x" if action.option_strings and action.nargs != "?" else ""
    return needed if action.choices is None else f"{needed} -a {_quoted(' '.join(action.choices))}"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
