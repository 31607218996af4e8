"""Prompt tokens of a step are shared over tenants: no prompt has a right because it has begun."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from personae.engine.params import SamplingParams
from personae.engine.plan import MemoryLayout, StepPlan, StepResult
from personae.engine.scheduling.background import TieredPolicy
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.sequence import SequenceLog


def scheduler(tokens: int, slots: int = 16) -> Scheduler:
    layout = MemoryLayout(
        num_pages=10_000, page_size=16, max_seqs=slots, max_model_len=16_384, max_batch_tokens=tokens
    )
    policy = TieredPolicy(VirtualTokenCounters(), VirtualTokenCounters())
    return Scheduler(layout, policy, sharing=True)


def log(id: str, tenant: str, prompt: int, tokens: int = 8, **options: object) -> SequenceLog:
    text = tuple(random.Random(id).choices(range(1000), k=prompt))
    params = SamplingParams(max_tokens=tokens, temperature=0.0, seed=0, ignore_eos=True, **options)
    return SequenceLog(id, text, prompt, params, tenant=tenant, salt=tenant.encode())


class Played:
    """Plans and commits steps, with one plan always ahead."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.ids: dict[int, str] = {}
        self.planned: list[StepPlan] = []
        self.prompts: Counter[str] = Counter()
        self.ended: set[str] = set()
        self.now = 0.0

    def step(self) -> set[str]:
        """Plan a step and commit the one before. Returns the ids of its rows."""
        plan = self.scheduler.plan()
        if plan is not None:
            self.ids |= {admission.slot: admission.log.id for admission in plan.admissions}
            self.planned.append(plan)
            for row in plan.rows:
                if row.count > 1:
                    self.prompts[self.ids[row.slot]] += row.count
        found = set() if plan is None else {self.ids[row.slot] for row in plan.rows}
        if len(self.planned) > 1 or (plan is None and self.planned):
            self.commit()
        return found

    def commit(self) -> None:
        """The oldest plan's result."""
        plan = self.planned.pop(0)
        decoding = sum(row.count == 1 for row in plan.rows)
        seconds = 0.012 + 0.0008 * decoding + 0.0003 * (sum(row.count for row in plan.rows) - decoding)
        tokens = tuple((7,) if row.samples else () for row in plan.rows)
        deltas = self.scheduler.commit(StepResult(plan.step, tokens), seconds)
        self.ended |= {delta.id for delta in deltas if delta.finish}
        self.now += seconds
        self.scheduler.tick(self.now)

    def until(self, id: str, most: int = 5000) -> int:
        """Steps until it has ended."""
        for count in range(1, most):
            self.step()
            if id in self.ended:
                return count
        raise AssertionError(f"{id} has not ended after {most} steps")


@pytest.mark.parametrize("tokens", [64, 512, 2048])
@pytest.mark.parametrize("options", [{}, {"prompt_logprobs": 20}], ids=["plain", "prompt logprobs"])
@pytest.mark.parametrize("begun", [0, 1, 3])
def test_a_short_prompt_has_its_chunk_in_the_next_step_whatever_has_begun(
    tokens: int, options: dict[str, int], begun: int
) -> None:
    here = Played(scheduler(tokens))
    for i in range(6):
        here.scheduler.add(log(f"long-{i}", "loud", 8000, **options))
    for _ in range(begun):
        here.step()
    here.scheduler.add(log("short", "quiet", 21))
    assert "short" in here.step()
    assert here.prompts["short"] == 21


def test_a_long_prompt_alone_takes_as_many_steps_as_without_shares() -> None:
    here = Played(scheduler(512))
    here.scheduler.add(log("long", "loud", 8000, 1))
    assert here.until("long") == -(-8000 // 512) + 1  # one plan is ahead


@pytest.mark.parametrize("prompt", [250, 16_000])
@pytest.mark.parametrize("options", [{}, {"prompt_logprobs": 20}, {"pooling": "last"}], ids=str)
def test_prompts_have_short_steps_until_the_others_have_been_away_for_ten_seconds(
    prompt: int, options: dict[str, object]
) -> None:
    here = Played(scheduler(512))
    here.scheduler.add(log("short", "quiet", 21, 40))
    here.until("short")
    left, longest = here.now, Counter[bool]()
    for number in range(400):
        here.scheduler.add(log(f"long-{number}", "loud", prompt, 1, **options))
        while f"long-{number}" not in here.ended:
            here.step()
            if here.planned and number:
                tokens = sum(row.count for row in here.planned[-1].rows)
                longest[here.now > left + 10] = max(longest[here.now > left + 10], tokens)
        if here.now > left + 12:
            break
    assert longest[False] <= 48, "a step takes at most twice as long as one with a row"
    assert longest[True] == min(prompt, 512)


def test_two_long_prompts_of_two_tenants_go_on_side_by_side() -> None:
    here = Played(scheduler(256))
    here.scheduler.add(log("first", "a", 8000))
    for _ in range(4):
        here.step()
    begun = here.prompts["first"]
    here.scheduler.add(log("second", "b", 8000))
    for _ in range(20):
        here.step()
        assert abs(here.prompts["first"] - begun - here.prompts["second"]) <= 2 * 256


def test_a_long_prompt_has_a_page_in_every_other_step_though_short_ones_come_in_each() -> None:
    here = Played(scheduler(512))
    here.scheduler.add(log("long", "loud", 8000, 1))
    for count in range(2 * 8000 // 16 + 4):
        here.scheduler.add(log(f"short-{count}", "quiet", 21, 1))
        here.step()
        if "long" in here.ended:
            return
    raise AssertionError("it waits longer")


def mixes() -> st.SearchStrategy[list[tuple[str, int, int]]]:
    """Requests of three tenants: prompts and answers."""
    return st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 1500), st.integers(1, 20)), min_size=1, max_size=10
    )


