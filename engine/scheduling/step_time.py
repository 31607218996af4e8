"""The time of steps, learnt from measured ones."""

import math
from collections import deque
from statistics import median

from personae.engine.scheduling.fairness import OUTPUT_WEIGHT

_MEMORY = 31  # steps of each kind
_MIXED = 32  # steps in a row with rows and prompts until one of rows alone should be measured
FEWEST_TOKENS = 8  # fewest prompt tokens of a step that measures the time per prompt token
LONGEST_FACTOR = 2.0  # the longest step with prompts of tenants over quota, relative to one without them


class StepCost:
    """The time of a step of decode rows, learnt from measured steps: seconds = fixed + each * rows.

    Least squares over about the last `memory` steps, with fading weights. A step that took far longer than
    similar steps counts as three times as long as these, because something else delayed the machine. While
    all steps have about the same number of rows, `each` cannot be measured; then `fixed` is assumed to be
    worth eight rows.
    """

    def __init__(self, memory: int = 256) -> None:
        self._memory = memory
        self._count = 0
        self._rows = self._seconds = self._variance = self._covariance = 0.0
        # Seconds per additional row: not negative, and at most its share of the mean step.
        self.each = 0.0

    def observe(self, rows: int, seconds: float) -> float:
        """A step with only `rows` decode rows took `seconds`. Returns how long it was expected to take; 0 for
        the first one."""
        expected = self.of(rows)
        if self._count:
            seconds = min(seconds, 3 * expected)
        self._count = min(self._count + 1, self._memory)
        weight = 1 / self._count
        more, longer = rows - self._rows, seconds - self._seconds
        self._rows += weight * more
        self._seconds += weight * longer
        self._variance = (1 - weight) * (self._variance + weight * more * more)
        self._covariance = (1 - weight) * (self._covariance + weight * more * longer)
        assumed = self._seconds / (self._rows + 8)
        found = (self._covariance + assumed / 4) / (self._variance + 1 / 4)
        self.each = min(max(found, 0.0), self._seconds / max(self._rows, 1.0))
        return expected

    def of(self, rows: int) -> float:
        """Seconds of a step with `rows` rows; 0 before any was measured."""
        return self._seconds + self.each * (rows - self._rows)

    def room(self, rows: int, slowdown: float) -> float:
        """How many more rows a step of `rows` may have so that it takes at most `slowdown` times as long."""
        each = self.each
        return (slowdown - 1) * self.of(rows) / each if each else math.inf


class StepTime:
    """seconds = time of the decode rows (`StepCost`) + each * prompt tokens. Nothing is known at first.

    Only steps without prompts measure the time of rows. One is `due` if there was none for long.

    Both use the median of the last steps: the very first step takes many times as long as later ones, and on
    a busy machine any step may.
    """

    def __init__(self) -> None:
        self.decoding = StepCost()
        self._drifts: deque[float] = deque(maxlen=_MEMORY)  # times of decode steps over the expected times
        self._prompts: deque[float] = deque(maxlen=_MEMORY)  # seconds per prompt token
        self.each = 0.0
        self._drift = 1.0
        self._mixed = 0

    def observe(self, rows: int, prompts: int, seconds: float) -> None:
        """A step with `rows` decode rows and `prompts` prompt tokens took `seconds`."""
        if rows:
            self._mixed = self._mixed + 1 if prompts else 0
        if prompts >= FEWEST_TOKENS:
            self._prompts.append(max(seconds - self.of(rows, 0), 0.0) / prompts)
            self.each = median(self._prompts)
        elif not prompts and (expected := self.decoding.observe(rows, seconds)) > 0:
            self._drifts.append(seconds / expected)
            self._drift = median(self._drifts)

    def of(self, rows: int, prompts: int) -> float:
        """Seconds of such a step; 0 before any was measured."""
        return max(self.decoding.of(rows), 0.0) * self._drift + prompts * self.each

    @property
    def due(self) -> bool:
        """Whether the next step should have rows and no prompts."""
        return self._mixed >= (_MIXED if self.decoding.of(1) else 1)

    @property
    def row(self) -> float:
        """How many prompt tokens take as long as one more row, at most `OUTPUT_WEIGHT`; 1 before both were
        measured."""
        each = self.decoding.each * self._drift
        return min(each / self.each, OUTPUT_WEIGHT) if each and self.each else 1.0

    def room(self, rows: int, seconds: float) -> float:
        """How many prompt tokens a step with `rows` decode rows may have so that it takes at most
        `seconds`; 0 before any was measured."""
        return max(seconds - self.of(rows, 0), 0.0) / self.each if self.each else 0.0
