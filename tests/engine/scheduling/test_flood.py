"""What a flood costs another tenant and itself, where steps take what their rows and prompts take."""

import random
import statistics
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from itertools import accumulate

import pytest

from personae.engine.params import SamplingParams
from personae.engine.plan import MemoryLayout, StepPlan, StepResult
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.scheduling.slot_quota import RECENT_SECONDS
from personae.engine.sequence import SequenceLog

SLOTS = 16
LAYOUT = MemoryLayout(num_pages=1000, page_size=16, max_seqs=SLOTS, max_model_len=1024, max_batch_tokens=512)
SOON = 0.004  # before the end of a step the next is planned


def log(id: str, tenant: str, prompt: int, tokens: int) -> SequenceLog:
    text = tuple(random.Random(id).choices(range(1000), k=prompt))
    params = SamplingParams(max_tokens=tokens, temperature=0.0, seed=0, ignore_eos=True)
    return SequenceLog(id, text, prompt, params, tenant=tenant, salt=tenant.encode())


def seconds(plan: StepPlan) -> float:
    """As on two cores with a model of 135M parameters."""
    decoding = sum(row.count == 1 for row in plan.rows)
    return 0.012 + 0.0008 * decoding + 0.0003 * (sum(row.count for row in plan.rows) - decoding)


@dataclass
class Fixture:
    """Runs a scheduler's plans one after the other; the next is planned when one begins, or `late`, and again
    for what came after that if it `replans`."""

    scheduler: Scheduler
    late: bool
    replans: bool = False
    now: float = 0.0
    steps: list[float] = field(default_factory=list)
    first: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    tokens: int = 0

    def play(self, arrivals: list[tuple[float, SequenceLog]], until: float = 1e9) -> None:
        """Until all have ended, or so long."""
        waiting = deque(sorted(arrivals, key=lambda arrival: arrival[0]))
        planned: StepPlan | None = None

        def arrive(by: float) -> None:
            while waiting and waiting[0][0] <= by:
                self.scheduler.add(waiting.popleft()[1])

        while self.now < until:
            arrive(self.now)
            running = planned or self.scheduler.plan()
            if running is None:
                if not waiting:
                    return
                self.now = waiting[0][0]
                continue
            took = seconds(running) if running.rows else 0.0
            arrive(self.now + (max(took - SOON, 0.0) if self.late else 0.0))
            planned = self.scheduler.plan()
            if self.replans:
                arrive(self.now + took)
                planned = self.scheduler.replan() or planned
            self.now += took
            self.scheduler.tick(self.now)
            self.steps.append(took)
            tokens = tuple((7,) if row.samples else () for row in running.rows)
            for delta in self.scheduler.commit(StepResult(running.step, tokens), took):
                self.tokens += len(delta.tokens)
                if delta.tokens:
                    self.first.setdefault(delta.id, self.now)
                if delta.finish:
                    self.ended[delta.id] = self.now
            arrive(self.now)


def fixture(*, late: bool = True, sharing: bool = True, replans: bool = False) -> Fixture:
    return Fixture(Scheduler(LAYOUT, VirtualTokenCounters(), sharing=sharing), late, replans)


def quiet(begin: float, count: int, name: str) -> list[tuple[float, SequenceLog]]:
    """A request now and then, each after the one before has ended, for all that is known."""
    rng, at, found = random.Random(name), begin, []
    for i in range(count):
        at += rng.uniform(0.4, 0.6)
        found.append((at, log(f"{name}-{i}", "quiet", 64, 8)))
    return found


def waits(fixture: Fixture, arrivals: list[tuple[float, SequenceLog]]) -> list[float]:
    return sorted(fixture.first[each.id] - at for at, each in arrivals)


def flooded(*, late: bool = True, replans: bool = False) -> tuple[list[float], list[float], Fixture]:
    """The quiet tenant's waits alone and in the flood, and the fixture."""
    here = fixture(late=late, replans=replans)
    alone = quiet(0.0, 40, "alone")
    here.play(alone)
    here.steps.clear()
    load = [(here.now, log(f"flood-{i}", "loud", 64, 64)) for i in range(200)]
    overlap = quiet(here.now + 0.2, 25, "beside")
    here.play(load + overlap)
    assert here.ended.keys() >= {each.id for _, each in load + alone + overlap}
    assert here.now > overlap[-1][0], "it lasted"
    return waits(here, alone), waits(here, overlap), here


