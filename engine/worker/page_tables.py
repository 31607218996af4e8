"""The page tables of all slots, as the plans change them."""

import numpy as np
from numpy.typing import NDArray

from personae.engine.plan import MemoryLayout, StepPlan

Ints = NDArray[np.int64]


class PageTables:
    """`pages` [max_seqs, pages of a sequence] int32 has the page ids of each slot, in order; `counts[slot]`
    says how many of them it has. `regions` [max_seqs] int64 has the region of each slot, in which its pages
    are numbered from 0."""

    def __init__(self, layout: MemoryLayout) -> None:
        self._page_size = layout.page_size
        longest = -(-layout.max_model_len // layout.page_size)
        self.pages: NDArray[np.int32] = np.zeros((layout.max_seqs, longest), np.int32)
        self.counts = [0] * layout.max_seqs
        self.regions: Ints = np.zeros(layout.max_seqs, np.int64)
        self._region_pages = layout.region_pages if layout.regions > 1 else None

    def apply(self, plan: StepPlan) -> None:
        """Take back and hand out the plan's pages."""
        for slot in plan.reclaimed:
            self.counts[slot] -= 1
        for admission in plan.admissions:
            self.counts[admission.slot] = 0
        for row in plan.rows:
            if row.pages:
                have, pages = self.counts[row.slot], row.pages
                if self._region_pages is not None:
                    self.regions[row.slot] = pages[0] // self._region_pages
                    pages = tuple(page % self._region_pages for page in pages)
                self.pages[row.slot, have : have + len(pages)] = pages
                self.counts[row.slot] = have + len(pages)

    def places(self, slots: Ints, positions: Ints) -> Ints:
        """Where the keys and values of tokens lie: page * page_size + offset. All are [T]."""
        pages = self.pages[slots, positions // self._page_size].astype(np.int64)
        return pages * self._page_size + positions % self._page_size

    def rows(self, slots: Ints, max_kv: int) -> NDArray[np.int32]:
        """The tables of these slots [B, pages], as far as `max_kv` tokens need them."""
        return self.pages[slots, : -(-max_kv // self._page_size)]
