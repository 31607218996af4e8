"""Which decode rows a step has when several tenants have some.

On a CPU each row makes a step longer. A tenant with many answers would make every token of another tenant's
only answer as late as its own, although that tenant asks for little. So a step takes at most as many times as
long as with a tenant's rows alone as there are tenants, by weight: with two of them twice as long. If the
rows of all would take longer, the tenants with the most rows have some of theirs in turn. Where further rows
cost next to nothing, as on most devices, all rows are in each step.

Prompts have their part of that time, too. What a step takes beyond its fixed time is shared over the tenants
that have rows or prompts, by weight, and what one does not need goes to the others. A tenant's rows go before
its own prompts, but rows are left out for the prompts of another tenant. If the part of all prompts is too
short for a few tokens, they have twice as much in every other step, or these few tokens.

Short steps are for those who ask for little. While each tenant that is here, or was recently, waits for its
share, steps may take twice as long: less of the time is fixed.

The first token of a request waits for the step that runs, and then takes a step of its own. So that step is
without the rows of tenants that have more than their share of them, though only in one step of `HOLD_STEPS`.
"""

import math
from collections.abc import Mapping, Sequence

from personae.engine.scheduling.fairness import OUTPUT_WEIGHT
from personae.engine.scheduling.live import LiveSequence
from personae.engine.scheduling.step_time import FEWEST_TOKENS, LONGEST_FACTOR, StepTime

HOLD_STEPS = 8
_ALL_WAIT = 2.0  # how much longer steps may be while all tenants wait
_WORTH = 1.25  # a step is without rows if it would be so many times as long with them


