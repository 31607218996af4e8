"""How long the queue is, in seconds: the tokens that wait over the tokens computed per second.

A sequence that waits costs its prompt and an answer: as long as answers have been of late, or its own
`max_tokens` if that is less. The rate is measured over the last `MEMORY` seconds in which steps ran, so a
server that has been idle still knows how fast it is.
"""

from math import exp

from personae.engine.sequence import SequenceLog

MEMORY = 30.0  # seconds of steps after which a measurement has faded to a third
FIRST_ANSWER = 128.0  # tokens, until there are answers to go by
_FADING = 0.05  # of each new answer in the mean


class Backlog:
    """Pure bookkeeping: who waits, and how fast things go."""

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
        """How long it takes to compute what waits; 0 as long as nothing was measured."""
        return self._tokens / self.rate if self.rate else 0.0

    def wait(self, log: SequenceLog) -> None:
        """A sequence waits for its first step, or waits again."""
        self.leave(log.id)
        left = log.params.max_tokens - (len(log.tokens) - log.prompt_length)
        cost = len(log.tokens) + min(left, round(self._answer))
        self._waiting[log.id] = cost
        self._tokens += cost

    def leave(self, id: str) -> None:
        """A sequence is computed from now on, or has ended; nothing if it does not wait."""
        self._tokens -= self._waiting.pop(id, 0)

    def answered(self, tokens: int) -> None:
        """An answer ended with so many tokens."""
        self._answer += _FADING * (tokens - self._answer)

    def measured(self, tokens: int, seconds: float) -> None:
        """Steps of so many seconds computed so many tokens."""
        kept = exp(-seconds / MEMORY)
        self._computed = self._computed * kept + tokens
        self._spent = self._spent * kept + seconds
