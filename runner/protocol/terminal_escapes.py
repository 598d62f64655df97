"""A small parser of a console's bytes as terminals interpret them: ECMA-48, xterm's additions, and UTF-8.

It answers three questions: the text that a line shows, the parts of earlier output that a terminal only draws, and the modes that a session
has left switched on. A terminal replies to some sequences, and no list of these is complete, so only sequences known to draw are kept of
earlier output.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

import attrs

LONGEST = 1 << 12
"""Characters of a sequence; a longer one is skipped to its end."""

_EIGHT_BITS = {0x80 + code - 0x40: f"\x1b{chr(code)}" for code in range(0x40, 0x60)}
"""The control characters from U+0080 on, each equivalent to a sequence of two characters (ECMA-48, 5.3): xterm and others accept them in
UTF-8, too. A single byte of this value, which is not UTF-8, has no such meaning to today's terminals."""
_STRAY = {0xDC00 + code: "\ufffd" for code in range(0x80, 0xA0)}
"""The replacement shown for such a byte: kept as it is, it could form valid UTF-8 with a preceding byte once a sequence between them is
removed."""

_INSIDE = "\x00-\x17\x19\x1c-\x1f"
"""Control characters that a terminal executes within a sequence, which then continues; CAN, SUB and ESC end it."""
_TOKEN = re.compile(
    rf"\x1b\[[ -?{_INSIDE}\x7f]*[@-~]"  # CSI
    r"|\x1b\][^\x07\x18\x1a\x1b]*(?:\x07|\x1b\\)"  # OSC
    r"|\x1b[PX^_k][^\x18\x1a\x1b]*\x1b\\"  # DCS, SOS, PM, APC, and the title of screen
    r"|\x1b[ -/]*[0-OQ-WYZ\\`-~]"  # the others
    rf"|\x1b(?:\[[ -?{_INSIDE}\x7f]*|[]PX^_][^\x18\x1a\x1b]*|[ -/]*)"  # an incomplete one: ESC is never text
    r"|[\x00-\x1a\x1c-\x1f\x7f]"
)
_BEGUN = re.compile(rf"\x1b(?:\[[ -?{_INSIDE}\x7f]*|\][^\x07\x18\x1a\x1b]*\x1b?|[PX^_][^\x18\x1a\x1b]*\x1b?|[ -/]*)\Z")
"""An incomplete sequence at the end of the output."""
_CONTROL = re.compile(r"\x1b\[([<=>?]?)([0-9:;]*)([ -/]*)([@-~])")
"""CSI: the prefix of a private one, its numbers, its intermediate bytes and its final one."""