class RowShares:
    """Decides which rows are left out. `longest` is how long the step may take, in seconds; None if the rows
    take little. `full`: they take that long, so prompts of tenants over quota wait for the next step.
    `factor`: how many times as long as without prompts a step with some may take."""

    __slots__ = ("_before", "_since", "_times", "_turns", "factor", "full", "longest")

    def __init__(self, times: StepTime) -> None:
        self._times = times
        self._turns: dict[str, int] = {}  # of tenants with too many rows: the last sequence that had one
        self._since = HOLD_STEPS  # steps
        self.longest: float | None = None
        self.factor = LONGEST_FACTOR
        self.full = False
        self._before = self._turns, self._since, self.full  # the last step

    def left_out(
        self,
        decoding: Sequence[LiveSequence],
        weights: Mapping[str, float],
        prompts: Mapping[str, int],
        *,
        all_wait: bool = False,
    ) -> set[LiveSequence]:
        """The sequences without a row in the step that is being planned.

        `decoding` are by rank. `weights`: of the tenants that are here. `prompts`: the prompt tokens of each
        tenant that has some to plan. `all_wait`: every tenant waits for its share.
        """
        self.factor = _ALL_WAIT * LONGEST_FACTOR if all_wait else LONGEST_FACTOR
        self._before = self._turns, self._since, self.full
        was_full, self.full, self.longest = self.full, False, None
        self._since += 1
        if len(weights) < 2:
            return set()
        seconds, total = self._seconds, sum(weights.values())
        if seconds(len(decoding)) <= min(total / max(weights.values()), _WORTH) * seconds(1):
            return set()
        rows: dict[str, list[LiveSequence]] = {}
        for sequence in decoding:
            if not sequence.background and sequence.planned < sequence.last:
                rows.setdefault(sequence.key.tenant, []).append(sequence)
        if self._since >= HOLD_STEPS and (held := self._held(rows, weights, prompts)):
            self._since = 0
            return held
        return self._over_share(rows, weights, prompts, was_full=was_full)

    def take_back(self) -> None:
        """The last step is planned again."""
        self._turns, self._since, self.full = self._before

    def _held(
        self,
        rows: Mapping[str, Sequence[LiveSequence]],
        weights: Mapping[str, float],
        prompts: Mapping[str, int],
    ) -> set[LiveSequence]:
        """The rows of tenants with more than their share, if a short first prompt of another comes."""
        count = sum(map(len, rows.values()))
        first = {tenant: tokens for tenant, tokens in prompts.items() if tenant not in rows}
        if not first or max(first.values()) * self._times.each > self._seconds(count):
            return set()
        total = sum(weights.values())
        over = [
            sequence
            for tenant, theirs in rows.items()
            if len(theirs) > max((count + len(first)) * weights.get(tenant, 1.0) / total, 1)
            for sequence in theirs
        ]
        short = self._seconds(count + 1 - len(over))
        return set(over) if self._seconds(count + 1) > _WORTH * short else set()

    def _over_share(
        self,
        rows: Mapping[str, Sequence[LiveSequence]],
        weights: Mapping[str, float],
        prompts: Mapping[str, int],
        *,
        was_full: bool,
    ) -> set[LiveSequence]:
        """The rows that do not fit into this step. A tenant's rows have the time of its share. Prompts have
        theirs, too, or else wait for the next step, but not twice: `was_full` says that they waited."""
        seconds, count, total = self._seconds, sum(map(len, rows.values())), sum(weights.values())
        longest = min(
            seconds(max(len(rows.get(tenant, ())), 1)) * total / weight for tenant, weight in weights.items()
        )
        longest *= self.factor / LONGEST_FACTOR
        longest = self.longest = min(longest, self.factor * seconds(count))
        each = seconds(count + 1) - seconds(count)
        # On a busy machine the time of a row is found to be anything, above all if all steps have few.
        worth = min(each, OUTPUT_WEIGHT * self._times.each or math.inf)
        rows_alone = {tenant: worth * len(theirs) for tenant, theirs in rows.items()}
        asked = {tenant: self._times.each * tokens for tenant, tokens in prompts.items()}
        part = _part_of_prompts(rows_alone, asked, weights, longest - seconds(0))
        few = min(FEWEST_TOKENS * self._times.each, sum(asked.values()))
        if self._times.due:
            part = 0.0
        elif part < few:
            self.full = not was_full
            part = 0.0 if self.full else max(2 * part, few)
        too_long = seconds(count) + part - longest
        if not each or too_long <= 0:
            self._turns = {}
            return set()
        left = min((longest - part - seconds(0)) / worth, count - max(seconds(count) - longest, 0.0) / each)
        left, waiting = max(left, 1.0), sum(weights[tenant] for tenant in rows)
        out: set[LiveSequence] = set()
        turns: dict[str, int] = {}
        for tenant, theirs in sorted(rows.items(), key=lambda each: len(each[1]) / weights[each[0]]):
            most = max(int(left * weights[tenant] / waiting), 1)
            waiting -= weights[tenant]
            left -= min(most, len(theirs))
            if most < len(theirs):
                last = self._turns.get(tenant, -1)
                at = next((at for at, sequence in enumerate(theirs) if sequence.admitted > last), 0)
                inside = [theirs[(at + number) % len(theirs)] for number in range(most)]
                turns[tenant] = inside[-1].admitted
                out.update(theirs)
                out.difference_update(inside)
        self._turns = turns
        return out

    def _seconds(self, rows: int) -> float:
        return self._times.of(rows, 0)


def _part_of_prompts(
    rows: Mapping[str, float], prompts: Mapping[str, float], weights: Mapping[str, float], seconds: float
) -> float:
    """How many of the `seconds` that tenants share are for prompts. `rows` and `prompts`: the seconds that
    those of each tenant would take."""
    both = {tenant: rows.get(tenant, 0.0) + prompts.get(tenant, 0.0) for tenant in {*rows, *prompts}}
    shares = _shares(both, weights, seconds)
    return sum(max(share - rows.get(tenant, 0.0), 0.0) for tenant, share in shares.items())


def _shares(asked: Mapping[str, float], weights: Mapping[str, float], total: float) -> dict[str, float]:
    """The part of the `total` that each gets. Those that ask for less than their share get what they ask for.
    The others share the rest by weight."""
    found: dict[str, float] = {}
    waiting = sum(weights.get(name, 1.0) for name in asked)
    for name in sorted(asked, key=lambda name: asked[name] / weights.get(name, 1.0)):
        weight = weights.get(name, 1.0)
        found[name] = min(asked[name], max(total, 0.0) * weight / waiting)
        total -= found[name]
        waiting -= weight
    return found
