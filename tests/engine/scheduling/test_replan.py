"""A step that is planned and has not begun is planned again for a tenant's first request."""

from collections import deque

import pytest
from fake_executor import Bench, FakeExecutor, make_log, solo
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from personae.engine.plan import MemoryLayout, StepPlan
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.sequence import SequenceLog


class Ahead:
    """One step runs and the next is planned, as the executor has them."""

    def __init__(self, *, pages: int = 700, slots: int = 16, drafts: int = 0) -> None:
        layout = MemoryLayout(pages, 4, slots, 400, 64)
        scheduler = Scheduler(layout, VirtualTokenCounters(), sharing=True, drafts=drafts)
        self.it = Bench(scheduler, FakeExecutor(layout, speculates=drafts > 0), 2)
        self.plans: deque[StepPlan] = deque()
        self.slots: dict[int, str] = {}
        self.logs: dict[str, SequenceLog] = {}

    def add(self, id: str, tenant: str, prompt: int, answer: int = 8, **options: object) -> None:
        tokens = [len(self.logs), *range(prompt - 1)]
        log = make_log(id, tokens, max_tokens=answer, tenant=tenant, ignore_eos=True, **options)
        self.logs[id] = log
        self.it.add(log)

    def fill(self) -> None:
        """Plan until one step runs and one waits."""
        while len(self.plans) < 2 and (plan := self.it.plan()) is not None:
            self._note(plan)
            self.plans.append(plan)

    def step(self) -> None:
        """The running step ends."""
        self.fill()
        if self.plans:
            self.it.commit(seconds(self.plans.popleft()))
        self.fill()

    def replan(self) -> bool:
        if (plan := self.it.replan()) is None:
            return False
        self._note(plan)
        self.plans[-1] = plan
        return True

    def _note(self, plan: StepPlan) -> None:
        self.slots |= {admission.slot: admission.log.id for admission in plan.admissions}

    @property
    def next(self) -> dict[str, int]:
        """The tokens of each sequence in the step that has not begun."""
        return {self.slots[row.slot]: row.count for row in self.plans[-1].rows}

    def end(self) -> None:
        """Every sequence ends with the tokens that it would have alone."""
        while self.plans:
            self.it.commit(seconds(self.plans.popleft()))
        self.it.run()
        for id, log in self.logs.items():
            assert self.it.brought[id].tokens == solo(log, 400).tokens


def seconds(plan: StepPlan) -> float:
    decoding = sum(row.count == 1 for row in plan.rows)
    return 0.0045 + 0.001 * decoding + 0.0008 * (sum(row.count for row in plan.rows) - decoding)


@settings(max_examples=150)
@given(
    mix=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 150), st.integers(1, 20)), min_size=1, max_size=10
    ),
    steps=st.integers(0, 40),
    prompt=st.integers(1, 8),
    drafts=st.sampled_from([0, 0, 3]),
    forced=st.booleans(),
)
def test_for_any_mix_a_tenants_first_request_has_its_chunk_in_the_next_step_that_begins(
    mix: list[tuple[str, int, int]], steps: int, prompt: int, drafts: int, forced: bool
) -> None:
    here = Ahead(drafts=drafts)
    for index, (tenant, length, answer) in enumerate(mix):
        here.add(f"{tenant}-{index}", tenant, length, answer, jump_forward=forced)
    for _ in range(steps):
        here.step()
    here.fill()
    assume(len(here.plans) == 2)
    begun = here.plans[0]
    here.add("new", "d", prompt)
    assert here.replan()
    assert here.plans[0] is begun
    assert here.next["new"] == prompt
    here.it.scheduler.check_integrity()
    here.end()


def test_the_step_that_is_planned_again_has_no_rows_of_a_tenant_with_many() -> None:
    here = Ahead()
    here.add("quiet", "quiet", 5, 3)
    for i in range(12):
        here.add(f"loud-{i}", "loud", 6, 300)
    for _ in range(60):
        here.step()
    before = len(here.next)
    here.add("again", "quiet", 5)
    assert here.replan()
    assert here.next["again"] == 5
    brought_pages = sum(bool(row.pages) for row in here.plans[-1].rows) - 1
    assert len(here.next) == 1 + brought_pages < before
    here.end()


def test_a_long_prompt_that_the_plan_admits_has_one_token_in_the_step_that_is_planned_again() -> None:
    here = Ahead()
    here.add("first", "loud", 5, 1)
    here.fill()
    here.add("long", "loud", 300)
    here.fill()
    assert here.next == {"long": 64}
    here.add("short", "quiet", 5)
    assert here.replan()
    assert here.next == {"long": 1, "short": 5}
    here.end()


def test_a_step_is_not_planned_again_for_more_of_a_tenant_or_without_room() -> None:
    here = Ahead(slots=2)
    here.add("a", "a", 5, 30)
    for _ in range(3):
        here.step()
    here.add("a again", "a", 5, 30)
    assert not here.replan()
    here.add("b", "b", 5, 30)
    here.step()
    here.step()
    here.add("c", "c", 5, 30)
    assert not here.replan(), "two tenants have a slot each"
    here.end()


def test_the_step_that_is_planned_again_takes_a_slot_from_a_tenant_with_many() -> None:
    here = Ahead(slots=4)
    for i in range(6):
        here.add(f"loud-{i}", "loud", 5, 30)
    for _ in range(4):
        here.step()
    assert here.it.scheduler.running == 4
    here.add("short", "quiet", 5)
    assert here.replan()
    assert here.next["short"] == 5
    assert here.it.scheduler.counters.preemptions == 1
    here.end()


def test_a_step_is_not_planned_again_after_a_sequence_in_it_has_ended() -> None:
    here = Ahead()
    here.add("stays", "a", 5, 30)
    here.add("goes", "a", 5, 30)
    for _ in range(3):
        here.step()
    assert here.it.cancel("goes")
    here.add("b", "b", 5)
    assert not here.replan(), "its row still writes to pages that are free"
    here.step()
    here.logs.pop("goes")
    here.end()


@pytest.mark.parametrize("times", [2, 5])
def test_a_step_may_be_planned_again_several_times(times: int) -> None:
    here = Ahead()
    for i in range(6):
        here.add(f"loud-{i}", "loud", 10, 40)
    for _ in range(12):
        here.step()
    for number in range(times):
        here.add(f"new-{number}", f"tenant-{number}", 3)
        assert here.replan()
    assert {f"new-{number}" for number in range(times)} <= here.next.keys()
    here.end()
