"""Bitmasks for a batch: how they are allocated and filled.

Here a bitmask (bitmask.py) is a CPU tensor for the device to read. Rows without a grammar are all ones, so
that one operation applies to the whole batch.
"""

from collections.abc import Sequence

import torch

from personae.grammar.bitmask import words_of
from personae.grammar.matcher import Binding


def allocate_bitmask(rows: int, vocab_size: int) -> torch.Tensor:
    """An int32 bitmask [rows, ceil(vocab_size / 32)] that allows everything. It is pinned if there is a
    GPU."""
    return torch.full(
        (rows, words_of(vocab_size)), -1, dtype=torch.int32, pin_memory=torch.cuda.is_available()
    )


class BitmaskPool:
    """Reuses bitmasks between steps: one is being filled while the previous one is still being copied."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._free: list[torch.Tensor] = []

    def acquire(self) -> torch.Tensor:
        """A bitmask [max_rows, words] with any content. `fill_masks` writes every row that it is given."""
        return self._free.pop() if self._free else allocate_bitmask(self._max_rows, self._vocab_size)

    def release(self, bitmask: torch.Tensor) -> None:
        """Return a bitmask that no copy reads any more."""
        self._free.append(bitmask)


def fill_masks(bitmask: torch.Tensor, matchers: Sequence[Binding | None]) -> None:
    """Write the tokens that `matchers[row]` allows next to `bitmask[row]`; all ones if there is no matcher.

    A matcher may appear only once, because it is not thread-safe.
    """
    rows = bitmask.numpy()
    for row, matcher in enumerate(matchers):
        if matcher is None:
            rows[row] = -1
        else:
            matcher.fill(rows, row)


def verifying(matchers: Sequence[Binding | None]) -> dict[int, Binding]:
    """Those of the matchers that verify the tokens that are chosen, by row."""
    return {row: matcher for row, matcher in enumerate(matchers) if matcher is not None and matcher.verifies}
