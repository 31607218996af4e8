from fake_executor import Bench, FakeExecutor, make_log
from hypothesis import given, settings
from hypothesis import strategies as st

from personae.engine.plan import MemoryLayout
from personae.engine.scheduling.fairness import FairnessKey, FairnessPolicy, VirtualTokenCounters
from personae.engine.scheduling.scheduler import Scheduler
from personae.evals.tenants.fcfs import FirstComeFirstServed

A = FairnessKey("a", None)
B = FairnessKey("b", None)
C = FairnessKey("c", "adapter")
MAX_INPUT, MAX_OUTPUT, SEQS = 12, 10, 3
# VTC's U with weights 1 and 2: a batch holds at most SEQS sequences of this many tokens.
BOUND = max(MAX_INPUT, 2 * SEQS * (MAX_INPUT + MAX_OUTPUT))


def test_first_come_goes_first():
    policy = FirstComeFirstServed()
    policy.offer(A, 3)
    policy.offer(B, 1)
    policy.offer(C, 2)
    order = []
    for _ in range(3):
        order.append(policy.choose())
        policy.withdraw(order[-1])
    assert order == [B, C, A]


def test_a_key_moves_when_its_first_sequence_changes():
    policy = FirstComeFirstServed()
    policy.offer(A, 1)
    policy.offer(B, 2)
    policy.offer(A, 3)
    assert policy.choose() == B


def test_the_least_served_key_goes_next():
    policy = VirtualTokenCounters()
    policy.offer(A, 1)
    policy.offer(B, 2)
    assert policy.choose() == A, "the earliest among equals"
    policy.charge(A, 10, 0)
    assert policy.choose() == B
    policy.charge(B, 0, 6)
    assert policy.choose() == A, "an output counts twice"


def test_a_key_with_twice_the_weight_gets_twice_the_service():
    policy, heavy = VirtualTokenCounters(), A._replace(weight=2.0)
    served = {heavy: 0, B: 0}
    policy.offer(heavy, 1)
    policy.offer(B, 2)
    for _ in range(300):
        key = policy.choose()
        served[key] += 1
        policy.charge(key, 1, 0)
    assert served == {heavy: 200, B: 100}


def test_idleness_earns_no_credit():
    policy = VirtualTokenCounters()
    policy.offer(A, 1)
    policy.charge(A, 1000, 0)
    policy.offer(B, 2)
    assert policy.counters()[B] == 1000
    policy.withdraw(B)
    policy.charge(A, 500, 0)
    policy.offer(B, 3)
    assert policy.counters()[B] == 1500


def test_a_key_that_comes_to_an_empty_queue_starts_where_the_last_one_left():
    policy = VirtualTokenCounters()
    policy.offer(A, 1)
    policy.withdraw(A)
    policy.charge(A, 100, 50)
    policy.offer(B, 2)
    assert policy.counters()[B] == 200


def test_a_lift_never_lowers_a_counter():
    policy = VirtualTokenCounters()
    policy.offer(A, 1)
    policy.charge(A, 500, 0)
    policy.withdraw(A)
    policy.offer(B, 2)
    policy.withdraw(B)
    policy.charge(A, 500, 0)
    policy.offer(C, 3)
    policy.offer(A, 4)
    assert policy.counters()[A] == 1000


def test_counters_of_keys_that_are_gone_do_not_pile_up():
    policy = VirtualTokenCounters()
    for i in range(1000):
        key = FairnessKey(f"tenant-{i}", None)
        policy.offer(key, i)
        assert policy.choose() == key
        policy.withdraw(key)
        policy.charge(key, 10, 10)
        policy.forget(key)
    assert len(policy.counters()) <= 2


def test_a_key_that_is_gone_but_ahead_is_remembered():
    policy = VirtualTokenCounters()
    policy.offer(A, 1)
    policy.offer(B, 2)
    policy.withdraw(A)
    policy.charge(A, 100, 0)
    policy.forget(A)
    policy.offer(A, 3)
    assert policy.choose() == B


def test_a_key_that_never_waited_can_be_forgotten():
    policy = VirtualTokenCounters()
    policy.forget(A)
    assert not policy.counters()


def test_cancelling_over_and_over_leaves_nothing_behind():
    policy = VirtualTokenCounters()
    policy.offer(A, 0)
    policy.offer(B, 1)
    policy.charge(B, 100, 0)
    for order in range(2, 5000):
        policy.offer(B, order)
    assert len(policy._heap) < 100
    assert policy.choose() == A


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["offer", "withdraw", "charge"]), st.sampled_from([A, B, C]), st.integers(0, 9)
        ),
        max_size=60,
    )
)
def test_choose_is_always_the_smallest_waiting_counter(moves: list[tuple[str, FairnessKey, int]]):
    policy = VirtualTokenCounters()
    waiting: dict[FairnessKey, int] = {}
    for order, (verb, key, amount) in enumerate(moves):
        if verb == "offer":
            waiting[key] = order
            policy.offer(key, order)
        elif verb == "withdraw" and key in waiting:
            del waiting[key]
            policy.withdraw(key)
        elif verb == "charge" and key in policy.counters():
            policy.charge(key, amount, amount)
        if waiting:
            counters = policy.counters()
            assert policy.choose() == min(waiting, key=lambda k: (counters[k], waiting[k]))


