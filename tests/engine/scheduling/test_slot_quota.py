"""A tenant that holds every slot gives some up; within a tenant, priority comes first and ages."""

import functools

import pytest
from fake_executor import Bench, FakeExecutor, make_log

from personae.engine.plan import MemoryLayout
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.live import PRIORITY_STEP
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.scheduling.slot_quota import RECENT_SECONDS


def bench(slots: int = 8, *, sharing: bool = True) -> Bench:
    layout = MemoryLayout(400, 4, slots, 200, 32)
    return Bench(Scheduler(layout, VirtualTokenCounters(), sharing=sharing), FakeExecutor(layout))


def flood(it: Bench, tenant: str, count: int, tokens: int = 100, weight: float = 1.0) -> None:
    for i in range(count):
        text = [ord(tenant[0]), i, 7, 9]
        log = make_log(f"{tenant}{i}", text, max_tokens=tokens, tenant=tenant, ignore_eos=True, weight=weight)
        it.add(log)


def running(it: Bench) -> dict[str, int]:
    counts: dict[str, int] = {}
    for sequence in it.scheduler._running:
        counts[sequence.key.tenant] = counts.get(sequence.key.tenant, 0) + 1
    return counts


def settle(it: Bench, steps: int = 30) -> None:
    for _ in range(steps):
        it.step()


def test_another_tenants_first_token_comes_within_three_steps_although_all_slots_are_taken() -> None:
    it = bench()
    flood(it, "loud", 50)
    settle(it)
    assert running(it) == {"loud": 8}
    flood(it, "quiet", 1)
    for _ in range(3):
        it.step()
    assert it.brought["quiet0"].tokens
    it.run()


def test_without_sharing_it_waits_for_an_answer_to_end() -> None:
    it = bench(sharing=False)
    flood(it, "loud", 50)
    settle(it)
    flood(it, "quiet", 1)
    settle(it)
    assert not it.brought["quiet0"].tokens


def test_there_is_a_quota_only_while_a_second_tenant_is_here_or_was_recently() -> None:
    it = bench()
    table, tick = it.scheduler._sequences, it.scheduler.tick
    flood(it, "loud", 9)
    settle(it, 3)
    assert table.quota is None
    flood(it, "quiet", 1, tokens=1)
    settle(it, 10)
    assert it.brought["quiet0"].finish
    for now, here in ((RECENT_SECONDS, True), (RECENT_SECONDS + 1, False)):
        tick(now)
        assert (table.quota is not None) == here
    it.run()
    for tenant, now, here in (("a", 14.0, True), ("b", 14.0, True), ("c", 50.0, False), ("d", 60.0, True)):
        tick(now)
        flood(it, tenant, 1, tokens=1)
        assert (table.quota is not None) == here, tenant
        it.run()


@pytest.mark.parametrize(
    ("weights", "slots"),
    [
        ({"a": 1.0, "b": 1.0}, {"a": 4, "b": 4}),
        ({"a": 1.0, "b": 3.0}, {"a": 2, "b": 6}),
        ({"a": 1.0, "b": 1.0, "c": 2.0}, {"a": 2, "b": 2, "c": 4}),
    ],
    ids=str,
)
def test_slots_go_by_weight_and_then_stay(weights: dict[str, float], slots: dict[str, int]) -> None:
    it = bench()
    for tenant, weight in weights.items():
        flood(it, tenant, 20, weight=weight)
        settle(it, 10)
    settle(it, 10)
    assert running(it) == slots
    given = it.scheduler.counters.preemptions
    settle(it, 20)
    assert it.scheduler.counters.preemptions == given, "nothing goes to and fro"
    it.run()


def test_more_tenants_than_slots_take_nothing_from_one_that_has_one() -> None:
    it = bench(slots=2)
    for tenant in "abcdef":
        flood(it, tenant, 2, tokens=20)
    settle(it, 6)
    assert set(running(it).values()) == {1}
    it.run()


def test_service_goes_by_weight() -> None:
    it = bench(slots=2)
    flood(it, "a", 40, tokens=10, weight=1.0)
    flood(it, "b", 40, tokens=10, weight=3.0)
    settle(it, 120)
    served = {t: sum(len(b.tokens) for id, b in it.brought.items() if id[0] == t) for t in "ab"}
    assert served["b"] == pytest.approx(3 * served["a"], rel=0.35)


def order(priorities: list[int]) -> list[str]:
    it = bench(slots=1)
    for i, priority in enumerate(priorities):
        it.add(make_log(f"{i}", [i, 1], max_tokens=2, ignore_eos=True, priority=priority))
    it.run()
    return it.ended


def test_a_lower_priority_goes_first_and_equals_in_order_of_arrival() -> None:
    assert order([0, 0, 1, -1, 0, -1]) == ["3", "5", "0", "1", "4", "2"]


def test_a_step_of_priority_is_worth_so_many_arrivals_and_no_more() -> None:
    ended = order([1] + [0] * (PRIORITY_STEP + 5))
    assert ended.index("0") == PRIORITY_STEP - 1


def test_other_tenants_arrivals_do_not_count_against_a_priority() -> None:
    it = bench(slots=1)
    log = functools.partial(make_log, max_tokens=2, ignore_eos=True)
    it.add(log("early", [1, 2], tenant="a"))
    for i in range(PRIORITY_STEP + 5):
        it.add(log(f"{i}", [i, 1], tenant="b"))
    it.add(log("urgent", [3, 2], tenant="a", priority=-1))
    it.run()
    assert it.ended.index("urgent") < it.ended.index("early")
