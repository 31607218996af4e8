"""The form of masks: an int32 array [rows, ceil(vocab / 32)] on the host.

If bit t % 32 of word t // 32 is set, token t is allowed. A mask covers the model's padded vocabulary; ids
past the tokenizer's are never allowed. This module does without torch, so that processes that compile need
not load it.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Bitmask = NDArray[np.int32]


def words_of(vocab_size: int) -> int:
    """Words of a row."""
    return (vocab_size + 31) // 32


def allow_only(row: Bitmask, tokens: Sequence[int]) -> None:
    """Make `row`, [words], allow exactly `tokens`."""
    words = row.view(np.uint32)
    words[:] = 0
    for token in tokens:
        words[token // 32] |= np.uint32(1 << (token % 32))


def mask_of(allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    """The row [words] of `allowed` [vocab]."""
    padded = np.pad(allowed, (0, -len(allowed) % 32))
    return np.packbits(padded, bitorder="little").view(np.int32)


def leave_out(row: Bitmask, tokens: Sequence[int]) -> None:
    """Make `row`, [words], allow none of `tokens`, and keep the rest."""
    words = row.view(np.uint32)
    for token in tokens:
        words[token // 32] &= ~np.uint32(1 << (token % 32))


def allows(row: Bitmask, token: int) -> bool:
    """Whether `row`, [words], has the bit of `token`."""
    return int(row[token // 32]) >> token % 32 & 1 == 1
