"""Readers of :mod:`argparse` parsers: their commands, arguments and help texts (pure)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the subcommands' parsers by name, in their order; empty for a program without any."""
    for action in actions_of(parser):
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - argparse has no public name for it
            return dict(action.choices)
    return {}


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments of a parser, in their order."""
    return [action for action in parser._actions if action.help != argparse.SUPPRESS]  # noqa: SLF001 - argparse has no public list


def help_of(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """Return the help text of *action*, with its values filled in."""
    return str(action.help or "") % {**vars(action), "prog": parser.prog}


def about(parser: argparse.ArgumentParser, name: str) -> str:
    """Return the one-line help of the subcommand *name*."""
    for action in actions_of(parser):
        for choice in action._get_subactions() if action.choices and hasattr(action, "_get_subactions") else ():  # noqa: SLF001
            if choice.dest == name:
                return str(choice.help)
    return name
