"""The next step is planned when the running one is about to end, and includes sequences that arrived by
then."""

import math
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio
import anyio.lowlevel
import pytest
from recorders import RecordingRef
from virtual_clock import virtual_clock

from personae.actors.enginecore import scheduler
from personae.actors.enginecore.planned_step import PlannedStep
from personae.actors.enginecore.scheduler import SchedulerActor
from personae.actors.kit.mailbox import Ref
from personae.actors.kit.supervisor import Supervisor
from personae.actors.messages import Execute, Message, StepDone, StepFinished, Submit
from personae.engine.params import SamplingParams
from personae.engine.plan import MemoryLayout, Row, StepPlan, StepResult
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.sequence import SequenceLog
from personae.engine.stats import StepSample, StepTimings
from personae.grammar.matcher import Grammar
from personae.grammar.spec import GrammarKey

pytestmark = virtual_clock
LAYOUT = MemoryLayout(num_pages=64, page_size=16, max_seqs=4, max_model_len=512, max_batch_tokens=64)


class Fixture(NamedTuple):
    scheduler: Ref[Message]
    executor: RecordingRef
    streamer: RecordingRef

    async def submit(self, id: str, tenant: str = "default") -> None:
        params = SamplingParams(max_tokens=400, seed=0, ignore_eos=True)
        self.scheduler.tell(Submit((SequenceLog(id, (1, 2, 3), 3, params, tenant=tenant),), 1))
        await settled()

    async def end(self, plan: StepPlan, seconds: float) -> None:
        """End the step, which took this long."""
        result = StepResult(plan.step, tuple((5,) for _ in plan.rows))
        self.scheduler.tell(StepFinished(result, seconds, 0.0, StepTimings()))
        await settled()

    @property
    def plans(self) -> list[StepPlan]:
        return [step.plan for step in self.steps]

    @property
    def steps(self) -> list[PlannedStep]:
        return [message.step for message in self.executor if isinstance(message, Execute)]


async def settled() -> None:
    for _ in range(30):
        await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def fixture(*, late: bool) -> AsyncIterator[Fixture]:
    executor, streamer, other = RecordingRef(), RecordingRef(), RecordingRef()
    top = Supervisor("top", max_restarts=0)
    scheduler: Ref[Message] = top.spawn(
        "scheduler",
        lambda: SchedulerActor(
            Scheduler(LAYOUT, VirtualTokenCounters(), sharing=True),
            1,
            other,
            executor,
            streamer,
            other,
            late=late,
        ),
    )
    async with top:
        yield Fixture(scheduler, executor, streamer)


async def learnt(h: Fixture, seconds: float) -> StepPlan:
    """Let some steps take this long. Returns the one that has just begun."""
    await h.submit("first")
    for step in range(10):
        await anyio.sleep(seconds)
        await h.end(h.plans[step], seconds)
    return h.plans[10]


async def test_a_sequence_that_arrives_during_a_step_is_in_the_next() -> None:
    async with fixture(late=True) as h:
        running = await learnt(h, 0.1)
        assert len(h.plans) == running.step + 1, "nothing is planned yet"
        await anyio.sleep(0.05)
        await h.submit("second")
        assert len(h.plans) == running.step + 1
        await anyio.sleep(0.045)
        assert len(h.plans) == running.step + 2, "before it has ended"
        assert [admission.log.id for admission in h.plans[-1].admissions] == ["second"]


async def test_after_a_step_that_ends_early_the_next_is_planned_at_once() -> None:
    async with fixture(late=True) as h:
        running = await learnt(h, 0.1)
        await anyio.sleep(0.02)
        await h.end(running, 0.02)
        assert len(h.plans) == running.step + 2
        await anyio.sleep(0.07)  # when the other step would have been about to end
        assert len(h.plans) == running.step + 2, "the new one runs, and is expected to take longer"


