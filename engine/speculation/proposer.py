"""Proposers make drafts. A proposer follows one sequence and may guess its next tokens."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Draft(NamedTuple):
    """A guess at the next tokens. `source` names the proposer. `match` is how many of the last tokens support
    the guess: drafts of one source and match are about equally good."""

    tokens: tuple[int, ...]
    source: str
    match: int = 0


class Proposer(Protocol):
    """Guesses for one sequence."""

    def extend(self, tokens: Sequence[int]) -> None:
        """The sequence goes on with these tokens."""

    def propose(self, most: int) -> Draft | None:
        """At most `most` (at least 1) tokens that may come next; None without a guess."""


class LongestMatch:
    """A proposer of several. The guess with the longest match wins; of equal ones, the first."""

    def __init__(self, *proposers: Proposer) -> None:
        self._proposers = proposers

    def extend(self, tokens: Sequence[int]) -> None:
        """See Proposer."""
        for proposer in self._proposers:
            proposer.extend(tokens)

    def propose(self, most: int) -> Draft | None:
        """See Proposer."""
        found = [draft for proposer in self._proposers if (draft := proposer.propose(most)) is not None]
        return max(found, key=lambda draft: draft.match, default=None)
