"""Pages of the trace ring buffer, built here as the kernel writes them (``include/linux/ring_buffer.h``)."""

from __future__ import annotations

import struct

import pytest

from runner.base.errors import HostError
from runner.kernel.ring_buffer import has_missed_events, parse_format, parse_page_size, records
from tests.support.ring_buffer_pages import SIZE, head, page

SWITCH = """\
name: sched_switch
ID: 117
format:
	field:unsigned short common_type;	offset:0;	size:2;	signed:0;
	field:unsigned char common_flags;	offset:2;	size:1;	signed:0;
	field:int common_pid;	offset:4;	size:4;	signed:1;

	field:char prev_comm[16];	offset:8;	size:16;	signed:0;
	field:pid_t prev_pid;	offset:24;	size:4;	signed:1;
	field:long prev_state;	offset:32;	size:8;	signed:1;
	field:char next_comm[16];	offset:40;	size:16;	signed:0;
	field:pid_t next_pid;	offset:56;	size:4;	signed:1;
	field:__data_loc char[] path;	offset:60;	size:4;	signed:0;

print fmt: "prev_comm=%s", REC->prev_comm
"""
HEADER = """\
	field: u64 timestamp;	offset:0;	size:8;	signed:0;
	field: local_t commit;	offset:8;	size:8;	signed:1;
	field: int overwrite;	offset:8;	size:1;	signed:1;
	field: char data;	offset:16;	size:4080;	signed:0;
"""


def short(delta: int, words: int) -> bytes:
    return head(words, delta) + b"data" * words


def found(content: bytes) -> list[tuple[int, bytes]]:
    return [(time, content[offset : offset + 4]) for time, offset in records(content)]


def test_times_are_added_up_from_that_of_the_page() -> None:
    assert found(page(1000, short(0, 1), short(5, 17), short(7, 28))) == [
        (1000, b"data"),
        (1005, b"data"),
        (1012, b"data"),
    ]


def test_a_long_time_has_a_word_of_its_own() -> None:
    extend = head(30, 3) + struct.pack("=I", 2)
    assert found(page(10, extend, short(0, 1))) == [(10 + (2 << 27) + 3, b"data")]


def test_an_absolute_time_has_the_pages_highest_bits() -> None:
    stamp = head(31, 3) + struct.pack("=I", 2)
    highest = 1 << 62
    assert found(page(highest + 10, stamp, short(1, 1))) == [(highest + (2 << 27) + 4, b"data")]


def test_a_long_record_has_its_length_before_it() -> None:
    long = head(0, 4) + struct.pack("=I", 4 + 120) + b"long" * 30
    assert found(page(0, long, short(1, 1))) == [(4, b"long"), (5, b"data")]


def test_discarded_events_count_for_the_time_alone() -> None:
    discarded = head(29, 4) + struct.pack("=I", 4 + 8) + b"discards"
    assert found(page(0, discarded, short(1, 1))) == [(5, b"data")]


def test_padding_ends_the_page() -> None:
    assert found(page(0, short(1, 1), head(29, 0), short(1, 1))) == [(1, b"data")]


def test_lost_events_are_flagged_and_are_no_part_of_the_length() -> None:
    content = page(0, short(1, 1), flags=1 << 31 | 1 << 30)
    assert has_missed_events(content)
    assert found(content) == [(1, b"data")]
    assert not has_missed_events(page(0, short(1, 1)))


def test_a_record_is_read_by_its_format() -> None:
    switch = parse_format(SWITCH)
    assert (switch.number, switch.fields["next_pid"], switch.fields["path"]) == (117, (56, 4), (60, 4))
    layout = switch.record(prev_comm="16s", prev_pid="i", next_comm="16s", next_pid="i")
    content = struct.pack("=HBBi16siiq16sii", 117, 0, 0, 7, b"python", 7, 120, 0, b"swapper/3", 0, 120)
    assert layout.unpack_from(content) == (117, b"python".ljust(16, b"\0"), 7, b"swapper/3".ljust(16, b"\0"), 0)


@pytest.mark.parametrize("code", ["q", "h"])
def test_a_field_of_another_size_is_refused(code: str) -> None:
    with pytest.raises(HostError, match="the kernel's event 117 has no field 'next_pid' as expected"):
        parse_format(SWITCH).record(next_pid=code)


def test_a_field_that_is_missing_is_refused() -> None:
    with pytest.raises(HostError, match="no field 'cpu'"):
        parse_format(SWITCH).record(cpu="i")


def test_other_layouts_are_refused() -> None:
    assert parse_page_size(HEADER) == SIZE
    for text in (HEADER.replace("offset:16", "offset:12"), ""):
        with pytest.raises(HostError, match="pages of an unknown layout"):
            parse_page_size(text)
    with pytest.raises(HostError, match="has no ID"):
        parse_format("")
