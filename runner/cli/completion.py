"""The command ``completion``: prints the shell code with which a shell asks both programs for completions, by argcomplete."""

from __future__ import annotations

import argparse

from argcomplete.shell_integration import shellcode

PROGRAMS = ("instance-runner", "instance-cgroup-controller")
SHELLS = ("bash", "zsh", "fish")

_ZSH = "autoload -Uz compinit\n(( $+functions[compdef] )) || compinit\n"
"""Commands that the script requires."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to *parser*."""
    parser.epilog = (
        "examples:\n"
        "  source <(instance-runner completion bash)      in ~/.bashrc\n"
        "  source <(instance-runner completion zsh)       in ~/.zshrc\n"
        "  instance-runner completion fish > ~/.config/fish/completions/instance-runner.fish"
    )
    parser.add_argument("shell", choices=SHELLS, help="which shell")


def main(arguments: argparse.Namespace) -> int:
    """Print the script."""
    script = shellcode(PROGRAMS, shell=arguments.shell)
    print(f"{_ZSH if arguments.shell == 'zsh' else ''}{script}", end="")
    return 0
