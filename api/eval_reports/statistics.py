"""Confidence intervals of a share, and of the difference of two shares."""

import math
from typing import NamedTuple

Z95 = 1.959963984540054


class Interval(NamedTuple):
    """A share with the ends of its 95 % confidence interval."""

    share: float
    low: float
    high: float


def wilson(successes: float, count: int) -> Interval:
    """Wilson's score interval. `successes` may be a sum of scores from 0 to 1; then the interval is rather
    wide.

    E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).
    """
    if count == 0:
        return Interval(math.nan, 0.0, 1.0)
    share = successes / count
    spread = Z95 * Z95 / count
    centre = (share + spread / 2) / (1 + spread)
    half = Z95 / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return Interval(
        share,
        0.0 if successes == 0 else max(0.0, centre - half),
        1.0 if successes == count else min(1.0, centre + half),
    )


class Difference(NamedTuple):
    """The change on the same cases: `gained` pass now and did not before, `lost` the reverse.

    `low` and `high` are the ends of the 95 % interval of `change`. `p` is that of McNemar's exact two-sided
    test.
    """

    change: float
    low: float
    high: float
    gained: int
    lost: int
    of: int
    p: float


def paired(gained: int, lost: int, count: int) -> Difference:
    """The difference of two shares of the same `count` cases.

    The interval is Wald's on counts enlarged by one (D. G. Bonett, R. M. Price, Adjusted Wald confidence
    interval for a difference of binomial proportions based on paired data, J. Educ. Behav. Stat. 37 (2012)).
    """
    if count == 0:
        return Difference(math.nan, -1.0, 1.0, 0, 0, 0, 1.0)
    up, down = (gained + 1) / (count + 2), (lost + 1) / (count + 2)
    half = Z95 * math.sqrt(max(0.0, up + down - (up - down) ** 2) / (count + 2))
    moved = gained + lost
    tail = sum(math.comb(moved, k) for k in range(min(gained, lost) + 1)) / 2**moved
    return Difference(
        (gained - lost) / count,
        max(-1.0, up - down - half),
        min(1.0, up - down + half),
        gained,
        lost,
        count,
        min(1.0, 2 * tail),
    )
