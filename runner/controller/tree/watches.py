"""The kernel's reports after which the controller adapts its cgroup tree: of the kubelet's files, the tree and the end of pods."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import attrs

from runner.base.errors import HostError, explain
from runner.base.events import ControllerEvent
from runner.base.rate_limit import LogRateLimit
from runner.controller.tree.cpu_source import CpuSource
from runner.controller.tree.model import Observed
from runner.controller.tree.pods import PodCgroups
from runner.controller.tree.tree import Tree
from runner.kernel import inotify
from runner.kubelet.pod_cgroups import FLOAT, VCPUS, instance_group, instance_uid

log = logging.getLogger(__name__)

_FILES = (
    *("cgroup.events", "cgroup.max.descendants", "cgroup.subtree_control", "cgroup.type", "cpuset.cpus", "cpuset.mems"),
    *("cpuset.cpus.exclusive", "cpuset.cpus.partition"),
    *("cpu.weight", "memory.max", "pids.max"),
)
"""Control files whose change may require a pass, except those that the runner writes to move its threads.

They are watched one by one: a watch of the directory would also report ``pids.events`` and ``memory.events``, which change whenever a
process in the group meets its limit, as often as it likes.
"""

_DIRECTORY = (
    inotify.CLOSE_WRITE
    | inotify.MOVED_TO
    | inotify.CREATE
    | inotify.DELETE
    | inotify.DELETE_SELF
    | inotify.MOVE_SELF
    | inotify.ONLYDIR
)
_GROUP = inotify.CREATE | inotify.DELETE | inotify.ONLYDIR
_PODS = inotify.DELETE | inotify.ONLYDIR


@attrs.define(eq=False)
class Watches:
    """The watches in *queue*, of the files of *source*, of *tree* and of the cgroups of *pods*."""

    queue: inotify.Inotify
    tree: Tree
    source: CpuSource | None
    pods: PodCgroups
    log_limit: LogRateLimit
    request_pass: Callable[[], None]
    """Requests a pass."""
    _watches: set[int] = attrs.field(factory=set)
    _watched: dict[Path, int] = attrs.field(factory=dict)
    """The watch of each control file."""
    _pod_names: frozenset[str] = frozenset()
    """The names of the pods' own cgroups, for the instances there are."""

    async def listen(self) -> None:
        """Request a pass at each relevant report of the kernel; never return."""
        while True:
            for event in await self.queue.receive():
                if event.mask & inotify.IGNORED:
                    self._watches.discard(event.watch)
                if self._matters(event):
                    self.request_pass()

    def _matters(self, event: inotify.FileEvent) -> bool:
        if not event.name or event.mask & inotify.QUEUE_OVERFLOW:
            return True  # a watched file has changed, or a watched directory was removed, moved or created again
        ours = event.name in (FLOAT, VCPUS) or instance_uid(event.name) is not None or event.name in self._pod_names
        of_source = self.source is not None and self.source.reads(event.name)
        return ours or of_source or event.name == self.tree.root.name

    def watch_source(self) -> None:
        """Watch the directories of the files that assign CPUs."""
        if self.source is not None:
            for directory in (self.source.files.directory, self.source.files.cdi):
                self._watch(directory, _DIRECTORY)

    def watch_tree(self, observed: Observed | None, files: Iterable[Path]) -> None:
        """Watch *files*, our groups, and the parents of the pods' own cgroups, which report the end of a pod."""
        self._watched = {path: watch for path, watch in self._watched.items() if watch in self._watches}
        self._watch_files(files)
        if observed is None:
            return
        below = (*map(instance_group, observed.domains), *observed.groups, *observed.outdated)
        for group in (self.tree.root.parent, self.tree.root, *map(self.tree.group, below)):
            self._watch(group.path, _GROUP)
            self._watch_files(map(group.path.joinpath, _FILES))
        pods = [path for pod_uid in observed.domains for path in self.pods.existing(pod_uid)]
        for parent in {path.parent for path in pods}:
            self._watch(parent, _PODS)
        self._pod_names = frozenset(path.name for path in pods)

    def _watch_files(self, paths: Iterable[Path]) -> None:
        for path in paths:
            if self._watched.get(path) not in self._watches and path.exists():
                watch = self._watch(path, inotify.MODIFY)
                if watch is not None:
                    self._watched[path] = watch

    def _watch(self, path: Path, mask: int) -> int | None:
        """Watch *path*; a new watch requires another pass, for changes made before it."""
        try:
            watch = self.queue.watch(path, mask)
        except HostError as error:
            missing = isinstance(error.__cause__, FileNotFoundError)  # not there yet; the next pass tries again
            if not missing:
                self.log_limit.log(log.warning, ControllerEvent.CHANGES_SEEN_LATE, explain(error))
            return None
        if watch not in self._watches:
            self._watches.add(watch)
            self.request_pass()
        return watch