@settings(max_examples=100)
@given(mix=mixes(), steps=st.integers(0, 40), tokens=st.sampled_from([64, 128, 512]))
def test_for_any_mix_a_request_under_its_share_has_its_first_chunk_in_the_next_step(
    mix: list[tuple[str, int, int]], steps: int, tokens: int
) -> None:
    here = Played(scheduler(tokens))
    for index, (tenant, prompt, answer) in enumerate(mix):
        here.scheduler.add(log(f"{tenant}-{index}", tenant, prompt, answer))
    for _ in range(steps):
        here.step()
    here.scheduler.add(log("short", "d", tokens // 8))
    assert "short" in here.step()
    for _ in range(5000):
        if {f"{tenant}-{index}" for index, (tenant, _, _) in enumerate(mix)} <= here.ended:
            here.scheduler.check_integrity()
            return
        here.step()
    raise AssertionError("some request has not ended")


@pytest.mark.parametrize("slots", [4, 16])
@pytest.mark.parametrize("options", [{}, {"pooling": "mean"}], ids=["answers", "embeddings"])
def test_requests_one_after_the_other_do_not_wait_for_prompts_of_another_tenant_that_find_no_room(
    slots: int, options: dict[str, str]
) -> None:
    layout = MemoryLayout(
        num_pages=546, page_size=16, max_seqs=slots, max_model_len=2048, max_batch_tokens=512
    )
    here = Played(
        Scheduler(layout, TieredPolicy(VirtualTokenCounters(), VirtualTokenCounters()), sharing=True)
    )
    for i in range(24):
        here.scheduler.add(log(f"long-{i}", "loud", 2000, 1, **options))
    for i in range(24):
        here.scheduler.add(log(f"short-{i}", "quiet", 5, 16))
        assert here.until(f"short-{i}") <= 16 + 4, i
    for i in range(24):
        if f"long-{i}" not in here.ended:
            here.until(f"long-{i}")


def test_many_short_prompts_of_a_tenant_are_no_short_prompt() -> None:
    here = Played(scheduler(512, slots=64))
    here.scheduler.add(log("quiet", "quiet", 21, 400))
    for _ in range(40):
        here.step()
    for i in range(30):  # less than its share of the slots
        here.scheduler.add(log(f"loud-{i}", "loud", 20, 1))
    for _ in range(60):
        here.step()
        assert sum(row.count for row in here.planned[-1].rows) < 100
    here.until("quiet")
    assert here.ended >= {f"loud-{i}" for i in range(30)}


def full_of_pages() -> Played:
    """A tenant's four long answers hold all memory, and twelve slots are free."""
    layout = MemoryLayout(num_pages=200, page_size=16, max_seqs=16, max_model_len=2048, max_batch_tokens=512)
    here = Played(
        Scheduler(layout, TieredPolicy(VirtualTokenCounters(), VirtualTokenCounters()), sharing=True)
    )
    for i in range(4):
        here.scheduler.add(log(f"long-{i}", "loud", 700, 1200))
    for _ in range(80):
        here.step()
    assert here.scheduler.running == 4
    return here


def test_a_tenant_within_its_share_of_the_memory_does_not_wait_for_answers_that_hold_all_of_it() -> None:
    here = full_of_pages()
    here.scheduler.add(log("short", "quiet", 250, 4))
    assert here.until("short") < 12
    assert here.scheduler.running == 3 or here.scheduler.counters.preemptions == 1


def test_answers_that_grow_into_all_of_the_memory_do_not_end_up_with_a_neighbours() -> None:
    here = full_of_pages()
    here.scheduler.add(log("quiet", "quiet", 250, 300))
    seen = 0
    for _ in range(2000):
        seen += "quiet" in here.step()
        if "quiet" in here.ended:
            break
    assert "quiet" in here.ended
    assert seen <= 300 + 3, "it was computed again"


def test_memory_that_a_tenant_gave_up_does_not_go_to_and_fro() -> None:
    here = full_of_pages()
    for i in range(4):
        here.scheduler.add(log(f"other-{i}", "quiet", 700, 1200))
    for _ in range(150):
        here.step()
    given = here.scheduler.counters.preemptions
    for _ in range(60):
        here.step()
    assert here.scheduler.counters.preemptions - given <= 1, "only what has grown"


def test_the_end_of_a_long_prompt_is_in_short_steps_too() -> None:
    here = Played(scheduler(512))
    here.scheduler.add(log("talk", "quiet", 20, 1000))
    for _ in range(40):
        here.step()
    here.scheduler.add(log("long", "loud", 2000, 1))
    before = most = 0
    while "long" not in here.ended:
        here.step()
        before, most = here.prompts["long"], max(most, here.prompts["long"] - before)
    assert most <= 48, "no step is much longer than one without a prompt"
