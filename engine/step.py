"""One step on the device, in five calls: `prepare`, `forward`, `fill`, `sample`, `finish`.

`prepare` and `fill` work on the host, `forward` and `sample` start work on the device, `finish` reads the
tokens. A caller may start step N+1 before it finishes step N, but only its forward pass, since the masks of
N+1 depend on the tokens of N. So the order is

    prepare, forward N+1  ->  finish N (read tokens, advance grammars), fill the masks of N+1  ->  sample N+1

and what stands between the arrows is hidden behind the forward pass. On a CPU the forward pass has a thread
for each core. There `forward` lets the other threads begin, does the hidden work on this one, and then joins
them: one thread more would take a core from one of them in the middle of its work, and all would wait.

Tokens of N that grammars have to be asked about before they are final are settled as late as possible: when
N+1 is prepared, before its forward pass is launched.

Rows of sequences that may have drafts (`speculation/`) begin where the step before has left them, and drafts
are made from its tokens. So N is read when N+1 is prepared, as far as such rows are concerned.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import msgspec
import numpy as np
import torch

from personae.engine.deferral import Deferrals
from personae.engine.device_event import DeviceToHostEvent
from personae.engine.exclusion import Exclusion, excludes
from personae.engine.logprobs import PromptLogprobs
from personae.engine.plan import StepPlan, StepResult
from personae.engine.prompt_logprobs import prompt_logprobs_of
from personae.engine.sampler import HostVerification, SampledTokens, Sampler, TokenChoices
from personae.engine.sequence import SequenceLog, TokenLogprobs
from personae.engine.speculation.forced import ForcedProposer, JumpForward, KnownToken, Retokenizer, jumps
from personae.engine.speculation.speculator import Speculator
from personae.engine.speculation.verification import DraftRow, Slots, verify
from personae.engine.worker.known import KnownTokens
from personae.engine.worker.worker import Forward, PackedStep, Worker
from personae.grammar.backend import Binding, BoundGrammar, Matcher
from personae.grammar.budget.matcher import BudgetMatcher
from personae.grammar.masks import BitmaskPool, fill_masks
from personae.grammar.reasoning.limit import LimitedMatcher
from personae.grammar.sandbox.masks import AnyGrammar, RemoteGrammar, RemoteMatcher
from personae.grammar.spec import GrammarKey, GrammarSpec
from personae.kernels.upload import upload

_REFUSED = "the grammar does not allow the sampled token {}"


def _nothing() -> None:
    """What is done beside a forward pass if nobody says."""


class Brought(NamedTuple):
    """What one row brought: tokens, or the reason why its sequence cannot go on."""

    tokens: tuple[int, ...] = ()
    failure: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose tokens are not read yet; `rows` are the plan's row indices that sample, `matchers` and
    `jumps` theirs at launch. `bitmask` is kept until the device has read it. `arrival`: of the prompts'
    log-probabilities. `deferred` are rows, by index in the plan, that sit it out. `drafts` are the rows with
    drafts, and `brought` what has been read before the step is finished, both by index among `rows`."""

    plan: StepPlan
    sampled: SampledTokens | None
    rows: list[int]
    matchers: list[Binding | None]
    jumps: list[JumpForward | None]
    bitmask: torch.Tensor | None
    prompt_logprobs: dict[int, PromptLogprobs]
    arrival: DeviceToHostEvent | None
    deferred: frozenset[int] = frozenset()
    ends: list[int] = field(default_factory=list)
    drafts: dict[int, DraftRow] = field(default_factory=dict)
    brought: dict[int, Brought] = field(default_factory=dict)
    drafted: dict[int, tuple[int, int]] = field(default_factory=dict)


