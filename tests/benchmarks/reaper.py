"""PID 1 with the project's own reaper and nothing else; runs the program its arguments name.

usage: reaper.py DESCRIPTOR,DESCRIPTOR PROGRAM [ARGUMENT ...]
"""

from __future__ import annotations

import sys

import trio

from runner.kernel.child_processes import Command, open_processes


async def reap(fds: tuple[int, ...], argv: tuple[str, ...]) -> int:
    async with open_processes() as processes:
        return await processes.spawn(Command("child", argv, fds)).wait()


if __name__ == "__main__":
    sys.exit(trio.run(reap, tuple(map(int, sys.argv[1].split(","))), tuple(sys.argv[2:])))
