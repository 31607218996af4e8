"""Intervals and paired differences, by what defines them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from personae.api.eval_reports.statistics import Z95, paired, wilson


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_at_wilsons_ends_the_share_is_just_as_far_off_as_95_percent_allow(counts: tuple[int, int]) -> None:
    passed, count = counts
    share, low, high = wilson(passed, count)
    assert share == passed / count
    assert 0.0 <= low <= share <= high <= 1.0
    for end in (low, high):
        if 0.0 < end < 1.0:
            assert abs(share - end) == pytest.approx(Z95 * math.sqrt(end * (1 - end) / count), abs=1e-9)


def test_a_known_interval() -> None:
    # 8 of 10: Agresti and Coull (1998) and every table since.
    assert wilson(8, 10)[1:] == pytest.approx((0.4902, 0.9433), abs=1e-4)


def test_nothing_measured_says_nothing() -> None:
    assert math.isnan(wilson(0, 0).share)
    assert wilson(0, 0)[1:] == (0.0, 1.0)
    assert math.isnan(paired(0, 0, 0).change)


COINS = [(8, 2, 0.109375), (6, 0, 0.03125), (3, 3, 1.0), (0, 0, 1.0)]


@pytest.mark.parametrize(("gained", "lost", "p"), COINS)
def test_the_p_value_is_that_of_a_fair_coin(gained: int, lost: int, p: float) -> None:
    assert paired(gained, lost, 40).p == pytest.approx(p)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_a_paired_difference_turns_with_its_sign(up: int, down: int, same: int) -> None:
    count = up + down + same
    if count == 0:
        return
    there, back = paired(up, down, count), paired(down, up, count)
    assert there.change == pytest.approx((up - down) / count)
    assert -1.0 <= there.low <= there.high <= 1.0
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low))
    assert there.p == back.p
