"""Where rows are costly, tenants with many answers have rows in turn, so that nobody's steps get long."""

import random
import statistics
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from personae.engine.params import SamplingParams
from personae.engine.plan import MemoryLayout, StepPlan, StepResult
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.row_shares import HOLD_STEPS
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.sequence import SequenceLog

FIXED, EACH = 0.0045, 0.001  # seconds of a step, and of a row: two cores, a model of 135M parameters
LONG = 4000


class Rows:
    """Plays steps with one plan ahead, and notes which tenants' rows they have."""

    def __init__(self, *, each: float = EACH, token: float = 0.0003, sharing: bool = True) -> None:
        layout = MemoryLayout(
            num_pages=20_000, page_size=16, max_seqs=64, max_model_len=8192, max_batch_tokens=512
        )
        self.each, self.token = each, token
        self.scheduler = Scheduler(layout, VirtualTokenCounters(), sharing=sharing)
        self.tenants: dict[int, str] = {}
        self.ids: dict[int, str] = {}
        self.planned: list[StepPlan] = []
        self.rows: list[Counter[str]] = []
        self.prompts: list[int] = []  # the tokens of prompts of each step
        self.tokens: Counter[str] = Counter()
        self.ended: set[str] = set()
        self.now = 0.0

    def rest(self, seconds: float) -> None:
        """So long nothing happens."""
        self.now += seconds
        self.scheduler.tick(self.now)

    def add(self, tenant: str, count: int, tokens: int = LONG, prompt: int = 8, weight: float = 1.0) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, seed=0, ignore_eos=True)
        for i in range(count):
            text = tuple(random.Random(f"{tenant}-{i}").choices(range(1000), k=prompt))
            salt = tenant.encode()
            self.scheduler.add(
                SequenceLog(f"{tenant}-{i}", text, prompt, params, tenant=tenant, salt=salt, weight=weight)
            )

    def step(self) -> None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.tenants |= {a.slot: a.log.tenant for a in plan.admissions}
            self.ids |= {a.slot: a.log.id for a in plan.admissions}
            self.planned.append(plan)
            self.rows.append(Counter(self.tenants[row.slot] for row in plan.rows))
            self.prompts.append(sum(row.count for row in plan.rows if row.count > 1))
        if len(self.planned) > 1 or (plan is None and self.planned):
            done = self.planned.pop(0)
            tokens = tuple((7,) if row.samples else () for row in done.rows)
            prompts = sum(row.count for row in done.rows if row.count > 1)
            decoding = sum(row.count == 1 for row in done.rows)
            took = FIXED + self.each * decoding + self.token * prompts
            for delta in self.scheduler.commit(StepResult(done.step, tokens), took):
                self.tokens[delta.id] += len(delta.tokens)
                if delta.finish:
                    self.ended.add(delta.id)
            self.rest(took)

    def play(self, steps: int) -> list[Counter[str]]:
        """The rows of so many steps."""
        begun = len(self.rows)
        for _ in range(steps):
            self.step()
        return self.rows[begun:]

    def seconds(self, rows: int) -> float:
        return FIXED + self.each * rows


def flooded(loud: int, **quiet: float) -> tuple[Rows, list[Counter[str]]]:
    """A tenant's many answers, then another's only one: the steps after a while."""
    here = Rows()
    here.add("loud", loud)
    here.play(50)
    here.add("quiet", 1, **quiet)
    here.play(50)
    return here, here.play(100)


@pytest.mark.parametrize("loud", [12, 20, 60])
def test_with_many_answers_of_one_tenant_anothers_step_takes_at_most_twice_as_long_as_alone(
    loud: int,
) -> None:
    here, steps = flooded(loud)
    assert all(rows["quiet"] == 1 for rows in steps)
    took = [here.seconds(rows.total()) for rows in steps]
    assert max(took) <= 2.1 * here.seconds(1)
    assert statistics.mean(took) > 1.7 * here.seconds(1), "and the other tenant has the rest"


def test_rows_that_are_left_out_have_their_turn() -> None:
    here, _ = flooded(20)
    before = here.tokens.copy()
    here.play(100)
    gained = [here.tokens[f"loud-{i}"] - before[f"loud-{i}"] for i in range(20)]
    assert min(gained) > 15
    assert max(gained) - min(gained) <= 2


def test_a_tenant_with_more_weight_waits_less() -> None:
    here, steps = flooded(20, weight=3.0)
    assert max(here.seconds(rows.total()) for rows in steps) <= 1.05 * 4 / 3 * here.seconds(1)


def test_tenants_with_as_many_answers_each_have_all_their_rows() -> None:
    here = Rows()
    for tenant in "abc":
        here.add(tenant, 10)
    here.play(60)
    assert all(rows == {"a": 10, "b": 10, "c": 10} for rows in here.play(50))


def test_many_tenants_with_an_answer_each_and_one_with_more_all_have_their_rows() -> None:
    here = Rows()
    for number in range(20):
        here.add(f"tenant {number}", 1)
    here.add("loud", 20)
    here.play(80)
    assert all(rows.total() == 40 for rows in here.play(50))


