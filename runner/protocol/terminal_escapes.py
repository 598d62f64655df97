"""A small reader of a console's bytes as a terminal reads them: ECMA-48, what xterm has added, and UTF-8.

Three questions are asked of it: what a line shows, what of earlier output a terminal only draws, and which modes a session has left
switched on. A terminal answers to some sequences, and no list has all of them: of earlier output only what is known to draw is kept.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

import attrs

LONGEST = 1 << 12
"""Characters of a sequence; a longer one is passed over to its end."""

_EIGHT_BITS = {0x80 + code - 0x40: f"\x1b{chr(code)}" for code in range(0x40, 0x60)}
"""The control characters from U+0080 on, each of which is a sequence of two (ECMA-48, 5.3): xterm and others take them in UTF-8, too.
A byte of this value that is not UTF-8 is none to a terminal of today."""
_STRAY = {0xDC00 + code: "\ufffd" for code in range(0x80, 0xA0)}
"""Such a byte, which is shown as this: with one before it that a sequence parted from it, it would be UTF-8 where that is left out."""

_INSIDE = "\x00-\x17\x19\x1c-\x1f"
"""Control characters that a terminal obeys within a sequence, which goes on behind them; CAN, SUB and ESC end it."""
_TOKEN = re.compile(
    rf"\x1b\[[ -?{_INSIDE}\x7f]*[@-~]"  # CSI
    r"|\x1b\][^\x07\x18\x1a\x1b]*(?:\x07|\x1b\\)"  # OSC
    r"|\x1b[PX^_k][^\x18\x1a\x1b]*\x1b\\"  # DCS, SOS, PM, APC, and the title of screen
    r"|\x1b[ -/]*[0-OQ-WYZ\\`-~]"  # the others
    rf"|\x1b(?:\[[ -?{_INSIDE}\x7f]*|[]PX^_][^\x18\x1a\x1b]*|[ -/]*)"  # one that is broken off: no ESC is text
    r"|[\x00-\x1a\x1c-\x1f\x7f]"
)
_BEGUN = re.compile(rf"\x1b(?:\[[ -?{_INSIDE}\x7f]*|\][^\x07\x18\x1a\x1b]*\x1b?|[PX^_][^\x18\x1a\x1b]*\x1b?|[ -/]*)\Z")
"""A sequence that the output ends in the middle of."""
_CONTROL = re.compile(r"\x1b\[([<=>?]?)([0-9:;]*)([ -/]*)([@-~])")
"""CSI: what makes it private, its numbers, its intermediate bytes and its final one."""


@attrs.define
class TerminalOutput:
    """Cuts output, which comes in pieces, into text, control characters and whole sequences with seven bits."""

    _decoder: codecs.IncrementalDecoder = attrs.field(
        factory=lambda: codecs.getincrementaldecoder("utf-8")("surrogateescape")
    )
    begun: str = ""
    """A sequence that has no end yet."""

    def feed(self, data: bytes) -> Iterator[str]:
        """Yield what *data* completes."""
        text = self._decoder.decode(data)
        text = self.begun + (text if text.isascii() else text.translate(_EIGHT_BITS | _STRAY))
        found = _BEGUN.search(text)
        begun = "" if found is None else found.group()
        text = text.removesuffix(begun)
        # of a longer one its last character, too: it may begin the terminator
        self.begun = begun if len(begun) <= LONGEST else begun[:LONGEST] + begun[-1]
        at = 0
        for each in _TOKEN.finditer(text):
            if at < each.start():
                yield text[at : each.start()]
            at = each.end()
            yield from _obeyed(each.group())
        if at < len(text):
            yield text[at:]


def _obeyed(unit: str) -> Iterator[str]:
    """Yield what a terminal obeys of *unit*: the control characters in it, and itself if it has an end; nothing of one too long."""
    if len(unit) > LONGEST:
        return
    if unit.startswith("\x1b["):
        yield from re.findall(f"[{_INSIDE}]", unit)
        unit = re.sub(f"[{_INSIDE}\x7f]", "", unit)
    if _BEGUN.match(unit) is None:
        yield unit


def encoded(text: str) -> bytes:
    """Return *text* of :class:`TerminalOutput` as bytes again."""
    return text.encode(errors="surrogateescape")


_LINE_CHANGES = set("ABEFHLMSTdef")
"""The final bytes of sequences that move the cursor to another line, or the lines."""
_SHIFTS = {"C": 1, "a": 1, "D": -1}


def shown_lines(line: bytes) -> list[str]:
    """Return what a terminal shows of *line*, an output without line ends; more than one where the cursor is put elsewhere meanwhile.

    What follows a carriage return, a backspace or a move to the left takes the place of what was there, character by character. A
    line begins where the cursor was put.
    """
    shown = _ShownLines()
    output = TerminalOutput()
    for unit in output.feed(line):
        shown.take(unit)
    return ["".join(each).encode(errors="surrogateescape").decode(errors="replace") for each in shown.lines]


@attrs.define
class _ShownLines:
    lines: list[list[str]] = attrs.field(factory=lambda: [[]])
    at: int = 0
    """The column, of the last line."""

    def take(self, unit: str) -> None:
        match unit[0]:
            case "\r":
                self.at = 0
            case "\b":
                self.at = max(self.at - 1, 0)
            case "\x0b" | "\x0c":
                self._next()
            case "\x1b":
                self._obey(unit)
            case first if first >= " " or first == "\t":
                if first != "\x7f":
                    self._write(unit)

    def _write(self, text: str) -> None:
        line = self.lines[-1]
        line += " " * (self.at - len(line))
        line[self.at : self.at + len(text)] = text
        self.at += len(text)

    def _next(self) -> None:
        if self.lines[-1]:
            self.lines.append([])
        self.at = 0

    def _obey(self, unit: str) -> None:
        found = _CONTROL.fullmatch(unit)
        if found is None:
            if unit in {"\x1bD", "\x1bE", "\x1bM", "\x1bc"}:
                self._next()
            return
        private, numbers, between, final = found.groups()
        first = numbers.partition(";")[0]
        number = min(int(first), LONGEST) if first.isdecimal() else 0
        if not private and not between and not self._moved(final, number):
            self._edit(final, number)

    def _moved(self, final: str, number: int) -> bool:
        """Move the cursor as the sequence says, and return whether it does."""
        if final in _LINE_CHANGES or (final == "J" and number):
            self._next()
        elif final in _SHIFTS:
            self.at = min(max(self.at + _SHIFTS[final] * max(number, 1), 0), LONGEST)
        elif final in "G`":
            self.at = max(number, 1) - 1
        else:
            return False
        return True

    def _edit(self, final: str, number: int) -> None:
        """Erase, remove or insert what the sequence says."""
        line, at, many = self.lines[-1], self.at, max(number, 1)
        match final:
            case "P":
                del line[at : at + many]
            case "@":
                line[at:] = [*" " * many, *line[at:LONGEST]]
            case "X":
                self._blank(at, at + many)
            case "K" if number:
                self._blank(0, at if number == 1 else len(line))
            case "J" | "K":
                del line[at:]

    def _blank(self, start: int, end: int) -> None:
        line = self.lines[-1]
        line[start:end] = " " * len(line[start:end])


_DRAWS = {
    ("", ""): "@ABCDEFGHIJKLMPSTXZ`abdefghlmrsu",
    ("?", ""): "hlJKrsW",
    (">", ""): "mu",
    ("<", ""): "u",
    ("=", ""): "u",
    ("", " "): "@Aq",
    ("", "!"): "p",
    ("", '"'): "q",
    ("", "$"): "rtvxz{",
    ("", "'"): "}~",
    ("", "*"): "x",
}
"""What makes a sequence private, and its intermediate bytes → the final bytes with which it is only obeyed."""
_DRAWN_TITLES = re.compile(r"\x1b\[2[23](?:;[0-9]*)*t")
_DRAWN_STRINGS = re.compile(
    r"\x1b\](?:[0-2478]|1[0-9]|104|11[0-9]|133|3008)(?![0-9])(?!(?:[^\x1b]*[;=])?\?(?:[;\x07\x1b]))"
    r"[^\x00-\x1f\x7f]*(?:\x07|\x1b\\)"
)
"""OSC: titles, links, colours, and the marks of shells and systemd, where they are no questions. A terminal passes over control
characters within, which would part a question mark from what makes it one."""
_DRAWN_OTHERS = re.compile(r"\x1b(?:[()*+./-][ -/]*[0-~]|#[0-9]|%[@G]|[6-9=>DEHMNOclmno|}~])")


_ENQ = "\x05"
"""Answered where it comes, also in a sequence that has no end yet."""


def _draws(unit: str) -> bool:
    """Tell whether a terminal only draws or notes what *unit* says, and says nothing itself."""
    if unit[0] != "\x1b":
        return unit != _ENQ
    if (found := _CONTROL.fullmatch(unit)) is not None:
        private, _, between, final = found.groups()
        return final in _DRAWS.get((private, between), "") or _DRAWN_TITLES.fullmatch(unit) is not None
    return (_DRAWN_STRINGS.fullmatch(unit) or _DRAWN_OTHERS.fullmatch(unit)) is not None


def without_questions(data: bytes, output: TerminalOutput | None = None) -> bytes:
    """Return what a terminal only draws of *data*, earlier output: its answers would be typed into whatever reads them now.

    *output* has what the pieces before have begun; without one, *data* is all there is, and its end stays as it is.
    """
    whole = output is None
    output = output or TerminalOutput()
    drawn = "".join(unit for unit in output.feed(data) if _draws(unit))
    return encoded(drawn + output.begun.replace(_ENQ, "") * whole)


LONGEST_MODE = 4
"""Digits of a private mode: the highest that is known is 9001. A guest could fill the memory with the numbers of longer ones."""
RESETS = {"\x1b[4h": "\x1b[4l", "\x1b[2h": "\x1b[2l", "\x1b[20h": "\x1b[20l", "\x1b[12l": "\x1b[12h"}
"""Modes of ECMA-48 that spoil a shell's line: what inserts, locks the keyboard, adds line feeds, or shows nothing typed."""
USUALLY_ON = {"7", "8", "25", "1034", "1035"}
"""Modes that a terminal begins with: wrapping, the keys' repetition, the cursor, and how Meta and NumLock are sent."""
_COLOURS = re.compile(r"\x1b\](4|1[0-9]);")


