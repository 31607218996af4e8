"""Where drafts come from. A proposer follows one sequence and may guess how it goes on."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Draft(NamedTuple):
    """A guess at the next tokens. `source` says whose it is, and `match` how many of the last tokens speak
    for it: of one source and match, guesses are about as good."""

    tokens: tuple[int, ...]
    source: str
    match: int = 0


class Proposer(Protocol):
    """Guesses for one sequence. What it proposes depends on the sequence's tokens alone."""

    def extend(self, tokens: Sequence[int]) -> None:
        """The sequence goes on with these tokens."""

    def propose(self, most: int) -> Draft | None:
        """At most `most` (at least 1) tokens that may come next; None without a guess."""
