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
    rb"|\x1b\[(?:\?u|&u|\"v)"  # the keyboard's protocol, DECRQUPSS, DECRQDE
    rb"|\x1b\[[0-9;]*(?:\$[uw]|\*y|#[|RS]|'\|)"  # DECRQTSR, DECRQPSR, DECRQCRA, reports of colours and of the locator
    rb"|\x1b\[\?[0-9;]*[mS]"  # XTQMODKEYS, XTSMGRAPHICS
    rb"|\x1b\][^\x07\x1b]*[;=]\?(?:\x07|\x1b\\)"  # OSC: colours, the clipboard
    rb"|\x1b\]1337;(?:Report|Request|Capabilities)[^\x07\x1b]*(?:\x07|\x1b\\)"  # iTerm2
    rb"|\x1bP(?:\$q|\+[qQ])[^\x1b]*\x1b\\"  # DECRQSS, XTGETTCAP, XTGETXRES
    rb"|\x1b_G[^\x1b]*\x1b\\"  # kitty's pictures: drawn ones are acknowledged
    rb"|\x1bZ|\x05"  # DECID, ENQ
)


_ERASED = re.compile(rb"\x1b\[([02]?)K")
"""EL: erase to the end of the line, or the whole line."""
_TO_THE_END, _WHOLE = b"\x1c", b"\x1d"
"""What stands for these in :func:`without_escapes`: separators that terminals show nothing for."""
_UNSEEN = re.compile(rb"[\x00-\x07\x0b\x0c\x0e-\x1a\x7f]")
"""Control characters that move nothing within a line (ECMA-48, 8.3)."""
_MOVES = re.compile(rb"[\r\b\x1c\x1d]")

RESETS = {b"\x1b[4h": b"\x1b[4l", b"\x1b[2h": b"\x1b[2l", b"\x1b[20h": b"\x1b[20l", b"\x1b[12l": b"\x1b[12h"}
"""Modes of ECMA-48 that spoil a shell's line: what inserts, locks the keyboard, adds line feeds, or shows nothing typed."""
USUALLY_ON = {b"7", b"8", b"25", b"1034", b"1035"}
"""Modes that a terminal begins with: wrapping, the keys' repetition, the cursor, and how Meta and NumLock are sent."""
_COLOURS = re.compile(rb"\x1b\](4|1[0-9]);")


def without_escapes(line: bytes) -> bytes:
    """Return the characters of *line* that a terminal shows, as far as sequences are whole.

    What follows a carriage return or a backspace takes the place of what was there, byte by byte.
    """
    text = line.translate(None, b"\x1c\x1d\x1e\x1f")
    text = _ERASED.sub(lambda found: _WHOLE if found[1] == b"2" else _TO_THE_END, text)
    text = _UNSEEN.sub(b"", _SEQUENCE.sub(b"", text))
    if not _MOVES.search(text):
        return text
    shown, at = bytearray(), 0
    for byte in map(int.to_bytes, text):
        match byte:
            case b"\r":
                at = 0
            case b"\b":
                at = max(at - 1, 0)
            case b"\x1c":
                del shown[at:]
            case b"\x1d":
                shown[:] = b" " * at
            case _:
                shown[at : at + 1] = byte
                at += 1
    return bytes(shown)


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
        if b"\x0e" in data:
            self._other.add(b"\x0f")  # the other set of characters, of lines
        for found in _SEQUENCE.finditer(text):
            if found[1] is None:
                self._take_other(found.group())
            elif found[3] in b"hl" and found[1].startswith(b"?"):
                for number in found[1][1:].split(b";"):
                    changed, back = (self._on, self._off) if found[3] == b"h" else (self._off, self._on)
                    back.discard(number)
                    changed.add(number)
            else:
                self._take_control(found.group(), *found.groups())

    def _take_control(self, sequence: bytes, parameters: bytes, between: bytes, final: bytes) -> None:
        match parameters[:1] + between + final:
            case b">m":
                self._other.add(b"\x1b[>4m")  # modifyOtherKeys
            case b">u":
                self._other.add(b"\x1b[<99u")  # the keyboard's protocol
            case b"=u":
                self._other.add(b"\x1b[=0u")
            case _ if sequence in RESETS:
                self._other.add(RESETS[sequence])
            case _ if between + final == b" q":
                self._other.add(b"\x1b[0 q")  # the cursor's shape
            case _ if final == b"r":
                self._other.add(b"\x1b[r")
            case _ if final == b"m":
                self._other.add(b"\x1b[0m")

    def _take_other(self, sequence: bytes) -> None:
        if sequence == b"\x1b=":
            self._other.add(b"\x1b>")  # the keypad's application mode
        elif sequence[:2] in {b"\x1b(", b"\x1b)"}:
            self._other |= {b"\x1b(B", b"\x0f"}
        elif (colour := _COLOURS.match(sequence)) is not None:
            self._other.add(b"\x1b]1%02d\x07" % int(colour[1]))  # OSC 104, 110 to 119

    def reset(self) -> bytes:
        """Return what switches back all that is not as a shell expects it, the alternate screen last."""
        screens = {b"47", b"1047", b"1049"}
        off = sorted(self._on - USUALLY_ON - screens) + sorted(self._on & screens)
        return b"".join(
            [
                *sorted(self._other),
                *(b"\x1b[?%bh" % number for number in sorted(self._off & USUALLY_ON)),
                *(b"\x1b[?%bl" % number for number in off),
            ]
        )