@attrs.define
class TerminalModes:
    """The modes of a terminal that the output which was fed has changed."""

    _output: TerminalOutput = attrs.field(factory=TerminalOutput)
    _on: set[str] = attrs.field(factory=set)
    _off: set[str] = attrs.field(factory=set)
    _other: set[str] = attrs.field(factory=set)
    """What undoes the others."""

    def feed(self, data: bytes) -> None:
        """Take in a piece of the output, which may end within a sequence."""
        for unit in self._output.feed(data):
            if unit == "\x0e":
                self._other.add("\x0f")  # the other set of characters, of lines
            elif unit[0] != "\x1b":
                continue
            elif (found := _CONTROL.fullmatch(unit)) is None:
                self._take_other(unit)
            elif found[1] == "?" and found[4] in "hl":
                for number in (each for each in found[2].split(";") if len(each) <= LONGEST_MODE):
                    changed, back = (self._on, self._off) if found[4] == "h" else (self._off, self._on)
                    back.discard(number)
                    changed.add(number)
            else:
                self._take_control(unit, found[1] + found[3] + found[4])

    def _take_control(self, unit: str, kind: str) -> None:
        match kind:
            case ">m":
                self._other.add("\x1b[>4m")  # modifyOtherKeys
            case ">u":
                self._other.add("\x1b[<99u")  # the keyboard's protocol
            case "=u":
                self._other.add("\x1b[=0u")
            case _ if unit in RESETS:
                self._other.add(RESETS[unit])
            case " q":
                self._other.add("\x1b[0 q")  # the cursor's shape
            case "r" | "?r":
                self._other.add("\x1b[r")
            case "m":
                self._other.add("\x1b[0m")

    def _take_other(self, unit: str) -> None:
        if unit == "\x1b=":
            self._other.add("\x1b>")  # the keypad's application mode
        elif unit[:2] in {"\x1b(", "\x1b)"}:
            self._other |= {"\x1b(B", "\x0f"}
        elif (colour := _COLOURS.match(unit)) is not None:
            self._other.add(f"\x1b]1{int(colour[1]):02d}\x07")  # OSC 104, 110 to 119

    def reset(self) -> bytes:
        """Return what switches back all that is not as a shell expects it, the alternate screen last."""
        screens = {"47", "1047", "1049"}
        off = sorted(self._on - USUALLY_ON - screens) + sorted(self._on & screens)
        return "".join(
            [
                *sorted(self._other),
                *(f"\x1b[?{number}h" for number in sorted(self._off & USUALLY_ON)),
                *(f"\x1b[?{number}l" for number in off),
            ]
        ).encode()
