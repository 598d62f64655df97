"""Take the pages of memory files now, near to the CPUs that will use them: a program of its own, started as a script.

It is started in the cgroup that is to be charged for the pages, and is gone before anything else happens. A program,
because a page is charged to whoever touches it first, and because it can be ended at any moment; of its own, because the
runner has one thread, and QEMU, which could do it too, takes one NUMA node after the other, says nothing meanwhile, and
may not choose the CPUs of its threads in its sandbox. What is there QEMU has only to map.

Its first word is how many seconds are between two times that it says how far it is; if it fails, its last line says why.
The others are ``DESCRIPTOR:BYTES:PAGE:NUMA_NODES:CPUS:THREADS``, one for each file: ``PAGE`` is the size of its huge
pages or 0, its pages are bound to the ``NUMA_NODES`` (comma separated, or none: anywhere), and its ``THREADS`` run on
``CPUS`` (as in "2-3,10").

It imports nothing of ours and little else: it is started with ``python -IS``, by an instance that waits for it.
"""

from __future__ import annotations

import ctypes
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
"""Bytes that a thread takes at a time: small enough to end together, big enough to be worth a system call."""
_LIBC = ctypes.CDLL(None, use_errno=True)
MIB = 1 << 20


def bind(address: int, size: int, numa_nodes: list[int]) -> None:
    """Bind what is mapped at *address* to *numa_nodes*.

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
    """One memory file: mapped, bound, and taken slice by slice by its threads."""

    def __init__(self, word: str) -> None:
        descriptor, size, page, numa_nodes, cpus, threads = word.split(":")
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
            raise OSError(f"cannot map {self.size // MIB} MiB in {self.name}: {error.strerror}") from None
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapped))
        if self.numa_nodes:
            try:
                bind(self.address, self.size, self.numa_nodes)
            except OSError as error:
                raise OSError(f"cannot bind memory to NUMA nodes (mbind): {error.strerror}") from None
        if not self.page:  # as QEMU does, and without effect where the kernel has none
            _LIBC.madvise(ctypes.c_void_p(self.address), ctypes.c_ulong(self.size), _MADV_HUGEPAGE)

    def take(self) -> None:
        """Touch slice after slice; ctypes lets the other threads run meanwhile."""
        try:  # noqa: SIM105 - contextlib is one import more
            os.sched_setaffinity(0, self.cpus)  # 0 is this thread
        except OSError:
            pass  # no such CPU in this cgroup: then wherever it may run
        for offset in self.offsets:
            length = min(self.step, self.size - offset)
            start, size = ctypes.c_void_p(self.address + offset), ctypes.c_ulong(length)
            try:
                _check(_LIBC.madvise(start, size, _MADV_POPULATE_WRITE))
            except OSError as error:
                of = f"{self.taken // MIB} of {self.size // MIB} MiB"
                raise OSError(f"cannot take more than {of} in {self.name}: {error.strerror}") from None
            with self._counting:
                self.taken += length


def main(every: float, words: list[str]) -> str | None:
    """Take everything, and say *every* few seconds how far that is; return why it failed, in one line."""
    began = time.monotonic()
    try:
        files = [_File(word) for word in words]
    except OSError as error:
        return str(error)
    total = sum(file.size for file in files)
    reasons: list[str] = []
    over = threading.Event()

    def work(file: _File) -> None:
        try:
            file.take()
        except OSError as error:
            reasons.append(str(error))
            over.set()

    threads = [threading.Thread(target=work, args=(file,), daemon=True) for file in files for _ in range(file.threads)]
    for thread in threads:
        thread.start()

    def wait() -> None:
        for thread in threads:
            thread.join()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    while not over.wait(every):
        taken = sum(file.taken for file in files)
        speed = taken / (time.monotonic() - began) / (1 << 30)
        print(f"{taken // MIB} of {total // MIB} MiB taken, {speed:.2g} GiB/s", flush=True)
    return reasons[0] if reasons else None


if __name__ == "__main__":
    reason = main(float(sys.argv[1]), sys.argv[2:])
    if reason is not None:
        print(reason, flush=True)
    os._exit(0 if reason is None else 1)  # the other threads need not finish what has failed
