"""How much of each sequence a model that guesses has computed.

Its keys and values lie in a cache of its own with the pages of the served model: a page of a sequence holds
the same tokens in both. So pages need no second owner, and what the prefix cache shares between requests of a
tenant is shared here too. How many tokens of a page are computed is counted by page. Whatever is missing is
computed when a draft is asked for: a prompt, tokens of steps without drafts, and everything after a
preemption or a restart. Answers never depend on it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personae.engine.kv import KVCache
from personae.engine.plan import FetchPage, MemoryLayout, StepPlan
from personae.engine.worker.page_tables import Ints, PageTables
from personae.kernels.attention import AttentionBatch
from personae.kernels.upload import uploads


class TokenSpan(NamedTuple):
    """Positions `start` to `start + len(tokens) - 1` of a slot, and the tokens that are computed there."""

    slot: int
    start: int
    tokens: list[int]


class Packed(NamedTuple):
    """Spans as tensors. tokens, positions, places: [T] int64."""

    tokens: Tensor
    positions: Tensor
    places: Tensor
    batch: AttentionBatch


class ComputedPages:
    """See the module. `kv` is the cache of the model that guesses."""

    def __init__(self, kv: KVCache, layout: MemoryLayout) -> None:
        self._kv, self._layout = kv, layout
        self._tables = PageTables(layout)
        # By page: how many of its tokens are computed.
        self._filled: NDArray[np.int32] = np.zeros(layout.num_pages, np.int32)
        # By slot: how many tokens are computed, None if that is to be found from its pages.
        self._computed: list[int | None] = [None] * layout.max_seqs

    def begin(self, plan: StepPlan) -> None:
        """Apply the plan's changes of slots and pages. Call it once for each plan."""
        if plan.copies:
            self._kv.copy_pages(plan.copies)
            for source, destination in plan.copies:
                self._filled[destination] = self._filled[source]
        fetched = [move.page for move in plan.moves if isinstance(move, FetchPage)]
        self._filled[fetched] = 0  # a tier has the served model's pages only
        for admission in plan.admissions:
            self._computed[admission.slot] = None
        self._tables.apply(plan)
        size = self._layout.page_size
        for row in plan.rows:
            if row.pages:
                # What lies before the row came from the prefix cache with its pages; the others are new.
                first = (self._tables.counts[row.slot] - len(row.pages)) * size
                kept = np.clip(row.start - first - np.arange(len(row.pages)) * size, 0, size)
                pages = list(row.pages)
                self._filled[pages] = np.minimum(self._filled[pages], kept)

    def known(self, slot: int) -> int | None:
        """How many tokens of a sequence are computed; None before the first `advance`."""
        return self._computed[slot]

    def shared(self, slot: int) -> int:
        """How many tokens at the beginning are computed in the slot's pages."""
        filled = self._filled[self._tables.pages[slot, : self._tables.counts[slot]]]
        whole = int(np.argmin(np.append(filled, 0) == self._layout.page_size))
        return whole * self._layout.page_size + (int(filled[whole]) if whole < len(filled) else 0)

    def advance(self, slot: int, computed: int, since: int | None = None) -> None:
        """The slot's tokens before `computed` are computed now."""
        before = since if since is not None else (self._computed[slot] or 0)
        size = self._layout.page_size
        for place in range(before // size, -(-computed // size)):
            page = self._tables.pages[slot, place]
            self._filled[page] = max(self._filled[page], min(computed - place * size, size))
        self._computed[slot] = computed

    def pack(self, spans: Sequence[TokenSpan], vocab_size: int, device: torch.device) -> Packed:
        """Lay the spans' tokens out one after the other. A token outside of the vocabulary is padding of the
        other model's, and becomes 0."""
        slots = np.array([span.slot for span in spans], np.int64)
        starts = np.array([span.start for span in spans], np.int64)
        counts = np.array([len(span.tokens) for span in spans], np.int64)
        ends = np.cumsum(counts)
        positions: Ints = np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)
        lengths = starts + counts
        tokens = np.fromiter((token for span in spans for token in span.tokens), np.int64, int(ends[-1]))
        tokens[tokens >= vocab_size] = 0
        row_starts, max_kv = np.concatenate(([0], ends)).astype(np.int32), int(lengths.max())
        there = uploads(
            (
                tokens,
                positions,
                self._tables.places(np.repeat(slots, counts), positions),
                row_starts,
                lengths.astype(np.int32),
                self._tables.rows(slots, max_kv),
            ),
            device,
        )
        known, at, places, query_start, kv_length, page_table = there
        batch = AttentionBatch(
            query_start,
            kv_length,
            page_table,
            places,
            max_query=int(counts.max()),
            max_kv=max_kv,
            host=(row_starts, lengths),
        )
        return Packed(known, at, places, batch)
