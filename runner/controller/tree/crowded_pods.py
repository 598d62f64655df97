"""The pods that have more processes in float, the cgroup on shared CPUs, than they may: the kernel lets them, so they are ended here.

The kernel counts a process that is moved into a cgroup, but refuses no move because of ``pids.max`` ("PID"). So a pod could fork in its own
cgroup and move the processes to float, again and again, until no other instance could start a thread.
"""

from __future__ import annotations

import contextlib
import logging
import math

import trio
import trio.to_thread

from runner.base.events import ControllerEvent
from runner.base.rate_limit import LogRateLimit
from runner.controller.tree.pods import PodCgroups
from runner.controller.tree.tree import Tree
from runner.kernel.cgroup import Cgroup, CgroupError

log = logging.getLogger(__name__)


async def end_crowded_pods(
    tree: Tree, pods: PodCgroups, most: int | None, log_limit: LogRateLimit, *, every: float, apart: float
) -> None:
    """End the pods with more than *most* processes in *tree*, once all together have half of theirs; never return.

    The pod's own cgroup is ended, too: a process counts until its parent has waited for it. If that parent is in another pod, which has got
    the descriptors, only ``/proc`` shows which.

    *every* and *apart* are seconds: from one reading of the tree to the next, and the same for ``/proc``, where it is five times the
    duration of the reading, if that is longer.
    """
    next_look = -math.inf
    while True:
        await trio.sleep(every)
        if not tree.half_full():
            continue
        crowded = dict(tree.crowded())
        if (began := trio.current_time()) >= next_look:
            unreaped = await trio.to_thread.run_sync(pods.unreaped, tree.root, abandon_on_cancel=True)
            crowded |= {pod_uid: number for pod_uid, number in unreaped.items() if most is not None and number > most}
            now = trio.current_time()
            next_look = now + max(apart, 5 * (now - began))
        for pod_uid, number in crowded.items():
            log_limit.log(log.error, ControllerEvent.POD_CROWDED, pod_uid, number, peer=pod_uid)
            for group in (*map(Cgroup, pods.existing(pod_uid)), tree.domain(pod_uid)):
                with contextlib.suppress(CgroupError):  # removed meanwhile
                    group.kill()
