"""Proposers with a model of their own. They guess for several sequences in one forward pass, greedily, one
token after the other."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from personae.engine.kv import KVCache
from personae.engine.plan import MemoryLayout, StepPlan
from personae.engine.speculation.computed_pages import ComputedPages, TokenSpan
from personae.kernels.upload import uploads


class Wish(NamedTuple):
    """A sequence's `tokens` so far, and how many more to guess, at least one."""

    tokens: list[int]
    most: int


class Pass(NamedTuple):
    """A forward pass of the model that guesses: its tokens, and the seconds that it took on a CPU."""

    tokens: int
    seconds: float


class BatchProposer(Protocol):
    """Guesses for several sequences at once, by slot."""

    @property
    def source(self) -> str:
        """Its name in statistics."""

    @property
    def catch_up(self) -> int:
        """How many tokens it may compute for each token of the answer so far, to begin guessing."""

    @property
    def passes(self) -> Sequence[Pass]:
        """Those of the last `propose`."""

    def begin(self, plan: StepPlan) -> None:
        """Apply the plan's changes of slots and pages. Call it once for each plan, before `propose`."""

    def room(self, start: int, length: int, most: int) -> int:
        """How many of `most` tokens can be guessed after the first `length` ones. The served model has
        computed the first `start` of these."""

    def lag(self, slot: int, length: int) -> int:
        """How many of a sequence's `length` tokens must be computed before it can be guessed on."""

    def propose(self, wishes: Mapping[int, Wish]) -> dict[int, tuple[int, ...]]:
        """The guesses. A sequence whose tokens are not all computed yet has none."""


class ModelProposer(ABC):
    """A BatchProposer. `longest`: of how many tokens at most a sequence may be. Position p has the token that
    is `shift` places after p in the sequence."""

    source: ClassVar[str]
    catch_up: ClassVar[int]
    shift: ClassVar[int] = 0

    def __init__(self, kv: KVCache, layout: MemoryLayout, longest: int) -> None:
        self.kv = kv
        self._pages = ComputedPages(kv, layout)
        self._budget = layout.max_batch_tokens
        self._longest = min(layout.max_model_len, longest)
        self.passes: list[Pass] = []

    def begin(self, plan: StepPlan) -> None:
        """See BatchProposer."""
        self._pages.begin(plan)

    def room(self, start: int, length: int, most: int) -> int:
        """See BatchProposer. The last guess itself is not computed."""
        return max(min(most, self._longest - length + 1), 0)

    def lag(self, slot: int, length: int) -> int:
        """See BatchProposer."""
        computed = self._pages.known(slot)
        return length - (self._pages.shared(slot) if computed is None else min(computed, length))

    def propose(self, wishes: Mapping[int, Wish]) -> dict[int, tuple[int, ...]]:
        """See BatchProposer. All together compute at most the tokens of a step before they guess."""
        self.passes.clear()
        budget = self._budget
        spans: list[TokenSpan] = []
        wanted: list[tuple[int, int]] = []  # the place among the spans, and how many tokens to guess
        for slot, (tokens, most) in wishes.items():
            if not most or not budget:
                continue
            start, whole = self._first(slot, tokens), len(tokens) - self.shift
            end = min(whole, start + budget)
            budget -= end - start
            if end == whole:
                wanted.append((len(spans), most))
            spans.append(TokenSpan(slot, start, tokens[start + self.shift : end + self.shift]))
        if not spans:
            return {}
        wanted.sort(key=lambda wish: -wish[1])
        guesses = self._guess(spans, wanted)
        for span in spans:
            self._pages.advance(span.slot, span.start + len(span.tokens))
        found = {}
        for (place, most), guessed in zip(wanted, guesses, strict=True):
            span = spans[place]
            self._guessed_after(span, guessed[:most])
            found[span.slot] = tuple(guessed[:most])
        return found

    def _guess(self, spans: list[TokenSpan], wanted: list[tuple[int, int]]) -> list[list[int]]:
        """Compute the spans, and guess after those that are `wanted`: first those with the most guesses."""
        begun = time.perf_counter()
        hidden = self._compute(spans, None)
        if not wanted:
            return []
        ends = np.cumsum([len(span.tokens) for span in spans])
        (last,) = uploads((np.array([ends[place] - 1 for place, _ in wanted], np.int64),), hidden.device)
        hidden = hidden[last]
        ids = self._choose(hidden)
        begun = self._passed(int(ends[-1]), begun)
        chosen = [ids]
        for depth in range(1, wanted[0][1]):
            going = [place for place, most in wanted if most > depth]
            after = [
                TokenSpan(spans[i].slot, spans[i].start + len(spans[i].tokens) + depth - 1, [0])
                for i in going
            ]
            hidden = self._compute(after, (ids[: len(going)], hidden[: len(going)]))
            ids = self._choose(hidden)
            begun = self._passed(len(going), begun)
            chosen.append(ids)
        read = [ids.tolist() for ids in chosen]
        return [[ids[place] for ids in read if place < len(ids)] for place in range(len(wanted))]

    def _passed(self, tokens: int, begun: float) -> float:
        """Note a pass that began then. Returns the time."""
        now = time.perf_counter()
        self.passes.append(Pass(tokens, now - begun))
        return now

    @abstractmethod
    def _first(self, slot: int, tokens: list[int]) -> int:
        """The first position that is not computed. The last one never is."""

    @abstractmethod
    def _compute(self, spans: list[TokenSpan], guessed: tuple[Tensor, Tensor] | None) -> Tensor:
        """A forward pass: the hidden states [T, hidden_size] of the spans' tokens; or of one guessed token
        each, of which `guessed` has the ids [B], and the hidden states [B, hidden_size] that they were
        chosen from."""

    @abstractmethod
    def _choose(self, hidden: Tensor) -> Tensor:
        """The likeliest token of each row [S, hidden_size] -> [S] int64."""

    def _guessed_after(self, span: TokenSpan, guessed: list[int]) -> None:  # noqa: B027  # not all remember them
        """These were guessed after a span."""
