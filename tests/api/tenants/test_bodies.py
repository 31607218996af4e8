"""Bytes of bodies in memory, with a limit for each tenant and for all."""

import anyio
import pytest
from virtual_clock import virtual_clock

from personae.api.tenants.bodies import BodyBudget
from personae.api.tenants.limits import DEFAULTS
from personae.api.tenants.store import Identity, TenantLimits
from personae.errors import Overloaded, RateLimited

pytestmark = virtual_clock


def who(tenant: str = "ann", most: int | None = 100) -> Identity:
    return Identity(tenant, "tenant", TenantLimits(body_bytes=most))


async def test_a_tenant_over_its_limit_is_told_so_and_others_are_not() -> None:
    budget = BodyBudget(total=1000)
    first = budget.hold(who())
    first.grow(60)
    with pytest.raises(RateLimited, match="may have 100 bytes"):
        budget.hold(who()).grow(50)
    budget.hold(who("bob")).grow(50)
    first.shrink()
    budget.hold(who()).grow(100)
    assert (budget.held("ann"), budget.held()) == (100, 150)


async def test_all_tenants_together_have_a_limit_too() -> None:
    budget = BodyBudget(total=150)
    budget.hold(who("ann")).grow(100)
    with pytest.raises(Overloaded):
        budget.hold(who("bob")).grow(51)


async def test_what_grows_counts_once_and_nothing_is_held_in_the_end() -> None:
    budget = BodyBudget()
    hold = budget.hold(who())
    for size in (10, 40, 30, 100):
        hold.grow(size)
    assert budget.held("ann") == 100
    hold.shrink()
    hold.shrink()
    assert budget.held() == 0
    assert not budget._held


async def test_a_tenant_without_a_limit_of_its_own_has_the_default() -> None:
    assert DEFAULTS.body_bytes is not None
    with pytest.raises(RateLimited):
        BodyBudget().hold(who(most=None)).grow(DEFAULTS.body_bytes + 1)


async def test_work_that_gives_way_leaves_half_and_waits_for_that() -> None:
    budget, waited = BodyBudget(), []
    requests = budget.hold(who())
    requests.grow(30)

    async def line(size: int) -> None:
        hold = budget.hold(who())
        await hold.wait(size)
        waited.append(size)
        await anyio.sleep(1)
        hold.shrink()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(line, 20)
        await anyio.sleep(0.1)
        tasks.start_soon(line, 500)  # more than ever fits: it has the whole of it, alone
        await anyio.sleep(0.1)
        assert waited == [20]
        await anyio.sleep(1)
        assert waited == [20]
        requests.shrink()
        await anyio.sleep(0.1)
        assert waited == [20, 500]
    assert budget.held() == 0
