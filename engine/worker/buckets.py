"""Which captured graph a step takes: a rule of its sizes alone.

Steps in which every row has one token have a graph for every few numbers of rows. Steps in which some rows
have several (forced text, drafts, the short rest of a prompt) are told apart by the tokens of all rows,
rounded up to a power of two: which row has how many is in device memory. Longer prompts are launched kernel
by kernel.
"""

from collections.abc import Iterator
from typing import NamedTuple

from personae.engine.plan import MemoryLayout

ROW_TOKENS = 32  # of a row of several: more than drafts have, and most runs of forced text
MOST_TOKENS = 256  # of rows of several tokens in all: with more the host is not what a step waits for


class Bucket(NamedTuple):
    """Steps of up to `tokens` tokens in all, of which no row has more than `row_tokens`."""

    tokens: int
    row_tokens: int


class Buckets:
    """The buckets of a layout; iterated over from the smallest to the largest."""

    def __init__(self, layout: MemoryLayout) -> None:
        self._single = sizes(layout.max_seqs)
        self._several = doublings(min(MOST_TOKENS, layout.max_batch_tokens, layout.max_seqs * ROW_TOKENS))
        self.most = max(self._single[-1], *self._several)

    def __iter__(self) -> Iterator[Bucket]:
        yield from (Bucket(tokens, 1) for tokens in self._single)
        yield from (Bucket(tokens, ROW_TOKENS) for tokens in self._several)

    def of(self, tokens: int, longest: int) -> Bucket | None:
        """The bucket of a step of so many tokens, the longest of whose rows has `longest`; None if it has to
        do without."""
        if longest > ROW_TOKENS:
            return None
        row_tokens, tokens_of = (1, self._single) if longest == 1 else (ROW_TOKENS, self._several)
        found = next((size for size in tokens_of if size >= tokens), None)
        return None if found is None else Bucket(found, row_tokens)


def sizes(most: int) -> tuple[int, ...]:
    """The numbers of rows that graphs are captured for: less than half more than a step has."""
    steps = [1, 2, 3, 4, 6, 8, 12]
    while steps[-1] < most:
        steps.append(steps[-2] * 2)
    return (*(count for count in steps if count < most), most)


def doublings(most: int) -> tuple[int, ...]:
    """Powers of two, and `most`: less than twice what a step has."""
    steps = [2]
    while 2 * steps[-1] < most:
        steps.append(2 * steps[-1])
    return (*(count for count in steps if count < most), most)