@pytest.mark.parametrize(("late", "seconds"), [(False, 0.1), (True, 0.003), (True, 0.006)])
async def test_short_steps_and_devices_that_run_ahead_are_planned_for_at_once(
    late: bool, seconds: float
) -> None:
    async with fixture(late=late) as h:
        await h.submit("first")
        for step in range(10):
            assert len(h.plans) == step + 2
            await h.end(h.plans[step], seconds)


async def test_a_clock_of_whole_milliseconds_misses_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "current_time", lambda: math.floor(anyio.current_time() * 1000) / 1000)
    async with fixture(late=True) as h:
        await learnt(h, 0.0203)
        assert len(h.plans) == 11
        await anyio.sleep(0.0203)
        assert len(h.plans) == 12


@pytest.mark.parametrize("late", [False, True])
async def test_every_step_that_ended_is_told_once_with_its_own_rows_and_tokens(late: bool) -> None:
    async with fixture(late=late) as h:
        await h.submit("first")
        await h.submit("second")
        step = 0
        while step < len(h.plans) < 9:
            await anyio.sleep(0.1)
            await h.end(h.plans[step], 0.1 + step)
            step += 1
        told = [each for message in h.streamer if isinstance(message, StepDone) for each in message.steps]
    sizes = [(len(plan.rows), sum(row.count for row in plan.rows)) for plan in h.plans[:step]]
    assert told == [StepSample(1, *size, 0.1 + place) for place, size in enumerate(sizes)]
    assert {(1, 3), (2, 2)} <= set(sizes)


@pytest.mark.parametrize("late", [False, True])
async def test_a_tenants_first_sequence_is_in_the_step_that_was_planned_before_it_came(late: bool) -> None:
    async with fixture(late=late) as h:
        running = await learnt(h, 0.1)
        h.steps[running.step].begin()
        await anyio.sleep(0.095)
        assert len(h.plans) == running.step + 2
        assert not h.plans[-1].admissions
        await h.submit("second", "other")
        assert len(h.plans) == running.step + 2
        assert [admission.log.id for admission in h.plans[-1].admissions] == ["second"]
        assert [(row.slot, row.count) for row in h.plans[-1].rows] == [(0, 1), (1, 3)]
        await anyio.sleep(0.005)
        await h.end(running, 0.1)
        await anyio.sleep(0.1)
        await h.end(h.plans[running.step + 1], 0.1)
        told = [message for message in h.streamer if isinstance(message, StepDone)]
        assert [id for message in told for id in message.admitted] == ["first", "second"]
        assert [(each.rows, each.tokens) for each in told[-1].steps] == [(2, 4)]


async def test_a_step_that_has_begun_is_not_planned_again() -> None:
    async with fixture(late=True) as h:
        running = await learnt(h, 0.1)
        await anyio.sleep(0.095)
        plan, _ = h.steps[-1].begin()
        await h.submit("second", "other")
        assert h.plans[running.step + 1] is plan
        assert not plan.admissions


async def test_a_step_is_not_planned_again_for_a_tenant_that_has_a_row_in_it() -> None:
    async with fixture(late=True) as h:
        await learnt(h, 0.1)
        await h.submit("other", "other")
        await anyio.sleep(0.095)
        plan = h.plans[-1]
        await h.submit("second")
        assert h.plans[-1] is plan


async def test_whoever_begins_a_step_while_it_is_replaced_gets_the_new_plan() -> None:
    before, after = StepPlan(1, ()), StepPlan(1, (Row(0, 0, 1, True),))
    step = PlannedStep(before, {})
    seen: list[StepPlan] = []
    executor = threading.Thread(target=lambda: seen.append(step.begin()[0]))

    def make() -> tuple[StepPlan, dict[GrammarKey, Grammar]]:
        executor.start()
        return after, {}

    assert step.replace(make) is after
    executor.join()
    assert seen == [after]
    assert step.replace(lambda: (before, {})) is None, "it has begun"
    assert step.plan is after
