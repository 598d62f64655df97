from __future__ import annotations

import attrs
import pytest

from runner.plan.guest_devices import FIRST_CID, LAST_CID, VsockPlan, derived_cid
from tests.unit.plan.test_plan import FACTS, KERNEL, plan_of, problems


def test_a_guest_has_an_agent_channel_and_nothing_more_by_default() -> None:
    guest = plan_of(KERNEL).machine.guest
    assert (guest.agent, guest.clock, guest.vsock, guest.watchdog) == (True, "utc", None, None)


def test_vsock_has_a_given_or_a_free_identifier() -> None:
    assert plan_of(KERNEL + "[guest]\nvsock = 7\n").machine.guest.vsock == VsockPlan(7, exact=True)
    auto = plan_of(KERNEL + '[guest]\nvsock = "auto"\n').machine.guest.vsock
    assert auto == VsockPlan(derived_cid("instance"), exact=False)
    assert all(FIRST_CID <= derived_cid(str(number)) <= LAST_CID for number in range(100))
    assert len({derived_cid(str(number)) for number in range(100)}) == 100


@pytest.mark.parametrize("wrong", ["2", "4294967295", '"none"', "true"])
def test_identifiers_with_a_meaning_of_their_own_are_refused(wrong: str) -> None:
    assert problems(f"{KERNEL}[guest]\nvsock = {wrong}\n")[0].startswith("guest.vsock: found ")


def test_vsock_needs_its_device() -> None:
    [problem] = problems(KERNEL + "[guest]\nvsock = 7\n", attrs.evolve(FACTS, vhost_vsock=False))
    assert problem.startswith(
        "guest.vsock: cannot use /dev/vhost-vsock: it is missing or not writable; load the module"
    )
