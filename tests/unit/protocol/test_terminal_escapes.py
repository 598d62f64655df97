"""What a line says without escape sequences, what a replay must not ask a terminal, and what a session leaves switched on."""

from __future__ import annotations

import pytest

from runner.protocol.terminal_escapes import TerminalModes, without_escapes, without_questions


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
    ],
)
def test_escape_sequences_are_no_characters_of_a_line(line: bytes) -> None:
    assert without_escapes(line) == b"debian login: "


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
        ),
    ],
)
def test_a_replay_asks_nothing(question: bytes) -> None:
    assert without_questions(b"before" + question + b"after") == b"beforeafter"


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
        (b"\x1b>\x1b[?3l\x1b[?4l\x1b[?5l\x1b[?7h\x1b[?8h\x1b[?1034h", b""),  # rs2 of terminfo's vt100, and smm of xterm
    ],
)
def test_what_is_left_switched_on_is_switched_off(output: bytes, reset: bytes) -> None:
    whole, bytewise = TerminalModes(), TerminalModes()
    whole.feed(output)
    for each in output:
        bytewise.feed(bytes([each]))
    assert whole.reset() == bytewise.reset() == reset
