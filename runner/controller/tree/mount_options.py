"""The options of the mount of cgroup v2, on which a part of the separation of pods depends.

With ``nsdelegate`` a process can move none by a file of cgroups outside its cgroup namespace that it has opened itself
(``cgroup_procs_write_permission``, ``kernel/cgroup/cgroup.c``). A pod can open its files in float again by the descriptors it has, any
number of times. Without the option each such file is a writer more that holds the kernel's lock of all cgroups. Other programs take the
option from all mounts without wanting to (:mod:`runner.kernel.cgroup_mounts`), so it is added again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import attrs
import trio

from runner.base.errors import explain, in_shell
from runner.base.events import ControllerEvent
from runner.base.rate_limit import LogRateLimit
from runner.controller.metrics import ControllerCounters
from runner.controller.tree.cgroup_writer import MOUNT_OPTIONS, CgroupWriter
from runner.controller.tree.faults import Fault
from runner.controller.tree.model import PARENT
from runner.kernel.cgroup import CgroupError
from runner.kernel.cgroup_mounts import NSDELEGATE, read_cgroup_mounts
from runner.kernel.procfs import Procfs

log = logging.getLogger(__name__)


@attrs.define(eq=False)
class MountOptions:
    """Adds ``nsdelegate`` again where another program has taken it away, and those of :data:`MOUNT_OPTIONS` that were seen with it.

    No others, because what the node has never had is not this program's to decide.
    """

    procfs: Procfs
    writer: CgroupWriter | None
    counters: ControllerCounters
    log_limit: LogRateLimit
    fault: Fault | None = None
    """The reason why the option is missing; ``None`` if it is not, or no cgroup v2 is mounted."""
    known: frozenset[str] = frozenset({NSDELEGATE})
    """The options to add."""

    async def keep(self, every: float, request_pass: Callable[[], None]) -> None:
        """Add the options that are missing, every *every* seconds, and call *request_pass* when the fault changes; never return."""
        while True:
            before = self.fault
            self._look()
            if self.fault != before:
                request_pass()
            await trio.sleep(every)

    def _look(self) -> None:
        mounts = read_cgroup_mounts(self.procfs.root)
        if mounts.delegates:
            self.known |= MOUNT_OPTIONS.intersection(mounts.options)
        self.fault = None if mounts.delegates or mounts.unified is None else self._add()

    def _add(self) -> Fault | None:
        """Add the options, and return the fault if ``nsdelegate`` is missing nevertheless."""
        reason = ""
        if self.writer is not None:
            try:
                self.writer.add_options(self.known)
            except CgroupError as error:
                reason = f" ({explain(error)})"
        mounts = read_cgroup_mounts(self.procfs.root)
        if mounts.delegates:
            self.counters.repairs += 1
            self.log_limit.log(
                log.warning, ControllerEvent.MOUNT_OPTIONS_ADDED, mounts.unified, ",".join(mounts.options)
            )
            return None
        return Fault(
            PARENT,
            f"cgroup v2 is mounted without nsdelegate, so a pod may open its cgroup files again{reason}",
            f"mount -o remount,nsdelegate {in_shell(mounts.unified)}, as root on the node",
            group_usable=True,
        )
