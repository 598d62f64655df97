"""The sign with which a guest reports that it is ready: ``guest.ready``."""

from __future__ import annotations

import re
from typing import Literal

from runner.base.values import frozen
from runner.spec.rules import Rule, WrongValueError, found, matching

LONGEST_PATTERN = 1000
"""Characters of a regular expression."""
LAST_PORT = 65535

_WRITTEN = r"agent|console:.+|port:[0-9]{1,5}"


@frozen
class AgentSign:
    """The guest agent answers."""

    sign: Literal["agent"] = "agent"

    def __str__(self) -> str:
        return "agent"


@frozen
class ConsoleSign:
    """A console line, even an incomplete one, contains a match of *pattern*, a Python regular expression."""

    pattern: str
    sign: Literal["console"] = "console"

    def __str__(self) -> str:
        return f"console:{self.pattern}"

    def compiled(self) -> re.Pattern[str]:
        """Return the search pattern, in which a final ``$`` also matches where the line ended for a moment.

        A prompt is often followed by a kernel message on the same line, and both may arrive in one piece.
        """
        return re.compile(re.sub(r"(?<!\\)((?:\\\\)*)\$\Z", r"\1", self.pattern))


@frozen
class PortSign:
    """The guest accepts a TCP connection on *port*."""

    port: int
    sign: Literal["port"] = "port"

    def __str__(self) -> str:
        return f"port:{self.port}"


ReadySign = AgentSign | ConsoleSign | PortSign


def ready_sign() -> Rule[ReadySign]:
    """Accept one of the three signs; a regular expression is compiled, so that an invalid one is refused here."""

    def parse(value: object) -> ReadySign:
        if not isinstance(value, str) or re.fullmatch(_WRITTEN, value) is None or not value.isprintable():
            raise WrongValueError(f"found {found(value)}")
        name, _, rest = value.partition(":")
        match name:
            case "agent":
                return AgentSign()
            case "port" if 1 <= int(rest) <= LAST_PORT:
                return PortSign(int(rest))
            case "console":
                _refuse_bad_pattern(rest)
                return ConsoleSign(rest)
        raise WrongValueError(f"found the port {rest}")

    allowed = f'"agent", "console:" and a regular expression, or "port:" and a number from 1 to {LAST_PORT}'
    return Rule(allowed, parse, matching(_WRITTEN))


def _refuse_bad_pattern(pattern: str) -> None:
    if len(pattern) > LONGEST_PATTERN:
        raise WrongValueError(
            f"found a regular expression of {len(pattern)} characters, and {LONGEST_PATTERN} are allowed"
        )
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise WrongValueError(f"found {found(pattern)}, which is no regular expression: {reason}") from error
