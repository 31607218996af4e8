"""One step on the device, in five calls: `prepare`, `forward`, `fill`, `sample`, `finish`.

`prepare` and `fill` work on the host, `forward` and `sample` start work on the device, `finish` reads the
tokens. A caller may start step N+1 before it finishes step N, but only its forward pass, because the masks of
N+1 depend on the tokens of N. So the order is

    prepare, forward N+1  ->  finish N (read tokens, advance grammars), fill the masks of N+1  ->  sample N+1

and the work between the arrows is hidden behind the forward pass. On a CPU the forward pass has a thread for
each core. There `forward` lets the other threads begin, does the hidden work on this thread, and then joins
them. One more thread would take a core from one of them in the middle of its work, and all would wait.

If grammars have to verify tokens of N, these are settled as late as possible: on a CPU before the forward
pass of N+1, on a GPU after its launch. If a token was replaced by then, its row of N+1 was computed with the
wrong token. That row is deferred (`deferral.py`); the other rows do not wait.

The rows of sequences that may have drafts (`speculation/`) begin where the step before ended, and drafts are
made from its tokens. So for such rows N is read when N+1 is prepared, except while the speculator rests.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import msgspec
import numpy as np
import torch

from personae.engine.bindings import Bindings
from personae.engine.device_event import DeviceToHostEvent
from personae.engine.launched import LaunchedStep
from personae.engine.plan import StepPlan, StepResult
from personae.engine.pooling import Pooling
from personae.engine.prompt_logprobs import prompt_logprobs_of
from personae.engine.sampled_tokens import SampledTokens, TokenChoices
from personae.engine.sampler import Sampler
from personae.engine.sequence import SequenceLog
from personae.engine.speculation.forced import JumpForward, Retokenizer
from personae.engine.speculation.speculator import Speculator
from personae.engine.speculation.verification import DraftRow, Slots, verify
from personae.engine.worker.known import KnownTokens
from personae.engine.worker.worker import Forward, HiddenStates, PackedStep, Worker
from personae.grammar.masks import BitmaskPool, fill_masks, verifying
from personae.grammar.matcher import Binding, Grammar
from personae.grammar.spec import GrammarKey, GrammarSpec
from personae.kernels.upload import upload


def _no_overlap() -> None:
    """The overlap callback that does nothing."""


class StepEngine:
    """Executes plans in the given order, with the worker, the sampler and the grammar matchers of every slot.

    `runs_ahead`: the device computes asynchronously, so a step can be read after the next is launched.
    `retokenizer` finds the tokens of forced text; without it no text is forced. `speculator` makes drafts.
    """

    def __init__(
        self, worker: Worker, retokenizer: Retokenizer | None = None, speculator: Speculator | None = None
    ) -> None:
        self.worker = worker
        slots, vocab_size = worker.layout.max_seqs, worker.vocab_size
        self.sampler = Sampler(slots, vocab_size, worker.device, worker.commit)
        self._known = KnownTokens(slots, vocab_size)
        self._pooling = Pooling(worker)
        self._bindings = Bindings(self._known, vocab_size, worker.layout.max_model_len, retokenizer)
        self.runs_ahead = worker.device.type != "cpu"
        self._bitmask: torch.Tensor | None = None  # for the step whose forward pass has begun
        self._sampled: tuple[SampledTokens, int, PackedStep] | None = None  # the last step's, until settled
        self._bitmasks = BitmaskPool(slots, vocab_size)
        self._logs: dict[int, SequenceLog] = {}
        self._speculator = speculator
        self._last: LaunchedStep | None = None  # the last step, if there is a speculator
        self._clock = time.perf_counter
        self._begun = 0.0  # when the last step's preparation began, without the draft model's time
        self._prepared: StepPlan | None = None  # the last step's, with its drafts
        if speculator is not None:
            self.sampler.ask_patience = math.inf  # a step is read before its drafts are verified

    @property
    def deferred(self) -> bool:
        """Whether rows are deferred because their masks are not ready."""
        return bool(self._bindings.deferrals)

    def resumable(self) -> tuple[str, ...]:
        """The sequences that can resume: their deferred step is finished and their masks have arrived. Each
        once."""
        return tuple(self._logs[slot].id for slot in self._bindings.resumable())

    def prepare(self, plan: StepPlan, grammars: Mapping[GrammarKey, Grammar]) -> PackedStep | None:
        """Apply the plan's changes and pack its rows, if it has any.

        `grammars` has the compiled grammar of every admission with a spec, by its tenant and spec.
        """
        if self._speculator is not None:
            waits = self.runs_ahead or self._speculator.needs_results(plan)
            if waits:
                self._collect(self._speculator)
            self._begun, before = self._clock(), self._begun
            if self._prepared is not None and not self.runs_ahead:
                self._speculator.paced(self._prepared, self._begun - before, ahead=not waits)
        if plan.releases or plan.admissions:
            self._settle()
        for slot in plan.releases:
            if self._speculator is not None:
                self._speculator.release(slot)
            self.sampler.release(slot)
            self._pooling.release(slot)
            self._logs.pop(slot, None)
            self._bindings.release(slot)
        for admission in plan.admissions:
            self._admit(admission.slot, admission.log, grammars)
        if self._speculator is not None:
            self._speculator.begin(plan)
            if plan.rows:
                rows, self._known.guesses = self._speculator.resolve(plan.rows)
                plan = msgspec.structs.replace(plan, rows=rows)
            self._prepared = plan if plan.rows else None
            self._begun += self._speculator.drafting_seconds
        return self.worker.begin(plan, self._known)

    def _admit(self, slot: int, log: SequenceLog, grammars: Mapping[GrammarKey, Grammar]) -> None:
        self._known.admit(slot, log)
        self._logs[slot] = log
        self.sampler.admit(slot, log)
        self._pooling.admit(slot, log)
        self._bindings.admit(slot, log, grammars)
        if self._speculator is not None and log.params.speculate and not self._bindings.is_remote(slot):
            self._speculator.admit(slot, log, self._bindings.guesses(slot, log))

    def _collect(self, speculator: Speculator) -> None:
        """Read the last step's results for sequences that may have drafts. Waits for the step if there are
        any."""
        launched, self._last = self._last, None
        if launched is None:
            return
        rows = [i for i, row in enumerate(launched.plan.rows) if speculator.follows(row.slot)]
        if not rows:
            return
        samples = {row: i for i, row in enumerate(launched.rows)}
        if launched.sampled is None:
            samples, read = {}, TokenChoices([])
        else:
            self._settle()
            read = launched.sampled.read()
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

    def forward(self, packed: PackedStep | None, overlap: Callable[[], None] = _no_overlap) -> Forward | None:
        """Start the forward pass of the prepared step. `overlap` is called once while it runs: it may finish
        the step before and fill the masks."""
        if packed is None:
            overlap()
            return None
        if not self.runs_ahead:
            self._settle()
            return self.logits(self.worker.forward(packed, overlap))
        launched = self.worker.logits(self.worker.forward(packed))
        # Only a row that is being verified waits for its verification.
        self._bindings.deferrals.mark_replaced(self._settle())
        overlap()
        return launched

    def logits(self, hidden: HiddenStates) -> Forward:
        """The logits of a step on a CPU, as far as they are needed. Its masks are filled."""
        return self.worker.logits(hidden, self._logit_mask(hidden.packed))

    def fill(self, packed: PackedStep | None) -> None:
        """Fill the grammar masks of the step that has begun, once the step before is finished. Masks that are
        not filled by sampling time are filled then."""
        matchers = [] if packed is None else self._bindings.of(packed)
        if any(matchers):
            self._bitmask = self._bitmasks.acquire()
            fill_masks(self._bitmask, matchers)

    def _logit_mask(self, packed: PackedStep) -> torch.Tensor | None:
        """The needed logits as a bitmask: those of tokens that may be chosen; all logits in rows that request
        log-probabilities or whose mask is not there yet. None: all."""
        if self._bitmask is None:
            return None
        slots = packed.sampled_slots
        logit_mask = self._bitmask[: len(slots)]
        whole = [row for row, slot in enumerate(slots) if self._logs[slot].params.logprobs is not None]
        if whole:
            logit_mask = logit_mask.clone()
            logit_mask[whole] = -1
        if packed.drafts:  # the masks of drafts are made once the drafts are known to be right
            drafts = logit_mask.new_full((len(packed.sampled) - len(slots), logit_mask.shape[1]), -1)
            logit_mask = torch.cat((logit_mask, drafts))
        return logit_mask

    def sample(self, plan: StepPlan, forward: Forward | None) -> LaunchedStep:
        """Fill the masks and start sampling. The tokens of the step before must have been read."""
        if forward is None:
            return LaunchedStep(plan, None, [], [], [], None, {}, None)
        if out := self._bindings.find_deferred(plan.rows, forward.packed):
            launched = self._sample_others(plan, forward, out)
        else:
            launched = self._sample(plan, forward)
        if self._speculator is not None:
            self._last = launched
            if not self.runs_ahead:
                self._speculator.took(
                    forward.packed.attention.max_query,
                    len(forward.packed.tokens),
                    self._clock() - self._begun,
                )
        return launched

    def _sample(self, plan: StepPlan, forward: Forward) -> LaunchedStep:
        rows, slots = forward.packed.sampled_rows, forward.packed.sampled_slots
        matchers = self._bindings.of(forward.packed)
        sampled = None
        if self._bitmask is None:
            self.fill(forward.packed)
        else:
            self._bindings.fill_late(self._bitmask, matchers)
        bitmask, self._bitmask = self._bitmask, None
        if rows:
            verifications = verifying(matchers)
            logits = forward.logits[: len(rows)]  # behind these are those of drafts
            if verifications and (
                self.runs_ahead
                or any(self._logs[row.slot].params.prompt_logprobs is not None for row in plan.rows)
            ):
                logits = logits.clone()  # other logits overwrite them before all tokens are final
            sampled = self.sampler.sample(
                logits,
                slots,
                forward.packed.sampled_ends,
                None if bitmask is None else bitmask[: len(rows)],
                verifications,
            )
            self._sampled = sampled, plan.step, forward.packed
        jumping = self._bindings.jumps(slots)
        drafts = {}
        if forward.packed.drafts and sampled is not None:
            drafts = self._verify(forward, sampled, matchers, jumping)
        prompts = prompt_logprobs_of(plan, forward, self._logs, self.worker)
        embeddings = self._pooling.of(plan, forward, self._logs)
        arrival = DeviceToHostEvent(self.worker.device) if prompts or embeddings else None
        return LaunchedStep(
            plan,
            sampled,
            rows,
            matchers,
            jumping,
            bitmask,
            prompts,
            arrival,
            ends=forward.packed.sampled_ends,
            drafts=drafts,
            embeddings=embeddings,
        )

    def _verify(
        self,
        forward: Forward,
        sampled: SampledTokens,
        matchers: list[Binding | None],
        jumps: list[JumpForward | None],
    ) -> dict[int, DraftRow]:
        """Choose the tokens after the drafts that are right."""
        packed = forward.packed
        rows = {
            i: DraftRow(packed.sampled_slots[i], packed.sampled_ends[i], drafts, first, matchers[i], jumps[i])
            for i, (drafts, first) in packed.drafts.items()
        }
        self._settle()
        assert self._speculator is not None
        slots = Slots(self._known.at, self._speculator.ends, self._known.extend)
        logits = forward.logits[len(packed.sampled_rows) :]
        verify(rows, sampled.read().tokens, logits, self.sampler, self._bitmasks, slots)
        return rows

    def _sample_others(self, plan: StepPlan, forward: Forward, out: list[int]) -> LaunchedStep:
        """As `sample`, but without the packed samples `out`, as if their rows were chunks of a prompt."""
        packed = forward.packed
        others = [i for i in range(len(packed.sampled_rows)) if i not in out]
        if self._bitmask is not None:
            self._bitmask[: len(others)] = self._bitmask[others]
        for i in out:
            self._bindings.deferrals.defer(plan.step, packed.sampled_slots[i], packed.sampled_ends[i])
        fewer = replace(
            packed,
            sampled_rows=[packed.sampled_rows[i] for i in others],
            sampled_slots=[packed.sampled_slots[i] for i in others],
            sampled_ends=[packed.sampled_ends[i] for i in others],
            drafts={others.index(i): drafts for i, drafts in packed.drafts.items() if i in others},
        )
        behind = range(len(packed.sampled_rows), len(packed.sampled))
        logits = forward.logits[upload(np.array([*others, *behind], np.int64), self.worker.device)]
        launched = self._sample(plan, Forward(fewer, forward.hidden, logits))
        return replace(launched, deferred=frozenset(packed.sampled_rows[i] for i in out))

    def _settle(self) -> Iterable[int]:
        """Make the tokens of the last step final. Rows that are undecided are deferred. Returns the slots
        whose first token was replaced."""
        if self._sampled is None:
            return ()
        sampled, step, packed = self._sampled
        self._sampled = None
        sampled.settle()
        for i in sampled.undecided:
            self._bindings.deferrals.defer(step, packed.sampled_slots[i], packed.sampled_ends[i])
        return [packed.sampled_slots[i] for i in sampled.replaced]

    def ready(self, launched: LaunchedStep) -> bool:
        """Whether `finish` would return without waiting for the device."""
        return launched.ready

    def finish(self, launched: LaunchedStep) -> StepResult:
        """Wait for the step, read its tokens and advance the grammars by them."""
        if self._last is launched and self._speculator is not None:
            self._collect(self._speculator)
        if self._sampled is not None and self._sampled[0] is launched.sampled:
            self._settle()
        resting = self._speculator is not None and self._speculator.resting
        result = launched.read(self._bindings.bring, resting=resting)
        if (experts := self.worker.expert_balance) is not None:
            result = msgspec.structs.replace(result, experts=experts)
        if launched.bitmask is not None:
            self._bitmasks.release(launched.bitmask)
        if result.deferred:
            self._bindings.deferrals.finished(result.step)
        return result


def by_tenant(plan: StepPlan, grammars: Mapping[GrammarSpec, Grammar]) -> dict[GrammarKey, Grammar]:
    """The grammars that a plan needs, if all tenants share them."""
    logs = (admission.log for admission in plan.admissions)
    return {(log.tenant, log.grammar): grammars[log.grammar] for log in logs if log.grammar is not None}
