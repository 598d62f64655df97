"""The pods' own cgroups, made by the kubelet and the container runtime: which exist, and their processes."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from runner.base.errors import HostError
from runner.base.values import frozen
from runner.kernel.cgroup import Cgroup, CgroupError, LeasedError
from runner.kernel.procfs import Procfs
from runner.kubelet.pod_cgroups import (
    KUBEPODS,
    ContainerCgroup,
    bare_groups,
    group_uid,
    is_container_id,
    is_pod_uid,
    parse_bare_container,
    parse_container,
    pod_groups,
)

_MOST_GROUPS = 256
"""Cgroups of one pod that are examined; a privileged container can make any number."""
_MOST_ANCESTORS = 8
"""Ancestors of a process that are examined to find its pod."""


@frozen
class MemberProcess:
    """A process in the *cgroup* of a *container*."""

    container: ContainerCgroup
    cgroup: str
    pid: int


@frozen
class PodCgroups:
    """The pods' cgroups in the hierarchy mounted at *mount*, and their processes in *procfs*.

    Without a *kubelet* the containers of docker and podman are meant. With *trusting* any peer may have registered any name, so no pod is
    known to be gone.
    """

    mount: Cgroup
    procfs: Procfs
    kubelet: bool
    trusting: bool = False

    def container(self, path: str) -> ContainerCgroup | None:
        """Return the container of the cgroup *path*, as in ``/proc/PID/cgroup``, or ``None`` if it belongs to no pod."""
        return parse_container(path) if self.kubelet else parse_bare_container(path)

    def existing(self, pod_uid: str) -> list[Path]:
        """Return the directories of the cgroups that pod *pod_uid* has."""
        possible = pod_groups(pod_uid) if self.kubelet else bare_groups(pod_uid)
        return [path for path in map(self.mount.path.joinpath, possible) if path.is_dir()]

    def reachable(self, pod_uids: Iterable[str]) -> Iterator[str]:
        """Yield the files by which :mod:`~runner.controller.tree.crowded_pods` ends the pods *pod_uids*, as far as these can reach them.

        With a kubelet these are of a cgroup above those of the containers.
        """
        if not self.kubelet:
            yield from (f"{path}/cgroup.kill" for pod_uid in pod_uids for path in self.existing(pod_uid))

    def gone(self, pod_uid: str) -> bool:
        """Tell whether pod *pod_uid* has no cgroup any more, so that none of its processes can be running.

        The kubelet removes the pod's cgroup after its last container has ended. If the kubelet's ``cgroupRoot`` is not known here, no pod
        counts as gone.
        """
        if self.trusting or (self.kubelet and not any((self.mount.path / path).is_dir() for path in KUBEPODS)):
            return False
        named = is_pod_uid(pod_uid) if self.kubelet else is_container_id(pod_uid)
        return named and not self.existing(pod_uid)

    def processes(self, pod_uid: str) -> Iterator[MemberProcess]:
        """Yield the processes in the cgroups of *pod_uid*'s containers, read lazily.

        Raises :class:`~runner.kernel.cgroup.LeasedError`.
        """
        for top in map(Cgroup, self.existing(pod_uid)):
            for group in _groups(top):
                yield from self._member_processes(group)

    def _member_processes(self, group: Cgroup) -> Iterator[MemberProcess]:
        path = f"/{group.path.relative_to(self.mount.path)}"
        container = self.container(path)
        if container is None:
            return
        try:
            for pid in group.each_process():
                yield MemberProcess(container, path, pid)
        except LeasedError:
            raise
        except CgroupError:  # removed meanwhile, or threaded: its threads are no anchor
            return

    def unreaped(self, root: Cgroup) -> Counter[str]:
        """Count the processes and threads below *root* that have ended, and count there until another process waits for them, by its pod.

        It looks at every thread of the machine, which takes some 20 us each.
        """
        top, found = f"/{root.path.relative_to(self.mount.path)}/", Counter[str]()
        for tid, waited_by in self.procfs.unreaped():
            with contextlib.suppress(HostError):  # waited for meanwhile
                if self.procfs.cgroup(tid).startswith(top):
                    cgroup = self.procfs.cgroup(waited_by)
                    container = self.container(cgroup)
                    pod_uid = group_uid(cgroup.removeprefix(top)) if container is None else container.owner
                    found.update(filter(None, [pod_uid]))
        return found

    def memory_limit(self) -> int | None:
        """Return the bytes that the kubelet allows all pods together; ``None`` where it does not limit them."""
        for path in KUBEPODS:
            limit = self.mount.at(f"/{path}").read_if_there("memory.max")
            if limit is not None and limit.isdecimal():
                return int(limit)
        return None

    def cpu_weight(self) -> int:
        """Return the ``cpu.weight`` of all pods; the kernel's default where there is no kubelet."""
        for path in KUBEPODS:
            weight = self.mount.at(f"/{path}").read_if_there("cpu.weight")
            if weight is not None and weight.isdecimal():
                return int(weight)
        return 100

    def describe(self, tids: Iterable[int]) -> list[str]:
        """Return a phrase for each process of the threads *tids*: its number, its name with escapes, and its pod."""
        found: dict[int, str] = {}
        for tid in tids:
            try:
                pid = int(self.procfs.status(tid)["Tgid"])
                if pid not in found:
                    found[pid] = f"{pid} {self.procfs.name(pid)!r} of {self._owner(pid)}"
            except (HostError, KeyError, ValueError):
                continue  # it has ended
        return list(found.values())

    def _owner(self, pid: int) -> str:
        """Return the pod in whose cgroup process *pid* is, or else its first ancestor that is in one."""
        first = self.procfs.cgroup(pid)
        for _ in range(_MOST_ANCESTORS):
            container = self.container(self.procfs.cgroup(pid))
            if container is not None:
                return f"pod {container.owner}"
            process = self.procfs.process(pid)
            if process is None or process.parent == 0:
                break
            pid = process.parent
        return f"the cgroup {first!r}"


def _groups(top: Cgroup) -> Iterator[Cgroup]:
    """Yield *top* and its descendants, level by level, at most :data:`_MOST_GROUPS`, so that no container hides another."""
    found = [top]
    for group in found:
        yield group
        with contextlib.suppress(OSError), os.scandir(group.path) as entries:  # or it has been removed
            inner = (each.name for each in entries if each.is_dir(follow_symlinks=False))
            found += map(group.child, islice(inner, _MOST_GROUPS - len(found)))