def test_in_a_flood_nobody_else_waits_more_than_twice_as_long_and_a_step() -> None:
    alone, overlap, here = flooded()
    assert overlap[-1] <= 2 * alone[-1] + statistics.mean(here.steps)


def test_the_step_of_another_tenants_prompt_has_none_of_a_tenant_over_quota_and_the_next_has_some_again() -> (
    None
):
    layout = replace(LAYOUT, max_batch_tokens=128)
    scheduler = Scheduler(layout, VirtualTokenCounters(), sharing=True)
    prompts: list[Counter[str]] = []

    def step() -> None:
        plan = scheduler.plan()
        assert plan is not None
        tenants.update((admission.slot, admission.log.tenant) for admission in plan.admissions)
        chunks = [row for row in plan.rows if row.count > 1]
        prompts.append(Counter(tenants[row.slot] for row in chunks for _ in range(row.count)))
        scheduler.commit(StepResult(plan.step, tuple((7,) if row.samples else () for row in plan.rows)), 0.03)

    tenants: dict[int, str] = {}
    for i in range(40):
        scheduler.add(log(f"flood-{i}", "loud", 900, 8))
    scheduler.add(log("before", "quiet", 16, 1))
    for _ in range(4):
        step()
    for i in range(4):
        scheduler.add(log(f"beside-{i}", "quiet", 60, 1))
        step()
    assert [each["quiet"] for each in prompts[4:]] == [60] * 4
    assert [bool(each["loud"]) for each in prompts[4:]] == [False, True] * 2


def test_a_step_planned_late_saves_most_of_one_for_who_comes_meanwhile() -> None:
    (_, late, here), (_, soon, _) = flooded(), flooded(late=False)
    saved = statistics.mean(soon) - statistics.mean(late)
    assert 0.6 < saved / statistics.mean(here.steps) < 1.1


def test_a_request_that_comes_after_the_next_step_was_planned_waits_for_the_running_one_only() -> None:
    _, overlap, here = flooded(late=False, replans=True)
    assert overlap[-1] <= 2 * max(here.steps)
    _, without, _ = flooded(late=False)
    assert statistics.mean(without) > statistics.mean(overlap) + 0.7 * statistics.mean(here.steps)


def test_prompts_of_a_tenant_over_quota_are_spread_and_it_is_hardly_slower_for_it() -> None:
    def alone(*, sharing: bool) -> Fixture:
        here = fixture(sharing=sharing)
        here.play(quiet(0.0, 5, "before"))
        here.steps.clear()
        here.play([(here.now, log(f"flood-{i}", "loud", 64, 64)) for i in range(200)])
        return here

    spread, plain = alone(sharing=True), alone(sharing=False)
    full = 0.012 + 0.0008 * SLOTS
    soon = sum(at < RECENT_SECONDS for at in accumulate(spread.steps))
    assert max(spread.steps[64:soon]) < 1.8 * full, "once it is known what a prompt takes"
    assert max(plain.steps[64:]) > 3 * full
    assert sum(spread.steps) < 1.05 * sum(plain.steps)


@pytest.mark.parametrize("prompt", [64, 900])
def test_a_tenant_that_is_alone_is_not_slowed_down(prompt: int) -> None:
    load = [(0.0, log(f"flood-{i}", "loud", prompt, 8)) for i in range(50)]
    both = [fixture(sharing=sharing) for sharing in (True, False)]
    for here in both:
        here.play(load)
    assert both[0].steps == both[1].steps


def test_long_prompts_of_a_tenant_over_quota_go_on_though_others_come_all_the_time() -> None:
    here = fixture()
    here.play(quiet(0.0, 5, "before"))
    begun = here.now
    load = [(begun, log(f"flood-{i}", "loud", 900, 8)) for i in range(30)]
    here.play(load + quiet(begun, 200, "beside"))
    plain = fixture(sharing=False)
    plain.play([(0.0, each) for _, each in load])
    taken = max(here.ended[each.id] for _, each in load) - begun
    assert taken < 2 * plain.now
