"""The tokens of each slot that the host knows. They need not be read from the device."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from personae.engine.sequence import SequenceLog

Ints = NDArray[np.int64]


class Guess(NamedTuple):
    """The input of a row with guessed tokens: `tokens` are all of it, and the last ones are `drafts`."""

    tokens: tuple[int, ...]
    drafts: tuple[int, ...]


NO_GUESSES: Mapping[int, Guess] = {}


class KnownTokens:
    """The tokens of each slot's log, and those appended since.

    `guesses`: for the step in preparation, by the row's index in its plan. One thread owns this.
    """

    def __init__(self, slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._tokens: list[Ints] = [np.empty(0, np.int64)] * slots
        self._lengths = np.zeros(slots, np.int64)
        self.guesses = NO_GUESSES

    def admit(self, slot: int, log: SequenceLog) -> None:
        """A sequence takes a slot. Raises ValueError for a token id outside the vocabulary."""
        tokens = np.array(log.tokens, np.int64)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
            # The API refuses such ids. A kernel would read past the end of the embedding.
            raise ValueError(f"Sequence {log.id} has a token id outside the model's vocabulary.")
        self._tokens[slot], self._lengths[slot] = tokens, len(tokens)

    def extend(self, slot: int, position: int, tokens: Sequence[int]) -> None:
        """Record the slot's tokens from `position` on."""
        known = np.resize(self._tokens[slot], position + len(tokens))
        known[position:] = tokens
        self._tokens[slot], self._lengths[slot] = known, len(known)

    def at(self, slot: int, position: int) -> int | None:
        """The slot's token at a position; None if the host does not know it yet."""
        return int(self._tokens[slot][position]) if position < self._lengths[slot] else None

    def given(self, slot: int, position: int, count: int) -> bytes:
        """The slot's tokens (int64) at `count` positions from `position` on, as far as the host knows
        them."""
        return self._tokens[slot][position : position + count].tobytes()

    def inputs(self, slots: Ints, starts: Ints, counts: Ints, offsets: Ints, total: int) -> tuple[Ints, Ints]:
        """The input ids [total] of packed rows, and the rows whose input is not known: their ids are 0, and
        their input is the slot's newest token, which may be only on the device."""
        ids = np.zeros(total, np.int64)
        known = starts < self._lengths[slots]
        for i in np.flatnonzero(known).tolist():
            start, count, offset = starts[i], counts[i], offsets[i]
            there = self._tokens[slots[i]][start : start + count]  # the drafts of a guess are not among them
            ids[offset : offset + len(there)] = there
        return ids, np.flatnonzero(~known)
