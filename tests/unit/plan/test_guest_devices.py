from __future__ import annotations

from ipaddress import IPv4Address

import attrs
import pytest

from runner.plan.guest_devices import FIRST_CID, LAST_CID, GuestPort, VsockPlan, derived_cid
from runner.plan.identity import Identity
from runner.plan.render import plan_json, plan_lines
from runner.spec.readiness import AgentSign, ConsoleSign
from tests.support.json_schemas import fitting
from tests.support.plans import FACTS, KERNEL, plan_of, problems


def test_a_guest_has_an_agent_channel_and_nothing_more_by_default() -> None:
    guest = plan_of(KERNEL).machine.guest
    assert (guest.agent, guest.clock, guest.vsock, guest.watchdog) == (True, "utc", None, None)


def test_vsock_has_a_given_or_a_free_identifier() -> None:
    assert plan_of(KERNEL + "[guest]\nvsock = 7\n").machine.guest.vsock == VsockPlan(7, exact=True)
    auto = plan_of(KERNEL + '[guest]\nvsock = "auto"\n')
    assert auto.machine.guest.vsock == VsockPlan(derived_cid(auto.identity), exact=False)
    assert all(FIRST_CID <= derived_cid(Identity(str(number))) <= LAST_CID for number in range(100))
    assert len({derived_cid(Identity(str(number))) for number in range(100)}) == 100


@pytest.mark.parametrize("wrong", ["2", "4294967295", '"none"', "true"])
def test_identifiers_with_a_meaning_of_their_own_are_refused(wrong: str) -> None:
    assert problems(f"{KERNEL}[guest]\nvsock = {wrong}\n")[0].startswith("guest.vsock: found ")


def test_a_guest_is_ready_when_it_runs_unless_a_sign_is_named() -> None:
    assert plan_of(KERNEL).machine.guest.ready is None
    assert plan_of(KERNEL + '[guest]\nready = "agent"\n').machine.guest.ready == AgentSign()
    assert plan_of(KERNEL + "[guest]\nready = 'console:login: $'\n").machine.guest.ready == ConsoleSign("login: $")


@pytest.mark.parametrize(
    ("network", "address"), [("", "192.168.77.2"), ('subnet = "10.9.0.0/24"\naddress = "10.9.0.7"\n', "10.9.0.7")]
)
def test_a_port_is_asked_at_the_guests_address_in_the_private_network(network: str, address: str) -> None:
    plan = plan_of(f'{KERNEL}[guest]\nready = "port:22"\n[[network]]\n{network}')
    assert plan.machine.guest.ready == GuestPort(IPv4Address(address), 22)
    assert "is ready when it gives the sign 'port:22'" in "\n".join(plan_lines(plan))
    assert fitting("plan", plan_json(plan))["machine"]["guest"]["ready"] == {
        "sign": "port",
        "address": address,
        "port": 22,
    }


def test_vsock_needs_its_device() -> None:
    [problem] = problems(KERNEL + "[guest]\nvsock = 7\n", attrs.evolve(FACTS, vhost_vsock=False))
    assert problem.startswith(
        "guest.vsock: cannot use /dev/vhost-vsock: it is missing or not writable; load the module"
    )
