"""A fake instance of real processes: an init in its own PID namespace, and children with given names and threads.

This file, run as a program, is that init: it reads commands, one JSON document a line, and answers each with a line.
A member is a process with a name, threads with names and CPU masks of their own, and memory as QEMU allocates it for
its guest.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
PYTHON = ("env", f"PYTHONPATH={os.pathsep.join([str(PROJECT), *sys.path])}", sys.executable)

MEMBER = """
import json, mmap, os, sys, threading
member = json.loads(sys.argv[1])
def become(name, cpus):
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as comm:
        comm.write(name)
    if cpus:
        os.sched_setaffinity(0, cpus)
ready, gate, tids = threading.Barrier(len(member["threads"]) + 1), threading.Event(), {}
def thread(name, cpus):
    become(name, cpus)
    tids[name] = threading.get_native_id()
    ready.wait()
    gate.wait()
become(member["name"], member["cpus"])
for each in member["threads"]:
    threading.Thread(target=thread, args=each, daemon=True).start()
if member["ram"]:
    ram = os.memfd_create("fake-ram")
    os.ftruncate(ram, member["ram"])
    memory = mmap.mmap(ram, member["ram"])
    for page in range(0, member["ram"], mmap.PAGESIZE):
        memory[page] = 1
ready.wait()
os.setuid(member["uid"])
print(json.dumps([os.getpid(), tids]), flush=True)
sys.stdin.read()
"""


class FakeInstance:
    """The instance seen from outside; pids and tids are those of its own PID namespace, unless a method says otherwise."""

    def __init__(self, init: subprocess.Popen[str]) -> None:
        self._init = init

    @property
    def pid(self) -> int:
        """Return the init's pid in our PID namespace: it is the only child of unshare(1)."""
        return children(self._init.pid)[0]

    def request(self, *command: object) -> Any:
        """Send the init a command with its arguments, and return its answer, a JSON document."""
        assert self._init.stdin is not None
        assert self._init.stdout is not None
        print(json.dumps(command), file=self._init.stdin, flush=True)
        line = self._init.stdout.readline()
        assert line, f"the init has ended at {command}"
        return json.loads(line)

    def start(
        self, name: str, cpus: list[int], threads: Mapping[str, list[int]] | None = None, ram: int = 0, uid: int = 0
    ) -> tuple[int, dict[str, int]]:
        """Start a member and return its pid and the tids of its *threads*; an empty CPU mask is inherited."""
        member = {"name": name, "cpus": cpus, "threads": list((threads or {}).items()), "ram": ram, "uid": uid}
        pid, tids = self.request("start", member)
        return pid, tids

    def start_anchor(self) -> int:
        """Start `sleep infinity` and return its pid."""
        pid: int = self.request("anchor")
        return pid

    def outside(self, tid: int) -> int:
        """Return the tid in our PID namespace of a member, or of a thread of a member."""
        for pid in (self.pid, *children(self.pid)):
            for task in Path(f"/proc/{pid}/task").iterdir():
                numbers = next(line for line in (task / "status").read_text().splitlines() if line.startswith("NSpid:"))
                if int(numbers.split()[-1]) == tid:
                    return int(task.name)
        raise AssertionError(f"no thread {tid} in the fake instance")

    def command(self, *argv: str) -> tuple[str, ...]:
        """Return *argv* as a command that runs in the instance's PID and mount namespaces."""
        return ("nsenter", f"--target={self.pid}", "--pid", "--mount", *argv)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def fake_instance() -> Iterator[FakeInstance]:
    """Run a fake instance; all its processes have ended at the end of the block."""
    argv = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *PYTHON, __file__]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as init:
        try:
            found = FakeInstance(init)
            found.request("nothing")
            yield found
        finally:
            init.kill()


def write_receipt(path: str, cpus: list[int], roles: dict[str, str], vcpus: dict[str, int]) -> None:
    """Write the runner's receipt of these processes: *roles* by pid, and *vcpus* (indexes) by tid."""
    from runner.base.cpuset import CpuSet
    from runner.kernel.files import publish
    from runner.kernel.procfs import Procfs
    from runner.placement.children import Role
    from runner.placement.threads import ObservedThread, Receipt, ThreadRules

    threads = tuple(
        ObservedThread(Role(role) if (index := vcpus.get(str(thread.tid))) is None else Role.VCPU, index, thread)
        for pid, role in roles.items()
        for thread in Procfs().threads(int(pid))
    )
    rules = ThreadRules(CpuSet(cpus), tuple(cpus), shared=False, cgroups=None)
    publish(PurePosixPath(path), json.dumps(Receipt("affinity", rules, threads).to_json()).encode())


def main() -> None:
    """Run as the init: execute commands from standard input."""
    members: dict[int, subprocess.Popen[str]] = {}
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        answer: object = None
        if command == "start":
            member = subprocess.Popen(
                [sys.executable, "-ISc", MEMBER, json.dumps(arguments[0])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert member.stdout is not None
            answer = json.loads(member.stdout.readline())
            members[member.pid] = member
        elif command == "pin":
            os.sched_setaffinity(*arguments)
        elif command == "anchor":
            anchor = subprocess.Popen(["sleep", "infinity"], text=True)
            members[anchor.pid] = anchor
            answer = anchor.pid
        elif command == "end":
            members[arguments[0]].kill()
            members.pop(arguments[0]).wait()
        elif command == "receipt":
            write_receipt(*arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
