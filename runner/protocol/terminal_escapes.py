"""A small reader of terminal escape sequences (ECMA-48, and what xterm has added): pure, and used wherever a console's bytes are.

Three questions are asked of them: what a line says without them, what in a replay a terminal would answer to, and which modes a
session has left switched on.
"""

from __future__ import annotations

import re

import attrs

_SEQUENCE = re.compile(
    rb"\x1b\[([0-?]*)([ -/]*)([@-~])"  # CSI: parameters, intermediates, final
    rb"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC
    rb"|\x1b[PX^_][^\x1b]*\x1b\\"  # DCS, SOS, PM, APC
    rb"|\x1b[ -/]*[0-OQ-WYZ\\`-~]"  # the others
)
_BEGUN = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*\x1b?|[PX^_][^\x1b]*\x1b?|[ -/]*)\Z")
"""A sequence that the data ends in the middle of."""

LONGEST = 1 << 12
"""Bytes of a sequence; a longer one is none."""

_ASKS = re.compile(
    rb"\x1b\[[?>=]?[0-9;]*c"  # DA: what are you
    rb"|\x1b\[\??[0-9;]*n"  # DSR, CPR: where is the cursor
    rb"|\x1b\[\??[0-9;]*\$p"  # DECRQM
    rb"|\x1b\[[0-9;]*x"  # DECREQTPARM
    rb"|\x1b\[>[0-9;]*q"  # XTVERSION
    rb"|\x1b\[(?:1[1-9]|2[01])(?:;[0-9]*)*t"  # reports of the window
    rb"|\x1b\[\?u"  # the keyboard's protocol
    rb"|\x1b\][0-9;]*;\?(?:\x07|\x1b\\)"  # OSC: colours
    rb"|\x1bP(?:\$q|\+q)[^\x1b]*\x1b\\"  # DECRQSS, XTGETTCAP
    rb"|\x1bZ|\x05"  # DECID, ENQ
)


def without_escapes(line: bytes) -> bytes:
    """Return the characters of *line* that a terminal shows, as far as sequences are whole."""
    return _SEQUENCE.sub(b"", line) if b"\x1b" in line else line


def without_questions(data: bytes) -> bytes:
    """Return *data* without what a terminal answers to: its answer would be typed into whatever runs in the guest now."""
    return _ASKS.sub(b"", data)


@attrs.define
class TerminalModes:
    """The modes of a terminal that the output which was fed has changed."""

    _begun: bytes = b""
    _on: set[bytes] = attrs.field(factory=set)
    _off: set[bytes] = attrs.field(factory=set)
    _other: set[bytes] = attrs.field(factory=set)
    """What undoes the others."""

    def feed(self, data: bytes) -> None:
        """Take in a piece of the output, which may end within a sequence."""
        text = self._begun + data
        begun = _BEGUN.search(text[-LONGEST:])
        self._begun = b"" if begun is None else begun.group()
        for found in _SEQUENCE.finditer(text):
            parameters, _, final = found.groups()
            if parameters is None:
                self._take_other(found.group())
            elif final in b"hl" and parameters.startswith(b"?"):
                for number in parameters[1:].split(b";"):
                    changed, back = (self._on, self._off) if final == b"h" else (self._off, self._on)
                    back.discard(number)
                    changed.add(number)
            elif final == b"r":
                self._other.add(b"\x1b[r")
            elif final == b"m" and parameters.startswith(b">"):
                self._other.add(b"\x1b[>4m")  # modifyOtherKeys
            elif final == b"m":
                self._other.add(b"\x1b[0m")
            elif final == b"u" and parameters.startswith(b">"):
                self._other.add(b"\x1b[<99u")  # the keyboard's protocol

    def _take_other(self, sequence: bytes) -> None:
        if sequence == b"\x1b=":
            self._other.add(b"\x1b>")  # the keypad's application mode
        elif sequence[:2] in {b"\x1b(", b"\x1b)"}:
            self._other |= {b"\x1b(B", b"\x0f"}

    def reset(self) -> bytes:
        """Return what switches back all that is not as a shell expects it, the alternate screen last."""
        screens = {b"47", b"1047", b"1049"}
        usually_on = {b"7", b"25"}  # wrapping, the cursor
        off = sorted(self._on - usually_on - screens) + sorted(self._on & screens)
        return b"".join(
            [
                *sorted(self._other),
                *(b"\x1b[?%bh" % number for number in sorted(self._off & usually_on)),
                *(b"\x1b[?%bl" % number for number in off),
            ]
        )
