"""Who is who in a container: what the runner wrote down when it had placed every thread (``receipt.json``)."""

from __future__ import annotations

import json
from collections.abc import Mapping

import attrs

from runner.cpuset import CpuSet
from runner.errors import UsageError
from runner.inspect.observation import ANCHOR, EMULATOR, IOTHREAD, RUNNER, VCPU
from runner.kernel.procfs import ProcessStatus

VERSION = 1
DNSMASQ = "dnsmasq"


@attrs.frozen
class Roles:
    """The receipt, as far as it says whose a thread is. A number may have been given to another process since."""

    backend: str
    cpus: CpuSet
    instance_cgroup: str
    """Empty where the back end has none."""
    processes: Mapping[int, tuple[str, str]]
    """pid → role and name; QEMU's role is ``emulator``."""
    vcpus: Mapping[int, int]
    """tid → vCPU index."""
    iothreads: frozenset[int]
    """The tids of threads that serve disks."""

    @property
    def runner(self) -> int | None:
        """The pid of the runner."""
        return next((pid for pid, (role, _) in self.processes.items() if role == RUNNER), None)

    @property
    def machine(self) -> int | None:
        """The pid of QEMU."""
        return next((pid for pid, (role, _) in self.processes.items() if role == EMULATOR), None)

    def of_process(self, process: ProcessStatus, *, is_sleep_infinity: bool) -> str | None:
        """Return the role of *process*, or ``None`` if it is none of the instance's; *is_sleep_infinity*: it is ``sleep infinity``.

        Anchor and dnsmasq are started again under another number when they die.
        """
        role, known_as = self.processes.get(process.pid, (None, ""))
        if role is not None and process.name == known_as:
            return role
        if process.parent != self.runner:
            return None
        return ANCHOR if is_sleep_infinity else DNSMASQ if process.name == DNSMASQ else None


def parse_receipt(text: str, source: str) -> Roles:
    """Read the text of a receipt; *source* names it in errors. Raises :class:`UsageError` if it is none."""
    try:
        document = json.loads(text)
        if document["version"] != VERSION:
            raise UsageError(f"cannot use {source}: its version is {document['version']!r}, not {VERSION}")
        processes: dict[int, tuple[str, str]] = {}
        for thread in document["threads"]:
            if thread["tid"] == thread["pid"]:
                processes[thread["pid"]] = (thread["role"], thread["name"])
        return Roles(
            backend=document["backend"],
            cpus=CpuSet.parse(document["instance_cpus"]),
            instance_cgroup=(document.get("cgroups") or {}).get("instance") or "",
            processes=processes,
            iothreads=frozenset(thread["tid"] for thread in document["threads"] if thread["role"] == IOTHREAD),
            vcpus={thread["tid"]: thread["vcpu"] for thread in document["threads"] if thread["role"] == VCPU},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"cannot use {source}: it is no receipt of instance-runner's") from error
