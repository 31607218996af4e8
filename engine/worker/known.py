"""The tokens of each slot that the host knows, so that they need not be read from the device."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from personae.engine.sequence import SequenceLog

Ints = NDArray[np.int64]


class Guess(NamedTuple):
    """What a row computes of a slot whose tokens the host knows: `tokens` are its input, of which the last
    ones are `drafts`."""

    tokens: tuple[int, ...]
    drafts: tuple[int, ...]


NO_GUESSES: Mapping[int, Guess] = {}


class KnownTokens:
    """Of each slot the tokens of its log, and those that were appended to it since.

    `guesses`: of the step that is prepared, by the row's index in its plan. Belongs to one thread.
    """

    def __init__(self, slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._tokens: list[Ints] = [np.empty(0, np.int64)] * slots
        self._lengths = np.zeros(slots, np.int64)
        self.guesses = NO_GUESSES

    def admit(self, slot: int, log: SequenceLog) -> None:
        """A sequence takes a slot. Raises ValueError for a token id that no vocabulary has."""
        tokens = np.array(log.tokens, np.int64)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
            # The API refuses these; a kernel would read past the embedding.
            raise ValueError(f"sequence {log.id} has a token id that is not in the model's vocabulary")
        self._tokens[slot], self._lengths[slot] = tokens, len(tokens)

    def extend(self, slot: int, position: int, tokens: Sequence[int]) -> None:
        """The slot's tokens from `position` on are known, as far as these go."""
        known = np.resize(self._tokens[slot], position + len(tokens))
        known[position:] = tokens
        self._tokens[slot], self._lengths[slot] = known, len(known)

    def at(self, slot: int, position: int) -> int | None:
        """The token at a position behind the slot's log, or one after it, if it is known."""
        return int(self._tokens[slot][position]) if position < self._lengths[slot] else None

    def inputs(self, slots: Ints, starts: Ints, counts: Ints, offsets: Ints, total: int) -> tuple[Ints, Ints]:
        """The input ids [total] of packed rows, 0 where they are not known, and the rows of those: their
        input is the slot's newest token, which only the device may know."""
        ids = np.zeros(total, np.int64)
        known = starts < self._lengths[slots]
        for i in np.flatnonzero(known).tolist():
            start, count, offset = starts[i], counts[i], offsets[i]
            ids[offset : offset + count] = self._tokens[slots[i]][start : start + count]
        return ids, np.flatnonzero(~known)
