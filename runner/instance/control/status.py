"""The state of a running instance that ``ctl status`` shows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Literal, assert_never

import trio

from runner.base.errors import HostError, explain
from runner.base.version import VERSION
from runner.instance.change.disk_hotplug import disks_of
from runner.instance.change.running_instance import RunningInstance
from runner.kernel.small_files import read_image_digest
from runner.placement.threads import sentences
from runner.plan.network_plan import BridgedPlan, InheritedFdPlan, MacvtapPlan, PasstPlan
from runner.protocol.qmp import QmpError
from runner.spec.instance import NetworkMode

if TYPE_CHECKING:
    from runner.instance.control_json import (
        DiskDocument,
        RunnerDocument,
        StatusDocument,
        StatusNetworkDocument,
        StatusPlacementDocument,
        StatusQemuDocument,
    )


async def read_status(running: RunningInstance) -> StatusDocument:
    """Return the state of a *running* instance, each value from its source.

    Sizes are in bytes, times in seconds, CPU sets in the kernel's list format.

    If QEMU does not answer, the state has only this program's own knowledge, and ``qemu`` the error.
    """
    plan, machine, state, error = running.plan, running.plan.machine, running.supervisor.guest_state, ""
    status, disks = "unknown", disks_of(running).listed_without_sizes()
    try:
        state.ask_qemu()
        status, disks = await running.machine.monitor.within(running.answers_within, partial(_asked, running))
    except QmpError as failure:
        error = explain(failure)
    qemu: StatusQemuDocument = {
        "version": running.machine.monitor.version,
        "generation": running.machine.updates,
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
        "vcpus": len(running.receipts.receipt.rules.pins),
        "most_vcpus": None if machine.vcpu_hotplug is None else machine.vcpu_hotplug.most,
        "memory": machine.memory,
        "placement": _placement(running),
        "agent": _agent(running),
        "networks": list(_networks(running)),
        "restarts": dict(sorted(running.supervisor.counters.restarts.items())),
        "console_log": str(plan.console.log),
        "console_bytes": running.supervisor.counters.console,
        "console_silent": state.signs_of_life.mute,
        "resets": {"total": running.supervisor.counters.resets, "last_minute": state.resets_lately()},
        "disks": disks,
        "free_slots": disks_of(running).free_slots,
        "change": None if (change := running.supervisor.changes.current) is None else change.to_json(),
        "runner": runner_document(running),
        "qemu": qemu,
    }


async def _asked(running: RunningInstance) -> tuple[str, list[DiskDocument]]:
    monitor = running.machine.monitor
    return await monitor.answers() or await monitor.run_state(), await disks_of(running).listed()


def runner_document(running: RunningInstance) -> RunnerDocument:
    """Return the version and the digest of this program, and its renewals.

    They are known without QEMU, which may not answer.
    """
    renewal = running.supervisor.renewal
    return {
        "version": VERSION,
        "generation": renewal.generation,
        "digest": renewal.digest or read_image_digest(),
        "outcome": renewal.outcome,
        "reason": renewal.reason,
    }


def _placement(running: RunningInstance) -> StatusPlacementDocument:
    """Return the places of the vCPUs, and the misplaced threads, read from the kernel now."""
    lost = running.supervisor.guest_state.cpus_lost
    try:
        receipt = running.receipts.read()
        misplaced = [lost] if lost else list(sentences(receipt.violations()))
    except HostError as error:
        receipt, misplaced = running.receipts.receipt, [explain(error)]
    shown = receipt.to_json()
    return {
        "backend": running.plan.placement.backend,
        "guarantee": shown["guarantee"],
        "guarantee_reason": shown["guarantee_reason"],
        "cpus": str(receipt.rules.cpus),
        "pins": list(receipt.rules.pins),
        "float_cpus": shown["float_cpus"],
        "misplaced": misplaced,
    }


def _agent(running: RunningInstance) -> Literal["none", "connected", "absent"]:
    if not running.plan.machine.guest.agent:
        return "none"
    return "connected" if running.machine.agent_listens else "absent"


def _networks(running: RunningInstance) -> Iterator[StatusNetworkDocument]:
    """Yield the guest's networks; *addresses* are its DHCP addresses, if this program assigns them."""
    for network in running.plan.networks:
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
