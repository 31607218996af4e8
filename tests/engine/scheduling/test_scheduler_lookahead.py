"""Rows computed in vain, pages and slots that change hands while plans are in flight.

The fake executor raises when a write lands where another sequence can read, and brings other tokens when
anything read is not what it should be.
"""

import random

import pytest
from fake_executor import Bench, FakeExecutor, make_log, solo

from personae.engine.plan import MemoryLayout, StepPlan
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.sequence import SequenceLog

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3, 5])


def bench(num_pages: int = 32, max_seqs: int = 4, depth: int = 2, **sizes: int) -> Bench:
    layout = MemoryLayout(
        num_pages, **{"page_size": 4, "max_model_len": 64, "max_batch_tokens": 32, **sizes}, max_seqs=max_seqs
    )
    return Bench(Scheduler(layout, VirtualTokenCounters()), FakeExecutor(layout), depth)


def stops_after(id: str, prompt: list[int], count: int) -> SequenceLog:
    """A log whose own `count`-th token is made a stop token."""
    tokens = solo(make_log(id, prompt, max_tokens=64, ignore_eos=True), 64).tokens
    stop = tokens[count - 1]
    assert stop not in tokens[: count - 1], "choose another prompt"
    return make_log(id, prompt, max_tokens=64, ignore_eos=True, stop_token_ids=(stop,))


@DEPTHS
def test_rows_are_planned_ahead_of_tokens_that_are_not_known(depth):
    it = bench(depth=depth)
    it.add(make_log("a", [1, 2, 3], max_tokens=20, ignore_eos=True))
    plans = [it.plan() for _ in range(depth)]
    assert all(plan is not None for plan in plans)
    assert [plan.rows[0].start for plan in plans if plan] == [0, *range(3, 2 + depth)]
    it.run()


@DEPTHS
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_nothing_is_planned_beyond_max_tokens(depth, max_tokens):
    it = bench(depth=depth)
    it.add(make_log("a", [1, 2, 3], max_tokens=max_tokens, ignore_eos=True))
    it.run()
    assert it.executor.computed == 3 + max_tokens - 1


@DEPTHS
def test_nothing_is_planned_beyond_max_model_len(depth):
    it = bench(depth=depth, max_model_len=9)
    it.add(make_log("a", [1, 2, 3], max_tokens=50, ignore_eos=True))
    it.run()
    assert it.executor.computed == 8


@DEPTHS
@pytest.mark.parametrize("count", [1, 2, 4, 5, 6])
def test_a_row_computed_after_the_stop_is_discarded(depth, count):
    """`count` puts the vain rows inside a page, at its end, and at the start of the next."""
    it = bench(depth=depth)
    log = stops_after("a", [5, 6, 7], count)
    it.add(log)
    brought = it.run()["a"]
    assert (brought.finish, len(brought.tokens)) == ("stop", count)
    assert it.executor.computed == 3 + count - 1 + (depth - 1), "each plan in flight had a row of it"


@DEPTHS
def test_late_writes_of_a_stopped_sequence_do_not_reach_who_gets_its_pages_and_slot(depth):
    """One slot, five pages: the next sequence is planned onto them while the old one has rows in flight."""
    it = bench(num_pages=5, max_seqs=1, depth=depth)
    logs = [stops_after(str(i), [i, i + 1, i + 2], 2 + i % 5) for i in range(12)]
    it.add(*logs)
    it.run()
    for log in logs:
        assert it.brought[log.id].tokens == solo(log, 64).tokens


@DEPTHS
def test_late_writes_do_not_reach_pages_that_are_copied_or_shared(depth):
    """Every prompt continues what an earlier sequence had said, up to where it stopped or nearly so."""
    it = bench(num_pages=16, max_seqs=2, depth=depth)
    logs = []
    for i in range(10):
        log = stops_after(f"{i}", [i, 3, 1], 3 + i % 4)
        said = [*log.tokens, *solo(log, 64).tokens]
        logs += [
            log,
            make_log(f"{i} again", [*said, 9], max_tokens=6),
            make_log(f"{i} cut", said[:-1], max_tokens=6),
        ]
    for log in logs:
        it.add(log)
        for _ in range(3):
            it.step()
    it.run()
    assert it.executor.copied
    for log in logs:
        assert it.brought[log.id].tokens == solo(log, 64).tokens


@DEPTHS
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_a_cancelled_sequence_is_gone_at_once_whatever_is_in_flight(depth, steps):
    it = bench(num_pages=8, max_seqs=2, depth=depth, max_batch_tokens=6)
    stays = make_log("stays", [7, 8], max_tokens=12)
    it.add(make_log("goes", range(14), max_tokens=12, ignore_eos=True), stays)
    for _ in range(steps):
        it.step()
    for _ in range(depth - len(it.executor)):
        it.plan()
    assert it.cancel("goes")
    assert not it.cancel("goes")
    next_one = make_log("next", range(50, 64), max_tokens=6)
    it.add(next_one)
    it.run()
    assert it.brought["stays"].tokens == solo(stays, 64).tokens
    assert it.brought["next"].tokens == solo(next_one, 64).tokens


