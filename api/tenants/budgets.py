"""Enforces budgets: tokens and money that a tenant may use in a day, in UTC.

A request begins if its prompt fits into what is left of the day, without what the answers of the tenant's
running requests may need at most. So a budget is exceeded by the answers of one request at most. Money also
counts at the price of the model that answers.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

from personae.api.tenants.prices import Prices
from personae.api.tenants.store import Identity
from personae.api.tenants.usage import DAY, DayUse, UsageLedger
from personae.errors import BudgetExceeded


class BudgetHold:
    """What a running request may use, held from its tenant's budget."""

    def __init__(self, held: dict[str, DayUse], tenant: str, use: DayUse) -> None:
        self._held = held
        self._tenant = tenant
        self._use: DayUse | None = use
        held[tenant] = held.get(tenant, DayUse()).plus(use)

    def release(self) -> None:
        """Give it back, because the usage has it now. Later calls do nothing."""
        if self._use is not None:
            left = self._held[self._tenant].minus(self._use)
            self._use = None
            if left.tokens:
                self._held[self._tenant] = left
            else:
                del self._held[self._tenant]


class Budgets:
    """The budgets of all tenants. `clock` is Unix time in seconds."""

    def __init__(self, usage: UsageLedger, prices: Prices, clock: Callable[[], float] = time.time) -> None:
        self.prices = prices
        self._usage = usage
        self._clock = clock
        self._held: dict[str, DayUse] = {}

    def hold(self, who: Identity, model: str, prompt: int, answers: int) -> BudgetHold:
        """Hold the tokens of a prompt and the most that its answers may have, and what they cost. Raises
        BudgetExceeded if the prompt does not fit into what is left of the day."""
        limits = who.limits
        if limits.tokens_per_day is not None or limits.spend_per_day is not None:
            asked = DayUse(prompt, self.prices.cost(model, prompt, 0, 0))
            used = self._usage.today(who.tenant).plus(self._held.get(who.tenant, DayUse())).plus(asked)
            if limits.tokens_per_day is not None and used.tokens > limits.tokens_per_day:
                raise self._exceeded(who, f"{limits.tokens_per_day} tokens a day")
            # Nothing costs nothing, even without a budget.
            if limits.spend_per_day is not None and asked.spend and used.spend > limits.spend_per_day:
                raise self._exceeded(who, f"{limits.spend_per_day:g} a day in the server's currency")
        cost = self.prices.cost(model, prompt, 0, answers)
        return BudgetHold(self._held, who.tenant, DayUse(prompt + answers, cost))

    def status(self, who: Identity) -> "BudgetStatus":
        """What the tenant has used of the day, and when the next day begins."""
        use = self._usage.today(who.tenant)
        return BudgetStatus(use.tokens, round(use.spend, 6), self._reset())

    def _exceeded(self, who: Identity, limit: str) -> BudgetExceeded:
        use, reset = self._usage.today(who.tenant), self._reset()
        running = " Running requests may need the rest." if who.tenant in self._held else ""
        when = datetime.fromtimestamp(reset, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return BudgetExceeded(
            f"This request does not fit into this tenant's budget of {limit}: {use.tokens} tokens for "
            f"{use.spend:g} are used.{running} The next day begins at {when}.",
            retry_after=max(reset - self._clock(), 1.0),
        )

    def _reset(self) -> int:
        return (int(self._clock()) // DAY + 1) * DAY


class BudgetStatus(NamedTuple):
    """Of the day: tokens, money, and the Unix time of its end."""

    tokens: int
    spend: float
    resets: int
