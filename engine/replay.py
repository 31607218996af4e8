"""Replay: a grammar takes the tokens of an answer that was preempted, or that began in another engine.

A long answer may take seconds: a set of numbers takes a millisecond for each token. Other rows have their
steps meanwhile: the replay advances a little at a time, and until it is done, the row is deferred
(`deferral.py`).
"""

from time import thread_time

from personae.engine.sequence import SequenceLog
from personae.grammar.backend import Matcher
from personae.grammar.bitmask import Bitmask

REPLAY_SECONDS = 0.01
"""Processor time that a replay may take before other rows get their step."""


class Replay:
    """A `Binding` (grammar/backend.py) that allows everything, because its `matcher` is behind its log."""

    terminated = False

    def __init__(self, matcher: Matcher, log: SequenceLog) -> None:
        self.matcher = matcher
        self.log = log
        self._tokens = log.tokens[log.prompt_length :]
        self._taken = 0

    def advance(self, seconds: float = REPLAY_SECONDS) -> bool:
        """Give the matcher one token, and more for so many seconds of processor time. Returns whether it has
        got all.

        Raises AssertionError if it rejects one: the log is of another grammar.
        """
        matcher, until = self.matcher, thread_time() + seconds
        while self._taken < len(self._tokens):
            if matcher.terminated:
                break  # only stop tokens that did not end the answer follow (`ignore_eos`, `min_tokens`)
            if not matcher.accept(self._tokens[self._taken]):
                raise AssertionError(f"sequence {self.log.id}: its log does not match its grammar")
            self._taken += 1
            if thread_time() > until:
                return self._taken == len(self._tokens)
        return True

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Allow all tokens: none is chosen before the matcher has got the log's."""
        bitmask[row] = -1

    def accept(self, token: int) -> bool:
        """Not called, as no token is chosen. Raises AssertionError."""
        raise AssertionError(f"sequence {self.log.id}: token {token} was chosen during its replay")
