"""How long fetches are expected to take."""

import numpy as np
import pytest

from personae.engine.tiers import staging
from personae.engine.tiers.staging import StagedTier

PAGE = 1000


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(staging, "time", clock)
    return clock


def fetch(tier: StagedTier, clock: Clock, pages: int, seconds: float) -> None:
    ticket = tier.reserve(pages)
    with tier._fetch_into(ticket, pages) as got:
        clock.now += seconds
        got.append(np.zeros((pages, PAGE), np.uint8))
    tier.discard(ticket)


def expected(tier: StagedTier, pages: int) -> float:
    seconds = tier.seconds(pages)
    assert seconds is not None
    return seconds


def test_a_fetch_that_was_slow_once_does_not_end_all_fetching(clock: Clock) -> None:
    tier = StagedTier(PAGE)
    fetch(tier, clock, 9, 4.0)
    assert expected(tier, 9) > 1.0, "so the next pages are computed, and nothing is measured"
    clock.now += 60.0
    assert expected(tier, 9) < 0.01, "until a fetch is tried again"


def test_one_slow_fetch_among_fast_ones_counts_little(clock: Clock) -> None:
    tier = StagedTier(PAGE)
    for seconds in (0.01, 0.01, 2.0, 0.01):
        fetch(tier, clock, 10, seconds)
    assert expected(tier, 10) < 0.02


def test_what_every_fetch_takes_is_not_multiplied_by_the_pages(clock: Clock) -> None:
    tier = StagedTier(PAGE)
    for pages, seconds in ((1, 0.01), (1, 0.01), (100, 0.02), (1, 0.01)):
        fetch(tier, clock, pages, seconds)
    assert 0.02 < expected(tier, 1000) < 0.5


def test_fetches_that_wait_for_their_turn_count(clock: Clock) -> None:
    tier = StagedTier(PAGE)
    fetch(tier, clock, 10, 1.0)
    alone = expected(tier, 10)
    tickets = [tier.reserve(10) for _ in range(3)]
    assert expected(tier, 10) > 3.9 * alone
    tier.discard(tickets.pop())
    assert expected(tier, 10) < 3.1 * alone
    tier.forget_fetches()
    assert expected(tier, 10) == alone
