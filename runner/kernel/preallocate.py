"""A script that preallocates the pages of memory files near the CPUs that will use them, in a process of its own.

It is started in the cgroup that is to be charged for the pages, and ends before QEMU starts. It is a process, because a page
is charged to the cgroup of the process that touches it first, and because it can be ended at any moment. It is not the
runner, which has one thread, and not QEMU, which takes one NUMA node after the other, reports no progress, and may not
choose the CPUs of its threads in its sandbox. QEMU then only maps the pages.

The first argument is the interval of its progress reports in seconds. If it fails, its last line of output is the reason,
and its exit status the kind of reason (:data:`NO_MEMORY`, :data:`NOT_BOUND`, :data:`NO_THREADS`).
The others are ``DESCRIPTOR:BYTES:PAGE:NUMA_NODES:CPUS:THREADS``, one for each file: ``PAGE`` is the size of its huge
pages or 0, its pages are bound to the ``NUMA_NODES`` (comma separated; empty: no binding), and its ``THREADS`` run on
``CPUS`` (as in "2-3,10").

It imports nothing of this package and little else, because it runs with ``python -IS`` and the instance waits for it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import time

_MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of mbind(2) by machine: glibc has no function for it."""
_MPOL_BIND = 2
_MASK_BITS = 1024
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
"""``include/uapi/asm-generic/mman-common.h``; the second came with Linux 5.14."""
_SLICE = 32 << 20
"""Bytes of one system call: small enough that all threads end together, large enough to make the call worthwhile."""
_LIBC = ctypes.CDLL(None, use_errno=True)
MIB = 1 << 20

NO_MEMORY, NOT_BOUND, NO_THREADS = 3, 4, 5
"""Exit statuses: what could not be had. Python itself ends with 1 and 2; an enum would be one import more."""


class PreallocationError(Exception):
    """The failure of a preallocation; *status* is one of the exit statuses above."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def bind(address: int, size: int, numa_nodes: list[int]) -> None:
    """Bind the *size* bytes that are mapped at *address* to *numa_nodes*.

    Raises :exc:`OSError` as mbind(2) does, :exc:`KeyError` where its number is not known (the machine's name).
    """
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    for node in numa_nodes:
        mask[node // 64] |= 1 << node % 64
    number = ctypes.c_long(_MBIND[os.uname().machine])
    start, length, bits = ctypes.c_void_p(address), ctypes.c_ulong(size), ctypes.c_ulong(_MASK_BITS)
    _check(_LIBC.syscall(number, start, length, _MPOL_BIND, mask, bits, 0))


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class _File:
    """One memory file: mapped, bound, and preallocated slice by slice by its threads."""

    def __init__(self, argument: str) -> None:
        descriptor, size, page, numa_nodes, cpus, threads = argument.split(":")
        self.size, self.page, self.threads = int(size), int(page), int(threads)
        self.numa_nodes = [int(node) for node in numa_nodes.split(",") if node]
        self.cpus = [
            cpu for part in cpus.split(",") for cpu in range(int(part.split("-")[0]), int(part.rpartition("-")[2]) + 1)
        ]
        self.step = max(_SLICE, self.page)
        self.offsets = iter(range(0, self.size, self.step))
        self.name = f"pages of {self.page // MIB} MiB" if self.page else "memory"
        if self.numa_nodes:
            self.name += f" on NUMA node {' or '.join(map(str, self.numa_nodes))}"
        self.taken = 0
        self._counting = threading.Lock()
        try:
            self.mapped = mmap.mmap(int(descriptor), self.size, mmap.MAP_SHARED)
        except OSError as error:
            raise PreallocationError(
                NO_MEMORY, f"cannot map {self.size // MIB} MiB in {self.name}: {error.strerror}"
            ) from None
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapped))
        if self.numa_nodes:
            try:
                bind(self.address, self.size, self.numa_nodes)
            except OSError as error:
                raise PreallocationError(
                    NOT_BOUND, f"cannot bind memory to NUMA nodes (mbind): {error.strerror}"
                ) from None
        if not self.page:  # as QEMU does; without effect on a kernel without transparent huge pages
            _LIBC.madvise(ctypes.c_void_p(self.address), ctypes.c_ulong(self.size), _MADV_HUGEPAGE)

    def take(self) -> None:
        """Preallocate slice after slice; ctypes releases the interpreter lock meanwhile."""
        try:  # noqa: SIM105 - contextlib is one import more
            os.sched_setaffinity(0, self.cpus)  # 0 is this thread
        except OSError:
            pass  # no such CPU in this cgroup: the thread runs on any CPU that it may use
        for offset in self.offsets:
            length = min(self.step, self.size - offset)
            start, size = ctypes.c_void_p(self.address + offset), ctypes.c_ulong(length)
            try:
                _check(_LIBC.madvise(start, size, _MADV_POPULATE_WRITE))
            except OSError as error:
                of = f"{self.taken // MIB} of {self.size // MIB} MiB"
                raise PreallocationError(
                    NO_MEMORY, f"cannot take more than {of} in {self.name}: {error.strerror}"
                ) from None
            with self._counting:
                self.taken += length


def main(interval: float, arguments: list[str]) -> None:
    """Preallocate all files, and print the progress every *interval* seconds. Raises :exc:`PreallocationError`."""
    began = time.monotonic()
    files = [_File(argument) for argument in arguments]
    total = sum(file.size for file in files)
    failures: list[PreallocationError] = []
    over = threading.Event()

    def work(file: _File) -> None:
        try:
            file.take()
        except PreallocationError as error:
            failures.append(error)
            over.set()

    threads = [threading.Thread(target=work, args=(file,), daemon=True) for file in files for _ in range(file.threads)]

    def wait() -> None:
        for thread in threads:
            thread.join()
        over.set()

    try:
        for thread in (*threads, threading.Thread(target=wait, daemon=True)):
            thread.start()
    except RuntimeError:  # Python hides the error number, EAGAIN
        raise PreallocationError(
            NO_THREADS, f"cannot start {len(threads)} threads: {os.strerror(errno.EAGAIN)}"
        ) from None
    while not over.wait(interval):
        taken = sum(file.taken for file in files)
        speed = taken / (time.monotonic() - began) / (1 << 30)
        print(f"{taken // MIB} of {total // MIB} MiB taken, {speed:.2g} GiB/s", flush=True)
    if failures:
        raise failures[0]


if __name__ == "__main__":
    status = 0
    try:
        main(float(sys.argv[1]), sys.argv[2:])
    except PreallocationError as error:
        print(error, flush=True)
        status = error.status
    os._exit(status)  # after a failure the other threads need not finish
