"""Background sequences (batches) run in the capacity that the others leave.

There are three rules, each in its place. `TieredPolicy` decides who is admitted: a background sequence only
if no other waits. `BackgroundAllowance` decides how many tokens of a step they get: those that the others
leave. While others are present, they also get only so many that the step hardly takes longer, judged by
measured steps (`step_time.py`). And if others wait for a slot, the scheduler preempts background sequences.
These wait again with their emitted tokens, and their pages stay in the prefix cache.

They do not wait forever: see `TieredPolicy`. Among running background sequences, the oldest has its rows
first.
"""

import math
from collections.abc import Collection, Iterable

from personae.engine.scheduling.fairness import FairnessKey, FairnessPolicy
from personae.engine.scheduling.step_time import StepCost

SLOWDOWN = 1.2


class TieredPolicy:
    """A fairness policy made of two: `background` keys have their turn if no others wait.

    They also have a turn after the others were served `patience` tokens while a background key waited all the
    time. Then one background sequence goes first, and keeps its slot. `waiting` are the keys on offer in
    `foreground`.
    """

    def __init__(
        self,
        foreground: FairnessPolicy,
        background: FairnessPolicy,
        patience: int = 16_384,
        waiting: Iterable[FairnessKey] = (),
    ) -> None:
        self._policies = (foreground, background)
        self._patience = patience
        self._waiting: tuple[set[FairnessKey], set[FairnessKey]] = (set(waiting), set())
        self._passed_over = 0  # tokens served to others while background keys waited

    def offer(self, key: FairnessKey, order: int) -> None:
        """Offer the key to its tier."""
        self._waiting[key.background].add(key)
        self._policies[key.background].offer(key, order)

    def withdraw(self, key: FairnessKey) -> None:
        """Withdraw the key from its tier."""
        self._waiting[key.background].remove(key)
        self._policies[key.background].withdraw(key)

    def choose(self, behind: Collection[str] = (), of: Collection[str] | None = None) -> FairnessKey:
        """The tier whose turn it is chooses."""
        if of is not None:
            return self._policies[False].choose(behind, of)
        foreground, background = self._waiting
        turn = bool(background) and (not foreground or self._passed_over >= self._patience)
        return self._policies[turn].choose(behind)

    def charge(self, key: FairnessKey, input_tokens: int, output_tokens: int) -> None:
        """Charge the key in its tier, and count how long background keys have been passed over."""
        if key.background or not self._waiting[True]:
            self._passed_over = 0
        else:
            self._passed_over += input_tokens + output_tokens
        self._policies[key.background].charge(key, input_tokens, output_tokens)

    def forget(self, key: FairnessKey) -> None:
        """Forget the key in its tier."""
        self._policies[key.background].forget(key)

    def gap(self) -> float:
        """The gap of the foreground keys: background keys may wait for long."""
        return self._policies[False].gap()

    def lead(self, key: FairnessKey) -> float:
        """The lead in its tier. No background key goes before a foreground key that waits."""
        if key.background and self._waiting[False]:
            return math.inf
        return self._policies[key.background].lead(key)


class BackgroundAllowance:
    """The tokens that background sequences may have in a step of at most `tokens`.

    They may have all of them, unless others run or wait, or did so within the last `quiet` steps: then at
    most `limit`. A request that arrives while a step runs has to wait for it, so steps stay short while more
    requests may come. While others run, the step may also take, on average, at most `SLOWDOWN` times as long
    as with them alone; a remainder of less than a row is kept for the next step. `cost` is the time of decode
    rows. While no background sequence runs or waits, only `alone` has to be kept.
    """

    def __init__(
        self,
        tokens: int,
        limit: int | None = None,
        quiet: int = 256,
        cost: StepCost | None = None,
    ) -> None:
        self._tokens = tokens
        self._limit = max(tokens // 64, 1) if limit is None else limit
        self._quiet = quiet
        self.alone = quiet  # steps since others were present
        self.cost = cost or StepCost()
        self._remainder = 0.0

    def of(self, others: bool, running: int = 0) -> int:
        """The tokens for the step that is being planned.

        `others`: whether any others run or wait. `running`: how many of them run. If none runs, the waiting
        ones may wait for memory of background sequences, which must make progress.
        """
        if not others:
            return self._limit if self.alone < self._quiet else self._tokens
        allowed = int(min(self._remainder + self._room(running), self._limit))
        return allowed if running else max(allowed, 1)

    def stepped(self, others: bool, running: int = 0, spent: int = 0) -> None:
        """The step is planned. Background sequences have `spent` of its tokens."""
        self.alone = 0 if others else self.alone + 1
        self._remainder = min(max(self._remainder + self._room(running) - spent, 0.0), 1.0) if others else 0.0

    def _room(self, running: int) -> float:
        return min(self.cost.room(max(running, 1), SLOWDOWN), self._limit)
