"""irqbalance, a daemon that spreads interrupts over all CPUs, and the CPUs that it is to leave alone.

Its socket takes commands of user 0 ("SOCKET API" of irqbalance(1)): ``setup`` answers with the banned CPUs as a mask, ``settings cpus
LIST`` replaces them, and ``NULL`` restores those of its configuration. A command takes effect at the daemon's next scan of the machine
(``sleep_interval``, by default 10 s). The socket is in the daemon's own mount namespace, which is reached through its root directory in
procfs.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError
from runner.base.values import frozen
from runner.kernel.peers import Peers
from runner.kernel.procfs import Procfs
from runner.kernel.sockets import reachable

_NAME = "irqbalance"
_ANSWERS_WITHIN = 2.0
"""Seconds: it answers between two scans of the machine."""
_BANNED = re.compile(r"BANNED ([0-9a-fA-F,]+)")
REMEDY = "set IRQBALANCE_BANNED_CPULIST for it, or stop it"


@frozen
class Irqbalance:
    """A running irqbalance."""

    pid: int
    socket: Path

    def banned(self) -> CpuSet:
        """Return the CPUs to which it sends no interrupts. Raises :class:`HostError`."""
        answer = self._call("setup")
        found = _BANNED.search(answer)
        if found is None:
            raise HostError(f"cannot understand irqbalance: it answered {answer[:80]!r} to 'setup'", remedy=REMEDY)
        try:
            return CpuSet.parse_mask(found[1])
        except ValueError as error:
            raise HostError(f"cannot understand irqbalance: {error}", remedy=REMEDY) from error

    def ban(self, cpus: CpuSet) -> None:
        """Let it send interrupts to all CPUs but *cpus*. Raises :class:`HostError`."""
        self._call(f"settings cpus {cpus or 'NULL'}")

    def _call(self, command: str) -> str:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(_ANSWERS_WITHIN)
                with reachable(self.socket) as address:
                    connection.connect(address)
                connection.sendall(command.encode() + b"\0")  # irqbalance reads the command up to this byte
                return connection.recv(1 << 16).decode(errors="replace")
        except OSError as error:
            raise HostError(f"cannot reach irqbalance at {self.socket}", remedy=REMEDY) from error


def find_irqbalance(procfs: Procfs) -> Irqbalance | None:
    """Return the irqbalance running on this machine, if there is one.

    It must run as root in the PID namespace of *procfs*, because a pod may give its processes any name.
    """
    for pid in procfs.processes():
        if procfs.name(pid) == _NAME and _is_the_nodes(procfs, pid):
            return Irqbalance(pid, procfs.root / str(pid) / f"root/run/irqbalance/irqbalance{pid}.sock")
    return None


def _is_the_nodes(procfs: Procfs, pid: int) -> bool:
    peers = Peers(procfs.root)
    # Checked first, because the status of a pod's process may be 700 KB long: it lists the supplementary groups.
    if peers.namespace(pid) != peers.own_namespace():
        return False
    try:
        return procfs.status(pid)["Uid"].split()[0] == "0"
    except HostError:  # it has ended
        return False