@DEPTHS
def test_an_id_can_be_used_again_while_rows_of_its_first_life_are_in_flight(depth):
    it = bench(depth=depth)
    it.add(make_log("a", range(9), max_tokens=20, ignore_eos=True))
    for _ in range(depth):
        it.plan()
    assert it.cancel("a")
    second = make_log("a", range(50, 55), max_tokens=4)
    it.add(second)
    assert it.run()["a"].tokens == solo(second, 64).tokens


@DEPTHS
def test_a_preempted_sequence_keeps_the_tokens_that_were_in_flight(depth):
    """And is admitted again only when they are in its log."""
    it = bench(num_pages=8, depth=depth)
    logs = [
        make_log(name, [i] * 4, max_tokens=22, ignore_eos=True) for i, name in enumerate(("old", "young"))
    ]
    it.add(*logs)
    seen: dict[str, int] = {}
    while True:
        while len(it.executor) < depth and (plan := it.plan()) is not None:
            for admission in plan.admissions:
                emitted = len(admission.log.tokens) - admission.log.prompt_length
                assert emitted == len(it.brought[admission.log.id].tokens)
                seen[admission.log.id] = seen.get(admission.log.id, 0) + 1
        if not len(it.executor):
            break
        it.commit()
    assert it.scheduler.counters.preemptions
    assert seen["young"] == 1 + it.scheduler.counters.preemptions
    assert it.executor.computed <= 2 * 25 + it.scheduler.counters.preemptions * 25
    for log in logs:
        assert it.brought[log.id].tokens == solo(log, 64).tokens


@DEPTHS
def test_nobody_overtakes_a_preempted_sequence_on_its_way_back(depth):
    it = bench(num_pages=12, depth=depth)
    it.add(
        *(make_log(name, [i] * 16, max_tokens=22, ignore_eos=True) for i, name in enumerate(("old", "young")))
    )
    it.step()
    it.add(*(make_log(f"small {i}", [i], max_tokens=2, tenant="default", ignore_eos=True) for i in range(4)))
    order = []
    while True:
        while len(it.executor) < depth and (plan := it.plan()) is not None:
            order += [admission.log.id for admission in plan.admissions]
        if not len(it.executor):
            break
        it.commit()
    assert it.scheduler.counters.preemptions
    again = len(order) - 1 - order[::-1].index("young")
    assert all(order.index(f"small {i}") > again for i in range(4))


@pytest.mark.parametrize("depth", [2, 3])
def test_a_preempted_sequence_can_stop_by_a_token_that_was_in_flight(depth):
    """Try every place for the stop; some fall between preemption and return."""
    returned_never = 0
    for count in range(1, 16):
        it = bench(num_pages=8, depth=depth)
        log = make_log("young", [1, 9, 3, 7], max_tokens=20, ignore_eos=True)
        tokens = solo(log, 64).tokens
        if tokens[count - 1] in tokens[: count - 1]:
            continue
        log = stops_after("young", [1, 9, 3, 7], count)
        it.add(make_log("old", [2, 2, 2, 2], max_tokens=22, ignore_eos=True), log)
        admissions = 0
        while True:
            while len(it.executor) < depth and (plan := it.plan()) is not None:
                admissions += sum(a.log.id == "young" for a in plan.admissions)
            if not len(it.executor):
                break
            it.commit()
        assert it.brought["young"].tokens == tokens[:count]
        returned_never += it.scheduler.counters.preemptions == admissions == 1
    assert returned_never


def test_a_release_rides_in_front_of_the_admission_that_takes_the_slot():
    it = bench(max_seqs=1)
    it.add(stops_after("a", [1, 2, 3], 3), make_log("b", [4, 5, 6], max_tokens=2))
    plans: list[StepPlan] = []
    while True:
        while len(it.executor) < 2 and (plan := it.plan()) is not None:
            plans.append(plan)
        if not len(it.executor):
            break
        it.commit()
    (taken,) = [plan for plan in plans if plan.releases and plan.rows]
    assert taken.releases == (0,)
    assert [(a.slot, a.log.id) for a in taken.admissions] == [(0, "b")]


@pytest.mark.parametrize("seed", range(8))
def test_tokens_do_not_depend_on_chunks_order_company_memory_or_depth(seed):
    rng = random.Random(seed)
    heads = [[rng.randrange(99) for _ in range(24)] for _ in range(3)]
    logs = [
        make_log(
            str(i),
            rng.choice(heads)[: rng.randint(1, 24)] + [rng.randrange(99)] * rng.randint(0, 2),
            max_tokens=rng.randint(1, 16),
            adapter=rng.choice([None, "x", "y"]),
            tenant=rng.choice("ab"),
            seed=rng.randrange(4),
        )
        for i in range(24)
    ]
    expected = {log.id: solo(log, 48).tokens for log in logs}
    preemptions = 0
    for depth in (1, 2, 3):
        for batch in (4, 7, 64):
            for pages in (15, 24, 96):
                it = bench(num_pages=pages, max_seqs=4, depth=depth, max_batch_tokens=batch, max_model_len=48)
                rng.shuffle(logs)
                it.add(*logs)
                it.run()
                assert {id: brought.tokens for id, brought in it.brought.items()} == expected
                preemptions += it.scheduler.counters.preemptions
    assert preemptions