class Ledger:
    """A policy with a book of what each key was served, weighted as VTC's defaults weigh."""

    def __init__(self, policy: FairnessPolicy) -> None:
        self.policy = policy
        self.served: dict[FairnessKey, float] = {}
        self.offer, self.withdraw = policy.offer, policy.withdraw
        self.choose, self.forget, self.lead = policy.choose, policy.forget, policy.lead

    def charge(self, key: FairnessKey, input_tokens: int, output_tokens: int) -> None:
        self.served[key] = self.served.get(key, 0.0) + input_tokens + 2 * output_tokens
        self.policy.charge(key, input_tokens, output_tokens)


def widest_gap(policy: FairnessPolicy, work: dict[str, list[tuple[int, int]]], depth: int) -> float:
    """The largest difference of service of two tenants over any interval in which both have work waiting."""
    ledger = Ledger(policy)
    layout = MemoryLayout(64, 4, SEQS, 64, 16)
    bench = Bench(Scheduler(layout, ledger), FakeExecutor(layout), depth)
    waiting = {tenant: len(jobs) for tenant, jobs in work.items()}
    number = 0
    for tenant, jobs in work.items():
        for prompt, output in jobs:
            number += 1
            log = make_log(
                f"{tenant}-{number}", [number] * prompt, max_tokens=output, tenant=tenant, ignore_eos=True
            )
            bench.add(log)
    gaps = []
    while True:
        plan = bench.plan()
        for admission in plan.admissions if plan is not None else ():
            waiting[admission.log.tenant] -= 1
        if not all(waiting.values()):
            break
        gaps.append(ledger.served.get(A, 0.0) - ledger.served.get(B, 0.0))
        if len(bench.executor) >= depth or plan is None:
            bench.commit()
    while bench.step():
        pass
    return max(gaps, default=0.0) - min(gaps, default=0.0)


jobs = st.lists(st.tuples(st.integers(1, MAX_INPUT), st.integers(1, MAX_OUTPUT)), min_size=1, max_size=30)


@settings(max_examples=40)
@given(jobs, jobs, st.integers(1, 3))
def test_service_of_two_backlogged_tenants_differs_by_no_more_than_the_bound(first, second, depth):
    assert widest_gap(VirtualTokenCounters(), {"a": first, "b": second}, depth) <= 2 * BOUND


def test_a_flood_breaks_the_bound_under_first_come_first_served_and_not_under_vtc():
    work = {"a": [(12, 10)] * 60, "b": [(12, 10)] * 5}
    assert widest_gap(FirstComeFirstServed(), work, 2) > 2 * BOUND
    assert widest_gap(VirtualTokenCounters(), work, 2) <= 2 * BOUND


def test_input_is_charged_once_and_cached_tokens_are_free():
    ledger = Ledger(VirtualTokenCounters())
    layout = MemoryLayout(8, 4, 2, 64, 32)
    bench = Bench(Scheduler(layout, ledger), FakeExecutor(layout))
    bench.add(
        make_log("old", [1] * 4, max_tokens=20, tenant="a", ignore_eos=True),
        make_log("young", [2] * 4, max_tokens=20, tenant="b", ignore_eos=True),
    )
    bench.run()
    assert bench.scheduler.counters.preemptions
    assert ledger.served == {A: 4 + 2 * 20, B: 4 + 2 * 20}
    bench.add(make_log("again", [2] * 4, max_tokens=1, tenant="b", ignore_eos=True))
    bench.run()
    assert ledger.served[B] == 44 + 1 + 2


def order_of_admission(policy: FairnessPolicy, tenants: str, keep_coming: str = "") -> list[str]:
    """One slot, requests of these tenants at once, and one more of `keep_coming` whenever one has ended."""
    layout = MemoryLayout(32, 4, 1, 64, 16)
    bench = Bench(Scheduler(layout, policy), FakeExecutor(layout))
    for i, tenant in enumerate(tenants):
        bench.add(make_log(f"{tenant}{i}", [i, i, i], max_tokens=4, tenant=tenant, ignore_eos=True))
    extra = len(tenants)
    for _ in range(200):
        ended = len(bench.ended)
        if not bench.step():
            break
        if keep_coming and len(bench.ended) > ended and extra < 20:
            bench.add(
                make_log(f"{keep_coming}{extra}", [extra], max_tokens=4, tenant=keep_coming, ignore_eos=True)
            )
            extra += 1
    assert not bench.scheduler.waiting
    return bench.ended


def test_requests_end_in_order_of_arrival_under_first_come_first_served():
    assert order_of_admission(FirstComeFirstServed(), "abcab") == ["a0", "b1", "c2", "a3", "b4"]


def test_a_b_a_a_a_does_not_starve_b():
    assert order_of_admission(VirtualTokenCounters(), "abaaa").index("b1") == 1
    assert order_of_admission(VirtualTokenCounters(), "aaaab").index("b4") == 1


def test_a_stream_of_others_that_never_ends_does_not_starve_a_key():
    ended = order_of_admission(VirtualTokenCounters(), "aabb", keep_coming="a")
    assert max(ended.index("b2"), ended.index("b3")) <= 4
