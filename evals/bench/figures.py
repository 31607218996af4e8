"""Computes figures from answers."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from personae.evals.bench.client import Answer


class Goals(msgspec.Struct, frozen=True):
    """What counts as a good answer: seconds to the first token, between events, and to the end. None: no
    limit."""

    first: float | None = 1.0
    gap: float | None = 0.2
    end: float | None = None

    def met(self, answer: Answer) -> bool:
        """Whether the answer is good. Its gap is the mean of its gaps."""
        if not answer.complete or answer.first is None:
            return False
        gap = statistics.fmean(answer.gaps) if answer.gaps else 0.0
        found = ((answer.first, self.first), (gap, self.gap), (answer.seconds, self.end))
        return all(most is None or value <= most for value, most in found)


class Spread(msgspec.Struct, frozen=True):
    """Quantiles of times, in seconds; NaN if there are none."""

    p50: float
    p90: float
    p99: float
    mean: float
    most: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> "Spread":
        """The quantiles of these times."""
        ordered = sorted(samples)
        if not ordered:
            return cls(math.nan, math.nan, math.nan, math.nan, math.nan)
        last = len(ordered) - 1
        p50, p90, p99 = (ordered[min(last, math.ceil(len(ordered) * q) - 1)] for q in (0.5, 0.9, 0.99))
        return cls(p50, p90, p99, statistics.fmean(ordered), ordered[-1])


class Figures(msgspec.Struct, frozen=True):
    """The results of a load. Times are in seconds, rates are per second of the whole run.

    `fairness` is Jain's index of the tokens that tenants got (or models, if there is one tenant): 1 if all
    got the same, 1 / n if one got all. `goodput` is the rate of requests that met the goals.
    """

    requests: int
    completed: int
    left: int
    errors: dict[str, int]
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first: Spread
    gap: Spread
    end: Spread
    goodput: float
    fairness: float
    tenants: dict[str, int]

    @property
    def output_rate(self) -> float:
        """Answer tokens per second."""
        return self.output_tokens / self.seconds

    @property
    def request_rate(self) -> float:
        """Completed requests per second."""
        return self.completed / self.seconds


def figures(answers: Sequence[Answer], goals: Goals) -> Figures:
    """The figures of one run. Raises ValueError without answers."""
    begun = min(answer.sent for answer in answers)
    seconds = max(answer.sent + answer.seconds for answer in answers) - begun
    good = [answer for answer in answers if answer.complete]
    tenants: dict[str, int] = defaultdict(int)
    for answer in answers:
        tenants[answer.request.tenant] += answer.tokens
    return Figures(
        requests=len(answers),
        completed=len(good),
        left=sum(answer.left for answer in answers),
        errors=dict(Counter(answer.error for answer in answers if answer.error)),
        seconds=seconds,
        prompt_tokens=sum(answer.prompt_tokens for answer in good),
        cached_tokens=sum(answer.cached_tokens for answer in good),
        output_tokens=sum(answer.tokens for answer in good),
        first=Spread.of(answer.first for answer in answers if answer.first is not None),
        gap=Spread.of(gap for answer in answers for gap in answer.gaps),
        end=Spread.of(answer.seconds for answer in good),
        goodput=sum(map(goals.met, answers)) / seconds,
        fairness=jain(list(tenants.values())),
        tenants=dict(tenants),
    )


def jain(shares: Sequence[float]) -> float:
    """Jain's fairness index, (sum x)^2 / (n sum x^2); NaN if no tenant got anything.

    R. Jain, D. Chiu, W. Hawe, "A Quantitative Measure of Fairness", DEC-TR-301, 1984.
    """
    squares = sum(share * share for share in shares)
    return math.nan if not squares else sum(shares) ** 2 / (len(shares) * squares)


MEASURES = {
    "tokens/s": ("output_rate", True),
    "requests/s": ("request_rate", True),
    "goodput/s": ("goodput", True),
    "first p50": ("first.p50", False),
    "first p99": ("first.p99", False),
    "gap p50": ("gap.p50", False),
    "gap p99": ("gap.p99", False),
    "end p50": ("end.p50", False),
    "end p99": ("end.p99", False),
}
"""The measures by which servers are compared: the field of `Figures`, and whether more is better."""


def measure(found: Figures, name: str) -> float:
    """The value of one of MEASURES."""
    value: object = found
    for part in MEASURES[name][0].split("."):
        value = getattr(value, part)
    assert isinstance(value, float)
    return value


class Ratio(msgspec.Struct, frozen=True):
    """One server's measure over another's, round by round: the median, the least and the most."""

    median: float
    least: float
    most: float


def ratio(ours: Sequence[Figures], theirs: Sequence[Figures], name: str) -> Ratio:
    """The ratio over rounds that were measured one after the other. NaN if there is nothing to divide."""
    pairs = [(measure(a, name), measure(b, name)) for a, b in zip(ours, theirs, strict=True)]
    found = sorted(a / b for a, b in pairs if b and not math.isnan(a / b))
    if not found:
        return Ratio(math.nan, math.nan, math.nan)
    return Ratio(statistics.median(found), found[0], found[-1])
