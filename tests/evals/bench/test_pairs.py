"""Pairs of two trees: the interval of their median."""

import pytest

from personae.evals.bench.pairs import interval


@pytest.mark.parametrize(("count", "first", "last"), [(6, 1, 6), (10, 2, 9), (40, 14, 27), (100, 40, 61)])
def test_the_interval_of_a_median_is_the_one_of_the_tables(count: int, first: int, last: int) -> None:
    """Of the ordered values: as in Conover's table for the sign test, 95 % two-sided."""
    ratios = [float(number) for number in range(count, 0, -1)]
    assert interval(ratios) == (first, last)
