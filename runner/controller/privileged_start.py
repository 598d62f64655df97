"""The start steps that need root's rights, and giving these rights up before the controller reads anything that others write."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from runner.base.errors import HostError, explain
from runner.base.events import ControllerEvent
from runner.base.values import frozen
from runner.controller.privileged_process import PrivilegedProcess
from runner.controller.serve.namespaces import NamespaceReader, start_namespace_reader
from runner.controller.tree.cgroup_writer import CgroupWriter, start_cgroup_writer
from runner.controller.tune.host_tuner import HostTuner
from runner.controller.tune.tuner_process import TunerProcess, start_tuner
from runner.kernel.cgroup import Cgroup
from runner.kernel.device_filter import DEFAULT_RULES, DeviceRule, attach_device_filter, cgroup_id, macvtap_rules
from runner.kernel.privileges import (
    CAP_DAC_OVERRIDE,
    CAP_SYS_NICE,
    CAP_SYS_RESOURCE,
    enter_cgroup_namespace,
    keep_capabilities,
)

log = logging.getLogger(__name__)

KEPT_CAPABILITIES = (
    CAP_DAC_OVERRIDE,  # to write in the hierarchy's root
    CAP_SYS_NICE,  # to move threads that have more capabilities, as the kernel's (cpuset_can_attach, cap_safe_nice)
    CAP_SYS_RESOURCE,  # to send descriptors regardless of other root processes' (net/unix/scm.c, too_many_unix_fds)
)


@frozen
class DeviceFilter:
    """The device filter of the tree *root*."""

    root: Path
    attached_to: int | None = None
    """The id of the cgroup that it was attached to; ``None`` without one."""
    error: HostError | None = None
    """The reason why it could not be attached; ``None`` if it was, or if none is wanted."""

    @property
    def lost(self) -> bool:
        """Tell whether the root that it was attached to has been removed, and with it the filter."""
        return self.attached_to is not None and cgroup_id(self.root) != self.attached_to

    @property
    def missing(self) -> HostError | None:
        """Return the reason why the tree has no device filter, and so takes no instance; ``None`` if it has one, or none is wanted."""
        if self.lost:
            return HostError(f"{self.root} was removed, and its device filter with it", remedy="restart the controller")
        return self.error


@frozen
class PrivilegedParts:
    """The objects that were made with the capabilities before they were given up."""

    device_filter: DeviceFilter
    namespace_reader: NamespaceReader
    tuner: TunerProcess
    cgroup_writer: CgroupWriter

    @property
    def processes(self) -> tuple[PrivilegedProcess, ...]:
        """Return the processes that keep a capability."""
        return (self.namespace_reader, self.tuner, self.cgroup_writer)


def start_privileged(
    root: Path, procfs: Path, rules: Sequence[DeviceRule] | None, tuner: HostTuner, *, macvtaps: bool
) -> PrivilegedParts:
    """Enter the node's cgroup namespace, attach the device filter to *root*, and give up the capabilities for both.

    *rules* are added to the default ones; ``None`` means no filter. With *macvtaps*, a rule allows all macvtaps of the node, of any pod: a
    device filter cannot tell whose they are (``tap_open`` of ``drivers/net/tap.c`` does not check the network namespace). An error in
    attaching the filter is part of the result, because running instances are served in any case. Processes are started that keep a
    capability: to read namespaces, for *tuner* to change the machine's settings, and to write what only CAP_SYS_ADMIN may. Raises
    :class:`~runner.base.errors.HostError`, also if another controller has the tree *root*, which is then unchanged.
    """
    enter_cgroup_namespace(procfs / "1")
    # Before the lock: a process forked later would hold it slightly longer than this process lives.
    reader, tuner_process = start_namespace_reader(procfs), start_tuner(tuner, procfs)
    writer = start_cgroup_writer(root, procfs)
    if rules is not None:
        with contextlib.suppress(HostError):  # attaching the filter reports it
            Cgroup(root).create()
    _claim(root)
    if rules is None:
        log.warning(ControllerEvent.INSECURE_DEVICES)
        found = DeviceFilter(root)
    else:
        found = _attached(root, rules, procfs if macvtaps else None)
    keep_capabilities(KEPT_CAPABILITIES)
    return PrivilegedParts(found, reader, tuner_process, writer)


def _claim(root: Path) -> None:
    """Lock the directory *root*, if it exists, until this process ends: its descriptor stays open.

    The socket's directory is not used, because pods can open it, and so could lock it. Raises :class:`~runner.base.errors.HostError`.
    """
    try:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise HostError(f"cannot control {root}: another controller does", remedy="end it first") from None
        raise HostError(f"cannot lock {root}") from error


def _attached(root: Path, rules: Sequence[DeviceRule], macvtaps: Path | None) -> DeviceFilter:
    """Attach the filter, which allows the macvtaps of the procfs *macvtaps*, if given."""
    try:
        taps = () if macvtaps is None else macvtap_rules(macvtaps)
        Cgroup(root).create()
        attached_to = attach_device_filter((*DEFAULT_RULES, *taps, *rules), root)
    except HostError as error:
        log.error(ControllerEvent.REGISTRATION_IMPOSSIBLE, explain(error))  # noqa: TRY400  # an expected error
        return DeviceFilter(root, error=error)
    if macvtaps is not None and not taps:
        log.warning(ControllerEvent.MACVTAP_NOT_LOADED)
    log.info(ControllerEvent.DEVICE_FILTER_ATTACHED, root, ", ".join(map(str, (*taps, *rules))) or "none")
    return DeviceFilter(root, attached_to)
