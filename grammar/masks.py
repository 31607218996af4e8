"""Bitmasks for a batch: where they come from and how they are filled.

Here a bitmask (bitmask.py) is a CPU tensor, for the device to read. Rows without a grammar are all ones, so
that one operation applies the whole batch.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from personae.grammar.backend import Matcher
from personae.grammar.bitmask import Bitmask, words_of

# A fill takes tens of microseconds without the GIL; handing it to a thread costs about as much.
ROWS_PER_THREAD = 4


def allocate_bitmask(rows: int, vocab_size: int) -> torch.Tensor:
    """An int32 bitmask [rows, ceil(vocab_size / 32)] that allows everything; pinned where there is a GPU."""
    return torch.full(
        (rows, words_of(vocab_size)), -1, dtype=torch.int32, pin_memory=torch.cuda.is_available()
    )


class BitmaskPool:
    """Reuses bitmasks between steps: one is being filled while the last is still being copied."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._free: list[torch.Tensor] = []

    def acquire(self) -> torch.Tensor:
        """A bitmask [max_rows, words] of any content; `MaskFiller.fill` writes every row it is given."""
        return self._free.pop() if self._free else allocate_bitmask(self._max_rows, self._vocab_size)

    def release(self, bitmask: torch.Tensor) -> None:
        """Give back a bitmask that no copy reads any more."""
        self._free.append(bitmask)


class MaskFiller:
    """Fills the masks of a batch, on several threads when there are enough rows. `close` ends the threads."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, "personae-masks") if threads > 1 else None

    def fill(self, bitmask: torch.Tensor, matchers: Sequence[Matcher | None]) -> None:
        """Write the tokens that `matchers[row]` allows next to `bitmask[row]`; all ones where there is none.

        A matcher may appear once only: it is not thread-safe.
        """
        rows = bitmask.numpy()
        bound: list[tuple[int, Matcher]] = []
        for row, matcher in enumerate(matchers):
            if matcher is None:
                rows[row] = -1
            else:
                bound.append((row, matcher))
        parts = max(1, min(self._threads, len(bound) // ROWS_PER_THREAD))
        others: list[Future[None]] = []
        if self._pool is not None:
            others = [self._pool.submit(_fill_rows, rows, bound[part::parts]) for part in range(1, parts)]
        _fill_rows(rows, bound[::parts])
        for other in others:
            other.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _fill_rows(bitmask: Bitmask, bound: list[tuple[int, Matcher]]) -> None:
    for row, matcher in bound:
        matcher.fill(bitmask, row)
