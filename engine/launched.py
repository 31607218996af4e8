"""A launched step, and reading its results."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from personae.engine.device_event import DeviceToHostEvent
from personae.engine.observer import Observation
from personae.engine.plan import Drafted, StepPlan, StepResult
from personae.engine.sampled_tokens import SampledTokens, TokenChoices
from personae.engine.sequence import TokenLogprobs
from personae.engine.speculation.forced import JumpForward
from personae.engine.speculation.verification import DraftRow
from personae.grammar.matcher import Binding


class Brought(NamedTuple):
    """The result of one row: tokens, or the reason why its sequence cannot go on."""

    tokens: tuple[int, ...] = ()
    failure: str | None = None
    code: str | None = None


@dataclass(slots=True)
class LaunchedStep:
    """A step whose tokens are not read yet.

    `rows` are the plan's row indices that sample, and `ends` the positions of their tokens; `matchers` and
    `jumps` are theirs at launch. `bitmask` is kept until the device has read it. `deferred` are the rows, by
    index in the plan, that this step skips. `observations` are on the host at `arrival`. `drafts` are the
    rows with drafts, and `brought` the results that are read before the step is finished, both by index among
    `rows`; `drafted` is what became of drafts, by row.
    """

    plan: StepPlan
    sampled: SampledTokens | None = None
    rows: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    matchers: list[Binding | None] = field(default_factory=list)
    jumps: list[JumpForward | None] = field(default_factory=list)
    bitmask: torch.Tensor | None = None
    deferred: frozenset[int] = frozenset()
    observations: list[Observation] = field(default_factory=list)
    arrival: DeviceToHostEvent | None = None
    drafts: dict[int, DraftRow] = field(default_factory=dict)
    brought: dict[int, Brought] = field(default_factory=dict)
    drafted: dict[int, Drafted] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """Whether `read` would return without waiting for the device."""
        there = self.arrival is None or self.arrival.reached
        return there and (self.sampled is None or self.sampled.ready)

    def read(self, bring: "Bring") -> StepResult:
        """Wait for the step and read it. `bring` returns the result of a row with a matcher."""
        tokens: list[tuple[int, ...]] = [()] * len(self.plan.rows)
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        failures: dict[int, str] = {}
        codes: dict[int, str] = {}
        deferred = self.deferred
        if self.sampled is not None:
            read = self.sampled.read()
            if read.undecided:
                deferred |= {self.rows[i] for i in read.undecided}
            if read.logprobs:
                logprobs = {self.rows[i]: (entry,) for i, entry in read.logprobs.items()}
            for i, (row, matcher, token) in enumerate(
                zip(self.rows, self.matchers, read.tokens, strict=True)
            ):
                if matcher is None and token is not None and i not in self.brought:
                    tokens[row] = (token,)
                    continue
                brought = self.brought.get(i) or bring(self, i, read)
                tokens[row] = brought.tokens
                if brought.failure is not None:
                    failures[row] = brought.failure
                if brought.code is not None:
                    codes[row] = brought.code
            for i, drafts in self.drafts.items():
                if drafts.logprobs and self.rows[i] in logprobs:
                    logprobs[self.rows[i]] += tuple(drafts.logprobs)
        result = StepResult(
            self.plan.step, tuple(tokens), logprobs, {}, failures, codes, deferred, self.drafted
        )
        if self.arrival is not None:
            self.arrival.wait()
            for observation in self.observations:
                result = observation(result)
        return result


Bring = Callable[[LaunchedStep, int, TokenChoices], Brought]
"""Returns the result of a sample's row, by its index among `LaunchedStep.rows`."""
