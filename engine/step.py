"""One step on the device, in two halves: `launch` starts it, `finish` reads what came out.

Between the two the device computes. The caller may launch step N+1 before it finishes step N, but then only up
to its forward pass: the masks of N+1 depend on the tokens of N. So the order on a device that runs by itself is

    forward N+1  ->  finish N (read tokens, advance grammars)  ->  fill masks, sample N+1

and that is why `launch` itself comes in two: `forward`, then `sample`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from personae.engine.plan import StepPlan, StepResult
from personae.engine.runner import Forward, Runner
from personae.engine.sampler import Sampled, Sampler, prompt_logprobs
from personae.engine.sequence import SequenceLog, TokenLogprobs
from personae.grammar.backend import CompiledGrammar, Matcher
from personae.grammar.masks import Bitmask
from personae.grammar.spec import GrammarSpec

PROMPT_LOGITS_ROWS = 256  # logits of prompt tokens are made this many at a time, to bound memory


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose tokens are not read yet; `matchers` are those of its sampled rows at launch."""

    plan: StepPlan
    sampled: Sampled | None
    rows: list[int]
    matchers: list[Matcher | None]
    prompt_logprobs: dict[int, tuple[TokenLogprobs | None, ...]]


class StepEngine:
    """Executes plans, in the order given: the runner, the sampler and the grammar matchers of every slot."""

    def __init__(self, runner: Runner, sampler: Sampler, bitmask: Bitmask) -> None:
        self.runner = runner
        self.sampler = sampler
        self.bitmask = bitmask
        self._logs: dict[int, SequenceLog] = {}
        self._matchers: dict[int, Matcher] = {}

    def forward(self, plan: StepPlan, grammars: Mapping[GrammarSpec, CompiledGrammar]) -> Forward:
        """Apply the plan's changes and start its forward pass.

        `grammars` holds the compiled grammar of every admission that has a spec.
        """
        for slot in plan.releases:
            self.sampler.release(slot)
            self._logs.pop(slot, None)
            self._matchers.pop(slot, None)
        for admission in plan.admissions:
            log = admission.log
            self._logs[admission.slot] = log
            self.sampler.admit(admission.slot, log)
            self._matchers.pop(admission.slot, None)
            if log.grammar is not None:
                self._matchers[admission.slot] = replayed(grammars[log.grammar], log)
        self.runner.apply(plan)
        return self.runner.forward(plan)

    def sample(self, plan: StepPlan, forward: Forward) -> Launched:
        """Fill the masks and start sampling. The tokens of the step before must have been read."""
        rows = forward.packed.sampled_rows
        matchers = [self._matchers.get(plan.rows[i].slot) for i in rows]
        sampled = None
        if rows:
            sampled = self.sampler.sample(
                forward.logits,
                [plan.rows[i].slot for i in rows],
                [plan.rows[i].start + plan.rows[i].count for i in rows],
                self.bitmask.fill(matchers),
            )
        return Launched(plan, sampled, rows, matchers, self._prompt_logprobs(plan, forward))

    def finish(self, launched: Launched) -> StepResult:
        """Wait for the step, read its tokens, advance the grammars by them."""
        tokens: list[int | None] = [None] * len(launched.plan.rows)
        logprobs: dict[int, TokenLogprobs] = {}
        failures: dict[int, str] = {}
        if launched.sampled is not None:
            read = launched.sampled.read()
            for i, (row, matcher) in enumerate(zip(launched.rows, launched.matchers, strict=True)):
                tokens[row] = read.tokens[i]
                if i in read.failures:
                    failures[row] = read.failures[i]
                elif matcher is not None and not matcher.terminated and not matcher.accept(read.tokens[i]):
                    failures[row] = f"the grammar does not allow the sampled token {read.tokens[i]}"
                if i in read.logprobs:
                    logprobs[row] = read.logprobs[i]
        return StepResult(launched.plan.step, tuple(tokens), logprobs, launched.prompt_logprobs, failures)

    def _prompt_logprobs(
        self, plan: StepPlan, forward: Forward
    ) -> dict[int, tuple[TokenLogprobs | None, ...]]:
        """For each row that asks: an entry per prompt token that this chunk's logits (or none) precede."""
        found: dict[int, tuple[TokenLogprobs | None, ...]] = {}
        for packed_row, index in enumerate(forward.packed.order):
            row = plan.rows[index]
            log = self._logs[row.slot]
            top = log.params.prompt_logprobs
            if top is None or row.start >= log.prompt_length:
                continue
            targets = log.tokens[row.start + 1 : min(row.start + row.count + 1, log.prompt_length)]
            first = forward.packed.offsets[packed_row]
            entries: list[TokenLogprobs | None] = [None] if row.start == 0 else []
            for done in range(0, len(targets), PROMPT_LOGITS_ROWS):
                wanted = targets[done : done + PROMPT_LOGITS_ROWS]
                hidden = forward.hidden[first + done : first + done + len(wanted)]
                entries += prompt_logprobs(
                    self.runner.model.logits(hidden), torch.tensor(wanted, device=hidden.device), top
                )
            found[index] = tuple(entries)
        return found


def replayed(grammar: CompiledGrammar, log: SequenceLog) -> Matcher:
    """A matcher that has seen what the log has emitted so far."""
    matcher = grammar.matcher()
    for token in log.tokens[log.prompt_length :]:
        if not matcher.accept(token):
            raise AssertionError(f"sequence {log.id}: its log does not follow its own grammar")
    return matcher
