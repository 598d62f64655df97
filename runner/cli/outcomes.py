"""The meaning and the remedy of each exit status of ``run`` (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from runner.base.errors import Status

OUTCOMES: Mapping[Status, tuple[str, str]] = {
    Status.STOPPED: ("SIGTERM, SIGINT or SIGHUP; the guest powered itself down in time", "none"),
    Status.BUG: (
        "a fault of this program as it started or ended, or the third within ten minutes; the traceback is in the log",
        "report it",
    ),
    Status.USAGE: ("the command line is wrong, or the spec cannot be read", "see `--help`"),
    Status.GUEST_SHUTDOWN: (
        "the guest shut itself down",
        "`shutdown.poweroff_status` changes the number, 0 makes it a success for `restartPolicy: OnFailure`",
    ),
    Status.GUEST_RESET: ('the guest rebooted and `shutdown.on_reboot` is `"exit"`', "restart the pod"),
    Status.GUEST_PANICKED: ("the guest's kernel panicked", "its last output is in the console log"),
    Status.FORCED_OFF: (
        "asked to stop; the guest did not power down within its grace and was switched off",
        "a longer `shutdown.grace`, or a guest that listens to its power button",
    ),
    Status.GUEST_HUNG: (
        'the guest stopped feeding its watchdog and `guest.watchdog` is `"exit"`',
        "its last output is in the console log",
    ),
    Status.MACHINE_DIED: (
        "QEMU crashed, was killed, or can no longer be controlled",
        "the line before it in the log says which",
    ),
    Status.SERVICE_DIED: (
        "virtiofsd or passt ended; the guest was powered down",
        "the line before it in the log says why",
    ),
    Status.CPUS_LOST: (
        "the kubelet took CPUs from the running pod, and the guest did not give up as many vCPUs; it was powered down",
        "`hotplug.cpus`, and `ctl cpus COUNT` before the pod gets fewer CPUs",
    ),
    Status.REFUSED: (
        "the spec, the host or the pod does not fit; nothing was touched",
        "every problem is named with its path",
    ),
    Status.START_FAILED: (
        "the start was begun, failed, and was reversed",
        "the line before it in the log says where",
    ),
    Status.DIRTY: ("ended, but something could not be released", "the `faults` in the termination log"),
}
"""Status → its meaning and remedy, as in the documents' table."""

KILLED = 137
"""128 plus the number of SIGKILL, the status in a shell."""


def explain_status(number: int) -> Iterator[str]:
    """Yield the lines that explain the exit status *number* to a person; none for a success."""
    if number == Status.STOPPED:
        return
    try:
        status = Status(number)
        means, remedy = OUTCOMES[status]
    except (ValueError, KeyError):
        if number == KILLED:
            yield f"ended with status {number}: the runner was killed (SIGKILL); the kernel has ended all that it had started"
            yield "what to do: `dmesg` says whether the kernel killed it for want of memory"
        else:
            yield f"ended with status {number}, which is none of instance-runner's: the lines before it say why"
        return
    yield f"ended with status {number} ({status.name.lower()}): {means}"
    yield f"what to do: {remedy}"