@attrs.define
class TerminalOutput:
    """Cuts output, which arrives in pieces, into text, control characters and complete seven-bit sequences."""

    _decoder: codecs.IncrementalDecoder = attrs.field(
        factory=lambda: codecs.getincrementaldecoder("utf-8")("surrogateescape")
    )
    begun: str = ""
    """An incomplete sequence."""

    def feed(self, data: bytes) -> Iterator[str]:
        """Yield the units that *data* completes."""
        text = self._decoder.decode(data)
        text = self.begun + (text if text.isascii() else text.translate(_EIGHT_BITS | _STRAY))
        found = _BEGUN.search(text)
        begun = "" if found is None else found.group()
        text = text.removesuffix(begun)
        # for a longer one also its last character, which may begin the terminator
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
    """Yield the parts of *unit* that a terminal executes: control characters in it, and itself if complete and not too long."""
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
    """Return the text that a terminal shows for *line*, output without line ends; several lines if the cursor is moved elsewhere.

    Text after a carriage return, a backspace or a move to the left overwrites the former text, character by character. A line begins at the
    position of the cursor.
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
    """The column in the last line."""

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
        control = _CONTROL.fullmatch(unit)
        if control is None:
            if unit in {"\x1bD", "\x1bE", "\x1bM", "\x1bc"}:
                self._next()
            return
        private, numbers, between, final = control.groups()
        first = numbers.partition(";")[0]
        number = min(int(first), LONGEST) if first.isdecimal() else 0
        if not private and not between and not self._moved(final, number):
            self._edit(final, number)

    def _moved(self, final: str, number: int) -> bool:
        """Move the cursor if the sequence does so, and return whether it does."""
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
        """Erase, remove or insert characters as the sequence does."""
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
"""Prefix of a private sequence, and its intermediate bytes → the final bytes of sequences that cause no reply."""
_DRAWN_TITLES = re.compile(r"\x1b\[2[23](?:;[0-9]*)*t")
_DRAWN_STRINGS = re.compile(
    r"\x1b\](?:[0-2478]|1[0-9]|104|11[0-9]|133|3008)(?![0-9])(?!(?:[^\x1b]*[;=])?\?(?:[;\x07\x1b]))"
    r"[^\x00-\x1f\x7f]*(?:\x07|\x1b\\)"
)
"""OSC: titles, links, colours, and the marks of shells and systemd, unless they are queries. A terminal ignores control characters within,
which could separate a question mark from the rest of a query."""
_DRAWN_OTHERS = re.compile(r"\x1b(?:[()*+./-][ -/]*[0-~]|#[0-9]|%[@G]|[6-9=>DEHMNOclmno|}~])")


_ENQ = "\x05"
"""A terminal replies to it anywhere, even in an incomplete sequence."""


def _draws(unit: str) -> bool:
    """Tell whether a terminal only draws or notes *unit*, and sends no reply."""
    if unit[0] != "\x1b":
        return unit != _ENQ
    if (control := _CONTROL.fullmatch(unit)) is not None:
        private, _, between, final = control.groups()
        return final in _DRAWS.get((private, between), "") or _DRAWN_TITLES.fullmatch(unit) is not None
    return (_DRAWN_STRINGS.fullmatch(unit) or _DRAWN_OTHERS.fullmatch(unit)) is not None


def without_questions(data: bytes, output: TerminalOutput | None = None) -> bytes:
    """Return the parts of *data*, earlier output, that a terminal only draws: its replies would be typed into the present reader.

    *output* has the incomplete sequence of earlier pieces; without one, *data* is the whole output, and an incomplete sequence at its end
    is kept.
    """
    whole = output is None
    output = output or TerminalOutput()
    drawn = "".join(unit for unit in output.feed(data) if _draws(unit))
    return encoded(drawn + output.begun.replace(_ENQ, "") * whole)


LONGEST_MODE = 4
"""Digits of a private mode: the highest known one is 9001. A guest could fill the memory with longer numbers."""
RESETS = {"\x1b[4h": "\x1b[4l", "\x1b[2h": "\x1b[2l", "\x1b[20h": "\x1b[20l", "\x1b[12l": "\x1b[12h"}
"""Modes of ECMA-48 that disturb a shell: inserting, a locked keyboard, added line feeds, or no echo."""
USUALLY_ON = {"7", "8", "25", "1034", "1035"}
"""Modes that are on in a new terminal: wrapping, key repeat, the cursor, and the encoding of Meta and NumLock."""
_COLOURS = re.compile(r"\x1b\](4|1[0-9]);")


@attrs.define
class TerminalModes:
    """The terminal modes that the fed output has changed."""

    _output: TerminalOutput = attrs.field(factory=TerminalOutput)
    _on: set[str] = attrs.field(factory=set)
    _off: set[str] = attrs.field(factory=set)
    _other: set[str] = attrs.field(factory=set)
    """Sequences that undo the other changes."""

    def feed(self, data: bytes) -> None:
        """Process a piece of the output, which may end within a sequence."""
        for unit in self._output.feed(data):
            if unit == "\x0e":
                self._other.add("\x0f")  # the other set of characters, of lines
            elif unit[0] != "\x1b":
                continue
            elif (control := _CONTROL.fullmatch(unit)) is None:
                self._take_other(unit)
            elif control[1] == "?" and control[4] in "hl":
                for number in (each for each in control[2].split(";") if len(each) <= LONGEST_MODE):
                    changed, back = (self._on, self._off) if control[4] == "h" else (self._off, self._on)
                    back.discard(number)
                    changed.add(number)
            else:
                self._take_control(unit, control[1] + control[3] + control[4])

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
        """Return the sequences that restore everything that a shell expects otherwise, the alternate screen last."""
        screens = {"47", "1047", "1049"}
        off = sorted(self._on - USUALLY_ON - screens) + sorted(self._on & screens)
        return "".join(
            [
                *sorted(self._other),
                *(f"\x1b[?{number}h" for number in sorted(self._off & USUALLY_ON)),
                *(f"\x1b[?{number}l" for number in off),
            ]
        ).encode()
