"""Fakes of a cgroup v2 hierarchy, a sysfs and a kubelet's directory, made of ordinary files.

The fake hierarchy follows the kernel's rules that the controller relies on: the files of a new cgroup, when a cgroup can
become threaded, the effective cpuset, and which writes and removals fail. ``tests/node`` tests the same rules on the
kernel itself.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import attrs

from runner.base.cpuset import CpuSet
from runner.controller.tree.limits import MOST_PROCESSES
from runner.kernel.cgroup import THREADED_CONTROLLERS, Cgroup, CgroupError

FILES = {
    "cpu": {"cpu.weight": "100"},
    "cpuset": {
        **dict.fromkeys(("cpuset.cpus", "cpuset.mems", "cpuset.cpus.effective", "cpuset.mems.effective"), ""),
        "cpuset.cpus.exclusive": "",
        "cpuset.cpus.partition": "member",
    },
    "memory": {
        "memory.current": "0",
        "memory.high": "max",
        "memory.max": "max",
        "memory.swap.max": "max",
        "memory.stat": "active_file 0\ninactive_file 0",
        "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0",
    },
    "hugetlb": {"hugetlb.2MB.max": "max", "hugetlb.2MB.rsvd.max": "max"},
    "pids": {"pids.max": "max"},
}
"""The files of each controller, as the kernel makes them."""


_STEP = threading.Lock()
"""Held while a file is read or written: the kernel does each of them in one step, whatever thread asks, ordinary files do not."""


@attrs.define
class FakeBehaviour:
    """What a test has the kernel of a fake hierarchy do."""

    before_write: Callable[[FakeCgroup, str, str], None] = lambda _group, _file, _value: None
    """Called with each write before it is done, which it refuses by an error."""
    uninterruptible: bool = False
    """Whether a kill ends nothing, as of tasks that hang in the kernel."""


@attrs.frozen
class FakeCgroup(Cgroup):
    """A cgroup in a hierarchy made of ordinary files; all its groups have one *behaviour*."""

    behaviour: FakeBehaviour = attrs.field(factory=FakeBehaviour, eq=False, repr=False)

    def read(self, file: str) -> str:
        with _STEP:
            return super().read(file)

    def create(self) -> None:
        if self.exists():
            return
        for above in self._ancestors():
            most = above.read_if_there("cgroup.max.descendants") or "max"
            if most.isdecimal() and len(above.below(1 << 10)) >= int(most):
                raise self._error("cgroup.max.descendants", self.name, errno.EAGAIN)
        super().create()
        beneath = (self.parent.path / "cgroup.type").exists() and "threaded" in self.parent.kind()
        self._put("cgroup.type", "domain invalid" if beneath else "domain")
        self._put("cgroup.events", "populated 0\nfrozen 0")
        self._put("cgroup.max.descendants", "max")
        self._put("cgroup.subtree_control", "")
        for file in ("cgroup.kill", "cgroup.procs", "cgroup.threads"):
            (self.path / file).touch()
        self._set_controllers(self.parent.enabled())

    def remove(self) -> bool:
        if self.exists():
            if self.children() or self.populated():
                return False
            for file in self.path.iterdir():
                file.unlink()
        removed = super().remove()
        # A cgroup is the root of a threaded domain as long as it has threaded children.
        above = self.parent
        was_root = above.exists() and above.read_if_there("cgroup.type") == "domain threaded"
        if was_root and not any(above.child(name).kind() == "threaded" for name in above.children()):
            above._put("cgroup.type", "domain")
        return removed

    def write(self, file: str, value: str) -> None:
        os.close(self.open(file))  # as in the kernel: a write creates no file
        self.behaviour.before_write(self, file, value)
        match file:
            case "cgroup.type":
                self._make_threaded(value)
            case "cgroup.subtree_control":
                self._enable(value)
            case "cpuset.cpus" | "cpuset.mems":
                self._set_cpuset(file, value)
            case "cgroup.threads":
                self._move_thread(value)
            case "cgroup.kill":
                self._kill(value)
            case "pids.max" if value != "max" and not 0 <= int(value) <= MOST_PROCESSES:
                raise self._error(file, value, errno.EINVAL)
            case _:
                self._put(file, value)

    def effective_cpus(self) -> CpuSet:
        """Return the CPUs in effect: of an isolated partition its exclusive ones, whatever ``cpuset.cpus`` is."""
        return (self.exclusive_cpus() or CpuSet()) if self.partition() == "isolated" else super().effective_cpus()

    def remove_thread(self, tid: int) -> bool:
        """Let the thread *tid* leave the cgroup, if it is there, which is empty after the last one."""
        threads = self.threads()
        if tid in threads:
            self.put_threads(threads - {tid})
        return tid in threads

    def put_threads(self, tids: Collection[int]) -> None:
        """Set the threads of the cgroup."""
        with _STEP:
            (self.path / "cgroup.threads").write_text("".join(f"{tid}\n" for tid in sorted(tids)))
        self.populate(bool(tids))

    def populate(self, populated: bool) -> None:  # noqa: FBT001
        """Set whether the cgroup has members."""
        self._put("cgroup.events", f"populated {populated:d}\nfrozen 0")

    def put_charge(self, size: int) -> None:
        """Charge *size* bytes to the cgroup, none of them page cache."""
        self._put("memory.current", str(size))

    def _move_thread(self, value: str) -> None:
        root = self
        while root.kind() == "threaded":
            root = root.parent
        groups = [attrs.evolve(self, path=path.parent) for path in root.path.rglob("cgroup.threads")]
        if not any(group.remove_thread(int(value)) for group in groups):
            everywhere = self._mount().below(1 << 10)
            elsewhere = any(
                (group.path / "cgroup.threads").exists() and int(value) in group.threads() for group in everywhere
            )
            raise self._error("cgroup.threads", value, errno.EOPNOTSUPP if elsewhere else errno.ESRCH)
        self.put_threads(self.threads() | {int(value)})

    def _make_threaded(self, value: str) -> None:
        parent = self.parent
        if value != "threaded" or self.populated() or parent.enabled() - THREADED_CONTROLLERS:
            raise self._error("cgroup.type", value, errno.EOPNOTSUPP)
        if parent.kind() != "threaded":
            parent._put("cgroup.type", "domain threaded")
        self._put("cgroup.type", value)

    def _set_cpuset(self, file: str, value: str) -> None:
        asked = CpuSet.parse(value)
        if self.populated() and not asked:
            raise self._error(file, value, errno.ENOSPC)
        if asked and max(asked) > max(self._mount()._parse(file), default=0):
            raise self._error(file, value, errno.ERANGE)
        self._put(file, str(asked))
        self._update_effective()

    def _kill(self, value: str) -> None:
        if self.kind() == "threaded":
            raise self._error("cgroup.kill", value, errno.EOPNOTSUPP)
        if self.behaviour.uninterruptible:
            return
        for group in (self, *self.below(1 << 10)):
            group.put_threads(())

    def _enable(self, value: str) -> None:
        enabled = set(self.enabled())
        for word in value.split():
            if word[1:] not in self.controllers():
                raise self._error("cgroup.subtree_control", value, errno.ENOENT)
            if word[0] == "-" and any(word[1:] in self.child(name).enabled() for name in self.children()):
                raise self._error("cgroup.subtree_control", value, errno.EBUSY)
            (enabled.add if word[0] == "+" else enabled.discard)(word[1:])
        if enabled - THREADED_CONTROLLERS and self.kind() == "domain threaded":
            raise self._error("cgroup.subtree_control", value, errno.EOPNOTSUPP)
        self._put("cgroup.subtree_control", " ".join(sorted(enabled)))
        for name in self.children():
            self.child(name)._set_controllers(frozenset(enabled))

    def _set_controllers(self, controllers: frozenset[str]) -> None:
        self._put("cgroup.controllers", " ".join(sorted(controllers)))
        for name, files in FILES.items():
            for file, content in files.items():
                if name not in controllers:
                    (self.path / file).unlink(missing_ok=True)
                elif not (self.path / file).exists():
                    self._put(file, content)
        if "cpuset" in controllers:
            self._update_effective()

    def _update_effective(self) -> None:
        """Compute the effective sets: those of the parent where the cgroup's own are empty or unavailable; then the children's."""
        for file in ("cpuset.cpus", "cpuset.mems"):
            above = self.parent._parse(f"{file}.effective")
            self._put(f"{file}.effective", str(self._parse(file) & above or above))
        for name in self.children():
            if (self.path / name / "cpuset.cpus").exists():
                self.child(name)._update_effective()

    def _ancestors(self) -> Iterator[FakeCgroup]:
        group = self.parent
        while (group.path / "cgroup.type").exists():
            yield group
            group = group.parent

    def _mount(self) -> FakeCgroup:
        group = self
        while (group.path / "cgroup.type").exists():
            group = group.parent
        return group

    def _parse(self, file: str) -> CpuSet:
        return CpuSet.parse(self.read(file))

    def _put(self, file: str, value: str) -> None:
        with _STEP:
            (self.path / file).write_text(f"{value}\n")

    def _error(self, file: str, value: str, number: int) -> CgroupError:
        return CgroupError(f"cannot write {value!r} to {self.path / file}", number)


def fake_cgroupfs(path: Path, *, cpus: str, online: str | None = None, mems: str = "0") -> FakeCgroup:
    """Write a new hierarchy and return its mount point, on a machine with *cpus* and memory nodes *mems*."""
    path.mkdir()
    mount = FakeCgroup(path)
    for file, value in {
        "cgroup.controllers": "cpu cpuset hugetlb io memory pids",
        "cgroup.subtree_control": "cpu memory",
        "cgroup.procs": "",
        "cpuset.cpus": cpus,
        "cpuset.mems": mems,
        "cpuset.cpus.effective": online or cpus,
        "cpuset.mems.effective": mems,
    }.items():
        mount._put(file, value)
    return mount


def fake_sysfs(path: Path, *, cpus: str, online: str | None = None, mems: str = "0") -> Path:
    """Write a sysfs with *cpus* and the memory nodes *mems*, and return its path."""
    cpu, node = path / "devices" / "system" / "cpu", path / "devices" / "system" / "node"
    cpu.mkdir(parents=True)
    node.mkdir(parents=True)
    (cpu / "present").write_text(f"{cpus}\n")
    (cpu / "online").write_text(f"{online or cpus}\n")
    (node / "has_memory").write_text(f"{mems}\n")
    return path


def format_cpu_state(
    shared: str, entries: Mapping[str, Mapping[str, str]] | None = None, *, policy: str = "static"
) -> bytes:
    """Return ``cpu_manager_state`` (v2) as the kubelet writes it."""
    document: dict[str, object] = {"policyName": policy, "defaultCpuSet": shared}
    if entries:
        document["entries"] = entries
    return json.dumps({**document, "checksum": 0}, separators=(",", ":")).encode()


def put_cpu_state(directory: Path, state: bytes) -> None:
    """Replace ``cpu_manager_state`` as the kubelet does: a temporary file, then a rename."""
    temporary = directory / ".cpu_manager_state.tmp"
    temporary.write_bytes(state)
    temporary.rename(directory / "cpu_manager_state")
