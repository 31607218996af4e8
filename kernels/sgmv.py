"""SGMV: the low-rank updates of many adapters in one batch (Punica's operator, arXiv 2310.18547).

The step's packed tokens are x: [T, in]. A work list says which runs of consecutive rows take which adapter.
It is built once per step and shared by all layers. Rows of the base model are not listed and cost nothing.

Adapters live in weight pools, one per module (q, k, v, ...) and layer. A weight pool is a matrix of rank
rows; a row holds one rank of one adapter: its row of A and its row of B^T. So an adapter of rank 8 uses 8
rows, whatever the largest rank is. Rows are allocated in pages of RANK_PAGE; a module's page table is the
same in all layers.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

RANK_PAGE = 8  # ranks per page


@dataclass(frozen=True, slots=True)
class WorkList:
    """Which packed rows take which adapter. All [S], int32, contiguous, on the model's device.

    Segment i is the rows first_row[i] to first_row[i] + rows[i] - 1; they take the adapter in slot
    adapter[i]. Segments ascend and do not overlap. An adapter whose rows are contiguous has one segment. A
    segment without rows is skipped: a captured graph has a list of fixed length.

    plans: what a backend has derived from this list for the other layers of its step. Code that changes the
    tensors, or the ranks and pages of a listed adapter, must make a new WorkList.
    """

    first_row: Tensor
    rows: Tensor
    adapter: Tensor
    plans: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class RankTable:
    """Where each adapter slot's ranks lie in a module's weight pools. int32, contiguous, on the model's
    device.

    rank: [slots], the true rank; 0 if the adapter does not change this module. pages: [slots, max_pages];
    rank r of a slot lies at pool row pages[slot, r // RANK_PAGE] * RANK_PAGE + r % RANK_PAGE. Entries past a
    slot's last page mean nothing.
    """

    rank: Tensor
    pages: Tensor

    def rows(self, slot: int) -> Tensor:
        """The pool rows of a slot's ranks, in order: [rank] int64. Waits for the device."""
        rank = int(self.rank[slot])
        pages = self.pages[slot, : -(-rank // RANK_PAGE)].long()
        offsets = torch.arange(RANK_PAGE, device=pages.device)
        return (pages[:, None] * RANK_PAGE + offsets).flatten()[:rank]


@dataclass(frozen=True, slots=True)
class WeightPool:
    """One module of one layer: the rank rows of all adapters, in the model's dtype.

    a: [capacity_rows, in], rows of A. b: [capacity_rows, out], rows of B^T, multiplied by the adapter's
    scaling. Rows past the true rank in a slot's last page are zero, so a kernel may read whole pages.
    """

    a: Tensor
    b: Tensor
