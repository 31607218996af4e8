"""Drafts of a second, smaller model that shares the first one's tokens.

Adapters do not apply to the draft model. It guesses greedily.
"""

from torch import Tensor

from personae.engine.kv import KVCache
from personae.engine.models.decoder import Decoder
from personae.engine.plan import MemoryLayout, StepPlan
from personae.engine.speculation.batch_proposer import ModelProposer
from personae.engine.speculation.computed_pages import TokenSpan


class DraftModel(ModelProposer):
    """A `BatchProposer` with a model. `vocab_size`: that of the model that it guesses for."""

    source = "model"
    catch_up = 16  # short answers to long prompts end before more than that pays

    def __init__(self, model: Decoder, layout: MemoryLayout, vocab_size: int) -> None:
        kv = KVCache(model.config.kv_specs, layout, model.dtype, model.device)
        super().__init__(kv, layout, model.config.max_position)
        self._model = model
        self._vocab_size = min(vocab_size, model.config.vocab_size)
        # By slot: the position of the last guesses, and those of them that were computed.
        self._guessed: dict[int, tuple[int, list[int]]] = {}

    def begin(self, plan: StepPlan) -> None:
        """See BatchProposer."""
        for admission in plan.admissions:
            self._guessed.pop(admission.slot, None)
        super().begin(plan)

    def _first(self, slot: int, tokens: list[int]) -> int:
        computed = self._pages.known(slot)
        if computed is None:
            computed = self._pages.shared(slot)
        at, guessed = self._guessed.pop(slot, (0, []))
        if guessed and at == computed:
            right = 0
            while right < min(len(guessed), len(tokens) - at) and guessed[right] == tokens[at + right]:
                right += 1
            computed += right
            self._pages.advance(slot, computed, since=at)
        return min(computed, len(tokens) - 1)

    def _guessed_after(self, span: TokenSpan, guessed: list[int]) -> None:
        self._guessed[span.slot] = span.start + len(span.tokens), guessed[:-1]

    def _compute(self, spans: list[TokenSpan], guessed: tuple[Tensor, Tensor] | None) -> Tensor:
        packed = self._pages.pack(spans, self._model.config.vocab_size, self._model.device)
        tokens = packed.tokens if guessed is None else guessed[0]
        return self._model.forward(tokens, packed.positions, self.kv, packed.batch)

    def _choose(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)[:, : self._vocab_size].argmax(1)
