"""Drafts of a second, smaller model that shares the first one's tokens.

Its keys and values lie in a cache of its own with the same pages: a page of a sequence holds the same tokens
in both caches. So pages need no second owner, and what the prefix cache shares between requests of a tenant
is shared here too. How many tokens of a page the draft model has computed is counted by page. Whatever is
missing is computed when a draft is asked for: a prompt, tokens of steps without drafts, and everything after
a preemption or a restart. Answers never depend on it.

Adapters do not apply to the draft model. It guesses greedily.
"""

import time
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from personae.engine.kv import KVCache
from personae.engine.models.decoder import Decoder
from personae.engine.plan import MemoryLayout, StepPlan
from personae.engine.worker.page_tables import Ints, PageTables
from personae.kernels.attention import AttentionBatch
from personae.kernels.upload import uploads

SOURCE = "model"


class Wish(NamedTuple):
    """A sequence's `tokens` so far, and how many more to guess, at least one."""

    tokens: list[int]
    most: int


class Pass(NamedTuple):
    """A forward pass of the draft model: its tokens, and the seconds that it took on a CPU."""

    tokens: int
    seconds: float


class BatchProposer(Protocol):
    """Guesses for several sequences at once, by slot."""

    passes: list[Pass]
    """Those of the last `propose`."""

    def begin(self, plan: StepPlan) -> None:
        """Apply the plan's changes of slots and pages. Call it once for each plan, before `propose`."""

    def room(self, length: int, most: int) -> int:
        """How many of `most` tokens can be guessed after the first `length` ones."""

    def lag(self, slot: int, length: int) -> int:
        """How many of a sequence's `length` tokens must be computed before it can be guessed on."""

    def propose(self, wishes: Mapping[int, Wish]) -> dict[int, tuple[int, ...]]:
        """The guesses. A sequence whose tokens are not all computed yet has none."""


class _Row(NamedTuple):
    """Positions `start` to `start + len(tokens) - 1` of a slot."""

    slot: int
    start: int
    tokens: list[int]


