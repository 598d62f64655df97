"""What a line says without escape sequences, what a replay must not ask a terminal, and what a session leaves switched on."""

from __future__ import annotations

import pytest

from runner.protocol.terminal_escapes import LONGEST, TerminalModes, TerminalOutput, shown_lines, without_questions


@pytest.mark.parametrize(
    "line",
    [
        b"\x1b[0m\x1b[1;32mdebian login:\x1b[0m ",
        b"\x1b]3008;start=af1a;type=boot\x1b\\debian login: ",  # systemd 257
        b"\x1b]0;title\x07debian \x1b(Blogin\x1b[?2004h: \x1b[6n",
        b"\x1bP$q q\x1b\\debian login: \x1b=",
        b"debian login: ",
        b"\rdebian login: ",
        b"\x1b[?25h\x07\0debian login: ",
        b"[ *** ] 3 s\rdebian login: ",
        b"[  ***] A start job is running for a disk (3 s / no limit)\r\x1b[Kdebian login: ",
        b"[  ***] A start job is running for a disk (3 s / no limit)\x1b[2K\rdebian login: \x1b[0K",
        b"debiam\bn login: ",
        b"\xc2\x9b1;32mdebian login:\xc2\x9b0m ",  # control characters of eight bits, in UTF-8
        b"\xc2\x9d0;title\xc2\x9cdebian login: ",
        b"\x1b[1\x07;3\x002mdebian login: ",  # obeyed within the sequence
        b"\x1b[31\x18debian login: ",
        b"\x1b[31\x1b[0mdebian login: ",
        b"\x1b]0;broken off\x1b[0mdebian login: ",
        b"\x1bPtmux;\x1b\x1b]0;title\x07\x1b\\debian login: ",
        b"\x1bkscreen's title\x1b\\debian login: ",
        b"caf\xc3\xa9\b\b\b\bdebian login: ",
        b"a longer line\x1b[1G\x1b[Kdebian login: ",
        b"abc\x1b[3Ddebian login: ",
        b"xxdebian login: \r\x1b[2P",
        b"debian\x1b[Clogin: ",
    ],
)
def test_escape_sequences_are_no_characters_of_a_line(line: bytes) -> None:
    assert shown_lines(line) == ["debian login: "]


@pytest.mark.parametrize(
    "line",
    [
        b"of before\x1b[H\x1b[2Jdebian login: ",
        b"of before\x1b[?25l\x1b[24;1Hdebian login: ",
        b"of before\x0cdebian login: ",
    ],
)
def test_a_line_begins_where_the_cursor_is_put(line: bytes) -> None:
    assert shown_lines(line) == ["of before", "debian login: "]


def test_a_line_without_sequences_is_itself() -> None:
    assert shown_lines("grüße\t\U0001f600 \x9a".encode() + b"\xff") == ["grüße\t\U0001f600 \ufffd"]


@pytest.mark.parametrize(
    "question",
    [
        *(
            b"\x1b[c",
            b"\x1b[>c",
            b"\x1b[=0c",
            b"\x1b[6n",
            b"\x1b[?6n",
            b"\x1b[5n",
            b"\x1b[?2026$p",
            b"\x1b[x",
            b"\x1b[>0q",
        ),
        *(
            b"\x1b[18t",
            b"\x1b[14;2t",
            b"\x1b[?u",
            b"\x1b]11;?\x07",
            b"\x1b]4;1;?\x1b\\",
            b"\x1bP$qm\x1b\\",
            b"\x1bZ",
            b"\x05",
            b"\x1b]52;c;?\x07",
            b"\x1b]21;foreground=?\x1b\\",
            b"\x1b]1337;ReportCellSize\x07",
            b"\x1b[2$w",
            b"\x1b[1;1;1;1;24;80*y",
            b"\x1b[?4m",
            b"\x1b[?2;1;0S",
            b"\x1b[&u",
            b"\x1bP+Q5465\x1b\\",
            b"\x1b_Gi=1,a=q;AAAA\x1b\\",
            b"\xc2\x9b6n",
            b"\xc2\x9d11;?\x07",
            b"\xc2\x90$qm\xc2\x9c",
            b"\x1b]60\x07",
            b"\x1b]11;?\0\x07",  # what a terminal passes over in a string
            b"\x1b]11;\x7f?\x1b\\",
            b"\x1b]22;?__current__\x1b\\",
            b"\x1b]99;i=1:p=?;\x1b\\",
            b"\x1b[>4;?m",
            b"\x1b[5i",  # has a printer print
            b"\x1b G",  # has the terminal answer with eight bits
            b"\x1b]52;c;aGk=\x07",  # replaces the clipboard
            b"\x1b[8;24;80t",  # resizes the window
            b"\x1b[1;2;3;4z",  # unknown here
        ),
    ],
)
def test_a_replay_asks_nothing(question: bytes) -> None:
    assert without_questions(b"before" + question + b"after") == b"beforeafter"


def test_a_question_is_none_the_less_one_with_a_control_character_inside() -> None:
    assert without_questions(b"\x1b[6\r\n\0n") == b"\r\n\0"


