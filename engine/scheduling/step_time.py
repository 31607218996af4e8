"""What steps take, learnt from those that were made."""

import math
from collections import deque
from statistics import median

from personae.engine.scheduling.background import StepCost

_MEMORY = 31  # steps of a kind
_TELLING = 8  # prompt tokens, from which on a step says what one of them takes


class StepTime:
    """seconds = those of the decode rows (`StepCost`) + each * prompt tokens; nothing is known at first.

    Both go by the median of the last steps: the first of all takes many times as long as those that follow,
    and on a busy machine any of them may.
    """

    def __init__(self) -> None:
        self.decoding = StepCost()
        self._drifts: deque[float] = deque(maxlen=_MEMORY)  # of decode steps, over what was expected
        self._prompts: deque[float] = deque(maxlen=_MEMORY)  # seconds a token
        self.each = 0.0
        self._drift = 1.0

    def observe(self, rows: int, prompts: int, seconds: float) -> None:
        """A step of so many decode rows and prompt tokens took so long."""
        if prompts >= _TELLING:
            self._prompts.append(max(seconds - self.of(rows, 0), 0.0) / prompts)
            self.each = median(self._prompts)
        elif not prompts:
            if (expected := self.decoding.of(rows)) > 0:
                self._drifts.append(seconds / expected)
                self._drift = median(self._drifts)
            self.decoding.observe(rows, seconds)

    def of(self, rows: int, prompts: int) -> float:
        """Seconds of such a step; 0 before any was seen."""
        return max(self.decoding.of(rows), 0.0) * self._drift + prompts * self.each

    def room(self, rows: int, seconds: float) -> float:
        """How many prompt tokens a step of so many decode rows may have and take no longer than that."""
        return max(seconds - self.of(rows, 0), 0.0) / self.each if self.each else math.inf
