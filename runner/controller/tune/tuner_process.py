"""The host tuner's process, which keeps CAP_SYS_PTRACE to write the machine's settings (:mod:`runner.controller.tune.host_tuner`).

It receives only the CPUs of instances and their tuning requests, and decides itself which settings and values these mean.
"""

from __future__ import annotations

import logging
from pathlib import Path

from runner.base.errors import HostError, explain
from runner.base.events import ControllerEvent
from runner.base.values import frozen
from runner.controller.privileged_process import PrivilegedProcess
from runner.controller.tune.host_tuner import HostTuner
from runner.controller.tune.tuner_messages import Tuned, TunedInstance, format_instances, parse_instances
from runner.kernel.privileges import CAP_DAC_OVERRIDE, CAP_SYS_PTRACE

log = logging.getLogger(__name__)


@frozen
class TunerProcess(PrivilegedProcess):
    """The controller's end of the tuner's connection."""

    title = "host tuner"
    comm = "host-tuner"
    keeps = (
        CAP_SYS_PTRACE,  # to write through the root directory of the node's first process
        CAP_DAC_OVERRIDE,  # to write to a managed interrupt's read-only file, whose error reports that it is managed
    )

    def tune(self, instances: dict[str, TunedInstance]) -> Tuned:
        """Adapt the settings to *instances*, by pod UID."""
        try:
            return Tuned.parse(self.ask(format_instances(instances)))
        except HostError as error:
            return Tuned.not_made(explain(error))


def start_tuner(tuner: HostTuner, procfs: Path) -> TunerProcess:
    """Fork the process of *tuner*. Raises :class:`HostError`."""
    return TunerProcess.start(procfs, lambda line: obey(tuner, line))


def obey(tuner: HostTuner, line: bytes) -> bytes:
    """Carry out *line*, which :func:`~runner.controller.tune.tuner_messages.format_instances` wrote; return a ``Tuned`` as JSON."""
    try:
        return tuner.tune(parse_instances(line)).to_json()
    except (HostError, OSError, ValueError, RecursionError) as error:
        return Tuned.not_made(explain(error)).to_json()
    except Exception as error:
        log.exception(ControllerEvent.CONTROLLER_BUG)  # the process continues, because it is never restarted
        return Tuned.not_made(repr(error)).to_json()
