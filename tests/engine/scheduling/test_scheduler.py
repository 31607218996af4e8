"""What the scheduler does, case by case; the lookahead and machine tests press harder. Of memory there is
test_scheduler_memory.py."""

import pytest
from fake_executor import bench, make_log, solo

from personae.engine.plan import Drafted, MemoryLayout, Row, StepResult
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.scheduler import Scheduler
from personae.evals.tenants.fcfs import FirstComeFirstServed


def test_a_sequence_gets_its_tokens_one_by_one_and_ends_once():
    it = bench()
    log = make_log("a", range(10), max_tokens=20)
    it.add(log)
    assert it.run()["a"].tokens == solo(log, 128).tokens


def test_eos_ends_with_stop_and_is_the_last_token():
    it = bench()
    log = make_log("a", range(10), max_tokens=100, eos=tuple(range(0, 101, 5)))
    it.add(log)
    brought = it.run()["a"]
    assert brought.finish == "stop"
    assert brought.stop_token == brought.tokens[-1]
    assert brought.stop_token % 5 == 0
    assert not any(token % 5 == 0 for token in brought.tokens[:-1])


def test_ignore_eos_drops_eos_but_not_stop_token_ids():
    it = bench()
    everything = tuple(range(101))
    it.add(
        make_log("eos", range(10), max_tokens=6, eos=everything, ignore_eos=True),
        make_log("stop", range(10), max_tokens=6, ignore_eos=True, stop_token_ids=everything),
    )
    brought = it.run()
    assert (brought["eos"].finish, len(brought["eos"].tokens)) == ("length", 6)
    assert (brought["stop"].finish, len(brought["stop"].tokens)) == ("stop", 1)


def test_nothing_stops_before_min_tokens():
    it = bench()
    it.add(make_log("a", range(10), max_tokens=9, min_tokens=5, eos=tuple(range(101))))
    brought = it.run()["a"]
    assert (brought.finish, len(brought.tokens)) == ("stop", 6)


def test_max_tokens_ends_with_length():
    it = bench()
    it.add(make_log("a", range(10), max_tokens=1, ignore_eos=True))
    brought = it.run()["a"]
    assert (brought.finish, len(brought.tokens), brought.stop_token) == ("length", 1, None)


def test_max_model_len_ends_with_length():
    it = bench(max_model_len=16)
    it.add(make_log("a", range(10), max_tokens=100, ignore_eos=True))
    brought = it.run()["a"]
    assert (brought.finish, len(brought.tokens)) == ("length", 6)


def test_a_stop_token_in_the_last_place_is_a_stop():
    it = bench()
    it.add(make_log("a", range(10), max_tokens=1, eos=tuple(range(101))))
    assert it.run()["a"].finish == "stop"


@pytest.mark.parametrize("log", [make_log("a", ()), make_log("a", range(16)), make_log("a", range(40))])
def test_what_cannot_be_served_at_all_ends_with_an_error(log):
    it = bench(max_model_len=16)
    it.add(log)
    brought = it.run()["a"]
    assert brought.finish == "error"
    assert brought.error


def test_an_id_is_taken_while_its_sequence_lives():
    it = bench()
    it.add(make_log("a", range(4)))
    with pytest.raises(ValueError, match="already exists"):
        it.scheduler.add(make_log("a", range(4)))
    it.run()
    it.add(make_log("a", range(4)))
    it.run()


def test_a_log_that_comes_back_goes_on_where_it_was():
    log = make_log("a", range(10), max_tokens=12, ignore_eos=True)
    tokens = solo(log, 128).tokens
    it = bench()
    it.add(make_log("a", range(10), max_tokens=12, ignore_eos=True, emitted=tuple(tokens[:5])))
    assert it.run()["a"].tokens == tokens[5:]


@pytest.mark.parametrize(("max_tokens", "eos", "finish"), [(2, (), "length"), (9, (8,), "stop")])
def test_a_log_that_comes_back_complete_ends_without_a_token(max_tokens, eos, finish):
    it = bench()
    it.add(make_log("a", range(3), max_tokens=max_tokens, eos=eos, emitted=(7, 8)))
    brought = it.run()["a"]
    assert (brought.finish, brought.tokens) == (finish, [])
    assert brought.stop_token == (8 if finish == "stop" else None)


def test_a_prompt_is_computed_in_chunks_beside_running_decodes():
    it = bench(max_batch_tokens=8, depth=1)
    it.add(make_log("short", range(4), max_tokens=20, ignore_eos=True))
    it.step()
    it.add(make_log("long", range(50, 70), max_tokens=2))
    counts = []
    for _ in range(3):
        plan = it.plan()
        assert plan is not None
        counts.append([row.count for row in plan.rows])
        it.commit()
    assert counts == [[1, 7], [1, 7], [1, 6]]
    it.run()


def test_decode_rows_come_first_and_every_running_prompt_gets_a_token():
    it = bench(max_seqs=4, max_batch_tokens=4, depth=1)
    for i in range(3):
        it.add(make_log(f"d{i}", [i], max_tokens=30, ignore_eos=True))
    it.step()
    it.add(make_log("prompt", range(50, 60), max_tokens=1))
    plan = it.plan()
    assert plan is not None
    assert [(row.count, row.samples) for row in plan.rows] == [(1, True)] * 3 + [(1, False)]
    it.commit()
    it.run()


