"""The state of a running instance that ``ctl status`` shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, assert_never

import trio

from runner.base.errors import HostError, explain
from runner.base.values import frozen
from runner.base.version import VERSION
from runner.instance.change.hotplug import DiskHotplug
from runner.instance.change.vcpus import Vcpus
from runner.instance.parts.qemu import QEMU_ANSWERS_WITHIN, Qemu
from runner.instance.supervisor import Supervisor
from runner.instance.watch.receipts import Receipts
from runner.kernel.small_files import read_image_digest
from runner.placement.threads import sentences
from runner.plan.instance import InstancePlan
from runner.plan.network_plan import BridgedPlan, InheritedFdPlan, MacvtapPlan, PasstPlan
from runner.protocol.qmp import QmpError
from runner.spec.instance import NetworkMode

if TYPE_CHECKING:
    from runner.instance.documents import (
        DiskDocument,
        RunnerDocument,
        StatusDocument,
        StatusNetworkDocument,
        StatusPlacementDocument,
        StatusQemuDocument,
    )


@frozen
class StatusReader:
    """Reads the state of a running instance, always from the source of each value."""

    supervisor: Supervisor
    plan: InstancePlan
    machine: Qemu
    receipts: Receipts
    disks: DiskHotplug
    vcpus: Vcpus

    answers_within: float = QEMU_ANSWERS_WITHIN
    """Seconds that QEMU may take to answer."""

    async def qemu_answers(self) -> None:
        """Raise :exc:`~runner.protocol.qmp.SilentError` unless QEMU answers, for requests that need it."""
        self.supervisor.guest_state.ask_qemu()
        await self.machine.monitor.within(self.answers_within, self.machine.monitor.answers)

    async def read(self) -> StatusDocument:
        """Return the state as JSON: sizes in bytes, times in seconds, CPU sets in the kernel's list format.

        If QEMU does not answer, the state has only this program's own knowledge, and ``qemu`` the error.
        """
        plan, machine, state, error = self.plan, self.plan.machine, self.supervisor.guest_state, ""
        status, disks = "unknown", self.disks.listed_without_sizes()
        try:
            state.ask_qemu()
            status, disks = await self.machine.monitor.within(self.answers_within, self._asked)
        except QmpError as failure:
            error = explain(failure)
        qemu: StatusQemuDocument = {
            "version": self.machine.monitor.version,
            "generation": self.machine.updates,
            "error": error,
        }
        return {
            "name": plan.name,
            "pod": plan.pod.to_json(),
            "guest": status,
            "uptime": None if state.since is None else round(trio.current_time() - state.since, 1),
            "ready": not (error or state.unready),
            "not_ready": error or state.unready,
            "accelerator": machine.accel,
            "cpu_model": machine.cpu_model,
            "vcpus": len(self.receipts.receipt.rules.pins),
            "most_vcpus": None if machine.vcpu_hotplug is None else machine.vcpu_hotplug.most,
            "memory": machine.memory,
            "placement": self._placement(),
            "agent": self._agent(),
            "networks": list(self._networks()),
            "restarts": dict(sorted(self.supervisor.counters.restarts.items())),
            "console_log": str(plan.console.log),
            "console_bytes": self.supervisor.counters.console,
            "console_silent": state.signs_of_life.mute,
            "resets": {"total": self.supervisor.counters.resets, "last_minute": state.resets_lately()},
            "disks": disks,
            "free_slots": self.disks.free_slots,
            "change": None if (change := self.supervisor.changes.current) is None else change.to_json(),
            "runner": self.runner(),
            "qemu": qemu,
        }

    async def _asked(self) -> tuple[str, list[DiskDocument]]:
        monitor = self.machine.monitor
        return await monitor.answers() or await monitor.run_state(), await self.disks.listed()

    def runner(self) -> RunnerDocument:
        """Return the version and the digest of this program, and its renewals.

        They are known without QEMU, which may not answer.
        """
        renewal = self.supervisor.renewal
        return {
            "version": VERSION,
            "generation": renewal.generation,
            "digest": renewal.digest or read_image_digest(),
            "outcome": renewal.outcome,
            "reason": renewal.reason,
        }

    def _placement(self) -> StatusPlacementDocument:
        """Return the places of the vCPUs, and the misplaced threads, read from the kernel now."""
        lost = self.supervisor.guest_state.cpus_lost
        try:
            receipt = self.receipts.read()
            misplaced = [lost] if lost else list(sentences(receipt.violations()))
        except HostError as error:
            receipt, misplaced = self.receipts.receipt, [explain(error)]
        shown = receipt.to_json()
        return {
            "backend": self.plan.placement.backend,
            "guarantee": shown["guarantee"],
            "guarantee_reason": shown["guarantee_reason"],
            "cpus": str(receipt.rules.cpus),
            "pins": list(receipt.rules.pins),
            "float_cpus": shown["float_cpus"],
            "misplaced": misplaced,
        }

    def _agent(self) -> Literal["none", "connected", "absent"]:
        if not self.plan.machine.guest.agent:
            return "none"
        return "connected" if self.machine.agent_listens else "absent"

    def _networks(self) -> Iterator[StatusNetworkDocument]:
        """Yield the guest's networks; *addresses* are its DHCP addresses, if this program assigns them."""
        for network in self.plan.networks:
            addresses = list[str]()
            mode: NetworkMode
            match network:
                case BridgedPlan(guest=guest, ipv6=ipv6, pod=pod):
                    mode = "private" if pod is None else "bridge"
                    addresses = [str(guest), *([] if ipv6 is None else [str(ipv6.guest)])]
                case MacvtapPlan():
                    mode = "macvtap"
                case PasstPlan():
                    mode = "passt"
                case InheritedFdPlan():
                    mode = "descriptor"
                case _ as never:
                    assert_never(never)
            yield {"mode": mode, "mac": network.mac, "addresses": addresses}