class StepEngine:
    """Executes plans, in the order given: the worker, the sampler and the grammar matchers of every slot.

    `runs_ahead`: the device computes by itself, so that reading a step can wait until the next is launched.
    `retokenizer` is how forced text is written; without it none is. `speculator` makes drafts.
    """

    def __init__(
        self, worker: Worker, retokenizer: Retokenizer | None = None, speculator: Speculator | None = None
    ) -> None:
        self.worker = worker
        slots, vocab_size = worker.layout.max_seqs, worker.vocab_size
        self.sampler = Sampler(slots, vocab_size, worker.device, worker.commit)
        self._known = KnownTokens(slots, vocab_size)
        self._retokenizer = retokenizer
        self.runs_ahead = worker.device.type != "cpu"
        self._bitmask: torch.Tensor | None = None  # of the step whose forward pass has begun
        self._sampled: tuple[SampledTokens, int, PackedStep] | None = None  # the last, maybe not settled yet
        self._bitmasks = BitmaskPool(slots, vocab_size)
        self._logs: dict[int, SequenceLog] = {}
        self._matchers: dict[int, Binding] = {}
        self._jump_forwards: dict[int, JumpForward] = {}
        self._speculator = speculator
        self._last: LaunchedStep | None = None  # the last step, where there is a speculator
        self._clock = time.perf_counter
        self._begun = 0.0  # the last step's preparation, by that clock
        self._deferrals = Deferrals()

    @property
    def deferred(self) -> bool:
        """Whether rows sit out since their masks are still being made."""
        return bool(self._deferrals)

    def resumable(self) -> tuple[str, ...]:
        """The sequences that sat a step out that is finished, and whose masks have come since; each once."""
        return tuple(self._logs[slot].id for slot in self._deferrals.resumable(self._matchers))

    def prepare(self, plan: StepPlan, grammars: Mapping[GrammarKey, AnyGrammar]) -> PackedStep | None:
        """Apply the plan's changes and pack its rows, if it has any.

        `grammars` holds the compiled grammar of every admission that has a spec, by its tenant and spec.
        """
        if self._speculator is not None:
            self._collect(self._speculator)
            self._begun = self._clock()
        if plan.releases or plan.admissions:
            self._settle()
        for slot in plan.releases:
            if self._speculator is not None:
                self._speculator.release(slot)
            self.sampler.release(slot)
            self._logs.pop(slot, None)
            if isinstance(matcher := self._matchers.pop(slot, None), RemoteMatcher):
                self._deferrals.leave(slot, matcher)
            self._jump_forwards.pop(slot, None)
        for admission in plan.admissions:
            self._admit(admission.slot, admission.log, grammars)
        if plan.rows and self._speculator is not None:
            rows, self._known.guesses = self._speculator.resolve(plan.rows)
            plan = msgspec.structs.replace(plan, rows=rows)
        return self.worker.begin(plan, self._known)

    def _admit(self, slot: int, log: SequenceLog, grammars: Mapping[GrammarKey, AnyGrammar]) -> None:
        self._known.admit(slot, log)
        self._logs[slot] = log
        self.sampler.admit(slot, log)
        if log.grammar is not None:
            self._bind(slot, log, grammars[log.tenant, log.grammar])
        elif excludes(log.params):
            self._matchers[slot] = Exclusion(log, self.worker.vocab_size)
        if self._speculator is not None and log.params.speculate:
            self._follow(self._speculator, slot, log)

    def _follow(self, speculator: Speculator, slot: int, log: SequenceLog) -> None:
        """Make drafts for a sequence, but where masks come from another process."""
        matcher, forced = self._matchers.get(slot), None
        if isinstance(matcher, RemoteMatcher):
            return
        if log.grammar is not None and self._retokenizer is not None and slot not in self._jump_forwards:
            forced = ForcedProposer(cast(Matcher, matcher), self._retokenizer, log)
        speculator.admit(slot, log, forced)

    def _collect(self, speculator: Speculator) -> None:
        """What the last step brought to sequences that may have drafts, for which it is waited."""
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
                launched.brought[i] = found = self._bring(launched, i, read)
                brought = found.tokens
                accepted = launched.drafts[i].accepted if i in launched.drafts else 0
            drafted = speculator.brought(launched.plan.rows[index].slot, accepted, brought)
            if drafted is not None:
                launched.drafted[index] = drafted

    def _bind(self, slot: int, log: SequenceLog, grammar: AnyGrammar) -> None:
        longest = self.worker.layout.max_model_len
        if isinstance(grammar, RemoteGrammar):
            self._matchers[slot] = grammar.begin(log.budget(longest), log.tokens[log.prompt_length :])
            self._deferrals.count += 1
            return
        self._matchers[slot] = matcher = replayed(grammar, log, longest)
        if self._retokenizer is not None and jumps(log):
            limit = log.prompt_length + log.budget(longest)
            self._jump_forwards[slot] = jump = JumpForward(matcher, log, limit, self._retokenizer)
            self._known.extend(slot, len(log.tokens), jump.pending)

    def forward(self, packed: PackedStep | None, overlap: Callable[[], None] = _nothing) -> Forward | None:
        """Start the forward pass of what has been prepared. `overlap` is called once, while it runs: there
        the step before may be finished, and the masks be filled."""
        if packed is None:
            overlap()
            return None
        self._settle()
        if not self.runs_ahead:
            return self.worker.forward(packed, overlap, lambda: self._logit_mask(packed))
        launched = self.worker.forward(packed)
        overlap()
        return launched

    def fill(self, packed: PackedStep | None) -> None:
        """Have the grammars say what they allow in this step, where it has begun and the one before is
        finished. What is not filled when the step is sampled is filled then."""
        matchers = [] if packed is None else self._choosing(packed)
        if any(matchers):
            self._bitmask = self._bitmasks.acquire()
            fill_masks(self._bitmask, matchers)

    def _logit_mask(self, packed: PackedStep) -> torch.Tensor | None:
        """The logits that are looked at, as a bitmask: of tokens that may be chosen, and all of rows that
        want log-probabilities, or whose mask is not there yet. None: all."""
        if self._bitmask is None:
            return None
        slots = packed.sampled_slots
        logit_mask = self._bitmask[: len(slots)]
        whole = [row for row, slot in enumerate(slots) if self._logs[slot].params.logprobs is not None]
        if whole:
            logit_mask = logit_mask.clone()
            logit_mask[whole] = -1
        if packed.drafts:  # their masks are made when it is known that they are right
            drafts = logit_mask.new_full((len(packed.sampled) - len(slots), logit_mask.shape[1]), -1)
            logit_mask = torch.cat((logit_mask, drafts))
        return logit_mask

    def sample(self, plan: StepPlan, forward: Forward | None) -> LaunchedStep:
        """Fill the masks and start sampling. The tokens of the step before must have been read."""
        if forward is None:
            return LaunchedStep(plan, None, [], [], [], None, {}, None)
        if self._deferrals.count and (out := self._deferrals.sits_out(forward.packed, self._matchers)):
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
        matchers = self._choosing(forward.packed)
        sampled = None
        if self._bitmask is None:
            self.fill(forward.packed)
        elif self._deferrals.count:
            self._fill_late(matchers)
        bitmask, self._bitmask = self._bitmask, None
        if rows:
            verifying = ((row, _verifies(matcher)) for row, matcher in enumerate(matchers))
            verifications = {row: asked for row, asked in verifying if asked is not None}
            logits = forward.logits[: len(rows)] if forward.packed.drafts else forward.logits
            if verifications and any(
                self._logs[row.slot].params.prompt_logprobs is not None for row in plan.rows
            ):
                logits = logits.clone()  # the model writes the prompts' over them before all is chosen
            sampled = self.sampler.sample(
                logits,
                slots,
                forward.packed.sampled_ends,
                None if bitmask is None else bitmask[: len(rows)],
                verifications,
            )
            self._sampled = sampled, plan.step, forward.packed
        jumping = [self._jump_forwards.get(slot) for slot in slots]
        drafts = {}
        if forward.packed.drafts and sampled is not None:
            drafts = self._verify(forward, sampled, matchers, jumping)
        prompts = prompt_logprobs_of(plan, forward, self._logs, self.worker)
        arrival = DeviceToHostEvent(self.worker.device) if prompts else None
        ends = forward.packed.sampled_ends
        return LaunchedStep(
            plan, sampled, rows, matchers, jumping, bitmask, prompts, arrival, ends=ends, drafts=drafts
        )

    def _verify(
        self,
        forward: Forward,
        sampled: SampledTokens,
        matchers: list[Binding | None],
        jumps: list[JumpForward | None],
    ) -> dict[int, DraftRow]:
        """Choose the tokens behind drafts that are right."""
        packed = forward.packed
        rows = {
            i: DraftRow(packed.sampled_slots[i], packed.sampled_ends[i], drafts, first, matchers[i], jumps[i])
            for i, (drafts, first) in packed.drafts.items()
        }
        self._settle()
        assert self._speculator is not None
        slots = Slots(self._known.at, self._speculator.ends, self._known.extend)
        logits = forward.logits[len(packed.sampled_rows) :]
        verify(rows, sampled.read().tokens, logits, self.sampler, self._bitmasks, slots, _verifies)
        return rows

    def _fill_late(self, matchers: list[Binding | None]) -> None:
        """The masks that have come since the others were filled."""
        assert self._bitmask is not None
        for row, matcher in enumerate(matchers):
            if isinstance(matcher, RemoteMatcher):
                matcher.fill(self._bitmask.numpy(), row)

    def _sample_others(self, plan: StepPlan, forward: Forward, out: list[int]) -> LaunchedStep:
        """As `sample`, without the packed samples `out`: as if their rows were of prompts that go on."""
        packed = forward.packed
        others = [i for i in range(len(packed.sampled_rows)) if i not in out]
        if self._bitmask is not None:
            self._bitmask[: len(others)] = self._bitmask[others]
        for i in out:
            self._deferrals.defer(plan.step, packed.sampled_slots[i], packed.sampled_ends[i])
        fewer = replace(
            packed,
            sampled_rows=[packed.sampled_rows[i] for i in others],
            sampled_slots=[packed.sampled_slots[i] for i in others],
            sampled_ends=[packed.sampled_ends[i] for i in others],
            drafts={others.index(i): drafts for i, drafts in packed.drafts.items()},
        )
        behind = range(len(packed.sampled_rows), len(packed.sampled))
        logits = forward.logits[upload(np.array([*others, *behind], np.int64), self.worker.device)]
        launched = self._sample(plan, Forward(fewer, forward.hidden, logits))
        return replace(launched, deferred=frozenset(packed.sampled_rows[i] for i in out))

    def _choosing(self, packed: PackedStep) -> list[Binding | None]:
        """What binds the rows that choose a token, which may be known."""
        chosen = []
        for slot, end in zip(packed.sampled_slots, packed.sampled_ends, strict=True):
            known = self._known.at(slot, end)
            chosen.append(self._matchers.get(slot) if known is None else KnownToken(known))
        return chosen

    def _settle(self) -> None:
        """Make the tokens of the last step final. Those of which that is not known are missing."""
        if self._sampled is not None:
            sampled, step, packed = self._sampled
            self._sampled = None
            sampled.settle()
            for i in sampled.undecided:
                self._deferrals.defer(step, packed.sampled_slots[i], packed.sampled_ends[i])

    def ready(self, launched: LaunchedStep) -> bool:
        """Whether `finish` would not wait for the device."""
        there = launched.arrival is None or launched.arrival.reached
        return there and (launched.sampled is None or launched.sampled.ready)

    def finish(self, launched: LaunchedStep) -> StepResult:
        """Wait for the step and read its tokens, which the grammars take."""
        if self._last is launched and self._speculator is not None:
            self._collect(self._speculator)
        tokens: list[tuple[int, ...]] = [()] * len(launched.plan.rows)
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        failures: dict[int, str] = {}
        codes: dict[int, str] = {}
        deferred = launched.deferred
        if launched.sampled is not None:
            if self._sampled is not None and self._sampled[0] is launched.sampled:
                self._settle()
            read = launched.sampled.read()
            deferred |= {launched.rows[i] for i in read.undecided}
            logprobs = {launched.rows[i]: (entry,) for i, entry in read.logprobs.items()}
            for i, (row, matcher, token) in enumerate(
                zip(launched.rows, launched.matchers, read.tokens, strict=True)
            ):
                if matcher is None and token is not None and i not in launched.brought:
                    tokens[row] = (token,)
                    continue
                brought = launched.brought.get(i) or self._bring(launched, i, read)
                tokens[row] = brought.tokens
                if brought.failure is not None:
                    failures[row] = brought.failure
                if brought.code is not None:
                    codes[row] = brought.code
            for i, drafts in launched.drafts.items():
                if drafts.logprobs and launched.rows[i] in logprobs:
                    logprobs[launched.rows[i]] += tuple(drafts.logprobs)
        if launched.bitmask is not None:
            self._bitmasks.release(launched.bitmask)
        if launched.arrival is not None:
            launched.arrival.wait()
        prompts = {row: entries.read() for row, entries in launched.prompt_logprobs.items()}
        if deferred:
            self._deferrals.finished(launched.plan.step)
        return StepResult(
            launched.plan.step,
            tuple(tokens),
            logprobs,
            prompts,
            failures,
            codes,
            deferred,
            launched.drafted,
        )

    def _bring(self, launched: LaunchedStep, i: int, read: TokenChoices) -> Brought:
        """What the row of a sample brings; its grammar takes what it has not taken."""
        token, matcher, jump = read.tokens[i], launched.matchers[i], launched.jumps[i]
        if isinstance(matcher, KnownToken):
            assert jump is not None
            told, jump.pending = jump.pending, ()
            return Brought(told)
        if isinstance(matcher, RemoteMatcher) and matcher.failure is not None:
            return Brought(failure=matcher.failure, code=matcher.code)
        if token is None:
            return Brought(failure=read.failures.get(i))
        drafts = launched.drafts.get(i)
        tokens = (token,) if drafts is None else (token, *drafts.tokens)
        if drafts is not None and drafts.refused is not None:
            return Brought(failure=_REFUSED.format(drafts.refused))
        slot = launched.plan.rows[launched.rows[i]].slot
        if matcher is None or self._matchers.get(slot) is not matcher or (drafts and not drafts.open):
            return Brought(tokens)
        brought = self._take(slot, launched.ends[i] + len(tokens) - 1, matcher, jump, tokens[-1])
        if brought is None:
            return Brought(failure=_REFUSED.format(tokens[-1]))
        return Brought((*tokens[:-1], *brought))

    def _take(
        self, slot: int, position: int, matcher: Binding, jump: JumpForward | None, token: int
    ) -> tuple[int, ...] | None:
        """Have a row's grammar take its token. What this brings: the token, and those that are forced behind
        it. None if the grammar refuses it."""
        if jump is None:
            accepted = matcher.terminated or matcher.accept(token)  # after its end come stop tokens
            return (token,) if accepted else None
        brought = jump.take(token)
        if brought is not None and len(brought) > 1:
            self._known.extend(slot, position, brought)
        return brought


def _verifies(matcher: Binding | None) -> HostVerification | None:
    """Who is asked about the tokens of a row that this binds, if anybody is."""
    if isinstance(matcher, BudgetMatcher | LimitedMatcher | RemoteMatcher) and matcher.verifies:
        return matcher
    return None


def by_tenant(plan: StepPlan, grammars: Mapping[GrammarSpec, AnyGrammar]) -> dict[GrammarKey, AnyGrammar]:
    """The grammars that a plan needs, where all tenants share them."""
    logs = (admission.log for admission in plan.admissions)
    return {(log.tenant, log.grammar): grammars[log.grammar] for log in logs if log.grammar is not None}


def replayed(grammar: BoundGrammar, log: SequenceLog, max_model_len: int) -> Matcher:
    """A matcher that has seen what the log has emitted so far, and closes the answer in time."""
    matcher = grammar.matcher(log.budget(max_model_len))
    for token in log.tokens[log.prompt_length :]:
        if matcher.terminated:
            break  # what follows are stop tokens that ended nothing (`ignore_eos`, `min_tokens`)
        if not matcher.accept(token):
            raise AssertionError(f"sequence {log.id}: its log does not follow its own grammar")
    return matcher