def test_a_batch_smaller_than_its_slots_is_refused():
    with pytest.raises(ValueError, match="max_batch_tokens"):
        Scheduler(MemoryLayout(8, 4, 8, 32, 7), FirstComeFirstServed())
    with pytest.raises(ValueError, match="at least 1"):
        Scheduler(MemoryLayout(0, 4, 1, 32, 7), FirstComeFirstServed())


def test_a_row_that_fails_at_once_still_says_what_was_cached():
    it = bench(fails=lambda log, position: "refused")
    it.add(make_log("a", range(5)))
    assert it.run()["a"].cached == 0


def test_results_out_of_order_or_of_the_wrong_size_are_refused():
    it = bench()
    it.add(make_log("a", range(5), ignore_eos=True))
    first, second = it.plan(), it.plan()
    assert first is not None
    assert second is not None
    with pytest.raises(ValueError, match="out of order"):
        it.scheduler.commit(StepResult(second.step, ((1,),)))
    with pytest.raises(ValueError, match="2 results for 1 rows"):
        it.scheduler.commit(StepResult(first.step, ((1,), (2,))))
    with pytest.raises(ValueError, match="should have sampled"):
        it.scheduler.commit(StepResult(first.step, ((),)))


@pytest.mark.parametrize("max_tokens", [3, 9])
def test_a_position_is_planned_again_if_its_token_was_undecided_after_right_drafts(max_tokens):
    """With 3 tokens the undecided one is the answer's last, and nothing else would be planned."""
    layout = MemoryLayout(num_pages=8, page_size=4, max_seqs=1, max_model_len=32, max_batch_tokens=8)
    scheduler = Scheduler(layout, VirtualTokenCounters(), drafts=1)
    scheduler.add(make_log("a", range(5), max_tokens=max_tokens, ignore_eos=True), speculates=True)
    prompt, drafted = scheduler.plan(), scheduler.plan()
    assert prompt is not None
    assert drafted is not None
    (row,) = drafted.rows
    assert (row.start, row.count, row.drafts) == (5, 1, 1)
    scheduler.commit(StepResult(prompt.step, ((7,),)))
    # The draft 8 is right. The token after it could not be verified in time.
    (delta,) = scheduler.commit(StepResult(drafted.step, ((8,),), drafted={0: Drafted(1, 1, "ngram")}))
    assert (delta.tokens, delta.finish) == ((8,), None)
    scheduler.check_integrity()
    again = scheduler.plan()
    assert again is not None
    assert again.rows == (Row(0, 6, 1, True, drafts=min(1, max_tokens - 3)),)
    (delta,) = scheduler.commit(StepResult(again.step, ((9,),)))
    assert delta.finish == ("length" if max_tokens == 3 else None)
    scheduler.check_integrity()


def test_drafts_that_were_planned_after_a_deferred_row_take_nothing_back_from_what_is_planned_again():
    layout = MemoryLayout(num_pages=8, page_size=4, max_seqs=1, max_model_len=32, max_batch_tokens=8)
    scheduler = Scheduler(layout, VirtualTokenCounters(), drafts=2)
    scheduler.add(make_log("a", range(5), max_tokens=9, ignore_eos=True), speculates=True)
    prompt, drafted = scheduler.plan(), scheduler.plan()
    assert prompt is not None
    assert drafted is not None
    assert drafted.rows[0].drafts == 2
    for step in (prompt.step, drafted.step):
        assert scheduler.commit(StepResult(step, ((),), deferred=frozenset((0,)))) == ()
    scheduler.resume("a")
    again = scheduler.plan()
    assert again is not None
    assert (again.rows[0].start, again.rows[0].count) == (4, 1)
    (delta,) = scheduler.commit(StepResult(again.step, ((7,),)))
    assert delta.tokens == (7,)
    scheduler.check_integrity()


def test_nothing_to_do_makes_no_plan():
    it = bench()
    assert it.scheduler.plan() is None
    it.add(make_log("a", range(5), max_tokens=1))
    assert it.plan() is not None
    assert it.plan() is None, "its only token is in flight"
    it.commit()
    assert it.scheduler.in_flight == 0


def test_when_all_is_quiet_a_plan_without_rows_releases_the_last_slots():
    it = bench()
    it.add(make_log("a", range(5), max_tokens=1), make_log("b", range(5), max_tokens=1))
    it.step()
    plan = it.plan()
    assert plan is not None
    assert not plan.rows
    assert sorted(plan.releases) == [0, 1]
    it.commit()
    assert it.plan() is None
    assert not it.executor.taken


def test_stats_say_what_is_going_on():
    it = bench(max_seqs=1, depth=1)
    it.add(make_log("a", range(5), max_tokens=3, adapter="x"), make_log("b", range(5), adapter="y"))
    it.add(make_log("c", range(5)))
    it.step()
    scheduler = it.scheduler
    assert (scheduler.running, scheduler.waiting, scheduler.pages_used) == (1, 2, 2)
    assert scheduler.adapters() == ({"x"}, {"y"})
    it.run()
    assert (scheduler.running, scheduler.waiting, scheduler.pages_used) == (0, 0, 0)
