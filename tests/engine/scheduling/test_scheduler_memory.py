"""What the scheduler does with memory: pages that prompts share, and pages that do not suffice."""

import pytest
from fake_executor import Bench, FakeExecutor, bench, make_log, solo

from personae.engine.plan import MemoryLayout
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.scheduler import Scheduler
from personae.evals.tenants.fcfs import FirstComeFirstServed


def test_a_prompt_larger_than_memory_fails_and_holds_back_nobody():
    it = bench(num_pages=4, max_model_len=100)
    small = make_log("small", range(4))
    it.add(make_log("big", range(20)), small)
    brought = it.run()
    assert "KV memory has 16" in (brought["big"].error or "")
    assert brought["small"].tokens == solo(small, 100).tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_sequence_that_outgrows_memory_alone_fails_after_its_last_token(depth):
    it = bench(num_pages=4, max_model_len=100, depth=depth)
    log = make_log("a", range(10), max_tokens=50, ignore_eos=True)
    it.add(log)
    brought = it.run()["a"]
    assert brought.finish == "error"
    assert (
        brought.tokens == solo(log, 100).tokens[:7]
    )  # 16 positions are computed, the last one samples the 17th


def test_the_first_delta_says_how_much_of_the_prompt_was_cached():
    it = bench()
    prompt = list(range(19))
    it.add(make_log("cold", prompt))
    it.run()
    it.add(make_log("warm", prompt), make_log("half", [*prompt[:10], 99, 98]))
    brought = it.run()
    assert brought["cold"].cached == 0
    assert brought["warm"].cached == 18, (
        "16 in full pages, and what the answer's page has of it: all but one token"
    )
    assert brought["half"].cached == 10, "8 in full pages, 2 copied"
    assert it.executor.copied == 2
    assert (it.scheduler.counters.prefix_queries, it.scheduler.counters.prefix_hits) == (19 + 19 + 12, 28)


def test_cached_and_cold_bring_the_same_tokens():
    it = bench()
    logs = [make_log(str(i), [*range(17), *range(50, 50 + i)], seed=i, max_tokens=12) for i in range(6)]
    for log in logs:
        it.add(log)
        brought = it.run()[log.id]
        assert brought.tokens == solo(log, 128).tokens
    assert it.scheduler.counters.prefix_hits >= 5 * 17 - 5


@pytest.mark.parametrize("difference", [{"tenant": "other"}, {"adapter": "persona"}])
def test_tenants_and_adapters_do_not_share_pages(difference):
    it = bench()
    it.add(make_log("mine", range(20)))
    it.run()
    it.add(make_log("theirs", range(20), **difference))
    it.run()
    assert it.brought["theirs"].cached == 0
    it.add(make_log("theirs again", range(20), **difference), make_log("mine again", range(20)))
    it.run()
    assert it.brought["theirs again"].cached == it.brought["mine again"].cached == 19


def test_prompt_logprobs_cover_the_whole_prompt_and_do_not_read_the_cache():
    it = bench(max_batch_tokens=8)
    it.add(make_log("first", range(20)))
    it.run()
    log = make_log("second", range(20), prompt_logprobs=1, logprobs=1)
    it.add(log)
    brought = it.run()["second"]
    assert brought.cached == 0
    assert brought.prompt_logprobs == solo(log, 128).prompt_logprobs
    assert brought.logprobs == solo(log, 128).logprobs
    assert it.scheduler.counters.prefix_queries == 20


def test_prompt_logprobs_are_told_once_although_preemption_computes_the_prompt_twice():
    it = bench(num_pages=8, max_batch_tokens=8)
    logs = [make_log("old", [1, 2, 3], max_tokens=24, ignore_eos=True)]
    logs.append(make_log("young", range(50, 64), max_tokens=10, prompt_logprobs=1, ignore_eos=True))
    it.add(*logs)
    it.run()
    assert it.scheduler.counters.preemptions
    for log in logs:
        assert it.brought[log.id].tokens == solo(log, 128).tokens
        assert it.brought[log.id].prompt_logprobs == solo(log, 128).prompt_logprobs


def test_siblings_wait_for_the_leaders_prompt_and_share_it():
    it = bench(max_batch_tokens=8, depth=1)
    prompt = list(range(20))
    it.add(
        make_log("0", prompt, seed=0, ignore_eos=True),
        *(make_log(str(i), prompt, seed=i, after="0", ignore_eos=True) for i in (1, 2, 3)),
    )
    it.step()
    it.step()
    assert (it.scheduler.running, it.scheduler.waiting) == (1, 3)
    it.step()  # the last of three chunks
    it.step()
    assert it.scheduler.running == 4
    brought = it.run()
    assert [brought[str(i)].cached for i in range(4)] == [0, 19, 19, 19], (
        "all but the token that must be computed"
    )


@pytest.mark.parametrize("moment", ["waiting", "running"])
def test_siblings_do_not_wait_for_a_leader_that_is_gone(moment):
    it = bench(max_batch_tokens=8)
    it.add(make_log("leader", range(20)), make_log("sibling", range(20), after="leader"))
    if moment == "running":
        it.step()
    it.cancel("leader")
    it.add(make_log("late", range(20), after="leader"))
    brought = it.run()
    assert brought["sibling"].tokens == brought["late"].tokens == solo(make_log("x", range(20)), 128).tokens


