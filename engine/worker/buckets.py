"""The sizes for which steps are captured as CUDA graphs. Only a step's sizes decide which graph runs it.

If every row has one token, the number of rows decides: there is a graph for every few numbers of rows. If
some rows have several tokens (forced text, drafts, the short rest of a prompt), the number of tokens in all
rows decides, rounded up to a power of two. How many tokens each row has is in device memory. A step with a
longer prompt is launched kernel by kernel.

Attention splits long contexts among programs. A graph launches as many programs as its longest context may
need, so steps of shorter contexts have graphs of their own: with the largest one most programs would have no
work.
"""

from collections.abc import Iterator
from typing import NamedTuple

from personae.engine.plan import MemoryLayout
from personae.kernels.attention import SHORTEST_SPLIT

ROW_TOKENS = 32  # limit for one row of several tokens; drafts and most runs of forced text are shorter
MOST_TOKENS = 256  # limit for a step with such rows; a larger step does not wait for the host
CONTEXTS = (SHORTEST_SPLIT, 4 * SHORTEST_SPLIT)  # one part, four parts; longer ones have up to 16
FEW_TOKENS = 8  # a smaller step has one graph: all its programs run at once, those without work included


class Bucket(NamedTuple):
    """Steps of at most `tokens` tokens in all rows and at most `row_tokens` tokens in any row, whose contexts
    have at most `max_kv` tokens after the step."""

    tokens: int
    row_tokens: int
    max_kv: int


class Buckets:
    """The buckets of a layout. Iteration goes from the smallest to the largest."""

    def __init__(self, layout: MemoryLayout) -> None:
        self._single = sizes(layout.max_seqs)
        self._several = doublings(min(MOST_TOKENS, layout.max_batch_tokens, layout.max_seqs * ROW_TOKENS))
        self.most = max(self._single[-1], *self._several)
        self._longest = layout.max_model_len

    def __iter__(self) -> Iterator[Bucket]:
        for row_tokens, sizes_of in ((1, self._single), (ROW_TOKENS, self._several)):
            for tokens in sizes_of:
                yield from (Bucket(tokens, row_tokens, max_kv) for max_kv in self._contexts(tokens))

    def _contexts(self, tokens: int) -> list[int]:
        shorter = CONTEXTS if tokens >= FEW_TOKENS else ()
        return [*(context for context in shorter if context < self._longest), self._longest]

    def of(self, tokens: int, longest: int, max_kv: int) -> Bucket | None:
        """The bucket for a step of `tokens` tokens. longest: of the longest row. max_kv: of the longest
        context, after the step. None: no graph fits."""
        if longest > ROW_TOKENS:
            return None
        row_tokens, tokens_of = (1, self._single) if longest == 1 else (ROW_TOKENS, self._several)
        found = next((size for size in tokens_of if size >= tokens), None)
        if found is None:
            return None
        return Bucket(found, row_tokens, next(most for most in self._contexts(found) if most >= max_kv))


def sizes(most: int) -> tuple[int, ...]:
    """Numbers of rows that graphs are captured for. A graph has less than 1.5 times the rows of its steps."""
    steps = [1, 2, 3, 4, 6, 8, 12]
    while steps[-1] < most:
        steps.append(steps[-2] * 2)
    return (*(count for count in steps if count < most), most)


def doublings(most: int) -> tuple[int, ...]:
    """Powers of two, and `most`. A graph has less than twice the tokens of its steps."""
    steps = [2]
    while 2 * steps[-1] < most:
        steps.append(2 * steps[-1])
    return (*(count for count in steps if count < most), most)
