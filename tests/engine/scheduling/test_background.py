import random

import pytest
from fake_executor import Bench, FakeExecutor, make_log, solo

from personae.engine.plan import MemoryLayout
from personae.engine.scheduling.background import BackgroundAllowance, TieredPolicy
from personae.engine.scheduling.fairness import FairnessKey, VirtualTokenCounters
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.scheduling.step_time import StepCost
from personae.evals.tenants.fcfs import FirstComeFirstServed

USER, BATCH = FairnessKey("a", None), FairnessKey("a", None, True)
LONG = {"max_tokens": 30, "ignore_eos": True}


def tiers(patience: int = 10**6) -> TieredPolicy:
    return TieredPolicy(FirstComeFirstServed(), FirstComeFirstServed(), patience)


def bench(
    *, seqs: int = 4, pages: int = 64, overlap: int = 2, tokens: int = 16, patience: int = 10**6
) -> Bench:
    layout = MemoryLayout(pages, 4, seqs, 64, tokens)
    return Bench(Scheduler(layout, tiers(patience), overlap), FakeExecutor(layout), 2)


def batch(id: int, length: int = 4, **changes: object):
    fields = {**LONG, **changes}
    return make_log(f"batch{id}", range(id, id + length), background=True, **fields)


def user(id: int, length: int = 4, **changes: object):
    return make_log(f"user{id}", range(40 + id, 40 + id + length), **{**LONG, "max_tokens": 5, **changes})


def rows_by_kind(it: Bench, plan) -> tuple[int, int]:
    """Tokens of the plan: of users, of batches."""
    kinds = [0, 0]
    for row in plan.rows:
        owner = next(s for s in it.scheduler._running if s.slot == row.slot)
        kinds[owner.background] += row.count
    return kinds[0], kinds[1]


def test_background_keys_have_their_turn_when_no_others_wait():
    policy = tiers()
    policy.offer(BATCH, 0)
    policy.offer(USER, 1)
    assert policy.choose() == USER
    policy.withdraw(USER)
    assert policy.choose() == BATCH


def test_a_background_key_that_got_nothing_for_long_goes_first():
    policy = tiers(patience=10)
    policy.offer(BATCH, 0)
    policy.offer(USER, 1)
    policy.charge(USER, 5, 4)
    assert policy.choose() == USER
    policy.charge(USER, 0, 1)
    assert policy.choose() == BATCH
    policy.charge(BATCH, 1, 0)
    assert policy.choose() == USER, "one goes first, not all"


def test_service_counts_against_others_only_while_a_background_key_waits():
    policy = tiers(patience=10)
    policy.offer(USER, 0)
    policy.charge(USER, 100, 100)
    policy.offer(BATCH, 1)
    assert policy.choose() == USER


def test_tiers_that_come_with_the_first_background_sequence_choose_as_if_they_had_been_there():
    layout, dice = MemoryLayout(64, 4, 3, 64, 16), random.Random(3)
    policy = VirtualTokenCounters()
    always = Scheduler(layout, TieredPolicy(VirtualTokenCounters(), VirtualTokenCounters()), 2)
    later = Scheduler(layout, policy, 2, background_policy=VirtualTokenCounters())
    both = [Bench(scheduler, FakeExecutor(layout), 2) for scheduler in (always, later)]
    for number in range(90):
        for it in both:
            assert (it.scheduler._sequences.policy is policy) == (it is both[1] and number <= 40)
        logs = [user(number, tenant=dice.choice("ab"))] if dice.random() < 0.5 else []
        logs += [batch(number, tenant=dice.choice("ab"))] if number >= 40 and number % 10 == 0 else []
        for it in both:
            it.add(*logs)
            it.step()
    for it in both:
        it.run()
    assert both[0].ended == both[1].ended
    assert both[0].brought == both[1].brought


def test_the_allowance_is_small_for_a_while_after_others_were_there():
    allowance = BackgroundAllowance(512, 8, quiet=3)
    assert allowance.of(False) == 512
    assert allowance.of(True) == 8
    allowance.stepped(True)
    seen = []
    for _ in range(4):
        seen.append(allowance.of(False))
        allowance.stepped(False)
    assert seen == [8, 8, 8, 512]


def test_the_cost_of_a_row_is_learnt_in_spite_of_stalls():
    cost, rng = StepCost(), random.Random(0)
    for _ in range(600):
        rows = rng.randint(1, 9)
        stall = 0.2 if rng.random() < 0.05 else 0.0
        cost.observe(rows, 0.010 + 0.002 * rows + rng.gauss(0, 0.0005) + stall)
    assert cost.each == pytest.approx(0.002, rel=0.4)
    assert 0.012 < cost.of(1) < 0.018, "a stall counts a little, not for what it took"


def test_the_cost_follows_a_machine_that_becomes_slower():
    cost = StepCost()
    for seconds in (0.01, 0.04):
        for step in range(1000):
            cost.observe(1 + step % 4, seconds + 0.001 * (step % 4))
    assert cost.of(1) == pytest.approx(0.04, rel=0.05)


def test_steps_of_equal_size_leave_the_cost_of_a_row_to_an_assumption():
    cost = StepCost()
    for _ in range(100):
        cost.observe(4, 0.012)
    assert cost.of(4) == pytest.approx(0.012)
    assert cost.each == pytest.approx(0.001)


