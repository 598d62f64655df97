"""The command ``manual``: prints manual pages, made from the parsers and from the spec's schema, as ``--help`` is."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from importlib import metadata

from runner.cli.commands import program_parser
from runner.cli.events_table import events_markdown
from runner.cli.parsers import about, actions_of, commands_of, help_of
from runner.cli.spec_table import spec_markdown
from runner.controller.main import command_line
from runner.spec.instance import reference, tables_of_reference

SPEC_PAGE = "instance-runner-spec"


PAGES = ("instance-runner.1", f"{SPEC_PAGE}.5", "instance-cgroup-controller.8")
MARKDOWN = {f"{SPEC_PAGE}.md": spec_markdown, "instance-runner-events.md": events_markdown}
"""References for a reader on the web: ``examples/SPEC.md`` and ``examples/EVENTS.md``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give *parser* what this command takes."""
    parser.epilog = "example: instance-runner manual instance-runner-spec.5 | man -l -"
    parser.add_argument(
        "page",
        nargs="?",
        choices=(*PAGES, *MARKDOWN),
        default="instance-runner.1",
        metavar="PAGE",
        help="which of %(choices)s (default: %(default)s)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Print the page."""
    if arguments.page in MARKDOWN:
        print(MARKDOWN[arguments.page](), end="")
        return 0
    version = metadata.version("instance-runner")
    _, section = arguments.page.split(".")
    others = ["{}({})".format(*page.split(".")) for page in PAGES if page != arguments.page]
    if section == "5":
        print(spec_page(version, others), end="")
    else:
        parser = program_parser() if section == "1" else command_line()
        print(command_page(parser, int(section), version, others), end="")
    return 0


def command_page(parser: argparse.ArgumentParser, section: int, version: str, see_also: Sequence[str]) -> str:
    """Return the manual page of a program in the man(7) macros."""
    return "\n".join(_command(parser, section, version, see_also)) + "\n"


def spec_page(version: str, see_also: Sequence[str]) -> str:
    """Return the manual page of the document that describes an instance."""
    return "\n".join(_spec(version, see_also)) + "\n"


def _head(name: str, section: int, version: str, purpose: str) -> Iterator[str]:
    yield f'.TH {_text(name.upper())} {section} "" "instance-runner {version}" "Instance Runner"'
    yield ".SH NAME"
    yield f"{_text(name)} \\- {_text(purpose)}"


def _foot(see_also: Sequence[str]) -> Iterator[str]:
    yield ".SH SEE ALSO"
    yield ", ".join(f"\\fB{_text(page)}\\fR" for page in see_also)


def _command(parser: argparse.ArgumentParser, section: int, version: str, see_also: Sequence[str]) -> Iterator[str]:
    purpose = (parser.description or "").rstrip(".")
    yield from _head(parser.prog, section, version, purpose)
    yield ".SH SYNOPSIS"
    commands = [*_below(parser)]
    leaves = [each for each, _ in commands if not commands_of(each)] or [parser]
    for index, each in enumerate(leaves):
        yield from (".br",) if index else ()
        yield _usage(each)
    yield ".SH DESCRIPTION"
    yield f"{_text(purpose)}."
    if not commands:
        yield ".SH OPTIONS"
        yield from _options(parser)
    else:
        yield ".SH COMMANDS"
        for each, purpose in commands:
            yield f".SS {_text(each.prog.removeprefix(parser.prog).strip())}"
            yield _text(_sentence(purpose))
            if each.description:
                yield _text(each.description)
            yield from _options(each)
            if each.epilog:
                yield ".PP"
                yield from _as_it_is(each.epilog)
    yield ".SH NOTES"
    yield from _as_it_is(parser.epilog or "")
    yield from _foot(see_also)


def _below(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Yield the parsers of all commands below *parser*, each with its one line of help."""
    for name, each in commands_of(parser).items():
        yield each, about(parser, name)
        yield from _below(each)


def _usage(parser: argparse.ArgumentParser) -> str:
    return (
        f"\\fB{_text(parser.prog)}\\fR {_text(' '.join(parser.format_usage().split()[1 + len(parser.prog.split()) :]))}"
    )


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in actions_of(parser):
        if action.dest == "help" or action.nargs == argparse.PARSER:  # the commands have sections of their own
            continue
        value = action.metavar or ("{" + ",".join(action.choices) + "}" if action.choices else action.dest.upper())
        takes = "" if action.nargs == 0 else f" \\fI{_text(str(value))}\\fR"
        yield ".TP"
        names = ", ".join(f"\\fB{_text(name)}\\fR" for name in action.option_strings)
        yield f"{names}{takes}" if names else takes.strip()
        default = action.default
        text = help_of(action, parser)
        shown = action.option_strings and action.nargs != 0 and default and "default" not in text
        yield _text(text + (f" (default: {default})" if shown else "")) or ".br"


def _as_it_is(text: str) -> Iterator[str]:
    yield ".nf"
    yield from map(_text, text.strip().splitlines())
    yield ".fi"


def _spec(version: str, see_also: Sequence[str]) -> Iterator[str]:
    yield from _head(SPEC_PAGE, 5, version, "the document that describes an instance")
    yield ".SH DESCRIPTION"
    yield "TOML, or JSON of the same shape. What is not given has its default; unknown keys are errors."
    tables = tables_of_reference()
    last = ""
    for name, allowed, default, meaning in reference():
        table, _, key = name.rpartition(".")
        if table != last:
            last = table
            written = f"[[{table.removesuffix('[]')}]]" if table.endswith("[]") else f"[{table}]"
            yield f".SH {_text(written)}"
            yield _text(_sentence(tables[table]))
        yield ".TP"
        yield f"\\fB{_text(key)}\\fR"
        takes = {"required": f"Takes {allowed}; required.", "-": f"Takes {allowed}."}
        yield _marked(_sentence(meaning))
        yield ".br"
        yield _text(takes.get(default, f"Takes {allowed}; default: {default}."))
    yield ".SH EXAMPLES"
    yield from _as_it_is(
        '[cpu]\ncount = 4\n[memory]\nsize = "8GiB"\n[[disk]]\npath = "/dev/vm-disk"\n[[network]]\nmode = "bridge"'
    )
    yield from _foot(see_also)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _text(text: str) -> str:
    r"""Escape *text* for troff: backslashes, hyphens, characters outside ASCII, and a dot or an apostrophe at its beginning."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    escaped = re.sub(r"[^\x00-\x7f]", lambda match: f"\\[u{ord(match[0]):04X}]", escaped)
    return re.sub(r"^([.'])", r"\\&\1", escaped)


def _marked(text: str) -> str:
    """Escape *text*; what Markdown marks with backquotes and asterisks becomes bold and italic."""
    bold = re.sub(r"`([^`]+)`", r"\\fB\1\\fR", _text(text))
    return re.sub(r"(?<![\w*])\*(\w+)\*", r"\\fI\1\\fR", bold)
