"""Drafts of a trained head, from the hidden states of the served model.

The head's position p has the hidden state of the sequence's token p, and the token after it. So its keys and
values at the end of a page depend on a token that is not in the page. Requests that share the page compute
that position anew for themselves; the last one's result is there for all, and only their guesses depend on
it.

Adapters change the hidden states, not the head. It guesses greedily.
"""

from torch import Tensor

from personae.engine.heads.head import Head
from personae.engine.heads.states import HeadStates
from personae.engine.kv import KVCache
from personae.engine.plan import MemoryLayout
from personae.engine.speculation.batch_proposer import ModelProposer
from personae.engine.speculation.computed_pages import TokenSpan


class HeadProposer(ModelProposer):
    """A `BatchProposer` with a head. `states`: what the served model leaves for it."""

    source = "head"
    catch_up = 256  # a head has one layer, so that a prompt costs it little
    shift = 1

    def __init__(self, head: Head, states: HeadStates, layout: MemoryLayout) -> None:
        super().__init__(KVCache(head.kv_specs, layout, head.dtype, head.device), layout, head.max_position)
        self._head = head
        self._states = states

    def room(self, start: int, length: int, most: int) -> int:
        """See BatchProposer. It needs the hidden states of all tokens but the last."""
        return super().room(start, length, most) if 0 < start == length - 1 else 0

    def _first(self, slot: int, tokens: list[int]) -> int:
        computed = self._pages.known(slot)
        if computed is None:
            computed = max(self._pages.shared(slot) - 1, 0)
        return min(computed, len(tokens) - 2)

    def _compute(self, spans: list[TokenSpan], guessed: tuple[Tensor, Tensor] | None) -> Tensor:
        packed = self._pages.pack(spans, self._head.vocab_size, self._head.device)
        if guessed is None:
            tokens, hidden = packed.tokens, self._states.values[packed.places]
        else:
            tokens, hidden = guessed
        return self._head.forward(tokens, hidden, packed.positions, self.kv, packed.batch)

    def _choose(self, hidden: Tensor) -> Tensor:
        return self._head.choose(hidden)
