"""The examples of the JSON-RPC specification (section 7), verbatim, and the cases that it leaves open."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
import trio

from runner.kernel.line_reader import LINES_PER_STEP, OverlongError
from runner.protocol.jsonrpc import (
    INVALID_PARAMS,
    LONGEST_BATCH,
    METHOD_NOT_FOUND,
    MessageFramer,
    RpcError,
    RpcResult,
    answer,
    parse_message,
)


async def call(method: str, params: Mapping[str, object] | list[object]) -> RpcResult:
    await trio.lowlevel.checkpoint()
    match method, params:
        case "subtract", [int() as left, int() as right]:
            return RpcResult(left - right)
        case "subtract", {"minuend": int() as left, "subtrahend": int() as right}:
            return RpcResult(left - right)
        case "sum", list():
            return RpcResult(sum(value for value in params if isinstance(value, int)))
        case "get_data", _:
            return RpcResult(["hello", 5])
        case (("update" | "notify_hello" | "notify_sum"), _):
            return RpcResult(None)
        case "subtract", _:
            raise RpcError(INVALID_PARAMS, "Invalid params", {"given": len(params)}, remedy="give two")
    raise RpcError(METHOD_NOT_FOUND, "Method not found")


async def response_to(message: str | bytes) -> object:
    reply = await answer(message.encode() if isinstance(message, str) else message, call)
    if reply is None:
        return None
    assert reply.line.endswith(b"\n")
    assert reply.line.count(b"\n") == 1
    return json.loads(reply.line)


def fed(framer: MessageFramer, data: bytes) -> list[bytes]:
    """Return the messages that *data* completes."""
    framer.feed(data)
    messages = list(framer.step())
    while framer.has_line:
        messages += framer.step()
    return messages


def failure(code: int, identifier: object = None) -> dict[str, object]:
    return {"jsonrpc": "2.0", "error": {"code": code}, "id": identifier}


def without_words(value: object) -> object:
    """Reduce an error to its code, which is all that the specification fixes."""
    if isinstance(value, list):
        return [without_words(item) for item in value]
    if isinstance(value, dict) and "error" in value:
        return {**value, "error": {"code": value["error"]["code"]}}
    return value


@pytest.mark.parametrize(
    ("request_", "response"),
    [
        (
            '{"jsonrpc": "2.0", "method": "subtract", "params": [42, 23], "id": 1}',
            {"jsonrpc": "2.0", "result": 19, "id": 1},
        ),
        (
            '{"jsonrpc": "2.0", "method": "subtract", "params": [23, 42], "id": 2}',
            {"jsonrpc": "2.0", "result": -19, "id": 2},
        ),
        (
            '{"jsonrpc": "2.0", "method": "subtract", "params": {"subtrahend": 23, "minuend": 42}, "id": 3}',
            {"jsonrpc": "2.0", "result": 19, "id": 3},
        ),
        (
            '{"jsonrpc": "2.0", "method": "subtract", "params": {"minuend": 42, "subtrahend": 23}, "id": 4}',
            {"jsonrpc": "2.0", "result": 19, "id": 4},
        ),
        ('{"jsonrpc": "2.0", "method": "update", "params": [1,2,3,4,5]}', None),
        ('{"jsonrpc": "2.0", "method": "foobar"}', None),
        ('{"jsonrpc": "2.0", "method": "foobar", "id": "1"}', failure(-32601, "1")),
        ('{"jsonrpc": "2.0", "method": "foobar, "params": "bar", "baz]', failure(-32700)),
        ('{"jsonrpc": "2.0", "method": 1, "params": "bar"}', failure(-32600)),
        (
            """[
  {"jsonrpc": "2.0", "method": "sum", "params": [1,2,4], "id": "1"},
  {"jsonrpc": "2.0", "method"
]""",
            failure(-32700),
        ),
        ("[]", failure(-32600)),
        ("[1]", [failure(-32600)]),
        ("[1,2,3]", [failure(-32600)] * 3),
        (
            """[
        {"jsonrpc": "2.0", "method": "sum", "params": [1,2,4], "id": "1"},
        {"jsonrpc": "2.0", "method": "notify_hello", "params": [7]},
        {"jsonrpc": "2.0", "method": "subtract", "params": [42,23], "id": "2"},
        {"foo": "boo"},
        {"jsonrpc": "2.0", "method": "foo.get", "params": {"name": "myself"}, "id": "5"},
        {"jsonrpc": "2.0", "method": "get_data", "id": "9"}
    ]""",
            [
                {"jsonrpc": "2.0", "result": 7, "id": "1"},
                {"jsonrpc": "2.0", "result": 19, "id": "2"},
                failure(-32600),
                failure(-32601, "5"),
                {"jsonrpc": "2.0", "result": ["hello", 5], "id": "9"},
            ],
        ),
        (
            """[
        {"jsonrpc": "2.0", "method": "notify_sum", "params": [1,2,4]},
        {"jsonrpc": "2.0", "method": "notify_hello", "params": [7]}
    ]""",
            None,
        ),
    ],
)
async def test_every_example_of_the_specification(request_: str, response: object) -> None:
    assert without_words(await response_to(request_)) == response
    # As the same bytes come over the wire, whole or one by one, they make exactly one message.
    for size in (1, 7, 10_000):
        framer, wire = MessageFramer(10_000), request_.encode() + b"\n"
        messages = [
            message for begin in range(0, len(wire), size) for message in fed(framer, wire[begin : begin + size])
        ]
        assert [message.split() for message in messages] == [wire.split()] or request_.endswith("    ]")


@pytest.mark.parametrize("identifier", [0, -1, 1.5, "", "a", "\ud800", 10**300, None])
async def test_the_id_comes_back_as_it_was(identifier: object) -> None:
    request = {"jsonrpc": "2.0", "method": "subtract", "params": [2, 1], "id": identifier}
    assert await response_to(json.dumps(request)) == {"jsonrpc": "2.0", "result": 1, "id": identifier}


@pytest.mark.parametrize("identifier", ["{}", "[]", "true", "false"])
async def test_an_id_of_another_kind_is_an_invalid_request(identifier: str) -> None:
    request = f'{{"jsonrpc":"2.0","method":"subtract","params":[2,1],"id":{identifier}}}'
    assert without_words(await response_to(request)) == failure(-32600)


@pytest.mark.parametrize(
    "members", ['"method":"sum"', '"jsonrpc":"1.0","method":"sum"', '"jsonrpc":2.0,"method":"sum"']
)
async def test_only_version_2_is_accepted(members: str) -> None:
    assert without_words(await response_to(f'{{{members},"id":1}}')) == failure(-32600, 1)


@pytest.mark.parametrize("params", ['"bar"', "7", "null", "true"])
async def test_params_are_structured(params: str) -> None:
    request = f'{{"jsonrpc":"2.0","method":"sum","params":{params},"id":1}}'
    assert without_words(await response_to(request)) == failure(-32600, 1)


async def test_errors_of_a_method_carry_its_data() -> None:
    assert await response_to('{"jsonrpc":"2.0","method":"subtract","params":[1],"id":1}') == {
        "jsonrpc": "2.0",
        "error": {
            "code": -32602,
            "message": "Invalid params; give two",
            "data": {"given": 1, "remedy": "give two"},
        },
        "id": 1,
    }
    assert await response_to('{"jsonrpc":"2.0","method":"subtract","params":[1]}') is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b'{"jsonrpc":"2.0","method":"\xc3\x28","id":1}',
        b"\xef\xbb\xbf[]",
        b"NaN",
        b"[Infinity]",
        b"[-Infinity]",
        b"[1e400]",
        b"1" * 5000,
        b"[" * 100_000,
        b'{"a":' * 60_000,
        b"[" * 60_000 + b"]" * 60_000,
        b'{"jsonrpc":"2.0","id":1,"id":2,"method":"sum"}',
        b"[1,]",
        b"{} {}",
        b"'a'",
        b"\x00",
    ],
)
async def test_malformed_json_is_a_parse_error(text: bytes) -> None:
    assert without_words(await response_to(text)) == failure(-32700)


async def test_a_batch_has_its_limit() -> None:
    one = {"jsonrpc": "2.0", "method": "sum", "params": [1], "id": 1}
    responses = await response_to(json.dumps([one] * LONGEST_BATCH))
    assert isinstance(responses, list)
    assert len(responses) == LONGEST_BATCH
    assert without_words(await response_to(json.dumps([one] * (LONGEST_BATCH + 1)))) == failure(-32600)
    assert without_words(await response_to("[" + ",".join("1" * 10_000) + "]")) == failure(-32600)


def test_deep_but_reasonable_nesting_is_read() -> None:
    assert parse_message(b"[" * 50 + b"]" * 50)


def test_one_line_is_one_message() -> None:
    framer = MessageFramer(100)
    assert fed(framer, b'{"a":1}\r\n\n  \n[2]\n{"b"') == [b'{"a":1}\r\n', b"[2]\n"]
    assert fed(framer, b":3}") == []
    assert not framer.unfinished
    assert fed(framer, b"\n") == [b'{"b":3}\n']


def test_a_message_printed_over_several_lines_ends_with_its_bracket() -> None:
    framer = MessageFramer(100)
    printed = json.dumps({"a": {"b": [1, 2]}, "c": []}, indent=2).encode() + b"\n"
    assert fed(framer, printed + b"[1]\n") == [printed, b"[1]\n"]
    assert not framer.unfinished


def test_an_unclosed_bracket_does_not_swallow_the_next_message() -> None:
    framer = MessageFramer(100)
    assert fed(framer, b"{\n") == []
    assert framer.unfinished
    assert fed(framer, b'{"a":1}\n') == [b"{\n", b'{"a":1}\n']
    assert not framer.unfinished
    assert fed(framer, b"[\n 1,\n") == []
    assert list(framer.flush()) == [b"[\n 1,\n"]
    assert not framer.unfinished
    assert list(framer.flush()) == []


@pytest.mark.parametrize("data", [b"x" * 101, b"x" * 101 + b"\n", b"{\n" + b" \n" * 50, b"{\n" + b"x" * 99])
def test_a_message_has_its_limit(data: bytes) -> None:
    with pytest.raises(OverlongError):
        fed(MessageFramer(100), data)
    framer = MessageFramer(100)
    with pytest.raises(OverlongError):
        [fed(framer, bytes([byte])) for byte in data]
    assert len(fed(MessageFramer(100), b"x" * 99 + b"\n" + b"y" * 99 + b"\n")) == 2


def test_one_step_handles_a_bounded_number_of_lines() -> None:
    framer = MessageFramer(100_000)
    framer.feed(b"\n" * 1000 + b"[1]\n" * 2)
    steps = []
    while framer.has_line:
        steps.append(list(framer.step()))
    assert len(steps) == -(-1002 // LINES_PER_STEP)
    assert steps[-1] == [b"[1]\n"] * 2