class DraftModel:
    """A `BatchProposer` with a model. `vocab_size`: that of the model that it guesses for."""

    def __init__(self, model: Decoder, layout: MemoryLayout, vocab_size: int) -> None:
        self._model = model
        self._layout = layout
        self.kv = KVCache(model.config.kv_specs, layout, model.dtype, model.device)
        self._tables = PageTables(layout)
        self._vocab_size = min(vocab_size, model.config.vocab_size)
        self._longest = min(layout.max_model_len, model.config.max_position)
        # By page: how many of its tokens are computed.
        self._filled: NDArray[np.int32] = np.zeros(layout.num_pages, np.int32)
        # By slot: how many tokens are computed, None if that is to be found from its pages.
        self._computed: list[int | None] = [None] * layout.max_seqs
        # By slot: the position of the last guesses, and those of them that were computed.
        self._guessed: dict[int, tuple[int, list[int]]] = {}
        self.passes: list[Pass] = []

    def begin(self, plan: StepPlan) -> None:
        """See BatchProposer."""
        if plan.copies:
            self.kv.copy_pages(plan.copies)
            for source, destination in plan.copies:
                self._filled[destination] = self._filled[source]
        for admission in plan.admissions:
            self._computed[admission.slot] = None
            self._guessed.pop(admission.slot, None)
        self._tables.apply(plan)
        size = self._layout.page_size
        for row in plan.rows:
            if row.pages:
                # What lies before the row came from the prefix cache with its pages; the others are new.
                first = (self._tables.counts[row.slot] - len(row.pages)) * size
                kept = np.clip(row.start - first - np.arange(len(row.pages)) * size, 0, size)
                pages = list(row.pages)
                self._filled[pages] = np.minimum(self._filled[pages], kept)

    def room(self, length: int, most: int) -> int:
        """See BatchProposer. The last guess itself is not computed."""
        return max(min(most, self._longest - length + 1), 0)

    def lag(self, slot: int, length: int) -> int:
        """See BatchProposer."""
        computed = self._computed[slot]
        return length - (self._shared(slot) if computed is None else min(computed, length))

    def propose(self, wishes: Mapping[int, Wish]) -> dict[int, tuple[int, ...]]:
        """See BatchProposer. All together compute at most the tokens of a step before they guess."""
        self.passes.clear()
        budget = self._layout.max_batch_tokens
        rows: list[_Row] = []
        wanted: list[tuple[int, int]] = []  # the place among the rows, and how many tokens to guess
        for slot, (tokens, most) in wishes.items():
            most = self.room(len(tokens), most)
            if not most or not budget:
                continue
            start = self._begin_row(slot, tokens)
            end = min(len(tokens), start + budget)
            budget -= end - start
            if end == len(tokens):
                wanted.append((len(rows), most))
            rows.append(_Row(slot, start, tokens[start:end]))
        if not rows:
            return {}
        wanted.sort(key=lambda wish: -wish[1])
        guesses = self._guess(rows, wanted)
        for row in rows:
            self._advance(row.slot, row.start + len(row.tokens))
        found = {}
        for (place, most), guessed in zip(wanted, guesses, strict=True):
            row = rows[place]
            self._guessed[row.slot] = row.start + len(row.tokens), guessed[: most - 1]
            found[row.slot] = tuple(guessed[:most])
        return found

    def _begin_row(self, slot: int, tokens: list[int]) -> int:
        """The first position that is not computed. The last token's always is not."""
        computed = self._computed[slot]
        if computed is None:
            computed = self._shared(slot)
        at, guessed = self._guessed.pop(slot, (0, []))
        if guessed and at == computed:
            right = 0
            while right < min(len(guessed), len(tokens) - at) and guessed[right] == tokens[at + right]:
                right += 1
            computed += right
            self._advance(slot, computed, since=at)
        return min(computed, len(tokens) - 1)

    def _shared(self, slot: int) -> int:
        """How many tokens at the beginning are computed in the slot's pages."""
        filled = self._filled[self._tables.pages[slot, : self._tables.counts[slot]]]
        whole = int(np.argmin(np.append(filled, 0) == self._layout.page_size))
        return whole * self._layout.page_size + (int(filled[whole]) if whole < len(filled) else 0)

    def _advance(self, slot: int, computed: int, since: int | None = None) -> None:
        """The slot's tokens before `computed` are computed now."""
        before = since if since is not None else (self._computed[slot] or 0)
        size = self._layout.page_size
        for place in range(before // size, -(-computed // size)):
            page = self._tables.pages[slot, place]
            self._filled[page] = max(self._filled[page], min(computed - place * size, size))
        self._computed[slot] = computed

    def _guess(self, rows: list[_Row], wanted: list[tuple[int, int]]) -> list[list[int]]:
        """Compute the rows, and guess after those that are `wanted`: first those with the most guesses."""
        begun = time.perf_counter()
        hidden = self._forward(rows)
        if not wanted:
            return []
        ends = np.cumsum([len(row.tokens) for row in rows])
        (last,) = uploads((np.array([ends[place] - 1 for place, _ in wanted], np.int64),), hidden.device)
        ids = self._choose(hidden[last])
        begun = self._passed(int(ends[-1]), begun)
        chosen = [ids]
        for depth in range(1, wanted[0][1]):
            going = [place for place, most in wanted if most > depth]
            after = [_Row(rows[i].slot, rows[i].start + len(rows[i].tokens) + depth - 1, [0]) for i in going]
            ids = self._choose(self._forward(after, ids[: len(going)]))
            begun = self._passed(len(going), begun)
            chosen.append(ids)
        read = [ids.tolist() for ids in chosen]
        return [[ids[place] for ids in read if place < len(ids)] for place in range(len(wanted))]

    def _choose(self, hidden: torch.Tensor) -> torch.Tensor:
        """The likeliest token of each row [S, hidden_size] -> [S] int64."""
        return self._model.logits(hidden)[:, : self._vocab_size].argmax(1)

    def _forward(self, rows: list[_Row], ids: torch.Tensor | None = None) -> torch.Tensor:
        """The hidden states [T, hidden_size] of the rows' tokens, or of one token of each, `ids` [B]."""
        slots = np.array([row.slot for row in rows], np.int64)
        starts = np.array([row.start for row in rows], np.int64)
        counts = np.array([len(row.tokens) for row in rows], np.int64)
        ends = np.cumsum(counts)
        positions: Ints = np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)
        lengths = starts + counts
        tokens = np.fromiter((token for row in rows for token in row.tokens), np.int64, int(ends[-1]))
        tokens[tokens >= self._model.config.vocab_size] = 0  # padding of the other model's vocabulary
        there = uploads(
            (
                tokens,
                positions,
                self._tables.places(np.repeat(slots, counts), positions),
                np.concatenate(([0], ends)).astype(np.int32),
                lengths.astype(np.int32),
                self._tables.rows(slots, int(lengths.max())),
            ),
            self._model.device,
        )
        known, at, places, query_start, kv_length, page_table = there
        batch = AttentionBatch(
            query_start, kv_length, page_table, places, max_query=int(counts.max()), max_kv=int(lengths.max())
        )
        return self._model.forward(known if ids is None else ids, at, self.kv, batch)

    def _passed(self, tokens: int, begun: float) -> float:
        """Note a pass that began then. Returns the time."""
        now = time.perf_counter()
        self.passes.append(Pass(tokens, now - begun))
        return now