def test_a_row_that_costs_nothing_leaves_all_the_room():
    cost = StepCost()
    for rows in (1, 60, 1, 60):
        cost.observe(rows, 0.01)
    assert cost.room(1, 1.2) > 100


def granted(fixed: float, each: float, running: int, steps: int = 200) -> float:
    """Tokens per step, of an allowance of at most 8, on a machine where steps take so long."""
    allowance, given = BackgroundAllowance(512, 8), 0
    for step in range(1000):
        allowance.cost.observe(1 + step % 9, fixed + each * (1 + step % 9))
    for _ in range(steps):
        tokens = allowance.of(True, running)
        allowance.stepped(True, running, tokens)
        given += tokens
    return given / steps


@pytest.mark.parametrize(
    ("fixed", "each", "running", "expected"), [(8, 1, 2, 2), (1, 1, 2, 0.6), (1, 1, 20, 4.2), (100, 1, 1, 8)]
)
def test_beside_others_they_have_what_makes_a_step_a_fifth_longer(fixed, each, running, expected):
    assert granted(fixed, each, running) == pytest.approx(expected, rel=0.05)


def test_what_was_kept_for_later_is_no_more_than_a_row():
    allowance = BackgroundAllowance(512, 8)
    for step in range(1000):
        allowance.cost.observe(1 + step % 9, 1 + (1 + step % 9))
    for _ in range(100):
        allowance.stepped(True, 2, 0)
    assert allowance.of(True, 2) == 1


def test_alone_they_have_every_row():
    it = bench()
    it.add(*(batch(i) for i in range(4)))
    assert rows_by_kind(it, it.plan()) == (0, 16)


def test_beside_others_they_have_their_allowance_and_no_more():
    it = bench(seqs=4, overlap=2)
    it.add(*(batch(i, max_tokens=200) for i in range(3)))
    for _ in range(3):
        it.step()
    it.add(user(0, max_tokens=20))
    it.commit()
    for _ in range(10):
        plan = it.plan()
        users, batches = rows_by_kind(it, plan)
        assert (users > 0, batches) == (True, 2)
        it.commit()


def test_a_newcomer_gets_a_slot_at_once_although_batches_have_them_all():
    it = bench(seqs=4)
    it.add(*(batch(i) for i in range(8)))
    for _ in range(5):
        it.step()
    it.add(user(0), user(1))
    it.commit()
    plan = it.plan()
    assert {admission.log.id for admission in plan.admissions} == {"user0", "user1"}
    it.run()
    for log in (*(batch(i) for i in range(8)), user(0), user(1)):
        assert it.brought[log.id].tokens == solo(log, 64).tokens, "displaced and come back, no token lost"


def test_a_newcomer_gets_the_memory_that_batches_hold():
    it = bench(seqs=4, pages=12)
    it.add(*(batch(i, length=12, max_tokens=8) for i in range(3)))
    it.step()
    it.add(user(0, length=20))
    it.commit()
    assert [admission.log.id for admission in it.plan().admissions] == ["user0"]
    it.run()


def test_when_memory_ends_background_goes_first_whoever_came_last():
    it = bench(seqs=2, pages=8)
    it.add(user(0, length=4, max_tokens=24))
    it.step()
    it.add(batch(0, length=4, max_tokens=24))
    it.add(user(1, length=4, max_tokens=4))
    it.run()
    assert it.ended.index("user0") < it.ended.index("batch0")
    assert it.scheduler.counters.preemptions


def test_one_that_was_passed_over_for_too_long_gets_a_slot_and_keeps_it():
    it = bench(seqs=1, patience=40)
    it.add(*(user(i, length=4 + i) for i in range(12)))
    it.add(batch(0))
    it.run()
    place = it.ended.index("batch0")
    assert 2 < place < 10, "not first, not last"


def test_without_patience_it_would_have_been_last():
    it = bench(seqs=1)
    it.add(*(user(i, length=4 + i) for i in range(12)))
    it.add(batch(0))
    it.run()
    assert it.ended[-1] == "batch0"


def test_steps_beside_others_become_hardly_longer_and_batches_go_on():
    layout = MemoryLayout(512, 4, 16, 128, 64)
    times: dict[bool, list[float]] = {False: [], True: []}
    for loaded in (False, True):
        it = Bench(Scheduler(layout, tiers(), 8), FakeExecutor(layout), 1)
        if loaded:
            it.add(*(batch(i, max_tokens=100) for i in range(12)))
        for number in range(400):
            if number % 10 == 0:
                it.add(make_log(f"user{number}", range(number % 40, 48), max_tokens=20, ignore_eos=True))
            plan = it.plan()
            assert plan is not None
            took = 0.004 + 0.001 * sum(row.count for row in plan.rows)
            it.commit(took)
            if number >= 100:
                times[loaded].append(took)
        emitted = sum(len(brought.tokens) for id, brought in it.brought.items() if id.startswith("batch"))
        assert not loaded or emitted > 200
    alone, overlap = (sum(found) / len(found) for found in (times[False], times[True]))
    assert 1.05 < overlap / alone < 1.25
    assert max(times[True]) < 1.5 * max(times[False])


def test_background_sequences_go_on_where_the_others_only_wait() -> None:
    """The others may wait for the memory that these hold."""
    allowance = BackgroundAllowance(64, 4)
    for rows in (1, 2, 3) * 20:
        allowance.cost.observe(rows, 0.001 * rows)  # a row takes as long as a step
    assert allowance.of(others=True, running=3) == 0
    assert allowance.of(others=True, running=0) == 1
