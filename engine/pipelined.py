"""Steps of a model whose layers are divided into stages: several are in the stages at the same time.

A step's rows never continue those of a step that is still in the stages: the scheduler plans only rows whose
tokens are known, and leaves some rows for the steps behind (`micro_batches`). So the order is

    prepare, forward N+1 (the first stage)  ->  logits, masks and tokens of N, which the others have computed

With S stages a step is read once S - 1 others have been sent on. Its masks are made while it comes back.
"""

from collections import deque
from collections.abc import Callable, Mapping

from personae.engine.plan import StepPlan, StepResult
from personae.engine.step import StepEngine
from personae.engine.worker.worker import HiddenStates, PackedStep, Worker
from personae.grammar.matcher import Grammar
from personae.grammar.spec import GrammarKey


class StagedStep:
    """A step in the stages. `hidden`: what comes back; None if the plan has no rows. `result` is set once the
    step is read."""

    def __init__(self, plan: StepPlan, hidden: HiddenStates | None) -> None:
        self.plan, self.hidden = plan, hidden
        self.result: StepResult | None = None


class PipelinedEngine:
    """Executes plans in the given order, as `StepEngine` does, whose `engine` it has."""

    runs_ahead = False

    def __init__(self, engine: StepEngine) -> None:
        self.engine = engine
        self._in_stages: deque[StagedStep] = deque()

    @property
    def worker(self) -> Worker:
        """The worker of all ranks."""
        return self.engine.worker

    @property
    def deferred(self) -> bool:
        """See StepEngine."""
        return self.engine.deferred

    def resumable(self) -> tuple[str, ...]:
        """See StepEngine. None while a step is read and not finished: it may have deferred them."""
        return () if any(step.result is not None for step in self._in_stages) else self.engine.resumable()

    def prepare(self, plan: StepPlan, grammars: Mapping[GrammarKey, Grammar]) -> PackedStep | None:
        """See StepEngine. If a slot is released that has a row in the stages, as after a cancellation, the
        steps there are read first: their tokens are chosen with what the slot has."""
        if any(row.slot in plan.releases for step in self._in_stages for row in step.plan.rows):
            for step in self._in_stages:
                self._read(step)
        return self.engine.prepare(plan, grammars)

    def forward(self, packed: PackedStep | None, overlap: Callable[[], None]) -> HiddenStates | None:
        """Compute the first stage, and send the step on. `overlap` is called once after that."""
        hidden = None if packed is None else self.worker.forward(packed)
        overlap()
        return hidden

    def fill(self, packed: PackedStep | None) -> None:
        """Do nothing: a step's masks are made when it is read."""

    def sample(self, plan: StepPlan, hidden: HiddenStates | None) -> StagedStep:
        """Do nothing more: a step's tokens are chosen when it is read."""
        step = StagedStep(plan, hidden)
        self._in_stages.append(step)
        return step

    def ready(self, step: StagedStep) -> bool:
        """Whether `finish` would return without waiting for other stages."""
        return step.result is not None or step.hidden is None or step.hidden.arrived

    def finish(self, step: StagedStep) -> StepResult:
        """Wait for the oldest step, choose its tokens and advance the grammars by them."""
        oldest = self._in_stages.popleft()
        assert oldest is step, "steps are finished in order"
        return self._read(step)

    def _read(self, step: StagedStep) -> StepResult:
        if step.result is None:
            engine, forward = self.engine, None
            if step.hidden is not None:
                engine.fill(step.hidden.packed)
                forward = engine.logits(step.hidden)
            step.result = engine.finish(engine.sample(step.plan, forward))
        return step.result