@pytest.mark.parametrize("each", [0.0, 0.00005])
def test_where_rows_cost_next_to_nothing_none_is_left_out_for_long(each: float) -> None:
    here = Rows(each=each)
    here.add("loud", 40)
    here.play(100)
    here.add("quiet", 1)
    here.play(100)
    steps = here.play(400)
    assert sum(rows["loud"] == 40 for rows in steps) > 0.97 * len(steps)


def test_a_tenant_alone_has_all_its_rows_and_as_many_steps_as_without_sharing() -> None:
    taken = []
    for sharing in (True, False):
        here = Rows(sharing=sharing)
        here.add("quiet", 1, 4)
        here.play(10)
        here.rest(10)
        here.add("loud", 40, 200)
        before = len(here.rows)
        while len(here.ended) < 41:
            here.step()
        taken.append(here.rows[before:])
    assert taken[0] == taken[1]


def test_ten_seconds_after_the_other_has_left_all_rows_are_there_again() -> None:
    here = Rows()
    here.add("quiet", 1, 60)
    here.add("loud", 40)
    while "quiet-0" not in here.ended:
        here.step()
    assert all(rows["loud"] < 40 for rows in here.play(200)), "it may come back"
    here.rest(10)
    here.play(1)
    assert all(rows["loud"] == 40 for rows in here.play(50))


def test_a_first_token_has_a_step_without_the_rows_of_many_answers_but_only_one_in_some() -> None:
    here = Rows()
    here.add("loud", 20)
    here.play(50)
    alone: list[int] = []
    for number in range(20):
        here.add(f"quiet {number}", 1, 1)
        alone += [rows["loud"] == 0 for rows in here.play(4)]
    held = [at for at, none in enumerate(alone) if none]
    assert held
    assert held[0] == 0, "the step after the arrival"
    assert all(later - earlier >= HOLD_STEPS for earlier, later in pairwise(held))


def test_a_long_prompt_whose_tokens_are_costly_has_few_in_a_step_beside_another_tenants_answer() -> None:
    here = Rows(token=0.0008)
    here.add("quiet", 1)
    here.play(50)
    here.add("loud", 1, 1, prompt=3000)
    before = len(here.rows)
    while "loud-0" not in here.ended:
        here.step()
    took = [FIXED + here.each + here.token * tokens for tokens in here.prompts[before + 4 :]]
    assert max(took) <= 2.3 * here.seconds(1)


def test_new_prompts_of_a_tenant_whose_rows_are_left_out_do_not_make_steps_long() -> None:
    here = Rows(token=0.0008)
    here.add("loud", 20)
    here.play(50)
    here.add("quiet", 1)
    here.play(50)
    before = len(here.rows)
    for number in range(20):
        params = SamplingParams(max_tokens=4, temperature=0.0, seed=0, ignore_eos=True)
        prompt = tuple(range(number, number + 60))
        here.scheduler.add(SequenceLog(f"new-{number}", prompt, 60, params, tenant="loud", salt=b"loud"))
        here.play(3)
    took = [
        here.seconds(rows.total()) + here.token * tokens
        for rows, tokens in zip(here.rows[before:], here.prompts[before:], strict=True)
    ]
    assert max(took) <= 3.6 * here.seconds(1), "with the rows of prompts, which count twice here"


@settings(max_examples=40)
@given(
    tenants=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 60), st.sampled_from([1.0, 2.0])),
        min_size=1,
        max_size=5,
    ),
    each=st.sampled_from([0.0, 0.0002, 0.001, 0.005]),
)
def test_for_any_mix_all_answers_end(tenants: list[tuple[int, int, float]], each: float) -> None:
    here = Rows(each=each)
    for number, (count, tokens, weight) in enumerate(tenants):
        here.add(f"tenant {number}", count, tokens, weight=weight)
        here.play(7)
    wanted = sum(count for count, _, _ in tenants)
    for _ in range(60 * wanted + 100):
        if len(here.ended) == wanted:
            break
        here.step()
    assert len(here.ended) == wanted
    here.play(3)
    here.scheduler.check_integrity()
    for number, (count, tokens, _) in enumerate(tenants):
        assert all(here.tokens[f"tenant {number}-{i}"] == tokens for i in range(count))


def test_where_the_rows_fill_a_step_prompts_of_the_same_tenant_have_their_tokens_in_every_other_one() -> None:
    here = Rows(token=0.0008)
    here.add("quiet", 1)
    here.play(20)
    here.add("loud", 40)
    here.play(50)
    before = len(here.rows)
    for number in range(60):
        params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
        prompt = tuple(range(number, number + 20))
        here.scheduler.add(SequenceLog(f"new-{number}", prompt, 20, params, tenant="loud", salt=b"loud"))
        here.play(2)
    prompts = here.prompts[before + 2 :]
    assert sum(prompts) > 200, "they go on"
    assert all(not first or not second for first, second in pairwise(prompts))
    took = [
        here.seconds(rows.total() - bool(tokens)) + here.token * tokens
        for rows, tokens in zip(here.rows[before + 2 :], prompts, strict=True)
    ]
    assert max(took) <= 2.6 * here.seconds(1)
