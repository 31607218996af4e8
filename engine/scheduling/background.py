"""Work that gives way: background sequences (batches) run in the room that the others leave.

Three rules, each in its place. `TieredPolicy` says who is admitted: a background sequence only when no other
waits. `BackgroundAllowance` says how much of a step it gets: what is left, and while others are about no more
than makes their steps hardly longer, going by what steps were seen to take (`StepCost`). And when others wait
for a seat, the scheduler takes those of background sequences back; they wait again with what they have
emitted, their pages stay in the prefix cache.

It does not wait for ever: see `TieredPolicy`; and of background sequences that run the oldest has its rows
first.
"""

import math
from collections.abc import Collection

from personae.engine.scheduling.fairness import FairnessKey, FairnessPolicy
from personae.engine.scheduling.live import LiveSequence


class TieredPolicy:
    """A fairness policy made of two: `background` keys have their turn when no others wait.

    Or when the others were served `patience` tokens since a background key was served one, and it has waited
    all the while: then one background sequence goes first, and keeps its seat.
    """

    def __init__(
        self, foreground: FairnessPolicy, background: FairnessPolicy, patience: int = 16_384
    ) -> None:
        self._policies = (foreground, background)
        self._patience = patience
        self._waiting: tuple[set[FairnessKey], set[FairnessKey]] = (set(), set())
        self._passed = 0  # tokens served to others while background keys waited

    def offer(self, key: FairnessKey, order: int) -> None:
        """To its tier."""
        self._waiting[key.background].add(key)
        self._policies[key.background].offer(key, order)

    def withdraw(self, key: FairnessKey) -> None:
        """From its tier."""
        self._waiting[key.background].remove(key)
        self._policies[key.background].withdraw(key)

    def choose(self, behind: Collection[str] = ()) -> FairnessKey:
        """The tier whose turn it is chooses."""
        foreground, background = self._waiting
        turn = bool(background) and (not foreground or self._passed >= self._patience)
        return self._policies[turn].choose(behind)

    def charge(self, key: FairnessKey, input_tokens: int, output_tokens: int) -> None:
        """Count in its tier, and how long the lower one has been passed over."""
        if key.background or not self._waiting[True]:
            self._passed = 0
        else:
            self._passed += input_tokens + output_tokens
        self._policies[key.background].charge(key, input_tokens, output_tokens)

    def forget(self, key: FairnessKey) -> None:
        """In its tier."""
        self._policies[key.background].forget(key)

    def gap(self) -> float:
        """Of the others: background keys may wait for long."""
        return self._policies[False].gap()

    def lead(self, key: FairnessKey) -> float:
        """In its tier; no background key goes before another whose turn it is."""
        if key.background and self._waiting[False]:
            return math.inf
        return self._policies[key.background].lead(key)


class StepCost:
    """What a step of decode rows takes, learnt from those that were made: seconds = fixed + each * rows.

    Least squares over the last `memory` steps or so, older ones fading. A step that took far longer than
    steps like it counts as three times as long: something else held up the machine. As long as all steps had
    about as many rows, which tells nothing of `each`, it is assumed that `fixed` is worth eight rows.
    """

    def __init__(self, memory: int = 256) -> None:
        self._memory = memory
        self._count = 0
        self._rows = self._seconds = self._variance = self._covariance = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """A step of so many decode rows and nothing else took so long."""
        if self._count:
            seconds = min(seconds, 3 * self.of(rows))
        self._count = min(self._count + 1, self._memory)
        weight = 1 / self._count
        more, longer = rows - self._rows, seconds - self._seconds
        self._rows += weight * more
        self._seconds += weight * longer
        self._variance = (1 - weight) * (self._variance + weight * more * more)
        self._covariance = (1 - weight) * (self._covariance + weight * more * longer)

    @property
    def each(self) -> float:
        """Seconds that one more row takes: not negative, and no more than its part of the mean step."""
        assumed = self._seconds / (self._rows + 8)
        found = (self._covariance + assumed / 4) / (self._variance + 1 / 4)
        return min(max(found, 0.0), self._seconds / max(self._rows, 1.0))

    def of(self, rows: int) -> float:
        """Seconds of a step of so many rows; 0 before any was seen."""
        return self._seconds + self.each * (rows - self._rows)

    def room(self, rows: int, slowdown: float) -> float:
        """How many more rows a step of `rows` may have and take at most `slowdown` times as long."""
        each = self.each
        return (slowdown - 1) * self.of(rows) / each if each else math.inf


class BackgroundAllowance:
    """Tokens that background sequences may have of a step of at most `tokens`.

    All of them, unless others run or wait or did so within the last `quiet` steps: then `beside`. A request
    that comes while a step runs has to wait for it, so steps stay short as long as more may come. While
    others run, it is also no more than makes the step `slowdown` times as long as theirs alone, on average:
    what is less than a row is kept for the next step. `cost` is what steps of decode rows take.
    """

    def __init__(
        self,
        tokens: int,
        beside: int | None = None,
        quiet: int = 256,
        slowdown: float = 1.2,
        cost: StepCost | None = None,
    ) -> None:
        self._tokens = tokens
        self._beside = max(tokens // 64, 1) if beside is None else beside
        self._quiet = quiet
        self._slowdown = slowdown
        self._alone = quiet  # steps since others were there
        self.cost = cost or StepCost()
        self._kept = 0.0

    def of(self, others: bool, running: int = 0) -> int:
        """For the step that is being planned; `others`: whether any run or wait, `running`: how many run.
        Where none runs, those that wait may wait for memory of background sequences, which must go on."""
        if not others:
            return self._beside if self._alone < self._quiet else self._tokens
        allowed = int(min(self._kept + self._room(running), self._beside))
        return allowed if running else max(allowed, 1)

    def stepped(self, others: bool, running: int = 0, spent: int = 0) -> None:
        """That step was made, `spent` tokens of it were of background sequences."""
        self._alone = 0 if others else self._alone + 1
        self._kept = min(max(self._kept + self._room(running) - spent, 0.0), 1.0) if others else 0.0

    def _room(self, running: int) -> float:
        return min(self.cost.room(max(running, 1), self._slowdown), self._beside)


class TokenBudget:
    """Tokens that a step still has room for; of them at most `background` for those that give way, and at
    most `over_quota` for prompts of tenants that crowd (`shares.py`)."""

    __slots__ = ("background", "over_quota", "spent", "tokens")

    def __init__(self, tokens: int, background: int, over_quota: int | None = None) -> None:
        self.tokens = tokens
        self.background = background
        self.over_quota = tokens if over_quota is None else over_quota
        self.spent = 0  # by those that give way

    def of(self, sequence: LiveSequence, *, is_over_quota: bool = False) -> int:
        """What this sequence may have; one that has just been admitted in spite of all at least a token."""
        if sequence.background:
            return min(self.tokens, max(self.background, int(sequence.settled)))
        if is_over_quota:
            return min(self.tokens, self.over_quota)
        return self.tokens

    def spend(self, tokens: int, *, background: bool, is_over_quota: bool = False) -> None:
        """So many are taken."""
        self.tokens -= tokens
        if background:
            self.background = max(self.background - tokens, 0)
            self.spent += tokens
        elif is_over_quota:
            self.over_quota = max(self.over_quota - tokens, 0)
