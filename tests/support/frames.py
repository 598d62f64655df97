"""Malformed messages for the controller."""

from __future__ import annotations

import random
from collections.abc import Iterator

STATUS = b'{"jsonrpc":"2.0","method":"getStatus","id":1}\n'


def frames(seed: int) -> Iterator[bytes]:
    """Yield malformed messages of every kind, one line each; none of them is a lone opening bracket."""
    chance = random.Random(seed)  # noqa: S311  # no secret
    whole = [
        STATUS.rstrip(),
        b'{"jsonrpc":"2.0","method":"registerCgroup","params":{"uuid":"123","cpuset":"4-7"},"id":1}',
        b'{"jsonrpc":"2.0","method":"deregisterCgroup","params":["123"],"id":"a"}',
        b'[{"jsonrpc":"2.0","method":"listInstances","id":1},{"jsonrpc":"2.0","method":"x","id":null},1,[]]',
        b'{"jsonrpc":"2.0","method":"registerCgroup","params":{"uuid":"../../x","cpuset":"0-99999"},"id":1e400}',
        b'{"id":{"id":[NaN,Infinity]},"id":true,"params":"\\ud800"}',
    ]
    while True:
        frame = bytearray(chance.choice(whole))
        for _ in range(chance.randrange(1, 4)):
            place = chance.randrange(len(frame))
            match chance.randrange(6):
                case 0:
                    frame[place] = chance.randrange(256)
                case 1:
                    del frame[place : place + chance.randrange(1, 9)]
                case 2:
                    frame[place:place] = chance.choice([b"[" * 500, b"\x00", b"\xff", b'"', b"}", b"-", b"\\u", b","])
                case 3:
                    del frame[place:]
                case 4:
                    frame += frame[:place]
                case _:
                    frame[place:place] = bytes(chance.randrange(256) for _ in range(8))
            frame = frame or bytearray(b"x")
        line = bytes(frame.replace(b"\n", b" "))
        if line.strip() not in (b"", b"{", b"["):
            yield line + b"\n"
