"""A controller that stops before the write that a test has chosen, so that anything can be killed at each step of its work."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from runner.controller.privileged_process import PrivilegedProcess
from runner.controller.tree.cgroup_writer import CgroupWriter
from tests.node.minimal_pods import children

PARTITION_FILES = ("cpuset.cpus.exclusive", "cpuset.cpus.partition")
SETTING_FILES = ("smp_affinity_list", "default_smp_affinity", "cpumask", "pm_qos_resume_latency_us")
CODE = """
import os, signal
from pathlib import Path
left, files, write = Path({left!r}), {files!r}, os.write
def stopping(fd, data):  # in the processes that keep a right, too, which are forked from this one
    if left.exists() and os.path.basename(os.readlink(f"/proc/self/fd/{{fd}}")) in files:
        if number := int(left.read_text()):
            left.write_text(str(number - 1))
        else:
            left.unlink()
            os.kill(os.getpid(), signal.SIGSTOP)
    return write(fd, data)
os.write = stopping
"""


class Stop:
    """The write to one of *files* before which the controller, or one of its processes, stops; *directory* is the test's."""

    def __init__(self, directory: Path, files: Iterable[str]) -> None:
        self.left = directory / "writes-left"
        self.code = CODE.format(left=str(self.left), files=tuple(files))
        """For the controller to run before anything else."""

    def choose(self, number: int) -> None:
        """Choose the write number *number* from now on; 0 is the next one."""
        new = self.left.with_suffix(".new")
        new.write_text(str(number))
        new.rename(self.left)

    def forget(self) -> bool:
        """Tell whether the write has not come yet; it stops nothing any more."""
        with contextlib.suppress(FileNotFoundError):
            self.left.unlink()
            return True
        return False


def child_of(controller: int, kind: type[PrivilegedProcess]) -> int:
    """Return the process of *kind* that process *controller* has started."""
    [found] = [pid for pid in children(controller) if Path(f"/proc/{pid}/comm").read_text() == f"{kind.comm}\n"]
    return found


def writer_of(controller: int) -> int:
    """Return the cgroup writer of process *controller*."""
    return child_of(controller, CgroupWriter)


def stopped(*pids: int) -> bool:
    """Tell whether one of the processes *pids* is stopped; one that has ended is not."""
    return "T" in map(state, pids)


def state(pid: int) -> str:
    """Return the letter of the state of process *pid* (proc_pid_stat(5)); empty if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0].replace("Z", "")
    return ""


def go_on(*pids: int) -> None:
    """Continue the processes *pids*."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
