"""The QMP commands that an operator may execute: those that only show state, and a few that affect only the guest.

Everything else is refused, with the reason and what to do instead. What PID 1 has decided and verified must stay true: where
each thread runs, which files and connections QEMU has, and whether the guest runs.
"""

from __future__ import annotations

import re

from runner.base.values import frozen

_SHOWING = re.compile(r"(x-)?query-[a-z0-9-]+|qom-(get|list|list-types)|trace-event-get-state")
_HARMLESS = frozenset({"announce-self", "inject-nmi", "send-key"})
"""Commands whose only effect is on the guest, or the network around it."""


@frozen
class _Refusal:
    commands: re.Pattern[str]
    reason: str
    remedy: str


_START_AGAIN = "change the spec and start the instance again"
_END = "end the instance with SIGTERM to its PID 1: `kubectl delete pod`, `docker stop`"

_REFUSALS = tuple(
    _Refusal(re.compile(commands), reason, remedy)
    for commands, reason, remedy in (
        (
            r"cont|stop|x-exit-preconfig|exit-preconfig",
            "PID 1 alone lets the guest run, once every thread is in its place, and reports whether it does",
            "`instance-runner inspect` shows where each thread is",
        ),
        (
            r"quit|system_(powerdown|reset|wakeup)|set-action|watchdog-set-action",
            "PID 1 decides when and how the guest ends",
            _END,
        ),
        (
            r"device_add|cpu-add|object-add|set-numa-node",
            "the thread of a new vCPU or device would run where no plan puts it",
            f"`instance-runner ctl disk attach` adds a disk; for anything else {_START_AGAIN}",
        ),
        (
            r"(x-)?block.*|device_del|eject|change.*|nbd-.*|transaction|drive-.*|.*-fd|getfd|closefd|object-del",
            "PID 1 holds the disks, and a node or descriptor changed behind its back breaks what it does next",
            "`instance-runner ctl disk attach`, `detach` and `grow` change disks",
        ),
        (
            r"human-monitor-command",
            "it would execute any command, also those that are refused here",
            "name the QMP command itself",
        ),
        (
            r"(x-)?(migrate|snapshot|calc-dirty-rate|cpr|colo|xen|replication).*|.*migrat.*|savevm|loadvm",
            "an instance is neither migrated nor snapshotted, and the threads for it would run where no plan puts them",
            "keep what must last on a disk",
        ),
        (
            r"dump.*|p?memsave|screendump|chardev-.*|netdev_.*|.*_client|ringbuf-.*|set_password|expire_password|set_link",
            "it opens a path or a connection, or changes one that PID 1 holds",
            _START_AGAIN,
        ),
        (
            # Of the 614 types of Debian's QEMU 7.2, two end it by device-list-properties and six by qom-list-properties.
            r"(qom|device)-list-properties",
            "QEMU makes an object of the type to answer, and some types end it, and with it the guest",
            "ask a QEMU without a guest: `qemu-system-x86_64 -device TYPE,help`",
        ),
        (
            r"qom-list-get",
            "its reply to many paths is longer than PID 1 takes from QEMU, and the guest would end",
            "`qom-list` and `qom-get` show one object and one property",
        ),
        (r"qom-set|balloon|set-.*|.*-set-.*", "it changes what the plan has decided", _START_AGAIN),
    )
)


def refusal(command: str) -> str | None:
    """Return the reason why *command* is refused and the remedy, or ``None`` if an operator may execute it."""
    if command in _HARMLESS or _SHOWING.fullmatch(command):
        return None
    for each in _REFUSALS:
        if each.commands.fullmatch(command):
            return f"{each.reason}; {each.remedy}"
    return "it is not among the commands that only show; `query-commands` lists those that can be executed"
