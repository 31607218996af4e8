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
    """Guesses for one sequence. Its guesses depend on the sequence's tokens alone."""

    def extend(self, tokens: Sequence[int]) -> None:
        """The sequence goes on with these tokens."""

    def propose(self, most: int) -> Draft | None:
        """At most `most` (at least 1) tokens that may come next; None without a guess."""