def test_admission_leaves_each_running_sequence_a_page_to_grow_into():
    it = bench(num_pages=6, max_seqs=4, depth=1)
    it.add(
        *(make_log(str(i), [i, i + 1, i + 2, i + 3, i + 4], max_tokens=12, ignore_eos=True) for i in range(3))
    )
    it.step()
    assert it.scheduler.running == 2, "a third would leave no page for the two to grow into"
    it.run()


def test_when_memory_ends_the_last_admitted_goes_back_and_loses_no_token():
    it = bench(num_pages=8, depth=1)
    old = make_log("old", range(4), max_tokens=20, ignore_eos=True)
    young = make_log("young", range(50, 54), max_tokens=20, ignore_eos=True)
    it.add(old, young)
    while not it.scheduler.counters.preemptions:
        it.step()
    assert it.brought["young"].tokens
    assert not it.brought["young"].ended
    assert (it.scheduler.running, it.scheduler.waiting) == (1, 1)
    it.run()
    assert it.ended == ["old", "young"]
    assert it.brought["young"].tokens == solo(young, 128).tokens
    assert it.brought["old"].tokens == solo(old, 128).tokens


def test_a_prompt_being_computed_goes_before_an_older_decode():
    it = bench(num_pages=6, max_seqs=2, max_batch_tokens=2, depth=1)
    old = make_log("old", range(4), max_tokens=20, ignore_eos=True)
    it.add(old)
    while len(it.brought["old"].tokens) < 2:
        it.step()
    young = make_log("young", range(50, 62), max_tokens=4)
    it.add(young)
    while not it.scheduler.counters.preemptions:
        it.step()
    assert not it.brought["young"].tokens
    assert it.scheduler._running.decoding[0].id == "old"
    it.run()
    assert it.brought["old"].tokens == solo(old, 128).tokens
    assert it.brought["young"].tokens == solo(young, 128).tokens


def test_a_preempted_sequence_goes_before_those_that_came_later():
    it = bench(num_pages=8, depth=2)
    it.add(*(make_log(name, [i] * 4, max_tokens=20, ignore_eos=True) for i, name in enumerate("abcd")))
    it.run()
    assert it.scheduler.counters.preemptions
    assert it.ended == ["a", "b", "c", "d"]


def test_a_failed_row_ends_its_sequence_and_leaves_nothing_of_it_in_the_cache():
    it = bench(fails=lambda log, position: "not finite" if log.id == "bad" and position == 23 else None)
    good = make_log("good", range(50, 60), max_tokens=20, ignore_eos=True)
    it.add(good, make_log("bad", range(20), max_tokens=20, ignore_eos=True))
    brought = it.run()
    assert (brought["bad"].finish, brought["bad"].error, len(brought["bad"].tokens)) == (
        "error",
        "not finite",
        3,
    )
    assert brought["good"].tokens == solo(good, 128).tokens
    it.add(make_log("again", range(20)))
    assert it.run()["again"].cached == 0


def test_a_head_that_did_not_fit_is_admitted_as_soon_as_it_does():
    it = bench(num_pages=8, max_seqs=4)
    it.add(make_log("a", range(8), max_tokens=4, ignore_eos=True))
    it.step()
    it.add(make_log("big", range(50, 78), max_tokens=2, ignore_eos=True))
    it.add(make_log("behind", [1, 2], max_tokens=2, ignore_eos=True))
    it.run()
    assert it.ended == ["a", "big", "behind"]


@pytest.mark.parametrize("policy", [FirstComeFirstServed, VirtualTokenCounters])
def test_many_sequences_over_few_pages_all_end(policy):
    layout = MemoryLayout(12, 4, 4, 40, 16)
    it = Bench(Scheduler(layout, policy()), FakeExecutor(layout), 2)
    logs = [
        make_log(str(i), range(i, i + 1 + i % 13), max_tokens=1 + i % 17, tenant=f"t{i % 5}")
        for i in range(60)
    ]
    it.add(*logs)
    it.run()
    for log in logs:
        assert it.brought[log.id].tokens == solo(log, 40).tokens


@pytest.mark.parametrize("prompt_logprobs", [None, 1])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_pages_that_two_computed_at_the_same_time_do_not_fail_the_one_that_is_left(depth, prompt_logprobs):
    it = bench(num_pages=11, max_model_len=40, depth=depth, max_batch_tokens=64)
    prompt = range(16)
    first = make_log("first", prompt, max_tokens=2, ignore_eos=True)
    long = make_log("long", prompt, max_tokens=20, ignore_eos=True, prompt_logprobs=prompt_logprobs)
    it.add(first, long)
    brought = it.run()["long"]
    alone = solo(long, 40)
    assert (brought.tokens, brought.prompt_logprobs) == (alone.tokens, alone.prompt_logprobs)
    assert brought.finish == "length"


def test_sequences_whose_memory_goes_to_other_tenants_still_end() -> None:
    """Prompt logprobs are computed anew after each preemption. One that came back before the tenant for which
    it had made room was preempted for it again, and so on for ever."""
    layout = MemoryLayout(12, 3, 5, 44, 19)
    it = Bench(Scheduler(layout, FirstComeFirstServed(), sharing=True), FakeExecutor(layout), 1)
    for number, (tokens, tenant, steps) in enumerate(
        [(17, "b", 0), (10, "b", 0), (11, "c", 0), (7, "a", 1), (4, "c", 1)]
    ):
        prompt = range(100 * number, 100 * number + tokens)
        it.add(make_log(f"{number}", prompt, tenant=tenant, prompt_logprobs=1, max_tokens=6))
        for _ in range(steps):
            it.step()
    brought = it.run(600)
    assert all(each.finish for each in brought.values())
