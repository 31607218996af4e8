"""The step of an engine whose rows may have drafts.

The rows of sequences that may have drafts begin where the step before ended, and drafts are made from its
tokens. So for such rows step N is read when N+1 is prepared, except while the speculator rests.
"""

import math
import time
from collections.abc import Callable, Mapping

import torch
from msgspec.structs import replace

from personae.engine.launched import LaunchedStep
from personae.engine.plan import StepPlan, StepResult
from personae.engine.sampled_tokens import TokenChoices
from personae.engine.sequence import SequenceLog
from personae.engine.speculation.forced import Retokenizer
from personae.engine.speculation.speculator import Speculator
from personae.engine.speculation.verification import DraftRow, Slots, verify
from personae.engine.step import StepEngine
from personae.engine.worker.worker import Forward, PackedStep, Worker
from personae.grammar.matcher import Grammar
from personae.grammar.spec import GrammarKey


class SpeculativeStepEngine(StepEngine):
    """`speculator` makes drafts."""

    def __init__(
        self, worker: Worker, retokenizer: Callable[[], Retokenizer] | None, speculator: Speculator
    ) -> None:
        super().__init__(worker, retokenizer)
        self.sampler.ask_patience = math.inf  # a step is read before its drafts are verified
        self._speculator = speculator
        self._last: LaunchedStep | None = None
        self._clock = time.perf_counter
        self._begun = 0.0  # when the last step's preparation began, without the draft model's time
        self._prepared: StepPlan | None = None  # the last step's, with its drafts

    def prepare(self, plan: StepPlan, grammars: Mapping[GrammarKey, Grammar]) -> PackedStep | None:
        """See StepEngine."""
        waits = self.runs_ahead or self._speculator.needs_results(plan)
        if waits:
            self._collect()
        self._begun, before = self._clock(), self._begun
        if self._prepared is not None and not self.runs_ahead:
            self._speculator.paced(self._prepared, self._begun - before, ahead=not waits)
        return super().prepare(plan, grammars)

    def _release(self, slot: int) -> None:
        self._speculator.release(slot)
        super()._release(slot)

    def _admit(self, slot: int, log: SequenceLog, grammars: Mapping[GrammarKey, Grammar]) -> None:
        super()._admit(slot, log, grammars)
        if log.params.speculate and not self._bindings.is_remote(slot):
            self._speculator.admit(slot, log, self._bindings.guesses(slot, log))

    def _begin(self, plan: StepPlan) -> PackedStep | None:
        self._speculator.begin(plan)
        self._prepared = None
        if plan.rows:
            rows, self._known.guesses = self._speculator.resolve(plan.rows)
            self._prepared = plan = replace(plan, rows=rows)
        self._begun += self._speculator.drafting_seconds
        return super()._begin(plan)

    def _logit_mask(self, packed: PackedStep, bitmask: torch.Tensor) -> torch.Tensor:
        logit_mask = super()._logit_mask(packed, bitmask)
        if not packed.drafts:
            return logit_mask
        # The masks of drafts are made once the drafts are known to be right.
        drafts = logit_mask.new_full((len(packed.sampled) - len(logit_mask), logit_mask.shape[1]), -1)
        return torch.cat((logit_mask, drafts))

    def sample(self, plan: StepPlan, forward: Forward | None) -> LaunchedStep:
        """See StepEngine."""
        launched = super().sample(plan, forward)
        if forward is not None:
            self._last = launched
            if not self.runs_ahead:
                longest, tokens = forward.packed.attention.max_query, len(forward.packed.tokens)
                self._speculator.took(longest, tokens, self._clock() - self._begun)
        return launched

    def _choose(self, plan: StepPlan, forward: Forward) -> LaunchedStep:
        launched = super()._choose(plan, forward)
        if forward.packed.drafts and launched.sampled is not None:
            self._verify(launched, forward, launched.sampled.read())
        return launched

    def _verify(self, launched: LaunchedStep, forward: Forward, read: TokenChoices) -> None:
        """Choose the tokens after the drafts that are right."""
        packed, matchers, jumps = forward.packed, launched.matchers, launched.jumps
        launched.drafts = {
            i: DraftRow(packed.sampled_slots[i], packed.sampled_ends[i], drafts, first, matchers[i], jumps[i])
            for i, (drafts, first) in packed.drafts.items()
        }
        slots = Slots(self._known.at, self._speculator.ends, self._known.extend)
        logits = forward.logits[len(packed.sampled_rows) :]
        verify(launched.drafts, read.tokens, logits, self.sampler, self._bitmasks, slots)

    def _collect(self) -> None:
        """Read the last step's results for sequences that may have drafts. Waits for the step if there are
        any."""
        launched, self._last = self._last, None
        if launched is None:
            return
        speculator = self._speculator
        rows = [i for i, row in enumerate(launched.plan.rows) if speculator.follows(row.slot)]
        if not rows:
            return
        samples = {row: i for i, row in enumerate(launched.rows)}
        read = TokenChoices([]) if launched.sampled is None else launched.sampled.read()
        for index in rows:
            brought: tuple[int, ...] = ()
            accepted = 0
            if (i := samples.get(index)) is not None:
                launched.brought[i] = found = self._bindings.bring(launched, i, read)
                brought = found.tokens
                accepted = launched.drafts[i].accepted if i in launched.drafts else 0
            drafted = speculator.brought(launched.plan.rows[index].slot, accepted, brought)
            if drafted is not None:
                launched.drafted[index] = drafted

    def finish(self, launched: LaunchedStep) -> StepResult:
        """See StepEngine."""
        if self._last is launched:
            self._collect()
        result = super().finish(launched)
        return replace(result, resting=True) if self._speculator.resting else result
