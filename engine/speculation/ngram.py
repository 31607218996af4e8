"""Drafts from the sequence's own text: what followed the last time that its last tokens occurred.

Answers repeat their prompts and themselves: extracted values, edited code, quoted text, the keys of the next
object in a list. The longest n-gram of `SIZES` at the end that occurred before is looked up, at its latest
place. A value is often quoted without the space that was in front of it, so tokens that differ only in that
can count as the same.
"""

from collections.abc import Sequence
from itertools import islice

from personae.engine.speculation.proposer import Draft

SIZES = (8, 4, 2, 1)  # the lengths of n-grams, longest first
LONGEST = 32  # the longest match that is reported
WINDOW = 16_384  # tokens of a log that are indexed: about 5 MB, and 10 ms when the sequence is admitted


class NgramProposer:
    """Looks up the last tokens of a sequence among its earlier ones. Tokens with the same entry in `same`, if
    it is given, count as the same."""

    def __init__(self, tokens: Sequence[int] = (), same: Sequence[int] | None = None) -> None:
        self._same = same
        self._tokens: list[int] = []
        self._keys: list[int] = []  # what tokens are compared by
        # By size: the position after each n-gram's latest occurrence that has a next token.
        self._places: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in SIZES)
        self.extend(tokens[-WINDOW:])

    def extend(self, tokens: Sequence[int]) -> None:
        """See Proposer. The n-gram at the end is indexed once its next token is known."""
        keys, same = self._keys, self._same
        before = len(keys)
        self._tokens += tokens
        keys += tokens if same is None else [same[token] for token in tokens]
        for size, places in zip(SIZES, self._places, strict=True):
            first = max(before, size)  # the first position after an n-gram that is not indexed yet
            if len(keys) - first > 1:
                columns = (islice(keys, first - size + i, len(keys) - size + i) for i in range(size))
                places.update(zip(zip(*columns, strict=True), range(first, len(keys)), strict=True))
            elif first < len(keys):
                places[tuple(keys[first - size : first])] = first

    def propose(self, most: int) -> Draft | None:
        """See Proposer."""
        keys = self._keys
        for size, places in zip(SIZES, self._places, strict=True):
            if len(keys) < size:
                continue
            place = places.get(tuple(keys[-size:]))
            if place is not None:
                return Draft(self._from(place, most), "ngram", self._agreement(place, size))
        return None

    def _from(self, place: int, most: int) -> tuple[int, ...]:
        """The tokens from `place` on. If they end too early they are repeated, as in a text that repeats
        itself."""
        own = self._tokens
        if len(own) - place >= most:
            return tuple(own[place : place + most])
        period = len(own) - place
        return tuple(own[place + i % period] for i in range(most))

    def _agreement(self, place: int, size: int) -> int:
        """How many tokens before `place` match the tokens at the end."""
        keys, end = self._keys, len(self._keys)
        while size < min(LONGEST, place) and keys[place - size - 1] == keys[end - size - 1]:
            size += 1
        return size
