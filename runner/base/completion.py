"""The programs' side of shell completion: argcomplete runs the program itself to get the possible next words."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import argcomplete
from argcomplete.completers import BaseCompleter, FilesCompleter

FILES = frozenset({"DIR", "FILE", "PATH", "ROOT", "SPEC"})
"""Metavars of arguments that are files."""


class _Files(BaseCompleter):
    def __call__(self, *, prefix: str, action: argparse.Action, **_: Any) -> Iterable[str]:
        return FilesCompleter()(prefix) if str(action.metavar) in FILES else ()


def complete(parser: argparse.ArgumentParser) -> None:
    """Write the possible next words of the command line in ``COMP_LINE``, and exit."""
    argcomplete.autocomplete(parser, always_complete_options=False, default_completer=_Files())
