"""Replay: a grammar takes the tokens of an answer that was preempted, or that began in another engine.

A long answer may take seconds: a set of numbers takes a millisecond for each token. Other answers have their
tokens meanwhile: the replay advances a little at a time.
"""

from collections.abc import Sequence
from time import thread_time

from personae.grammar.bitmask import Bitmask
from personae.grammar.matcher import Binding, Matcher


class ReplayBinding(Binding):
    """A binding that allows everything, because `matcher` has not got `tokens` yet."""

    ready = False

    def __init__(self, matcher: Matcher, tokens: Sequence[int]) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._taken = 0

    def replayed(self, seconds: float) -> Matcher | None:
        """Give the matcher one token, and more for so many seconds of processor time. Returns it once it has
        got all.

        Raises AssertionError if it rejects one: the tokens are of another grammar.
        """
        matcher, until = self._matcher, thread_time() + seconds
        while self._taken < len(self._tokens):
            if matcher.terminated:
                break  # only stop tokens that did not end the answer follow (`ignore_eos`, `min_tokens`)
            if not matcher.accept(self._tokens[self._taken]):
                raise AssertionError("the tokens of an answer do not match its grammar")
            self._taken += 1
            if thread_time() > until:
                return matcher if self._taken == len(self._tokens) else None
        return matcher

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Allow all tokens: none is chosen before the matcher has got the log's."""
        bitmask[row] = -1

    def accept(self, token: int) -> bool:
        """Not called, as no token is chosen. Raises AssertionError."""
        raise AssertionError(f"token {token} was chosen during a replay")
