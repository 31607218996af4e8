"""Budgets: tokens and money that a tenant may use in a day."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from fake_engine import FakeEngine
from patience import PATIENCE
from uploads import UploadFixture, open_fixture, upload, whole

from personae.api.options import ServeOptions, checked
from personae.api.settings import ApiSettings
from personae.api.tenants.budgets import Budgets
from personae.api.tenants.data import DataDir
from personae.api.tenants.prices import Prices
from personae.api.tenants.store import Identity, TenantLimits
from personae.api.tenants.usage import DAY, UsageLedger
from personae.errors import BudgetExceeded

pytestmark = pytest.mark.anyio
PRICES = ("poet=10/20/1", "*=1/2")
NOON = 20_000 * DAY + DAY // 2


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[UploadFixture]:
    engine = FakeEngine("12345678")
    with open_fixture(
        tmp_path / "data", engine, settings=ApiSettings(price=("poet=10/20", "*=1/2"))
    ) as fixture:
        yield fixture


async def complete(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    """Ten tokens of prompt, eight or fewer of the answer."""
    body = {"model": "base", "prompt": "0123456789", "max_tokens": 8, "ignore_eos": True, **fields}
    return await client.post("/v1/completions", json=body)


async def test_tokens_of_the_day_end_in_a_429_that_says_when_the_next_day_begins(
    fixture: UploadFixture,
) -> None:
    ann, bob = fixture.key("ann", tokens_per_day=40), fixture.key("bob")
    async with fixture.client(ann) as client:
        for _ in range(2):
            assert (await complete(client)).status_code == 200
        refused = await complete(client)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (429, "budget_exceeded")
        assert "budget of 40 tokens a day: 36 tokens for" in error["message"]
        assert "T00:00:00Z" in error["message"]
        assert 0 < int(refused.headers["retry-after"]) <= DAY
        account = (await client.get("/v1/account")).json()
        assert (account["tenant"], account["today"]["tokens"]) == ("ann", 36)
        assert account["limits"]["tokens_per_day"] == 40
        assert account["today"]["resets"] % DAY == 0
    async with fixture.client(bob) as client:
        assert (await complete(client)).status_code == 200
    assert fixture.app.state.services.budgets._held == {}


async def test_money_counts_at_the_price_of_the_adapter_and_usage_shows_it(fixture: UploadFixture) -> None:
    root = fixture.key("root", "admin")
    ann = fixture.key("ann")
    fixture.tenants.set_limits("ann", {"spend_per_day": 0.0005})
    async with fixture.client(ann) as client:
        assert (await upload(client, "poet", whole())).status_code == 201
        first = await complete(client, model="poet@1")  # 10 * 10 + 8 * 20 millionths
        assert first.status_code == 200
        assert (await complete(client)).status_code == 200  # 10 * 1 + 8 * 2 = 26
        assert (await complete(client, model="poet")).status_code == 200  # 286 and 100 fit
        refused = await complete(client)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "budget_exceeded")
        assert "0.0005 a day in the server's currency" in refused.json()["error"]["message"]
        rows = (await client.get("/v1/usage?group_by=adapter")).json()["data"]
        assert {row["adapter"]: row["spend"] for row in rows} == {"": 0.000026, "poet": 0.00052}
        text = (await client.get("/v1/usage?group_by=adapter&format=csv")).text
        assert text.splitlines()[0].endswith(",spend")
        assert {line.rpartition(",")[2] for line in text.splitlines()[1:]} == {"0.000026", "0.00052"}
    async with fixture.client(root) as client:
        assert (await complete(client)).status_code == 200


async def test_running_answers_count_with_the_most_that_they_may_have(fixture: UploadFixture) -> None:
    fixture.engine.hold_prompt = True
    ann = fixture.key("ann", tokens_per_day=100)
    async with fixture.client(ann) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: complete(client, max_tokens=85))
        with anyio.fail_after(PATIENCE):
            while not fixture.engine.live:  # noqa: ASYNC110  the engine sets no event
                await anyio.sleep(0.01)
        refused = await complete(client)
        assert refused.status_code == 429
        assert "Running requests may need the rest." in refused.json()["error"]["message"]
        tasks.cancel_scope.cancel()
    assert fixture.app.state.services.budgets._held == {}


async def test_a_minutes_limit_that_refuses_holds_nothing_of_the_day(fixture: UploadFixture) -> None:
    ann = fixture.key("ann", tokens_per_minute=5, tokens_per_day=100)
    async with fixture.client(ann) as client:
        await complete(client)
        assert (await complete(client)).json()["error"]["code"] == "rate_limit_exceeded"
    assert fixture.app.state.services.budgets._held == {}


def ann(tokens: int | None = None, spend: float | None = None) -> Identity:
    return Identity("ann", "tenant", TenantLimits(tokens_per_day=tokens, spend_per_day=spend))


def test_a_day_ends_at_midnight_in_utc_and_a_restart_forgets_nothing(
    tmp_path: Path, anyio_backend: str
) -> None:
    now = [float(NOON)]
    for restart in range(2):
        data = DataDir(tmp_path)
        with UsageLedger(data, lambda: now[0]).running() as ledger:
            budgets = Budgets(ledger, Prices(PRICES), lambda: now[0])
            if not restart:
                ledger.add(ann(), "poet@1", 60, 0, 30, 1.0, 0.5)
            assert budgets.status(ann()) == (90, 0.5, NOON + DAY // 2)
            with pytest.raises(BudgetExceeded) as caught:
                budgets.hold(ann(100), "base", 11, 1)
            assert caught.value.retry_after == DAY / 2
            with pytest.raises(BudgetExceeded):
                budgets.hold(ann(spend=0.5), "base", 11, 1)
            budgets.hold(ann(100), "base", 10, 500).release()
            if restart:
                now[0] += DAY / 2
                assert budgets.status(ann()) == (0, 0.0, NOON + DAY // 2 + DAY)
                budgets.hold(ann(100), "base", 100, 500).release()
        data.close()


def test_what_costs_nothing_needs_no_money(tmp_path: Path, anyio_backend: str) -> None:
    data = DataDir(tmp_path)
    budgets = Budgets(UsageLedger(data), Prices(("poet=1/1",)))
    budgets.hold(ann(spend=0), "base", 10, 10).release()
    with pytest.raises(BudgetExceeded):
        budgets.hold(ann(spend=0), "poet", 10, 10)
    with pytest.raises(BudgetExceeded):
        budgets.hold(ann(0), "base", 1, 1)
    data.close()


def test_prices_are_per_million_tokens_and_cached_ones_may_have_their_own(anyio_backend: str) -> None:
    prices = Prices(PRICES)
    assert prices.cost("poet", 1_000_000, 400_000, 500_000) == pytest.approx(6 + 0.4 + 10)
    assert prices.cost("other", 1_000_000, 400_000, 0) == 1.0
    assert Prices().cost("poet", 5, 0, 5) == 0.0


@pytest.mark.parametrize(
    "price", ["poet", "poet=1", "=1/2", "poet=1/2/3/4", "poet=-1/2", "poet=a/b", "poet=1./..", "poet=1e9/2"]
)
def test_a_price_that_says_nothing_clear_is_refused(price: str, anyio_backend: str) -> None:
    with pytest.raises(ValueError, match="`price`"):
        checked(ServeOptions(price=(price,)))
    with pytest.raises(ValueError, match="two prices"):
        checked(ServeOptions(price=("a=1/2", "a=2/3")))


async def test_bad_budgets_are_a_400(fixture: UploadFixture) -> None:
    root = fixture.key("root", "admin")
    async with fixture.client(root) as client:
        for limits in ({"tokens_per_day": -1}, {"spend_per_day": -0.5}, {"spend_per_day": "1"}):
            answer = await client.patch("/v1/tenants/root", json={"limits": limits})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"].startswith("limits.")
        good = await client.patch("/v1/tenants/root", json={"limits": {"spend_per_day": 2.5}})
        assert good.json()["limits"] == {"spend_per_day": 2.5}


def test_who_asks_for_usage_while_another_writes_it_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> None:
    data = DataDir(tmp_path)
    ledger = UsageLedger(data)
    ledger.add(ann(), None, 1, 0, 1)
    begun, go = threading.Event(), threading.Event()
    write = UsageLedger._write

    def slowly(self: UsageLedger, *args: Any) -> None:
        begun.set()
        assert go.wait(PATIENCE)
        write(self, *args)

    monkeypatch.setattr(UsageLedger, "_write", slowly)
    first, second = threading.Thread(target=ledger.flush), threading.Thread(target=ledger.flush)
    first.start()
    assert begun.wait(PATIENCE)
    second.start()
    second.join(0.2)
    assert second.is_alive(), "it waits for the first"
    go.set()
    for thread in (first, second):
        thread.join(PATIENCE)
    assert ledger.rows([])[0][0].requests == 1
    data.close()
