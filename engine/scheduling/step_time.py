"""The time of steps, learnt from measured ones."""

from collections import deque
from statistics import median

from personae.engine.scheduling.background import StepCost

_MEMORY = 31  # steps of each kind
_FEWEST_TOKENS = 8  # fewest prompt tokens of a step that measures the time per prompt token


class StepTime:
    """seconds = time of the decode rows (`StepCost`) + each * prompt tokens. Nothing is known at first.

    Both use the median of the last steps: the very first step takes many times as long as later ones, and on
    a busy machine any step may.
    """

    def __init__(self) -> None:
        self.decoding = StepCost()
        self._drifts: deque[float] = deque(maxlen=_MEMORY)  # times of decode steps over the expected times
        self._prompts: deque[float] = deque(maxlen=_MEMORY)  # seconds per prompt token
        self.each = 0.0
        self._drift = 1.0

    def observe(self, rows: int, prompts: int, seconds: float) -> None:
        """A step with `rows` decode rows and `prompts` prompt tokens took `seconds`."""
        if prompts >= _FEWEST_TOKENS:
            self._prompts.append(max(seconds - self.of(rows, 0), 0.0) / prompts)
            self.each = median(self._prompts)
        elif not prompts:
            if (expected := self.decoding.of(rows)) > 0:
                self._drifts.append(seconds / expected)
                self._drift = median(self._drifts)
            self.decoding.observe(rows, seconds)

    def of(self, rows: int, prompts: int) -> float:
        """Seconds of such a step; 0 before any was measured."""
        return max(self.decoding.of(rows), 0.0) * self._drift + prompts * self.each

    def room(self, rows: int, seconds: float) -> float:
        """How many prompt tokens a step with `rows` decode rows may have so that it takes at most
        `seconds`; 0 before any was measured."""
        return max(seconds - self.of(rows, 0), 0.0) / self.each if self.each else 0.0
