"""Which limit is behind an errno, by the files that the kernel shows it in."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import pytest

from runner.facts.roots import Roots
from runner.kernel.limits import (
    OutOfMemory,
    Use,
    limit_behind,
    limit_in_words,
    limit_of_signal,
    memory_limit,
    own_groups,
)

MIB = 1 << 20
USER = 64055
V2 = "0::/pod/container\n"
V1 = "4:memory:/pod/container\n3:pids:/elsewhere\n2:cpu,cpuacct:/\n0::/\n"
"""A container without a cgroup namespace: its own groups are the tops of its mounts, whatever the paths are."""
QUIET = {
    "proc/self/cgroup": V2,
    "proc/self/status": "Name:\tx\nSeccomp:\t0\n",
    "proc/loadavg": "0.1 0.1 0.1 2/613 4711",
    "proc/sys/kernel/threads-max": "100000",
    "proc/sys/kernel/pid_max": "32768",
    "proc/sys/vm/overcommit_memory": "0",
    "proc/sys/fs/file-max": "4096",
    "proc/sys/fs/inotify/max_user_instances": "128",
    "proc/sys/fs/inotify/max_user_watches": "8192",
    "proc/sys/fs/epoll/max_user_watches": "1000",
    "sys/fs/cgroup/pod/container/pids.max": "max",
}


def host(root: Path, files: Mapping[str, str] = {}) -> Roots:
    for name, content in {**QUIET, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return Roots.below(root)


@contextmanager
def soft(which: int, value: int) -> Iterator[None]:
    before = resource.getrlimit(which)
    resource.setrlimit(which, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


GROUP = "sys/fs/cgroup/pod/container"


@pytest.mark.parametrize(
    ("number", "use", "files", "sentence"),
    [
        (errno.ENFILE, "file", {}, "all processes of the machine may have 4096 files open: raise fs.file-max"),
        (
            errno.EMFILE,
            "inotify",
            {},
            "user 64055 may have 128 queues of file events (inotify) in all containers without",
        ),
        (errno.ENOSPC, "inotify", {}, "user 64055 may have 8192 watches of files (inotify) in all containers without"),
        (
            errno.ENOSPC,
            "epoll",
            {},
            "user 64055 may have 1000 watches of descriptors (epoll) in all containers without",
        ),
        (errno.ENOSPC, "file", {}, "make room on its volume"),
        (errno.ESRCH, "process", {}, "the process has ended"),
        (
            errno.EAGAIN,
            "process",
            {f"{GROUP}/pids.max": "6", f"{GROUP}/pids.current": "6"},
            "the container may have 6 processes and threads (pids.max of '{root}/sys/fs/cgroup/pod/container'): raise it",
        ),
        (
            errno.EAGAIN,
            "process",
            # the child has ended, and counts no more
            {f"{GROUP}/pids.max": "6", f"{GROUP}/pids.current": "1", f"{GROUP}/pids.events": "max 3\n"},
            "the container may have 6 processes and threads",
        ),
        (
            errno.EAGAIN,
            "process",
            {"sys/fs/cgroup/pod/pids.max": "9", "sys/fs/cgroup/pod/pids.current": "9"},
            "the container may have 9 processes and threads (pids.max of '{root}/sys/fs/cgroup/pod'): raise it",
        ),
        (
            errno.EAGAIN,
            "process",
            {"proc/self/cgroup": V1, "sys/fs/cgroup/pids/pids.max": "7", "sys/fs/cgroup/pids/pids.current": "7"},
            "the container may have 7 processes and threads (pids.max of '{root}/sys/fs/cgroup/pids'): raise it",
        ),
        (
            errno.EAGAIN,
            "process",
            {"proc/sys/kernel/threads-max": "613"},
            "the machine may have 613 threads, and has 613: raise kernel.threads-max",
        ),
        (errno.EAGAIN, "process", {}, "the kernel does not show by which limit"),
        (errno.EPERM, "process", {"proc/self/status": "Name:\tx\nSeccomp:\t2\n"}, "the container's seccomp profile"),
        (errno.EPERM, "process", {}, ""),
        (errno.EPERM, "file", {}, ""),
        (errno.ENOMEM, "file", {}, "the machine is short of memory"),
        (
            errno.ENOMEM,
            "file",
            {f"{GROUP}/memory.max": str(450 * MIB)},
            "the container may have 450 MiB of memory (memory.max of '{root}/sys/fs/cgroup/pod/container'): raise",
        ),
        (
            errno.ENOMEM,
            "file",
            {
                "proc/sys/vm/overcommit_memory": "2",
                "proc/meminfo": "CommitLimit:  100 kB\nCommitted_AS:   99 kB\n",
            },
            "the machine promises no more than 100 kB of memory and has promised 99 kB, as vm.overcommit_memory is 2",
        ),
    ],
)
def test_an_errno_is_told_as_limit_value_and_user(
    tmp_path: Path, number: int, use: Use, files: dict[str, str], sentence: str
) -> None:
    found = limit_behind(number, use, USER, host(tmp_path, files))
    assert found.startswith(sentence.replace("{root}", str(tmp_path)))
    assert bool(found) == bool(sentence)


@pytest.mark.parametrize(
    ("which", "value", "number", "use", "sentence"),
    [
        (
            resource.RLIMIT_NOFILE,
            512,
            errno.EMFILE,
            "file",
            "this process may have 512 files open: raise its limit (RLIMIT_NOFILE",
        ),
        (
            resource.RLIMIT_FSIZE,
            1 << 30,
            errno.EFBIG,
            "file",
            "a file here may have 1073741824 bytes: raise that limit (RLIMIT_FSIZE",
        ),
        (
            resource.RLIMIT_NPROC,
            30000,
            errno.EAGAIN,
            "process",
            "the kernel does not show by which limit it is; raise the 30000 processes and threads that user 64055 may have",
        ),
        (
            resource.RLIMIT_AS,
            1 << 40,
            errno.ENOMEM,
            "file",
            "a process here may have 1099511627776 bytes of addresses: lift",
        ),
    ],
)
def test_a_limit_of_this_process_is_told_with_its_value(
    tmp_path: Path, which: int, value: int, number: int, use: Use, sentence: str
) -> None:
    with soft(which, value):
        assert limit_behind(number, use, USER, host(tmp_path)).startswith(sentence)


def test_without_a_limit_of_files_the_file_system_is_it(tmp_path: Path) -> None:
    assert "use a file system that takes files of this size" in limit_behind(errno.EFBIG, "file", USER, host(tmp_path))


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("qemu: qemu_thread_create: Resource temporarily unavailable", "processes"),
        ("Failed to create child process: Resource temporarily unavailable (os error 11)", "processes"),
        ("dnsmasq: failed to create inotify: Too many open files", "inotify"),
        ("qemu-system-x86_64: Could not open '/x': Too many open files", "files open"),
        (
            "qemu-system-x86_64: unable to map backing store for guest RAM: Cannot allocate memory",
            "huge pages are short",
        ),
        ("qemu-system-x86_64: cannot set up guest memory 'pc.ram': Cannot allocate memory", "short of memory"),
        ("qemu-system-x86_64: mlockall: Cannot allocate memory", "RLIMIT_MEMLOCK"),
        (
            "memory listener initialization failed: Region pc.ram: vfio_dma_map(0x5, 0x0, 0x8000, 0x7) = -12 (Cannot allocate memory)",
            "RLIMIT_MEMLOCK",
        ),
        ("vfio_container_dma_map(0x5, 0x0, 0xa0000, 0x7) = -28 (No space left on device)", "dma_entry_limit"),
        (
            "Unable to use native AIO: failed to create linux AIO context: Resource temporarily unavailable",
            "fs.aio-max-nr",
        ),
        ("Unable to use io_uring: failed to init linux io_uring ring: Cannot allocate memory", "RLIMIT_MEMLOCK"),
        (
            "Unable to use io_uring: failed to init linux io_uring ring: Operation not permitted",
            "kernel.io_uring_disabled",
        ),
        ("Couldn't create user namespace: No space left on device", "user.max_user_namespaces"),
        ("Couldn't create user namespace: Operation not permitted", "a user namespace is not allowed"),
        ("unshare(CLONE_NEWUSER): Cannot allocate memory", "short of memory"),
        ("qemu_thread_create: No space left on device", ""),
        ("write: Resource temporarily unavailable", ""),
        ("qemu-system-x86_64: Could not open '/x': Operation not permitted", ""),
        ("Could not write: No space left on device", ""),
        ("all is well", ""),
    ],
)
def test_the_last_words_of_a_child_name_a_limit(monkeypatch: pytest.MonkeyPatch, text: str, limit: str) -> None:
    getrlimit = resource.getrlimit
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (0, 0) if kind == resource.RLIMIT_MEMLOCK else getrlimit(kind)
    )
    found = limit_in_words(text, USER)
    assert limit in found
    assert bool(found) == bool(limit)


def test_signals_by_which_the_kernel_enforces_a_limit() -> None:
    assert "a system call" in limit_of_signal("SIGSYS")
    with soft(resource.RLIMIT_FSIZE, 1 << 30):
        assert "RLIMIT_FSIZE" in limit_of_signal("SIGXFSZ")
    assert limit_of_signal("SIGKILL") == ""


def test_the_own_groups_are_those_that_can_be_seen(tmp_path: Path) -> None:
    top = tmp_path / "sys/fs/cgroup"
    (top / "memory/pod/container").mkdir(parents=True)
    (top / "pids").mkdir()
    roots = host(tmp_path, {"proc/self/cgroup": V1})
    groups = [top / "memory/pod/container", top / "memory/pod", top / "memory"]
    assert list(own_groups("memory", roots)) == [PurePosixPath(each) for each in groups]
    assert list(own_groups("pids", roots)) == [PurePosixPath(top / "pids")]
    assert list(own_groups("io", roots)) == [PurePosixPath(top)]


@pytest.mark.parametrize(
    ("files", "size"),
    [
        ({f"{GROUP}/memory.max": "max"}, None),
        ({f"{GROUP}/memory.max": "max", "sys/fs/cgroup/pod/memory.max": str(MIB)}, MIB),
        ({"proc/self/cgroup": V1, "sys/fs/cgroup/memory/memory.limit_in_bytes": str(450 * MIB)}, 450 * MIB),
        ({"proc/self/cgroup": V1, "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, None),
    ],
)
def test_the_limit_of_memory_is_that_of_either_version(tmp_path: Path, files: dict[str, str], size: int | None) -> None:
    found = memory_limit(host(tmp_path, files))
    assert (None if found is None else found.size) == size


EVENTS = "low 0\nhigh 0\nmax 7\noom {}\noom_kill {}\noom_group_kill 0\n"


def test_a_kill_counts_once_and_says_whose_limit_it_was(tmp_path: Path) -> None:
    events = tmp_path / GROUP / "memory.events"
    roots = host(tmp_path, {f"{GROUP}/memory.max": str(450 * MIB), f"{GROUP}/memory.events": EVENTS.format(1, 1)})
    memory = OutOfMemory(roots)
    assert memory.kills() == ""
    events.write_text(EVENTS.format(2, 2))
    assert memory.kills().startswith("out of memory, as the container may have 450 MiB of memory (memory.max of ")
    assert memory.kills() == ""
    events.write_text(EVENTS.format(2, 3))
    assert memory.kills().startswith("out of memory, the machine's or that of a cgroup above the container's")


def test_a_kill_counts_in_the_group_that_this_process_has_entered_since(tmp_path: Path) -> None:
    roots = host(tmp_path, {f"{GROUP}/memory.events": EVENTS.format(0, 0)})
    memory = OutOfMemory(roots)
    host(
        tmp_path, {"proc/self/cgroup": "0::/pod/float\n", "sys/fs/cgroup/pod/float/memory.events": EVENTS.format(1, 1)}
    )
    assert memory.kills().startswith("out of memory")
    assert memory.kills() == ""


def test_a_kill_by_a_limit_of_version_1(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory"
    control = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
    files = {
        "proc/self/cgroup": V1,
        f"{group}/memory.limit_in_bytes": str(450 * MIB),
        f"{group}/memory.oom_control": control.format(0),
        f"{group}/memory.failcnt": "12\n",
    }
    memory = OutOfMemory(host(tmp_path, files))
    host(tmp_path, {**files, f"{group}/memory.oom_control": control.format(1), f"{group}/memory.failcnt": "99\n"})
    assert memory.kills().startswith(
        "out of memory, as the container may have 450 MiB of memory (memory.limit_in_bytes of"
    )
