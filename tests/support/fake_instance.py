"""A fake instance of real processes: an init in a PID namespace of its own, and children with given names and threads.

Run as a program it is that init: it reads commands, one a line of JSON, and answers each with a line. A member is a
process with a name, threads with names and CPU masks of their own, and memory such as QEMU gives its guest.
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
told = json.loads(sys.argv[1])
def be(name, cpus):
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as comm:
        comm.write(name)
    if cpus:
        os.sched_setaffinity(0, cpus)
ready, gate, tids = threading.Barrier(len(told["threads"]) + 1), threading.Event(), {}
def thread(name, cpus):
    be(name, cpus)
    tids[name] = threading.get_native_id()
    ready.wait()
    gate.wait()
be(told["name"], told["cpus"])
for each in told["threads"]:
    threading.Thread(target=thread, args=each, daemon=True).start()
if told["ram"]:
    ram = os.memfd_create("fake-ram")
    os.ftruncate(ram, told["ram"])
    memory = mmap.mmap(ram, told["ram"])
    for page in range(0, told["ram"], mmap.PAGESIZE):
        memory[page] = 1
ready.wait()
os.setuid(told["uid"])
print(json.dumps([os.getpid(), tids]), flush=True)
sys.stdin.read()
"""


class FakeInstance:
    """The instance seen from outside; numbers of processes and threads are those of its own namespace."""

    def __init__(self, init: subprocess.Popen[str]) -> None:
        self._init = init

    @property
    def pid(self) -> int:
        """Return the init's number out here: it is the only child of unshare(1)."""
        return children(self._init.pid)[0]

    def tell(self, *order: object) -> Any:
        """Send the init a command and return its answer."""
        assert self._init.stdin is not None
        assert self._init.stdout is not None
        print(json.dumps(order), file=self._init.stdin, flush=True)
        line = self._init.stdout.readline()
        assert line, f"the init has ended at {order}"
        return json.loads(line)

    def start(
        self, name: str, cpus: list[int], threads: Mapping[str, list[int]] | None = None, ram: int = 0, uid: int = 0
    ) -> tuple[int, dict[str, int]]:
        """Start a member with its masks (empty: as inherited) and return its pid and the tids of its *threads*."""
        told = {"name": name, "cpus": cpus, "threads": list((threads or {}).items()), "ram": ram, "uid": uid}
        pid, tids = self.tell("start", told)
        return pid, tids

    def start_anchor(self) -> int:
        """Start `sleep infinity` and return its pid."""
        pid: int = self.tell("anchor")
        return pid

    def outside(self, tid: int) -> int:
        """Return the number out here of a member, or of a member's thread."""
        for pid in (self.pid, *children(self.pid)):
            for task in Path(f"/proc/{pid}/task").iterdir():
                numbers = next(line for line in (task / "status").read_text().splitlines() if line.startswith("NSpid:"))
                if int(numbers.split()[-1]) == tid:
                    return int(task.name)
        raise AssertionError(f"no thread {tid} in the fake instance")

    def command(self, *argv: str) -> tuple[str, ...]:
        """Return how to run a command in the instance's namespaces."""
        return ("nsenter", f"--target={self.pid}", "--pid", "--mount", *argv)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def fake_instance() -> Iterator[FakeInstance]:
    """Hold a fake instance; at the end of the block none of its processes is left."""
    argv = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *PYTHON, __file__]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as init:
        try:
            found = FakeInstance(init)
            found.tell("nothing")
            yield found
        finally:
            init.kill()


def write_receipt(path: str, cpus: list[int], roles: dict[str, str], vcpus: dict[str, int]) -> None:
    """Write what the runner would have written of these processes (pid → role, and tid → vCPU)."""
    from runner.cpuset import CpuSet
    from runner.kernel.files import publish
    from runner.kernel.procfs import Procfs
    from runner.placement.threads import ObservedThread, Receipt, Role, ThreadRules

    threads = tuple(
        ObservedThread(Role(role) if (index := vcpus.get(str(thread.tid))) is None else Role.VCPU, index, thread)
        for pid, role in roles.items()
        for thread in Procfs().threads(int(pid))
    )
    rules = ThreadRules(CpuSet(cpus), tuple(cpus), shared=False, cgroups=None)
    publish(PurePosixPath(path), json.dumps(Receipt("affinity", rules, threads).to_json()).encode())


def main() -> None:
    """Be the init."""
    members: dict[int, subprocess.Popen[str]] = {}
    for line in sys.stdin:
        do, *arguments = json.loads(line)
        answer: object = None
        if do == "start":
            member = subprocess.Popen(
                [sys.executable, "-ISc", MEMBER, json.dumps(arguments[0])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert member.stdout is not None
            answer = json.loads(member.stdout.readline())
            members[member.pid] = member
        elif do == "pin":
            os.sched_setaffinity(*arguments)
        elif do == "anchor":
            anchor = subprocess.Popen(["sleep", "infinity"], text=True)
            members[anchor.pid] = anchor
            answer = anchor.pid
        elif do == "end":
            members[arguments[0]].kill()
            members.pop(arguments[0]).wait()
        elif do == "receipt":
            write_receipt(*arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
