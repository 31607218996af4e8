"""The length of the queue in seconds: the waiting tokens over the tokens computed per second.

A waiting sequence counts with its prompt and an answer. The answer is as long as recent ones, or its own
`max_tokens` if that is less. The rate is measured over about the last `MEMORY` seconds in which steps ran, so
a server that was idle still knows its speed.
"""

from math import exp

from personae.engine.sequence import SequenceLog

MEMORY = 30.0  # seconds of steps after which a measurement's weight has fallen to about a third
FIRST_ANSWER = 128.0  # tokens; assumed until answers have been measured
_ANSWER_WEIGHT = 0.05  # the weight of a new answer in the mean


class Backlog:
    """Counts the waiting tokens and measures the speed."""

    def __init__(self) -> None:
        self._waiting: dict[str, int] = {}
        self._tokens = 0
        self._answer = FIRST_ANSWER
        self._computed = self._spent = 0.0

    @property
    def tokens(self) -> int:
        """Tokens that wait to be computed."""
        return self._tokens

    @property
    def rate(self) -> float:
        """Tokens computed per second of steps; 0 before the first."""
        return self._computed / self._spent if self._spent else 0.0

    @property
    def seconds(self) -> float:
        """The time to compute the waiting tokens; 0 until a step was measured."""
        return self._tokens / self.rate if self.rate else 0.0

    def wait(self, log: SequenceLog) -> None:
        """A sequence waits for its first step, or waits again."""
        self.leave(log.id)
        left = log.params.max_tokens - (len(log.tokens) - log.prompt_length)
        cost = len(log.tokens) + min(left, round(self._answer))
        self._waiting[log.id] = cost
        self._tokens += cost

    def leave(self, id: str) -> None:
        """A sequence starts running or has ended. Does nothing if it does not wait."""
        self._tokens -= self._waiting.pop(id, 0)

    def answered(self, tokens: int) -> None:
        """An answer ended with this many tokens."""
        self._answer += _ANSWER_WEIGHT * (tokens - self._answer)

    def measured(self, tokens: int, seconds: float) -> None:
        """Steps took `seconds` to compute `tokens`."""
        kept = exp(-seconds / MEMORY)
        self._computed = self._computed * kept + tokens
        self._spent = self._spent * kept + seconds