def test_a_question_is_found_in_pieces() -> None:
    output, asked = TerminalOutput(), b"gr\xc3\xbc\xc3\x9fe \xff\x1b[6n\x1b]11;?\x1b\\ \x1b[31mred\xc2\x9bc"
    assert (
        b"".join(without_questions(bytes([each]), output) for each in asked) == b"gr\xc3\xbc\xc3\x9fe \xff \x1b[31mred"
    )


@pytest.mark.parametrize(
    ("begin", "filler", "end"),
    [
        (b"\x1b]4;0;?", b";1;?", b";2;?\x07"),
        (b"\x1b]4;0;red", b";1;red", b";2;?\x1b\\"),
        (b"\x1b[", b"0", b"c"),
        (b"\x1b[", b";", b"6n"),
        (b"\x1b[", b"\r", b"6n"),
        (b"\x1b", b" ", b"G"),
        (b"\xc2\x9b", b"0", b"c"),
        (b"\x1bP$qm", b"m", b"\x1b\\"),
        (b"\x1b]0;a title", b" ", b"\x07"),
    ],
)
@pytest.mark.parametrize("size", [1, 1000, LONGEST, 1 << 20])
def test_a_sequence_that_is_too_long_is_passed_over_to_its_end(
    begin: bytes, filler: bytes, end: bytes, size: int
) -> None:
    asked, output, drawn = b"A" + begin + filler * 5000 + end + b"\x1b[31mB", TerminalOutput(), b""
    for at in range(0, len(asked), size):
        drawn += without_questions(asked[at : at + size], output)
        assert len(output.begun) <= LONGEST + 1
    assert drawn == b"A\x1b[31mB"


@pytest.mark.parametrize(
    "pieces",
    [
        [b"A\x1b[\x1b", b"Z", b"6n"],
        [b"A\x1b[\xc3\xa96n"],
        [b"A\x1b\r[6n"],
        [b"A\x1b", b"\0]11;?\x07"],
        [b"A\x1b\xc3\xa9[c"],
        [b"A\x1b(P\x1b (X"],
    ],
)
def test_what_is_no_whole_sequence_begins_none(pieces: list[bytes]) -> None:
    output = TerminalOutput()
    assert b"\x1b" not in b"".join(without_questions(each, output) for each in pieces)


def test_two_bytes_that_a_question_parted_are_no_control_character() -> None:
    assert without_questions(b"\xc2\x1bZ\x9b6n \xff") == b"\xc2\xef\xbf\xbd6n \xff"


def test_what_has_only_begun_goes_on_with_the_output_to_come() -> None:
    assert without_questions(b"red \x1b[3") == b"red \x1b[3"
    assert without_questions(b"red \x1b[\x053") == b"red \x1b[3"  # ENQ is answered there, too


def test_a_replay_keeps_what_is_no_question() -> None:
    shown = b"\x1b[2J\x1b[1;1H\x1b[31mred\x1b[0m\x1b[4 q\x1b]0;title\x07\x1b[?25l\x1b[22;0;0t"
    assert without_questions(shown) == shown


@pytest.mark.parametrize(
    ("output", "reset"),
    [
        (b"plain text\r\n", b""),
        (b"\x1b[?1049h\x1b[?25l\x1b[?1000;1006h", b"\x1b[?25h\x1b[?1000l\x1b[?1006l\x1b[?1049l"),
        (b"\x1b[?1049h\x1b[?2004h left \x1b[?2004l\x1b[?1049l", b""),
        (b"\x1b[1;31mred", b"\x1b[0m"),
        (b"\x1b=\x1b[2;10r\x1b(0", b"\x0f\x1b(B\x1b>\x1b[r"),
        (b"\x1b[>4;2m\x1b[>1u", b"\x1b[<99u\x1b[>4m"),
        (b"\x1b[=5u\x1b[4 q\x1b[4h", b"\x1b[0 q\x1b[4l\x1b[=0u"),
        (b"\x1b]11;#000000\x07\x1b]4;1;red\x1b\\\x0e", b"\x0f\x1b]104\x07\x1b]111\x07"),
        (b"\xc2\x9b?1049h\x1b[?25\x07l", b"\x1b[?25h\x1b[?1049l"),
        (b"\x1b>\x1b[?3l\x1b[?4l\x1b[?5l\x1b[?7h\x1b[?8h\x1b[?1034h", b""),  # rs2 of terminfo's vt100, and smm of xterm
    ],
)
def test_what_is_left_switched_on_is_switched_off(output: bytes, reset: bytes) -> None:
    whole, bytewise = TerminalModes(), TerminalModes()
    whole.feed(output)
    for each in output:
        bytewise.feed(bytes([each]))
    assert whole.reset() == bytewise.reset() == reset


def test_modes_that_no_terminal_has_are_not_kept() -> None:
    """A guest could fill the memory of the client with their numbers."""
    modes = TerminalModes()
    modes.feed(b"".join(b"\x1b[?%dh\x1b[?%dl" % (number, number + 1) for number in range(10_000, 10_100, 2)))
    assert modes.reset() == b""
