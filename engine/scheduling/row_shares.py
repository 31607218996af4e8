"""Which decode rows a step has when several tenants have some.

On a CPU each row makes a step longer. A tenant with many answers would make every token of another tenant's
only answer as late as its own, although that tenant asks for little. So a step takes at most as many times as
long as with a tenant's rows alone as there are tenants, by weight: with two of them twice as long. If the
rows of all would take longer, the tenants with the most rows have some of theirs in turn. In every other such
step there is room for a few tokens of their prompts. Where further rows
cost next to nothing, as on most devices, all rows are in each step.

The first token of a request waits for the step that runs, and then takes a step of its own. So that step is
without the rows of tenants that have more than their share of them, though only in one step of `HOLD_STEPS`.
"""

from collections.abc import Mapping, Sequence

from personae.engine.scheduling.live import LiveSequence
from personae.engine.scheduling.step_time import FEWEST_TOKENS, StepTime

HOLD_STEPS = 8
_WORTH = 1.25  # a step is without rows if it would be so many times as long with them


class RowShares:
    """Decides which rows are left out. `longest` is how long the step may take, in seconds; None if the rows
    take little. `full`: they take that long, so prompts of tenants over quota wait for the next step."""

    __slots__ = ("_before", "_since", "_times", "_turns", "full", "longest")

    def __init__(self, times: StepTime) -> None:
        self._times = times
        self._turns: dict[str, int] = {}  # of tenants with too many rows: the last sequence that had one
        self._since = HOLD_STEPS  # steps
        self.longest: float | None = None
        self.full = False
        self._before = self._turns, self._since, self.full  # the last step

    def left_out(
        self, decoding: Sequence[LiveSequence], weights: Mapping[str, float], prompts: Mapping[str, int]
    ) -> set[LiveSequence]:
        """The sequences without a row in the step that is being planned.

        `decoding` are by rank. `weights`: of the tenants that are here. `prompts`: the prompt tokens of each
        tenant that has some to plan.
        """
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
        """The rows that would make the step take a tenant longer than its share. If the last step `was_full`,
        a few tokens of these tenants' prompts fit in, too."""
        seconds, count, total = self._seconds, sum(map(len, rows.values())), sum(weights.values())
        longest = min(
            seconds(max(len(rows.get(tenant, ())), 1)) * total / weight for tenant, weight in weights.items()
        )
        each = seconds(count + 1) - seconds(count)
        few = 0.0 if rows.keys().isdisjoint(prompts) else FEWEST_TOKENS * self._times.each
        self.longest = longest
        self.full = seconds(count) + few > longest and not was_full
        too_long = seconds(count) + few * was_full - longest
        if not each or too_long <= 0:
            self._turns = {}
            return set()
        left, waiting = max(count - too_long / each, 1.0), sum(weights[tenant] for tenant in rows)
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
