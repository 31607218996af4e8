"""Grammar masks on logits."""

from functools import cache

import numpy as np
import torch
from torch import Tensor


class Scratch:
    """Float32 memory that is kept between steps. On a CPU, faulting in fresh pages for a batch of logits
    takes longer than the arithmetic."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, device=device)

    def take(self, rows: int, width: int) -> Tensor:
        """A contiguous [rows, width] with arbitrary content, valid until the next call."""
        size = rows * width
        if len(self._memory) < size:
            self._memory = self._memory.new_empty(size)
        return self._memory[:size].view(rows, width)


def apply_bitmask(logits: Tensor, bitmask: Tensor, scratch: Scratch) -> None:
    """Forbids in `logits` [S, V], in place, what `bitmask` (int32 CPU [S, ceil(V / 32)]) does not allow.

    It adds 0 or minus infinity, so a NaN stays a NaN and is detected.
    """
    words = bitmask.numpy()
    rows = np.flatnonzero((words != -1).any(1))
    if not len(rows):
        return
    octets = words[rows].astype("<i4", copy=False).view(np.uint8).astype(np.int32)
    wanted = torch.from_numpy(octets).to(logits.device, non_blocking=True)
    added = scratch.take(len(rows), wanted.shape[1] * 8)
    torch.index_select(_addends_by_byte(logits.device), 0, wanted.flatten(), out=added.view(-1, 8))
    added = added[:, : logits.shape[1]]
    if len(rows) == len(logits):
        logits += added
    else:
        logits.index_add_(0, torch.from_numpy(rows).to(logits.device, non_blocking=True), added)


@cache
def _addends_by_byte(device: torch.device) -> Tensor:
    """What each byte of a mask adds to its eight logits, [256, 8]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits == 1, 0.0, -np.inf).astype(np.float32)).to(device)
