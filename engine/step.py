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

What only some sequences request is read by observers (`observer.py`), which are there only while such a
sequence is. An engine whose rows have drafts is a `SpeculativeStepEngine` (`speculation/step.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from personae.engine.bindings import Bindings
from personae.engine.deferral import without
from personae.engine.device_event import DeviceToHostEvent
from personae.engine.launched import LaunchedStep
from personae.engine.observer import PromptObserver
from personae.engine.plan import StepPlan, StepResult
from personae.engine.pooling import Pooling
from personae.engine.prompt_logprobs import PromptLogprobsObserver
from personae.engine.sampled_tokens import SampledTokens
from personae.engine.sampler import Sampler
from personae.engine.sequence import SequenceLog
from personae.engine.speculation.forced import Retokenizer
from personae.engine.worker.known import KnownTokens
from personae.engine.worker.worker import Forward, HiddenStates, PackedStep, Worker
from personae.grammar.masks import BitmaskPool, fill_masks, verifying
from personae.grammar.matcher import Binding, Grammar
from personae.grammar.spec import GrammarKey, GrammarSpec

Kind = type[PromptObserver[Any]]
OBSERVERS: dict[str, Kind] = {"prompt_logprobs": PromptLogprobsObserver, "pooling": Pooling}
"""By the field of a sequence's parameters that requests it."""


def _no_overlap() -> None:
    """The overlap callback that does nothing."""


class StepEngine:
    """Executes plans in the given order, with the worker, the sampler and the grammar matchers of every slot.

    `runs_ahead`: the device computes asynchronously, so a step can be read after the next is launched.
    `retokenizer` returns what finds the tokens of forced text; without it no text is forced.
    """

    def __init__(self, worker: Worker, retokenizer: Callable[[], Retokenizer] | None = None) -> None:
        self.worker = worker
        slots, vocab_size = worker.layout.max_seqs, worker.vocab_size
        self.sampler = Sampler(slots, vocab_size, worker.device, worker.commit)
        self.runs_ahead = worker.device.type != "cpu"
        self._known = KnownTokens(slots, vocab_size)
        self._bindings = Bindings(self._known, vocab_size, worker.layout.max_model_len, retokenizer)
        self._bitmasks = BitmaskPool(slots, vocab_size)
        self._bitmask: torch.Tensor | None = None  # for the step whose forward pass has begun
        self._logs: dict[int, SequenceLog] = {}
        self._observers: dict[Kind, PromptObserver[Any]] = {}
        # The tokens of the last step, while grammars have to verify some of them.
        self._unsettled: tuple[SampledTokens, PackedStep] | None = None

    @property
    def deferred(self) -> bool:
        """Whether rows are deferred because their masks are not ready."""
        return self._bindings.deferrals is not None and bool(self._bindings.deferrals)

    def resumable(self) -> tuple[str, ...]:
        """The sequences that can resume: their deferred step is finished and their masks have arrived. Each
        once."""
        return tuple(self._logs[slot].id for slot in self._bindings.resumable())

    def prepare(self, plan: StepPlan, grammars: Mapping[GrammarKey, Grammar]) -> PackedStep | None:
        """Apply the plan's changes and pack its rows, if it has any.

        `grammars` has the compiled grammar of every admission with a spec, by its tenant and spec.
        """
        if plan.releases or plan.admissions:
            self._settle()
            for slot in plan.releases:
                self._release(slot)
            for admission in plan.admissions:
                self._admit(admission.slot, admission.log, grammars)
        return self._begin(plan)

    def _release(self, slot: int) -> None:
        self.sampler.release(slot)
        if slot in self._bindings.matchers:
            self._bindings.release(slot)
        self._logs.pop(slot, None)
        for kind in [*self._observers]:
            self._observers[kind].release(slot)
            self._drop_unused(kind)

    def _admit(self, slot: int, log: SequenceLog, grammars: Mapping[GrammarKey, Grammar]) -> None:
        self._known.admit(slot, log)
        self._logs[slot] = log
        self.sampler.admit(slot, log)
        if log.is_bound:
            self._bindings.admit(slot, log, grammars)
        for field, kind in OBSERVERS.items():
            if getattr(log.params, field) is not None:
                self._observers.setdefault(kind, kind(self.worker)).logs[slot] = log

    def _begin(self, plan: StepPlan) -> PackedStep | None:
        return self.worker.begin(plan, self._known)

    def forward(self, packed: PackedStep | None, overlap: Callable[[], None] = _no_overlap) -> Forward | None:
        """Start the forward pass of the prepared step. `overlap` is called once while it runs: it may finish
        the step before and fill the masks."""
        if packed is None:
            overlap()
            return None
        if not self.runs_ahead:
            if self._unsettled is not None:
                self._settle()
            return self.logits(self.worker.forward(packed, overlap))
        forward = self.worker.logits(self.worker.forward(packed))
        # Only a row that is being verified waits for its verification.
        if (replaced := self._settle()) and self._bindings.deferrals is not None:
            self._bindings.deferrals.mark_replaced(replaced)
        overlap()
        return forward

    def logits(self, hidden: HiddenStates) -> Forward:
        """The logits of a step on a CPU, as far as they are needed. Its masks are filled."""
        logit_mask = None if self._bitmask is None else self._logit_mask(hidden.packed, self._bitmask)
        return self.worker.logits(hidden, logit_mask)

    def fill(self, packed: PackedStep | None) -> None:
        """Fill the grammar masks of the step that has begun, once the step before is finished. Masks that are
        not filled by sampling time are filled then."""
        if packed is not None and self._bindings.matchers:
            self._fill(self._bindings.of(packed))

    def _fill(self, matchers: list[Binding | None]) -> None:
        if any(matchers):
            self._bitmask = self._bitmasks.acquire()
            fill_masks(self._bitmask, matchers)

    def _logit_mask(self, packed: PackedStep, bitmask: torch.Tensor) -> torch.Tensor:
        """The needed logits as a bitmask: those of tokens that may be chosen; all logits in rows that request
        log-probabilities or whose mask is not there yet."""
        slots = packed.sampled_slots
        logit_mask = bitmask[: len(slots)]
        whole = [row for row, slot in enumerate(slots) if self._logs[slot].params.logprobs is not None]
        if whole:
            logit_mask = logit_mask.clone()
            logit_mask[whole] = -1
        return logit_mask

    def sample(self, plan: StepPlan, forward: Forward | None) -> LaunchedStep:
        """Fill the masks and start sampling. The tokens of the step before must have been read."""
        if forward is None:
            return LaunchedStep(plan)
        packed = forward.packed
        deferred: frozenset[int] = frozenset()
        if self._bindings.deferrals is not None and (out := self._bindings.find_deferred(plan.rows, packed)):
            deferred = frozenset(packed.sampled_rows[i] for i in out)
            forward = self._defer(plan.step, forward, out)
        launched = self._choose(plan, forward)
        launched.deferred = deferred
        if self._observers:
            self._observe(launched, forward)
        return launched

    def _defer(self, step: int, forward: Forward, out: list[int]) -> Forward:
        """The step without these samples, whose rows skip it."""
        packed, deferrals = forward.packed, self._bindings.deferrals
        assert deferrals is not None
        for i in out:
            deferrals.defer(step, packed.sampled_slots[i], packed.sampled_ends[i])
        if self._bitmask is not None:
            others = [i for i in range(len(packed.sampled_rows)) if i not in out]
            self._bitmask[: len(others)] = self._bitmask[others]
        return without(forward, out, self.worker.device)

    def _choose(self, plan: StepPlan, forward: Forward) -> LaunchedStep:
        """Start to choose the step's tokens."""
        packed = forward.packed
        rows = packed.sampled_rows
        launched = LaunchedStep(plan, rows=rows, ends=packed.sampled_ends)
        verifications: dict[int, Binding] = {}
        if self._bindings.matchers:
            launched.matchers = self._bindings.of(packed)
            launched.jumps = self._bindings.jumps(packed.sampled_slots)
            if self._bitmask is None:
                self._fill(launched.matchers)
            else:
                self._bindings.fill_late(self._bitmask, launched.matchers)
            launched.bitmask, self._bitmask = self._bitmask, None
            verifications = verifying(launched.matchers)
        else:
            launched.matchers, launched.jumps = [None] * len(rows), [None] * len(rows)
        if not rows:
            return launched
        logits = forward.logits[: len(rows)]  # behind these are those of drafts
        if verifications and (self.runs_ahead or self._observers):
            logits = logits.clone()  # other logits overwrite them before all tokens are final
        bitmask = None if launched.bitmask is None else launched.bitmask[: len(rows)]
        launched.sampled = sampled = self.sampler.sample(
            logits, packed.sampled_slots, packed.sampled_ends, bitmask, verifications
        )
        if verifications:
            self._unsettled = sampled, packed
            sampled.on_settled = partial(self._settled, plan.step, sampled, packed)
        return launched

    def _observe(self, launched: LaunchedStep, forward: Forward) -> None:
        """Have the observers read the step."""
        for kind in [*self._observers]:
            if (observation := self._observers[kind].observe(launched.plan, forward)) is not None:
                launched.observations.append(observation)
            self._drop_unused(kind)
        if launched.observations:
            launched.arrival = DeviceToHostEvent(self.worker.device)

    def _drop_unused(self, kind: Kind) -> None:
        if not self._observers[kind].logs:
            del self._observers[kind]

    def _settle(self) -> Sequence[int]:
        """Make the tokens of the last step final, before its slots change hands or the next step reads them.
        Returns the slots whose first token was replaced."""
        if self._unsettled is None:
            return ()
        sampled, packed = self._unsettled
        sampled.settle()
        return [packed.sampled_slots[i] for i in sampled.replaced]

    def _settled(self, step: int, sampled: SampledTokens, packed: PackedStep) -> None:
        """The tokens of a step are final. Rows that are undecided are deferred."""
        self._unsettled = None
        for i in sampled.undecided:
            assert self._bindings.deferrals is not None
            self._bindings.deferrals.defer(step, packed.sampled_slots[i], packed.sampled_ends[i])

    def ready(self, launched: LaunchedStep) -> bool:
        """Whether `finish` would return without waiting for the device."""
        return not self.runs_ahead or launched.ready

    def finish(self, launched: LaunchedStep) -> StepResult:
        """Wait for the step, read its tokens and advance the grammars by them."""
        result = launched.read(self._bindings.bring)
        if (experts := self.worker.expert_balance) is not None:
            result = msgspec.structs.replace(result, experts=experts)
        if launched.bitmask is not None:
            self._bitmasks.release(launched.bitmask)
        if result.deferred and self._bindings.deferrals is not None:
            self._bindings.deferrals.finished(result.step)
        return result


def by_tenant(plan: StepPlan, grammars: Mapping[GrammarSpec, Grammar]) -> dict[GrammarKey, Grammar]:
    """The grammars that a plan needs, if all tenants share them."""
    logs = (admission.log for admission in plan.admissions)
    return {(log.tenant, log.grammar): grammars[log.grammar] for log in logs if log.grammar is not None}
