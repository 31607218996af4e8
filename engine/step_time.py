"""What steps take, learnt from those that were made."""

import math

from personae.engine.background import StepCost

_MEMORY = 64  # steps with prompts in them, or so


class StepTime:
    """seconds = those of the decode rows (`StepCost`) + each * prompt tokens; nothing is known at first."""

    def __init__(self) -> None:
        self.decoding = StepCost()
        self._seconds = self._tokens = 0.0  # of prompts, older ones fading

    def observe(self, rows: int, prompts: int, seconds: float) -> None:
        """A step of so many decode rows and prompt tokens took so long."""
        if not prompts:
            self.decoding.observe(rows, seconds)
            return
        spent = max(seconds - self.decoding.of(rows), 0.0)
        if self._tokens:
            spent = min(spent, 3 * prompts * self.each)  # something else held up the machine
        keep = 1 - 1 / _MEMORY
        self._seconds = keep * self._seconds + spent
        self._tokens = keep * self._tokens + prompts

    @property
    def each(self) -> float:
        """Seconds that one more prompt token takes; 0 before any was seen."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def of(self, rows: int, prompts: int) -> float:
        """Seconds of such a step; 0 before any was seen."""
        return max(self.decoding.of(rows), 0.0) + prompts * self.each

    def room(self, rows: int, seconds: float) -> float:
        """How many prompt tokens a step of so many decode rows may have and take no longer than that."""
        return max(seconds - self.of(rows, 0), 0.0) / self.each if self.each else math.inf
